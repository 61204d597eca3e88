"""Start-up test of the counting interpreter: one kernel that uses every hook, and what must come of it.

A new triton may rename what the hooks use (then ``counting()`` refuses to start) or keep the name and call it no longer;
the second is found here.
"""

from __future__ import annotations

from typing import Any

from roofline.validate.counted import BUILDER_HOOKS, NEWER, counting, interpreter
from roofline.validate.rounding import HarnessError

import torch  # isort: skip
import triton  # isort: skip
import triton.language as tl  # isort: skip

SIZE = 16
NAMES = """
    add addptr advance and ashr assert assume bitcast broadcast cat descriptor_gather descriptor_load descriptor_scatter
    descriptor_store dot_scaled expand_dims extern_elementwise fp_ext fp_to_fp fp_to_si fp_to_ui fp_trunc gather
    get_num_programs get_program_id histogram iabs idiv inline_asm int_cast int_to_ptr join load lshr make_block_ptr
    make_range make_tensor_descriptor maxsi maxui minsi minui mul or print ptr_to_int reshape sdiv shl si_to_fp splat split
    srem store sub tensor_pointer_load tensor_pointer_store trans udiv ui_to_fp umulhi unsplat urem xor
    icmpEQ icmpNE icmpSLT icmpSLE icmpSGT icmpSGE icmpULT icmpULE icmpUGT icmpUGE
"""
LOOKED_AT = frozenset(NAMES.split())
"""Operations of the interpreter that need no hook: whole numbers, shapes, and those made of hooked ones."""


def unknown() -> list[str]:
    """Operations that the installed triton's interpreter has and that are neither hooked nor known to need no hook."""
    hooked = {*BUILDER_HOOKS, *(f"create_{name}" for name in NEWER)}
    found = {name for name in vars(interpreter.InterpreterBuilder) if name.startswith("create_")} - hooked
    return sorted(name.removeprefix("create_") for name in found if name.removeprefix("create_") not in LOOKED_AT)


@triton.jit
def probe(x, eighth, out, narrow, turned, total, turns, SIZE: tl.constexpr):  # noqa: D103
    rows = tl.arange(0, SIZE)
    square = rows[:, None] * SIZE + rows[None, :]
    tile = tl.load(x + square)
    product = tl.zeros((SIZE, SIZE), tl.float32)
    for _ in range(tl.load(turns)):
        product = tl.dot(tile, tile, product)
    masked = tl.load(eighth + rows, mask=rows < SIZE // 4, other=0.0).to(tl.float32)
    sums = tl.cumsum(tl.sum(product, 1) + masked, 0)
    tl.store(out + rows, (tl.exp2(sums * 0.0) + sums).to(tl.bfloat16))
    tl.store(narrow + rows, masked.to(tl.float8e4nv))
    tl.store(turned + square, -tile + tl.abs(tile))
    tl.atomic_add(total, tl.sum(tl.max(tile + tile, 1).to(tl.float32), 0))


def check() -> None:
    """Raises HarnessError with everything that is not as it must be."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SIZE, SIZE, generator=generator).to(torch.bfloat16)
    eighth = torch.randn(SIZE, generator=generator).to(torch.float8_e4m3fn)
    out, narrow = torch.zeros(SIZE, dtype=torch.bfloat16), torch.zeros(SIZE, dtype=torch.float8_e4m3fn)
    total, turned = torch.zeros(1), torch.zeros_like(x)
    with counting() as counts:
        probe[(2,)](x, eighth, out, narrow, turned, total, torch.tensor([2]), SIZE)
    wide = x.double()
    masked = torch.where(torch.arange(SIZE) < SIZE // 4, eighth.double(), 0.0)
    sums = torch.cumsum((2 * wide @ wide).sum(1) + masked, 0)
    expected: dict[str, tuple[Any, Any]] = {
        "programs": (counts.programs, 2),
        "launches": ({name: tally.launches for name, tally in counts.kernels.items()}, {"probe": 1}),
        "bytes read": (dict(counts.read), {"x": 2 * SIZE * SIZE * 2, "eighth": 2 * SIZE // 4, "turns": 2 * 8}),
        "distinct bytes read": (dict(counts.unique("read")), {"x": SIZE * SIZE * 2, "eighth": SIZE // 4, "turns": 8}),
        "bytes masked": (dict(counts.masked), {"eighth": 2 * (SIZE - SIZE // 4)}),
        "bytes written": (dict(counts.written), {"out": 2 * SIZE * 2, "narrow": 2 * SIZE, "turned": 2 * SIZE**2 * 2}),
        "bytes rewritten": (dict(counts.rewritten), {"out": SIZE * 2, "narrow": SIZE, "turned": SIZE**2 * 2}),
        "atomic bytes": (dict(counts.atomic), {"total": 2 * 4}),
        "dot FLOPs": (dict(counts.dot), {"bf16": 2 * 2 * 2 * SIZE**3}),
        "exp2": (counts.operations["exp2"], 2 * SIZE),
        "reduced": (counts.reduced, 2 * (2 * SIZE * SIZE + SIZE)),
        "scanned": (counts.scanned, 2 * SIZE),
        "bf16 sums": (bool((out.double() - (1 + sums)).abs().max() < 0.02 * sums.abs().max()), True),
        "fp8 casts": (bool((narrow.double() == masked).all()), True),
        "bf16 signs": (bool((turned.double() == torch.where(wide < 0, -2 * wide, 0.0)).all()), True),
        "operations without a hook": (unknown(), []),
        "bf16 maximum": (bool((total - 4 * wide.amax(1).sum()).abs() < 1e-3), True),
    }
    wrong = [f"{name}: {found}, not {right}" for name, (found, right) in expected.items() if found != right]
    if wrong:
        raise HarnessError(f"the counting interpreter miscounts with triton {triton.__version__}: {'; '.join(wrong)}")

"""Start-up test of the counting interpreter: one kernel that uses every hook, and what must come of it.

A new triton may rename what the hooks use (then ``counting()`` refuses to start) or keep the name and call it no longer;
the second is found here.
"""

from __future__ import annotations

from typing import Any

from roofline.validate.counted import HarnessError, counting

import torch  # isort: skip
import triton  # isort: skip
import triton.language as tl  # isort: skip

SIZE = 16


@triton.jit
def probe(x, eighth, out, narrow, total, turns, SIZE: tl.constexpr):  # noqa: D103
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
    tl.atomic_add(total, tl.sum(tl.max(tile + tile, 1).to(tl.float32), 0))


def check() -> None:
    """Raises HarnessError with everything that is not as it must be."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SIZE, SIZE, generator=generator).to(torch.bfloat16)
    eighth = torch.randn(SIZE, generator=generator).to(torch.float8_e4m3fn)
    out, narrow = torch.zeros(SIZE, dtype=torch.bfloat16), torch.zeros(SIZE, dtype=torch.float8_e4m3fn)
    total = torch.zeros(1)
    with counting() as counts:
        probe[(2,)](x, eighth, out, narrow, total, torch.tensor([2]), SIZE)
    wide = x.double()
    masked = torch.where(torch.arange(SIZE) < SIZE // 4, eighth.double(), 0.0)
    sums = torch.cumsum((2 * wide @ wide).sum(1) + masked, 0)
    expected: dict[str, tuple[Any, Any]] = {
        "programs": (counts.programs, 2),
        "launches": ({name: tally.launches for name, tally in counts.kernels.items()}, {"probe": 1}),
        "bytes read": (dict(counts.read), {"x": 2 * SIZE * SIZE * 2, "eighth": 2 * SIZE // 4, "turns": 2 * 8}),
        "distinct bytes read": (dict(counts.unique("read")), {"x": SIZE * SIZE * 2, "eighth": SIZE // 4, "turns": 8}),
        "bytes masked": (dict(counts.masked), {"eighth": 2 * (SIZE - SIZE // 4)}),
        "bytes written": (dict(counts.written), {"out": 2 * SIZE * 2, "narrow": 2 * SIZE}),
        "bytes rewritten": (dict(counts.rewritten), {"out": SIZE * 2, "narrow": SIZE}),
        "atomic bytes": (dict(counts.atomic), {"total": 2 * 4}),
        "dot FLOPs": (dict(counts.dot), {"bf16": 2 * 2 * 2 * SIZE**3}),
        "exp2": (counts.operations["exp2"], 2 * SIZE),
        "reduced": (counts.reduced, 2 * (2 * SIZE * SIZE + SIZE)),
        "scanned": (counts.scanned, 2 * SIZE),
        "bf16 sums": (bool((out.double() - (1 + sums)).abs().max() < 0.02 * sums.abs().max()), True),
        "fp8 casts": (bool((narrow.double() == masked).all()), True),
        "bf16 maximum": (bool((total - 4 * wide.amax(1).sum()).abs() < 1e-3), True),
    }
    wrong = [f"{name}: {found}, not {right}" for name, (found, right) in expected.items() if found != right]
    if wrong:
        raise HarnessError(f"the counting interpreter miscounts with triton {triton.__version__}: {'; '.join(wrong)}")

"""A host function refuses what its kernel would read wrongly, and names it; it never returns a plausible wrong number."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

pytest.importorskip("triton")

import torch
from triton.runtime import interpreter

from roofline.errors import InputError
from roofline.kernels import arguments, paged_cache
from roofline.kernels.flash_attention import Tiles as Blocks
from roofline.kernels.flash_attention import flash_attention
from roofline.kernels.flash_decoding import Decode, flash_decoding
from roofline.kernels.flash_decoding import inputs as decode_inputs
from roofline.kernels.gated_mlp import gate_up
from roofline.kernels.gemm import gemm
from roofline.kernels.grouped_gemm import grouped_gemm
from roofline.kernels.masks import attention, visible
from roofline.kernels.parts import Parts
from roofline.kernels.registry import load_all
from roofline.kernels.rmsnorm import rmsnorm
from roofline.kernels.sampling import sample
from roofline.kernels.spec import Case, Spec, Tensors
from roofline.kernels.speculative import chain, generate, verify
from roofline.kernels.tiling import Tiles
from roofline.validate.counted import counting

SPECS = load_all()
BLOCKS = Blocks(16, 16)


def smallest(spec: Spec) -> Iterator[Case]:
    """Of each set of arguments that cases of a kernel give, the case that comes first."""
    found = {}
    for case in spec.cases:
        tensors = spec.inputs(case, "meta")
        found.setdefault(tuple(name for name, value in tensors.items() if torch.is_tensor(value)), case)
    return iter(found.values())


POINTS = [
    pytest.param(spec, case, name, id=f"{spec.name}-{case.name}-{name}")
    for spec in SPECS
    for case in smallest(spec)
    for name, value in spec.inputs(case, "meta").items()
    if torch.is_tensor(value) and value.numel() > 1
]


def integers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def fresh(spec: Spec, case: Case) -> Tensors:
    return spec.inputs(case, "cpu")


SEVERAL = ("moe_permute", "hyper_connections")
"""Kernels with several host functions, each of which reads what the one before it wrote."""


class Launched(Exception):
    """A kernel was about to run."""


def refusal(spec: Spec, case: Case, tensors: Tensors) -> str:
    """The argument that a host function refuses, "" where it takes them all; the kernel of a single one is not run."""

    def stopped(*_: object, **__: object) -> None:
        raise Launched

    with counting(), pytest.MonkeyPatch.context() as patch:
        if spec.name not in SEVERAL:
            patch.setattr(interpreter.GridExecutor, "__call__", stopped)
        try:
            spec.launch(case, tensors)
        except InputError as error:
            return re.split("[:.]", str(error))[0]
        except Launched:
            pass
    return ""


def spread(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with a gap behind each."""
    wide = torch.zeros(*tensor.shape, 2, dtype=tensor.dtype)
    wide[..., 0] = tensor
    return wide[..., 0]


@pytest.mark.parametrize(("spec", "case", "name"), POINTS)
def test_an_argument_whose_elements_lie_apart_is_refused_or_read_right(spec: Spec, case: Case, name: str) -> None:
    given = {**fresh(spec, case), name: spread(fresh(spec, case)[name])}
    refused = refusal(spec, case, given)
    if not refused:
        with counting():
            right, result = spec.launch(case, fresh(spec, case)), spec.launch(case, given)
        assert all(torch.equal(result[output].double().nan_to_num(), right[output].double().nan_to_num()) for output in right)
    else:
        assert refused == name


@pytest.mark.parametrize(("spec", "case", "name"), POINTS)
def test_an_argument_of_another_type_is_refused(spec: Spec, case: Case, name: str) -> None:
    tensors = fresh(spec, case)
    other = torch.float64 if tensors[name].is_floating_point() else torch.int64
    assert refusal(spec, case, {**tensors, name: tensors[name].to(other)})


FREE_ROWS = {
    "gemm": ("a",),
    "gemm_int8": ("a",),
    "gemm_int4": ("x", "scales"),
    "gemm_fp8_block": ("a", "b"),
    "gemm_mxfp4": ("x",),
    "quantize_fp8": ("x",),
    "rmsnorm": ("x",),
    "gated_mlp": ("x",),
    "moe_router": ("logits",),
    "rotary": ("angles",),
    "csa_compress": ("angles",),
    "hca_compress": ("angles",),
    "compressed_attention": ("window_cache",),
    "paged_cache": ("pairs",),
    "causal_conv1d": ("state",),
    "mamba1_step": ("state",),
    "mamba2_step": ("state",),
    "mamba2_chunk": ("state",),
    "gated_delta_step": ("state",),
    "gated_delta_chunk": ("state",),
    "kda_step": ("state",),
    "rwkv_step": ("state",),
}
"""Arguments that may have fewer rows: of a batch, of outputs, of a table longer than what is looked up in it."""


@pytest.mark.parametrize(("spec", "case", "name"), POINTS)
def test_an_argument_that_lost_its_last_row_is_refused(spec: Spec, case: Case, name: str) -> None:
    tensors = fresh(spec, case)
    refused = refusal(spec, case, {**tensors, name: tensors[name][:-1].contiguous()})
    assert refused or name in FREE_ROWS.get(spec.name, ())


def qkv(tokens: int, N: int = 4, K: int = 2, H: int = 16) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(tokens)
    return tuple(torch.randn(tokens, heads, H, generator=generator) for heads in (N, K, K))


def test_a_scale_of_zero_is_a_scale() -> None:
    q, k, v = qkv(20)
    starts = integers(0, 20)
    with counting():
        out = flash_attention(q, k, v, starts, starts, 20, scale=0.0, tiles=BLOCKS)
        case = Decode("flat", "fp32", (9,), 4, 2, 16, page=4, parts=Parts(16, 1))
        tensors = decode_inputs(case, "cpu")
        single = flash_decoding(**tensors, scale=0.0, parts=case.parts)
    right = attention(q, k, v, visible("causal", 0, 20, 0), 0.0)
    assert torch.allclose(out.double(), right, atol=1e-6)
    values = tensors["v_cache"][tensors["table"][0].long()].flatten(0, 1)[:10].repeat_interleave(2, 1)
    assert torch.allclose(single[0, 0], values.mean(0), atol=1e-6)


@pytest.mark.parametrize("mask", ["causal", "window", "chunk", "block"])
def test_queries_before_the_first_key_get_zeros(mask: str) -> None:
    """Seven queries behind three keys: the first four stand where there is nothing."""
    q, k, v = qkv(7)
    with counting():
        out = flash_attention(q, k[:3], v[:3], integers(0, 7), integers(0, 3), 7, mask=mask, size=4, tiles=BLOCKS)
        last = flash_attention(q[4:], k[:3], v[:3], integers(0, 3), integers(0, 3), 3, mask=mask, size=4, tiles=BLOCKS)
    assert not out[:4].any()
    assert torch.allclose(out[4:], last, atol=1e-6)


@pytest.mark.parametrize("F", [1, 3])
@pytest.mark.parametrize("K", [1, 16])
def test_a_gate_of_one_column_is_a_gate(F: int, K: int) -> None:
    x, weight = torch.randn(5, K), torch.randn(2 * F, K)
    with counting():
        out = gate_up(x, weight)
    gate, up = (x @ weight.T).chunk(2, 1)
    assert torch.allclose(out, torch.nn.functional.silu(gate) * up, atol=1e-5)


def test_rows_that_lie_apart_are_read_where_a_kernel_says_so() -> None:
    wide, weight = torch.randn(6, 40), torch.randn(8, 24)
    with counting():
        assert torch.equal(gate_up(wide[:, :24], weight), gate_up(wide[:, :24].contiguous(), weight))
        assert torch.equal(gemm(wide[:, :24], weight.T), gemm(wide[:, :24].contiguous(), weight.T))


def test_queries_keys_and_values_of_one_projection_need_no_copies() -> None:
    """A fused projection gives rows of 4 + 2 + 2 heads."""
    both = torch.randn(9, 8, 16)
    q, k, v = both.split([4, 2, 2], 1)
    with counting():
        fused = flash_attention(q, k, v, integers(0, 9), integers(0, 9), 9, tiles=BLOCKS)
        apart = flash_attention(*(x.contiguous() for x in (q, k, v)), integers(0, 9), integers(0, 9), 9, tiles=BLOCKS)
    assert torch.equal(fused, apart)


def test_extreme_filters_keep_the_likeliest_token_and_infinite_logits_take_the_whole_mass() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]] * 2 + [[0.0, float("inf"), 1.0, float("nan")]])
    rest = {"temperatures": torch.ones(3), "top_k": integers(0, 0, 0), "uniform": torch.full((3,), 0.9)}
    with counting():
        tokens, logprobs = sample(logits, **rest, top_p=torch.tensor([0.0, 1.0, 1.0]), min_p=torch.tensor([0.0, 1.0, 0.0]))
    assert tokens.tolist() == [1, 1, 1]
    assert logprobs.abs().max() < 1e-6


def test_generation_keeps_its_tensors_where_the_models_are() -> None:
    """The default device is one without memory; both models answer on the CPU."""

    def model(text: list[int]) -> torch.Tensor:
        return torch.full((5,), 0.2, device="cpu")

    with counting(), torch.device("meta"):
        text, _ = generate(model, model, [1], K=2, length=3, generator=torch.Generator("cpu").manual_seed(0))
    assert len(text) == 4


class Elsewhere(torch.Tensor):
    """A tensor that says it is on a GPU."""

    device = property(lambda self: torch.device("cuda:0"))  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("x", [1.0], "x: list is no tensor"),
        ("x", torch.zeros(2, 4), "x: shape (2, 4) does not fit the other arguments; (any, 3) does"),
        ("x", torch.zeros(2, 3, dtype=torch.float64), "x: float64 is not taken here; pass bfloat16 or float16 or float32"),
        ("x", torch.zeros(2, 3).as_subclass(Elsewhere), "x: on cuda:0, and other arguments on cpu; move it there"),
        ("x", torch.zeros(3, 2).T, "x: shape (2, 3) with strides (1, 2) is a view; pass x.contiguous()"),
    ],
)
def test_a_refusal_names_the_argument_and_says_what_to_do(name: str, tensor: object, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        arguments.check(name, tensor, (None, 3), arguments.FLOATING, torch.zeros(1))  # type: ignore[arg-type]


def test_rows_of_a_slice_pass_where_rows_may_lie_apart() -> None:
    arguments.check("x", torch.zeros(4, 8)[:, :3], (None, 3), arguments.FLOATING, strides="rows")
    with pytest.raises(InputError, match="is a view"):
        arguments.check("x", torch.zeros(4, 8)[:, ::2], (None, 4), arguments.FLOATING, strides="rows")


WALKING = Tiles(32, 64, 64, persistent=True)
HALVES = (torch.zeros(64, 64).half(), torch.zeros(64, 64).half())
QKV = qkv(8)
EIGHT = integers(0, 8)
ROW = {"temperatures": torch.ones(1), "top_k": integers(0), "top_p": torch.ones(1), "min_p": torch.zeros(1)}
CACHE, QUERY = torch.zeros(4, 4, 1, 16), torch.zeros(1, 1, 2, 16)
DRAFTED = {"children": chain(1), "depth": 1, "accepting": torch.zeros(1, 2), "drawing": torch.zeros(1)}
REFUSED = {
    "a persistent matmul adds no bias": (
        lambda: gemm(*HALVES, torch.zeros(64).half(), tiles=WALKING), "tiles: persistent ones",
    ),
    "nor does it multiply fp32": (
        lambda: gemm(torch.zeros(64, 64), torch.zeros(64, 64), tiles=WALKING), "tiles: persistent ones",
    ),
    "a tile has 16 rows": (lambda: gemm(*HALVES, tiles=Tiles(8, 64, 64)), "tiles: BM=8; the sides of a tile"),
    "warps are a power of two": (lambda: gemm(*HALVES, tiles=Tiles(64, 64, 64, warps=3)), "tiles: 3 warps"),
    "a thread has 255 registers": (
        lambda: gemm(*HALVES, tiles=Tiles(256, 256, 64)),
        "tiles: BM=256, BN=256, BK=64 keeps 512 sums in each thread of 4 warps, which has 255 registers; pass smaller sides",
    ),
    "of attention as well": (
        lambda: flash_attention(*QKV, EIGHT, EIGHT, 8, tiles=Blocks(256, 256, 4)), "tiles: BM=256, BN=256 keeps",
    ),
    "and of decode": (
        lambda: flash_decoding(QUERY, CACHE, CACHE, integers(0)[None], integers(3), 3, parts=Parts(4096, 1)),
        "parts: BN=4096 keeps 514 sums",
    ),
    "a bias has a number per column": (lambda: gemm(*HALVES, torch.zeros(20)), "bias: shape (20,)"),
    "inner sizes are equal": (lambda: gemm(HALVES[0][:, :32], HALVES[1]), "b: shape (64, 64)"),
    "float64 has no tiles": (lambda: gemm(HALVES[0].double(), HALVES[1].double()), "a: float64 is not taken"),
    "a gated weight's inputs are x's": (lambda: gate_up(torch.zeros(8, 32), torch.zeros(20, 16)), "weight: shape (20, 16)"),
    "a gated weight has two halves": (lambda: gate_up(torch.zeros(8, 16), torch.zeros(21, 16)), "weight: 21 rows"),
    "a window has a size": (lambda: flash_attention(*QKV, EIGHT, EIGHT, 8, mask="window"), "size: 0 is out of range"),
    "a chunk has a size": (lambda: flash_attention(*QKV, EIGHT, EIGHT, 8, mask="chunk"), "size: 0 is out of range"),
    "a block has a size": (lambda: flash_attention(*QKV, EIGHT, EIGHT, 8, mask="block"), "size: 0 is out of range"),
    "masks are known": (lambda: flash_attention(*QKV, EIGHT, EIGHT, 8, mask="band"), "mask: unknown 'band'"),
    "the longest covers all rows": (lambda: flash_attention(*QKV, EIGHT, EIGHT, 7), "longest: 7"),
    "a head fits on the chip": (
        lambda: flash_attention(*(torch.zeros(8, 1, 512),) * 3, EIGHT, EIGHT, 8), "q: heads of 512 elements",
    ),
    "heads share evenly": (lambda: flash_attention(QKV[0][:, :3].contiguous(), *QKV[1:], EIGHT, EIGHT, 8), "q: 3 query heads"),
    "starts end with the rows": (lambda: flash_attention(*QKV, integers(0, 6), EIGHT, 8), "q_starts: [0, 6] does not cut 8"),
    "a table covers the longest": (
        lambda: flash_decoding(QUERY, CACHE, CACHE, integers(0)[None], integers(5), 5), "table: rows of 1 pages",
    ),
    "a table names pages that exist": (
        lambda: flash_decoding(QUERY, CACHE, CACHE, integers(7)[None], integers(4), 4), "table: 7 is out of range",
    ),
    "the longest is the largest length": (
        lambda: flash_decoding(QUERY, CACHE, CACHE, integers(0)[None], integers(4), 3), "longest: 3",
    ),
    "a row of a norm fits in registers": (lambda: rmsnorm(torch.zeros(1, 40000), torch.ones(40000)), "x: a row of 40000"),
    "probabilities end at one": (
        lambda: sample(torch.zeros(1, 4), **{**ROW, "min_p": torch.tensor([1.5])}, uniform=torch.zeros(1)), "min_p: 1.5 is out",
    ),
    "a drafted token is in the vocabulary": (
        lambda: verify(torch.zeros(1, 2, 8), torch.zeros(1, 2, 8), integers(0, 9)[None], **DRAFTED), "tokens: 9 is out of range",
    ),
    "copies do not depend on their order": (
        lambda: paged_cache.copy(torch.tensor([[0, 1], [1, 2]], dtype=torch.int32), CACHE, CACHE.clone()), "pairs: [[0, 1]",
    ),
    "a slot is written once": (
        lambda: paged_cache.write(CACHE[0, :2], CACHE[0, :2], integers(3, 3), CACHE, CACHE.clone()), "slots: [3, 3] names",
    ),
    "experts have their offsets": (
        lambda: grouped_gemm(torch.zeros(4, 16), torch.zeros(2, 8, 16), integers(0, 4)), "offsets: 2 of them for 2 experts",
    ),
}  # fmt: skip


@pytest.mark.parametrize("refused", REFUSED.values(), ids=REFUSED)
def test_what_no_kernel_can_do_is_refused(refused: tuple[object, str]) -> None:
    call, message = refused
    with counting(), pytest.raises(InputError, match="^" + re.escape(message)):
        call()  # type: ignore[operator]


def test_a_token_that_the_vocabulary_has_not_is_rejected_where_it_cannot_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "readable", lambda tensor: False)
    target = torch.full((1, 2, 8), 0.125)
    with counting():
        out, accepted = verify(target, target.clone(), integers(0, 9)[None], **DRAFTED)
    assert accepted.tolist() == [0]
    assert 0 <= int(out[0, 0]) < 8


def test_where_values_cannot_be_seen_the_numbers_of_rows_still_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "readable", lambda tensor: False)
    with pytest.raises(InputError, match="longest: 7 rows in each of 1 sequences are fewer than 8"):
        flash_attention(*QKV, EIGHT, EIGHT, 7)
    with pytest.raises(InputError, match="table: rows of 1 pages hold 4, and the longest sequence has 5"):
        flash_decoding(QUERY, CACHE, CACHE, integers(0)[None], integers(5), 5)

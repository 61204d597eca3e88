"""Kernels with a state of fixed size: chunks equal the recurrence token by token, wherever a sequence is cut and handed on."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import dataclasses
from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roofline.errors import InputError
from roofline.kernels import causal_conv1d as conv
from roofline.kernels import gated_delta_chunk as delta_chunk
from roofline.kernels import gated_delta_step as delta_step
from roofline.kernels import mamba1_step, mamba2_chunk, mamba2_step, rwkv_step
from roofline.kernels.gated_delta_step import Delta
from roofline.kernels.mamba2_step import Scan
from roofline.kernels.registry import load
from roofline.kernels.rwkv_step import Rwkv
from roofline.kernels.spec import Tensors
from roofline.validate.compare import compare
from roofline.validate.counted import counting

BY_TOKEN = ("x", "dt", "b", "c", "q", "k", "v", "a", "before", "after", "z", "r", "w", "u")


def part(tensors: Tensors, first: int, last: int, by_token: tuple[str, ...] = BY_TOKEN) -> Tensors:
    """The inputs of tokens first ... last - 1 of one sequence, with the state and the parameters of all."""
    chosen = {name: value[first:last] if name in by_token else value for name, value in tensors.items()}
    chosen["starts"] = torch.tensor([0, last - first], dtype=torch.int32)
    return chosen | ({"longest": last - first} if "longest" in tensors else {})


def run_parts(run, tensors: Tensors, cuts: list[int], by_token: tuple[str, ...] = BY_TOKEN) -> Tensors:
    """Outputs and last state of a sequence that is run from cut to cut, the state handed on in its slot."""
    tensors = {**tensors, "state": tensors["state"].clone()}
    with counting():
        outputs = [run(part(tensors, *span, by_token)) for span in pairwise(cuts)]
    return {"out": torch.cat(outputs), "state": tensors["state"]}


def close(mine: Tensors, other: Tensors, bound: float = 2e-5) -> None:
    for name in ("out", "state"):
        error = (mine[name].double() - other[name].double()).square().mean().sqrt()
        assert error <= bound * other[name].double().square().mean().sqrt() + 1e-12, name


LENGTHS = st.tuples(st.integers(1, 36), st.integers(0, 20), st.integers(0, 3))
"""Tokens of a first prefill, of a second one behind it, and steps of decode."""


def cuts_of(first: int, second: int, steps: int) -> list[int]:
    """Where the parts begin and end: two prefills, then single tokens."""
    prefills = [0, first, *([first + second] if second else [])]
    return [*prefills, *range(prefills[-1] + 1, prefills[-1] + steps + 1)]


@given(LENGTHS, st.integers(1, 50), st.sampled_from([16, 32]), st.integers(0, 10**6))
@settings(max_examples=10, deadline=None)
def test_chunks_of_mamba2_equal_its_steps(lengths: tuple[int, int, int], chunk: int, BT: int, seed: int) -> None:
    cuts = cuts_of(*lengths)
    case = Scan(f"random-{seed}", "fp32", (cuts[-1],), 2, 5, 6, 1)
    tensors = mamba2_step.inputs(case, "cpu")
    tile = mamba2_chunk.Tile(BT, 16, 32)

    def chunks_then_steps(given: Tensors) -> torch.Tensor:
        tokens = int(given["starts"][1])
        if tokens == 1:
            return mamba2_step.mamba2_step(**given)
        return mamba2_chunk.mamba2_chunk(**given, longest=tokens, chunk=chunk, tile=tile)

    mine = run_parts(chunks_then_steps, tensors, cuts)
    steps = run_parts(lambda given: mamba2_step.mamba2_step(**given), tensors, [0, cuts[-1]])
    close(mine, steps)


@given(LENGTHS, st.sampled_from([16, 32, 64]), st.sampled_from([16, 32]), st.integers(0, 10**6))
@settings(max_examples=8, deadline=None)
def test_chunks_of_gated_delta_net_equal_its_steps(lengths: tuple[int, int, int], chunk: int, BV: int, seed: int) -> None:
    cuts = cuts_of(*lengths)
    tensors = delta_step.inputs(Delta(f"random-{seed}", "fp32", (cuts[-1],), 1, 2, 6, 5), "cpu")

    def chunks_then_steps(given: Tensors) -> torch.Tensor:
        tokens = int(given["starts"][1])
        if tokens == 1:
            return delta_step.delta_step(**given)
        return delta_chunk.gated_delta_chunk(**given, longest=tokens, chunk=chunk, tile=delta_chunk.Tile(BV))

    mine = run_parts(chunks_then_steps, tensors, cuts)
    steps = run_parts(lambda given: delta_step.delta_step(**given), tensors, [0, cuts[-1]])
    close(mine, steps)


@given(
    st.tuples(st.integers(1, 12), st.integers(0, 9), st.integers(0, 2)),
    st.integers(2, 5),
    st.sampled_from([4, 8]),
    st.booleans(),
    st.integers(0, 10**6),
)
@settings(max_examples=10, deadline=None)
def test_convolution_of_parts_equals_token_by_token(
    lengths: tuple[int, int, int], taps: int, BT: int, gated: bool, seed: int
) -> None:
    cuts = cuts_of(*lengths)
    case = conv.Conv(f"random-{seed}", "fp32", (cuts[-1],), 9, taps, gated=gated)
    tensors, by_token = conv.inputs(case, "cpu"), ("x", "before", "after")
    mine = run_parts(lambda given: conv.causal_conv1d(**given, tile=conv.Tile(BT, 8)), tensors, cuts, by_token)
    steps = run_parts(lambda given: conv.causal_conv1d(**given), tensors, list(range(cuts[-1] + 1)), by_token)
    close(mine, steps, 1e-6)


STEPS = {
    "mamba1": (mamba1_step.mamba1_step, mamba1_step.inputs, mamba1_step.Selective("parts", "fp32", (7,), 12, 5)),
    "mamba2": (mamba2_step.mamba2_step, mamba2_step.inputs, Scan("parts", "fp32", (7,), 2, 5, 6)),
    "gated-delta": (delta_step.delta_step, delta_step.inputs, Delta("parts", "fp32", (7,), 1, 2, 6, 5)),
    "kda": (delta_step.delta_step, delta_step.inputs, Delta("parts", "fp32", (7,), 2, 2, 6, 5, by_channel=True)),
    "rwkv7": (rwkv_step.rwkv7_step, rwkv_step.inputs, Rwkv("parts", "fp32", (7,), 2, 6)),
    "rwkv4": (rwkv_step.rwkv4_step, rwkv_step.inputs, Rwkv("parts", "fp32", (7,), 2, 6, 4)),
}


@pytest.mark.parametrize("name", STEPS)
def test_several_tokens_in_one_launch_equal_as_many_launches(name: str) -> None:
    kernel, inputs, case = STEPS[name]
    tensors = inputs(case, "cpu")
    learned = {"d", "a_log", "dt_bias", "decay", "first"}
    by_token = tuple(key for key, value in tensors.items() if key not in learned | {"state", "slots", "starts"})
    together = run_parts(lambda given: kernel(**given), tensors, [0, 7], by_token)
    apart = run_parts(lambda given: kernel(**given), tensors, [0, 2, 3, 7], by_token)
    assert torch.equal(together["out"], apart["out"])
    assert torch.equal(together["state"], apart["state"])


PREFILLS = ("causal_conv1d", "mamba2_chunk", "gated_delta_chunk", "mamba1_step", "mamba2_step", "gated_delta_step", "rwkv_step")


@pytest.mark.parametrize("name", PREFILLS)
def test_a_sequence_without_new_tokens_keeps_its_state(name: str) -> None:
    spec = load(name)
    case = dataclasses.replace(next(case for case in spec.cases if case.dtype == "fp32"), lengths=(3, 0, 2))
    tensors = spec.inputs(case, "cpu")
    references, state = spec.reference(case, tensors), tensors["state"].clone()
    with counting():
        outputs = spec.launch(case, tensors)
    assert compare(spec, case, outputs, references)[1] == []
    assert torch.equal(outputs["state"][tensors["slots"][1]], state[tensors["slots"][1]])
    unused = ({0, 1, 2, 3} - set(tensors["slots"].tolist())).pop()
    assert torch.equal(outputs["state"][unused], state[unused])


@pytest.mark.parametrize("by_channel", [False, True])
def test_delta_rule_with_one_decay_for_all_channels_is_that_of_a_head(by_channel: bool) -> None:
    case = Delta("decays", "fp32", (4, 2), 2, 2, 6, 5)
    tensors = delta_step.inputs(case, "cpu")
    wide = dict(tensors, state=tensors["state"].clone())
    for name in ("a", "dt_bias"):
        wide[name] = tensors[name].unsqueeze(-1).repeat_interleave(6, -1)
    wide["a"][:, :, -1] += 1.0 if by_channel else 0.0
    with counting():
        out, out_wide = delta_step.delta_step(**tensors), delta_step.delta_step(**wide)
    assert torch.allclose(out, out_wide, atol=1e-6) is not by_channel


def test_rule_of_rwkv7_contains_that_of_gated_delta_net() -> None:
    """S = w S - (S k)(beta w k)^T + v (beta k)^T, its state transposed, when every channel decays alike."""
    case = Delta("contained", "fp32", (5, 3), 2, 2, 6, 6)
    tensors = delta_step.inputs(case, "cpu")
    key, query = (
        tensors[name] / torch.sqrt(tensors[name].square().sum(-1, keepdim=True) + 1e-6) for name in ("k", "q")
    )  # fmt: skip
    log_decay = -torch.exp(tensors["a_log"]) * torch.nn.functional.softplus(tensors["a"] + tensors["dt_bias"])
    beta = torch.sigmoid(tensors["b"])[..., None]
    w = log_decay[..., None].expand_as(key).contiguous()
    given = {"r": query * 6**-0.5, "w": w, "k": key, "v": tensors["v"], "a": beta * torch.exp(w), "u": beta * key}
    state = tensors["state"].transpose(2, 3).contiguous()
    with counting():
        out = delta_step.delta_step(**tensors)
        same = rwkv_step.rwkv7_step(**given, state=state, slots=tensors["slots"], starts=tensors["starts"])
    close({"out": same, "state": state.transpose(2, 3)}, {"out": out, "state": tensors["state"]}, 1e-6)


@pytest.mark.parametrize("name", ["mamba2_step", "mamba2_chunk", "gated_delta_step", "gated_delta_chunk"])
def test_inputs_may_be_slices_of_what_the_convolution_wrote(name: str) -> None:
    spec = load(name)
    case = next(case for case in spec.cases if case.name == "single")
    tensors = spec.inputs(case, "cpu")
    names = ("x", "b", "c") if "mamba2" in name else ("q", "k", "v")
    joined = torch.cat([tensors[one].flatten(1) for one in names], 1)
    sizes = [tensors[one][0].numel() for one in names]
    slices = {
        one: piece.unflatten(1, tensors[one].shape[1:]) for one, piece in zip(names, joined.split(sizes, 1), strict=True)
    }  # fmt: skip
    apart = {**tensors, "state": tensors["state"].clone()}
    with counting():
        assert torch.equal(spec.launch(case, {**apart, **slices})["out"], spec.launch(case, tensors)["out"])


def test_alike_keys_and_full_writes_do_not_spoil_the_inverse_of_a_chunk() -> None:
    """Every key the same and beta near 1: the powers of such a system grow to 1e18 when taken without blocks."""
    case = delta_chunk.Chunked("alike", "bf16", (64,), 1, 1, 16, 16)
    tensors = delta_chunk.inputs(case, "cpu")
    tensors["k"][:] = tensors["k"][0].clone()
    tensors["b"][:] = 6.0
    tensors["a"][:] = -8.0
    references = delta_chunk.reference(case, tensors)
    with counting():
        outputs = delta_chunk.launch(case, tensors)
    assert compare(load("gated_delta_chunk"), case, outputs, references)[1] == []


@pytest.mark.parametrize("name", ["mamba2_chunk", "gated_delta_chunk"])
@pytest.mark.parametrize("shift", [-12.0, 12.0], ids=["nothing fades", "all fades at once"])
def test_extreme_decays_neither_overflow_nor_lose_the_rest(name: str, shift: float) -> None:
    spec = load(name)
    case = next(case for case in spec.cases if case.name == "single")
    tensors = spec.inputs(case, "cpu")
    tensors["dt_bias"] += shift
    tensors["a_log"] += abs(shift) / 6
    references = spec.reference(case, tensors)
    with counting():
        outputs = spec.launch(case, tensors)
    for key, reference in references.items():
        scale = reference.abs().max() if name == "mamba2_chunk" else 1.0
        assert ((outputs[key].double() - reference).abs() <= 2e-5 * scale).all()


def test_refusals() -> None:
    tensors = conv.inputs(conv.Conv("short", "fp32", (9,), 4), "cpu")
    with pytest.raises(InputError, match="tile: 2 tokens are shorter than the state"):
        conv.causal_conv1d(**tensors, tile=conv.Tile(2, 4))
    inputs = delta_chunk.inputs(delta_chunk.Chunked("chunk", "fp32", (9,), 1, 1, 4, 4), "cpu")
    with pytest.raises(InputError, match="chunk: 48 tokens"):
        delta_chunk.gated_delta_chunk(**inputs, chunk=48)

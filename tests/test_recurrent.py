"""Fixed-state mixers: their arithmetic against small reference loops, in the one-token form and in chunks."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest

from roofline.components.chunked import ChunkedDeltaRule, ChunkedScan, Heads
from roofline.components.delta import DeltaRule, GatedDeltaNet, KimiDeltaAttention
from roofline.components.linear import Linear
from roofline.components.linear_attention import BlockDiagonal, GriffinBlock, LightningBlock, LinearUnit, ShortConvBlock
from roofline.components.mamba import LinearScan, Mamba2Block, MambaBlock, SelectiveScan
from roofline.components.recurrent import CausalConv, projections
from roofline.components.rwkv import WKV, ChannelMix, TimeMix, TokenShift
from roofline.components.rwkv7 import ChannelMix7, GeneralisedDeltaRule, Ranks, TimeMix7
from roofline.components.shared import Shared
from roofline.formats import BF16, FP32, format_named
from roofline.work import Ragged, Work


class Count:
    """Operations of a reference loop: elementwise ones, and exponentials or roots."""

    def __init__(self) -> None:
        self.vector = self.special = 0

    def number(self, value: float = 0.5) -> Counted:
        return Counted(value, self)


@dataclass
class Counted:
    """A number that counts what is done with it."""

    value: float
    count: Count

    def _operation(self, value: float) -> Counted:
        self.count.vector += 1
        return Counted(value, self.count)

    def __add__(self, other: Counted) -> Counted:
        return self._operation(self.value + other.value)

    def __sub__(self, other: Counted) -> Counted:
        return self._operation(self.value - other.value)

    def __mul__(self, other: Counted) -> Counted:
        return self._operation(self.value * other.value)

    def __truediv__(self, other: Counted) -> Counted:
        return self._operation(self.value / other.value)

    def __neg__(self) -> Counted:
        return self._operation(-self.value)

    def maximum(self, other: Counted) -> Counted:
        return self._operation(max(self.value, other.value))

    def exp(self) -> Counted:
        self.count.special += 1
        return Counted(math.exp(self.value), self.count)

    def sqrt(self) -> Counted:
        self.count.special += 1
        return Counted(math.sqrt(self.value), self.count)


def sigmoid_times(x: Counted, one: Counted) -> Counted:
    return x * (one / (one + (-x).exp()))


TOKENS = 3


def conv_loop(count: Count, channels: int, width: int) -> None:
    for _ in range(TOKENS * channels):
        total = count.number()
        for _ in range(width):
            total = total + count.number() * count.number()


def selective_loop(count: Count, inner: int, J: int) -> None:
    one = count.number(1.0)
    for _ in range(TOKENS * inner):
        dt, dtx, y = count.number(), count.number(), count.number(0.0)
        for _ in range(J):
            state, a, b, c = (count.number() for _ in range(4))
            state = (dt * a).exp() * state + dtx * b
            y = y + c * state
        sigmoid_times(count.number(), one) * y


def scan_loop(count: Count, heads: int, key_dim: int, value_dim: int) -> None:
    for _ in range(TOKENS * heads):
        decay = count.number().exp()
        for _ in range(value_dim):
            y = count.number(0.0)
            for _ in range(key_dim):
                state = decay * count.number() + count.number() * count.number()
                y = y + state * count.number()


def delta_loop(count: Count, heads: int, key_dim: int, value_dim: int, by_channel: bool) -> None:
    for _ in range(TOKENS * heads):
        decays = [count.number().exp() for _ in range(key_dim if by_channel else 1)]
        for _ in range(value_dim):
            column = [decays[row if by_channel else 0] * count.number() for row in range(key_dim)]
            recalled = count.number(0.0)
            for state in column:
                recalled = recalled + state * count.number()
            change = count.number(0.5 - recalled.value)
            column = [state + count.number() * change for state in column]
            out = count.number(0.0)
            for state in column:
                out = out + state * count.number()


def generalised_loop(count: Count, heads: int, dim: int) -> None:
    for _ in range(TOKENS * heads):
        decays = [count.number().exp() for _ in range(dim)]
        for _ in range(dim):
            row = [count.number() for _ in range(dim)]
            recalled = count.number(0.0)
            for state in row:
                recalled = recalled + state * count.number()
            value = count.number()
            row = [decay * state for decay, state in zip(decays, row, strict=True)]
            row = [state - recalled * count.number() for state in row]
            row = [state + value * count.number() for state in row]
            out = count.number(0.0)
            for state in row:
                out = out + state * count.number()


def wkv_loop(count: Count, width: int) -> None:
    for _ in range(TOKENS * width):
        key, value, bonus, decay, largest, numerator, denominator = (count.number() for _ in range(7))
        weighted = key + bonus
        top = largest.maximum(weighted)
        old, new = (largest - top).exp(), (weighted - top).exp()
        (old * numerator + new * value) / (old * denominator + new)
        faded = largest + decay
        top = faded.maximum(key)
        old, new = (faded - top).exp(), (key - top).exp()
        numerator, denominator = old * numerator + new * value, old * denominator + new


def unit_loop(count: Count, width: int) -> None:
    one, two = count.number(1.0), count.number(2.0)
    for _ in range(TOKENS * width):
        count.special += 2  # sigmoids of the two gates, whose arithmetic belongs to their matmul's epilogue
        x, gate, recurrence, rate, state = (count.number() for _ in range(5))
        log_a = count.number(-8.0) * recurrence * rate
        a, squared = log_a.exp(), (two * log_a).exp()
        state = a * state + (one - squared).sqrt() * (x * gate)


def shift_loop(count: Count, D: int, mixes: int) -> None:
    for _ in range(TOKENS * D * mixes):
        count.number() * count.number() + count.number() * count.number()


@pytest.mark.parametrize(
    ("kernel", "loop"),
    [
        (CausalConv(7, 4, activated=False), lambda c: conv_loop(c, 7, 4)),
        (SelectiveScan(6, 5), lambda c: selective_loop(c, 6, 5)),
        (LinearScan(Heads(3, 4, 5, 1)), lambda c: scan_loop(c, 3, 4, 5)),
        (DeltaRule(Heads(6, 4, 5, 2)), lambda c: delta_loop(c, 6, 4, 5, False)),
        (DeltaRule(Heads(6, 4, 5, 6), decays=4), lambda c: delta_loop(c, 6, 4, 5, True)),
        (GeneralisedDeltaRule(Heads(6, 5, 5, 6)), lambda c: generalised_loop(c, 6, 5)),
        (WKV(9), lambda c: wkv_loop(c, 9)),
        (LinearUnit(9), lambda c: unit_loop(c, 9)),
        (TokenShift(9, 3), lambda c: shift_loop(c, 9, 3)),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_elementwise_flops_equal_a_reference_loop(kernel, loop) -> None:
    count = Count()
    loop(count)
    flops = kernel.cost(Work(1, TOKENS, 10)).flops
    assert (flops["vector"], flops["special"]) == (count.vector, count.special)
    assert kernel.cost(Work(5, TOKENS, 0)).flops["vector"] == 5 * count.vector


class Machine:
    """Matrix arithmetic that counts 2 FLOP per multiply-add."""

    def __init__(self) -> None:
        self.flops = 0

    def dot(self, a: list[float], b: list[float]) -> float:
        self.flops += 2 * len(a)
        return sum(x * y for x, y in zip(a, b, strict=True))

    def add(self, target: list[float], factor: float, row: list[float]) -> None:
        self.flops += 2 * len(row)
        for index, value in enumerate(row):
            target[index] += factor * value


def rows(seed: int, count: int, width: int) -> list[list[float]]:
    source = random.Random(seed)
    return [[source.uniform(-0.5, 0.5) for _ in range(width)] for _ in range(count)]


def outer_add(machine: Machine, state: list[list[float]], key: list[float], value: list[float]) -> None:
    for index, factor in enumerate(key):
        machine.add(state[index], factor, value)


def read_state(machine: Machine, state: list[list[float]], query: list[float]) -> list[float]:
    return [machine.dot(query, [row[column] for row in state]) for column in range(len(state[0]))]


T, C, N, V, HEADS, GROUPS = 11, 4, 3, 5, 4, 2
DECAY = 0.9


def zeros() -> list[list[float]]:
    return [[0.0] * V for _ in range(N)]


def scan_in_steps(query, key, value) -> list[list[float]]:
    free, state, out = Machine(), zeros(), []
    for q, k, v in zip(query, key, value, strict=True):
        state = [[DECAY * x for x in row] for row in state]
        outer_add(free, state, k, v)
        out.append(read_state(free, state, q))
    return out


def scan_in_chunks(machine: Machine, scores_machine: Machine, query, key, value) -> list[list[float]]:
    state, out = zeros(), []
    for start in range(0, T, C):
        inside = range(start, min(start + C, T))
        for i in inside:
            row = [DECAY ** (i - start + 1) * x for x in read_state(machine, state, query[i])]
            for j in range(start, i + 1):
                score = scores_machine.dot(query[i], key[j])
                machine.add(row, score * DECAY ** (i - j), value[j])
            out.append(row)
        state = [[DECAY ** len(inside) * x for x in row] for row in state]
        for j in inside:
            outer_add(machine, state, [DECAY ** (inside[-1] - j) * x for x in key[j]], value[j])
    return out


def test_chunked_scan_computes_the_recurrence_with_the_counted_matmul_flops() -> None:
    machine, scores = Machine(), Machine()
    for head in range(HEADS):
        group = head * GROUPS // HEADS
        query, key, value = rows(group, T, N), rows(10 + group, T, N), rows(20 + head, T, V)
        own_scores = scores if head % (HEADS // GROUPS) == 0 else Machine()
        chunked = scan_in_chunks(machine, own_scores, query, key, value)
        for mine, reference in zip(chunked, scan_in_steps(query, key, value), strict=True):
            assert mine == pytest.approx(reference, rel=1e-12, abs=1e-12)
    shape = Heads(HEADS, N, V, GROUPS)
    kernel = ChunkedScan(LinearScan(shape), shape, C)
    assert kernel.cost(Work(1, T, 7)).flops["bf16"] == machine.flops + scores.flops
    assert kernel.cost(Work(3, T, 0)).flops["bf16"] == 3 * (machine.flops + scores.flops)


def delta_in_steps(query, key, value, beta) -> list[list[float]]:
    free, state, out = Machine(), zeros(), []
    for q, k, v, b in zip(query, key, value, beta, strict=True):
        state = [[DECAY * x for x in row] for row in state]
        recalled = read_state(free, state, k)
        outer_add(free, state, k, [b * (x - y) for x, y in zip(v, recalled, strict=True)])
        out.append(read_state(free, state, q))
    return out


def delta_in_chunks(machine: Machine, query, key, value, beta) -> list[list[float]]:
    state, out = zeros(), []
    for start in range(0, T, C):
        inside = range(start, min(start + C, T))
        keys_solved, values_solved = {}, {}
        for i in inside:
            keys_solved[i] = [beta[i] * DECAY ** (i - start + 1) * x for x in key[i]]
            values_solved[i] = [beta[i] * x for x in value[i]]
            for j in range(start, i):
                factor = -beta[i] * machine.dot(key[i], key[j]) * DECAY ** (i - j)
                machine.add(keys_solved[i], factor, keys_solved[j])
                machine.add(values_solved[i], factor, values_solved[j])
        new = {
            i: [v - r for v, r in zip(values_solved[i], read_state(machine, state, keys_solved[i]), strict=True)] for i in inside
        }
        for i in inside:
            row = [DECAY ** (i - start + 1) * x for x in read_state(machine, state, query[i])]
            for j in range(start, i + 1):
                machine.add(row, machine.dot(query[i], key[j]) * DECAY ** (i - j), new[j])
            out.append(row)
        state = [[DECAY ** len(inside) * x for x in row] for row in state]
        for j in inside:
            outer_add(machine, state, [DECAY ** (inside[-1] - j) * x for x in key[j]], new[j])
    return out


@pytest.mark.parametrize("by_channel", [False, True])
def test_chunked_delta_rule_computes_the_recurrence_with_the_counted_matmul_flops(by_channel: bool) -> None:
    machine = Machine()
    for head in range(HEADS):
        query, key, value = rows(head, T, N), rows(10 + head, T, N), rows(20 + head, T, V)
        beta = [abs(row[0]) for row in rows(30 + head, T, 1)]
        chunked = delta_in_chunks(machine, query, key, value, beta)
        for mine, reference in zip(chunked, delta_in_steps(query, key, value, beta), strict=True):
            assert mine == pytest.approx(reference, rel=1e-12, abs=1e-12)
    shape = Heads(HEADS, N, V, GROUPS)
    kernel = ChunkedDeltaRule(DeltaRule(shape), shape, C, by_channel=by_channel)
    assert kernel.cost(Work(1, T, 7)).flops["bf16"] == machine.flops


BLOCKS = {
    "mamba": MambaBlock(D=32, inner=64, J=8, R=4, inner_norms="learned", state_format=FP32),
    "mamba2": Mamba2Block(D=32, heads=8, head_dim=8, J=16, groups=2, chunk=8, state_format=FP32),
    "gated_delta_net": GatedDeltaNet(D=32, key_heads=2, value_heads=4, key_dim=8, value_dim=16, chunk=8, state_format=FP32),
    "kimi": KimiDeltaAttention(D=32, heads=4, head_dim=8, chunk=8),
    "lightning": LightningBlock(D=32, heads=4, head_dim=8, chunk=8),
    "short_conv": ShortConvBlock(D=32),
    "griffin": GriffinBlock(D=32, width=64, heads=4),
    "time_mix": TimeMix(D=32, width=32),
    "channel_mix": ChannelMix(D=32, F=64),
    "time_mix7": TimeMix7(D=32, head_dim=8, ranks=Ranks(3, 5, 6, 7)),
    "channel_mix7": ChannelMix7(D=32, F=64),
}
CHUNKED = ("mamba2", "gated_delta_net", "kimi", "lightning")


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("work", [Work(1, 1, 0), Work(3, 1, 100), Work(3, 17, 100)])
def test_state_is_read_and_written_once_per_sequence_and_step_in_both_forms(name: str, work: Work) -> None:
    block = BLOCKS[name]
    expected = work.B * sum(piece.bytes(work.S) for piece in block.state())
    for form in (block, block.prefill_form()):
        cost = form.cost(work)
        assert cost.read["state"] == expected
        assert cost.write["state"] == expected


@pytest.mark.parametrize("name", BLOCKS)
def test_chunked_form_changes_flops_and_nothing_else(name: str) -> None:
    block = BLOCKS[name]
    chunked = block.prefill_form()
    work = Work(2, 19, 5)
    assert (chunked is block) == (name not in CHUNKED)
    assert chunked.params() == block.params()
    assert chunked.state() == block.state()
    assert chunked.cost(work).read == block.cost(work).read
    assert chunked.cost(work).write == block.cost(work).write
    assert (chunked.cost(work).matrix_flops > block.cost(work).matrix_flops) == (name in CHUNKED)


@pytest.mark.parametrize("name", BLOCKS)
def test_state_does_not_grow_with_the_context(name: str) -> None:
    for piece in BLOCKS[name].state():
        assert piece.grows_with == "nothing"
        assert piece.bytes(0) == piece.bytes(10**6) > 0


@pytest.mark.parametrize("name", BLOCKS)
def test_matmul_flops_of_the_one_token_form_are_two_per_weight_and_token(name: str) -> None:
    block = BLOCKS[name]
    weights = sum(part.inputs * part.outputs for part in block.parts if isinstance(part, Linear))
    weights += sum(part.copies * part.blocks * part.side**2 for part in block.parts if isinstance(part, BlockDiagonal))
    assert block.cost(Work(3, 5, 7)).matrix_flops == 2 * 15 * weights


@pytest.mark.parametrize("name", CHUNKED)
def test_a_chunked_prefill_is_linear_in_whole_chunks(name: str) -> None:
    block = BLOCKS[name].prefill_form()
    one, four = (block.cost(Work(1, chunks * 8, 0)).flops for chunks in (1, 4))
    assert {unit: 4 * flops for unit, flops in one.items()} == dict(four)


@pytest.mark.parametrize("name", BLOCKS)
def test_symbols_and_arrays_read_the_same_formula(name: str) -> None:
    import numpy
    import sympy

    from roofline.symbols import symbols

    B, T, S = symbols("B T S")
    for block in (BLOCKS[name], BLOCKS[name].prefill_form()):
        symbolic = block.cost(Work(B, T, S))
        for b, t, s in ((1, 1, 0), (3, 1, 9), (2, 29, 4)):
            exact = block.cost(Work(b, t, s))
            assert (
                symbolic.map(lambda entry, at=(b, t, s): sympy.sympify(entry).subs(dict(zip((B, T, S), at, strict=True))))
                == exact
            )
            swept = block.cost(Work(numpy.array([float(b), 7.0]), numpy.array([float(t), 5.0]), numpy.array([float(s), 3.0])))
            for section, key, value in swept.entries():
                assert {(a, k): v for a, k, v in exact.entries()}[section, key] == numpy.broadcast_to(value, 2)[0]


@pytest.mark.parametrize("name", BLOCKS)
def test_a_ragged_batch_is_the_sum_of_its_groups_but_for_weights_and_launches(name: str) -> None:
    groups = (Work(2, 9, 0), Work(3, 1, 50))
    for block in (BLOCKS[name], BLOCKS[name].prefill_form()):
        together, apart = block.cost(Ragged(groups)), [block.cost(group) for group in groups]
        assert dict(together.flops) == {unit: sum(cost.flops[unit] for cost in apart) for unit in together.flops}
        assert together.read["state"] == sum(cost.read["state"] for cost in apart)
        assert together.read["weights"] == apart[0].read["weights"] == apart[1].read["weights"]
        assert together.launches == apart[0].launches


def test_fp32_state_has_the_published_intensity() -> None:
    """5/8 and 7/8 FLOP per byte: 5 and 7 FLOP per element that is read and written in four bytes."""
    shape = Heads(8, 64, 128, 1)
    for kernel, flops in ((LinearScan(shape, state_format=FP32), 5), (DeltaRule(shape, state_format=FP32), 7)):
        cost = kernel.cost(Work(4, 1, 1000))
        assert 8 * cost.flops["vector"] == flops * (cost.read["state"] + cost.write["state"])


def test_verification_of_a_draft_reads_the_state_once_for_all_its_tokens() -> None:
    scan = LinearScan(Heads(8, 64, 128, 1))
    one, five = scan.cost(Work(4, 1, 1000)), scan.cost(Work(4, 5, 1000))
    assert five.flops["vector"] == 5 * one.flops["vector"]
    assert five.read["state"] == one.read["state"]


def test_projections_of_one_format_are_one_matmul_and_others_stand_apart() -> None:
    fp8 = format_named("fp8")
    widths = {"qkv": 24, "z": 8, "b": 4, "a": 4}
    fused = projections(16, widths, BF16, (), BF16)
    apart = projections(16, widths, fp8, (("b", BF16), ("a", BF16)), BF16)
    assert [(part.name, part.outputs) for part in fused] == [("qkv_z_b_a_proj", 40)]
    assert [(part.name, part.outputs, part.weight) for part in apart] == [("qkv_z_proj", 32, fp8), ("b_a_proj", 8, BF16)]


def test_shared_weights_are_read_at_every_use_and_stored_nowhere_again() -> None:
    block = BLOCKS["gated_delta_net"]
    shared = Shared(block)
    work = Work(3, 7, 11)
    assert shared.cost(work) == block.cost(work)
    assert sum((part.cost(work) for part in shared.parts[1:]), shared.parts[0].cost(work)) == block.cost(work)
    assert shared.params() == {}
    assert all(part.params() == {} for part in shared.parts)
    assert shared.state() == block.state()
    assert shared.prefill_form().cost(work) == block.prefill_form().cost(work)

"""Decode over pages equals attention over contiguous keys, whatever the pages, shared or forked; a copy comes before a write."""

from __future__ import annotations

from copy import deepcopy

import pytest

pytest.importorskip("triton")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from roofline.errors import InputError
from roofline.kernels import flash_decoding as decoding
from roofline.kernels import paged_cache
from roofline.kernels.buffers import poisoned
from roofline.kernels.flash_decoding import Decode, flash_decoding
from roofline.kernels.masks import attention, visible
from roofline.kernels.pages import PageTable
from roofline.kernels.parts import Parts, parts_for
from roofline.validate.counted import counting

PAGE, K, H = 4, 1, 16
PAGES = 24
STEPS = st.lists(st.tuples(st.sampled_from(["append", "fork", "release"]), st.integers(0, 5), st.integers(1, 6)), max_size=8)


class Serving:
    """Sequences in pages, and beside each the tokens that it must hold."""

    def __init__(self) -> None:
        self.table = PageTable(PAGES, PAGE)
        self.k_cache, self.v_cache = (torch.full((PAGES, PAGE, K, H), float("nan")) for _ in range(2))
        self.held: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.generator = torch.Generator().manual_seed(1)

    def start(self) -> int:
        sequence = self.table.start()
        self.held[sequence] = (torch.zeros(0, K, H), torch.zeros(0, K, H))
        return sequence

    def append(self, sequence: int, tokens: int) -> None:
        k, v = (torch.randn(tokens, K, H, generator=self.generator) for _ in range(2))
        slots, copies = self.table.append(sequence, tokens)
        pairs = torch.tensor(copies, dtype=torch.int32).view(-1, 2)
        paged_cache.copy(pairs, self.k_cache, self.v_cache)
        paged_cache.write(k, v, torch.tensor(slots, dtype=torch.int32), self.k_cache, self.v_cache)
        old_k, old_v = self.held[sequence]
        self.held[sequence] = (torch.cat([old_k, k]), torch.cat([old_v, v]))

    def fork(self, sequence: int) -> int:
        child = self.table.fork(sequence)
        self.held[child] = self.held[sequence]
        return child

    def decode(self, q: torch.Tensor, sequences: list[int]) -> torch.Tensor:
        lengths = [self.table.lengths[sequence] for sequence in sequences]
        table = torch.tensor(self.table.table(sequences), dtype=torch.int32)
        where = torch.tensor(lengths, dtype=torch.int32)
        return flash_decoding(q, self.k_cache, self.v_cache, table, where, max(lengths), parts=Parts(16, 2))


@settings(max_examples=12, deadline=None, derandomize=True)
@given(STEPS)
def test_decode_over_shared_and_forked_pages_equals_contiguous_attention(steps: list[tuple[str, int, int]]) -> None:
    with counting():
        serving = Serving()
        serving.append(serving.start(), 6)
        for action, which, amount in steps:
            sequences = sorted(serving.held)
            sequence = sequences[which % len(sequences)]
            needed = -(-amount // PAGE) + 1
            if action == "append" and len(serving.table.free) >= needed:
                serving.append(sequence, amount)
            elif action == "fork":
                serving.fork(sequence)
            elif action == "release" and len(sequences) > 1:
                serving.table.release(sequence)
                del serving.held[sequence]
        sequences = sorted(serving.held)
        q = torch.randn(len(sequences), 1, 2, H, generator=serving.generator)
        out = serving.decode(q, sequences)
    for index, sequence in enumerate(sequences):
        k, v = serving.held[sequence]
        right = attention(q[index], k, v, torch.ones(1, len(k), dtype=torch.bool), H**-0.5)
        assert (out[index].double() - right).abs().max() < 1e-5
    references = [page for pages in serving.table.owned.values() for page in pages]
    assert {page: references.count(page) for page in set(references)} == serving.table.references


def test_a_write_to_a_fork_copies_the_open_page_and_leaves_the_sibling_as_it_was() -> None:
    with counting() as counts:
        serving = Serving()
        parent = serving.start()
        serving.append(parent, 6)
        child = serving.fork(parent)
        assert serving.table.owned[child] == serving.table.owned[parent]
        q = torch.randn(1, 1, 2, H, generator=serving.generator)
        before = serving.decode(q, [parent])
        serving.append(child, 1)
        after = serving.decode(q, [parent])
    assert torch.equal(before, after)
    assert serving.table.owned[child][0] == serving.table.owned[parent][0]
    assert serving.table.owned[child][1] != serving.table.owned[parent][1]
    page = PAGE * K * H * 4
    assert counts.kernels["copy_kernel"].written == {"k_cache": page, "v_cache": page}


def test_a_full_last_page_is_shared_without_a_copy() -> None:
    table = PageTable(8, PAGE)
    parent = table.start()
    table.append(parent, 2 * PAGE)
    child = table.fork(parent)
    slots, copies = table.append(child, 1)
    assert copies == []
    assert slots == [2 * PAGE]
    assert table.owned[child][:2] == table.owned[parent]


def test_a_cache_without_a_free_page_says_so() -> None:
    table = PageTable(2, PAGE)
    sequence = table.start()
    table.append(sequence, 2 * PAGE)
    with pytest.raises(InputError, match="pages: 1 more tokens need 1, and 0 of 2 are free"):
        table.append(sequence, 1)


def test_a_released_sequence_leaves_shared_pages_to_their_other_holders() -> None:
    table = PageTable(4, PAGE)
    parent = table.start()
    table.append(parent, 6)
    child = table.fork(parent)
    table.release(parent)
    assert table.references == dict.fromkeys(table.owned[child], 1)
    table.release(child)
    assert len(table.free) == 4


class Retried(RuleBasedStateMachine):
    """Sequences that start, fork, grow, fail to grow, are released and grow again, beside what each must hold."""

    def __init__(self) -> None:
        super().__init__()
        self.table = PageTable(5, PAGE)
        self.cache: dict[int, object] = {}
        self.held: dict[int, list[object]] = {}

    @rule()
    def start(self) -> None:
        self.held[self.table.start()] = []

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 9))
    def fork(self, which: int) -> None:
        parent = sorted(self.held)[which % len(self.held)]
        self.held[self.table.fork(parent)] = list(self.held[parent])

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 9), tokens=st.integers(0, 9))
    def append(self, which: int, tokens: int) -> None:
        sequence = sorted(self.held)[which % len(self.held)]
        before = deepcopy(self.table)
        try:
            slots, copies = self.table.append(sequence, tokens)
        except InputError:
            assert self.table == before
            return
        for source, target in copies:
            self.cache |= {target * PAGE + at: self.cache.get(source * PAGE + at) for at in range(PAGE)}
        fresh: list[object] = [object() for _ in slots]
        assert len(slots) == tokens
        self.cache |= zip(slots, fresh, strict=True)
        self.held[sequence] = self.held[sequence] + fresh

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 9))
    def release(self, which: int) -> None:
        sequence = sorted(self.held)[which % len(self.held)]
        self.table.release(sequence)
        del self.held[sequence]

    @invariant()
    def every_sequence_reads_its_own_tokens(self) -> None:
        for sequence, tokens in self.held.items():
            slots = [page * PAGE + at for page in self.table.owned[sequence] for at in range(PAGE)]
            assert [self.cache.get(slot) for slot in slots[: len(tokens)]] == tokens
            assert self.table.lengths[sequence] == len(tokens)

    @invariant()
    def pages_are_held_as_often_as_the_table_says(self) -> None:
        held = [page for pages in self.table.owned.values() for page in pages]
        assert {page: held.count(page) for page in set(held)} == self.table.references


TestRetried = Retried.TestCase
TestRetried.settings = settings(max_examples=60, stateful_step_count=20, deadline=None, derandomize=True)


def test_an_append_that_fails_leaves_the_copy_to_the_append_that_works() -> None:
    table = PageTable(4, PAGE)
    parent, other = table.start(), table.start()
    table.append(parent, 6)
    table.append(other, 1)
    child = table.fork(parent)
    with pytest.raises(InputError, match="pages: 7 more tokens need 3, and 1 of 4 are free"):
        table.append(child, 7)
    assert table.owned[child] == table.owned[parent]
    table.release(other)
    assert table.append(child, 1) == ([2 * PAGE + 2], [(1, 2)])


def test_a_page_table_refuses_what_no_cache_can_do() -> None:
    with pytest.raises(InputError, match="page: 0; "):
        PageTable(4, 0)
    table = PageTable(4, PAGE)
    sequence = table.start()
    table.append(sequence, 3)
    with pytest.raises(InputError, match="tokens: -2 cannot be appended"):
        table.append(sequence, -2)
    assert table.lengths[sequence] == 3
    table.release(sequence)
    for call in (table.fork, table.release, lambda one: table.append(one, 1), lambda one: table.table([one])):
        with pytest.raises(InputError, match=f"sequence: {sequence} was never started"):
            call(sequence)


@pytest.mark.parametrize("splits", [2, 3, 5])
def test_parts_add_their_sums_and_weights_in_both_directions_and_nothing_else(splits: int) -> None:
    """Extra traffic of FlashDecoding over one part: 2 * splits * B N (V + 1) * 4 bytes, and queries once per part."""
    case = Decode("parts", "fp32", (70, 20), 4, 2, 32, parts=Parts(16, splits))
    tensors = decoding.inputs(case, "cpu")
    with counting() as split:
        many = decoding.launch(case, tensors)["out"]
    with counting() as whole:
        one = flash_decoding(**tensors, parts=Parts(16, 1))
    assert torch.allclose(many, one, rtol=1e-5, atol=1e-6)

    def traffic(counts: object) -> int:
        tables = ("table", "lengths")
        return sum(sum(size for name, size in side.items() if name not in tables) for side in (counts.read, counts.written))  # type: ignore[attr-defined]

    rows = 2 * 4
    queries = rows * 32 * 4
    assert traffic(split) - traffic(whole) == 2 * splits * rows * (32 + 1) * 4 + (splits - 1) * queries


@pytest.mark.parametrize("splits", [1, 2, 5])
@pytest.mark.parametrize("options", [{}, {"window": 2}, {"tree": True}], ids=["causal", "window", "tree"])
def test_an_idle_row_is_zero_and_leaves_its_neighbours_alone(splits: int, options: dict[str, int]) -> None:
    """A row that a graph left empty, one shorter than its queries, and a usual one."""
    T, lengths = 5, [0, 3, 17]
    case = Decode("idle", "fp32", (12, 12, 12), 4, 2, 16, T=T, page=4, parts=Parts(16, splits), **options)  # type: ignore[arg-type]
    tensors = decoding.inputs(case, "cpu") | {"lengths": torch.tensor(lengths, dtype=torch.int32)}
    with counting(), poisoned():
        out = decoding.launch(case, tensors)["out"]
    for index, length in enumerate(lengths):
        real = min(T, length)
        assert not out[index, : T - real].any()
        if real:
            k, v = (decoding.contiguous(tensors[f"{name}_cache"], tensors["table"][index], length) for name in "kv")
            seen = visible("window" if case.window else "causal", case.window, real, length - real).clone()
            if case.tree:
                seen[:, max(0, length - T) :] = tensors["tree"][index, T - real :, T - min(T, length) :].bool()
            right = attention(tensors["q"][index, T - real :], k, v, seen, 16**-0.5)
            assert torch.allclose(out[index, T - real :].double(), right, atol=1e-5)


def test_parts_fill_the_device_but_keep_four_blocks_each() -> None:
    from roofline.kernels.device import DEVICES

    hopper = DEVICES["sm_90"]
    assert parts_for(128, 32768, 64, hopper, 2) == 3
    assert parts_for(8, 32768, 64, hopper, 2) == 33
    assert parts_for(8, 512, 64, hopper, 2) == 2
    assert parts_for(1000, 32768, 64, hopper, 2) == 1

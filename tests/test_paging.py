"""Paging: the block arithmetic, the vLLM paper's shares, and an allocator under random operations."""

from __future__ import annotations

import json
from collections.abc import Hashable
from fractions import Fraction
from statistics import mean
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from roofline import InputError, load_model
from roofline.cli import run
from roofline.paging import (
    POLICIES,
    Lengths,
    blocks,
    contiguous_waste,
    copies_on_write,
    expected_waste,
    open_slots,
    power_of_two,
    shared_blocks,
    sharing,
    usage,
)
from roofline.serving.allocator import Allocator, OutOfBlocks
from roofline.serving.prefixes import Prefixes

SHAREGPT = Lengths(161, 338, 2048, Fraction(3, 4))
"""Mean lengths of the ShareGPT requests of arXiv 2309.06180, figure 11; their spread is ours."""


def test_waste_of_one_sequence():
    assert [open_slots(n, 16) for n in (1, 15, 16, 17, 32)] == [15, 1, 0, 15, 0]
    assert mean(open_slots(n, 16) for n in range(1000, 1016)) == Fraction(15, 2)
    assert expected_waste(500, 16) == Fraction(15, 2) / (500 + Fraction(15, 2))
    assert contiguous_waste(500, 2048) == 1 - Fraction(500, 2048)
    assert [power_of_two(n) for n in (1, 2, 3, 25, 32, 33)] == [1, 2, 4, 32, 32, 64]


def test_block_arithmetic_reads_as_symbols():
    import sympy

    length, block = sympy.symbols("length block", positive=True, integer=True)
    assert sympy.simplify(expected_waste(length, block) - (block - 1) / (2 * length + block - 1)) == 0
    assert blocks(length, block) == sympy.ceiling(length / block)


def brute(policy: str, requests: list[tuple[int, int]], longest: int, block: int) -> tuple[int, int]:
    """(slot-steps that hold tokens, slot-steps handed out), step by step."""
    held = total = 0
    for prompt, output in requests:
        region = {
            "contiguous": longest, "power-of-two": prompt + power_of_two(output), "oracle": prompt + output, "paged": 0,
        }[policy]  # fmt: skip
        for step in range(1, output + 1):
            held += prompt + step
            total += blocks(prompt + step, block) * block if policy == "paged" else power_of_two(region)
    return held, total


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 60)), min_size=1, max_size=8), st.integers(1, 20))
def test_shares_are_those_of_every_step_added_up(requests, block):
    for policy in POLICIES:
        found = usage(policy, requests, 128, block)
        held, total = brute(policy, requests, 128, block)
        assert found.tokens == Fraction(held, total)
        assert found.tokens + found.reserved + found.internal + found.external == 1
        assert found.slots == Fraction(total, sum(output for _, output in requests))


def test_shares_of_the_vllm_paper():
    """Section 1 and figure 2: 20.4 % (longest), 26.8 % (powers of two), 38.2 % (oracle) hold tokens, and 96.3 % in blocks."""
    requests = SHAREGPT.requests()
    shares = [100 * float(usage(policy, requests, 2048).tokens) for policy in POLICIES]
    assert shares == sorted(shares)
    assert shares[:3] == pytest.approx([20.4, 26.8, 38.2], abs=5.5)
    assert shares[3] > 96.3
    assert usage("oracle", requests, 2048, buddy=False).tokens > usage("oracle", requests, 2048).tokens


def test_bytes_of_the_vllm_paper():
    """OPT-13B: 800 KB a token, 1.6 GB for a request of 2,048 (section 3)."""
    per_token = load_model("opt-13b").kv_bytes_per_token
    assert per_token == 800 * 1024
    assert round(usage("contiguous", [(100, 100)], 2048).slots * per_token / 1e9, 1) == 1.7


def test_lengths_keep_their_means_and_their_cut():
    wide = Lengths(161, 338, 10**6, Fraction(1, 2)).requests()
    assert mean(p for p, _ in wide) == pytest.approx(161, rel=0.02)
    assert mean(o for _, o in wide) == pytest.approx(338, rel=0.02)
    assert Lengths(100, 28, 128, Fraction(0)).requests() == [(100, 28)]
    assert max(p + o for p, o in Lengths(500, 500, 1024, Fraction(2)).requests()) == 1024


def test_sharing_saves_the_full_blocks_of_the_prompt():
    assert shared_blocks(100, 4, 16) == 6 * 3
    assert sharing(100, 4, 20, 16) == (4 * 8, 4 * 8 - 18)
    assert [copies_on_write(prompt, 4, 16) for prompt in (100, 96)] == [3, 0]
    pool = Allocator(64)
    pool.allocate("a", 100)
    for child in "bcd":
        pool.fork("a", child)
    assert pool.used == 7
    copies = [pool.append(sequence) for sequence in "abcd"]
    assert sum(pair is not None for pair in copies) == copies_on_write(100, 4, 16)
    for sequence in "abcd":
        pool.append(sequence, 19)
    assert pool.used == sharing(100, 4, 20, 16)[1]


def test_bad_requests_and_policies_are_refused():
    for call, text in (
        (lambda: usage("best-fit", [(1, 1)], 8), "policy: 'best-fit'"),
        (lambda: usage("paged", [(8, 1)], 8), "do not fit into 8"),
        (lambda: usage("paged", [], 8), "none given"),
        (lambda: Lengths(5, 0, 8), "lengths"),
        (lambda: Lengths(1, 1, 8, Fraction(-1)), "spread"),
        (lambda: Allocator(0), "blocks: 0"),
    ):
        with pytest.raises(InputError, match=text):
            call()


def test_a_prefix_outlives_its_sequence_and_gives_way_when_blocks_run_out():
    tree, pool = Prefixes(4), Allocator(8, 4)
    prompt = list(range(16))
    assert pool.allocate("first", 18, tree.identities(prompt)) == 0
    pool.free("first")
    assert pool.available == 8
    assert pool.allocate("again", 18, tree.identities(prompt)) == 16
    assert pool.allocate("longer", 12, tree.identities([*prompt[:8], 9, 9, 9, 9])) == 8
    pool.free("again")
    pool.free("longer")
    pool.allocate("other", 20, tree.identities([7] * 20))
    assert pool.cached(tree.identities(prompt)) == 2, "the oldest ends went first, the shared beginning last"
    pool.check()


def test_the_end_of_a_prefix_gives_way_before_its_beginning():
    tree, pool = Prefixes(4), Allocator(4, 4)
    prompt = list(range(16))
    pool.allocate("first", 16, tree.identities(prompt))
    pool.free("first")
    pool.allocate("other", 8)
    assert pool.cached(tree.identities(prompt)) == 2


def test_failures_change_nothing():
    pool = Allocator(4, 4, host=2)
    pool.allocate("a", 10)
    before = (pool.used, list(pool.tables["a"].blocks), pool.tables["a"].tokens)
    for call in (lambda: pool.allocate("b", 6), lambda: pool.append("a", 8), lambda: pool.swap_out("a")):
        with pytest.raises(OutOfBlocks):
            call()
    for call in (
        lambda: pool.allocate("a", 1), lambda: pool.append("z"), lambda: pool.free("z"), lambda: pool.fork("a", "a"),
        lambda: pool.swap_in("a"), lambda: pool.append("a", 0), lambda: pool.allocate("c", 3, [1]),
    ):  # fmt: skip
        with pytest.raises(InputError):
            call()
    assert (pool.used, pool.tables["a"].blocks, pool.tables["a"].tokens) == before
    pool.check()


def test_identities_are_equal_exactly_where_prefixes_are():
    tree = Prefixes(2)
    one, two, three = (tree.identities(tokens) for tokens in ([1, 2, 3, 4], [1, 2, 9, 4, 5], [0, 2, 3, 4]))
    assert (one[0] == two[0], one[1] == two[1]) == (True, False)
    assert not set(one) & set(three), "equal blocks behind different beginnings differ"
    assert tree.known([1, 2, 3, 4, 5, 6]) == 4
    assert tree.known([2, 1]) == 0
    assert len(tree) == 5


BLOCK, TOKENS = 3, st.lists(st.integers(0, 1), min_size=0, max_size=14)


class Random(RuleBasedStateMachine):
    """Random operations on a small allocator, beside what each sequence and each block should hold."""

    @initialize(number=st.integers(3, 12), host=st.integers(0, 6))
    def start(self, number: int, host: int) -> None:
        self.pool, self.tree = Allocator(number, BLOCK, host), Prefixes(BLOCK)
        self.texts: dict[Hashable, list[int]] = {}
        self.memory: list[list[int]] = [[] for _ in range(number)]
        self.saved: dict[Hashable, list[list[int]]] = {}
        self.next = 0

    def live(self) -> list[Hashable]:
        return [name for name in self.texts if name not in self.saved]

    def write(self, name: Hashable, start: int) -> None:
        """Puts a sequence's tokens from ``start`` on into its blocks, and fails where another table reads a changed slot."""
        table, text = self.pool.tables[name], self.texts[name]
        for position in range(start, len(text)):
            block, slot = table.blocks[position // BLOCK], position % BLOCK
            assert self.pool.references[block] == 1, "a shared block is never written"
            self.memory[block][slot:] = [text[position]]

    @rule(text=TOKENS)
    def allocate(self, text: list[int]) -> None:
        name, self.next = self.next, self.next + 1
        free = self.pool.available
        try:
            hit = self.pool.allocate(name, len(text), self.tree.identities(text))
        except OutOfBlocks:
            assert self.pool.available == free
            return
        self.texts[name] = list(text)
        held = [token for block in self.pool.tables[name].blocks for token in self.memory[block]]
        assert held[:hit] == text[:hit], "a hit holds the prefix it stands for"
        self.write(name, hit)

    @precondition(lambda self: self.live())
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), min_size=1, max_size=5), named=st.booleans())
    def append(self, data: st.DataObject, more: list[int], named: bool) -> None:
        name = data.draw(st.sampled_from(self.live()))
        text = self.texts[name]
        fresh = self.tree.identities([*text, *more])[len(text) // BLOCK :] if named else []
        try:
            pair = self.pool.append(name, len(more), fresh)
        except OutOfBlocks:
            return
        if pair:
            self.memory[pair[1]] = list(self.memory[pair[0]])
        start, self.texts[name] = len(text), [*text, *more]
        self.write(name, start)

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(self.live()))
        self.pool.fork(parent, self.next)
        self.texts[self.next] = list(self.texts[parent])
        self.next += 1

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.live()))
        assert self.pool.free(name) == len(self.texts.pop(name))

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.live()))
        held = [list(self.memory[block]) for block in self.pool.tables[name].blocks]
        try:
            moved = self.pool.swap_out(name)
        except OutOfBlocks:
            return
        assert moved == len(held)
        self.saved[name] = held

    @precondition(lambda self: self.saved)
    @rule(data=st.data())
    def swap_in(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.saved, key=str)))
        try:
            self.pool.swap_in(name)
        except OutOfBlocks:
            return
        for block, held in zip(self.pool.tables[name].blocks, self.saved.pop(name), strict=True):
            self.memory[block] = held

    @invariant()
    def nothing_is_lost_doubled_or_overwritten(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        for name in self.live():
            table, text = self.pool.tables[name], self.texts[name]
            held: list[Any] = [token for block in table.blocks for token in self.memory[block]]
            assert held[: len(text)] == text

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for name in self.live():
            self.pool.free(name)
        assert self.pool.available == self.pool.number, "all blocks come back"


TestAllocator = Random.TestCase
TestAllocator.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def cli(capsys, *arguments: str) -> tuple[int, str, str]:
    code = run(["paging", *arguments])
    return code, *capsys.readouterr()


def test_command_splits_the_memory(capsys):
    code, out, _ = cli(capsys, "opt-13b", "--samples", "4", "--json")
    records = json.loads(out)
    assert code == 0
    assert [r["policy"] for r in records] == list(POLICIES)
    for r in records:
        assert sum(r[f"{part}_share"] for part in ("token", "reserved", "internal", "external")) == pytest.approx(1)
    assert records[0]["bytes_per_request"] == 2048 * 819200
    code, out, _ = cli(capsys, "--samples", "4")
    assert "4 outputs of one prompt of 161: 128 blocks alone, 98 shared" in out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--isl", "3000"), "lengths: 3000 prompt"),
        (("--spread", "x"), "spread: 'x'"),
        (("--block-size", "0"), "block-size: '0' is out of range"),
        (("--isl", "1,2"), "isl: paging answers for one value"),
    ],
)
def test_command_refuses_in_one_line(capsys, arguments, text):
    code, out, err = cli(capsys, *arguments)
    assert (code, out) == (2, "")
    assert text in err

"""Verification of drafted tokens by modified rejection sampling: a chain, or a tree of alternatives, per sequence.

From the last accepted node, each child is tried in turn. It was drawn from the node's draft distribution q; it is accepted
with probability min(1, p(x) / q(x)), and a rejection turns the target p into norm(max(p - q, 0)) for the next child. When
none is left, a token is drawn from what p has become. Every emitted token is distributed exactly as the target's own
(Leviathan et al. 2023, arXiv 2211.17192, appendix A.1; for trees Miao et al. 2024, arXiv 2305.09781, section 4.3).

After j rejections p has become max(p - c_j q, 0) / S_j, with S_j the sum of the numerator, c_0 = 0, S_0 = 1 and
c_(j+1) = c_j + S_j: two numbers stand for the whole residual, and no vector is ever stored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from roofline.components.mixing import Elementwise
from roofline.formats import FP32
from roofline.kernels import buffers
from roofline.kernels.arguments import INT32, SINGLE, check, check_indices, check_values, within
from roofline.kernels.spec import EVERYWHERE, Build, Case, Expected, Launch, Moved, Spec, Tensors, Tolerance
from roofline.kernels.types import Source
from roofline.work import Work


@triton.jit
def residual_sum(p_row, q_row, shift, V, BLOCK: tl.constexpr):
    """Sum over the vocabulary of max(p - shift q, 0)."""
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        p = tl.load(p_row + at, mask=at < V, other=0.0)
        q = tl.load(q_row + at, mask=at < V, other=0.0)
        total += tl.maximum(p - shift * q, 0.0)
    return tl.sum(total, 0)


@triton.jit
def draw(p_row, q_row, shift, goal, V, BLOCK: tl.constexpr):
    """First token at which the running sum of max(p - shift q, 0) passes the goal; q is not read where shift is 0."""
    q_end = tl.where(shift > 0, V, 0)
    running = 0.0
    passed = 0
    last = 0
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        p = tl.load(p_row + at, mask=at < V, other=0.0)
        q = tl.load(q_row + at, mask=at < q_end, other=0.0)
        weight = tl.maximum(p - shift * q, 0.0)
        sums = running + tl.cumsum(weight, 0)
        passed += tl.sum(((sums <= goal) & (at < V)).to(tl.int32), 0)
        last = tl.maximum(last, tl.max(tl.where(weight > 0, at, 0), 0))
        running += tl.sum(weight, 0)
    return tl.minimum(passed, last)


@triton.jit
def speculative_kernel(
    target, draft, tokens, children, accepting, drawing, out, accepted, V,
    NODES: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One sequence: walks down the tree of NODES nodes, at most DEPTH levels of at most WIDTH children."""
    sequence = tl.program_id(0).to(tl.int64)
    node = 0
    count = 0
    shift = tl.zeros((), tl.float32)
    sums = tl.full((), 1.0, tl.float32)
    walking = 1
    for _ in range(DEPTH):
        if walking == 1:
            row = (sequence * NODES + node) * V
            shift = tl.zeros((), tl.float32)
            sums = tl.full((), 1.0, tl.float32)
            chosen = -1
            for which in range(WIDTH):
                child = tl.load(children + node * WIDTH + which)
                if (child >= 0) & (chosen < 0):
                    token = tl.load(tokens + sequence * NODES + child)
                    known = (token >= 0) & (token < V)
                    p = tl.load(target + row + token, mask=known, other=0.0)
                    q = tl.load(draft + row + token, mask=known, other=0.0)
                    chance = tl.load(accepting + sequence * NODES + child)
                    if chance * q * sums < p - shift * q:
                        chosen = child
                        tl.store(out + sequence * (DEPTH + 1) + count, token)
                    else:
                        shift += sums
                        sums = residual_sum(target + row, draft + row, shift, V, BLOCK)
            if chosen >= 0:
                node = chosen
                count += 1
                shift = tl.zeros((), tl.float32)
                sums = tl.full((), 1.0, tl.float32)
            else:
                walking = 0
    row = (sequence * NODES + node) * V
    goal = tl.load(drawing + sequence) * sums
    tl.store(out + sequence * (DEPTH + 1) + count, draw(target + row, draft + row, shift, goal, V, BLOCK))
    for rest in range(1, DEPTH + 1):
        tl.store(out + sequence * (DEPTH + 1) + rest, -1, mask=rest > count)
    tl.store(accepted + sequence, count)


def chain(K: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Children of a chain of K drafts: int32 ``[K + 1, 1]``, node 0 being the token before them."""
    return torch.tensor([[node + 1 if node < K else -1] for node in range(K + 1)], dtype=torch.int32, device=device)


def depth_of(children: list[list[int]]) -> int:
    """Levels below node 0."""

    def below(node: int) -> int:
        return max((1 + below(child) for child in children[node] if child >= 0), default=0)

    return below(0)


def verify(
    target: torch.Tensor, draft: torch.Tensor, tokens: torch.Tensor, children: torch.Tensor, depth: int,
    accepting: torch.Tensor, drawing: torch.Tensor, block: int = 1024,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Emitted tokens ``[B, depth + 1]`` (-1 behind the last) and how many of them were drafts ``[B]``, int32.

    Args:
        target, draft: probabilities fp32 ``[B, NODES, V]``: of the target after each node, and of the draft that its
            children were drawn from (rows of leaves are never read).
        tokens: int32 ``[B, NODES]``, that of node 0 unused. children: int32 ``[NODES, WIDTH]``, -1 for none.
        depth: levels below node 0. accepting, drawing: uniform numbers below 1, ``[B, NODES]`` and ``[B]``.

    A token that the vocabulary has not is rejected. Raises InputError for arguments that do not fit each other.
    """
    check("target", target, (None, None, None), SINGLE)
    B, nodes, V = target.shape
    within("block", block, 1)
    within("depth", depth, 0)
    check("draft", draft, (B, nodes, V), SINGLE, target)
    check("tokens", tokens, (B, nodes), INT32, target)
    check_indices("tokens", tokens[:, 1:], V)
    check("children", children, (nodes, None), INT32, target)
    check_indices("children", children, nodes, least=-1)
    for name, given, shape in (("accepting", accepting, (B, nodes)), ("drawing", drawing, (B,))):
        check(name, given, shape, SINGLE, target)
        check_values(name, given, 0, 1)
    out = buffers.empty(B, depth + 1, dtype=torch.int32, device=target.device)
    accepted = buffers.empty(B, dtype=torch.int32, device=target.device)
    if B:
        speculative_kernel[(B,)](
            target, draft, tokens, children, accepting, drawing, out, accepted, V,
            NODES=nodes, WIDTH=children.shape[1], DEPTH=depth, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return out, accepted


Distribution = Callable[[list[int]], torch.Tensor]


def generate(
    target: Distribution, draft: Distribution, prompt: list[int], K: int, length: int, generator: torch.Generator
) -> tuple[list[int], int]:
    """The draft-and-verify loop: ``length`` tokens behind the prompt, and how often the target ran.

    ``target`` and ``draft`` give the next token's probabilities after a sequence. Each turn drafts K tokens one by one,
    runs the target once over all of them, and keeps what ``verify`` emits.
    """
    text, turns = list(prompt), 0
    while len(text) < len(prompt) + length:
        drafted, proposals = list(text), []
        for _ in range(K):
            proposals.append(draft(drafted))
            drafted.append(int(torch.multinomial(proposals[-1].to(generator.device), 1, generator=generator)))
        judged = torch.stack([target(drafted[: len(text) + step]) for step in range(K + 1)])
        device = judged.device
        tokens = torch.tensor([[0, *drafted[len(text) :]]], dtype=torch.int32, device=device)
        proposed = torch.stack([*(row.to(device) for row in proposals), torch.zeros_like(judged[0])])
        uniform = torch.rand(K + 2, generator=generator, device=generator.device).to(device)
        numbers = uniform[None, : K + 1], uniform[K + 1 :]
        out, accepted = verify(judged[None].float(), proposed[None].float(), tokens, chain(K, device), K, *numbers)
        text += out[0, : int(accepted) + 1].tolist()
        turns += 1
    return text[: len(prompt) + length], turns


@dataclass(frozen=True)
class Verification(Case):
    """``B`` sequences over a vocabulary of V; ``children`` of every node of the tree, empty for a leaf."""

    B: int
    V: int
    children: tuple[tuple[int, ...], ...]
    likeness: float = 0.5
    block: int = 32

    @property
    def table(self) -> list[list[int]]:
        """Children, each node's filled up with -1 to the same number."""
        width = max(len(some) for some in self.children)
        return [[*some, *[-1] * (width - len(some))] for some in self.children]


def inputs(case: Verification, device: str) -> Tensors:
    """Targets, drafts that resemble them, and a token drawn from its parent's draft at every node."""
    source, nodes, table = Source(case.name, device), len(case.children), case.table
    logits = source.normal(case.B, nodes, case.V, dtype="fp32", scale=2.0)
    noise = source.normal(case.B, nodes, case.V, dtype="fp32", scale=2.0)
    uniform = source.uniform(case.B, nodes + 1)
    tokens = torch.zeros(case.B, nodes, dtype=torch.int32, device=device)
    draft = torch.softmax(case.likeness * logits + (1 - case.likeness) * noise, 2)
    if device != "meta":
        for node, some in enumerate(case.children):
            drawn = source.uniform(case.B, max(1, len(some)))
            sums = draft[:, node].cumsum(1)
            for which, child in enumerate(some):
                tokens[:, child] = (sums < drawn[:, which, None] * sums[:, -1:]).sum(1).clamp(max=case.V - 1)
    return {
        "target": torch.softmax(logits, 2), "draft": draft, "tokens": tokens,
        "children": torch.tensor(table, dtype=torch.int32, device=device), "depth": depth_of(table),
        "accepting": uniform[:, :nodes].contiguous(), "drawing": uniform[:, nodes].contiguous(), "block": case.block,
    }  # fmt: skip


@dataclass
class Walk:
    """What the verification of one sequence did: nodes visited, (node, child) tried, node -> rejections, the last node."""

    out: list[int]
    tried: list[tuple[int, int]]
    visited: list[int]
    rejections: dict[int, int]
    last: int


def walk(case: Verification, tensors: Tensors, sequence: int) -> Walk:
    """The verification of one sequence by its definition, in float64, with the residual as a vector."""
    target, draft = (tensors[name][sequence].double() for name in ("target", "draft"))
    tokens, accepting = tensors["tokens"][sequence].tolist(), tensors["accepting"][sequence].tolist()
    seen = Walk([], [], [], {}, 0)
    residual = target[0]
    while case.children[seen.last]:
        seen.visited.append(seen.last)
        for child in case.children[seen.last]:
            seen.tried.append((seen.last, child))
            token = tokens[child]
            if accepting[child] * draft[seen.last, token] < residual[token]:
                seen.out.append(token)
                seen.last, residual = child, target[child]
                break
            seen.rejections[seen.last] = seen.rejections.get(seen.last, 0) + 1
            residual = (residual - draft[seen.last]).clamp(min=0)
            residual = residual / residual.sum()
        else:
            break
    goal = tensors["drawing"][sequence].double() * residual.sum()
    seen.out.append(int((residual.cumsum(0) <= goal).sum()))
    return seen


def reference(case: Verification, tensors: Tensors) -> Tensors:
    """Token for token by the definition."""
    rows = [walk(case, tensors, sequence).out for sequence in range(case.B)]
    width = tensors["depth"] + 1
    return {
        "out": torch.tensor([row + [-1] * (width - len(row)) for row in rows], dtype=torch.int32),
        "accepted": torch.tensor([len(row) - 1 for row in rows], dtype=torch.int32),
    }


def launch(case: Verification, tensors: Tensors) -> Tensors:
    """The Triton kernel."""
    return dict(zip(("out", "accepted"), verify(**tensors), strict=True))


def expected(case: Verification, tensors: Tensors) -> Expected:
    """Probabilities of tried tokens; rows of p and q once per rejection at a node, and the last row once to draw from.

    How far each sequence gets is the reference's walk; everything else follows.
    """
    V, width, depth = case.V, len(case.table[0]), tensors["depth"]
    walks = [walk(case, tensors, sequence) for sequence in range(case.B)]
    p_asked = q_asked = p_distinct = q_distinct = tried = tables = 0
    nodes_seen: set[int] = set()
    for sequence, seen in enumerate(walks):
        rejected = sum(seen.rejections.values())
        q_last = V if seen.rejections.get(seen.last) else 0
        p_asked += len(seen.tried) + V * rejected + V
        q_asked += len(seen.tried) + V * rejected + q_last
        p_rows, q_rows = {*seen.rejections, seen.last}, set(seen.rejections)
        single = {(node, int(tensors["tokens"][sequence, child])) for node, child in seen.tried}
        p_distinct += V * len(p_rows) + sum(node not in p_rows for node, _ in single)
        q_distinct += V * len(q_rows) + sum(node not in q_rows for node, _ in single)
        tried += len(seen.tried)
        tables += len(seen.visited) * width
        leaf = not case.children[seen.last]
        if leaf and len(seen.visited) < depth:
            tables += width
            nodes_seen.add(seen.last)
        nodes_seen |= set(seen.visited)
    cost = Elementwise(p_distinct + q_distinct, case.B * (depth + 2), 0, FP32).cost(Work(1, 1))
    moved = {
        "target": Moved("activations", read=4 * p_distinct, requested=4 * p_asked),
        "draft": Moved("activations", read=4 * q_distinct, requested=4 * q_asked),
        "tokens": Moved("", read=4 * tried),
        "accepting": Moved("", read=4 * tried),
        "children": Moved("", read=4 * width * len(nodes_seen), requested=4 * tables),
        "drawing": Moved("", read=4 * case.B),
        "out": Moved("activations", written=4 * case.B * (depth + 1)),
        "accepted": Moved("activations", written=4 * case.B),
    }
    return Expected(cost, {"speculative_kernel": Launch(case.B, moved)})


CHAIN = ((1,), (2,), (3,), (4,), ())
FORK = ((1, 2), (3, 4), (5,), (), (), ())
COMB = ((1, 2, 3), (4,), (), (), (5, 6), (), ())
CASES = (
    Verification("chain", "fp32", 9, 50, CHAIN),
    Verification("one-draft", "fp32", 7, 33, ((1,), ())),
    Verification("fork", "fp32", 11, 40, FORK),
    Verification("comb", "fp32", 8, 70, COMB, likeness=0.2),
    Verification("alike", "fp32", 5, 64, CHAIN, likeness=0.97),
)
TOLERANCE = {"fp32": Tolerance(0, "tokens are equal one by one")}
LONG_CHAIN = (*((node + 1,) for node in range(5)), ())
BUILDS = (
    Build(Verification("chain", "fp32", 64, 128256, LONG_CHAIN, block=2048), targets=EVERYWHERE),
    Build(Verification("tree", "fp32", 64, 128256, COMB, block=2048)),
)
MEASURED = (Verification("chain-64", "fp32", 64, 128256, LONG_CHAIN, block=2048),)
SPEC = Spec(
    "speculative", "Elementwise", CASES, inputs, reference, launch, expected, TOLERANCE, BUILDS, MEASURED
)  # fmt: skip

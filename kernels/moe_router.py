"""The router's choice: scores of E experts for each token, the k best of them, and the weights of their outputs.

Scores are a softmax, a sigmoid or the root of a softplus (DeepSeek-V4) of the logits. A stored correction steers the choice
and not the weights (load balancing without a loss). With groups, those with the best experts are picked first, and experts
only from them: a group is worth its best expert (DeepSeek-V2) or its two best (V3). Weights are those of the scores, divided
by their sum where asked for, times a factor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from roofline.components.moe import Select
from roofline.errors import InputError
from roofline.formats import FP32
from roofline.kernels import buffers
from roofline.kernels.arguments import FLOATING, check
from roofline.kernels.spec import EVERYWHERE, Build, Case, Expected, Launch, Moved, Spec, Tensors, Tolerance
from roofline.kernels.tiling import power_of_two
from roofline.kernels.types import TYPES, Source
from roofline.numeric import ceil_div
from roofline.work import Work

SCORES = ("softmax", "sigmoid", "sqrtsoftplus")


@triton.jit
def without_best(value, AXIS: tl.constexpr, place):
    """Where the largest stands along an axis (the first of equals), and the values with minus infinity in its place."""
    at = tl.argmax(value, AXIS)
    here = place == tl.expand_dims(at, AXIS)
    return at, here, tl.where(here, float("-inf"), value)


@triton.jit
def moe_router_kernel(
    logits, bias, weights, chosen, T, factor,
    GROUPS: tl.constexpr, MEMBERS: tl.constexpr, KEPT: tl.constexpr, BEST: tl.constexpr, PICKED: tl.constexpr,
    SCORE: tl.constexpr, NORMALISE: tl.constexpr, ROWS: tl.constexpr, GP: tl.constexpr, MP: tl.constexpr, PP: tl.constexpr,
):  # fmt: skip
    """ROWS tokens, their experts in registers as GROUPS x MEMBERS, padded to GP x MP; PP is PICKED, padded."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    group, member = tl.arange(0, GP), tl.arange(0, MP)
    real = ((group[:, None] < GROUPS) & (member[None, :] < MEMBERS))[None, :, :]
    expert = (group[:, None] * MEMBERS + member[None, :])[None, :, :]
    at = row[:, None, None].to(tl.int64) * (GROUPS * MEMBERS) + expert
    logit = tl.load(logits + at, mask=real & (row < T)[:, None, None], other=0.0).to(tl.float32)
    if SCORE == "softmax":
        logit = tl.where(real, logit, float("-inf"))
        grown = tl.exp(logit - tl.max(tl.max(logit, 2), 1)[:, None, None])
        score = grown / tl.sum(tl.sum(grown, 2), 1)[:, None, None]
    elif SCORE == "sigmoid":
        score = 1.0 / (1.0 + tl.exp(-logit))
    else:
        score = tl.sqrt(tl.maximum(logit, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(logit))))
    choice = score
    if bias is not None:
        choice += tl.load(bias + expert, mask=real, other=0.0).to(tl.float32)
    choice = tl.where(real, choice, float("-inf"))
    if GROUPS > 1:
        worth = tl.max(choice, 2)
        if BEST == 2:
            _, _, others = without_best(choice, 2, member[None, None, :])
            worth += tl.max(others, 2)
        worth = tl.where((group < GROUPS)[None, :], worth, float("-inf"))
        kept = tl.zeros((ROWS, GP), tl.int32)
        for _ in range(KEPT):
            _, here, worth = without_best(worth, 1, group[None, :])
            kept += here.to(tl.int32)
        choice = tl.where(kept[:, :, None] > 0, choice, float("-inf"))
    choice = tl.reshape(choice, (ROWS, GP * MP))
    score = tl.reshape(score, (ROWS, GP * MP))
    place, slot = tl.arange(0, GP * MP), tl.arange(0, PP)
    value = tl.zeros((ROWS, PP), tl.float32)
    index = tl.zeros((ROWS, PP), tl.int32)
    for turn in range(PICKED):
        best, here, choice = without_best(choice, 1, place[None, :])
        value = tl.where(slot[None, :] == turn, tl.sum(tl.where(here, score, 0.0), 1)[:, None], value)
        index = tl.where(slot[None, :] == turn, (best // MP * MEMBERS + best % MP)[:, None], index)
    if NORMALISE:
        value = value / tl.sum(value, 1)[:, None]
    inside = (row[:, None] < T) & (slot[None, :] < PICKED)
    goal = row[:, None].to(tl.int64) * PICKED + slot[None, :]
    tl.store(weights + goal, value * factor, mask=inside)
    tl.store(chosen + goal, index, mask=inside)


@dataclass(frozen=True)
class Rule:
    """How experts are picked.

    Attributes:
        k: per token. score: one of ``SCORES``. groups: of the experts; kept: groups that experts may come from.
        best: experts that a group is worth, 1 or 2. normalise: weights are divided by their sum. factor: on the weights.
    """

    k: int
    score: str = "softmax"
    groups: int = 1
    kept: int = 1
    best: int = 2
    normalise: bool = True
    factor: float = 1.0


def shape(E: int, rule: Rule) -> tuple[int, int, int]:
    """Tokens of a program, groups and members of a group in registers."""
    groups, members = power_of_two(rule.groups), power_of_two(E // rule.groups)
    return max(1, 1024 // (groups * members)), groups, members


def moe_router(
    logits: torch.Tensor, rule: Rule, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Weights (fp32) and experts (int32), both ``[T, k]``, of ``logits [T, E]``; ``bias [E]`` steers the choice only.

    Experts come by falling score, the first of equals first. Raises InputError where a rule cannot be kept.
    """
    check("logits", logits, (None, None), FLOATING)
    T, E = logits.shape
    check("bias", bias, (E,), FLOATING, logits)
    if rule.score not in SCORES or E % rule.groups or not 1 <= rule.k <= rule.kept * (E // rule.groups):
        raise InputError(f"rule: {rule} does not pick from {E} experts")
    weights = buffers.empty(T, rule.k, dtype=torch.float32, device=logits.device)
    chosen = buffers.empty(T, rule.k, dtype=torch.int32, device=logits.device)
    if T:
        rows, groups, members = shape(E, rule)
        moe_router_kernel[(ceil_div(T, rows),)](
            logits, bias, weights, chosen, T, rule.factor, GROUPS=rule.groups, MEMBERS=E // rule.groups, KEPT=rule.kept,
            BEST=rule.best, PICKED=rule.k, SCORE=rule.score, NORMALISE=rule.normalise, ROWS=rows, GP=groups, MP=members,
            PP=power_of_two(rule.k), num_warps=4,
        )  # fmt: skip
    return weights, chosen


@dataclass(frozen=True)
class Routing(Case):
    """``T`` tokens, ``E`` experts."""

    T: int
    E: int
    rule: Rule
    bias: bool = False


def inputs(case: Routing, device: str) -> Tensors:
    """Logits, and a correction that changes some choices."""
    source = Source(case.name, device)
    bias = source.normal(case.E, dtype=case.dtype, scale=0.2) if case.bias else None
    return {"logits": source.normal(case.T, case.E, dtype=case.dtype, scale=2.0), "bias": bias}


def reference(case: Routing, tensors: Tensors) -> Tensors:
    """In float64, with sorts."""
    logits, rule = tensors["logits"].double(), case.rule
    if rule.score == "softmax":
        scores = torch.softmax(logits, 1)
    elif rule.score == "sigmoid":
        scores = torch.sigmoid(logits)
    else:
        scores = torch.log1p(torch.exp(logits)).sqrt()
    choice = scores + tensors["bias"].double() if case.bias else scores
    if rule.groups > 1:
        grouped = choice.unflatten(1, (rule.groups, -1))
        worth = grouped.sort(2, descending=True).values[..., : rule.best].sum(2)
        kept = worth.sort(dim=1, descending=True, stable=True).indices[:, : rule.kept]
        out = torch.ones_like(worth, dtype=torch.bool).scatter_(1, kept, False)
        choice = grouped.masked_fill(out[..., None], -torch.inf).flatten(1)
    chosen = choice.sort(dim=1, descending=True, stable=True).indices[:, : rule.k]
    weights = scores.gather(1, chosen)
    if rule.normalise:
        weights = weights / weights.sum(1, keepdim=True)
    return {"weights": rule.factor * weights, "chosen": chosen.to(torch.int32)}


def launch(case: Routing, tensors: Tensors) -> Tensors:
    """The Triton kernel."""
    weights, chosen = moe_router(tensors["logits"], case.rule, tensors["bias"])
    return {"weights": weights, "chosen": chosen}


def expected(case: Routing, tensors: Tensors) -> Expected:
    """Every logit once, the correction once per program; weights and indices in 32 bits."""
    fmt = TYPES[case.dtype].format
    cost = Select(case.E, case.rule.k, case.bias, activation=fmt, picked=FP32).cost(Work(1, case.T))
    programs = ceil_div(case.T, shape(case.E, case.rule)[0])
    one = FP32.bytes(case.T * case.rule.k)
    moved = {
        "logits": Moved("activations", read=cost.read["activations"]),
        "weights": Moved("activations", written=one),
        "chosen": Moved("activations", written=cost.write["activations"] - one),
    }
    if case.bias:
        bias = cost.read["weights"]
        moved["bias"] = Moved("weights", read=bias, requested=bias * programs)
    return Expected(cost, {"moe_router_kernel": Launch(programs, moved)})


def library(case: Routing, tensors: Tensors) -> Any:
    """torch's top-k over torch's scores, each operation a kernel."""
    logits, bias, rule = tensors["logits"], tensors["bias"], case.rule

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        scores = torch.softmax(logits.float(), 1) if rule.score == "softmax" else torch.sigmoid(logits.float())
        choice = scores if bias is None else scores + bias
        if rule.groups > 1:
            grouped = choice.unflatten(1, (rule.groups, -1))
            kept = grouped.topk(rule.best, 2).values.sum(2).topk(rule.kept, 1).indices
            out = torch.ones(kept.shape[0], rule.groups, dtype=torch.bool, device=logits.device).scatter_(1, kept, False)
            choice = grouped.masked_fill(out[..., None], -torch.inf).flatten(1)
        chosen = choice.topk(rule.k, 1).indices
        weights = scores.gather(1, chosen)
        return (weights / weights.sum(1, keepdim=True) if rule.normalise else weights) * rule.factor, chosen

    return run if rule.score != "sqrtsoftplus" else None


V3 = Rule(8, "sigmoid", groups=8, kept=4, factor=2.5)
CASES = (
    Routing("mixtral", "bf16", 37, 8, Rule(2)),
    Routing("ragged", "bf16", 13, 60, Rule(4, normalise=False)),
    Routing("grouped-sigmoid", "bf16", 21, 64, Rule(6, "sigmoid", groups=8, kept=3, factor=2.5), bias=True),
    Routing("grouped-odd", "fp32", 5, 60, Rule(3, groups=6, kept=2, best=1, normalise=False, factor=16.0)),
    Routing("softplus", "fp32", 9, 96, Rule(6, "sqrtsoftplus"), bias=True),
    Routing("one-expert", "bf16", 3, 1, Rule(1)),
    Routing("every-expert", "fp16", 1, 5, Rule(5)),
    Routing("deepseek", "fp32", 7, 256, V3, bias=True),
)
TOLERANCE = {name: Tolerance(2e-6, "scores and their sums in fp32") for name in ("bf16", "fp16", "fp32")}
BUILDS = (
    Build(Routing("deepseek", "fp32", 8192, 256, V3, bias=True), targets=EVERYWHERE),
    Build(Routing("qwen3", "bf16", 8192, 128, Rule(8))),
    Build(Routing("kimi", "fp32", 8192, 384, Rule(8, "sigmoid"), bias=True)),
)
MEASURED = (
    Routing("deepseek-8k", "fp32", 8192, 256, V3, bias=True),
    Routing("qwen3-8k", "bf16", 8192, 128, Rule(8)),
)
SPEC = Spec(
    "moe_router", "Select", CASES, inputs, reference, launch, expected, TOLERANCE, BUILDS, MEASURED, library
)  # fmt: skip

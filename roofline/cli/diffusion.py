"""``roofline diffusion``: whole generations by denoising, beside autoregressive decoding of the same model."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction as Ratio
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roofline.cli import sweeps
from roofline.cli.bundles import bundled
from roofline.cli.edit_options import EDIT_OPTIONS, Chosen
from roofline.cli.options import SWEEP, Batch, Check, Fraction, Gpu, Model, accelerators
from roofline.cli.output import OUTPUT, Cells, Output
from roofline.errors import InputError, suggest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from roofline.cli.points import Point, Variant
    from roofline.diffusion import Denoised, Denoising
    from roofline.inference import Deployment

DEFAULT_ISL, DEFAULT_OSL, DEFAULT_BLOCK = 1024, 256, 32
MOST_PLANS = 1000
PLANS = {
    "none": "no cache: every step runs prompt and answer whole",
    "prefix": "prefix cache: refreshed once per block, a step runs the block and what follows",
    "dual": "dual cache: prefix and suffix refreshed once per block, a step runs the block",
    "block": "block diffusion: an exact cache of finished blocks, a step runs the block",
}
CACHES = tuple(PLANS)

Answer = tuple["Point", "Denoised"]
"""A whole generation, also as a point: what runs where, its cost and what must fit."""


def _steps(block: int, steps: int | None, tokens: Ratio | None) -> int:
    """Steps per block: as given, or the fewest that finish ``tokens`` each at most; one token each without either."""
    if tokens is not None:
        if not 1 <= tokens <= block:
            raise InputError(f"tokens-per-step: {float(tokens):g} is not between 1 and the block of {block}")
        return math.ceil(block / tokens)
    return block if steps is None else steps


def _plans(
    outputs: Sequence[int], blocks: Sequence[int], steps: Sequence[int | None], tokens: Sequence[Any], caches: Sequence[str],
    guidance: bool,
) -> Iterator[Denoising]:  # fmt: skip
    """Every combination as a plan, each once. Raises InputError naming what is out of range."""
    from roofline.diffusion import Denoising

    found: dict[Denoising, None] = {}
    for cache, output, block, number, per_step in itertools.product(caches, outputs, blocks, steps, tokens):
        found[Denoising(output, block, _steps(block, number, per_step), cache, guidance)] = None
    yield from found


def _defaults(options: dict[str, tuple[list[str] | None, int]]) -> list[str]:
    """What was assumed for options that were not given."""
    return [f"{name} {default:,} (--{name} sets it)" for name, (given, default) in options.items() if not given]


def _caches(texts: list[str] | None) -> list[str]:
    names = sweeps.names(texts, "cache") if texts else ["none"]
    for name in names:
        if name not in CACHES:
            raise InputError(f"cache: {name!r} is not one of {', '.join(CACHES)}.{suggest(name, CACHES)}")
    return names


def _check_size(count: int) -> None:
    if count > MOST_PLANS:
        raise InputError(f"sweep: {count:,} plans are more than {MOST_PLANS:,}; take larger steps")


def _answer(variant: Variant, deployment: Deployment, batch: int, prompt: int, plan: Denoising) -> Answer:
    from roofline.cli.points import Point
    from roofline.diffusion import denoise
    from roofline.inference import Step
    from roofline.timing import time

    found = denoise(deployment, batch, prompt, plan)
    step = Step(
        found.model, found.gpu, deployment.convention, "denoising", batch, plan.output_tokens, prompt + plan.output_tokens,
        found.cost, time(found.cost, deployment.accelerator), found.memory,
    )  # fmt: skip
    return Point(variant, deployment.accelerator, deployment.memory_fraction, step), found


def _verdict(answer: Answer, several: bool, out: Output) -> str:
    """Faster or slower than decoding, by how much, and what would be as fast."""
    from roofline.units import count, latency

    point, found = answer
    variant = point.variant
    plan = found.plan
    who = f"{variant.label} on {found.gpu}, " if several else ""
    sizes = f"batch {found.batch:,}, {plan.cache}, block {plan.block}, {plan.steps} steps"
    ratio = found.speedup
    judged = out.paint(f"faster: {ratio:,.2f} x", "green") if ratio > 1 else out.paint(f"slower: {ratio:,.2f} x", "red")
    even = found.break_even_tokens_per_step
    if even is None:
        reach = "no number of tokens per step is as fast: filling the cache alone takes longer"
    else:
        above = f", more than the block of {plan.block}" if even > plan.block else ""
        reach = f"break-even at {even:,.2f} tokens per step{above}; this plan finishes {count(float(plan.tokens_per_step))}"
    times = f"{latency(found.e2e_bound_s)} against {latency(found.autoregressive_e2e_bound_s)} for {plan.output_tokens:,} tokens"
    return f"{who}{sizes}: {judged} autoregressive decoding ({times}); {reach}"


def _headline(answers: Sequence[Answer], out: Output) -> Iterator[str]:
    """The best and the worst plan; one line where there is one."""
    several = len({(point.variant.label, found.gpu) for point, found in answers}) > 1
    ranked = sorted(answers, key=lambda answer: -answer[1].speedup)
    if len(ranked) == 1:
        yield _verdict(ranked[0], several, out)
        return
    faster = sum(found.speedup > 1 for _, found in answers)
    yield f"{faster:,} of {len(ranked):,} plans are faster than autoregressive decoding"
    yield f"best: {_verdict(ranked[0], several, out)}"
    yield f"worst: {_verdict(ranked[-1], several, out)}"


def _cells(answers: Sequence[Answer]) -> Cells:
    from roofline.units import GIB, count

    several = any(point.variant.flags for point, _ in answers)
    gpus = len({found.gpu for _, found in answers}) > 1
    headers = [
        *(["variant"] if several else []), *(["gpu"] if gpus else []), "batch", "input\ntokens", "output\ntokens", "cache",
        "block", "steps per\nblock", "tokens\nper step", "required\nGiB", "E2E\nbound s", "E2E\nserial s", "output\ntok/s",
        "decoding\nE2E bound s", "speed-up", "break-even\ntokens/step", "fits",
    ]  # fmt: skip
    rows = []
    for point, found in answers:
        plan, even = found.plan, found.break_even_tokens_per_step
        rows.append([
            *([point.variant.label] if several else []), *([found.gpu] if gpus else []), count(found.batch),
            count(found.prompt_tokens), count(plan.output_tokens), plan.cache, count(plan.block), count(plan.steps),
            count(float(plan.tokens_per_step)), f"{float(found.memory.required_bytes) / GIB:,.2f}", count(found.e2e_bound_s),
            count(found.e2e_serial_s), count(found.output_tok_per_s), count(found.autoregressive_e2e_bound_s),
            f"{found.speedup:,.2f}", "-" if even is None else f"{even:,.2f}", "yes" if found.memory.fits else "no",
        ])  # fmt: skip
    return headers, rows


def _record(answer: Answer, assumes: list[str], left: list[str]) -> dict[str, Any]:
    from roofline.cli.points import SCHEMA

    point, found = answer
    variant = point.variant
    figures = {"input_tokens" if key == "prompt_tokens" else key: value for key, value in found.to_dict().items()}
    about = {"schema": SCHEMA, "model": figures.pop("model"), "variant": variant.kind, "edits": list(variant.flags)}
    return {**about, **figures, "assumes": assumes, "not_modelled": left}


@bundled(edits=EDIT_OPTIONS, out=OUTPUT)
def diffusion(
    model: Model,
    gpu: Gpu = None,
    batch: Batch = None,
    isl: Annotated[
        list[str] | None, typer.Option("--isl", "--input-len", metavar=SWEEP, help="Prompt tokens.  [default: 1024]")
    ] = None,
    osl: Annotated[
        list[str] | None, typer.Option("--osl", "--output-len", metavar=SWEEP, help="Output tokens.  [default: 256]")
    ] = None,
    block: Annotated[
        list[str] | None, typer.Option("--block", metavar=SWEEP, help="Tokens that are denoised together.  [default: 32]")
    ] = None,
    steps: Annotated[
        list[str] | None, typer.Option("--steps", metavar=SWEEP, help="Denoising steps per block.  [default: one per token]")
    ] = None,
    tokens_per_step: Annotated[
        list[str] | None, typer.Option("--tokens-per-step", metavar=SWEEP, help="Tokens that a step finishes; sets --steps.")
    ] = None,
    cache: Annotated[
        list[str] | None,
        typer.Option("--cache", metavar="NAME", help=f"{', '.join(CACHES)}.  [default: none]", autocompletion=lambda: CACHES),
    ] = None,
    guidance: Annotated[
        bool, typer.Option("--guidance", help="Classifier-free guidance: each step runs twice the batch.")
    ] = False,
    memory_fraction: Fraction = None,
    check: Check = False,
    *,
    edits: Chosen,
    out: Output,
) -> int:
    """Whole generations by denoising masked tokens, beside autoregressive decoding of the same model.

    Numbers may be lists or sweeps, and so may --cache; every combination is a plan. Any model with plain attention can
    be asked about: what would it gain as a denoiser?

    roofline diffusion llada-8b --gpu h100-sxm --isl 512 --osl 256 --cache none,dual,block --tokens-per-step 1,2,4
    """
    import roofline.cli.points as what
    from roofline.cli.verdict import assumptions, not_modelled
    from roofline.configs.load import load_model
    from roofline.inference import Deployment

    if steps and tokens_per_step:
        raise InputError("steps: --steps and --tokens-per-step say the same; give one of them")
    assumes = _defaults(
        {"batch": (batch, 1), "isl": (isl, DEFAULT_ISL), "osl": (osl, DEFAULT_OSL), "block": (block, DEFAULT_BLOCK)}
    )
    if not steps and not tokens_per_step:
        assumes.append("one step per token (--steps or --tokens-per-step sets another number)")
    batches = sweeps.whole_numbers(batch or ["1"], "batch")
    prompts = sweeps.whole_numbers(isl or [str(DEFAULT_ISL)], "isl")
    chips, shares = accelerators(gpu), sweeps.fractions(memory_fraction or ["1"], "memory-fraction")
    caches = _caches(cache)
    plans = list(
        _plans(
            sweeps.whole_numbers(osl or [str(DEFAULT_OSL)], "osl"),
            sweeps.whole_numbers(block or [str(DEFAULT_BLOCK)], "block"),
            [*sweeps.whole_numbers(steps, "steps")] if steps else [None],
            [*sweeps.at_least(tokens_per_step, "tokens-per-step", 1)] if tokens_per_step else [None],
            caches,
            guidance,
        )
    )
    _check_size((1 + edits.count) * len(chips) * len(shares) * len(batches) * len(prompts) * len(plans))
    compared = what.variants(load_model(model), edits)
    answers = [
        _answer(variant, Deployment(variant.model, chip, memory_fraction=share), number, prompt, plan)
        for variant, chip, share, number, prompt, plan in itertools.product(compared, chips, shares, batches, prompts, plans)
    ]
    points = [point for point, _ in answers]
    assumes += [PLANS[name] for name in caches]
    assumes += ["guidance runs a second, unconditional sequence in every step"] if guidance else []
    assumes = assumptions(points, [*assumes, "decoding, for comparison, keeps a cache and has a causal mask"])
    gpus = ", ".join(chip.id for chip in chips)
    out.note(out.paint(f"{points[0].step.model} on {gpus}: denoising", "bold"), *_headline(answers, out), "")
    left = ["the quality of tokens finished together", "the choice of which tokens to keep"]
    left += not_modelled(compared[0].model, points)
    out.records((_record(answer, assumes, left) for answer in answers), lambda: _cells(answers))
    out.note("", *(f"assumes: {line}" for line in assumes), f"not modelled: {', '.join(left)}")
    return 1 if check and not all(point.step.memory.fits for point in points) else 0

"""``roofline train``: what training, distilling a pruned model and quantisation-aware training cost in FLOPs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roofline.cli import sweeps
from roofline.cli.bundles import bundled
from roofline.cli.edit_options import EDIT_OPTIONS, Chosen
from roofline.cli.options import Gpu, Model, accelerators
from roofline.cli.output import OUTPUT, Cells, Output
from roofline.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from fractions import Fraction

    from roofline.accelerator import Accelerator
    from roofline.cli.points import Variant

DEFAULT_TOKENS, DEFAULT_SEQUENCE, DEFAULT_STEP_TOKENS = 10**12, 4096, 4 * 2**20
NOT_MODELLED = "communication, optimiser, recomputed activations, data loading, restarts"
MOST_TOKENS = 10**16
SECONDS_PER_HOUR = 3600
UNIT = "bf16"
"""The matrix unit that training is assumed to run on."""


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        name: "training", "distillation" or "QAT". variant: the model that is trained.
        tokens: it sees. matrix_flop: of all its steps. elementwise_flop: of fake quantisation, None elsewhere.
    """

    name: str
    variant: Variant
    tokens: int
    matrix_flop: Any
    elementwise_flop: int | None = None

    @property
    def six_nd_flop(self) -> int:
        """The rule of thumb: 6 FLOP per active parameter and token."""
        return 6 * self.variant.model.active_params * self.tokens


def _one(texts: list[str] | None, field: str, default: int | None = None) -> int | None:
    """The one value of a number of tokens."""
    if not texts:
        return default
    values = sweeps.whole_numbers([sweeps.in_digits(text) for text in texts], field, most=MOST_TOKENS)
    if len(values) > 1:
        raise InputError(f"{field}: give one value")
    return values[0]


def _runs(
    variants: Sequence[Variant], tokens: int, sequence: int, distill: int | None, scratch: int | None, qat: int | None, step: int
) -> Iterator[Run]:
    """Training of each model; of each edited one distillation from the base and training from scratch; QAT of the last."""
    from roofline.training import distillation, quantisation_aware_training, training_flops

    base, *edited = variants
    for variant in variants:
        if scratch is None or variant is base:
            yield Run("training", variant, tokens, training_flops(variant.model, tokens, sequence))
    for variant in edited:
        if scratch is not None:
            yield Run("training", variant, scratch, training_flops(variant.model, scratch, sequence))
        if distill is not None:
            found = distillation(variant.model, base.model, distill, scratch or tokens, sequence)
            yield Run("distillation", variant, distill, found.distill_flop)
    if qat is not None:
        trained = quantisation_aware_training(variants[-1].model, qat, sequence, step)
        yield Run("QAT", variants[-1], qat, trained.training_flop, trained.fake_quant_flop)


def _hours(run: Run, accelerator: Accelerator, utilisation: float = 1.0) -> float:
    """GPU-hours of a run's matrix FLOPs at a share of the peak rate."""
    return float(run.matrix_flop) / (float(accelerator.rate(UNIT)) * utilisation) / SECONDS_PER_HOUR


def _record(
    run: Run, sequence: int, accelerator: Accelerator | None, mfu: Fraction | None, assumes: Sequence[str]
) -> dict[str, Any]:
    from roofline.cli.points import SCHEMA
    from roofline.memory import plain

    return {
        "schema": SCHEMA,
        "model": run.variant.model.name,
        "variant": run.variant.kind,
        "edits": list(run.variant.flags),
        "run": run.name,
        "params": run.variant.model.params,
        "active_params": run.variant.model.active_params,
        "tokens": run.tokens,
        "sequence_tokens": sequence,
        "training_flop": plain(run.matrix_flop),
        "six_nd_flop": run.six_nd_flop,
        "fake_quant_flop": run.elementwise_flop,
        "gpu": accelerator.id if accelerator else None,
        "gpu_hours_bound": _hours(run, accelerator) if accelerator else None,
        "mfu": float(mfu) if mfu is not None else None,
        "gpu_hours_at_mfu": _hours(run, accelerator, float(mfu)) if accelerator and mfu is not None else None,
        "provenance": "datasheet" if accelerator else None,
        "assumes": list(assumes),
        "not_modelled": NOT_MODELLED.split(", "),
    }


def _cells(runs: Sequence[Run], chips: Sequence[Accelerator | None], mfu: Fraction | None) -> Cells:
    from roofline.units import count, flop

    timed = any(chips)
    headers = [
        "run", "model", "tokens", "parameters", "FLOP", "of 6 N D", *(["gpu", "GPU-hours\nbound"] if timed else []),
        *([f"GPU-hours\nat {float(mfu):.0%}"] if timed and mfu is not None else []),
    ]  # fmt: skip
    rows = [
        [
            run.name, run.variant.label, f"{run.tokens:.3g}", f"{run.variant.model.params / 1e9:,.3f} B", flop(run.matrix_flop),
            f"{float(run.matrix_flop) / run.six_nd_flop:.3f}",
            *([chip.id, count(_hours(run, chip))] if chip else []),
            *([count(_hours(run, chip, float(mfu)))] if chip and mfu is not None else []),
        ]
        for run in runs
        for chip in chips
    ]  # fmt: skip
    return headers, rows


def _headline(runs: Sequence[Run]) -> Iterator[str]:
    """How much distilling saves, and what QAT adds."""
    for run in runs:
        others = [r for r in runs if r.name == "training" and r.variant is run.variant]
        if run.name == "distillation" and others:
            saving = float(others[0].matrix_flop) / float(run.matrix_flop)
            yield (
                f"{run.variant.label}: distilling on {run.tokens:.3g} tokens costs 1/{saving:,.1f} of training from scratch on "
                f"{others[0].tokens:.3g}"
            )
        if run.elementwise_flop is not None:
            yield f"QAT adds {run.elementwise_flop / float(run.matrix_flop):.2g} elementwise FLOP per matrix FLOP of training"


@bundled(edits=EDIT_OPTIONS, out=OUTPUT)
def train(
    model: Model,
    tokens: Annotated[
        list[str] | None, typer.Option("--tokens", metavar="N", help="Tokens of the run: 15T, 1.5e12.  [default: 1e12]")
    ] = None,
    sequence: Annotated[
        list[str] | None, typer.Option("--sequence", metavar="N", help="Tokens of one sequence.  [default: 4096]")
    ] = None,
    distill_tokens: Annotated[
        list[str] | None, typer.Option("--distill-tokens", metavar="N", help="Distil the edited model from the model as it is.")
    ] = None,
    scratch_tokens: Annotated[
        list[str] | None, typer.Option("--scratch-tokens", metavar="N", help="Train the edited model from scratch on as many.")
    ] = None,
    qat_tokens: Annotated[
        list[str] | None, typer.Option("--qat-tokens", metavar="N", help="Quantisation-aware training on as many tokens.")
    ] = None,
    step_tokens: Annotated[
        list[str] | None, typer.Option("--step-tokens", metavar="N", help="Tokens of one QAT step.  [default: 4Mi]")
    ] = None,
    gpu: Gpu = None,
    mfu: Annotated[
        list[str] | None,
        typer.Option("--mfu", metavar="F", help="Model FLOP utilisation to assume beside the bound, 0 < F <= 1."),
    ] = None,
    *,
    edits: Chosen,
    out: Output,
) -> int:
    """What training costs: three forward passes per token, attention included, and GPU-hours at the peak rate.

    roofline train llama-3.1-8b --prune-width hidden=3072,ffn=9216 --distill-tokens 94e9 --scratch-tokens 8e12
    """
    from roofline.cli.points import variants
    from roofline.configs.load import load_model
    from roofline.units import flop_rate

    length = _one(sequence, "sequence", DEFAULT_SEQUENCE) or DEFAULT_SEQUENCE
    seen = _one(tokens, "tokens", DEFAULT_TOKENS) or DEFAULT_TOKENS
    distill, scratch = _one(distill_tokens, "distill-tokens"), _one(scratch_tokens, "scratch-tokens")
    qat, step = _one(qat_tokens, "qat-tokens"), _one(step_tokens, "step-tokens", DEFAULT_STEP_TOKENS) or DEFAULT_STEP_TOKENS
    for field, given in (("distill-tokens", distill), ("scratch-tokens", scratch)):
        if given and not edits.values:
            raise InputError(f"{field}: there is no student; say how the model is pruned, as with --prune-depth")
    if mfu and not gpu:
        raise InputError("mfu: GPU-hours need an accelerator; add --gpu")
    shares = sweeps.fractions(mfu, "mfu") if mfu else [None]
    if len(shares) > 1:
        raise InputError("mfu: give one value")
    chips: list[Accelerator | None] = [*accelerators(gpu)] if gpu else [None]
    runs = list(_runs(variants(load_model(model), edits), seen, length, distill, scratch, qat, step))
    defaults = (
        (f"{seen:.3g} tokens", "tokens", tokens),
        (f"sequences of {length:,} tokens", "sequence", sequence),
        (f"QAT steps of {step:,} tokens", "step-tokens", step_tokens or not qat),
    )
    assumes = [f"{what} (--{option} sets it)" for what, option, given in defaults if not given]
    assumes.append("a step costs three forward passes, every logit computed; nothing is recomputed")
    admitted = runs[0].variant.model.max_context
    if admitted is not None and length > admitted:
        assumes.append(f"sequences of {length:,} tokens are longer than the {admitted:,} that the config admits")
    if distill:
        assumes.append("distillation adds a forward pass of the model as it is on every token")
    assumes += [
        f"{chip.id}: every matmul in {UNIT} at {flop_rate(chip.rate(UNIT))} dense (datasheet), the GPU-hours' bound"
        for chip in chips
        if chip
    ]
    if shares[0] is not None:
        assumes.append(f"model FLOP utilisation {float(shares[0]):g} is an assumption, not a finding")
    out.note(out.paint(f"{runs[0].variant.model.name}: training", "bold"), *_headline(runs), "")
    out.records(
        (_record(run, length, chip, shares[0], assumes) for run in runs for chip in chips), lambda: _cells(runs, chips, shares[0])
    )
    out.note("", *(f"assumes: {line}" for line in assumes))
    out.note(f"not modelled: {NOT_MODELLED}")
    return 0

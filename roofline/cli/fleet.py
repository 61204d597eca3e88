"""``roofline fleet``: tokens per day to GPUs, power and dollars, against the FLOPs of a training run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roofline.cli.bundles import bundled
from roofline.cli.options import Model, complete_engines, complete_gpus
from roofline.cli.output import OUTPUT, Cells, Output
from roofline.errors import InputError

if TYPE_CHECKING:
    from roofline.accelerator import Accelerator
    from roofline.engines.profile import Profile

UTILISATION, SEQUENCE = "0.5", 4096
NOT_MODELLED = (
    "the load over a day", "waiting", "prefix caches", "failures", "cold starts", "quality of quantised weights and caches",
)  # fmt: skip

Record = dict[str, Any]


def _amount(text: str, field: str) -> float:
    """A number of tokens: 8.6e12, 8.6T, 500B, 3M."""
    from roofline.cli.sweeps import in_digits

    try:
        value = float(in_digits(text))
    except ValueError:
        raise InputError(f"{field}: {text!r} is not a number of tokens; write one such as 8.6T, 500B or 8.6e12") from None
    if not 0 < value < 1e21:
        raise InputError(f"{field}: {text!r} is out of range; give tokens above 0")
    return value


def _share(text: str, field: str) -> float:
    from roofline.cli import sweeps

    return float(sweeps.fractions([text], field)[0])


def _cells(records: Sequence[Record]) -> Cells:
    from roofline.units import count

    def big(value: float | None, unit: str = "") -> str:
        if value is None:
            return "-"
        for factor, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
            if value >= factor:
                return f"{value / factor:,.2f} {prefix}{unit}".rstrip()
        return f"{value:,.3g} {unit}".rstrip()

    headers = [
        "deployment", "tok/s per\ninstance", "instances", "GPUs", "power", "USD/day", "USD per\nM output", "J per\ntoken",
        "step times",
    ]  # fmt: skip
    rows = [
        [
            r["deployment"], count(float(r["instance_tok_per_s"])), f"{r['instances']:,}", f"{r['gpus']:,}", big(r["watt"], "W"),
            big(r["usd_per_day"]), "-" if r["usd_per_mtok_output"] is None else f"{r['usd_per_mtok_output']:.3g}",
            "-" if r["joule_per_output_token"] is None else f"{r['joule_per_output_token']:.3g}", r["provenance"],
        ]
        for r in records
    ]  # fmt: skip
    return headers, rows


@bundled(out=OUTPUT)
def fleet(
    model: Model,
    tokens_per_day: Annotated[
        str, typer.Option("--tokens-per-day", metavar="N", help="Output tokens of a day: 8.6T, 500B, 8.6e12.")
    ] = "",
    trained_tokens: Annotated[
        str | None, typer.Option("--trained-tokens", metavar="N", help="Tokens of the training run to compare with: 32T.")
    ] = None,
    isl: Annotated[str, typer.Option("--isl", "--input-len", metavar="N", help="Prompt tokens of a request.")] = "2000",
    osl: Annotated[str, typer.Option("--osl", "--output-len", metavar="N", help="Output tokens of a request.")] = "500",
    tpot: Annotated[
        str | None, typer.Option("--tpot", metavar="TIME", help="Limit on the time per output token.  [default: none]")
    ] = None,
    utilisation: Annotated[
        str, typer.Option("--utilisation", metavar="F", help="Mean share of the fleet's full load over a day.")
    ] = UTILISATION,
    gpus: Annotated[
        list[str] | None,
        typer.Option("--gpus", "--gpu", "-g", metavar="NAMES", help="GPUs to choose from.", autocompletion=complete_gpus),
    ] = None,
    engine: Annotated[
        str, typer.Option("--engine", metavar="NAME", help="What serves.", autocompletion=complete_engines)
    ] = "vllm",
    sequence: Annotated[str, typer.Option("--sequence", metavar="N", help="Tokens of a training sequence.")] = str(SEQUENCE),
    price: Annotated[
        list[str] | None, typer.Option("--price", metavar="USD", help="USD per GPU and hour: 2.5, or h100-sxm=2.5.")
    ] = None,
    bound: Annotated[bool, typer.Option("--bound", help="Step times are the datasheet's bound, whatever is calibrated.")] = False,
    *,
    out: Output,
) -> int:
    """Tokens per day to GPUs, power and dollars, against the FLOPs of a training run.

    roofline fleet deepseek-v4-pro --tokens-per-day 8.6T --trained-tokens 32T --gpus h200-sxm,b200-sxm
    """
    from roofline.cli import sweeps
    from roofline.cli.limits import without_unit
    from roofline.cli.plan import _gpus, _one, _seconds
    from roofline.configs.load import load_model
    from roofline.engines.profile import load_engine
    from roofline.planner.demand import demand
    from roofline.planner.fleet import Fleet, compare, fleet_record
    from roofline.planner.prices import parse_prices, price_words, rent, watts
    from roofline.planner.search import left_ranges, search
    from roofline.planner.sensitivity import label
    from roofline.planner.setups import comparable, setups, variants
    from roofline.serving.metrics import Objective
    from roofline.serving.steps import check_served

    if not tokens_per_day:
        raise InputError("tokens-per-day: say how many output tokens a day has, as in --tokens-per-day 8.6T")
    amount, used = _amount(tokens_per_day, "tokens-per-day"), _share(utilisation, "utilisation")
    load = demand(*(_one(sweeps.whole_numbers([text], name), name) for text, name in ((isl, "isl"), (osl, "osl"))))
    loaded, profile, chips = load_model(model), load_engine(engine), _gpus(gpus)
    check_served(loaded, load.length)
    refused = _refusals(profile, chips)
    chips = [chip for chip in chips if chip.id not in refused]
    if not chips:
        raise InputError("; ".join(refused.values()))
    given = parse_prices(price, {name: gpu.id for gpu in chips for name in (gpu.id, *gpu.aliases)})
    objective = Objective(None, _seconds(tpot, "tpot"))
    candidates, notes = comparable(
        [
            setup for gpu in chips
            for setup in setups(loaded, variants(loaded, None, None, profile, gpu), gpu, profile, load.length, 16, bound=bound)
        ]
    )  # fmt: skip
    notes = [*(f"{gpu} left out: {why}" for gpu, why in refused.items()), *notes]
    records, shown = [], []
    for gpu in chips:
        found = [setup for setup in candidates if setup.accelerator.id == gpu.id]
        plans = search(found, load, objective, {gpu.id: rent(gpu, given)}, 16).plans
        if not plans and not any(note.startswith(f"{gpu.id}: ") for note in notes):
            notes.append(f"{gpu.id} left out: no layout on up to 16 of them serves this{' at that TPOT' if tpot else ''}")
        if not plans:
            continue
        best = plans[0]
        shown.append(best)
        served = Fleet(amount, used, best, best.output_tokens(load.osl))
        whose = rent(gpu, given)
        records.append(
            {
                "schema": 1, "model": loaded.name, "gpu": gpu.id, "deployment": label(best), "tokens_per_day": amount,
                "input_tokens": load.isl, "output_tokens": load.osl, "tpot_s": best.sized.tpot_s,
                **fleet_record(served, whose, watts(gpu)), "usd_per_gpu_hour": whose.usd if whose else None,
                "price_source": whose.source if whose else None,
                **_training(compare(loaded, load, amount, _amount(trained_tokens, "trained-tokens"),
                                    _one(sweeps.whole_numbers([sequence], "sequence"), "sequence"))
                            if trained_tokens else None),
                "provenance": best.step_times, "outside_calibrated_range": best.outside,
                "notes": list(dict.fromkeys([*best.setup.notes, *best.outside])),
                "not_modelled": [*loaded.not_modelled, *NOT_MODELLED],
            }
        )  # fmt: skip
    if not records:
        raise InputError(f"gpus: {'; '.join(notes)}")
    records.sort(key=lambda r: (r["usd_per_day"] is None, r["usd_per_day"] or r["gpus"]))
    out.note(out.paint(f"{loaded.name}: {amount:.3g} output tokens a day, {load.isl:,} + {load.osl:,} tokens a request", "bold"))
    first = records[0]
    if first["training_flop"] is not None:
        out.note(
            f"as many tokens as the training run had are served in {first['token_days']:.2f} days; as many FLOPs as it took are "
            f"spent in {first['flop_days']:.2f} days ({first['day_flop']:.3g} a day against {first['training_flop']:.3g})"
        )
    out.note("")
    out.records(records, lambda: _cells(records))
    lines = [
        f"utilisation {used:g}: the fleet makes that share of what it could, averaged over a day",
        "each instance runs the batch with most tokens per dollar"
        + (" that keeps the TPOT" if tpot else ", whatever the latency"),
        "power is the thermal design power of the GPUs, without servers, network and cooling",
        *without_unit(tpot=tpot),
        *loaded.assumes,
        *(price_words(gpu.id, rent(gpu, given)) for gpu in chips if any(r["gpu"] == gpu.id for r in records)),
        *dict.fromkeys([*(note for one in shown for note in one.setup.notes), *left_ranges(shown)]),
    ]
    told = [f"note: {line}" for line in notes] + [f"assumes: {line}" for line in lines]
    out.note("", *told, f"not modelled: {', '.join([*loaded.not_modelled, *NOT_MODELLED])}")
    return 0


def _refusals(engine: Profile, chips: Sequence[Accelerator]) -> dict[str, str]:
    """Why an engine does not run on accelerators, by their ids."""
    found = {}
    for chip in chips:
        try:
            engine.check(chip)
        except InputError as error:
            found[chip.id] = str(error)
    return found


def _training(found: Any) -> Record:
    return {
        "day_flop": found.day_flop if found else None,
        "training_flop": found.training_flop if found else None,
        "token_days": found.tokens_days if found else None,
        "flop_days": found.flop_days if found else None,
    }

"""``roofline plan``: the cheapest deployments that meet a service level, confirmed by the simulator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from roofline.cli.bundles import bundled
from roofline.cli.options import Model, complete_engines, complete_gpus, complete_models
from roofline.cli.output import OUTPUT, Output
from roofline.errors import InputError

if TYPE_CHECKING:
    from roofline.planner.demand import Demand
    from roofline.serving.metrics import Objective

EMITTERS = ("vllm", "sglang", "trtllm", "llamacpp")
SHOWN, MOST_GPUS, OWN_LAYER = 3, 64, "mtp"


def _seconds(text: str | None, field: str) -> float | None:
    from roofline.units import parse_quantity

    if text is None:
        return None
    return float(parse_quantity(text, "seconds", field, "s"))


def _demand(rate: str | None, concurrency: str | None, offline: bool, kept: bool, **given: str | None) -> Demand:
    """What is to be served, from the options that ``simulate`` has too."""
    from roofline.cli import sweeps
    from roofline.cli.traffic_options import lengths, number, seconds, whole
    from roofline.planner.demand import demand

    texts = {name: text for name, text in given.items() if text is not None}
    if "isl" not in texts or "osl" not in texts:
        raise InputError("isl: say how long requests are: --isl for prompt and --osl for output tokens")
    if offline and (rate or concurrency):
        raise InputError("offline: batch work waits in any amount; leave --rate and --concurrency out")
    if not offline and not (rate or concurrency):
        raise InputError("rate: say what the load is: --rate 4 (requests per second), --concurrency 100 (users), or --offline")
    arrivals = None
    if rate:
        try:
            arrivals = float(rate)
        except ValueError:
            raise InputError(f"rate: {rate!r} is not a number; give requests per second, such as 4 or 0.5") from None
    ratio = number(texts["range_ratio"], "range-ratio", 0, 1) if "range_ratio" in texts else None
    prompt, output = lengths(texts["isl"], texts["osl"], ratio)
    users = _one(sweeps.whole_numbers([concurrency], "concurrency"), "concurrency") if concurrency else None
    if "burst" in texts and not rate:
        raise InputError("burst: users that wait for answers do not arrive in bursts; it belongs to --rate")
    turns = whole(texts["turns"], "turns", most=10_000) if "turns" in texts else 1
    if "think" in texts and turns == 1:
        raise InputError("think: only sessions of several turns think between them; give --turns")
    return demand(
        prompt, output, arrivals, users, kept=kept, turns=turns,
        burst=number(texts["burst"], "burst", 0, 100) if "burst" in texts else 1.0,
        prefix=whole(texts["prefix_len"], "prefix-len", 0) if "prefix_len" in texts else 0,
        think_s=seconds(texts["think"], "think", zero=True) if "think" in texts else 0.0,
        most=whole(texts["max_model_len"], "max-model-len") if "max_model_len" in texts else None,
    )  # fmt: skip


def _one(values: list[int], field: str) -> int:
    if len(values) != 1:
        raise InputError(f"{field}: a plan is made for one value; give one")
    return values[0]


def _objective(ttft: str | None, tpot: str | None, percentile: str, tpot_percentile: str | None, offline: bool) -> Objective:
    from roofline.cli.traffic_options import number
    from roofline.serving.metrics import Objective

    if offline and (ttft or tpot):
        raise InputError("offline: batch work has no limit on latency; leave --ttft and --tpot out")
    try:
        share = float(percentile)
    except ValueError:
        raise InputError(f"percentile: {percentile!r} is not a number; give one such as 99") from None
    if tpot_percentile and not tpot:
        raise InputError("tpot-percentile: it judges a limit on the time per output token; add --tpot")
    of_tpot = number(tpot_percentile, "tpot-percentile", 0, 100) if tpot_percentile else None
    return Objective(_seconds(ttft, "ttft"), _seconds(tpot, "tpot"), share, of_tpot)


def _gpus(texts: list[str] | None) -> list[Any]:
    """The accelerators to choose from: as named, else every GPU with a price."""
    from roofline.accelerator import accelerator_ids, load_accelerator
    from roofline.cli import sweeps

    if texts:
        try:
            return list({gpu.id: gpu for gpu in map(load_accelerator, sweeps.names(texts, "gpus"))}.values())
        except InputError as error:
            raise InputError(f"gpus: {str(error).removeprefix('gpu: ').removeprefix('gpus: ')}") from None
    return [gpu for gpu in map(load_accelerator, accelerator_ids()) if gpu.kind == "gpu" and gpu.prices]


def _names(texts: list[str] | None) -> dict[str, str]:
    """What the user calls each GPU, by its id."""
    from roofline.accelerator import load_accelerator
    from roofline.cli import sweeps

    return {load_accelerator(name).id: name for name in sweeps.names(texts, "gpus")} if texts else {}


@bundled(out=OUTPUT)
def plan(
    model: Model,
    isl: Annotated[
        str | None,
        typer.Option(
            "--isl", "--input-len", metavar="LENGTH", help="Prompt tokens: 512, 410:512, lognormal:512:0.6 or a shape (sharegpt)."
        ),
    ] = None,
    osl: Annotated[
        str | None, typer.Option("--osl", "--output-len", metavar="LENGTH", help="Output tokens, in the same way.")
    ] = None,
    range_ratio: Annotated[
        str | None, typer.Option("--range-ratio", metavar="R", help="Lengths uniform from R times --isl and --osl up to them.")
    ] = None,
    prefix_len: Annotated[
        str | None, typer.Option("--prefix-len", metavar="N", help="Tokens that all prompts begin with, beside --isl.")
    ] = None,
    turns: Annotated[
        str | None, typer.Option("--turns", metavar="N", help="Requests of a session; each prompt holds what was said before.")
    ] = None,
    think: Annotated[
        str | None, typer.Option("--think", metavar="TIME", help="Mean time between an answer and the next turn.  [default: 0]")
    ] = None,
    prefix_cache: Annotated[
        bool, typer.Option("--prefix-caching", help="The engine keeps prefixes of past requests for later ones.")
    ] = False,
    max_model_len: Annotated[
        str | None, typer.Option("--max-model-len", metavar="N", help="Longest request.  [default: as long as lengths come out]")
    ] = None,
    rate: Annotated[str | None, typer.Option("--rate", metavar="R", help="Requests (or sessions) per second, at random.")] = None,
    burst: Annotated[
        str | None, typer.Option("--burst", metavar="CV", help="Variation of the gaps between arrivals: 0 even, 1 Poisson.")
    ] = None,
    concurrency: Annotated[
        str | None, typer.Option("--concurrency", metavar="N", help="Instead: users who each wait for their answer.")
    ] = None,
    ttft: Annotated[
        str | None, typer.Option("--ttft", metavar="TIME", help="Limit on the time to first token: 1s, 300ms.")
    ] = None,
    tpot: Annotated[str | None, typer.Option("--tpot", metavar="TIME", help="Limit on the mean time per output token.")] = None,
    percentile: Annotated[
        str, typer.Option("--percentile", metavar="P", help="Of requests whose TTFT must keep the limit.")
    ] = "99",
    tpot_percentile: Annotated[
        str | None, typer.Option("--tpot-percentile", metavar="P", help="Of TPOT, instead of its mean.")
    ] = None,
    gpus: Annotated[
        list[str] | None,
        typer.Option(
            "--gpus",
            "--gpu",
            "-g",
            metavar="NAMES",
            help="GPUs to choose from.  [default: every one with a price]",
            autocompletion=complete_gpus,
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine",
            metavar="NAME",
            help="What serves, and whose step times count; see --bound.  [default: vllm]",
            autocompletion=complete_engines,
        ),
    ] = None,
    engine_version: Annotated[
        str | None, typer.Option("--engine-version", metavar="X.Y", help="Its version.  [default: the newest known]")
    ] = None,
    max_gpus: Annotated[
        str | None, typer.Option("--max-gpus", metavar="N", help=f"GPUs at most.  [default: {MOST_GPUS}]")
    ] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Batch work: tokens per dollar, no limit on latency.")] = False,
    dtype: Annotated[
        list[str] | None, typer.Option("--dtype", "--quant", metavar="FORMATS", help="Formats of the weights to choose from.")
    ] = None,
    kv_dtype: Annotated[
        list[str] | None, typer.Option("--kv-dtype", metavar="FORMATS", help="Formats of the cache to choose from.")
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option("--draft", metavar="MODEL", help="Speculate with this model, or mtp.", autocompletion=complete_models),
    ] = None,
    alpha: Annotated[str | None, typer.Option("--alpha", metavar="RATE", help="Chance that a draft is accepted.")] = None,
    gamma: Annotated[list[str] | None, typer.Option("--gamma", metavar="LIST", help="Draft lengths.  [default: 1,2,3,5]")] = None,
    price: Annotated[
        list[str] | None, typer.Option("--price", metavar="USD", help="USD per GPU and hour: 2.5, or h100-sxm=2.5,h200-sxm=3.")
    ] = None,
    disaggregation: Annotated[
        bool, typer.Option("--disaggregation/--no-disaggregation", help="Consider instances that only prefill or only decode.")
    ] = True,
    bound: Annotated[bool, typer.Option("--bound", help="Step times are the datasheet's bound, whatever is calibrated.")] = False,
    show: Annotated[str, typer.Option("--show", metavar="N", help="Deployments to confirm and show.")] = str(SHOWN),
    requests: Annotated[
        str | None, typer.Option("--requests", metavar="N", help="Requests that the simulator counts.  [default: 1500]")
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Ceilings, what flips the choice, and the trade-off, too.")] = False,
    emit: Annotated[
        str | None,
        typer.Option("--emit", metavar="ENGINE", help="Print the launch command alone.", autocompletion=lambda: EMITTERS),
    ] = None,
    *,
    out: Output,
) -> int:
    """The cheapest deployments that meet a service level, sized in closed form and confirmed by the simulator.

    roofline plan llama-3.1-70b --isl 2000 --osl 500 --rate 4 --ttft 1s --tpot 40ms --gpus h100-sxm,h200-sxm
    """
    from roofline.cli import plan_answer, sweeps
    from roofline.cli.limits import without_unit
    from roofline.planner.solve import GAMMAS, Question
    from roofline.planner.verify import COUNTED

    load = _demand(
        rate, concurrency, offline, prefix_cache, isl=isl, osl=osl, range_ratio=range_ratio, prefix_len=prefix_len, turns=turns,
        think=think, burst=burst, max_model_len=max_model_len,
    )  # fmt: skip
    objective = _objective(ttft, tpot, percentile, tpot_percentile, offline)
    if emit is not None and emit not in EMITTERS:
        from roofline.errors import suggest

        raise InputError(f"emit: unknown engine {emit!r}.{suggest(emit, EMITTERS)} Known: {', '.join(EMITTERS)}")
    if emit and engine and emit != engine:
        raise InputError(f"emit: a plan for {engine} is launched by {engine}; give --emit {engine}, or leave --engine out")
    if (alpha is None) != (draft is None):
        raise InputError("draft: speculation needs --draft MODEL (or mtp) and --alpha RATE, the chance that a draft is accepted")
    if gamma and not draft:
        raise InputError("gamma: draft lengths belong to speculation; add --draft and --alpha")
    question = Question(
        model, load, objective, _gpus(gpus), emit or engine or "vllm", engine_version,
        _one(sweeps.whole_numbers([max_gpus], "max-gpus"), "max-gpus") if max_gpus else MOST_GPUS,
        sweeps.names(dtype, "dtype") if dtype else None, sweeps.names(kv_dtype, "kv-dtype") if kv_dtype else None,
        draft, float(sweeps.fractions([alpha], "alpha")[0]) if alpha else None,
        sweeps.whole_numbers(gamma, "gamma") if gamma else GAMMAS, price, disaggregation, bound,
        _one(sweeps.whole_numbers([show], "show"), "show"),
        _one(sweeps.whole_numbers([requests], "requests"), "requests") if requests else COUNTED, _names(gpus),
        without_unit(ttft=ttft, tpot=tpot, think=think),
    )  # fmt: skip
    return plan_answer.answer(question, explain, emit is not None, out)

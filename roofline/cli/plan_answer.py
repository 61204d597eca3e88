"""What ``roofline plan`` answers: the search, the confirmation, and how both are shown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from roofline.cli.limits import service_level
from roofline.cli.output import Cells, Output
from roofline.model import Model
from roofline.planner.ceilings import Ceiling, busiest, ceilings, users
from roofline.planner.choose import Choice
from roofline.planner.demand import Demand
from roofline.planner.disaggregate import way_out
from roofline.planner.launch import Launch, launch_records, launches, script
from roofline.planner.prices import price_words, watts
from roofline.planner.search import Plan, Point, frontier, left_ranges
from roofline.planner.sensitivity import Flip, label, sensitivity
from roofline.planner.solve import Answer, Question, confirm, seek
from roofline.planner.verify import CONFIDENCE, Replay, assured, verdict_record
from roofline.serving.metrics import Objective

LENGTHS = "every request has the same lengths"
DRAWN = "lengths are drawn independently; the closed form takes their mean and spread, the simulator draws them"
RANDOM = "arrivals are random (Poisson), requests to equal instances are too"
CLOSED = "each user sends the next request when the last is answered, after the first wave"
BATCH = "each instance runs as many sequences as chosen, all the time"
OFFERED = "output tokens per second are those offered, and USD and J per token rest on them; what a run served is under simulated"
SERVED = "output tokens per second are those that the simulator served, and USD and J per token rest on them"
POWER = "power is the thermal design power of the GPUs, without servers, network and cooling"
NOT_MODELLED = ("failures", "cold starts", "autoscaling", "quality of quantised weights and caches")

Record = dict[str, Any]


def _solve(question: Question, out: Output) -> Answer:
    """The search and its confirmation, behind bars."""
    sought = seek(question, lambda candidates: out.watch(candidates, "sizing"))
    with out.bar("simulating") as step:
        return confirm(sought, step)


def _rates(plan: Plan, choice: Choice | None, load: Demand) -> Record:
    """Tokens per second, dollars and joules of a deployment under its load: what is offered, what is served where nothing is."""
    served = load.request_rate or (choice.verdict.rate if choice else plan.rate)
    several = load.osl > 1
    tokens = served * load.osl
    usd, power = plan.usd_per_hour, watts(plan.setup.accelerator)
    tpot = choice.verdict.tpot_s if choice else plan.sized.tpot_s
    return {
        "rates_are": _rates_are(load, choice),
        "request_per_s": served,
        "output_tok_per_s": tokens,
        "output_tok_per_s_per_gpu": tokens / plan.gpus,
        "output_tok_per_s_per_user": 1 / tpot if tpot and several else None,
        "usd_per_hour": usd,
        "usd_per_mtok_output": None if usd is None or not tokens else usd / 3600 / tokens * 1e6,
        "usd_per_mtok": None if usd is None or not served else usd / 3600 / (served * load.length) * 1e6,
        "watt": None if power is None else power * plan.gpus,
        "joule_per_output_token": None if power is None or not tokens else power * plan.gpus / tokens,
    }


def _rates_are(load: Demand, choice: Choice | None) -> str:
    """What tokens per second, and so dollars and joules per token, rest on."""
    if load.request_rate is not None:
        return "offered"
    return "closed form" if choice is None else "simulated"


def _deployment(plan: Plan) -> Record:
    setup, front = plan.setup, plan.prefill
    return {
        "mode": "disaggregated" if front else "aggregated",
        "gpu": setup.accelerator.id,
        "gpus": plan.gpus,
        "instances": plan.instances,
        "gpus_per_instance": setup.gpus,
        "mesh": setup.mesh.flags,
        "prefill": None
        if front is None
        else {
            "instances": front.instances, "gpus_per_instance": front.setup.gpus, "mesh": front.setup.mesh.flags,
            "link": way_out(setup), "transfer_s": plan.transfer_s,
        },
        "weights": setup.variant.weights,
        "kv": setup.variant.kv,
        "engine": setup.engine.id,
        "max_num_seqs": plan.batch,
        "max_num_batched_tokens": plan.budget,
        "draft_tokens": plan.drafting.gamma if plan.drafting else 0,
    }  # fmt: skip


def _record(answer: Answer, rank: int, choice: Choice, details: Details) -> Record:
    load, objective, plan = answer.question.load, answer.question.objective, choice.plan
    sized, price = plan.sized, answer.rents.get(plan.setup.accelerator.id)
    limits = ceilings(plan, load, objective)
    return {
        "schema": 1,
        "model": plan.setup.variant.model.name,
        "input_tokens": load.isl,
        "output_tokens": load.osl,
        "max_model_len": load.longest,
        "prefix_tokens": load.prefix,
        "turns": load.turns,
        "think_s": load.think_s,
        "prefix_caching": load.kept,
        "rate_request_per_s": load.request_rate,
        "concurrency": load.concurrency,
        "offline": load.offline,
        "ttft_limit_s": objective.ttft_s,
        "tpot_limit_s": objective.tpot_s,
        "percentile": objective.percentile,
        "tpot_percentile": objective.tpot_percentile,
        "rank": rank,
        **_deployment(plan),
        "users": users(plan, load),
        "closed_form": {
            "ttft_s": sized.ttft_s,
            "ttft_percentile_s": sized.ttft_high_s,
            "tpot_s": sized.tpot_s if load.osl > 1 else None,
        },
        "simulated": _simulated(choice, load),
        **_rates(plan, choice, load),
        "price_source": price.source if price else None,
        "binds": limits[0].name,
        "busiest": busiest(plan, load),
        "ceilings": [one.to_dict() for one in limits],
        "searched": answer.found.tried,
        "pareto": [_point(point) for point in details.points] if rank == 1 else None,
        "sensitivity": [flip.to_dict() for flip in details.flips] if rank == 1 else None,
        "launch": launch_records(_launch(answer, plan)),
        "replay": replay(answer, plan),
        "provenance": plan.step_times,
        "outside_calibrated_range": plan.outside,
        "notes": list(plan.setup.notes),
        "assumes": assumes(answer),
        "not_modelled": _left_out(answer),
    }


def _launch(answer: Answer, plan: Plan) -> list[Launch]:
    """What starts a deployment."""
    return launches(
        plan, answer.launch_model, answer.question.load.longest, answer.stored, answer.launch_draft, answer.question.load.kept
    )


def replay(answer: Answer, plan: Plan) -> str:
    """The ``roofline simulate`` command that says what the simulator said of a deployment."""
    import shlex

    question = answer.question
    found = Replay(plan, question.load, question.objective, question.requests)
    gpu = question.names.get(plan.setup.accelerator.id)
    return shlex.join(found.words(question.model, answer.stored, gpu, question.draft))


def _simulated(choice: Choice, load: Demand) -> Record | None:
    """The simulator's figures; a request of one output token has no time between tokens."""
    found = verdict_record(choice.verdict)
    return found if found is None or load.osl > 1 else {**found, "tpot_s": None, "tpot_percentile_s": None}


def _point(point: Point) -> Record:
    plan = point.plan
    return {
        "output_tok_per_s_per_user": point.user, "output_tok_per_s_per_gpu": point.gpu, "gpu": plan.setup.accelerator.id,
        "gpus_per_instance": plan.setup.gpus, "mesh": plan.setup.mesh.flags, "weights": plan.formats[0], "kv": plan.formats[1],
        "sequences": plan.sized.sequences, "max_num_batched_tokens": plan.budget,
    }  # fmt: skip


@dataclass(frozen=True)
class Details:
    """What stands behind the first choice."""

    points: Sequence[Point]
    flips: Sequence[Flip]


def _come(load: Demand) -> Iterator[str]:
    """How requests are, and how they come."""
    come = BATCH if load.offline else CLOSED
    if load.rate is not None:
        come = RANDOM if load.burst == 1 else RANDOM.replace("random (Poisson)", f"in bursts (variation {load.burst:g})")
    yield f"{LENGTHS if load.even else DRAWN}; {come}"
    if not load.even:
        yield f"requests are cut at {load.longest:,} tokens (--max-model-len)"
    if load.turns > 1:
        yield (
            f"sessions of up to {load.turns:,} turns ({load.requests:.1f} on average), each prompt with all that came before; "
            f"{load.think_s:g} s between an answer and the next turn"
        )
    if load.kept:
        yield "prefixes are kept block by block, the least recently used go first; a session stays with its instance"
    elif load.prefix or load.turns > 1:
        yield "prompts are computed whole each time (--prefix-caching keeps what they share)"


def assumes(answer: Answer) -> list[str]:
    """What the plan rests on."""
    load = answer.question.load
    lines = [*answer.question.typed, *_come(load)]
    lines += [price_words(gpu, price) for gpu, price in answer.rents.items()]
    if answer.question.draft:
        lines.append(
            f"each draft is accepted with {answer.question.alpha:g}, independently; the draft model stands whole on every GPU"
        )
    model = _model(answer)
    lines.append(OFFERED if load.request_rate is not None else SERVED)
    return [*lines, POWER, *(model.assumes if model else ())]


def _model(answer: Answer) -> Model | None:
    """The model of a deployment that was found; None where none carries the load."""
    tried = [choice.plan for choice in (*answer.chosen.confirmed, *answer.chosen.refuted)]
    plan = tried[0] if tried else answer.found.nearest
    return None if plan is None else plan.setup.variant.model


def _title(answer: Answer) -> str:
    """The full name of a model of the catalogue, the name of any other, as other commands call it."""
    from roofline.configs.load import normalise

    model, full = _model(answer), answer.launch_model
    return full if model is None or (normalise(full) == model.name and not Path(full).is_absolute()) else model.name


def _left_out(answer: Answer) -> list[str]:
    """What no figure of the plan counts."""
    model = _model(answer)
    return [*(model.not_modelled if model else ()), *NOT_MODELLED]


def _travel(choices: Sequence[Choice], load: Demand) -> list[str]:
    """How caches come from where prompts run to where tokens do."""
    from roofline.units import latency

    apart = (choice.plan for choice in choices if choice.plan.prefill is not None)
    return [
        f"a cache of {load.isl:,} tokens travels over {way_out(p.setup)} in {latency(p.transfer_s)}: {label(p)}" for p in apart
    ]


def _cells(choices: Sequence[Choice], load: Demand, percentile: float) -> Cells:
    from roofline.units import count, latency

    def money(value: float | None) -> str:
        return "-" if value is None else f"{value:,.2f}" if value >= 1 else f"{value:.3g}"

    rate = "offered" if load.request_rate is not None else "output"
    headers = [
        "deployment", "GPUs", "batch", "tokens\nper step", "TTFT\nmean", f"TTFT\np{percentile:g}", "TPOT\nmean",
        f"{rate}\ntok/s", "tok/s\nper user", f"{rate}\nper GPU", "USD/h", "USD per\nM output", "J per\ntoken", "step times",
    ]  # fmt: skip
    rows = []
    for choice in choices:
        plan, rates = choice.plan, _rates(choice.plan, choice, load)
        joule, user = rates["joule_per_output_token"], rates["output_tok_per_s_per_user"]
        tpot = latency(choice.verdict.tpot_s) if load.osl > 1 else "-"
        rows.append([
            label(plan), plan.gpus, f"{plan.batch:,}", f"{plan.budget:,}", latency(choice.verdict.ttft_s),
            latency(choice.verdict.ttft_high_s), tpot, count(rates["output_tok_per_s"]), count(user) if user else "-",
            count(rates["output_tok_per_s_per_gpu"]), money(rates["usd_per_hour"]), money(rates["usd_per_mtok_output"]),
            "-" if joule is None else f"{joule:.3g}", plan.step_times,
        ])  # fmt: skip
    return headers, rows


def _number(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _binding(limits: Sequence[Ceiling]) -> str:
    shown = [f"{one.name} {one.users:,}" for one in limits if one.users is not None]
    return ", ".join(shown) or "nothing"


def _verdict(answer: Answer, out: Output) -> Iterator[str]:
    question, chosen = answer.question, answer.chosen
    load = question.load
    what = "batch work"
    if load.concurrency is not None:
        what = f"{load.concurrency:,} user{'' if load.concurrency == 1 else 's'}"
    elif load.request_rate is not None:
        what = f"{load.request_rate:g} request{'' if load.request_rate == 1 else 's'}/s"
    mean = "" if load.even else " on average"
    title = f"{_title(answer)}: {what} of {load.isl:,} + {load.osl:,} tokens{mean}, {service_level(question.objective)}"
    yield out.paint(title, "bold")
    met = len(answer.found.plans)
    yield f"{answer.found.tried:,} deployments sized, {met:,} meet it in closed form, {_counts(answer)}"
    if not chosen.confirmed:
        yield out.paint("no deployment is confirmed", "red") + f": {_why(answer)}"
        return
    best = chosen.confirmed[0].plan
    limits = ceilings(best, load, question.objective)
    usd = best.usd_per_hour
    cost = f"{usd:,.2f} USD/h" if usd is not None else "no price known"
    size = f"{_number(best.gpus, 'GPU')}, {cost}; {_number(users(best, load), 'user')} at once"
    yield f"{out.paint('cheapest' if usd is not None else 'fewest GPUs', 'green')}: {label(best)}: {size}"
    sure = _sure(chosen.confirmed[0], question.objective)
    if sure:
        yield sure
    yield f"ceilings in users: {_binding(limits)}; busiest under this load: {busiest(best, load)}"
    unpriced = [gpu for gpu, price in answer.rents.items() if price is None]
    if unpriced and len(unpriced) < len(answer.rents):
        yield f"without a price, and so behind all others: {', '.join(unpriced)}"


def _counts(answer: Answer) -> str:
    """How many deployments were simulated, those with more instances than the closed form asks for apart."""
    chosen = answer.chosen
    sized = {plan.key() for plan in answer.found.plans}
    tried = [choice.plan.key() for choice in (*chosen.confirmed, *chosen.refuted)]
    own = sum(key in sized for key in tried)
    more = f" and {len(tried) - own} with more instances" if len(tried) > own else ""
    return f"{own} of {len(sized):,} simulated{more}: {len(chosen.confirmed)} confirmed, {len(chosen.refuted)} refuted"


def _sure(choice: Choice, objective: Objective) -> str | None:
    """What the first choice's verdict rests on."""
    from roofline.units import latency

    found, parts = choice.verdict, []
    if found.pooled is None:
        return None
    if objective.ttft_s is not None and found.ttft_most_s is not None:
        parts.append(f"TTFT p{objective.percentile:g} below {latency(found.ttft_most_s)}")
    if objective.tpot_percentile is not None and found.tpot_most_s is not None:
        parts.append(f"TPOT p{objective.tpot_percentile:g} below {latency(found.tpot_most_s)}")
    held = f"limits hold in each of {found.seeds} runs with arrivals of their own, {found.pooled:,} requests in all"
    return f"{held}; over these, with {CONFIDENCE * 100:g} % confidence, {' and '.join(parts)}" if parts else held


def _why(answer: Answer) -> str:
    """Why nothing is recommended."""
    from roofline.units import latency

    if answer.chosen.refuted:
        near = min(answer.chosen.refuted, key=lambda choice: _excess(choice, answer.question.objective))
        found = near.verdict
        if found.refused:
            return f"of {label(near.plan)} the simulator refuses {_number(found.refused, 'request')}: longer than its cache"
        late = found.ttft_high_s if found.ttft_most_s is None else found.ttft_most_s
        said = "the simulator refutes what the closed form found, or a faster one of its kind"
        if answer.chosen.gave_up:
            said = f"gave up after {answer.chosen.simulated} simulated, {len(answer.chosen.waiting):,} wait"
        return f"{said}; nearest is {label(near.plan)} with TTFT {latency(late)} and TPOT {latency(found.tpot_s)}"
    near_plan = answer.found.nearest
    if near_plan is None:
        return f"none carries the load with up to {answer.question.most} GPUs; raise --max-gpus"
    sized = near_plan.sized
    return f"nearest is {label(near_plan)} with TTFT {latency(sized.ttft_high_s)} and TPOT {latency(sized.tpot_s)}"


def _excess(choice: Choice, objective: Objective) -> float:
    """The larger share of its limits that a deployment takes, as simulated."""
    found = choice.verdict
    late = found.ttft_high_s if found.ttft_most_s is None else found.ttft_most_s
    slow = found.tpot_s if found.tpot_high_s is None else found.tpot_high_s
    shares = [have / limit for have, limit in ((late, objective.ttft_s), (slow, objective.tpot_s)) if limit]
    return max(shares, default=0.0)


def _change(flip: Flip, at: float, to: str | None, usd: float | None) -> str:
    """Where the choice flips, to what, and what that costs."""
    cost = "" if usd is None else f", {usd:,.2f} USD/h"
    return f"{'below' if at < flip.nominal else 'above'} {at:.4g}: {to}{cost}"


def _explanation(answer: Answer, details: Details, out: Output) -> None:
    load, objective = answer.question.load, answer.question.objective
    out.note("", out.paint("what binds each, in users at once", "bold"))
    for choice in answer.chosen.confirmed:
        out.note(f"{label(choice.plan)}: {_binding(ceilings(choice.plan, load, objective))}")
    out.note("", out.paint("what flips the choice", "bold"))
    for flip in details.flips:
        span = f"{flip.low:g} to {flip.high:g}, taken as {flip.nominal:g}"
        change = "does not change it"
        if flip.flips_at is not None:
            change = _change(flip, flip.flips_at, flip.to, flip.usd_per_hour)
        if flip.further_at is not None:
            change += f"; {_change(flip, flip.further_at, flip.further_to, flip.further_usd_per_hour)}"
        out.note(f"{flip.assumption} ({span}): {change}")
    out.note("", out.paint("the trade between tokens per user and tokens per GPU", "bold"))
    step = max(1, len(details.points) // 12)
    for point in details.points[::step]:
        one = point.plan
        trade = f"{point.user:8,.1f} tok/s per user, {point.gpu:10,.1f} tok/s per GPU"
        out.note(f"{trade}: {label(one)}, {_number(one.sized.sequences, 'sequence')}")


def answer(question: Question, explain: bool, emit: bool, out: Output) -> int:
    """Prints the answer; 1 where nothing meets the objective."""
    solved = _solve(question, out)
    confirmed = solved.chosen.confirmed
    launch = _launch(solved, confirmed[0].plan) if confirmed else []
    if emit:
        if not confirmed:
            for line in _verdict(solved, out):
                out.warn(line)
            return 1
        if out.format == "table":
            out.write(script(launch))
        else:
            records = launch_records(launch)
            out.records(records, lambda: (list(records[0]), [[str(value) for value in one.values()] for one in records]))
        return 0
    flips: list[Flip] = []
    wanted = explain or out.format in ("json", "jsonl")
    if wanted and confirmed:
        flips = sensitivity(
            solved.found.plans, question.load, question.objective, solved.rents, question.most, solved.drafts, solved.chosen,
            partial(assured, counted=question.requests, seeds=2),
        )  # fmt: skip
    details = Details(frontier(solved.found.points) if wanted else [], flips)
    out.note(*_verdict(solved, out), "")
    found = [_record(solved, rank, choice, details) for rank, choice in enumerate(confirmed, 1)]
    if confirmed or out.format != "table":
        out.records(found, lambda: _cells(confirmed, question.load, question.objective.percentile))
    if explain and confirmed:
        _explanation(solved, details, out)
    if confirmed and not out.silent:
        out.note("", out.paint("launch", "bold"), script(launch))
        out.note("", out.paint("replay what was simulated", "bold"))
        out.note(*(line for one in confirmed for line in (f"# {label(one.plan)}", replay(solved, one.plan))))
    plans = [choice.plan for choice in confirmed]
    notes = dict.fromkeys([*(note for plan in plans for note in plan.setup.notes), *(left_ranges(plans) if plans else ())])
    lines = [*notes, *_travel(confirmed, question.load), *assumes(solved)]
    gap = [""] if confirmed or out.format != "table" else []
    told = [f"note: {line}" for line in solved.notes] + [f"assumes: {line}" for line in lines]
    out.note(*gap, *told, f"not modelled: {', '.join(_left_out(solved))}")
    return 0 if confirmed else 1

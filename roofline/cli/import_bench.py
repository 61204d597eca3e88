"""``roofline import-bench``: what a benchmark measured, beside what is predicted of the same deployment."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roofline.cli.bundles import bundled
from roofline.cli.edit_options import EDIT_OPTIONS, Chosen
from roofline.cli.mesh_options import MESH_OPTIONS, Meshes
from roofline.cli.options import Gpu, accelerators, complete_engines, complete_models
from roofline.cli.output import OUTPUT, Cells, Output
from roofline.errors import InputError

if TYPE_CHECKING:
    from roofline.bench_files import Measured
    from roofline.model import Model
    from roofline.planner.setups import Setup

ENGINES = {"vllm bench serve": "vllm", "sglang bench_serving": "sglang", "llama-bench": "llamacpp"}
METRICS = ("ttft_s", "tpot_s", "output_tok_per_s")
SUFFIXES = ("-instruct", "-chat", "-it", "-fp8", "-awq")
DEFAULT_BUDGET = 8192
MOST_AT_ONCE = 100_000
"""Requests at once that are simulated."""
SAME_SIZE = 0.1
"""By how much of its size a model may differ from the one that a file states."""

Record = dict[str, Any]


def _format(row: Measured, model: Model) -> Model:
    """The model in the format of weights that a row states. Raises InputError for one that is not known here."""
    from roofline.edits import apply, dtype
    from roofline.planner.setups import stored_formats

    if not row.weights or row.weights.removeprefix("gguf-") == stored_formats(model)[0]:
        return model
    try:
        return apply(model, [dtype(row.weights)])
    except InputError as error:
        raise InputError(f"dtype: {row.where} states weights in {row.stated}; give their format with --dtype ({error})") from None


def _contradiction(row: Measured, model: Model) -> str:
    """How the file's size of the model differs from that of the model that is predicted, "" where it does not."""
    from roofline.units import capacity

    needed = float(model.weight_bytes)
    if row.weight_bytes is None or abs(needed / row.weight_bytes - 1) <= SAME_SIZE:
        return ""
    stated = f"{capacity(row.weight_bytes)}{' in ' + row.stated if row.stated else ''}"
    return f"{row.where} states a model of {stated}, and {model.name} as predicted has {capacity(needed)}: is it the same?"


def _model(name: str | None, rows: Sequence[Measured], edits: Chosen) -> Model:
    """The model that was measured. Raises InputError where neither the file nor the user names a known one."""
    from roofline.cli.points import variants
    from roofline.configs.load import load_model

    found = name or next((row.model for row in rows if row.model), "")
    if not found:
        raise InputError("model: the file does not say which model was measured; name it with --model")
    if edits.count > 1:
        raise InputError("edits: a measurement has one set of formats; give one value per edit")
    tried = [found] if name else [found, *(found.lower().removesuffix(suffix) for suffix in SUFFIXES)]
    for text in tried:
        try:
            loaded = load_model(text)
        except InputError:
            continue
        return variants(loaded, edits)[-1].model
    if name:
        load_model(name)
    raise InputError(f"model: {found!r} of the file is not in the catalogue; name the model with --model")


def _serving(row: Measured, setup: Setup, budget: int) -> Record:
    """Predicted TTFT, TPOT and throughput of a serving run."""
    from roofline.planner.demand import demand
    from roofline.planner.sizing import size
    from roofline.serving.closed_form import Client, closed_form

    dp = setup.mesh.dp
    if row.concurrency is not None:
        rounds = max(1.0, (row.requests or row.concurrency) / row.concurrency)
        blocks, page = setup.blocks(budget, row.concurrency)
        capacity = float("inf") if blocks is None else float(blocks * page)
        found = closed_form(
            setup.deployment, setup.engine, max(1.0, row.concurrency / dp), row.isl, row.osl, times=setup.times,
            capacity_tokens=capacity, batched_tokens=budget, client=Client(rounds=rounds),
        )  # fmt: skip
        return {
            "ttft_s": found.ttft_s, "tpot_s": found.tpot_s, "output_tok_per_s": found.output_tok_per_s * dp,
            "concurrency": row.concurrency,
        }  # fmt: skip
    if row.at_once:
        return _at_once(row, setup, budget)
    if row.rate is None:
        raise InputError(
            f"{row.where}: the file states neither max_concurrency nor a finite request_rate, so the load is not known"
        )
    load = demand(max(1, round(row.isl)), max(1, round(row.osl)), rate=row.rate)
    low, high = 1, max(1, setup.users(budget, 1024))
    while low < high:
        middle = (low + high) // 2
        sized = size(setup.times, middle, budget, load)
        low, high = (low, middle) if sized and sized.rate * dp >= row.rate else (middle + 1, high)
    sized = size(setup.times, low, budget, load)
    if sized is None:
        return {}
    served = min(row.rate, sized.rate * dp)
    return {"ttft_s": sized.ttft_s, "tpot_s": sized.tpot_s, "output_tok_per_s": served * load.osl, "concurrency": low * dp}


def _at_once(row: Measured, setup: Setup, budget: int) -> Record:
    """What the simulator says of requests of mean lengths that all come at the beginning."""
    from roofline.allocation import Settings
    from roofline.serving.lengths import Distribution
    from roofline.serving.metrics import Result
    from roofline.serving.server import make_server
    from roofline.serving.workload import synthetic

    number = min(row.requests or 1, MOST_AT_ONCE)
    prompt, output = (Distribution("constant", length, length) for length in (max(1, round(row.isl)), max(1, round(row.osl))))
    load = synthetic(number, prompt, output, concurrency=number)
    asked = Settings(max_model_len=setup.longest, batched_tokens=budget) if setup.paged else Settings(max_model_len=setup.longest)
    server = make_server(setup.deployment, load, engine=setup.engine if setup.paged else None, settings=asked)
    found = Result(server.serve(load), gpus=server.gpus)
    tpot = found.tpot_s
    return {
        "ttft_s": float(found.ttft_s.mean()), "tpot_s": float(tpot.mean()) if len(tpot) else None,
        "output_tok_per_s": int(load.output.sum()) / found.span_s, "concurrency": number,
    }  # fmt: skip


def _phase(row: Measured, setup: Setup) -> Record:
    """Predicted time of one phase alone, one sequence."""
    from roofline.serving.steps import StepShape

    if row.kind == "prompt":
        tokens = round(row.isl)
        pairs = tokens * row.context + tokens * (tokens + 1) // 2
        seconds = setup.times.seconds(StepShape(prefill_tokens=tokens, prefill_pairs=pairs, prefills=1))
        return {"ttft_s": seconds, "tpot_s": None, "output_tok_per_s": tokens / seconds, "concurrency": 1}
    steps = round(row.osl)
    seconds = float(setup.times.decode_run(1, row.context, steps).sum()) / steps
    return {"ttft_s": None, "tpot_s": seconds, "output_tok_per_s": 1 / seconds, "concurrency": 1}


def _impossible(row: Measured, setup: Setup) -> list[str]:
    """Measured times that no such deployment can reach: below the bound of one sequence that has the GPUs to itself."""
    decode = setup.deployment.decode(1, max(1, round(row.isl) + row.context))
    least = {"tpot_s": float(decode.bound_s)}
    if row.kind == "prompt":
        least["ttft_s"] = float(setup.deployment.prefill(1, max(1, round(row.isl)), cached=row.context).bound_s)
    return [name for name, bound in least.items() if getattr(row, name) and getattr(row, name) < bound]


def _record(row: Measured, setup: Setup, budget: int) -> Record:
    from roofline.expected.serving import left_range, standing

    predicted = _serving(row, setup, budget) if row.kind == "serving" else _phase(row, setup)
    record: Record = {
        "schema": 1, "where": row.where, "tool": row.tool, "kind": row.kind, "model": setup.variant.model.name,
        "gpu": setup.accelerator.id, "gpus": setup.gpus, "mesh": setup.mesh.flags, "engine": setup.engine.id,
        "input_tokens": row.isl, "output_tokens": row.osl, "context_tokens": row.context,
        "concurrency": row.concurrency, "at_once": row.at_once, "request_rate": row.rate,
        "dtype": setup.variant.weights, "predicted_concurrency": predicted.get("concurrency"),
    }  # fmt: skip
    for name in METRICS:
        measured, found = getattr(row, name), predicted.get(name)
        record[f"measured_{name}"], record[f"predicted_{name}"] = measured, found
        record[f"error_{name}"] = found / measured - 1 if measured and found else None
    at_once = record["predicted_concurrency"]
    batch = [at_once / setup.mesh.dp] if at_once else []
    prompts = row.kind != "generate"
    notes = dict.fromkeys([*setup.notes, *left_range(setup.times, batch, prompts)])
    record["faster_than_bound"] = _impossible(row, setup)
    return {**record, "provenance": standing(setup.times, batch, prompts), "notes": list(notes)}


def _number(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _cells(records: Sequence[Record]) -> Cells:
    from roofline.units import count, latency

    def pair(record: Record, name: str) -> list[str]:
        measured, predicted, error = (record[f"{what}_{name}"] for what in ("measured", "predicted", "error"))
        show = count if name == "output_tok_per_s" else latency
        return [
            "-" if measured is None else show(float(measured)), "-" if predicted is None else show(float(predicted)),
            "-" if error is None else f"{100 * error:+.1f} %",
        ]  # fmt: skip

    headers = ["where", "load", "input\ntokens", "output\ntokens"]
    for name in ("TTFT", "TPOT", "tok/s"):
        headers += [f"{name}\nmeasured", f"{name}\npredicted", "error"]
    rows = []
    for r in records:
        load = (
            f"{r['predicted_concurrency']:,} at once"
            if r["at_once"]
            else _number(r["concurrency"], "user")
            if r["concurrency"]
            else f"{r['request_rate']:g}/s"
            if r["request_rate"]
            else "-"
        )
        cells = [cell for name in METRICS for cell in pair(r, name)]
        rows.append([r["where"], load, count(float(r["input_tokens"])), count(float(r["output_tokens"])), *cells])
    return headers, rows


@bundled(edits=EDIT_OPTIONS, meshes=MESH_OPTIONS, out=OUTPUT)
def import_bench(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="Results of vllm bench serve, SGLang bench_serving or llama-bench.")
    ],
    gpu: Gpu = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="MODEL", help="What was measured.  [default: as the file says]", autocompletion=complete_models
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine",
            metavar="NAME",
            help="vllm, sglang, trtllm or llamacpp.  [default: the tool's]",
            autocompletion=complete_engines,
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option("--max-num-batched-tokens", metavar="N", help=f"Token budget of a step.  [default: {DEFAULT_BUDGET}]"),
    ] = None,
    *,
    edits: Chosen,
    meshes: Meshes,
    out: Output,
) -> int:
    """What a benchmark measured, beside what is predicted of the same deployment.

    roofline import-bench results.json --gpu h100-sxm --tp 2 --kv-dtype fp8
    """
    from roofline.bench_files import read_bench
    from roofline.cli import sweeps
    from roofline.engines.profile import load_engine
    from roofline.parallel.mesh import Mesh
    from roofline.planner.setups import Setup, Variant, stored_formats
    from roofline.serving.steps import check_served
    from roofline.sharded import ShardedDeployment

    rows = read_bench(Path(file))
    chips = accelerators(gpu)
    found = meshes.all()
    if len(chips) > 1 or len(found) > 1:
        raise InputError("gpu: a measurement ran on one kind of GPU and one mesh; give one of each")
    tokens = sweeps.whole_numbers([budget], "max-num-batched-tokens")[0] if budget else DEFAULT_BUDGET
    loaded = _model(model, rows, edits)
    check_served(loaded)
    profile = load_engine(engine or ENGINES[rows[0].tool])
    profile.check(chips[0])
    mesh = found[0] or Mesh()
    longest = max(round(row.isl + row.osl) + row.context for row in rows)
    named = "dtype" in edits.values
    made: dict[str, Setup] = {}
    for row in rows:
        if row.weights not in made:
            one = loaded if named else _format(row, loaded)
            deployment = ShardedDeployment(one, chips[0], mesh=mesh)
            made[row.weights] = Setup(Variant(one, *stored_formats(one)), chips[0], mesh, profile, longest, deployment)
    records = [_record(row, made[row.weights], tokens) for row in rows]
    setup = made[rows[0].weights]
    doubts = [doubt for row in rows if (doubt := _contradiction(row, made[row.weights].variant.model))]
    words = {row.stated: row.weights for row in rows if row.weights}
    stated = [] if named else [f"weights in {name}, as the file states ({text})" for text, name in words.items()]
    where = f"{mesh.ranks} x {chips[0].id}" if mesh.ranks > 1 else chips[0].id
    out.note(out.paint(f"{loaded.name} on {where} under {profile.name}: {rows[0].tool}, {_number(len(rows), 'run')}", "bold"), "")
    out.records(records, lambda: _cells(records))
    beaten = {name: [r["where"] for r in records if name in r["faster_than_bound"]] for name in ("ttft_s", "tpot_s")}
    doubts += [
        f"{', '.join(places[:5])}: {name.removesuffix('_s').upper()} is faster than {where} allows one sequence alone: "
        "look at the units"
        for name, places in beaten.items() if places
    ]  # fmt: skip
    out.note(
        "", *doubts, *(f"assumes: {note}" for note in dict.fromkeys([*stated, *(note for r in records for note in r["notes"])]))
    )
    if setup.times.provenance == "datasheet":
        out.note("predicted times are lower bounds: errors below zero are expected, one above zero is a finding")
    return 1 if any(beaten.values()) else 0

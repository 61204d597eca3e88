"""``roofline simulate``: a server under a load, request by request and step by step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roofline.cli.bundles import bundled
from roofline.cli.edit_options import EDIT_OPTIONS, Chosen
from roofline.cli.limits import too_long, without_unit
from roofline.cli.mesh_options import MESH_OPTIONS, Meshes
from roofline.cli.options import Fraction, Gpu, Model, accelerators, complete_engines, complete_models
from roofline.cli.output import OUTPUT, Output
from roofline.cli.prefill_options import PREFILL_OPTIONS, Prefill
from roofline.cli.traffic_options import TRAFFIC_OPTIONS, Load, Traffic, number, seconds, whole
from roofline.errors import InputError

if TYPE_CHECKING:
    from roofline.accelerator import Accelerator
    from roofline.allocation import Settings
    from roofline.cli.points import Variant
    from roofline.engines.profile import Profile
    from roofline.inference import Deployment
    from roofline.parallel.mesh import Mesh
    from roofline.serving.metrics import Objective, Result
    from roofline.serving.server import Front, Options, Server

MOST_RUNS = 10_000
OWN_DRAFTS = ("mtp", "eagle")
"""Drafts that are one layer like the target's last."""
NOT_MODELLED = ("tokenisation and the network to the client", "failures and restarts", "host work beyond --step-overhead")
Record = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One simulation; everything in it travels to another process."""

    variant: Variant
    accelerator: Accelerator
    mesh: Mesh | None
    engine: Profile | None
    settings: Settings
    fraction: Any
    options: Options
    draft: tuple[int, float, float | None, Any] | None
    traffic: Traffic
    load: Load
    objective: Objective
    prefill: Prefill | None
    optional: bool = False

    def deployment(self, mesh: Mesh | None) -> Deployment:
        """What serves, on a mesh."""
        from fractions import Fraction as Share

        share = Share(1) if self.engine or self.fraction is None else self.fraction
        if mesh is None:
            from roofline.inference import Deployment

            return Deployment(self.variant.model, self.accelerator, memory_fraction=share)
        from roofline.sharded import ShardedDeployment

        return ShardedDeployment(self.variant.model, self.accelerator, memory_fraction=share, mesh=mesh)

    def _front(self) -> Front | None:
        """What replicas that only prefill run on, where it was said."""
        if self.prefill is None:
            return None
        from roofline.serving.server import Front

        other = self.prefill
        return Front(self.deployment(other.mesh or self.mesh), other.settings(self.settings), other.kv_tokens)

    def server(self) -> tuple[Server, Any]:
        """(server, workload) of this simulation."""
        from roofline.serving.server import make_server

        longest = self.settings.max_model_len or self.variant.model.max_context
        workload = self.traffic.workload(self.load, longest)
        options = replace(self.options, draft=self._speculation())
        server = make_server(
            self.deployment(self.mesh), workload, engine=self.engine, settings=self.settings, options=options, front=self._front()
        )
        return server, workload

    def _speculation(self) -> Any:
        if self.draft is None:
            return None
        from roofline.inference import Deployment
        from roofline.serving.replica import Speculation
        from roofline.serving.server import best_times
        from roofline.speculative.rounds import check_vocabulary

        drafted, alpha, cost, model = self.draft
        if model is None:
            return Speculation(drafted, alpha, None, cost or 0.0)
        if isinstance(model, str):
            from roofline.speculative.heads import eagle_step
            from roofline.speculative.rounds import multi_token_module

            model = (multi_token_module if model == "mtp" else eagle_step)(self.variant.model)
        check_vocabulary(self.variant.model, model)
        longest = self.settings.max_model_len
        times = best_times(Deployment(model, self.accelerator), self.engine, longest=longest, bound=self.options.bound)
        return Speculation(drafted, alpha, times)


def run(job: Job) -> Record | None:
    """The record of one simulation; None for the model as it is where it does not fit, beside edits that were asked for."""
    try:
        server, workload = job.server()
    except InputError:
        if job.optional:
            return None
        raise
    return _record(job, server, _result(job, server, workload))


def _result(job: Job, server: Server, workload: Any) -> Result:
    from roofline.serving.metrics import Result

    traffic = job.traffic
    served = server.serve(workload)
    return Result(served, job.objective, server.gpus, server.times.provenance, traffic.warm_up, traffic.cool_down)


def _record(job: Job, server: Server, result: Result) -> Record:
    from roofline.expected.serving import left_range, standing

    cache, policy, traffic = server.cache, server.policy, job.traffic
    refused = len(result.outcome.refused)
    assumes = [*server.notes, *result.outcome.workload.assumes, *server.deployment.model.assumes]
    if job.mesh is not None and job.mesh.dp > 1:
        assumes.append(f"{job.mesh.dp} data-parallel replicas step on their own")
    if refused:
        limits = {"kv_tokens": None if cache.blocks is None else cache.blocks * cache.block, "max_model_len": cache.longest}
        assumes.append(f"{refused:,} requests are refused: {too_long(limits)}")
    figures = result.to_dict()
    batch = figures["mean_decode_batch"]
    outside = left_range(server.times, [] if batch is None else [batch])
    return {
        "schema": 1,
        "model": job.variant.model.name,
        "variant": job.variant.kind,
        "edits": list(job.variant.flags),
        "gpu": job.accelerator.id,
        "gpus": server.gpus,
        "mesh": job.mesh.flags if job.mesh else "",
        "replicas": job.options.replicas,
        "prefill_replicas": job.options.prefill_replicas,
        "prefill_mesh": job.prefill.mesh.flags if job.prefill and job.prefill.mesh else None,
        "engine": job.engine.id if job.engine else None,
        "engine_since": job.engine.since if job.engine else None,
        "scheduler": policy.scheduler,
        "max_num_seqs": policy.sequences,
        "max_num_batched_tokens": policy.batched_tokens,
        "max_model_len": cache.longest,
        "block_tokens": cache.block,
        "kv_blocks": cache.blocks,
        "kv_tokens": None if cache.blocks is None else cache.blocks * cache.block,
        "kv_capacity_from": cache.source,
        "allocation": server.allocation,
        "preemption": policy.preemption,
        "prefix_cache": job.options.prefix_cache,
        "draft_tokens": job.draft[0] if job.draft else 0,
        "acceptance": job.draft[1] if job.draft else None,
        "rate_request_per_s": job.load.rate,
        "concurrency": job.load.concurrency,
        "trace": traffic.trace,
        "seed": traffic.seed,
        "percentile": job.objective.percentile,
        **figures,
        "provenance": standing(server.times, [] if batch is None else [batch]),
        "outside_calibrated_range": list(outside),
        "assumes": assumes,
        "not_modelled": [*server.deployment.model.not_modelled, *NOT_MODELLED],
    }


def _draft(tokens: str | None, acceptance: str | None, cost: str | None, model: str | None) -> Any:
    if tokens is None:
        given = next((f for f, v in (("acceptance", acceptance), ("draft-cost", cost), ("draft", model)) if v is not None), None)
        if given:
            raise InputError(f"{given}: it belongs to speculative decoding; say how many tokens are drafted: --draft-tokens 3")
        return None
    if acceptance is None:
        raise InputError("acceptance: say how likely a drafted token is accepted, as in --acceptance 0.7")
    if (cost is None) == (model is None):
        both = "" if cost is None else ", not both"
        raise InputError(f"draft: give a draft model (--draft), or its step's time over the target's (--draft-cost 0.05){both}")
    loaded: Any = model
    if model is not None and model not in OWN_DRAFTS:
        from roofline.configs.load import load_model

        loaded = load_model(model)
    share = None if cost is None else number(cost, "draft-cost", 0, 1000)
    return whole(tokens, "draft-tokens", 1, 64), number(acceptance, "acceptance", 0, 1), share, loaded


def _parts(text: str | None, replicas: str | None) -> tuple[int, int]:
    """(replicas that decode or do all, replicas that only prefill)."""
    if text is None:
        return (whole(replicas, "replicas", 1, 1024) if replicas else 1), 0
    if replicas:
        raise InputError("replicas: --disaggregate says how many replicas there are; give one of them")
    before, colon, after = text.partition(":")
    if not colon:
        raise InputError(f"disaggregate: {text!r} is not a split; write prefill and decode replicas, as in 1:2")
    return whole(after, "disaggregate", 1, 1023), whole(before, "disaggregate", 1, 1023)


def _link(text: str | None, disaggregated: bool) -> str | float | None:
    if text is None:
        return None
    if not disaggregated:
        raise InputError("link: it carries caches between prefill and decode; give --disaggregate 1:1")
    if text[:1].isdigit():
        from roofline.units import parse_quantity

        rate = parse_quantity(text, "bytes/s", "link", "GB/s")
        if not 0 < rate <= 10**18:
            raise InputError(f"link: {text!r} is out of range; give a bandwidth above 0, as in 50GB/s")
        return float(rate)
    return text


def _settings(fraction: list[str] | None, given: dict[str, str | None]) -> Any:
    from roofline.allocation import Settings
    from roofline.cli import sweeps

    sizes = {name: whole(text, field) for name, field, text in (
        ("max_model_len", "max-model-len", given["max_model_len"]),
        ("batched_tokens", "max-num-batched-tokens", given["batched"]),
        ("sequences", "max-num-seqs", given["sequences"]), ("page_tokens", "block-size", given["block"]),
    ) if text is not None}  # fmt: skip
    shares = sweeps.fractions(fraction, "memory-fraction") if fraction else [None]
    if len(shares) > 1:
        raise InputError("memory-fraction: simulate answers for one value")
    return Settings(memory_fraction=shares[0], **sizes)


Text = str | None


@bundled(traffic=TRAFFIC_OPTIONS, edits=EDIT_OPTIONS, meshes=MESH_OPTIONS, prefill=PREFILL_OPTIONS, out=OUTPUT)
def simulate(
    model: Model,
    gpu: Gpu = None,
    engine: Annotated[
        Text,
        typer.Option(
            "--engine",
            metavar="NAME",
            help="vllm, sglang, trtllm or llamacpp: cache, defaults, and measured step times.  [default: none, datasheet bounds]",
            autocompletion=complete_engines,
        ),
    ] = None,
    engine_version: Annotated[Text, typer.Option("--engine-version", metavar="X.Y", help="[default: the newest known]")] = None,
    scheduler: Annotated[
        Text, typer.Option("--scheduler", metavar="NAME", help="chunked, continuous, prefill-first, priority or static.")
    ] = None,
    max_num_seqs: Annotated[Text, typer.Option("--max-num-seqs", metavar="N", help="Sequences of a step.")] = None,
    max_num_batched_tokens: Annotated[
        Text, typer.Option("--max-num-batched-tokens", metavar="N", help="Token budget of a step.")
    ] = None,
    max_model_len: Annotated[Text, typer.Option("--max-model-len", metavar="N", help="Longest request.")] = None,
    block_size: Annotated[Text, typer.Option("--block-size", metavar="N", help="Tokens of a block of cache.")] = None,
    memory_fraction: Fraction = None,
    allocation: Annotated[
        Text, typer.Option("--allocation", metavar="NAME", help="paged, oracle, power-of-two or contiguous regions.")
    ] = None,
    prefix_cache: Annotated[
        bool, typer.Option("--prefix-caching", help="Keep prefixes of past requests for later ones.")
    ] = False,
    preemption: Annotated[
        str, typer.Option("--preemption", metavar="NAME", help="recompute, or swap to the host.")
    ] = "recompute",
    draft_tokens: Annotated[
        Text, typer.Option("--draft-tokens", metavar="N", help="Speculative decoding: tokens drafted a step.")
    ] = None,
    acceptance: Annotated[Text, typer.Option("--acceptance", metavar="A", help="How likely a drafted token is accepted.")] = None,
    draft_cost: Annotated[
        Text, typer.Option("--draft-cost", metavar="C", help="A draft step's time over a decode step's.")
    ] = None,
    draft: Annotated[
        Text,
        typer.Option(
            "--draft",
            metavar="MODEL",
            help="The draft model, mtp or eagle; or --draft-cost.",
            autocompletion=complete_models,
        ),
    ] = None,
    kv_tokens: Annotated[
        Text, typer.Option("--kv-tokens", metavar="N", help="Tokens of each replica's cache.  [default: what memory leaves]")
    ] = None,
    bound: Annotated[bool, typer.Option("--bound", help="Step times are the datasheet's bound, whatever is calibrated.")] = False,
    replicas: Annotated[Text, typer.Option("--replicas", metavar="N", help="Copies of the deployment side by side.")] = None,
    disaggregate: Annotated[
        Text, typer.Option("--disaggregate", metavar="P:D", help="P copies prefill, D decode; caches travel over --link.")
    ] = None,
    link: Annotated[
        Text, typer.Option("--link", metavar="NAME|RATE", help="A link of the GPU's file, or 50GB/s per GPU.  [default: network]")
    ] = None,
    step_overhead: Annotated[
        Text, typer.Option("--step-overhead", metavar="TIME", help="Host time per step that nothing hides.")
    ] = None,
    ttft: Annotated[Text, typer.Option("--ttft", metavar="TIME", help="Objective: time to first token, as in 1s.")] = None,
    tpot: Annotated[
        Text, typer.Option("--tpot", metavar="TIME", help="Objective: mean time per output token, as in 40ms.")
    ] = None,
    percentile: Annotated[str, typer.Option("--percentile", metavar="P", help="Of TTFT, for the objective.")] = "99",
    tpot_percentile: Annotated[
        Text, typer.Option("--tpot-percentile", metavar="P", help="Of TPOT, for the objective, instead of its mean.")
    ] = None,
    perfetto: Annotated[Text, typer.Option("--perfetto", metavar="FILE", help="Writes a trace for ui.perfetto.dev.")] = None,
    timeline: Annotated[Text, typer.Option("--timeline", metavar="FILE", help="Writes every request's times as CSV.")] = None,
    jobs: Annotated[str, typer.Option("--jobs", metavar="N", help="Processes for several simulations, -1 for all cores.")] = "1",
    cluster: Annotated[
        Text, typer.Option("--cluster", metavar="ADDRESS", help="A dask scheduler for several simulations.")
    ] = None,
    no_base: Annotated[bool, typer.Option("--no-base", help="Edited models alone, without the one they come from.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 when an objective is missed.")] = False,
    *,
    traffic: Traffic,
    edits: Chosen,
    meshes: Meshes,
    prefill: Prefill,
    out: Output,
) -> int:
    """A server under a load, request by request and step by step: TTFT, TPOT, ITL, throughput, goodput, cache.

    Lists of rates, users, GPUs, meshes and edits give a simulation for each combination.

    roofline simulate llama-3-8b --gpu h100-sxm --rate 4,8,16 --isl 1024 --osl 256 --ttft 1s --tpot 40ms
    """
    from roofline.cli.points import judged, variants
    from roofline.cli.simulated import assumed, batches, bounds, cells, verdicts
    from roofline.configs.load import load_model
    from roofline.fanout import spread
    from roofline.serving.metrics import Objective
    from roofline.serving.server import Options
    from roofline.serving.steps import check_served

    objective = Objective(
        seconds(ttft, "ttft") if ttft else None, seconds(tpot, "tpot") if tpot else None,
        number(percentile, "percentile", 0, 100),
        number(tpot_percentile, "tpot-percentile", 0, 100) if tpot_percentile else None,
    )  # fmt: skip
    several, only_prefill = _parts(disaggregate, replicas)
    if allocation is not None:
        from roofline.errors import suggest
        from roofline.paging import POLICIES

        if allocation not in POLICIES:
            raise InputError(f"allocation: unknown {allocation!r}.{suggest(allocation, POLICIES)} Known: {', '.join(POLICIES)}")
    options = Options(
        scheduler, preemption, allocation, prefix_cache, several, only_prefill, _link(link, bool(only_prefill)), None,
        seconds(step_overhead, "step-overhead", zero=True) if step_overhead else 0.0, perfetto is not None, traffic.seed,
        bound, whole(kv_tokens, "kv-tokens") if kv_tokens else None,
    )  # fmt: skip
    settings = _settings(
        memory_fraction,
        {"max_model_len": max_model_len, "batched": max_num_batched_tokens, "sequences": max_num_seqs, "block": block_size},
    )
    profile = None
    if engine is not None:
        from roofline.engines.profile import load_engine

        profile = load_engine(engine, engine_version)
    elif engine_version is not None:
        raise InputError("engine-version: it belongs to an engine; name it, as in --engine vllm")
    drafting = _draft(draft_tokens, acceptance, draft_cost, draft)
    loaded, chips = load_model(model), accelerators(gpu)
    check_served(loaded)
    if profile is not None:
        for accelerator in chips:
            profile.check(accelerator)
    compared = variants(loaded, edits)
    if no_base and not edits.values:
        raise InputError("no-base: without edits there is nothing but the base; leave it out, or edit the model (--dtype fp8)")
    if perfetto or timeline or no_base:
        compared = judged(compared, edits)
    asked = judged(compared, edits)
    work = [
        Job(
            variant, accelerator, mesh, profile, settings, settings.memory_fraction, options, drafting, traffic, load, objective,
            prefill.check(bool(only_prefill)), variant not in asked,
        )
        for variant in compared
        for accelerator in chips
        for mesh in meshes.all()
        for load in traffic.loads
    ]  # fmt: skip
    if len(work) > MOST_RUNS:
        raise InputError(f"simulate: {len(work):,} simulations are more than {MOST_RUNS:,}; ask for fewer combinations")
    if perfetto or timeline:
        if len(work) > 1:
            raise InputError(
                f"{'perfetto' if perfetto else 'timeline'}: it shows one simulation, and {len(work):,} were asked for"
            )
        with out.bar("simulating", 1):
            found: list[Record | None] = [_written(work[0], perfetto, timeline)]
    else:
        with out.bar("simulating", len(work)) as step:
            found = spread(run, work, jobs=_jobs(jobs), cluster=cluster, step=step)
    records = [record for record in found if record is not None]
    loads = [job.load.words for job, record in zip(work, found, strict=True) if record is not None]
    for record in records:
        record["assumes"] += without_unit(ttft=ttft, tpot=tpot, step_overhead=step_overhead)
    for record in records if len(records) < len(work) else ():
        record["assumes"].append(f"{loaded.name} as it is does not fit and is left out")
    said = [*verdicts(records, loads, objective, out), *bounds(records, engine)]
    out.note(*said, *([""] if said else []))
    out.records(records, lambda: cells(records, loads))
    out.note("", *(f"assumes: {line}" for line in dict.fromkeys([*assumed(records), *batches(profile, records)])))
    out.note(f"not modelled: {', '.join(dict.fromkeys(item for r in records for item in r['not_modelled']))}")
    return 1 if check and any(r["misses"] for r in records) else 0


def _jobs(text: str) -> int:
    return -1 if text.strip() == "-1" else whole(text, "jobs", 1, 4096)


def _written(job: Job, perfetto: str | None, timeline: str | None) -> Record:
    """The record of a simulation whose events and requests are written to files."""
    server, workload = job.server()
    result = _result(job, server, workload)
    if perfetto:
        from roofline.serving.perfetto import write

        write(result.outcome, perfetto)
    if timeline:
        try:
            result.to_frame().to_csv(timeline, index_label="request")
        except OSError as error:
            raise InputError(
                f"timeline: {timeline}: {error.strerror or error}; give the path of a file that can be written"
            ) from None
    return _record(job, server, result)

"""The simulator's word on a plan: percentiles of TTFT and the mean TPOT of its own load, request by request.

One instance is simulated under its share of the load, or, of a disaggregated deployment, as few instances of both kinds as
have their ratio; requests go to instances at random, and inside an instance to the rank with the fewest. Requests that come
before a steady state is reached are served and not counted. ``roofline simulate`` says the same: ``Replay.words`` is its
command.

A percentile of one run is a sample. What is recommended keeps its limits in each of ``SEEDS`` runs, and so does the upper
confidence limit of the percentile over the requests of all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, gcd
from typing import TYPE_CHECKING, Any

from roofline.planner.demand import Demand
from roofline.planner.disaggregate import way_out
from roofline.planner.search import Plan
from roofline.planner.setups import scheduler
from roofline.serving.metrics import Objective, Result

if TYPE_CHECKING:
    from roofline.allocation import Settings
    from roofline.serving.server import Options, Server
    from roofline.serving.workload import Workload

COUNTED = 1500
"""Requests that are counted: fifteen of them lie beyond the 99th percentile."""
SEEDS = 3
"""Runs, each with arrivals of its own, in all of which a deployment that is recommended keeps its limits."""
CONFIDENCE = 0.95
"""That a percentile lies below its upper limit, were requests independent of each other."""
LIVES = 2
"""How often the sequences that run at once are served and replaced before counting begins."""


@dataclass(frozen=True)
class Verdict:
    """What the simulator found.

    Attributes:
        ttft_s, ttft_high_s, tpot_s: mean, percentile, mean. rate: requests per second of all instances, as served.
        requests: counted. refused: requests that no replica can hold. preempted: requests that were pushed out.
        utilisation: share of the time that the simulated ranks were busy. batch: mean sequences of decode steps.
        hits: share of prompt tokens that the prefix cache had. met: whether the objective is.
        tpot_high_s: the percentile of TPOT that the objective names; None where it judges the mean.
        seeds: runs that ``met`` rests on; all other figures are of the first, the one that is replayed, or of the first that
            misses. pooled: requests that all of them count. ttft_most_s, tpot_most_s: upper confidence limits of the
            percentiles over these; None where one run was all.
    """

    ttft_s: float
    ttft_high_s: float
    tpot_s: float
    rate: float
    requests: int
    refused: int
    preempted: int
    utilisation: float
    batch: float
    met: bool
    hits: float = 0.0
    tpot_high_s: float | None = None
    seeds: int = 1
    pooled: int | None = None
    ttft_most_s: float | None = None
    tpot_most_s: float | None = None


@dataclass(frozen=True)
class Replay:
    """The part of a plan that is simulated, and how.

    Attributes:
        plan, load, objective: the whole. decode, prefill: instances of each kind. counted, seed: see ``simulate``.
    """

    plan: Plan
    load: Demand
    objective: Objective
    counted: int = COUNTED
    seed: int = 0

    @property
    def decode(self) -> int:
        """Instances that decode, or do all."""
        front = self.plan.prefill
        return self.plan.instances // gcd(self.plan.instances, front.instances) if front else 1

    @property
    def prefill(self) -> int:
        """Instances that only prefill."""
        front = self.plan.prefill
        return front.instances // gcd(self.plan.instances, front.instances) if front else 0

    @property
    def copies(self) -> int:
        """How many such parts the plan has."""
        return self.plan.instances // self.decode

    @property
    def share(self) -> Demand:
        """The load of this part."""
        if self.load.offline:
            running = self.plan.sized.sequences * self.plan.setup.mesh.dp * self.decode
            return replace(self.load, concurrency=running)
        return self.load.share(self.copies, 1)

    @property
    def ends(self) -> tuple[int, int]:
        """Requests before and after those that are counted: until as many run, and users think, as ever will."""
        load, plan = self.share, self.plan
        running = plan.sized.sequences * plan.setup.mesh.dp * self.decode
        if load.concurrency is not None:
            users = load.concurrency
            return LIVES * users + (users * round(load.requests) if load.turns > 1 else 0), users
        assert load.rate is not None
        if load.turns == 1:
            return LIVES * running, 0
        life = plan.sized.ttft_s + load.osl * plan.sized.tpot_s + load.think_s
        ramp = round(load.rate * load.requests * life * load.turns)
        return LIVES * running + ramp, ramp

    @property
    def number(self) -> int:
        """Requests that are drawn; those of sessions that grow too long are not served."""
        before, after = self.ends
        return ceil((before + self.counted + after) * self.load.turns / self.load.requests)

    def workload(self) -> Workload:
        """The requests."""
        from roofline.serving.workload import synthetic

        load = self.share
        return synthetic(
            self.number, load.prompt, load.output, rate=load.rate, concurrency=load.concurrency, burst=load.burst,
            seed=self.seed, prefix=load.prefix, turns=load.turns, think_s=load.think_s, longest=self.plan.setup.longest,
        )  # fmt: skip

    def _tokens(self, part: Plan) -> int | None:
        """Tokens of a rank's cache, where the engine's rules do not say them."""
        if part.setup.paged and part.drafting is None:
            return None
        blocks, page = part.setup.blocks(part.budget, part.batch, part.drafting.draft if part.drafting else None)
        return None if blocks is None else blocks * page

    def _page(self, part: Plan) -> int | None:
        """Tokens of a block where a cache is given in tokens."""
        if self._tokens(part) is None:
            return None
        return part.setup.blocks(part.budget, part.batch, part.drafting.draft if part.drafting else None)[1]

    def _settings(self, part: Plan) -> Settings:
        from roofline.allocation import Settings

        return Settings(
            max_model_len=part.setup.longest, batched_tokens=_budget(part), sequences=part.batch, page_tokens=self._page(part)
        )

    def _options(self) -> Options:
        from roofline.serving.replica import Speculation
        from roofline.serving.server import Options

        plan, drafts = self.plan, self.plan.drafting
        return Options(
            scheduler(plan.setup.engine), prefix_cache=self.load.kept, replicas=self.decode, prefill_replicas=self.prefill,
            link=way_out(plan.setup) if plan.prefill else None,
            draft=Speculation(drafts.gamma, drafts.alpha, drafts.times) if drafts else None, seed=self.seed,
            bound=plan.setup.bound, kv_tokens=self._tokens(plan),
        )  # fmt: skip

    def server(self, load: Workload) -> Server:
        """What serves them."""
        from roofline.serving.server import Front, make_server

        plan, front = self.plan, None
        if plan.prefill is not None:
            part = plan.prefill
            front = Front(part.setup.deployment, self._settings(part), self._tokens(part))
        return make_server(
            plan.setup.deployment, load, engine=plan.setup.engine, settings=self._settings(plan), options=self._options(),
            front=front,
        )  # fmt: skip

    def result(self) -> Result:
        """What came of it."""
        load = self.workload()
        server = self.server(load)
        before, after = self.ends
        return Result(server.serve(load), self.objective, server.gpus, server.times.provenance, before, after)

    def words(self, model: str, stored: tuple[str, str], gpu: str | None = None, draft: str | None = None) -> tuple[str, ...]:
        """The ``roofline simulate`` command that answers with the same figures.

        Args:
            model, gpu, draft: as the command line takes them. stored: formats of the checkpoint's weights and cache.
        """
        plan, load, setup = self.plan, self.share, self.plan.setup
        before, after = self.ends
        words = ["roofline", "simulate", model, "--gpu", gpu or setup.accelerator.id, "--engine", setup.engine.id]
        words += ["--engine-version", setup.engine.asked] if setup.engine.asked else []
        words += setup.mesh.flags.split()
        for flag, made, was in zip(("--dtype", "--kv-dtype"), plan.formats, stored, strict=True):
            words += [flag, made] if made != was else []
        words += ["--no-base"] if plan.formats != stored else []
        words += ["--scheduler", scheduler(setup.engine), *self._sizes(plan, ""), "--max-model-len", str(setup.longest)]
        if plan.prefill is not None:
            words += ["--disaggregate", f"{self.prefill}:{self.decode}", "--link", str(way_out(setup))]
            words += [word.replace("--", "--prefill-") for word in (plan.prefill.setup.mesh.flags or "--tp 1").split()]
            words += self._sizes(plan.prefill, "prefill-")
        if plan.drafting:
            words += ["--draft", str(draft), "--draft-tokens", str(plan.drafting.gamma)]
            words += ["--acceptance", repr(plan.drafting.alpha)]
        words += ["--prefix-caching"] if load.kept else []
        words += ["--bound"] if setup.bound else []
        words += ["--rate", repr(load.rate)] if load.rate is not None else ["--concurrency", str(load.concurrency)]
        words += ["--isl", load.prompt.words, "--osl", load.output.words]
        words += ["--burst", repr(load.burst)] if load.burst != 1.0 else []
        words += ["--prefix-len", str(load.prefix)] if load.prefix else []
        words += ["--turns", str(load.turns)] if load.turns > 1 else []
        words += ["--think", f"{load.think_s!r}s"] if load.think_s else []
        words += ["--requests", str(self.number), "--warm-up", str(before), "--cool-down", str(after)]
        words += ["--seed", str(self.seed)] if self.seed else []
        limits = self.objective
        words += ["--ttft", f"{limits.ttft_s!r}s", "--percentile", f"{limits.percentile:g}"] if limits.ttft_s else []
        words += ["--tpot", f"{limits.tpot_s!r}s"] if limits.tpot_s else []
        words += ["--tpot-percentile", f"{limits.tpot_percentile:g}"] if limits.tpot_percentile is not None else []
        return tuple(words)

    def _sizes(self, part: Plan, whose: str) -> list[str]:
        words = [f"--{whose}max-num-seqs", str(part.batch), f"--{whose}max-num-batched-tokens", str(_budget(part))]
        tokens = self._tokens(part)
        if tokens is None:
            return words
        block = [] if whose else ["--block-size", str(self._page(part))]
        return [*words, f"--{whose}kv-tokens", str(tokens), *block]


def _budget(part: Plan) -> int:
    """Tokens of a step; at least what all sequences verify."""
    return max(part.budget, part.batch * (1 + (part.drafting.gamma if part.drafting else 0)))


def simulate(plan: Plan, load: Demand, objective: Objective, *, counted: int = COUNTED, seed: int = 0) -> Verdict:
    """Serves the plan's share of the load by the simulator."""
    return _run(Replay(plan, load, objective, counted, seed))[0]


def assured(plan: Plan, load: Demand, objective: Objective, *, counted: int = COUNTED, seeds: int = SEEDS) -> Verdict:
    """The verdict of several runs: limits hold in each, and with confidence in all of them together.

    The runs end with the first that misses. Without a limit there is nothing to be sure of, and one run is all.
    """
    import numpy

    first, ttft, tpot = _run(Replay(plan, load, objective, counted))
    if not first.met or not objective.given:
        return first
    found, paces = [ttft], [tpot]
    for seed in range(1, seeds):
        verdict, ttft, tpot = _run(Replay(plan, load, objective, counted, seed))
        if not verdict.met:
            return replace(verdict, seeds=seed + 1)
        found.append(ttft)
        paces.append(tpot)
    pooled, share = numpy.concatenate(found), objective.tpot_percentile
    late = upper_limit(pooled, objective.percentile)
    slow = None if share is None or not len(tpot) else upper_limit(numpy.concatenate(paces), share)
    held = (objective.ttft_s is None or late <= objective.ttft_s) and (slow is None or slow <= (objective.tpot_s or slow))
    return replace(first, seeds=seeds, pooled=len(pooled), ttft_most_s=late, tpot_most_s=slow, met=held)


def upper_limit(values: Any, percentile: float, confidence: float = CONFIDENCE) -> float:
    """What the percentile (above 0 and below 100) of a distribution lies below, for a sample of it, with that confidence.

    The smallest order statistic that does, whatever the distribution: of ``n`` values as many lie below the percentile as a
    binomial draw of ``n`` at that chance. The largest value where the sample is too small for any.
    Source: Conover 1999, Practical Nonparametric Statistics, section 3.2 (tolerance of quantiles by order statistics).
    """
    from math import exp, log

    import numpy

    number, chance = len(values), percentile / 100
    place, below, weight = number, 0.0, number * log(chance)
    for over in range(number):
        below += exp(weight)
        if below > 1.0 - confidence:
            break
        place = number - over
        weight += log((number - over) / (over + 1) * (1.0 - chance) / chance)
    return float(numpy.partition(values, place - 1)[place - 1])


def _run(replay: Replay) -> tuple[Verdict, Any, Any]:
    """(verdict of one run, TTFT and TPOT of its requests)."""
    import numpy

    load, objective = replay.load, replay.objective
    found = replay.result()
    refused = int((found.counted & ~found.done).sum())
    ttft, tpot = found.ttft_s, found.tpot_s
    if refused or not len(ttft):
        return Verdict(float("nan"), float("inf"), float("inf"), 0.0, len(ttft), refused, 0, 0.0, 0.0, False), ttft, tpot
    figures, share = found.to_dict(), objective.tpot_percentile
    mean = float(tpot.mean()) if len(tpot) else 0.0
    quarter = len(ttft) // 4
    order = numpy.argsort(found.outcome.arrival[found.done], kind="stable")
    first, last = ttft[order[:quarter]], ttft[order[-quarter:]]
    kept_up = load.rate is None or not quarter or last.mean() <= 4 * max(first.mean(), 1e-9)
    verdict = Verdict(
        float(ttft.mean()), float(numpy.percentile(ttft, objective.percentile)), mean,
        (figures["request_per_s"] or 0.0) * replay.copies, len(ttft), refused, figures["preempted_requests"],
        figures["utilisation"], figures["mean_decode_batch"] or 0.0, bool(not found.misses and kept_up),
        figures["prefix_hit_share"],
        None if share is None or not len(tpot) else float(numpy.percentile(tpot, share)),
    )  # fmt: skip
    return verdict, ttft, tpot


def verdict_record(found: Verdict | None) -> dict[str, Any] | None:
    """All figures under keys that carry their unit; None where nothing was simulated."""
    if found is None:
        return None
    return {
        "ttft_s": found.ttft_s, "ttft_percentile_s": found.ttft_high_s, "tpot_s": found.tpot_s,
        "tpot_percentile_s": found.tpot_high_s, "request_per_s": found.rate, "requests": found.requests,
        "refused": found.refused, "preempted": found.preempted, "utilisation": found.utilisation, "mean_batch": found.batch,
        "prefix_hit_share": found.hits, "met": found.met, "seeds": found.seeds, "pooled_requests": found.pooled,
        "ttft_percentile_upper_s": found.ttft_most_s, "tpot_percentile_upper_s": found.tpot_most_s,
    }  # fmt: skip

"""What a served workload says: latencies by percentile, throughput, goodput under a service-level objective, occupancy.

TTFT runs from a request's arrival to its first token, TPOT is the time from first to last token over the tokens after the
first, ITL the time between two successive steps that gave a request tokens (with drafts a step gives several at once),
E2E from arrival to the last token. Percentiles interpolate linearly between requests, as numpy's and the engines' own
benchmark clients do.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from roofline.errors import InputError
from roofline.serving.cluster import Outcome

if TYPE_CHECKING:
    import pandas

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True)
class Objective:
    """A service-level objective: TTFT and TPOT that a request must keep, None for no limit [s].

    Attributes:
        percentile: share of requests, in percent, whose TTFT must be within ``ttft_s``. tpot_percentile: the same of
            TPOT; None judges its mean.

    Raises InputError for limits or percentiles out of range.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    percentile: float = 99.0
    tpot_percentile: float | None = None

    def __post_init__(self) -> None:
        for name, limit in (("ttft", self.ttft_s), ("tpot", self.tpot_s)):
            if limit is not None and not 0 < limit < 1e9:
                raise InputError(f"{name}: {limit!r} is out of range; give a time above 0")
        for share in (self.percentile, self.tpot_percentile):
            if share is not None and not 0 <= share <= 100:
                raise InputError(f"percentile: {share:g} is out of range; give 0 to 100")

    @property
    def given(self) -> bool:
        """Whether there is any limit."""
        return self.ttft_s is not None or self.tpot_s is not None

    def met(self, ttft: float, tpot: float) -> bool:
        """Whether a percentile of TTFT and a mean (or percentile) of TPOT keep the limits [s]."""
        return (self.ttft_s is None or ttft <= self.ttft_s) and (self.tpot_s is None or tpot <= self.tpot_s)


def _statistics(values: Any, weights: Any = None) -> dict[str, float | None]:
    """mean, percentiles and maximum of an array, with weights as so many equal values."""
    import numpy

    if not len(values):
        return {"mean": None, **{f"p{p}": None for p in PERCENTILES}, "max": None}
    if weights is None:
        found = numpy.percentile(values, PERCENTILES)
        mean = float(values.mean())
    else:
        order = numpy.argsort(values, kind="stable")
        values, weights = values[order], weights[order]
        upto = numpy.cumsum(weights)
        places = numpy.array(PERCENTILES) / 100 * (upto[-1] - 1)
        low = numpy.searchsorted(upto, numpy.floor(places), side="right")
        high = numpy.searchsorted(upto, numpy.ceil(places), side="right")
        found = values[low] + (places - numpy.floor(places)) * (values[high] - values[low])
        mean = float((values * weights).sum() / upto[-1])
    return {"mean": mean, **{f"p{p}": float(v) for p, v in zip(PERCENTILES, found, strict=True)}, "max": float(values.max())}


@dataclass(frozen=True)
class Result:
    """A served workload, summed up.

    Attributes:
        outcome: what became of each request. objective: what is asked of them.
        gpus: of all replicas, for rates per GPU. provenance: of the step times.
        warm_up, cool_down: requests that come first and last, which are served and not counted. Latencies, hits and goodput
            are of the others; rates of what ended between the first and the last arrival of the others, utilisation, mean batch
            and mean occupation of the cache of the same time. Gaps between tokens, the cache's peak and counts are of the whole
            run.
    """

    outcome: Outcome = field(repr=False)
    objective: Objective = Objective()
    gpus: int = 1
    provenance: str = "datasheet"
    warm_up: int = 0
    cool_down: int = 0

    def __post_init__(self) -> None:
        number = len(self.outcome.workload)
        if self.warm_up + self.cool_down >= number:
            raise InputError(f"warm-up: {self.warm_up:,} + {self.cool_down:,} of {number:,} requests leave none to count")

    @cached_property
    def counted(self) -> Any:
        """Which requests count, a mask."""
        import numpy

        number = len(self.outcome.workload)
        mask = numpy.ones(number, dtype=bool)
        if self.warm_up or self.cool_down:
            order = numpy.argsort(self.outcome.arrival, kind="stable")
            mask[order[: self.warm_up]] = mask[order[number - self.cool_down :]] = False
        return mask

    @cached_property
    def done(self) -> Any:
        """Which of the requests that count ended, a mask."""
        import numpy

        return self.counted & ~numpy.isnan(self.outcome.finish)

    @property
    def ttft_s(self) -> Any:
        """Time to first token of the requests that ended."""
        return (self.outcome.first - self.outcome.arrival)[self.done]

    @property
    def e2e_s(self) -> Any:
        """Arrival to last token of the requests that ended."""
        return (self.outcome.finish - self.outcome.arrival)[self.done]

    @property
    def tpot_s(self) -> Any:
        """Time per output token after the first, of the requests that ended and had more than one."""
        outcome = self.outcome
        several = self.done & (outcome.workload.output > 1)
        return (outcome.finish - outcome.first)[several] / (outcome.workload.output[several] - 1)

    @property
    def queue_s(self) -> Any:
        """Arrival to admission of the requests that ended."""
        return (self.outcome.admitted - self.outcome.arrival)[self.done]

    def itl_s(self) -> tuple[Any, Any]:
        """(gaps between successive tokens, how often each occurs)."""
        import numpy

        gaps, weights = [], []
        for replica in self.outcome.replicas:
            for gap, weight in zip(replica.totals.gaps, replica.totals.weights, strict=True):
                if isinstance(gap, float):
                    gaps.append(gap)
                    weights.append(weight)
        singles = numpy.array(gaps), numpy.array(weights, dtype=numpy.int64)
        runs = [
            (gap, weight)
            for replica in self.outcome.replicas
            for gap, weight in zip(replica.totals.gaps, replica.totals.weights, strict=True)
            if not isinstance(gap, float)
        ]
        return (
            numpy.concatenate([singles[0], *(gap for gap, _ in runs)]),
            numpy.concatenate([singles[1], *(numpy.full(len(gap), weight) for gap, weight in runs)]),
        )

    @cached_property
    def window(self) -> tuple[float, float]:
        """When what counts happens [s]: first arrival to last token; to the last arrival that counts where not all do."""
        import numpy

        arrival = self.outcome.arrival
        if not (self.warm_up or self.cool_down):
            return float(numpy.nanmin(arrival) if len(arrival) else 0.0), float(self.outcome.end)
        counted = arrival[self.counted]
        return float(numpy.nanmin(counted)), float(numpy.nanmax(counted))

    @property
    def span_s(self) -> float:
        """Seconds of ``window``."""
        return self.window[1] - self.window[0]

    def _occupation(self) -> dict[str, Any]:
        """What the replicas were busy with in ``window``: shares of its time, means over their steps in it."""
        replicas, span = self.outcome.replicas, self.span_s
        parts = [replica.totals.between(*self.window) for replica in replicas]
        shares = [min(1.0, part.busy_s / span) if span > 0 else None for part in parts]
        known = [share for share in shares if share is not None]
        decode_steps = sum(part.decode_steps for part in parts)
        limited = all(replica.pool.number < 10**15 for replica in replicas)
        blocks = sum(replica.pool.number * part.busy_s for replica, part in zip(replicas, parts, strict=True))
        held = sum(part.block_seconds for part in parts)
        return {
            "utilisation": min(1.0, sum(known) / len(known)) if known else None,
            "utilisation_by_replica": shares,
            "mean_decode_batch": sum(part.decode_slots for part in parts) / decode_steps if decode_steps else None,
            "kv_occupancy_mean": min(1.0, held / blocks) if limited and blocks else None,
        }

    @property
    def _ended(self) -> Any:
        """Which requests ended within ``span_s``, a mask."""
        import numpy

        if not (self.warm_up or self.cool_down):
            return self.done
        low, high = self.window
        with numpy.errstate(invalid="ignore"):
            finish = self.outcome.finish
            return (finish > low) & (finish <= high)

    @property
    def good(self) -> Any:
        """Which requests of all ended within the limits, a mask over the workload."""
        import numpy

        outcome, limits = self.outcome, self.objective
        kept = self.done.copy()
        with numpy.errstate(invalid="ignore"):
            if limits.ttft_s is not None:
                kept &= outcome.first - outcome.arrival <= limits.ttft_s
            if limits.tpot_s is not None:
                kept &= outcome.finish - outcome.first <= limits.tpot_s * (outcome.workload.output - 1)
        return kept

    @property
    def misses(self) -> tuple[str, ...]:
        """Limits that the whole workload misses, in words; requests that were refused miss any limit."""
        import numpy

        limits, found = self.objective, []
        lost = int((self.counted & ~self.done).sum())
        if lost and limits.given:
            found.append(f"{lost:,} of {int(self.counted.sum()):,} requests were not served")
        if limits.ttft_s is not None and self.done.any():
            value = float(numpy.percentile(self.ttft_s, limits.percentile))
            if value > limits.ttft_s:
                found.append(f"TTFT p{limits.percentile:g} is {value:.4g} s, above {limits.ttft_s:g} s")
        tpot = self.tpot_s
        if limits.tpot_s is not None and len(tpot):
            share = limits.tpot_percentile
            value = float(tpot.mean() if share is None else numpy.percentile(tpot, share))
            if value > limits.tpot_s:
                name = "mean" if share is None else f"p{share:g}"
                found.append(f"TPOT {name} is {value:.4g} s, above {limits.tpot_s:g} s")
        return tuple(found)

    @property
    def meets(self) -> bool | None:
        """Whether the objective is met; None where there is none."""
        return not self.misses if self.objective.given else None

    def _goodput(self, request_rate: float | None) -> float | None:
        """Requests per second that keep both limits; None without limits."""
        if not self.objective.given or request_rate is None:
            return None
        ended = int(self.done.sum())
        return request_rate * int(self.good.sum()) / ended if ended else 0.0

    def to_dict(self) -> dict[str, Any]:
        """All figures under keys that carry their unit; nothing rounded."""
        outcome, done, span = self.outcome, self.done, self.span_s
        workload, totals = outcome.workload, [replica.totals for replica in outcome.replicas]
        counted, ended = int(self.counted.sum()), self._ended
        tokens = int(workload.output[done].sum())
        prompts = int(workload.prompt[done].sum())
        made, read = int(workload.output[ended].sum()), int(workload.prompt[ended].sum())
        rate = (lambda amount: amount / span) if span > 0 else (lambda amount: None)
        occupation = self._occupation()
        limited = all(r.pool.number < 10**15 for r in outcome.replicas)
        good = self.good[self.counted]
        output_rate, request_rate = rate(made), rate(int(ended.sum()))
        found: dict[str, Any] = {
            "requests": counted,
            "warm_up_requests": self.warm_up,
            "cool_down_requests": self.cool_down,
            "completed": int(done.sum()),
            "refused": int(self.counted[outcome.refused].sum()) if outcome.refused else 0,
            "span_s": span,
            "input_tokens": prompts,
            "output_tokens": tokens,
            "request_per_s": request_rate,
            "output_tok_per_s": output_rate,
            "total_tok_per_s": rate(made + read),
            "output_tok_per_s_per_gpu": None if output_rate is None else output_rate / self.gpus,
        }
        for name, values in (("ttft", self.ttft_s), ("tpot", self.tpot_s), ("e2e", self.e2e_s), ("queue", self.queue_s)):
            found |= {f"{name}_{key}_s": value for key, value in _statistics(values).items()}
        found |= {f"itl_{key}_s": value for key, value in _statistics(*self.itl_s()).items()}
        return found | {
            "ttft_limit_s": self.objective.ttft_s,
            "tpot_limit_s": self.objective.tpot_s,
            "goodput_request_per_s": self._goodput(request_rate),
            "good_share": float(good.mean()) if self.objective.given else None,
            "meets_objective": self.meets,
            "misses": list(self.misses),
            "steps": sum(t.steps for t in totals),
            **{name: occupation[name] for name in ("utilisation", "utilisation_by_replica", "mean_decode_batch")},
            "prefill_tokens_computed": sum(t.prompt_tokens for t in totals),
            "prefix_hit_tokens": int(outcome.hit[done].sum()),
            "prefix_hit_share": float(outcome.hit[done].sum() / prompts) if prompts else None,
            "preemptions": sum(t.preemptions for t in totals),
            "preempted_requests": int((outcome.preempted[done] > 0).sum()),
            "recomputed_tokens": sum(t.recomputed for t in totals),
            "swap_s": sum(t.swapped_s for t in totals),
            "kv_occupancy_mean": occupation["kv_occupancy_mean"],
            "kv_occupancy_peak": max(r.totals.peak_blocks / r.pool.number for r in outcome.replicas) if limited else None,
            "transfer_s": outcome.transfers_s,
        }

    def to_frame(self) -> pandas.DataFrame:
        """One row per request: arrival, admission, first and last token [s], tokens, prefix hits, preemptions."""
        import pandas

        outcome, work = self.outcome, self.outcome.workload
        return pandas.DataFrame(
            {
                "arrival_s": outcome.arrival, "admitted_s": outcome.admitted, "first_token_s": outcome.first,
                "finish_s": outcome.finish, "prompt_tokens": work.prompt, "output_tokens": work.output,
                "prefix_hit_tokens": outcome.hit, "preemptions": outcome.preempted,
            }
        )  # fmt: skip

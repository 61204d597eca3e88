"""A server under a steady load, in closed form: time to first token, time per token and throughput of a closed loop.

``concurrency`` clients send a request of I prompt and O output tokens each, and the next one when it is answered. R of them
run: all, or as many as the cache holds. Seen from one of them the R - 1 others bring X prompts per second, each of which adds
``added`` to the steps that it joins, and whoever decodes waits for all of them:

    TPOT = decode / (1 - X * added)        X = (R - 1) / (TTFT + O * TPOT)        added = turns * (mixed - decode) / group

which is a quadratic equation in X. A step takes ``group`` = max(1, R / O) prompts, in ``turns`` chunks where its token budget is
smaller. A prompt takes ``service`` = added + decode * fresh / room of whole steps, so that X never exceeds 1 / service, and

    TTFT = request + turns * decode + added + left * (1 + u / (1 - u + 1 / sqrt(R))) + queue

A request waits for what is ``left`` of the steps under way, half of those that it meets, long ones more often, and for prompts
before it: a server that is busy a share u = X * service of the time (M/D/1, left / (1 - u)), 1 / sqrt(R) away from its
pole because R clients are all there are. Who finds no room in the cache waits for a place, concurrency / R - 1 lives of a
request. All clients send their first request at once: of N requests of each, one in N waits for half of all prompts, run
``together`` as the budget allows.
Source: the steady-state argument of continuous batching (Yu et al. 2022, Orca); Pollaczek and Khinchine's mean wait; residual
time of renewal theory; Little's law. The distance from the pole is the relative width of a binomial number of clients.

Everything is arithmetic over floats or arrays; ``closed_form`` evaluates it for one deployment, with the same step times as
the simulator.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from roofline.errors import InputError
from roofline.expected.arithmetic import ceil, floor, maximum, minimum, where
from roofline.expected.load import Load

if TYPE_CHECKING:
    from roofline.engines.profile import Profile
    from roofline.inference import Deployment
    from roofline.serving.steps import StepTimes

GROWTH = 0.6
"""Share of its output that a running sequence holds on average where the cache is full: half, and the pages of the next."""
RESERVED = {"trtllm": 1.0}
"""The same for engines that admit a request only with room for its whole output (TensorRT-LLM's GUARANTEED_NO_EVICT)."""
DEFAULT_BUDGET = 8192
ROUNDS = 3
"""Rounds in which wait and rate find each other; more change nothing that is seen."""


@dataclass(frozen=True)
class Client:
    """How requests arrive, beside their number and lengths; floats or arrays.

    Attributes:
        rounds: requests that each client sends; the first of them all come at once. Infinite for a steady state.
        held: decode steps for which the engine holds a new prompt back, to batch it with others.
        wave: 1 where all clients send together and again together (one batch of equal lengths at a time), and prompts run
            before any decode: each request then waits for half of the others' prompts before and after its first token.
    """

    rounds: Any = float("inf")
    held: Any = 0.0
    wave: Any = 0.0


STEADY = Client()


@dataclass(frozen=True)
class Loads:
    """The steps of a steady state.

    Attributes:
        running: sequences at once. decode: a step without prompts. mixed: one with. alone: the prompts of that, without decodes.
        burst: prompts only, ``together`` of them, whole. group: prompts of a mixed step. turns: steps until they are done.
        share: of a whole step's budget that a prompt takes, above 1 for one that is cut.
    """

    running: Any
    decode: Load
    mixed: Load
    alone: Load
    burst: Load
    group: Any
    turns: Any
    together: Any
    share: Any


def loads(
    concurrency: Any, prompt: Any, output: Any, capacity: Any, budget: Any, client: Client = STEADY, cached: Any = 0.0,
    growth: Any = GROWTH,
) -> Loads:  # fmt: skip
    """The steps of a steady state.

    Args:
        prompt, output: mean tokens of a request. capacity: tokens that the cache holds. budget: tokens of a step.
        cached: tokens of a prompt that a prefix cache has already. growth: share of the output that a sequence takes up.
    """
    running = minimum(concurrency, maximum(capacity / (prompt + growth * output), 1.0))
    fresh = maximum(prompt - cached, 1.0)
    spread = maximum(running / output, 1.0)
    together = minimum(maximum(floor(budget / fresh), 1.0), running)
    group = where(client.wave > 0, together, spread)
    room = maximum(budget - running, 1.0)
    turns = where(client.wave > 0, 1.0, ceil(group * fresh / room))
    behind = cached + 0.5 * (turns - 1.0) * fresh / turns
    context = prompt + 0.5 * output
    mixed = Load(running, context, group, fresh / turns, behind)
    nothing = 0.0 * running
    burst = Load(nothing, context, together, fresh, cached + nothing)
    return Loads(
        running, Load(running, context), mixed, replace(mixed, decodes=nothing), burst, group, turns, together, fresh / room
    )


@dataclass(frozen=True)
class Steady:
    """Means of a steady state [s]; floats or arrays."""

    ttft: Any
    tpot: Any


def steady(
    found: Loads, decode: Any, mixed: Any, alone: Any, request: Any, concurrency: Any, output: Any, client: Client = STEADY,
    burst: Any = None,
) -> Steady:  # fmt: skip
    """Times from the seconds of the steps; ``request`` is what passes before a request is scheduled [s].

    ``burst`` matters where the client starts all at once or comes in waves; without it, as if prompts ran one by one.
    """
    running, group, turns, together = found.running, found.group, found.turns, found.together
    others, waved = maximum(running - 1.0, 0.0), client.wave > 0
    wave = together * turns * alone / group if burst is None else burst
    own, token = _shared(decode, mixed, output, found)
    tpot = where(waved, decode + others / output * 0.5 * wave / together, token)
    first = 0.5 * (running / together + 1.0) * wave
    own = where(waved, first, own + maximum(first - own, 0.0) / client.rounds)
    queue = maximum(concurrency / running - 1.0, 0.0) * (output * tpot + own)
    return Steady(request + client.held * decode + queue + own, tpot)


def _shared(decode: Any, mixed: Any, output: Any, found: Loads) -> tuple[Any, Any]:
    """(seconds from scheduling to first token, seconds per token) where prompts and decodes of all share the steps."""
    running, turns, others = found.running, found.turns, maximum(found.running - 1.0, 0.0)
    added = turns * (mixed - decode) / found.group
    service, bare = added + decode * found.share, turns * decode + added
    under_way, fading = 0.5 * minimum(others, 1.0), 1.0 + 1.0 / running**0.5
    block, wait = turns * mixed, 0.0 * bare
    for _ in range(ROUNDS):
        life = bare + wait
        half = output * decode + life + others * added
        rate = 2.0 * others / (half + (half * half - 4.0 * added * life * others) ** 0.5)
        rate = minimum(rate, 1.0 / service)
        prompts = minimum(rate * block / found.group, 1.0)
        busy = rate * service
        wait = under_way * (prompts * block + (1.0 - prompts) * decode) * (1.0 + busy / (fading - busy))
    tpot = decode / (1.0 - rate * added)
    return maximum(bare + wait, others * service - output * tpot), tpot


@dataclass(frozen=True)
class ClosedForm:
    """A deployment under a closed loop.

    Attributes:
        concurrency, prompt_tokens, output_tokens: of the load. running: sequences at once, below the concurrency where the
            cache is full. ttft_s, tpot_s: means [s].
        provenance: of the step times. notes: what they rest on.
    """

    concurrency: float
    prompt_tokens: float
    output_tokens: float
    running: float
    ttft_s: float
    tpot_s: float
    provenance: str
    notes: tuple[str, ...]

    @property
    def e2e_s(self) -> float:
        """Mean time of a request [s]."""
        return self.ttft_s + max(self.output_tokens - 1.0, 0.0) * self.tpot_s

    @property
    def requests_per_s(self) -> float:
        """Requests answered per second, by Little's law."""
        return self.concurrency / self.e2e_s

    @property
    def output_tok_per_s(self) -> float:
        """Output tokens per second of all sequences."""
        return self.requests_per_s * self.output_tokens

    @property
    def full(self) -> bool:
        """Whether the cache is too small for all that want to run."""
        return self.running < self.concurrency


def closed_form(
    deployment: Deployment, engine: Profile | None, concurrency: float, prompt: float, output: float, *,
    times: StepTimes | None = None, capacity_tokens: float | None = None, batched_tokens: int | None = None,
    cached: float = 0.0, client: Client = STEADY,
) -> ClosedForm:  # fmt: skip
    """Means of a closed loop on one data-parallel replica of a deployment.

    Args:
        engine: whose defaults and constants hold, None for the datasheet's bound.
        concurrency: clients of one replica. prompt, output: mean tokens of a request.
        times: step times, else the best that are known. capacity_tokens: of the cache, else what the engine allocates (no
            limit without an engine). batched_tokens: budget of a step, else the engine's default.
        cached: tokens of a prompt that a prefix cache holds.

    Raises InputError for sizes below 1, or where not even one request fits.
    """
    for name, value in (("concurrency", concurrency), ("isl", prompt), ("osl", output)):
        if not value >= 1:
            raise InputError(f"{name}: {value!r} is out of range; give 1 or more")
    if not 0 <= cached < prompt:
        raise InputError(f"cached: {cached!r} tokens of a prompt of {prompt!r}; give 0 or more, and fewer than the prompt has")
    if times is None:
        from roofline.serving.steps import step_times

        times = step_times(deployment, engine, longest=int(prompt + output) + 1)
    if capacity_tokens is None:
        capacity_tokens = float("inf") if engine is None else engine_tokens(deployment, engine, int(prompt + output) + 1)
    if capacity_tokens < prompt + output:
        raise InputError(
            f"isl: a request of {prompt + output:.0f} tokens does not fit the {capacity_tokens:,.0f} tokens of the cache; "
            f"use more GPUs or a narrower --kv-dtype"
        )
    budget = batched_tokens or (
        DEFAULT_BUDGET if engine is None else engine.batched_tokens(deployment.accelerator, int(prompt + output))
    )
    growth = GROWTH if engine is None else RESERVED.get(engine.id, GROWTH)
    found = loads(float(concurrency), float(prompt), float(output), capacity_tokens, float(budget), client, float(cached), growth)
    kinds = (found.decode, found.mixed, found.alone, found.burst)
    decode, mixed, alone, burst = (times.seconds(shape_of(load)) for load in kinds)
    request = getattr(times, "request_seconds", lambda running: 0.0)(found.running)
    means = steady(found, decode, mixed, alone, request, float(concurrency), float(output), client, burst)
    return ClosedForm(
        float(concurrency), float(prompt), float(output), float(found.running), float(means.ttft), float(means.tpot),
        times.provenance, tuple(times.notes),
    )  # fmt: skip


def shape_of(load: Load) -> Any:
    """The step as step times take it, in whole numbers."""
    from roofline.serving.steps import StepShape

    chunks, decodes = round(load.chunks), round(load.decodes)
    chunk, behind = round(load.chunk), round(load.behind)
    pairs = chunks * (chunk * behind + chunk * (chunk + 1) // 2)
    return StepShape(chunks * chunk, pairs, chunks, decodes, decodes * round(load.context))


def engine_tokens(deployment: Deployment, engine: Profile, longest: int) -> float:
    """Tokens that the cache of one data-parallel replica holds under an engine's own settings; infinite without growing state."""
    from roofline.allocation import Settings, allocate
    from roofline.parallel.mesh import Mesh

    mesh = getattr(deployment, "mesh", None) or Mesh()
    settings = Settings(max_model_len=longest)
    found = allocate(deployment.model, deployment.accelerator, mesh, engine, settings, getattr(deployment, "ranks", None))
    tokens = found.tokens(found.pool.best)
    return float("inf") if tokens is None else float(tokens)

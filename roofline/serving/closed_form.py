"""A server under a steady load, in closed form: time to first token, time per token and throughput of a closed loop.

``concurrency`` clients send a request of I prompt and O output tokens each, and the next one when it is answered. R of them
run: all, or as many as the cache holds. Seen from one of them the R - 1 others bring X prompts per second, each of which adds
``added`` to the steps that it joins, and whoever decodes waits for all of them:

    TPOT = decode / (1 - X * added)        X = (R - 1) / (TTFT + O * TPOT)        added = turns * (step - base) / group

which is a quadratic equation in X. A step with prompts is ``mixed`` over a ``base`` of ``decode``; under an engine that lets
decodes stall it holds the prompts ``alone``, over nothing. A prompt takes a share w of a whole step's budget, so that X never
exceeds 1 / (added + decode * w).

**The clock of a closed loop is its steps.** Whoever is answered is answered at the end of a step, and asks again at once: its
request is known to the scheduler a fixed ``request`` later, and runs from the next end of a step on.

* A step brings q = X * TPOT prompts whatever it takes, so that long steps are not met more often than they occur. Of the steps
  that get any, each gets q / (1 - exp(-q)) on average: that many prompts share what a step costs once.
* ``_boundary``: k = ceil(request / less) decode steps of R - 1 sequences pass until the request is known. If none of them has
  prompts, (1 - p)^k with p = 1 - exp(-q), it waits for what is left of the last: ceil(x) - x of it, x = request / less, averaged
  over the lengths that contexts give it. Else it waits until the step with prompts ends, or, once that has shuffled the steps,
  for the residual time of renewal theory, E[S^2] / (2 E[S]).
* Others that were answered in the same step run with it: q * added of them that come first, and of those behind it who fit.
* Prompts that did not fit leave a queue in steps (discrete time, Poisson numbers, service of w steps): rho = q * w of the
  budget is used, rho^(1 + 1/w) / (2 (1 - rho)) whole steps are left on average for w up to 1 (rho^2 / (2 (1 - rho)) at 1, M/D/1
  in slots), rho w / (2 (1 - rho)) - rho / 2 beyond. R clients are all there are, so that the pole lies 1 / sqrt(R) further.

**A client that starts all at once** and sends N requests from each user:

* The first of each wait for all prompts before them: mean (R / together + 1) / 2 steps of ``together`` prompts, beside which
  half of the others decode.
* Lives have a relative ``spread`` s, so that completions come in waves: the k-th ends are spread by s sqrt(k) lives, and an end
  meets 1 + 2 sum_n exp(-(2 pi n s)^2 k) times as many others as in an even stream (the self-density of a wrapped normal
  distribution). q is that much larger for whoever waits.
* Prompts of the first round meet half of the others decoding: interference is 1 - 1 / (2 N) of the steady one. In the last
  round nobody follows who has ended, and decode steps are those of fewer sequences: E|e - e'| / 2 = s sqrt(N) / sqrt(pi) of a
  life is lost by each, at most 1 / 6, that of ends spread evenly.

Source: the steady-state argument of continuous batching (Yu et al. 2022, Orca); renewal theory; the discrete-time M/D/1 queue;
Little's law. The distance from the pole is the relative width of a binomial number of clients.

Everything is arithmetic over floats or arrays; ``closed_form`` evaluates it for one deployment, with the same step times as
the simulator. **Where nothing queues** the two agree within 5 %: the cache holds all requests at their longest, the engine runs
as many as there are clients, and waves of prompts do not overlap, that is, ``used`` is at most a third and a prompt meets at most
one other at the step that it joins (``Steady.quiet``). Beyond, the closed form finds that prompts queue, the simulator how long.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf, pi
from typing import TYPE_CHECKING, Any

from roofline.errors import InputError
from roofline.expected.arithmetic import ceil, clip, exp, floor, maximum, minimum, sqrt, where
from roofline.expected.load import Load

if TYPE_CHECKING:
    from roofline.engines.profile import Profile
    from roofline.inference import Deployment
    from roofline.serving.steps import StepTimes

DEFAULT_BUDGET = 8192
PASSES = 4
"""Rounds in which wait and rate find each other; more change nothing that is seen."""
HARMONICS = 8
"""Terms of the sum over waves."""
FEWER = 0.75
"""Share of the sequences at which the slope of decode steps is taken."""
CROWDED = 1.0 / 3.0
"""Share of all steps' budgets beyond which prompts queue behind each other."""
ENOUGH = 1e15
"""Tokens of a cache that is as good as endless."""
MANY = 1e6
"""Rounds that are as good as endless."""


@dataclass(frozen=True)
class Rules:
    """How an engine schedules; numbers or arrays, 1 for yes.

    Attributes:
        growth: share of its output that a running sequence holds on average where the cache is full: half, and what the engine
            keeps free for the rest. ahead: above 0, a request is admitted only with room for all of its own output, and a batch
            that starts together keeps this share of the others' free.
        whole: prompts are not cut to fill a budget. stalls: decodes wait while prompts run.
    """

    growth: Any = 0.6
    ahead: Any = 0.0
    whole: Any = 0.0
    stalls: Any = 0.0


RULES = {"trtllm": Rules(growth=1.0, whole=1.0), "sglang": Rules(growth=0.55, ahead=0.7, stalls=1.0)}
"""Engine -> its rules, where not those of vLLM. TensorRT-LLM's GUARANTEED_NO_EVICT holds the whole output of all that run;
SGLang that of the newest, and 0.7 to 0.098 of what the others still have to write (``expectation.Estimate``)."""


@dataclass(frozen=True)
class Client:
    """How requests arrive, beside their number and lengths; floats or arrays.

    Attributes:
        rounds: requests that each client sends; the first of them all come at once. Infinite for a steady state.
        held: decode steps for which the engine holds a new prompt back, to batch it with others.
        wave: 1 where all clients send together and again together (one batch of equal lengths at a time), and prompts run
            before any decode: each request then waits for half of the others' prompts before and after its first token.
        spread: standard deviation of output lengths over their mean; 0 takes lives to be spread evenly from the start.
    """

    rounds: Any = inf
    held: Any = 0.0
    wave: Any = 0.0
    spread: Any = 0.0


STEADY = Client()


@dataclass(frozen=True)
class Loads:
    """The steps of a steady state.

    Attributes:
        running: sequences at once. decode: a step without prompts. mixed: one with. alone: the prompts of that, without decodes.
        burst: prompts only, ``together`` of them, whole. few, less, early: decode steps of fewer sequences, of one less, and
            of sequences that have just begun. group: prompts of a mixed step. turns: steps until they are done.
        share: of a whole step's budget that a prompt takes, above 1 for one that is cut.
        gathered: completions that a completion meets, over those of an even stream. rules: of the engine.
    """

    running: Any
    decode: Load
    mixed: Load
    alone: Load
    burst: Load
    few: Load
    less: Load
    early: Load
    group: Any
    turns: Any
    together: Any
    share: Any
    gathered: Any
    rules: Rules


def loads(
    concurrency: Any, prompt: Any, output: Any, capacity: Any, budget: Any, client: Client = STEADY, cached: Any = 0.0,
    rules: Rules = Rules(),
) -> Loads:  # fmt: skip
    """The steps of a steady state.

    Args:
        prompt, output: mean tokens of a request. capacity: tokens that the cache holds. budget: tokens of a step.
        cached: tokens of a prompt that a prefix cache has already.
    """
    running = minimum(concurrency, maximum(_fitting(capacity, prompt, output, client, rules), 1.0))
    fresh = maximum(prompt - cached, 1.0)
    room = maximum(budget - where(rules.stalls > 0, 0.0, running), 1.0)
    whole, fits = rules.whole > 0, room / fresh
    most = where(whole, maximum(floor(fits), 1.0), maximum(fits, 1.0))
    together = minimum(where(whole, maximum(floor(budget / fresh), 1.0), maximum(budget / fresh, 1.0)), running)
    gathered = _gathered(client, running / together / output)
    joining = maximum(maximum(running - 1.0, 0.0) / output * gathered, 1e-9)
    group = where(client.wave > 0, together, clip(joining / (1.0 - exp(-joining)), 1.0, most))
    turns = where(client.wave > 0, 1.0, maximum(ceil(fresh / room), 1.0))
    share = where(whole, where(fits >= 1.0, 1.0 / most, fresh / room), fresh / room)
    behind = cached + 0.5 * (turns - 1.0) * fresh / turns
    context, nothing = prompt + 0.5 * output, 0.0 * running
    mixed = Load(running, context, group, fresh / turns, behind)
    return Loads(
        running, Load(running, context), mixed, replace(mixed, decodes=nothing),
        Load(nothing, context, together, fresh, cached + nothing),
        Load(maximum(floor(FEWER * running), 1.0), context), Load(maximum(running - 1.0, 1.0), context), Load(running, prompt),
        group, turns, together, share, gathered, rules,
    )  # fmt: skip


def _fitting(capacity: Any, prompt: Any, output: Any, client: Client, rules: Rules) -> Any:
    """Sequences that the cache holds at once; those of a wave are admitted together, a whole number of them."""
    each, beside = prompt + rules.growth * output, capacity - prompt - output
    at_once = minimum(maximum(beside, 0.0), ENOUGH) / (prompt + rules.ahead * output)
    ahead = where(client.wave > 0, 1.0 + floor(at_once), 1.0 + beside / each)
    return where(rules.ahead > 0, ahead, capacity / each)


def _gathered(client: Client, start: Any) -> Any:
    """Completions that one meets, over those of an even stream, mean of all rounds but the first.

    ``start``: how far apart the first round began, in lives.
    """
    more = 0.0
    for n in range(1, HARMONICS + 1):
        fading = where(client.spread > 0, exp(-((2 * pi * n * client.spread) ** 2)), 0.0)
        sum_ = fading * (1.0 - fading ** (client.rounds - 1.0)) / (1.0 - fading)
        more = more + 2.0 * sum_ * exp(-((2 * pi * n * start) ** 2) / 12.0)
    return 1.0 + more / maximum(client.rounds - 1.0, 1.0)


@dataclass(frozen=True)
class Near:
    """Seconds of the decode steps near the steady one, as in ``Loads``, and of a request that meets an empty server."""

    few: Any
    less: Any
    early: Any
    request: Any


@dataclass(frozen=True)
class Steady:
    """Means of a steady state; floats or arrays.

    Attributes:
        ttft, tpot: seconds. used: share of all steps' budgets that prompts take where they come in waves.
        meets: others whose prompts join at the same step as one's own.
    """

    ttft: Any
    tpot: Any
    used: Any = 0.0
    meets: Any = 0.0

    @property
    def quiet(self) -> Any:
        """Whether prompts do not queue behind each other; that all run at once is another matter."""
        return (self.used <= CROWDED) & (self.meets <= 1.0)


def steady(
    found: Loads, decode: Any, mixed: Any, alone: Any, request: Any, concurrency: Any, output: Any, client: Client = STEADY,
    burst: Any = None, near: Near | None = None,
) -> Steady:  # fmt: skip
    """Times from the seconds of the steps; ``request`` is what passes before a request is scheduled [s].

    ``burst`` matters where the client starts all at once or comes in waves; without it, as if prompts ran one by one. Without
    ``near`` all decode steps take ``decode``.
    """
    running, together, turns = found.running, found.together, found.turns
    near = Near(decode, decode, decode, request) if near is None else near
    wave = together * turns * alone / found.group if burst is None else burst
    shared = _shared(decode, mixed, alone, request, output, found, client, near)
    steps = 0.5 * (where(running > together, running / together, 1.0) + 1.0)
    beside = where(found.rules.stalls > 0, 0.0, maximum(mixed - alone, 0.0) * 0.5 * maximum(running - together, 0.0) / running)
    first = near.request + steps * (wave + beside)
    waved = client.wave > 0
    tpot = where(waved, decode + 0.5 * wave * maximum(running / together - 1.0, 0.0) / output, shared.tpot)
    together_s = near.request + 0.5 * (running / together + 1.0) * wave
    ttft = where(waved, together_s, shared.ttft + (first - shared.ttft) / client.rounds)
    queue = maximum(concurrency / running - 1.0, 0.0) * (output * tpot + ttft)
    return Steady(client.held * decode + queue + ttft, tpot, shared.used, shared.meets)


def _shared(decode: Any, mixed: Any, alone: Any, request: Any, output: Any, found: Loads, client: Client, near: Near) -> Steady:
    """Means where prompts and decodes share the steps; the time to first token is that of later rounds."""
    running, turns, share, stalls = found.running, found.turns, found.share, found.rules.stalls > 0
    others, less = maximum(running - 1.0, 0.0), near.less
    slope = maximum(decode - near.few, 0.0) / maximum(running - found.few.decodes, 1.0)
    step, base = where(stalls, alone, mixed), where(stalls, 0.0, decode)
    added = maximum(turns * (step - base) / found.group, 0.0)
    bare = where(stalls, 0.0, maximum(decode - slope, 0.0)) * turns + added
    bare = request + where(others > 0, bare, turns * where(alone > 0, alone, mixed))
    fading = 1.0 + 1.0 / sqrt(running)
    behind = 0.5 * (1.0 + clip(1.0 / share - 1.0, 0.0, 1.0))
    each, wait, rate, used, joining, token, life = decode, 0.0 * bare, 0.0, 0.0, 0.0, decode, bare
    for _ in range(PASSES):
        half = output * each + life + others * added
        rate = 2.0 * others / (half + sqrt(maximum(half * half - 4.0 * added * life * others, 0.0)))
        service = added + each * share
        rate = minimum(rate, 1.0 / service)
        token = each / (1.0 - rate * added)
        decoding = others * output * token / (life + output * token)
        joining = rate * token * found.gathered
        used = minimum(joining * share, 1.0)
        absent = clip(others - decoding, 0.0, 1.0)
        stir, left, mates = _boundary(request, less, decode, step, joining, absent, found, near)
        per = minimum(share, 1.0)
        queue = where(share <= 1.0, used ** (1.0 + 1.0 / per), used * share - used * (fading - used)) / (2.0 * (fading - used))
        shared = joining + stir * maximum(joining / token * mates - joining, 0.0)
        wait = left + maximum(queue, 0.0) * (base + added / share) + shared * behind * added
        wait = where(others > 0, wait, 0.0)
        life = maximum(bare + wait, others * service - output * token)
        each = maximum(decode - slope * (others - decoding), 0.0)
    apart = where(client.spread > 0, client.spread * sqrt(minimum(client.rounds, MANY) / pi), 1.0)
    end = minimum(apart, 1.0 / 6.0) / client.rounds
    return Steady(life, each - slope * running * end + (token - each) * (1.0 - 0.5 / client.rounds), used, joining)


def _boundary(
    request: Any, less: Any, decode: Any, step: Any, joining: Any, absent: Any, found: Loads, near: Near
) -> tuple[Any, Any, Any]:
    """(how far steps with prompts have stirred the others' order, seconds until the step under way ends, its mean length).

    ``joining``: prompts that a step brings. ``absent``: others that do not decode, up to one. The last is that of the step
    that a request meets at any time.
    """
    others = maximum(found.running - 1.0, 1.0)
    prompts = minimum((1.0 - exp(-joining)) * found.turns, 1.0)
    passed = request / less
    coherent = minimum(0.3 * (found.gathered - 1.0), 1.0)
    width = maximum(decode - near.early, 0.0) / decode * sqrt(1.0 / others + coherent)
    known = where(request > 0, (1.0 - absent) * _remainder(passed, maximum(width * passed, 1e-4)) + absent * 0.5, 0.0) * less
    steps = ceil(passed)
    met = 1.0 - (1.0 - prompts) ** steps
    mean = prompts * step + (1.0 - prompts) * less
    square = prompts * step * step + (1.0 - prompts) * less * less
    after = maximum(step + 0.5 * (steps - 1.0) * less - request, 0.5 * square / mean)
    stir = met * clip((request - step) / less + 1.0, 0.0, 1.0)
    return stir, (1.0 - met) * known + met * after, square / mean


def _remainder(x: Any, width: Any) -> Any:
    """Mean of ceil(t) - t over t within ``width`` of x."""

    def up_to(t: Any) -> Any:
        whole = floor(t)
        part = t - whole
        return 0.5 * whole + part - 0.5 * part * part

    low, high = maximum(x - width, 0.0), x + width
    return (up_to(high) - up_to(low)) / (high - low)


@dataclass(frozen=True)
class ClosedForm:
    """A deployment under a closed loop.

    Attributes:
        concurrency, prompt_tokens, output_tokens: of the load. running: sequences at once, below the concurrency where the
            cache is full. ttft_s, tpot_s: means [s]. used: share of all steps' budgets that prompts take, waves included.
        meets: others whose prompts join at the same step as one's own.
        provenance: of the step times. notes: what they rest on.
    """

    concurrency: float
    prompt_tokens: float
    output_tokens: float
    running: float
    ttft_s: float
    tpot_s: float
    used: float
    meets: float
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

    @property
    def quiet(self) -> bool:
        """Whether nothing queues: all run, and prompts do not wait for each other (see the module)."""
        return not self.full and self.used <= CROWDED and self.meets <= 1.0


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
    rules = Rules() if engine is None else RULES.get(engine.id, Rules())
    found = loads(float(concurrency), float(prompt), float(output), capacity_tokens, float(budget), client, float(cached), rules)
    kinds = (found.decode, found.mixed, found.alone, found.burst, found.few, found.less, found.early)
    decode, mixed, alone, burst, few, less, early = (times.seconds(shape_of(load)) for load in kinds)
    lag = getattr(times, "request_seconds", lambda running: 0.0)
    near = Near(few, less, early, lag(1.0))
    means = steady(
        found, decode, mixed, alone, lag(found.running), float(concurrency), float(output), client, burst, near
    )  # fmt: skip
    return ClosedForm(
        float(concurrency), float(prompt), float(output), float(found.running), float(means.ttft), float(means.tpot),
        float(means.used), float(means.meets), times.provenance, tuple(times.notes),
    )  # fmt: skip


def shape_of(load: Load) -> Any:
    """The step as step times take it, in whole numbers; it has the tokens of a number of chunks that is not whole."""
    from roofline.serving.steps import StepShape

    chunks, decodes = round(load.chunks), round(load.decodes)
    tokens, pairs = load.chunks * load.chunk, load.chunks * load.chunk * (load.behind + 0.5 * (load.chunk + 1.0))
    return StepShape(round(tokens), round(pairs), chunks, decodes, decodes * round(load.context))


def engine_tokens(deployment: Deployment, engine: Profile, longest: int) -> float:
    """Tokens that the cache of one data-parallel replica holds under an engine's own settings; infinite without growing state."""
    from roofline.allocation import Settings, allocate
    from roofline.parallel.mesh import Mesh

    mesh = getattr(deployment, "mesh", None) or Mesh()
    settings = Settings(max_model_len=longest)
    found = allocate(deployment.model, deployment.accelerator, mesh, engine, settings, getattr(deployment, "ranks", None))
    tokens = found.tokens(found.pool.best)
    return float("inf") if tokens is None else float(tokens)

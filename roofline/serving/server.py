"""A server as it is started: how much cache it has, how it schedules, how many replicas stand side by side.

The cache is what an engine's profile says that it allocates, or, without an engine, what the maths leaves beside weights
and the workspace of one step; the two are labelled. All that is filled in is listed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from roofline.errors import InputError
from roofline.inference import Deployment
from roofline.serving.cluster import Cluster, Link, Outcome
from roofline.serving.policies import ESTIMATES, OF_ENGINE, RESERVES, Policy
from roofline.serving.pool import Cached, Counted
from roofline.serving.replica import Replica, Speculation, Swap
from roofline.serving.steps import BoundSteps, StepTimes, step_times
from roofline.serving.workload import Workload
from roofline.units import capacity

if TYPE_CHECKING:
    from roofline.allocation import Settings
    from roofline.engines.profile import Profile

BLOCK = 16
SEQUENCES, BATCHED = 256, 8192
FROM_ENGINE, FROM_MATHS, AS_GIVEN = "engine", "maths", "given"


@dataclass(frozen=True)
class Cache:
    """A replica's cache.

    Attributes:
        blocks: None where the model's state does not grow. block: tokens. longest: longest request, None for no limit.
        source: "engine", "maths" or "given". note: how it comes about.
        sequences, batched_tokens: defaults of the engine for its policy.
    """

    blocks: int | None
    block: int
    longest: int | None
    source: str
    note: str
    sequences: int = SEQUENCES
    batched_tokens: int = BATCHED


def engine_cache(deployment: Deployment, engine: Profile, settings: Settings, length: int) -> Cache:
    """The cache that an engine allocates, in tokens of requests of ``length`` where pages do not grow evenly with it.

    Raises InputError where the engine does not start.
    """
    from roofline.allocation import allocate
    from roofline.parallel.mesh import Mesh

    mesh = getattr(deployment, "mesh", None) or Mesh()
    found = allocate(deployment.model, deployment.accelerator, mesh, engine, settings, getattr(deployment, "ranks", None))
    filled = found.settings
    if found.pool.best < 0:
        raise InputError(
            f"memory: {engine.id} does not start: {deployment.model.name} is {capacity(-found.pool.best)} too large per GPU on "
            f"{deployment.accelerator.id}, before any cache; more GPUs (--tp), or fewer bytes per weight (--dtype)"
        )
    if not found.fits:
        raise InputError(
            f"memory: {engine.id} does not start: {deployment.model.name} leaves {capacity(found.pool.best)} for a cache on "
            f"{deployment.accelerator.id}, and one request of {filled.max_model_len:,} tokens takes "
            f"{capacity(found.request_bytes)}; lower --max-model-len, or see roofline fit --engine {engine.id}"
        )
    assert filled.sequences is not None
    assert filled.batched_tokens is not None
    tokens = found.tokens(found.pool.best)
    pages = found.layout
    if pages is None or tokens is None:
        return Cache(None, BLOCK, filled.max_model_len, FROM_ENGINE, "the state does not grow with the text",
                     filled.sequences, filled.batched_tokens)  # fmt: skip
    assert filled.max_model_len is not None
    if not any(kind.token_bytes for kind, _ in pages.groups):
        requests = int(pages.concurrency(found.pool.best, filled.max_model_len, filled.batched_tokens))
        each = f"{engine.number('pinned_states')} blocks of state for each, which do not grow"
        note = f"room for {requests:,} requests, as {engine.name} {engine.since} allocates it: {each}"
        return Cache(
            requests, filled.max_model_len, filled.max_model_len, FROM_ENGINE, note, filled.sequences, filled.batched_tokens
        )
    even = ""
    if not pages.uniform:
        tokens = int(pages.concurrency(found.pool.best, length, filled.batched_tokens) * length)
        even = f", in requests of {length:,} tokens: windows and states of fixed size fill unevenly"
    note = f"{tokens:,} tokens of cache, as {engine.name} {engine.since} allocates them{even}"
    return Cache(
        tokens // pages.page_tokens, pages.page_tokens, filled.max_model_len, FROM_ENGINE, note, filled.sequences,
        filled.batched_tokens,
    )  # fmt: skip


def maths_cache(deployment: Deployment, settings: Settings, length: int) -> Cache:
    """The cache that weights and the workspace of one step leave; a token takes what it does at ``length`` on average."""
    batched = settings.batched_tokens or BATCHED
    mesh = getattr(deployment, "mesh", None)
    dp = 1 if mesh is None else mesh.dp
    step = deployment.decode(dp, length).memory
    workspace = deployment.prefill(dp, batched).memory.workspace_bytes
    room = step.capacity_bytes - step.weight_bytes - workspace
    block = settings.page_tokens or BLOCK
    longest = settings.max_model_len or deployment.model.max_context
    if room <= 0:
        raise InputError(
            f"memory: {deployment.model.name} does not fit on {deployment.accelerator.id}: weights and workspace are "
            f"{capacity(-room)} too large per GPU; more GPUs (--tp), or fewer bytes per weight"
        )
    sequences = settings.sequences or SEQUENCES
    if not step.kv_bytes:
        return Cache(None, block, longest, FROM_MATHS, "the model keeps no state", sequences, batched)
    tokens = int(room * Fraction(length) / Fraction(step.kv_bytes))
    note = f"{tokens:,} tokens of cache, what weights and one kernel's workspace leave; no engine's overhead"
    return Cache(tokens // block, block, longest, FROM_MATHS, note, sequences, batched)


def given_cache(tokens: int, deployment: Deployment, engine: Profile | None, settings: Settings) -> Cache:
    """A cache of so many tokens, whatever memory says."""
    block = settings.page_tokens or BLOCK
    if tokens < block:
        raise InputError(f"kv-tokens: {tokens:,} are less than a block of {block:,}; give tokens of a replica's cache")
    sequences, batched = settings.sequences or SEQUENCES, settings.batched_tokens or BATCHED
    if engine is not None:
        from roofline.allocation import filled
        from roofline.parallel.mesh import Mesh

        mesh = getattr(deployment, "mesh", None) or Mesh()
        whole = filled(deployment.model, engine, deployment.accelerator, mesh, settings)
        sequences, batched = whole.sequences or sequences, whole.batched_tokens or batched
    longest = settings.max_model_len or deployment.model.max_context
    return Cache(tokens // block, block, longest, AS_GIVEN, f"{tokens:,} tokens of cache, as given", sequences, batched)


@dataclass(frozen=True)
class Front:
    """What each of the replicas that only prefill runs on, where it differs from those that decode.

    Attributes:
        deployment: the same model on a mesh of its own. settings: of its engine. kv_tokens: as in ``Options``.
    """

    deployment: Deployment
    settings: Settings
    kv_tokens: int | None = None


@dataclass(frozen=True)
class Options:
    """How a server is started, beside the engine's settings.

    Attributes:
        scheduler: None for the engine's. preemption, allocation: see ``policies`` and ``pool``.
        prefix_cache: whether prefixes are kept. replicas: side by side. prefill_replicas: with them, replicas only decode.
        link: name of the accelerator's link that carries caches, or bytes per second. draft: speculation, None for none.
        overhead_s: of the host per step. record: keep a log. bound: step times are the datasheet's bound, whatever is
            calibrated. kv_tokens: of each replica's cache, None for what the engine or the maths leaves.
    """

    scheduler: str | None = None
    preemption: str = "recompute"
    allocation: str | None = None
    prefix_cache: bool = False
    replicas: int = 1
    prefill_replicas: int = 0
    link: str | float | None = None
    draft: Speculation | None = None
    overhead_s: float = 0.0
    record: bool = False
    seed: int = 0
    bound: bool = False
    kv_tokens: int | None = None


@dataclass(frozen=True)
class Server:
    """A server that is ready to serve; ``serve`` starts it anew for each workload.

    Attributes:
        deployment: one replica group: a model on a device or a mesh. cache, policy, times, allocation: of each replica.
        front: the same of the replicas that only prefill; None where there are none, or they are like the others.
    """

    deployment: Deployment
    cache: Cache
    policy: Policy
    times: StepTimes
    options: Options = Options()
    allocation: str = "paged"
    notes: tuple[str, ...] = field(default=())
    front: Server | None = None

    @property
    def parallel(self) -> int:
        """Replicas inside one mesh: its data-parallel groups."""
        mesh = getattr(self.deployment, "mesh", None)
        return 1 if mesh is None else int(mesh.dp)

    @property
    def ranks(self) -> int:
        """GPUs of a replica group."""
        mesh = getattr(self.deployment, "mesh", None)
        return 1 if mesh is None else int(mesh.ranks)

    @property
    def gpus(self) -> int:
        """Of all replicas together."""
        return self.ranks * self.options.replicas + (self.front or self).ranks * self.options.prefill_replicas

    def _pool(self) -> Counted | Cached:
        cache, options = self.cache, self.options
        if not options.prefix_cache:
            return Counted(cache.blocks, cache.block, self.allocation, cache.longest)
        if cache.blocks is None:
            raise InputError("prefix-cache: the model keeps no state that grows with the text")
        return Cached(cache.blocks, cache.block, cache.longest)

    @property
    def _senders(self) -> int:
        """GPUs that hold one sequence's cache between them."""
        return self.ranks // self.parallel

    @property
    def _token_bytes(self) -> float:
        """Bytes that one more token adds to a cache on one GPU."""
        model, block = self.deployment.model, self.cache.block
        return float(model.state_bytes(block) - model.state_bytes(0)) / block / self._senders

    def _link_rate(self, name: str) -> float:
        from roofline.timing import link_rate

        return float(link_rate(self.deployment.accelerator, name))

    def _replica(self, number: int, name: str, prefill_only: bool = False) -> Replica:
        swap = None
        if self.policy.preemption == "swap":
            swap = Swap(self._token_bytes, self._link_rate("pcie"))
        return Replica(
            self.times, self.policy, self._pool(), name=f"{name} {number}", speculation=self.options.draft, swap=swap,
            seed=self.options.seed + number, prefill_only=prefill_only, record=self.options.record,
        )  # fmt: skip

    def cluster(self) -> Cluster:
        """Its replicas, all of them empty."""
        options, front = self.options, self.front or self
        lag = getattr(front.times, "request_seconds", None)
        if not options.prefill_replicas:
            return Cluster([self._replica(i, "replica") for i in range(self.parallel * options.replicas)], lag=lag)
        prefill = [front._replica(i, "prefill", True) for i in range(front.parallel * options.prefill_replicas)]
        decode = [self._replica(i, "decode") for i in range(self.parallel * options.replicas)]
        given = options.link if options.link is not None else "network"
        rate = self._link_rate(given) if isinstance(given, str) else float(given)
        link = Link(rate, _PerRank(self.deployment.model, min(front._senders, self._senders)))
        return Cluster(prefill, decode, link, lag)

    def serve(self, workload: Workload) -> Outcome:
        """Serves a workload to its end."""
        return self.cluster().serve(workload)


@dataclass(frozen=True)
class _PerRank:
    """Bytes that each rank sends of a cache; all ranks of the side with fewer of them send or receive at once."""

    model: Any
    ranks: int

    def __call__(self, tokens: int) -> float:
        return float(self.model.state_bytes(tokens)) / self.ranks


def make_server(
    deployment: Deployment, workload: Workload, *, engine: Profile | None = None, settings: Settings | None = None,
    options: Options | None = None, front: Front | None = None,
) -> Server:  # fmt: skip
    """A server for a workload: the cache by the engine or the maths, the policy by options, engine and defaults.

    Args:
        front: what replicas that only prefill run on; without it, what the others do.

    Raises InputError where the model does not fit or settings contradict each other.
    """
    from roofline.allocation import Settings

    settings, options = settings or Settings(), options or Options()
    for value, name in ((options.replicas, "replicas"), (options.prefill_replicas + 1, "prefill replicas")):
        if not 1 <= value <= 1024:
            raise InputError(f"{name}: {value} is out of range; give up to 1024")
    server = _side(deployment, workload, engine, settings, options)
    if front is None or not options.prefill_replicas:
        return server
    other = _side(front.deployment, workload, engine, front.settings, replace(options, kv_tokens=front.kv_tokens))
    notes = [f"prefill: {note}" for note in other.notes if note not in server.notes]
    return replace(server, front=other, notes=(*server.notes, *notes))


def _side(deployment: Deployment, workload: Workload, engine: Profile | None, settings: Settings, options: Options) -> Server:
    """The replicas of one kind."""
    totals = workload.prompt + workload.output
    longest, mean = int(totals.max()), max(1, int(totals.mean()))
    if options.kv_tokens is not None:
        cache = given_cache(options.kv_tokens, deployment, engine, settings)
    else:
        cache = engine_cache(deployment, engine, settings, mean) if engine else maths_cache(deployment, settings, mean)
    scheduler = options.scheduler or (OF_ENGINE[engine.id] if engine else "chunked")
    drafted = options.draft.drafted if options.draft else 0
    if options.draft and scheduler == "static":
        raise InputError("draft: speculation in static batches is not modelled; choose another --scheduler")
    sequences, batched = cache.sequences, cache.batched_tokens
    notes = [cache.note]
    if settings.batched_tokens is None:
        batched = max(batched, sequences * (1 + drafted))
    allocation = _allocation(options, scheduler, engine)
    estimate = ESTIMATES.get(engine.id) if engine and scheduler == OF_ENGINE[engine.id] and allocation == "paged" else None
    policy = Policy(scheduler, sequences, batched, options.preemption, options.overhead_s, estimate)
    if estimate is not None and engine is not None:
        notes.append(f"{engine.name} admits a request with room for all of its output and a share of what others may still write")
    if options.scheduler is None:
        why = f"closest to {engine.name}'s defaults" if engine else "without an engine"
        notes.append(f"scheduler {scheduler}, {why} (--scheduler)")
    if options.draft and options.draft.draft is not None and options.kv_tokens is None:
        notes.append("the draft runs on one GPU of each replica; its weights and cache are not taken off the cache")
    notes.append(f"at most {sequences:,} sequences and {batched:,} tokens in a step")
    admitted = deployment.model.max_context
    if admitted is not None and min(longest, cache.longest or longest) > admitted:
        notes.append(f"requests of up to {longest:,} tokens are longer than the {admitted:,} that the config admits")
    if allocation == "oracle" and options.allocation is None:
        who = engine.name if engine and engine.id in RESERVES else "a static batch"
        notes.append(f"{who} admits a request only if all its tokens fit to its end, and interrupts none (--allocation)")
    times = best_times(deployment, engine, shortest=int(workload.prompt.min()), longest=longest, bound=options.bound)
    draft = options.draft.draft if options.draft else None
    if draft is not None and draft.provenance != times.provenance:
        notes.append(f"step times are {times.provenance}, those of the draft are {draft.provenance}")
    return Server(deployment, cache, policy, times, options, allocation, (*notes, *times.notes))


def best_times(
    deployment: Deployment, engine: Profile | None, *, shortest: int = 0, longest: int | None = None, bound: bool = False
) -> StepTimes:
    """``step_times``, or the datasheet's bound where that is asked for."""
    if bound:
        return BoundSteps(deployment, shortest=shortest, longest=longest)
    return step_times(deployment, engine, shortest=shortest, longest=longest)


def _allocation(options: Options, scheduler: str, engine: Profile | None) -> str:
    """How the cache is given out. Raises InputError where whole regions contradict shared prefixes."""
    given = options.allocation
    if options.prefix_cache:
        if given not in (None, "paged") or scheduler == "static":
            why = "in static batches" if scheduler == "static" else f"with {given} regions"
            raise InputError(f"prefix-caching: prefixes are shared block by block, which {why} is not modelled")
        return "paged"
    return given or ("oracle" if scheduler == "static" else RESERVES.get(engine.id if engine else "", "paged"))

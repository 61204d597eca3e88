"""From a question to an answer: what is searched, what the simulator confirms, and what went out of the search."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from roofline.accelerator import Accelerator
from roofline.errors import InputError, RooflineError
from roofline.planner.choose import Chosen, choose
from roofline.planner.demand import Demand
from roofline.planner.disaggregate import disaggregated
from roofline.planner.prices import Rent, parse_prices, rent
from roofline.planner.search import Found, Plan, search
from roofline.planner.setups import Setup, Variant, comparable, setups, sizes, stored_formats, variants
from roofline.planner.sizing import Drafting
from roofline.planner.verify import COUNTED, Verdict, assured
from roofline.serving.metrics import Objective
from roofline.serving.steps import check_served

MOST_GPUS, SHOWN = 64, 3
GAMMAS = (1, 2, 3, 5)

Draftings = Mapping[str, Sequence[Drafting | None]]


@dataclass(frozen=True)
class Question:
    """What is asked.

    Attributes:
        model: catalogue name or path. gpus: accelerators to choose from. engine, version: what serves.
        most: GPUs at most. weights, kv: formats to choose from; None for those stored, and 8 bits.
        draft: model that drafts, or "mtp"; alpha: chance that a draft is accepted; gammas: draft lengths to try.
        prices: USD per GPU and hour as ``--price`` takes them; None for those of the files.
        disaggregation: whether instances may only prefill or only decode. bound: step times are the datasheet's bound.
        shown: deployments to confirm. requests: that the simulator counts for each.
        names: what the user calls a GPU, by its id. typed: what was made of what the user typed.
    """

    model: str
    load: Demand
    objective: Objective
    gpus: Sequence[Accelerator]
    engine: str = "vllm"
    version: str | None = None
    most: int = MOST_GPUS
    weights: Sequence[str] | None = None
    kv: Sequence[str] | None = None
    draft: str | None = None
    alpha: float | None = None
    gammas: Sequence[int] = GAMMAS
    prices: list[str] | None = None
    disaggregation: bool = True
    bound: bool = False
    shown: int = SHOWN
    requests: int = COUNTED
    names: Mapping[str, str] = field(default_factory=dict)
    typed: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not 50 <= self.objective.percentile < 100:
            raise InputError(f"percentile: {self.objective.percentile!r} is out of range; give 50 to below 100, such as 99")


@dataclass(frozen=True)
class Answer:
    """What was found.

    Attributes:
        launch_model: what the engine loads. stored: formats of the checkpoint. found: by the closed form.
        chosen: what the simulator says. rents: price of each GPU. notes: what went out of the search, and why.
        drafts: that were tried on each GPU. launch_draft: what the engine loads to draft, "mtp" for the model's own layer.
    """

    question: Question
    launch_model: str
    stored: tuple[str, str]
    found: Found
    chosen: Chosen
    rents: dict[str, Rent | None]
    notes: list[str]
    drafts: Draftings
    launch_draft: str | None = None


def _drafts(question: Question, model: Any, engine: Any) -> Draftings:
    """For each GPU none, and speculation of each length; the draft runs whole on one GPU of an instance."""
    if question.draft is None:
        return {}
    if question.alpha is None:
        raise InputError("alpha: speculation needs the chance that a draft is accepted")
    from roofline.configs.load import load_model
    from roofline.parallel.mesh import Mesh
    from roofline.sharded import ShardedDeployment
    from roofline.speculative.rounds import check_vocabulary, multi_token_module

    draft = multi_token_module(model) if question.draft == "mtp" else load_model(question.draft)
    check_vocabulary(model, draft)
    found: dict[str, list[Drafting | None]] = {}
    for gpu in question.gpus:
        one = Setup(
            Variant(draft, "", ""), gpu, Mesh(), engine, question.load.longest, ShardedDeployment(draft, gpu), question.bound
        )  # fmt: skip
        found[gpu.id] = [None, *(Drafting(gamma, question.alpha, one.times, draft) for gamma in question.gammas)]
    return found


def _setups(question: Question, model: Any, engine: Any) -> tuple[list[Setup], list[str]]:
    found: list[Setup] = []
    notes = []
    for gpu in question.gpus:
        try:
            engine.check(gpu)
            given = variants(model, question.weights, question.kv, engine, gpu)
            some = list(setups(model, given, gpu, engine, question.load.longest, question.most, bound=question.bound))
        except RooflineError as error:
            notes.append(f"{gpu.id} left out: {error}")
            continue
        if not some:
            largest, length = sizes(gpu, question.most)[-1], question.load.longest
            notes.append(
                f"{gpu.id} left out: no layout of {model.name} on up to {largest} of them holds a request of {length:,} tokens"
            )
        found += some
    kept, lost = comparable(found)
    return kept, [*notes, *lost]


def _ended(load: Demand, model: Any) -> Demand:
    """The load with a longest request, where its lengths have no end of their own: what is drawn, or what the model admits."""
    endless = load.turns > 1 or "lognormal" in (load.prompt.kind, load.output.kind)
    if load.most is not None or not endless:
        return load
    return replace(load, most=min(load.longest, model.max_context or load.longest))


def seek(question: Question, watch: Callable[[list[Setup]], Iterable[Setup]] = iter) -> Answer:
    """The search alone, nothing confirmed; ``watch`` sees the setups go by.

    Raises InputError where no GPU holds the model at all.
    """
    from roofline.configs.load import full_name, load_model
    from roofline.engines.profile import load_engine

    model, engine = load_model(question.model), load_engine(question.engine, question.version)
    if question.load.kept and engine.id == "llamacpp":
        raise InputError("prefix-caching: llama.cpp keeps the last prompt of each slot, not blocks that requests share")
    check_served(model, question.load.least)
    if question.load.kept and model.state_bytes(1025) == model.state_bytes(1):
        raise InputError(f"prefix-caching: the state of {model.name} does not grow with the text; there are no blocks to keep")
    question = replace(question, load=_ended(question.load, model))
    check_served(model, question.load.longest)
    if question.load.osl == 1 and question.objective.tpot_s is not None:
        raise InputError("tpot: a request of one output token has no time between tokens; leave --tpot out, or raise --osl")
    ids = {name: gpu.id for gpu in question.gpus for name in (gpu.id, *gpu.aliases)}
    given = parse_prices(question.prices, ids)
    rents = {gpu.id: rent(gpu, given) for gpu in question.gpus}
    candidates, notes = _setups(question, model, engine)
    if not candidates:
        raise InputError(f"gpus: {'; '.join(notes) or 'none given'}")
    drafts = _drafts(question, model, engine)
    found = search(watch(candidates), question.load, question.objective, rents, question.most, drafts)
    if question.disaggregation and engine.id != "llamacpp" and not question.draft:
        apart, tried = disaggregated(candidates, question.load, question.objective, rents, question.most)
        found.plans += apart
        found.tried += tried
    draft = full_name(question.draft) if question.draft else None
    return Answer(question, full_name(question.model), stored_formats(model), found, Chosen([], []), rents, notes, drafts, draft)


def confirm(answer: Answer, watch: Callable[[], None] = lambda: None) -> Answer:
    """The answer with what the simulator says of the cheapest deployments; ``watch`` is called after each simulation."""
    question = answer.question

    def check(plan: Plan, load: Demand, objective: Objective) -> Verdict:
        verdict = assured(plan, load, objective, counted=question.requests)
        watch()
        return verdict

    chosen = choose(answer.found.plans, question.load, question.objective, question.shown, question.most, check)
    return replace(answer, chosen=chosen)


def solve(question: Question) -> Answer:
    """The search and its confirmation. Raises InputError where no GPU holds the model at all."""
    return confirm(seek(question))

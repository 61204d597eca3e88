"""``roofline speculate``: speed-up by draft length, the best draft length by batch, and where drafting stops paying."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from roofline.cli import sweeps
from roofline.cli.bundles import bundled
from roofline.cli.edit_options import EDIT_OPTIONS, Chosen
from roofline.cli.mesh_options import MESH_OPTIONS, Meshes
from roofline.cli.options import SWEEP, Batch, Check, Context, Gpu, accelerators, complete_models
from roofline.cli.output import OUTPUT, Cells, Output
from roofline.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from fractions import Fraction

    from roofline.accelerator import Accelerator
    from roofline.model import Model
    from roofline.parallel.mesh import Mesh
    from roofline.speculative.rounds import Round, Speculation
    from roofline.speculative.trees import Tree

DEFAULT_BATCHES, DEFAULT_CONTEXT, DEFAULT_GAMMAS = ["1,4,16,64,256"], "4096", ["1,2,3,4,5,6,8"]
OWN_DRAFTS = ("mtp", "eagle", "medusa")
"""Drafts made for the target itself; "medusa:3" says how many heads."""
FORMULA_ASSUMES = [
    "verifying takes as long as one step of the target; each draft accepted independently",
    "the draft costs the same share of the target's arithmetic as of its time",
]
ASSUMES = "each draft accepted independently; drafting and verifying one after the other, at the datasheet's roofs"
NOT_MODELLED = "sampling, tree masks, rejected tokens' cache clean-up, launch overheads, host time"

Record = dict[str, Any]


def _cost(text: str | None) -> Fraction | None:
    from fractions import Fraction

    if text is None:
        return None
    try:
        cost = Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise InputError(f"draft-cost: {text!r} is not a number; give a draft step's time over the target's, like 0.05") from None
    if cost < 0:
        raise InputError(f"draft-cost: {text} is negative; give a draft step's time over the target's, 0 or more")
    return cost


def _accuracies(given: list[str] | None, alphas: list[str] | None, tree: bool) -> list[list[Fraction]]:
    """Chances of the guesses at each depth; for a tree only."""
    if given and not tree:
        raise InputError("accuracy: chances of several guesses describe a tree; add --tree NODES")
    if tree and alphas:
        raise InputError("alpha: a tree takes --accuracy, the chances of the first, second, ... guess at each depth")
    if tree and not given:
        raise InputError("tree: say how often the first, second, ... guess is right: --accuracy 0.6,0.2 for each depth")
    return [[sweeps.fractions([term], "accuracy")[0] for term in text.split(",")] for text in given or []]


def _draft(name: str | None, target: Model) -> tuple[Model | None, int | None]:
    """(draft, tokens that one pass of it guesses where it guesses several)."""
    from roofline.configs.load import load_model
    from roofline.speculative.heads import MEDUSA_HEADS, eagle_step, medusa_heads
    from roofline.speculative.rounds import multi_token_module

    if name is None:
        return None, None
    kind, colon, number = name.partition(":")
    if kind == "medusa":
        if colon and not (number.isascii() and number.isdecimal()):
            raise InputError(f"draft: {number!r} is not a number of Medusa heads; write medusa:{MEDUSA_HEADS}")
        heads = int(number) if colon else MEDUSA_HEADS
        return medusa_heads(target, heads), heads
    if name in OWN_DRAFTS:
        return (multi_token_module if name == "mtp" else eagle_step)(target), None
    return load_model(name), None


def _formulas(alphas: Sequence[Fraction], cost: Fraction, gammas: Sequence[int], only: bool) -> Iterator[Record]:
    """The formulas alone: a verification as long as a step, no hardware."""
    from roofline.speculative import acceptance

    for alpha in alphas:
        best, _ = acceptance.best_length(alpha, cost)
        for gamma in sorted({*gammas} if only else {*gammas, best}):
            yield {
                "alpha": float(alpha),
                "draft_cost": float(cost),
                "gamma": gamma,
                "expected_tokens": float(acceptance.expected_tokens(alpha, gamma)),
                "speedup": float(acceptance.speedup(alpha, gamma, cost)),
                "operations_factor": float(acceptance.operations_factor(alpha, gamma, cost)),
                "best": gamma == best,
                "assumes": FORMULA_ASSUMES,
            }


def _memory(setup: Speculation, batch: int, context: int, gamma: int) -> Record:
    """What target and draft hold at once, in bytes, and whether it fits."""
    from fractions import Fraction

    from roofline.memory import Memory, plain, usable
    from roofline.work import Work

    models = [setup.target, *([setup.draft] if setup.draft else [])]
    _, workspace = setup.target.step(Work(batch, gamma + 1, context, all_logits=True))
    memory = Memory(
        sum(model.weight_bytes for model in models),
        batch * sum(model.state_bytes(context + gamma + 1) for model in models),
        workspace,
        usable(setup.accelerator, Fraction(1)),
    )
    return {"required_bytes": plain(memory.required_bytes), "capacity_bytes": plain(memory.capacity_bytes), "fits": memory.fits}


def _assumes(setup: Speculation, context: int) -> list[str]:
    """What was assumed about target and draft, and about a context that is longer than one of them admits."""
    from roofline.cli.verdict import beyond, merged, model_notes

    models = [setup.target, *([setup.draft] if setup.draft else [])]
    return list(merged([(model.name, [*model_notes(model, [setup.accelerator]), *beyond(model, context)]) for model in models]))


def _record(setup: Speculation, batch: int, context: int, about: Record, found: Round, best: bool) -> Record:
    return {
        "schema": 1,
        "model": setup.target.name,
        "draft": setup.draft.name if setup.draft else None,
        "draft_cost": float(setup.draft_cost) if setup.draft_cost is not None else None,
        "gpu": setup.accelerator.id,
        "batch": batch,
        "context_tokens": context,
        **about,
        "gamma": found.gamma,
        "expected_tokens": found.tokens,
        "draft_bound_s": found.draft.bound,
        "verify_bound_s": found.verify.bound,
        "plain_bound_s": found.plain.bound,
        "tpot_bound_s": found.tpot.bound,
        "tpot_serial_s": found.tpot.serial,
        "speedup_bound": found.speedup,
        "speedup_serial": found.speedup_serial,
        "best": best,
        **_memory(setup, batch, context, found.gamma),
        "provenance": "datasheet",
        "assumes": [*_assumes(setup, context), ASSUMES],
        "not_modelled": NOT_MODELLED.split(", "),
    }


def _chains(
    setup: Speculation, batches: Sequence[int], contexts: Sequence[int], alphas: Sequence[Fraction], gammas: Sequence[int],
    only: bool,
) -> Iterator[Record]:  # fmt: skip
    """Chains of each length; the best length too, unless ``only`` those are asked for."""
    for alpha in alphas:
        for context in contexts:
            for batch in batches:
                best = setup.best(batch, context, alpha)
                for gamma in sorted({*gammas} if only else {*gammas, best.gamma}):
                    found = setup.chain(batch, context, alpha, gamma)
                    yield _record(setup, batch, context, {"alpha": float(alpha)}, found, gamma == best.gamma)


def _trees(
    setup: Speculation,
    batches: Sequence[int],
    contexts: Sequence[int],
    accuracies: list[list[Fraction]],
    trees: Sequence[Tree],
) -> Iterator[Record]:
    for context in contexts:
        for batch in batches:
            rounds = [setup.tree(batch, context, accuracies, tree) for tree in trees]
            best = max(rounds, key=lambda found: found.speedup)
            for tree, found in zip(trees, rounds, strict=True):
                wins = found is best and found.speedup > 1
                yield _record(
                    setup, batch, context, {"alpha": None, "tree_nodes": len(tree.nodes), "tree_depth": tree.depth}, found, wins
                )


def _cells(records: Sequence[Record]) -> Cells:
    from roofline.units import count, latency

    def best(record: Record) -> str:
        return "best" if record["best"] else ""

    if "batch" not in records[0]:
        headers = ["alpha", "draft cost", "gamma", "tokens\nper round", "speed-up", "operations\nfactor", ""]
        return headers, [
            [
                f"{r['alpha']:g}", f"{r['draft_cost']:g}", r["gamma"], f"{r['expected_tokens']:.3f}", f"{r['speedup']:.3f}",
                f"{r['operations_factor']:.3f}", best(r),
            ]
            for r in records
        ]  # fmt: skip
    tree = records[0].get("tree_nodes") is not None
    headers = [
        "alpha", "context", "batch", "nodes /\ndepth" if tree else "gamma", "tokens\nper round",
        "draft\nbound", "verify\nbound", "TPOT\nbound",
        "speed-up\nbound", "speed-up\nserial", "fits", "",
    ]  # fmt: skip
    return headers, [
        [
            "-" if r["alpha"] is None else f"{r['alpha']:g}", count(r["context_tokens"]), count(r["batch"]),
            f"{r['tree_nodes']} / {r['tree_depth']}" if tree else r["gamma"],
            f"{r['expected_tokens']:.3f}", latency(r["draft_bound_s"]), latency(r["verify_bound_s"]),
            latency(r["tpot_bound_s"]), f"{r['speedup_bound']:.2f}", f"{r['speedup_serial']:.2f}",
            "yes" if r["fits"] else "no", best(r),
        ]
        for r in records
    ]  # fmt: skip


def _size(record: Record) -> str:
    """How much a round drafts: "5", or "16 nodes of depth 3"."""
    nodes = record.get("tree_nodes")
    return str(record["gamma"]) if nodes is None else f"{nodes} nodes of depth {record['tree_depth']}"


def _gain(record: Record) -> str:
    """The speed-up, that it needs more memory than there is, and that the search ended there."""
    from roofline.speculative.acceptance import LONGEST_DRAFT

    ended = ", the longest that is searched" if record["gamma"] == LONGEST_DRAFT else ""
    return f"{record['speedup_bound']:.2f}x{ended}{'' if record['fits'] else ', does not fit'}"


def _grown(accuracies: list[list[Fraction]], sizes: Sequence[int]) -> list[Tree]:
    """The best trees of so many nodes. Raises InputError where the accuracies offer fewer."""
    from roofline.speculative.trees import best_tree

    trees = [best_tree(accuracies, size) for size in sizes]
    for size, tree in zip(sizes, trees, strict=True):
        if len(tree.nodes) < size:
            raise InputError(
                f"tree: {size} nodes are more than the {len(tree.nodes)} that --accuracy describes; give guesses for more "
                f"depths or ranks, or --tree {len(tree.nodes)}"
            )
    return trees


def _verdicts(setup: Speculation, records: Sequence[Record], alphas: Sequence[Fraction], out: Output) -> Iterator[str]:
    """The best draft length by batch, and the batch at which drafting stops paying."""
    from roofline.speculative.rounds import LARGEST_BATCH

    too_large = [record for record in records if not record["fits"]]
    if len(too_large) == len(records):
        from roofline.units import capacity

        least = min(record["required_bytes"] for record in records)
        room = capacity(records[0]["capacity_bytes"])
        text = f"nothing fits: target and draft need {capacity(least)} at least, and {setup.accelerator.id} has {room}"
        yield f"{out.paint(text, 'red')}; what follows holds where the memory is there"
    groups: dict[tuple[Any, int], list[Record]] = {}
    for record in records:
        if record["best"]:
            groups.setdefault((record["alpha"], record["context_tokens"]), []).append(record)
    for (alpha, context), found in groups.items():
        how = "tree" if alpha is None else f"alpha {alpha:g}"
        best = ", ".join(f"{_size(r)} at batch {r['batch']:,} ({_gain(r)})" for r in found)
        yield f"{how}, context {context:,}: best {'draft' if alpha is None else 'draft length'} {out.paint(best, 'green')}"
    drafted = any(record.get("gamma") for record in records)
    for context in dict.fromkeys(record["context_tokens"] for record in records if drafted):
        for alpha in alphas:
            last = setup.last_paying_batch(context, alpha)
            where = f"pays at every batch up to {LARGEST_BATCH:,}" if last is None else f"stops paying above batch {last:,}"
            memory = ", memory aside" if too_large and last != 0 else ""
            yield f"alpha {float(alpha):g}, context {context:,}: drafting {where if last != 0 else 'never pays'}{memory}"
    if records and not alphas and not any(record["best"] for record in records):
        yield out.paint("no draft tree given pays at any of these batches", "red")


def _on_mesh(setup: Speculation, meshes: Meshes) -> tuple[Speculation, Mesh | None]:
    """Target and draft as one rank of a mesh runs them. Raises InputError for meshes that change the batch or have stages."""
    from dataclasses import replace

    from roofline.parallel.mesh import Mesh
    from roofline.parallel.ranks import Sharded

    found = meshes.all()
    mesh = found[0]
    if mesh is None:
        return setup, None
    if setup.guesses is not None:
        raise InputError("mesh: Medusa heads over several GPUs are not modelled; leave out --tp, --ep and --sp")
    if len(found) > 1 or mesh.pp > 1 or mesh.dp > 1:
        raise InputError("mesh: speculate takes one value of --tp, --ep and --sp; pipeline stages and --dp are not modelled here")
    target = Sharded(setup.target, setup.accelerator, mesh).stages[0]
    draft = setup.draft and Sharded(setup.draft, setup.accelerator, Mesh(mesh.tp, node=mesh.node)).stages[0]
    return replace(setup, target=target, draft=draft), mesh


def _accelerator(gpu: list[str] | None) -> Accelerator:
    chips = accelerators(gpu)
    if len(chips) > 1:
        raise InputError("gpu: speculate takes one GPU")
    return chips[0]


@bundled(edits=EDIT_OPTIONS, meshes=MESH_OPTIONS, out=OUTPUT)
def speculate(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="TARGET", help="The model that verifies; without it, the formulas alone.", autocompletion=complete_models
        ),
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(
            "--draft",
            metavar="MODEL",
            help="The model that drafts; or mtp, eagle: one layer like the target's last; or medusa[:HEADS].",
            autocompletion=lambda incomplete: [
                *complete_models(incomplete),
                *(n for n in OWN_DRAFTS if n.startswith(incomplete)),
            ],
        ),
    ] = None,
    draft_cost: Annotated[
        str | None, typer.Option("--draft-cost", metavar="C", help="Instead: a draft step's time over the target's.")
    ] = None,
    alpha: Annotated[
        list[str] | None, typer.Option("--alpha", "-a", metavar="RATE", help="Chance that a draft is accepted, 0 < RATE <= 1.")
    ] = None,
    gamma: Annotated[
        list[str] | None, typer.Option("--gamma", metavar=SWEEP, help="Draft lengths.  [default: 1,2,3,4,5,6,8, and the best]")
    ] = None,
    tree: Annotated[
        list[str] | None, typer.Option("--tree", metavar=SWEEP, help="Nodes of a draft tree (Medusa, EAGLE); needs --accuracy.")
    ] = None,
    accuracy: Annotated[
        list[str] | None,
        typer.Option("--accuracy", metavar="P1,P2,...", help="Chances of the first, second, ... guess; once for each depth."),
    ] = None,
    gpu: Gpu = None,
    batch: Batch = None,
    context: Context = None,
    check: Check = False,
    *,
    edits: Chosen,
    meshes: Meshes,
    out: Output,
) -> int:
    """Speed-up of speculative decoding by draft length, the best length by batch, and where it stops paying.

    Verification takes the target's own step over gamma + 1 tokens, drafting the draft's own steps. Edits change the
    target.

    roofline speculate llama-3.1-70b --draft llama-3.1-8b --alpha 0.8 --gpu h200-sxm
    """
    cost = _cost(draft_cost)
    if tree and gamma:
        raise InputError("gamma: a tree has nodes instead of a draft length; give --tree or --gamma")
    accuracies = _accuracies(accuracy, alpha, bool(tree))
    if not tree and not alpha:
        raise InputError("alpha: say how often a draft is accepted, as in --alpha 0.8")
    alphas = sweeps.fractions(alpha, "alpha") if alpha else []
    gammas = sweeps.whole_numbers(gamma or DEFAULT_GAMMAS, "gamma", least=0)
    if target is None:
        if cost is None or draft or tree or gpu or check:
            raise InputError("target: name the model that verifies; without one give --alpha and --draft-cost only")
        records = list(_formulas(alphas, cost, gammas, bool(gamma)))
        out.records(records, lambda: _cells(records))
        out.note("", *(f"assumes: {line}" for line in FORMULA_ASSUMES))
        return 0

    from roofline.cli.points import variants
    from roofline.cli.verdict import plural
    from roofline.configs.load import load_model
    from roofline.speculative.rounds import Speculation

    if draft is None and cost is None:
        raise InputError(
            "draft: name a draft model (--draft llama-3.2-1b), mtp, eagle or medusa, or a relative cost (--draft-cost 0.05)"
        )
    if edits.count > 1:
        raise InputError("edits: speculate takes one value per edit")
    chip = _accelerator(gpu)
    model = variants(load_model(target), edits)[-1].model
    if model.encoder is not None:
        raise InputError(f"target: {model.name} is an encoder-decoder; speculation is modelled for decoders")
    drafting, guesses = _draft(draft, model)
    if guesses is not None and not gamma:
        gammas = [length for length in gammas if length <= guesses]
    setup, mesh = _on_mesh(Speculation(model, chip, drafting, cost, guesses), meshes)
    batches = sweeps.whole_numbers(batch or DEFAULT_BATCHES, "batch")
    contexts = sweeps.whole_numbers(context or [DEFAULT_CONTEXT], "context", least=0)
    if tree:
        trees = _grown(accuracies, sweeps.whole_numbers(tree, "tree"))
        records = list(_trees(setup, batches, contexts, accuracies, trees))
    else:
        records = list(_chains(setup, batches, contexts, alphas, gammas, bool(gamma)))
    for record in records:
        record.update(gpus=mesh.ranks if mesh else 1, mesh=mesh.flags if mesh else "")
    where = f"{mesh.ranks} x {chip.id} ({mesh.flags})" if mesh else chip.id
    drafter = setup.draft.name if setup.draft else f"a draft of {float(cost or 0):g} of its step"
    if not out.silent:
        out.note(out.paint(f"{model.name} with {drafter} on {where}", "bold"), *_verdicts(setup, records, alphas, out), "")
    out.records(records, lambda: _cells(records))
    too_large = sum(not record["fits"] for record in records)
    notes = [f"{plural(too_large, 'row')} too large for {where} ({chip.capacity_rung} memory)"] if too_large else []
    notes += [f"assumes: {line}" for line in _assumes(setup, max(contexts))]
    notes.append(f"assumes: {ASSUMES}")
    if mesh:
        notes.append("assumes: the draft is cut over the same tensor-parallel GPUs; the latency of collectives is left out")
    out.note("", *notes, f"not modelled: {NOT_MODELLED}")
    return 1 if check and too_large else 0

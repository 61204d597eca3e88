"""What an engine allocates, for ``roofline fit --engine``: its memory term by term, and the tokens that remain."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roofline.cli import sweeps
from roofline.cli.bundles import Bundle
from roofline.cli.options import complete_engines
from roofline.errors import InputError

if TYPE_CHECKING:
    from roofline.allocation import Allocation, Settings
    from roofline.cli.output import Cells, Output
    from roofline.cli.points import Question, Variant
    from roofline.engines.profile import Profile

MOST_FIXES = 4
NOT_MODELLED = ("adapters (LoRA)", "other processes on the device", "what an allocator loses between its blocks")


@dataclass(frozen=True)
class EngineChoice:
    """The engine that was asked for and what it is started with; ``engine`` is None where none was.

    Attributes:
        sizes: setting -> value, of those given. logged_tokens: capacity that a log claims, to be checked.
    """

    engine: str | None
    version: str | None
    sizes: dict[str, int]
    logged_tokens: int | None

    def settings(self, fraction: Fraction | None) -> Settings:
        """The settings as given."""
        from roofline.allocation import Settings

        return Settings(memory_fraction=fraction, **self.sizes)


SIZES = {
    "max_model_len": ("--max-model-len", "Longest request, with --engine.  [default: what the config admits]"),
    "batched_tokens": ("--max-num-batched-tokens", "Token budget of a step, with --engine."),
    "sequences": ("--max-num-seqs", "Sequences of a step, with --engine."),
    "page_tokens": ("--block-size", "Tokens of a page, with --engine."),
}
"""Setting -> flag and help."""


def _choice(engine: str | None, engine_version: str | None, logged_tokens: str | None, **given: str | None) -> EngineChoice:
    sizes = {name: sweeps.whole_numbers([text], SIZES[name][0].lstrip("-"))[0] for name, text in given.items() if text}
    if engine is None and (engine_version or logged_tokens or sizes):
        flags = [SIZES[name][0] for name in sizes] + (["--engine-version"] if engine_version else [])
        raise InputError(f"engine: {(flags or ['--logged-tokens'])[0]} belongs to an engine; name it, as in --engine vllm")
    logged = sweeps.whole_numbers([logged_tokens], "logged-tokens")[0] if logged_tokens else None
    return EngineChoice(engine, engine_version, sizes, logged)


ENGINE_OPTIONS = Bundle(
    {
        "engine": (
            Annotated[
                str | None,
                typer.Option(
                    "--engine",
                    metavar="NAME",
                    help="What vllm, sglang, trtllm or llamacpp allocates, term by term.",
                    autocompletion=complete_engines,
                ),
            ],
            None,
        ),
        "engine_version": (
            Annotated[
                str | None, typer.Option("--engine-version", metavar="X.Y", help="Its version.  [default: the newest known]")
            ],
            None,
        ),
        **{
            name: (Annotated[str | None, typer.Option(flag, metavar="N", help=text)], None)
            for name, (flag, text) in SIZES.items()
        },
        "logged_tokens": (
            Annotated[
                str | None,
                typer.Option("--logged-tokens", metavar="N", help="Tokens that a log claims: contradictions are named."),
            ],
            None,
        ),
    },
    _choice,
)


@dataclass(frozen=True)
class Found:
    """An allocation, and the same question of the maths.

    Attributes:
        variant: the model. allocation: the engine's. needed: bytes that weights, one longest request and one kernel's
            workspace take.
    """

    variant: Variant
    allocation: Allocation
    needed: Any


def _found(
    variant: Variant, question: Question, profile: Profile, choice: EngineChoice, fraction: Fraction | None
) -> Iterator[Found]:
    from roofline.allocation import allocate
    from roofline.parallel.mesh import Mesh
    from roofline.sharded import ShardedDeployment

    for accelerator in question.accelerators:
        for mesh in question.meshes:
            own = mesh or Mesh()
            allocation = allocate(variant.model, accelerator, own, profile, choice.settings(fraction))
            longest = allocation.settings.max_model_len
            memory = ShardedDeployment(variant.model, accelerator, mesh=own).decode(own.dp, longest).memory
            yield Found(variant, allocation, memory.required_bytes)


def _record(found: Found, logged: int | None) -> dict[str, Any]:
    from roofline.allocation import contradiction
    from roofline.memory import plain

    one = found.allocation
    settings, pages, pool = one.settings, one.layout, one.pool
    return {
        "schema": 1,
        "model": one.model,
        "variant": found.variant.kind,
        "edits": list(found.variant.flags),
        "gpu": one.accelerator.id,
        "gpus": one.mesh.ranks,
        "mesh": one.mesh.flags,
        "engine": one.profile.id,
        "engine_since": one.profile.since,
        "engine_version": one.profile.asked or None,
        "memory_fraction": float(settings.memory_fraction or 1),
        "max_model_len": settings.max_model_len,
        "max_num_batched_tokens": settings.batched_tokens,
        "max_num_seqs": settings.sequences,
        "block_tokens": pages.page_tokens if pages else None,
        "capacity_bytes": plain(one.accelerator.capacity.value),
        "terms": [term.to_dict() for term in (one.budget, *one.terms, pool)],
        "outside": [term.to_dict() for term in one.outside],
        "pool_bytes": plain(pool.best),
        "pool_low_bytes": plain(pool.low),
        "pool_high_bytes": plain(pool.high),
        "kv_tokens": one.tokens(pool.best),
        "kv_tokens_low": one.tokens(pool.low),
        "kv_tokens_high": one.tokens(pool.high),
        "kv_blocks": pages.blocks(one.taken(pool.best)) if pages else None,
        "kv_bytes_per_token": plain(pages.row_bytes) if pages else 0,
        "max_concurrency": float(one.concurrency(pool.best) or 0),
        "request_bytes": plain(one.request_bytes),
        "longest_request_tokens": one.longest,
        "required_bytes": plain(found.needed),
        "fits": one.fits,
        "contradiction": contradiction(one, logged) if logged else None,
        "provenance": "calibrated",
        "not_modelled": [*found.variant.model.not_modelled, *NOT_MODELLED],
    }


def _cells(results: Sequence[Found]) -> Cells:
    from roofline.units import GIB

    rows = []
    several = len(results) > 1
    for found in results:
        one = found.allocation
        signed = [(one.budget, "")] + [(term, "- ") for term in one.terms] + [(one.pool, "= ")]
        for term, sign in (*signed, *((term, "beside: ") for term in one.outside)):
            figures = [f"{float(value) / GIB:,.2f}" for value in (term.low, term.best, term.high)]
            where = [f"{one.accelerator.id} {one.mesh.flags} {' '.join(found.variant.flags)}".strip()] if several else []
            rows.append([*where, f"{sign}{term.name}", *figures, "yes" if term.exact else "no", term.note[:70]])
    return [*(["on"] if several else []), "term", "low\nGiB", "best\nGiB", "high\nGiB", "exact", "what it is"], rows


def _left(one: Allocation) -> str:
    """What stays free where an engine takes no more than its sequences can need."""
    from roofline.units import capacity

    if not one.profile.whole_context:
        return ""
    return f"; {capacity(one.pool.best - one.taken(one.pool.best))} stay free"


def _verdict(found: Found, out: Output) -> Iterator[str]:
    """Whether the engine starts, what its log prints, what a naive check says."""
    from roofline.units import capacity

    one = found.allocation
    settings, pool, pages = one.settings, one.pool, one.layout
    longest = settings.max_model_len or 0
    flags = " ".join(text for text in (one.mesh.flags, *found.variant.flags) if text)
    who = f"{one.profile.label} on {one.accelerator.id}{' ' + flags if flags else ''}"
    if pages is None:
        yield f"{who}: {out.paint('starts' if one.fits else 'does not start', 'green' if one.fits else 'red')}; no growing state"
    elif one.fits:
        each = f", for each of {one.mesh.dp} groups" if one.mesh.dp > 1 else ""
        tokens, low, high = (one.tokens(value) or 0 for value in (pool.best, pool.low, pool.high))
        yield (
            f"{who}: {out.paint('starts', 'green')}; KV cache of {tokens:,} tokens ({low:,} to {high:,}), "
            f"{pages.blocks(one.taken(pool.best)):,} blocks of {pages.page_tokens:,}; "
            f"{float(one.concurrency(pool.best) or 0):,.2f} requests of {longest:,} tokens at once{each}{_left(one)}"
        )
    else:
        number = settings.sequences if one.profile.whole_context else 1
        who_needs = (
            f"{number:,} requests of {longest:,} tokens need" if number != 1 else f"one request of {longest:,} tokens needs"
        )
        needs = f"{who_needs} {capacity(one.wanted)}"
        room = f"{capacity(pool.best)} remain" if pool.best > 0 else f"{capacity(-pool.best)} are missing before any state"
        most = f"; the longest request is {one.longest:,} tokens" if one.longest else ""
        yield f"{who}: {out.paint('does not start', 'red')}: {needs}, and {room}{most}"
    weights, whole = one.terms[0].best, one.accelerator.capacity.value
    naive = weights <= whole
    judged = "" if naive == one.fits else ", which is wrong"
    yield (
        f"what the maths needs for one such request: {capacity(found.needed)}; what the engine allows itself: "
        f"{capacity(one.budget.best)} of {capacity(whole)}; a naive check says {'fits' if naive else 'does not fit'} "
        f"(weights {capacity(weights)}){judged}"
    )


Attempt = tuple[str, "Callable[[], Allocation]"]


def _attempts(found: Found) -> Iterator[Attempt]:
    """(flags in the engine's words, the allocation with them)."""
    from roofline.allocation import allocate
    from roofline.edits import apply, kv_dtype

    one = found.allocation
    model, words, given = found.variant.model, one.profile.flags, one.settings

    def again(model: Any = model, mesh: Any = one.mesh, **change: Any) -> Callable[[], Allocation]:
        return lambda: allocate(model, one.accelerator, mesh, one.profile, replace(given, **change))

    if one.longest:
        yield f"{words['max_model_len']} {one.longest}", again(max_model_len=one.longest)
    if one.profile.fraction_base != "none" and (given.memory_fraction or 1) < Fraction(95, 100):
        yield f"{words['memory_fraction']} 0.95", again(memory_fraction=Fraction(95, 100))
    if (given.sequences or 0) > 64:
        yield f"{words['sequences']} 64", again(sequences=64)
    if (given.batched_tokens or 0) > 2048 and not one.profile.batched_follow_length:
        yield f"{words['batched_tokens']} 2048", again(batched_tokens=2048)
    yield f"{words['kv_dtype']} fp8", lambda: again(apply(model, [kv_dtype("fp8")]))()
    for more in (2, 4, 8):
        yield f"{words['tp']} {more * one.mesh.tp}", again(mesh=replace(one.mesh, tp=more * one.mesh.tp))


def _fixes(found: Found) -> list[str]:
    """Flags of which each alone lets the engine start; every one is computed."""
    from roofline.errors import RooflineError

    lines: list[str] = []
    for flags, attempt in _attempts(found):
        if any(flags.split()[0] == line.split()[0] for line in lines):
            continue
        try:
            other = attempt()
        except RooflineError:
            continue
        if other.fits:
            lines.append(f"{flags} ({float(other.concurrency(other.pool.best) or 0):,.2f} requests)")
    return lines[:MOST_FIXES]


def answer(
    variants: Sequence[Variant], question: Question, choice: EngineChoice, fractions: Sequence[Any], check: bool, out: Output
) -> int:
    """Prints what the engine allocates for each variant, GPU, mesh and fraction; the exit code."""
    from roofline.allocation import contradiction
    from roofline.cli.verdict import memory_of, model_notes
    from roofline.engines.profile import load_engine

    profile = load_engine(choice.engine or "", choice.version)
    for accelerator in question.accelerators:
        profile.check(accelerator)
    results = [
        found for variant in variants for fraction in fractions for found in _found(variant, question, profile, choice, fraction)
    ]
    claims = [contradiction(found.allocation, choice.logged_tokens) for found in results if choice.logged_tokens]
    out.note(*(line for found in results for line in _verdict(found, out)))
    out.note(*(out.paint(f"contradictory log: {claim}", "red") for claim in claims if claim), "")
    out.records((_record(found, choice.logged_tokens) for found in results), lambda: _cells(results))
    first = results[0].allocation
    settings = first.settings
    notes = [
        f"assumes: {profile.about}; token budget {settings.batched_tokens:,}, {settings.sequences:,} sequences a step",
        f"assumes: {first.accelerator.id}: {memory_of(first.accelerator)}",
        *(f"assumes: {line}" for line in model_notes(variants[-1].model, question.accelerators)),
        f"not modelled: {', '.join([*variants[-1].model.not_modelled, *NOT_MODELLED])}",
    ]
    failed = [found for found in results if not found.allocation.fits]
    wanted = [found for found in failed if found.variant is variants[-1]]
    fixes = _fixes(wanted[-1]) if wanted and not out.silent else []
    if wanted and not out.silent:
        notes.append(f"fix: {' or '.join(fixes) if fixes else 'no single flag found'}")
    out.note("", *notes)
    counted = [found for found in failed if found.variant.flags or len(variants) == 1]
    return 1 if (check and counted) or any(claims) else 0

"""What a what-if says in words: does it fit, what binds, what the edits change, what was assumed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from roofline.accelerator import Accelerator
from roofline.cli.output import Output
from roofline.cli.points import Point, Question, kv_bytes_per_token, state_formats
from roofline.cost import MATRIX_UNITS
from roofline.memory import Largest, Memory, largest
from roofline.model import Model
from roofline.units import bandwidth, capacity, count, flop_rate, latency

MOST_GROUPS = 4
"""Combinations of edits and GPUs that get a verdict in words."""
QUANTISED = ("fp8", "int8", "fp4")
"""Matrix units that multiply quantised activations."""
STREAM_NAMES = {"weights": "weights", "state": "KV", "activations": "activations", "index": "index"}


def plural(number: int, word: str) -> str:
    """ "1 point", "2 points"."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def share(part: float, whole: float) -> str:
    """A share in percent: "97 %", "0.3 %"; never a rounded 100 % or 0 % that is not one."""
    if not whole:
        return "0 %"
    percent = 100 * float(part) / float(whole)
    if 0 < percent < 0.1:
        return "< 0.1 %"
    return f"{percent:,.{1 if 0 < percent < 1 or 99.5 <= percent < 100 else 0}f} %"


def of_capacity(memory: Memory) -> str:
    """What is needed of what there is: "24.2 of 79.2 GiB, 31 %"."""
    needed, there = (capacity(n) for n in (memory.required_bytes, memory.capacity_bytes))
    return f"{needed.removesuffix(' GiB')} of {there}, {share(memory.required_bytes, memory.capacity_bytes)}"


def largest_batch(question: Question, point: Point, context: int) -> Largest:
    """The largest batch that fits at a context, for the variant and GPU of a point, in all phases asked for."""
    return largest(lambda batch: _memory(question, point, batch, context), 2**20)


def largest_context(question: Question, point: Point, batch: int) -> Largest:
    """The longest context that fits at a batch, for the variant and GPU of a point, in all phases asked for."""
    return largest(lambda context: _memory(question, point, batch, context), 2**30)


def _memory(question: Question, point: Point, batch: int, context: int) -> Memory:
    deployment = question.deployment(point.variant, point.accelerator, point.fraction, point.mesh)
    return question.sized(point.variant, deployment, batch, context, point.input_tokens, point.output_tokens).tightest[1]


def at(point: Point) -> str:
    """The sizes of a point, as they would be typed."""
    return f"batch {point.step.batch:,}, context {point.context:,}"


def at_worst(point: Point) -> str:
    """The batch of a point, and the phase that needs most memory."""
    return f"batch {point.step.batch:,}, {point.tightest[0]}"


def fit_line(question: Question, points: Sequence[Point], out: Output) -> str:
    """Does it fit, at the tightest point."""
    tightest = min(points, key=lambda p: p.tightest[1].spare_bytes)
    memory = tightest.tightest[1]
    if memory.fits:
        phase = f"{tightest.tightest[0]}: " if tightest.tightest[1] is not tightest.step.memory else ""
        where = f" at all {len(points):,} points; tightest at {at_worst(tightest)}:" if len(points) > 1 else ""
        detail = of_capacity(memory)
        return f"{out.paint('fits: yes', 'green')}{where} {detail if where else f'({phase}{detail})'}"
    missing = sum(not p.fits for p in points)
    some = f"; {missing:,} of {plural(len(points), 'point')} too large" if len(points) > 1 else ""
    where = f"{capacity(-memory.spare_bytes)} short at {at_worst(tightest)} ({of_capacity(memory)})"
    best = largest_batch(question, tightest, tightest.context).size
    advice = f"; the largest batch there is {best}" if best else f"; {_not_one(question, tightest)}"
    return f"{out.paint('does not fit:', 'red')} {where}{some}{advice}"


def _not_one(question: Question, point: Point) -> str:
    """That not even one sequence fits, and what it needs memory for."""
    memory = _memory(question, point, 1, point.context)
    named = {"weights": memory.weight_bytes, "KV": memory.kv_bytes, "workspace": memory.workspace_bytes}
    needs = ", ".join(f"{name} {capacity(number)}" for name, number in named.items() if number > memory.required_bytes / 100)
    return f"not even batch 1 fits: {needs}"


def bound_line(points: Sequence[Point]) -> str:
    """What binds the slowest point, and of what its traffic consists."""
    slowest = max(points, key=lambda p: p.step.bound_s)
    names = [p.step.bound_by for p in points]
    step = slowest.step
    line = f"bound by {step.bound_by}"
    if len(points) > 1:
        kinds = {name: names.count(name) for name in sorted(set(names), key=names.count, reverse=True)}
        counts = ", ".join(f"{name} at {plural(number, 'point')}" for name, number in kinds.items())
        line = f"bound by {names[0]} at all points" if len(kinds) == 1 else f"bound by {counts}"
        line += f"; at {at(slowest)}"
    moved = {name: step.cost.read.get(stream, 0) + step.cost.write.get(stream, 0) for stream, name in STREAM_NAMES.items()}
    parts = ", ".join(f"{name} {share(n, step.cost.bytes)}" for name, n in moved.items() if n > step.cost.bytes / 1000)
    others = ", ".join(
        f"{name} {share(seconds, step.bound_s)}"
        for name, seconds in step.timing.streams.items()
        if name != step.bound_by and seconds > step.bound_s / 1000
    )
    return f"{line}: of the bytes moved, {parts}" + (f"; busy meanwhile: {others} of the time" if others else "")


def place(point: Point) -> str:
    """What a point runs on: "h100-sxm", or "8 x h100-sxm (--tp 8)"."""
    mesh = point.mesh
    return point.accelerator.id if mesh is None else f"{mesh.ranks} x {point.accelerator.id} ({mesh.flags or '--tp 1'})"


def headline(question: Question, points: Sequence[Point], out: Output) -> Iterator[str]:
    """The verdict, two lines for each variant on each GPU."""
    groups: dict[tuple[str, str], list[Point]] = {}
    for point in points:
        groups.setdefault((point.variant.label, place(point)), []).append(point)
    several_variants = len({label for label, _ in groups}) > 1
    several_gpus = len({gpu for _, gpu in groups}) > 1
    for (label, gpu), members in list(groups.items())[:MOST_GROUPS]:
        who = [label] if several_variants else []
        who += [f"on {gpu}"] if several_gpus else []
        prefix = f"{' '.join(who)}: " if who else ""
        yield f"{prefix}{fit_line(question, members, out)}"
        yield f"{prefix}{bound_line(members)}"
    if len(groups) > MOST_GROUPS:
        yield f"and {plural(len(groups) - MOST_GROUPS, 'other combination')} of edits and GPUs, in the table"


def _changes(base: Point, edited: Point, question: Question) -> Iterator[tuple[str, Any, Any, Callable[[Any], str]]]:
    old, new = base.variant.model, edited.variant.model
    yield (
        "KV bytes/token",
        kv_bytes_per_token(old),
        kv_bytes_per_token(new),
        lambda n: count(int(n)) if n == int(n) else f"{float(n):,.1f}",
    )
    yield f"KV at {at(base)}", base.step.memory.kv_bytes, edited.step.memory.kv_bytes, capacity
    yield "parameters", old.params, new.params, lambda n: f"{n / 1e9:,.3f} B"
    yield "weights", base.step.memory.weight_bytes, edited.step.memory.weight_bytes, capacity
    yield f"time per token at {at(base)}", base.step.bound_s, edited.step.bound_s, latency
    before, after = (largest_batch(question, point, point.context).size for point in (base, edited))
    yield "largest batch there", before, after, lambda n: "no limit" if n is None else str(n)


def change_line(question: Question, base: Point, edited: Point) -> str:
    """What an edit changes, at one point: only quantities that differ."""
    found = [
        f"{name} {show(before)} -> {show(after)}"
        for name, before, after, show in _changes(base, edited, question)
        if before != after
    ]
    return f"{edited.variant.label}: {'; '.join(found) if found else 'changes nothing here'}"


def memory_of(gpu: Accelerator) -> str:
    """The memory that a process can use, and how that is known."""
    return f"memory {capacity(gpu.capacity.value)} ({gpu.capacity_rung})"


def roofs(points: Sequence[Point]) -> Iterator[str]:
    """The datasheet roofs that the points stand on, GPU by GPU, by name and number."""
    gpus = {point.accelerator.id: point.accelerator for point in points}
    for gpu in gpus.values():
        own = [point for point in points if point.accelerator.id == gpu.id]
        needed = {unit for point in own for unit in point.step.cost.flops if unit in MATRIX_UNITS} or {"bf16"}
        units = sorted({gpu.unit_for(unit) for unit in needed})
        kinds = {q.kind for q in (gpu.bandwidth, *(gpu.compute[unit] for unit in units))}
        rates = ", ".join(f"{flop_rate(gpu.rate(unit))} {unit} dense" for unit in units)
        yield f"roofs of {gpu.id}: {rates}, {bandwidth(gpu.bandwidth.value)} ({'/'.join(sorted(kinds))}); {memory_of(gpu)}"
        of_weights = {fmt.unit for point in own for fmt in point.variant.model.params_by_format}
        for unit in sorted(needed - of_weights):
            if gpu.unit_for(unit) != unit:
                yield f"{gpu.id} has no {unit} rate: {unit} work runs at the {gpu.unit_for(unit)} rate"


def model_notes(model: Model, gpus: Iterable[Accelerator] = ()) -> Iterator[str]:
    """What was assumed about a model on accelerators; without any of them, where each has the units that it asks for."""
    yield from model.assumes
    if formats := state_formats(model):
        yield f"cached state in {' and '.join(formats)}"
    known = {gpu.id: gpu for gpu in gpus}
    for fmt in sorted(model.params_by_format, key=lambda fmt: fmt.name):
        if fmt.unit not in QUANTISED:
            continue
        without = {name: gpu.unit_for(fmt.unit) for name, gpu in known.items() if gpu.unit_for(fmt.unit) != fmt.unit}
        width = fmt.unit.removeprefix("fp").removeprefix("int")
        if not without or len(without) < len(known):
            where = f"on {', '.join(name for name in known if name not in without)}: " if without else ""
            yield (
                f"{where}{fmt.name} weights multiply in the {fmt.unit} matrix unit: activations are quantised to it as well "
                f"(W{fmt.element_bits}A{width}), from 16 bits in memory"
            )
        if without:
            units = " or ".join(dict.fromkeys(without.values()))
            yield (
                f"{', '.join(without)} {'has' if len(without) == 1 else 'have'} no {fmt.unit} matrix unit: {fmt.name} weights "
                f"are dequantised to 16 bits on the way to the {units} unit, at its rate (W{fmt.element_bits}A16)"
            )


def merged(named: Sequence[tuple[str, Iterable[str]]]) -> Iterator[str]:
    """Lines of several by name: those that all share as they are, others behind the names that they belong to."""
    lines = [(name, list(own)) for name, own in named]
    for line in dict.fromkeys(entry for _, own in lines for entry in own):
        holders = [name for name, own in lines if line in own]
        yield line if len(holders) == len(lines) else f"{', '.join(holders)}: {line}"


def _source_note(point: Point, given: int | None) -> Iterator[str]:
    encoder = point.variant.model.encoder
    if given is None and encoder is not None and encoder.tokens is not None:
        yield f"an encoder's output of {encoder.tokens:,} tokens, as the config fixes it (--source-len sets another)"


def assumptions(
    points: Sequence[Point], extra: Iterable[str], *, memory_only: bool = False, source: int | None = None
) -> list[str]:
    """Every assumption behind the points, each once; ``memory_only`` leaves out what only times rest on.

    ``source`` is the length of an encoder's output as given, None for the config's.
    """
    found: dict[str, None] = dict.fromkeys(extra)
    seen: dict[tuple[str, str], Point] = {}
    for point in points:
        seen.setdefault((point.variant.label, place(point)), point)
    models = {point.variant.label: point.variant.model for point in seen.values()}
    chips = [point.accelerator for point in seen.values()]
    found.update(dict.fromkeys(merged([(label, model_notes(model, chips)) for label, model in models.items()])))
    found.update(dict.fromkeys(_source_note(points[0], source)))
    if memory_only:
        gpus = {point.accelerator.id: point.accelerator for point in points}.values()
        found.update(dict.fromkeys(f"{gpu.id}: {memory_of(gpu)}" for gpu in gpus))
    else:
        found.update(dict.fromkeys(roofs(list(seen.values()))))
    if any(point.mesh for point in points):
        from roofline.cli.mesh_options import notes

        found.update(dict.fromkeys(notes(list(seen.values()), memory_only=memory_only)))
    shares = sorted({float(point.fraction) for point in points})
    if shares != [1]:
        found[f"memory fraction {', '.join(f'{part:g}' for part in shares)} of the device memory may be used"] = None
    found.update(dict.fromkeys(beyond(points[0].variant.model, max(point.longest for point in points))))
    return list(found)


def beyond(model: Model, longest: int) -> Iterator[str]:
    """That a context is longer than the config admits, where it is."""
    if model.max_context is not None and longest > model.max_context:
        yield f"context {longest:,} is longer than the {model.max_context:,} that the config admits"


def own_notes(
    points: Sequence[Point], extra: Sequence[str], *, memory_only: bool = False, source: int | None = None
) -> Iterator[tuple[list[str], list[str]]]:
    """(assumptions, what is left out) of each point alone; points of one model, GPU, share and side of the limit share them."""
    found: dict[Any, tuple[list[str], list[str]]] = {}
    for point in points:
        longer = list(beyond(point.variant.model, point.longest))
        step = point.step
        sizes = (step.batch, step.context_tokens, step.new_tokens) if point.mesh else ()
        key = (point.variant.label, point.accelerator.id, point.fraction, point.mesh, sizes, *longer)
        if key not in found:
            found[key] = (
                assumptions([point], extra, memory_only=memory_only, source=source),
                not_modelled(point.variant.model, [point], memory_only=memory_only),
            )
        yield found[key]


def not_modelled(model: Model, points: Sequence[Point] = (), *, memory_only: bool = False) -> list[str]:
    """What the numbers leave out; ``memory_only`` where they are no times."""
    if memory_only:
        return [*model.not_modelled, "what an engine reserves for itself"]
    blind = sorted({p.accelerator.id for p in points if "vector" not in p.accelerator.compute})
    elementwise = [f"elementwise time on {', '.join(blind)} (no rate known)"] if blind else []
    exchange = "latency of collectives" if any(point.mesh for point in points) else "collectives"
    return [*model.not_modelled, *elementwise, "launch overheads", "host time", exchange]

"""Expected against measured times of an accelerator, as series for ``roofline.plots.validation_plot``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from roofline.accelerator import load_accelerator
from roofline.errors import InputError
from roofline.expected.calibration import base_of
from roofline.plots.style import save
from roofline.plots.validation import Compared, validation_plot
from roofline.validate.report import expect
from roofline.validate.silicon.bad import dropped
from roofline.validate.silicon.frame import Frame
from roofline.validate.silicon.suite import frames


def compared(frames_of: Iterable[Frame], gpu: str) -> Iterator[Compared]:
    """Held-out rows of each family that is calibrated, in the order of their hashes; all rows where constants are another's."""
    accelerator = load_accelerator(gpu)
    for frame in frames_of:
        answer = expect(frame, accelerator.id)
        if answer is None:
            continue
        bad, _ = dropped(frame)
        kept = ~bad & frame.held_out if base_of(accelerator) == accelerator.id else ~bad
        rows = [row for row in frame.order.argsort() if kept[row]]
        if rows:
            name, framework = f"{frame.kernel} {frame.dtype}", frame.kernel.partition("/")[0]
            yield Compared(frame.cls, name, frame.seconds[rows], answer[0][rows], framework)


def silicon(gpu: str, classes: Iterable[str] | None = None) -> list[Compared]:
    """Series of the operators that others measured. Raises InputError where the accelerator has no constants of such classes."""
    name = load_accelerator(gpu).id
    found = list(compared(frames(name, classes), name))
    if not found:
        raise InputError(f"gpu: {name} has no fitted constants for these classes, so there is nothing to compare")
    return found


def title_of(gpu: str) -> str:
    """What the rows of ``silicon`` are."""
    accelerator = load_accelerator(gpu)
    base = base_of(accelerator)
    return f"Expected against measured, {accelerator.id}, " + (
        "rows that no constant has seen" if base == accelerator.id else f"constants of {base}"
    )


def draw(gpu: str, classes: Iterable[str] | None, folder: str) -> list[str]:
    """Writes one PNG per class into a folder; returns their paths."""
    by_class: dict[str, list[Compared]] = {}
    for series in silicon(gpu, classes):
        by_class.setdefault(series.panel, []).append(series)
    Path(folder).mkdir(parents=True, exist_ok=True)
    name = load_accelerator(gpu).id
    return [
        str(save(validation_plot(many, title=title_of(name)), Path(folder, f"{name}-{cls}.png"), 110))
        for cls, many in by_class.items()
    ]

"""Expected against measured time, one picture per class."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from roofline.accelerator import load_accelerator
from roofline.validate.report import expect
from roofline.validate.silicon.frame import Frame
from roofline.validate.silicon.suite import frames

POINTS = 4000
"""Most points per family, those of the smallest hashes."""


def draw(gpu: str, classes: Iterable[str] | None, folder: str) -> list[str]:
    """Writes one PNG per class into a folder; returns their paths."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    name = load_accelerator(gpu).id
    by_class: dict[str, list[Frame]] = {}
    for frame in frames(name, classes):
        by_class.setdefault(frame.cls, []).append(frame)
    Path(folder).mkdir(parents=True, exist_ok=True)
    written = []
    for cls, many in by_class.items():
        figure, axes = pyplot.subplots(figsize=(6, 6))
        for frame in many:
            answer = expect(frame, name)
            if answer is not None:
                rows = frame.order.argsort()[:POINTS]
                axes.loglog(frame.seconds[rows], answer[0][rows], ".", markersize=1, label=f"{frame.kernel} {frame.dtype}")
        low, high = axes.get_xlim()
        axes.loglog([low, high], [low, high], "k-", linewidth=0.5)
        axes.set(xlabel="measured [s]", ylabel="expected [s]", title=f"{cls}, {name}")
        path = Path(folder, f"{name}-{cls}.png")
        figure.savefig(path, dpi=110)
        pyplot.close(figure)
        written.append(str(path))
    return written

"""How every figure looks, and how it is written: one palette that survives colour blindness and grey print, no dates, no chance.

Hues are those of Okabe and Ito (Color Universal Design, 2008), in an order in which neighbours differ in lightness too; line
styles, markers and hatches differ beside them, so that a figure can be read without any colour. Figures are objects
(``matplotlib.figure.Figure``), never pyplot's state: nothing stays open, and no display is needed.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

from roofline.errors import InputError, suggest

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#56B4E9", "#000000", "#CC79A7", "#D55E00")
GREY, PALE, INK = "#767676", "#E4E4E4", "#222222"
LINES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (5, 1.5, 1, 1.5)), (0, (2, 1)), (0, (7, 1.5, 1, 1.5, 1, 1.5)), (0, (1, 1)), "-")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
HATCHES = ("", "///", "...", "\\\\\\", "xxx", "---", "ooo")
FORMATS = ("svg", "png", "pdf")
LIKELY: dict[str, Any] = {"linestyle": "-", "linewidth": 3.2, "alpha": 0.55}
"""The line of expected values."""
EXTRAPOLATED: dict[str, Any] = {**LIKELY, "linestyle": (0, (1, 0.7))}
"""The same where nothing like it was measured."""
LIKELY_MARK = 3.5
SIZE, DPI, NOTEBOOK_DPI = (7.0, 5.0), 150.0, 80.0
LARGEST_SIDE, LARGEST_DPI = 60.0, 1200.0
TITLE_LETTERS, SUBTITLE_LETTERS, LEGEND_LETTERS = 10.0, 15.0, 15.0
"""Letters of a title, of what stands below it, and of a legend to an inch."""
LEGEND_ROW, MOST_COLUMNS = 0.19, 4
"""Inches of a row of a legend, and the most columns of one."""

STYLE: dict[str, Any] = {
    "axes.axisbelow": True, "axes.edgecolor": GREY, "axes.grid": True, "axes.labelcolor": INK, "axes.labelsize": 9.5,
    "axes.spines.right": False, "axes.spines.top": False, "axes.titlesize": 8.5, "figure.dpi": 100, "figure.facecolor": "white",
    "font.size": 9, "grid.color": "#DDDDDD", "grid.linewidth": 0.6, "hatch.color": "white", "hatch.linewidth": 1.0,
    "legend.fontsize": 8.5, "legend.frameon": False, "lines.linewidth": 1.8, "lines.markersize": 5.5, "pdf.fonttype": 42,
    "svg.fonttype": "path", "svg.hashsalt": "roofline", "text.color": INK, "text.hinting": "none", "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
}  # fmt: skip

P = ParamSpec("P")


@contextmanager
def styled() -> Iterator[None]:
    """Matplotlib's own defaults with ``STYLE`` on top, whatever the user's settings are."""
    import matplotlib.style

    with matplotlib.style.context(["default", STYLE]):
        yield


def drawn(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Runs a function that draws a figure in the common style.

    A ``size`` of the caller's at which words would cover one another or leave the figure is an InputError.
    """

    @functools.wraps(draw)
    def in_style(*arguments: P.args, **options: P.kwargs) -> Figure:
        from roofline.plots.legible import check

        with styled():
            figure = draw(*arguments, **options)
            if options.get("size"):
                check(figure)
            return figure

    return in_style


@functools.cache
def _picture() -> type[Figure]:
    from matplotlib.figure import Figure

    class Picture(Figure):
        """A figure that a notebook shows, and whose text says which picture it is.

        Attributes:
            grows: whether a legend may make it higher, as nobody asked for a size.
        """

        grows = False

        def __str__(self) -> str:
            return repr(self)

        def __repr__(self) -> str:
            from roofline.plots.structure import digest

            width, height = self.get_size_inches()
            return f"<figure {width:g} x {height:g} in, {digest(self)}>"

        def _repr_png_(self) -> bytes:
            return written(self, "png", NOTEBOOK_DPI)

    return Picture


def new_figure(title: str, size: tuple[float, float] | None = None, own: tuple[float, float] = SIZE) -> Figure:
    """An empty figure with a title, flush left; its layout keeps labels, legends and axes apart.

    Args:
        size: width and height in inches as asked for; else ``own``, made higher where a legend needs it.

    Raises InputError where a side is out of range.
    """
    width, height = size or own
    if not (1 <= width <= LARGEST_SIDE and 1 <= height <= LARGEST_SIDE):
        raise InputError(f"size: {width:g} x {height:g} inches is out of range; give both sides from 1 to {LARGEST_SIDE:g}")
    figure = _picture()(figsize=(width, height), layout="constrained")
    figure.grows = size is None  # type: ignore[attr-defined]
    if title:
        figure.suptitle(_wrapped(title, width * TITLE_LETTERS), x=0.012, ha="left", fontsize=11, fontweight="bold")
    return figure


def _wrapped(text: str, width: float) -> str:
    """A text in lines of at most so many letters; its own line breaks stay."""
    import textwrap

    return "\n".join(line for part in text.split("\n") for line in textwrap.wrap(part, max(20, int(width))))


def subtitle(axes: Axes, text: str, taken: float = 0.9) -> None:
    """What the figure takes for granted, in small grey letters above the axes, in as many lines as it needs.

    ``taken`` are the inches that lie left of the axes.
    """
    width = axes.get_figure(root=True).get_size_inches()[0]  # type: ignore[union-attr]
    axes.set_title(_wrapped(text, (width - taken) * SUBTITLE_LETTERS), loc="left", color=GREY)


def legend(figure: Figure, handles: list[Any]) -> None:
    """A legend below the axes, where it hides nothing: in as few rows as its entries allow, which take their own room."""
    if not handles:
        return
    width, height = figure.get_size_inches()
    labels = [_wrapped(str(handle.get_label()), width * LEGEND_LETTERS - 8) for handle in handles]
    most = min(len(labels), MOST_COLUMNS)
    numbers = (math.ceil(len(labels) / math.ceil(len(labels) / number)) for number in range(most, 0, -1))
    columns = next(found for number in numbers if (found := _columns(labels, number, width * LEGEND_LETTERS)))
    if getattr(figure, "grows", False):
        lines = max(sum(1 + label.count("\n") for label in column) for column in columns)
        figure.set_size_inches(width, height + LEGEND_ROW * max(0, lines - 3))
    for handle, label in zip(handles, labels, strict=True):
        handle.set_label(label)
    figure.legend(handles=handles, loc="outside lower center", ncols=len(columns))


def _columns(labels: list[str], number: int, letters: float) -> list[list[str]]:
    """Labels in so many columns, each filled from above as matplotlib does it; empty where the columns are too wide."""
    least, longer = divmod(len(labels), number)
    ends = [least * done + min(done, longer) for done in range(number + 1)]
    columns = [labels[start:end] for start, end in itertools.pairwise(ends)]
    wide = sum(6 + max(len(line) for label in column for line in label.split("\n")) for column in columns)
    return columns if number == 1 or wide <= letters else []


def nothing_drawn(label: str) -> Any:
    """A legend entry without a mark: what a figure does not show, and why."""
    from matplotlib.lines import Line2D

    return Line2D([], [], linestyle="none", label=label)


def file_format(path: Path) -> str:
    """The format that a file's suffix names. Raises InputError for another one."""
    suffix = path.suffix.lower().removeprefix(".")
    if suffix not in FORMATS:
        what = f"{path.name!r} has the suffix {path.suffix!r}" if suffix else f"{path.name!r} has no suffix"
        raise InputError(f"out: {what}; the suffix chooses the format: {', '.join(FORMATS)}.{suggest(suffix, FORMATS)}")
    return suffix


METADATA: dict[str, dict[str, Any]] = {
    "svg": {"Creator": "roofline", "Date": None},
    "png": {"Software": "roofline"},
    "pdf": {"Creator": "roofline", "Producer": "roofline", "CreationDate": None},
}


def written(figure: Figure, kind: str, dpi: float = DPI) -> bytes:
    """A figure as the bytes of a file of one of ``FORMATS``: the same bytes for the same figure, with no date in them."""
    from io import BytesIO

    if not 10 <= dpi <= LARGEST_DPI:
        raise InputError(f"dpi: {dpi:g} is out of range; give dots per inch from 10 to {LARGEST_DPI:g}")
    buffer = BytesIO()
    with styled():
        figure.savefig(buffer, format=kind, dpi=dpi, metadata=METADATA[kind])
    return buffer.getvalue()


def save(figure: Figure, path: str | Path, dpi: float = DPI) -> Path:
    """Writes a figure; the suffix chooses svg, png or pdf. Raises InputError for another one, or where it cannot be written."""
    target = Path(path).expanduser()
    kind = file_format(target)
    data = written(figure, kind, dpi)
    try:
        target.write_bytes(data)
    except OSError as error:
        raise InputError(f"out: {target} cannot be written ({error.strerror})") from None
    return target

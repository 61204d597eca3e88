"""How every figure looks, and how it is written: one palette that survives colour blindness and grey print, no dates, no chance.

Hues are those of Okabe and Ito (Color Universal Design, 2008), in an order in which neighbours differ in lightness too; line
styles, markers and hatches differ beside them, so that a figure can be read without any colour. Figures are objects
(``matplotlib.figure.Figure``), never pyplot's state: nothing stays open, and no display is needed.
"""

from __future__ import annotations

import functools
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
SIZE, DPI, NOTEBOOK_DPI = (7.0, 5.0), 150.0, 80.0
LARGEST_SIDE, LARGEST_DPI = 60.0, 1200.0

STYLE: dict[str, Any] = {
    "axes.axisbelow": True, "axes.edgecolor": GREY, "axes.grid": True, "axes.labelsize": 9.5, "axes.spines.right": False,
    "axes.spines.top": False, "axes.titlesize": 8.5, "font.size": 9, "figure.dpi": 100, "figure.facecolor": "white",
    "grid.color": "#DDDDDD", "grid.linewidth": 0.6, "hatch.color": "white", "hatch.linewidth": 1.0, "legend.fontsize": 8.5,
    "legend.frameon": False, "lines.linewidth": 1.8, "lines.markersize": 5.5, "pdf.fonttype": 42, "svg.fonttype": "path",
    "svg.hashsalt": "roofline", "text.color": INK, "axes.labelcolor": INK, "xtick.labelsize": 8.5, "ytick.labelsize": 8.5,
}  # fmt: skip

P = ParamSpec("P")


@contextmanager
def styled() -> Iterator[None]:
    """Matplotlib's own defaults with ``STYLE`` on top, whatever the user's settings are."""
    import matplotlib.style

    with matplotlib.style.context(["default", STYLE]):
        yield


def drawn(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Runs a function that draws a figure in the common style."""

    @functools.wraps(draw)
    def in_style(*arguments: P.args, **options: P.kwargs) -> Figure:
        with styled():
            return draw(*arguments, **options)

    return in_style


@functools.cache
def _picture() -> type[Figure]:
    from matplotlib.figure import Figure

    class Picture(Figure):
        """A figure that a notebook shows, and whose text says which picture it is."""

        def __str__(self) -> str:
            return repr(self)

        def __repr__(self) -> str:
            from roofline.plots.structure import digest

            width, height = self.get_size_inches()
            return f"<figure {width:g} x {height:g} in, {digest(self)}>"

        def _repr_png_(self) -> bytes:
            return written(self, "png", NOTEBOOK_DPI)

    return Picture


def new_figure(title: str, size: tuple[float, float] | None = None) -> Figure:
    """An empty figure with a title, flush left; its layout keeps labels, legends and axes apart.

    Args:
        size: width and height in inches. Raises InputError where one is out of range.
    """
    width, height = size or SIZE
    if not (1 <= width <= LARGEST_SIDE and 1 <= height <= LARGEST_SIDE):
        raise InputError(f"size: {width:g} x {height:g} inches is out of range; give both sides from 1 to {LARGEST_SIDE:g}")
    figure = _picture()(figsize=(width, height), layout="constrained")
    if title:
        figure.suptitle(title, x=0.012, ha="left", fontsize=11, fontweight="bold")
    return figure


def subtitle(axes: Axes, text: str) -> None:
    """What the figure takes for granted, in small grey letters above the axes, in as many lines as it needs."""
    import textwrap

    width = axes.get_figure(root=True).get_size_inches()[0]  # type: ignore[union-attr]
    lines = [line for part in text.split("\n") for line in textwrap.wrap(part, max(30, int(width * 13.2)))]
    axes.set_title("\n".join(lines), loc="left", color=GREY)


def legend(figure: Figure, handles: list[Any], columns: int = 0) -> None:
    """A legend below the axes, where it hides nothing."""
    if not handles:
        return
    longest = max(len(str(handle.get_label())) for handle in handles)
    room = max(1, int(figure.get_size_inches()[0] * 14 / (longest + 6)))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns or min(room, len(handles), 4))


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

"""Numbers on axes as people write them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_TICKS = 11


def tokens(value: float) -> str:
    """A number of tokens or sequences for an axis: "512", "8Ki", "1Mi", "1,000"; a share of one as it is.

    >>> [tokens(n) for n in (0.25, 512, 1000, 8192, 2**20)]
    ['0.25', '512', '1,000', '8Ki', '1Mi']
    """
    if value < 1:
        return f"{value:g}"
    number = round(value)
    for suffix, size in (("Mi", 2**20), ("Ki", 2**10)):
        if number >= size and number % size == 0:
            return f"{number // size}{suffix}"
    return f"{number:,}"


def plain(value: float) -> str:
    """A tick of a logarithmic axis without powers: "0.01", "1", "1,000".

    >>> [plain(n) for n in (0.01, 1, 1000)]
    ['0.01', '1', '1,000']
    """
    if value >= 1:
        return f"{value:,.0f}" if value == round(value) or value >= 100 else f"{value:.3g}"
    if value <= 0:
        return "0"
    digits = max(0, -math.floor(math.log10(value) + 1e-9))
    return f"{value:.{digits + 1}f}".removesuffix("0")


def _powers(low: float, high: float, base: int, most: int) -> Iterator[float]:
    """Powers of a base in a range, thinned where they are many."""
    first, last = math.ceil(math.log(low, base) - 1e-9), math.floor(math.log(high, base) + 1e-9)
    step = max(1, math.ceil((last - first + 1) / most))
    yield from (float(base) ** power for power in range(first, last + 1, step))


def log_axis(axes: Axes, which: str, base: int, form: Any = None, most: int = MOST_TICKS, until: float = math.inf) -> None:
    """Makes an axis logarithmic, with ticks at powers of its base inside the limits that are set, written in full.

    Where a decimal axis shows fewer than three powers there are ticks at 1, 2 and 5 times them, or at more of them, while
    they are not too many; else at the ends. Small ticks without numbers mark 2 to 9 times each power. None lies above
    ``until``.
    """
    from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

    getattr(axes, f"set_{which}scale")("log", base=base)
    low, high = getattr(axes, f"get_{which}lim")()
    high = min(high, until)
    ticks = list(_powers(low, high, base, most))
    small: list[float] = []
    if base == 10:
        for parts in ((1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)):
            found = _multiples(low, high, parts)
            if len(ticks) < 3 and len(ticks) < len(found) <= most:
                ticks = found
        if high < 1e5 * low:
            small = [tick for tick in _multiples(low, high, range(1, 10)) if tick not in ticks]
    if len(ticks) < 2:
        ticks = sorted({*ticks, low, high})
    axis = getattr(axes, f"{which}axis")
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_major_formatter(FixedFormatter([(form or plain)(tick) for tick in ticks]))
    axis.set_minor_locator(FixedLocator(small) if small else NullLocator())
    axis.set_minor_formatter(FixedFormatter([]))


def _multiples(low: float, high: float, parts: Iterable[float]) -> list[float]:
    """Multiples of the powers of ten in a range, rising."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    scaled = [part * 10.0**power if power >= 0 else part / 10.0**-power for power in powers for part in parts]
    return sorted(value for value in scaled if low <= value <= high)


def time_unit(longest: float) -> tuple[float, str]:
    """(seconds of one unit, its name) for an axis that ends at a duration."""
    return (1.0, "s") if longest >= 10 else (1e-3, "ms") if longest >= 1e-4 else (1e-6, "us")


def grouped(value: float, _: float = 0.0) -> str:
    """A tick of a linear axis: "2,000", "0.5"."""
    return f"{value:,.10g}"

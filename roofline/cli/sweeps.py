"""Numbers as users type them: single values, lists and sweeps such as ``1:512:x2``.

======================  ==========================================================
``1,16,64``             a list
``1:512:x2``            from 1 on, each twice the one before, up to 512
``1024:8192:+1024``     from 1024 on in steps of 1024, up to 8192
``log:1:512:10``        10 values from 1 to 512, evenly spaced on a logarithmic axis
``4Ki``, ``1Mi``        4096, 1048576; a bare ``k`` is refused because it might mean 1000 or 1024
======================  ==========================================================

Values of whole-number options that fall between two whole numbers are rounded, and repeated values dropped.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction

from roofline.errors import InputError

LARGEST = 10**12
MOST_VALUES = 100_000
NUMBER = re.compile(r"([+-]?\d[\d_]{0,300}(?:\.\d{1,20})?(?:[eE][+-]?\d{1,2})?)([A-Za-z]*)")
BINARY = {"": 1, "Ki": 2**10, "Mi": 2**20}
SHARES = ("memory-fraction", "alpha", "accuracy")
LEADING_ZERO = re.compile(r"[+-]?0\d")
THOUSANDS = re.compile(r"\d{3}")
FORMS = "1,16,64 or 1:512:x2 or 1024:8192:+1024 or log:1:512:10"


def _number(text: str, field: str) -> Fraction:
    match = NUMBER.fullmatch(text.strip())
    if match is None:
        forms = "a share such as 0.9, or a list: 0.8,0.9" if field in SHARES else f"one such as 64, or a list or sweep: {FORMS}"
        raise InputError(f"{field}: {text!r} is not a number; write {forms}")
    if LEADING_ZERO.match(text.strip()):
        raise InputError(f"{field}: {text!r} starts with a zero; write the number without it, and thousands without commas")
    digits, suffix = match[1].replace("_", ""), match[2]
    if suffix not in BINARY:
        if suffix.lower() in ("k", "ki"):
            raise InputError(f"{field}: {text!r} is ambiguous; write {digits}Ki for {digits} x 1024, or the number itself")
        raise InputError(f"{field}: {text!r} has an unknown suffix {suffix!r}; Ki and Mi are known")
    return Fraction(digits) * BINARY[suffix]


def _few(count: float, text: str, field: str) -> int:
    if count > MOST_VALUES:
        raise InputError(f"{field}: {text!r} has more than {MOST_VALUES:,} values; take a larger step")
    return int(count)


def _ends(low: str, high: str, text: str, field: str, *, positive: bool) -> tuple[Fraction, Fraction]:
    first, last = _number(low, field), _number(high, field)
    if first > last:
        raise InputError(f"{field}: {text!r} starts above its end; write the smaller number first")
    if positive and first <= 0:
        raise InputError(f"{field}: {text!r} multiplies, so it must start above 0")
    if not -LARGEST <= first <= last <= LARGEST:
        raise InputError(f"{field}: {text!r} is out of range; the largest number is {LARGEST:.0e}")
    return first, last


def _multiples(first: Fraction, last: Fraction, factor: Fraction, text: str, field: str) -> Iterator[Fraction]:
    if factor <= 1:
        raise InputError(f"{field}: {text!r} never ends; multiply by more than 1")
    _few(math.log(last / first) / math.log(factor), text, field)
    while first <= last:
        yield first
        first *= factor


def _steps(first: Fraction, last: Fraction, step: Fraction, text: str, field: str) -> Iterator[Fraction]:
    if step <= 0:
        raise InputError(f"{field}: {text!r} never ends; add more than 0")
    count = _few((last - first) // step, text, field)
    return (first + number * step for number in range(count + 1))


def _logarithmic(first: Fraction, last: Fraction, points: Fraction, text: str, field: str) -> Iterator[Fraction]:
    if points.denominator != 1 or points < 2:
        raise InputError(f"{field}: {text!r} needs a whole number of points, 2 or more")
    intervals = _few(float(points), text, field) - 1
    ratio = float(last / first)
    yield first
    yield from (Fraction(float(first) * ratio ** (number / intervals)) for number in range(1, intervals))
    yield last


def _term(text: str, field: str) -> Iterable[Fraction]:
    """The values of one term of a list."""
    pieces = text.strip().split(":")
    if len(pieces) == 1:
        return (_number(text, field),)
    if len(pieces) == 4 and pieces[0] == "log":
        first, last = _ends(pieces[1], pieces[2], text, field, positive=True)
        return _logarithmic(first, last, _number(pieces[3], field), text, field)
    if len(pieces) == 3 and pieces[2][:1] in ("x", "+"):
        step = _number(pieces[2][1:], field)
        first, last = _ends(pieces[0], pieces[1], text, field, positive=pieces[2][0] == "x")
        return (_multiples if pieces[2][0] == "x" else _steps)(first, last, step, text, field)
    raise InputError(f"{field}: {text!r} is not a sweep; write {FORMS}")


def _no_thousands(terms: Sequence[str], text: str, field: str) -> None:
    """Raises InputError for a falling list whose later items have three digits each: "2,048" may be one number."""
    first, *rest = (term.strip() for term in terms)
    grouped = rest and re.fullmatch(r"[1-9]\d{0,2}", first) and all(map(THOUSANDS.fullmatch, rest))
    if grouped and (any(term.startswith("0") for term in rest) or not _rising([first, *rest])):
        whole = "".join([first, *rest])
        raise InputError(f"{field}: {text!r} may be one number or {len(terms)}; write {whole}, or give --{field} once for each")


def _rising(terms: Sequence[str]) -> bool:
    return all(int(one) < int(next_) for one, next_ in itertools.pairwise(terms))


def _values(texts: Sequence[str], field: str) -> Iterator[tuple[str, bool, Fraction]]:
    """(term, whether it is a sweep, value) of everything that an option was given."""
    for text in texts:
        terms = text.split(",")
        _no_thousands(terms, text, field)
        for term in terms:
            for value in _term(term, field):
                yield term, ":" in term, value


def whole_numbers(texts: Sequence[str], field: str, least: int = 1, most: int = LARGEST) -> list[int]:
    """The whole numbers that an option was given, in order, each once.

    Args:
        texts: the option's values; each a list of terms, see the module's table.
        field: name of the option, for errors.
        least, most: the smallest and the largest value that make sense.

    Raises InputError that names the field: not a number, not whole, out of range, or too many.
    """
    found: dict[int, None] = {}
    for term, swept, value in _values(texts, field):
        if not swept and value.denominator != 1:
            raise InputError(f"{field}: {term!r} is not a whole number")
        number = round(value)
        if not least <= number <= most:
            raise InputError(f"{field}: {term!r} is out of range; give a whole number from {least} to {most:.0e}")
        found[number] = None
    return list(found)


def in_digits(text: str) -> str:
    """A number of tokens with a letter for its power of ten, as people write corpora, without it: "15T" -> "15e12"."""
    powers = {"K": 3, "M": 6, "B": 9, "T": 12, "P": 15}
    digits, letter = text.strip()[:-1], text.strip()[-1:].upper()
    plain = letter in powers and digits.replace(".", "", 1).replace("_", "").isdigit()
    return f"{digits}e{powers[letter]}" if plain else text


def at_least(texts: Sequence[str], field: str, least: int) -> list[Fraction]:
    """The numbers that an option was given, exactly, each once. Raises InputError that names the field."""
    found: dict[Fraction, None] = {}
    for term, _, value in _values(texts, field):
        if not least <= value <= LARGEST:
            raise InputError(f"{field}: {term!r} is out of range; give a number from {least} to {LARGEST:.0e}")
        found[value] = None
    return list(found)


def fractions(texts: Sequence[str], field: str) -> list[Fraction]:
    """The shares that an option was given, each above 0 and at most 1. Raises InputError that names the field."""
    found: dict[Fraction, None] = {}
    for term, _, value in _values(texts, field):
        if not 0 < value <= 1:
            raise InputError(f"{field}: {term!r} is out of range; give a number above 0 and at most 1")
        found[value] = None
    return list(found)


def names(texts: Sequence[str], field: str) -> list[str]:
    """The names that an option was given as a list, each once. Raises InputError for an empty one."""
    found = {term.strip(): None for text in texts for term in text.split(",")}
    if "" in found:
        raise InputError(f"{field}: an empty name; write one, or several with commas between them")
    return list(found)

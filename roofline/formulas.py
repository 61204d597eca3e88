"""The symbolic reading: a component's FLOPs, bytes, parameters, state and intensity as formulas, with their limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from roofline.accelerator import Accelerator
from roofline.components.base import Component, merge_params
from roofline.cost import MATRIX_UNITS, Cost
from roofline.errors import InputError, suggest
from roofline.formats import Format
from roofline.formula_book import BOOK, Entry
from roofline.model import Model
from roofline.numeric import as_taken_by
from roofline.symbols import ALPHABET, symbol, symbols
from roofline.work import Work


def _expression(value: Any) -> Any:
    """A plain number or Fraction as sympy takes it."""
    import sympy

    return sympy.sympify(as_taken_by(sympy, value))


@dataclass(frozen=True)
class Formula:
    """The formulas of one entry of the book; every value is a sympy expression.

    Attributes:
        name, title, source: of the entry.
        convention: "exact" or "lecture".
        cost: FLOPs by unit, bytes by stream; w and s are the bytes of a weight and of a cached element.
        params: stored parameters. state_bytes: bytes kept per sequence with S tokens cached.
        limits: (what goes where, the intensity's limit) pairs, at bf16.
        values: letters that were replaced by a model's numbers.
    """

    name: str
    title: str
    source: str
    convention: str
    cost: Cost
    params: Any
    state_bytes: Any
    limits: tuple[tuple[str, Any], ...]
    values: Mapping[str, int]

    @property
    def flops(self) -> Any:
        """FLOPs of the matrix units."""
        return _expression(self.cost.matrix_flops)

    @property
    def elementwise(self) -> Any:
        """FLOPs outside the matrix units."""
        return _expression(sum(v for unit, v in self.cost.flops.items() if unit not in MATRIX_UNITS))

    @property
    def bytes(self) -> Any:
        """Bytes moved, with w and s open."""
        return _expression(self.cost.bytes)

    @property
    def intensity(self) -> Any:
        """FLOPs per byte at bf16, as one fraction."""
        return bf16_intensity(self.cost)

    def batch_at_ridge(self, accelerator: Accelerator) -> Any:
        """The B, not rounded, at which this component is as much compute- as memory-bound; None where no B is."""
        from roofline.ridge import batch_at_ridge

        return batch_at_ridge(self.intensity, accelerator)

    def rows(self) -> list[tuple[str, Any]]:
        """(label, expression) of everything that is not zero, in reading order."""
        found = [
            ("FLOP", tidy(self.flops)),
            ("elementwise FLOP", tidy(self.elementwise)),
            ("bytes", spread(self.bytes)),
            ("intensity (bf16)", self.intensity),
            *((f"  {condition}", limit) for condition, limit in self.limits),
            ("parameters", tidy(self.params)),
            ("state bytes per sequence", tidy(self.state_bytes)),
        ]
        return [(label, value) for label, value in found if value != 0]

    def lines(self) -> list[str]:
        """Plain text: a heading, one line per formula, the letters, the source."""
        rows = self.rows()
        wide = max(len(label) for label, _ in rows)
        letters = sorted({str(s) for _, value in rows for s in value.free_symbols} & set(ALPHABET))
        where = ", ".join(f"{letter} {ALPHABET[letter].meaning}" for letter in letters)
        set_to = ", ".join(f"{letter} = {value}" for letter, value in self.values.items())
        return [
            f"{self.name}: {self.title}",
            *(f"  {label:{wide}}  {value}" for label, value in rows),
            *([f"  with {set_to}"] if set_to else []),
            *([f"  where {where}"] if where else []),
            f"  source: {self.source}",
        ]

    def latex(self) -> list[str]:
        """One LaTeX equation per formula."""
        import sympy

        return [rf"\text{{{label.strip()}}} = {sympy.latex(value)}" for label, value in self.rows()]

    def to_dict(self) -> dict[str, Any]:
        """Every formula as text that sympy reads back; the same keys for every entry, "0" where there is nothing."""
        return {
            "name": self.name,
            "title": self.title,
            "convention": self.convention,
            "flop": str(tidy(self.flops)),
            "elementwise_flop": str(tidy(self.elementwise)),
            "bytes": str(spread(self.bytes)),
            "intensity": str(self.intensity),
            "limits": {condition: str(limit) for condition, limit in self.limits},
            "parameters": str(tidy(self.params)),
            "state_bytes_per_sequence": str(tidy(self.state_bytes)),
            "values": dict(self.values),
            "source": self.source,
        }


def is_stepped(value: Any) -> bool:
    """Whether an expression has rounding or cases in it; multiplying those out hides what they mean."""
    import sympy

    return bool(value.has(sympy.floor, sympy.ceiling, sympy.Max, sympy.Min))


def tidy(value: Any) -> Any:
    """A polynomial as a product; an expression with rounding or cases as it was written."""
    import sympy

    return value if is_stepped(value) else sympy.factor(value)


def spread(value: Any) -> Any:
    """A polynomial as a sum of products; an expression with rounding or cases as it was written."""
    import sympy

    return value if is_stepped(value) else sympy.expand(value)


def bf16_intensity(cost: Cost) -> Any:
    """Matrix FLOPs per byte with every element at two bytes, cancelled to one fraction; 0 without matrix FLOPs."""
    import sympy

    w, s = symbols("w s")
    flops = _expression(cost.matrix_flops)
    if flops == 0:
        return sympy.Integer(0)
    return tidy(flops / _expression(cost.bytes).xreplace({w: sympy.Integer(2), s: sympy.Integer(2)}))


def _limit(expression: Any, steps: Sequence[tuple[str, str]]) -> Any:
    """The expression after a chain of steps, each of a letter: "oo" (the limit), "1" or "N" (set to it), or a regime.

    The regimes ">= W" and "< W" choose a branch of ``Min`` and ``Max``: S = W + d, or W = S + 1 + d, with d >= 0.
    """
    import sympy

    d = sympy.Symbol("d", integer=True, nonnegative=True)
    for letter, target in steps:
        x = symbol(letter)
        if target == "oo":
            expression = sympy.limit(expression, x, sympy.oo)
        elif target.startswith(">= "):
            expression = expression.xreplace({x: symbol(target[3:]) + d})
        elif target.startswith("< "):
            expression = expression.xreplace({symbol(target[2:]): x + 1 + d})
        elif target in ALPHABET:
            expression = expression.xreplace({x: symbol(target)})
        else:
            expression = expression.xreplace({x: sympy.Integer(int(target))})
        expression = tidy(expression)
    return expression


def _condition(steps: Sequence[tuple[str, str]]) -> str:
    def one(letter: str, target: str) -> str:
        return f"{letter} -> oo" if target == "oo" else f"{letter} {target}" if " " in target else f"{letter} = {target}"

    return ", ".join(one(*step) for step in steps)


def letters_of(model: Model) -> dict[str, int]:
    """The numbers that a model gives to letters of the alphabet: the first block that has each field decides."""
    found: dict[str, int] = {"L": len(model.layers)}

    def collect(component: Any) -> None:
        for item in fields(component) if is_dataclass(component) else ():
            value = getattr(component, item.name)
            if item.name in ALPHABET and isinstance(value, int) and not isinstance(value, bool):
                found.setdefault(item.name, value)
            for inner in value if isinstance(value, tuple) else (value,):
                if isinstance(inner, Component):
                    collect(inner)

    for _, layer in model.groups:
        collect(layer)
    vocabulary = next((getattr(c, "vocabulary", None) for c in model.embedding), None)
    if isinstance(vocabulary, int):
        found["V"] = vocabulary
    return found


def names() -> list[str]:
    """Names of all entries of the book."""
    return list(BOOK)


def _entry(name: str) -> Entry:
    if name not in BOOK:
        raise InputError(f"component: unknown component {name!r}.{suggest(name, BOOK)} (roofline formula lists them)")
    return BOOK[name]


def open_formats() -> dict[str, Format]:
    """Formats whose byte widths stay letters: w for weights, s for cached state."""
    w, s = symbols("w s")
    return {"weight": Format("w", 8 * w, 0), "kv": Format("s", 8 * s, 0)}


def formula(name: str, convention: str = "exact", model: Model | None = None, values: Mapping[str, int] | None = None) -> Formula:
    """The formulas of an entry of the book.

    Args:
        name: an entry, see ``names()``.
        convention: "lecture" for the count that CS336 lecture 10 makes of this entry, where it makes one.
        model: substitute this model's numbers for the letters.
        values: further numbers for letters ({"S": 1024}); they win over the model's.

    Raises:
        InputError: unknown entry, convention or letter.
    """
    import sympy

    entry = _entry(name)
    if convention not in ("exact", "lecture"):
        raise InputError(f"convention: {convention!r} is not one of exact, lecture")
    build = entry.exact if convention == "exact" or entry.lecture is None else entry.lecture
    letters = letters_of(model) if model is not None else {}
    letters.update(values or {})
    unknown = [letter for letter in letters if letter not in ALPHABET]
    if unknown:
        raise InputError(f"values: {unknown[0]!r} is not a letter of the formulas; they are {', '.join(ALPHABET)}")
    components = build(open_formats())
    B, T, S = symbols("B T S")
    work = Work(B, T, S, all_logits=True, source=symbol("X"))
    cost = Cost.total((times, component.cost(work)) for times, component in components)
    params = sum(merge_params((times, component.params()) for times, component in components).values())
    state = sum(
        (times * piece.bytes(work.S, work.source) for times, component in components for piece in component.state()),
        start=_expression(0),
    )
    present = {str(s) for _, _, v in cost.entries() for s in _expression(v).free_symbols}
    present |= {str(s) for s in _expression(params).free_symbols | _expression(state).free_symbols}
    used = {letter: value for letter, value in letters.items() if letter in present}
    replace_all = {symbol(letter): sympy.Integer(value) for letter, value in used.items()}

    def substituted(value: Any) -> Any:
        return _expression(value).xreplace(replace_all)

    cost = cost.map(substituted)
    intensity = bf16_intensity(cost)
    limits = []
    for steps in entry.limits:
        open_steps = [step for step in steps if step[0] not in used]
        if open_steps and intensity != 0:
            limits.append((_condition(open_steps), _limit(intensity, open_steps)))
    return Formula(
        name, entry.title, entry.source, convention if entry.lecture is not None else "exact", cost,
        substituted(params), substituted(state), tuple(limits), used,
    )  # fmt: skip


def markdown() -> str:
    """The whole book as Markdown, for ``docs/formulas.md``."""
    letters = "\n".join(f"| {x.name} | {x.meaning} | {x.unit} |" for x in ALPHABET.values())
    head = (
        "# The formulas\n\n"
        "Generated from the code by `python docs/generate_formulas.py`; do not edit.\n"
        "One multiply-add is 2 FLOP; causal attention counts the causal half. `w` and `s` are the bytes of a stored weight "
        "and of a\ncached element; activations take 2 bytes.\n\n"
        f"| letter | meaning | unit |\n|---|---|---|\n{letters}\n"
    )
    return head + "\n".join(_section(formula(name)) for name in names())


def _section(found: Formula) -> str:
    rows = "\n".join(f"| {label.strip()} | `{value}` |" for label, value in found.rows())
    return f"\n## {found.name}\n\n{found.title}.\n\n| | |\n|---|---|\n{rows}\n\nSource: {found.source}.\n"

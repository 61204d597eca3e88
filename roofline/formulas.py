"""The symbolic reading: a component's FLOPs, bytes, parameters, state and intensity as formulas, with their limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from typing import Any

from roofline.accelerator import Accelerator
from roofline.components.attention import Attention
from roofline.components.base import Component, merge_params
from roofline.cost import MATRIX_UNITS, Cost
from roofline.errors import InputError, suggest
from roofline.formats import Format
from roofline.formula_book import BOOK, Entry
from roofline.formula_book.dense import STEP, ReadOnce
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
        values: numbers that stand in it: those that replaced letters, or the dimensions of a model's block by field.
        of: whose block it is, "" for the entry with letters. meanings: of letters, where the alphabet's do not fit.
    """

    name: str
    title: str
    source: str
    convention: str
    cost: Cost
    params: Any
    state_bytes: Any
    limits: tuple[tuple[str, Any], ...]
    values: Mapping[str, Any]
    of: str = ""
    meanings: Mapping[str, str] = field(default_factory=dict)

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
            ("intensity (bf16)" if not self.of else "intensity", self.intensity),
            *((f"  {condition}", limit) for condition, limit in self.limits),
            ("parameters", tidy(self.params)),
            ("state bytes per sequence", tidy(self.state_bytes)),
        ]
        return [(label, value) for label, value in found if value != 0]

    def lines(self) -> list[str]:
        """Plain text: a heading, one line per formula, the letters, the source."""
        rows = self.rows()
        wide = max((len(label) for label, _ in rows), default=0)
        letters = sorted({str(s) for _, value in rows for s in value.free_symbols} & set(ALPHABET))
        where = ", ".join(f"{letter} {self.meanings.get(letter, ALPHABET[letter].meaning)}" for letter in letters)
        set_to = ", ".join(f"{letter} = {value}" for letter, value in self.values.items())
        return [
            f"{self.name}: {self.title}{f' ({self.of})' if self.of else ''}",
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
            "values": {letter: value if isinstance(value, int) else str(value) for letter, value in self.values.items()},
            "of": self.of,
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


def find(model: Model, entry: Entry) -> list[Component]:
    """The different components of a model that stand for an entry: blocks and kernels, in the order in which they run."""
    found: dict[Component, None] = {}

    def collect(component: Component) -> None:
        bound = entry.bind(component)
        if bound is not None:
            found.setdefault(bound)
        inner = getattr(component, "blocks", None) or (component.parts if component.parts != (component,) else ())
        for part in inner:
            collect(part)

    for _, component in model.sections:
        collect(component)
    return list(found)


def dimensions(component: Component) -> dict[str, int]:
    """The whole numbers of a component, by field."""
    return {
        item.name: value
        for item in fields(component)  # type: ignore[arg-type]
        if isinstance(value := getattr(component, item.name), int) and not isinstance(value, bool)
    }


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


def _checked(values: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers for letters, each in the letter's range."""
    for letter, value in values.items():
        if letter not in ALPHABET:
            raise InputError(f"values: {letter!r} is not a letter of the formulas; they are {', '.join(ALPHABET)}")
        least = 0 if ALPHABET[letter].may_be_zero else 1
        is_width = ALPHABET[letter].unit == "bytes"
        if not isinstance(value, (int, Fraction) if is_width else int) or not (value > 0 if is_width else value >= least):
            kind = "a positive number of bytes" if is_width else f"a whole number from {least} on"
            raise InputError(f"values: {letter} = {value} is out of range; {letter} is {kind}")
    if "N" in values and "K" in values and values["N"] % values["K"]:
        raise InputError(f"values: K = {values['K']} key-value heads do not divide N = {values['N']} query heads")
    if "E" in values and "k" in values and values["k"] > values["E"]:
        raise InputError(f"values: k = {values['k']} is more than the E = {values['E']} experts")
    return dict(values)


def _bound(entry_name: str, entry: Entry, model: Model, lecture: bool) -> tuple[list[tuple[Any, Component]], dict[str, int], str]:
    """(components, their numbers, a note) of what stands for an entry in a model."""
    if entry_name == STEP:
        counted = model.sections
        components: list[tuple[Any, Component]] = [(1, ReadOnce(counted))] if lecture else list(counted)
        return components, {"L": len(model.layers)}, f"all of {model.name}"
    found = find(model, entry)
    if not found:
        raise InputError(f"component: {model.name} has no {entry_name} ({entry.title}); {STEP!r} shows the whole model")
    block = found[0]
    if lecture and isinstance(block, Attention):
        block = replace(block, mask="cross")
    more = f", the first of {len(found)} different ones" if len(found) > 1 else ""
    return [(1, block)], dimensions(block), f"of {model.name}{more}"


def formula(name: str, convention: str = "exact", model: Model | None = None, values: Mapping[str, Any] | None = None) -> Formula:
    """The formulas of an entry of the book.

    Args:
        name: an entry, see ``names()``.
        convention: "lecture" for the count that CS336 lecture 10 makes of this entry.
        model: show this model's own block of the kind, with its numbers and formats; the letters left are B, T, S and X.
        values: numbers for letters ({"S": 1024}); w and s may be Fractions.

    Raises:
        InputError: unknown entry, convention or letter; a value out of range or for a letter that the formula does not
            have; a convention that does not count the entry; a model without such a block.
    """

    entry = _entry(name)
    if convention not in ("exact", "lecture"):
        raise InputError(f"convention: {convention!r} is not one of exact, lecture")
    if convention == "lecture" and not entry.in_lecture:
        counted = ", ".join(other for other, each in BOOK.items() if each.in_lecture)
        raise InputError(f"convention: the lecture does not count {name}; it counts {counted}")
    letters = _checked(values or {})
    note = ""
    numbers: dict[str, int] = {}
    if model is not None:
        components, numbers, note = _bound(name, entry, model, convention == "lecture")
    else:
        build = entry.lecture if convention == "lecture" and entry.lecture is not None else entry.exact
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
    idle = [letter for letter in letters if letter not in present]
    if idle:
        raise InputError(f"values: this formula has no {idle[0]}; its letters are {', '.join(sorted(present))}")
    replace_all = {symbol(letter): _expression(value) for letter, value in letters.items()}

    def substituted(value: Any) -> Any:
        return _expression(value).xreplace(replace_all)

    cost = cost.map(substituted)
    intensity = bf16_intensity(cost)
    left = {str(s) for s in intensity.free_symbols}
    limits = []
    for steps in entry.limits:
        open_steps = [step for step in steps if step[0] in left]
        if open_steps and intensity != 0 and all(target not in ALPHABET or target in left for _, target in open_steps):
            limits.append((_condition(open_steps), _limit(intensity, open_steps)))
    return Formula(
        name, entry.title, entry.source, convention, cost, substituted(params), substituted(state), tuple(limits),
        {**numbers, **letters}, note, dict(entry.meanings),
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

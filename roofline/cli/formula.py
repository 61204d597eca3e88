"""``roofline formula``: the formulas themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from roofline.cli.bundles import bundled
from roofline.cli.options import Convention, complete_gpus, complete_models
from roofline.cli.output import OUTPUT, Output
from roofline.errors import InputError

if TYPE_CHECKING:
    from fractions import Fraction

    from roofline.formulas import Formula


COUNTED = "a multiply-add is 2 FLOP; causal attention counts the causal half; a kernel's inputs and outputs move once"
LECTURE = "as CS336 lecture 10 counts: a multiply-add is 2 FLOP, attention without a causal half, inputs and outputs move once"
NOT_MODELLED = ("re-reads by tiles", "caches", "launches", "host time")


def _complete_components(incomplete: str) -> list[str]:
    from roofline.formula_book import BOOK

    return [name for name in BOOK if name.startswith(incomplete)]


def _letters(texts: list[str] | None) -> dict[str, int | Fraction]:
    """Numbers for letters: ["S=1024", "B=64", "w=1/2"]. Raises InputError for a letter that is set twice."""
    from roofline.cli.sweeps import whole_numbers
    from roofline.symbols import ALPHABET

    found: dict[str, int | Fraction] = {}
    for text in texts or []:
        for term in text.split(","):
            letter, equals, number = (piece.strip() for piece in term.partition("="))
            if not equals:
                raise InputError(f"set: {term!r} sets nothing; write a letter and its value, such as S=1024")
            if letter in found:
                raise InputError(f"set: {letter} is set twice; give each letter one value")
            if letter in ALPHABET and ALPHABET[letter].unit == "bytes":
                found[letter] = _width(letter, number)
            else:
                found[letter] = whole_numbers([number], f"set {letter}", least=0)[0]
    return found


def _width(letter: str, text: str) -> Fraction:
    """Bytes of an element: 2, 0.5 or 1/2."""
    from fractions import Fraction

    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise InputError(f"set {letter}: {text!r:.40} is not a number of bytes; write one such as 2, 0.5 or 1/2") from None


def _at_ridge(found: Formula, gpu: str) -> dict[str, str]:
    from roofline.accelerator import load_accelerator

    accelerator = load_accelerator(gpu)
    batch = found.batch_at_ridge(accelerator)
    where = f"batch at the ridge of {accelerator.id}, {accelerator.ridge():,.1f} FLOP/B"
    if batch is None:
        return {where: "none: no batch reaches it"}
    return {where: str(batch.evalf(6)) if batch.free_symbols else f"{float(batch):,.1f}"}


@bundled(out=OUTPUT)
def formula(
    component: Annotated[
        str | None,
        typer.Argument(metavar="COMPONENT", help="What to show; without it, the list.", autocompletion=_complete_components),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", metavar="MODEL", help="Put this model's numbers for the letters.", autocompletion=complete_models
        ),
    ] = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="LETTER=N", help="Put numbers for letters, such as S=1024,B=64.")
    ] = None,
    convention: Convention = "exact",
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu", "-g", metavar="NAME", help="Add the batch at this accelerator's ridge.", autocompletion=complete_gpus
        ),
    ] = None,
    latex: Annotated[bool, typer.Option("--latex", help="LaTeX instead of text.")] = False,
    book: Annotated[bool, typer.Option("--book", help="All formulas as one Markdown document.")] = False,
    *,
    out: Output,
) -> int:
    """The formulas themselves: FLOPs, bytes, intensity and its limits, printed from the code that computes every number.

    \b
    roofline formula attention
    roofline formula attention --model llama-2-13b --set S=1024
    """
    from roofline import formulas

    if book:
        out.write(formulas.markdown().rstrip())
        return 0
    if component is None:
        if sets or model:
            raise InputError(
                f"component: say which formula {'--set' if sets else '--model'} is for (roofline formula lists them)"
            )
        from roofline.formula_book import BOOK

        entries = [{"name": name, "title": entry.title} for name, entry in BOOK.items()]
        out.records(entries, lambda: (["component", "what it is"], [[e["name"], e["title"]] for e in entries]))
        out.note("", "roofline formula COMPONENT shows one; --latex, --model, --set and --gpu change how")
        return 0
    loaded = None
    if model is not None:
        from roofline.configs.load import load_model

        loaded = load_model(model)
    found = formulas.formula(component, convention, loaded, _letters(sets))
    ridge = _at_ridge(found, gpu) if gpu is not None else {}
    counted = [COUNTED if convention == "exact" else LECTURE, *(loaded.assumes if loaded else ())]
    if latex:
        if out.format != "table":
            raise InputError(f"latex: --latex is a format of its own; it does not go with -o {out.format}")
        out.write("\n".join(found.latex()))
    elif out.format == "table":
        out.write("\n".join([*found.lines(), *(f"  {label}: {value}" for label, value in ridge.items())]))
        out.note("", *(f"assumes: {line}" for line in counted), f"not modelled: {', '.join(NOT_MODELLED)}")
    else:
        rows = [*found.rows(), *ridge.items()]
        record = {
            **found.to_dict(),
            **({"batch_at_ridge": ridge} if ridge else {}),
            "assumes": counted,
            "not_modelled": list(NOT_MODELLED),
        }
        out.records([record], lambda: (["formula", "value"], [[label.strip(), f"`{value}`"] for label, value in rows]))
    return 0

"""Groups of options that several commands share: declared once, handed to a command as one object."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import typer

INVOCATION = "invocation"
"""Name under which typer hands a command its context, where options stand as they were typed."""


@dataclass(frozen=True)
class Bundle:
    """Options that belong together.

    Attributes:
        options: parameter name -> (annotation as typer reads it, default).
        make: builds from the options' values what the command receives; it gets those that were typed first, in their
            order, then the others.
    """

    options: Mapping[str, tuple[Any, Any]]
    make: Callable[..., Any]


def bundled(**bundles: Bundle) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Replaces parameters of a command by the options of a bundle each.

    ``@bundled(out=OUTPUT)`` on ``def command(model: str, *, out: Output)`` makes a command with a ``model`` and all
    options of ``OUTPUT``.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        def with_options(**values: Any) -> Any:
            typed = list(values.pop(INVOCATION).params)
            made = {
                name: bundle.make(**{option: values.pop(option) for option in typed if option in bundle.options})
                for name, bundle in bundles.items()
            }
            return command(**values, **made)

        own = inspect.signature(command, eval_str=True).parameters.values()
        kept = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own if p.name not in bundles]
        added = [
            inspect.Parameter(option, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            for bundle in bundles.values()
            for option, (annotation, default) in bundle.options.items()
        ]
        added.append(inspect.Parameter(INVOCATION, inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context))
        with_options.__doc__ = command.__doc__
        with_options.__name__ = command.__name__
        with_options.__signature__ = inspect.Signature([*kept, *added])  # type: ignore[attr-defined]
        with_options.__annotations__ = {p.name: p.annotation for p in (*kept, *added)}
        return with_options

    return decorate

"""The options that each engine's server documents, as data: ``roofline/engines/options/*.toml``.

A command line that is printed for an engine is parsed by a parser built from these names first, so that no option is
invented and no value has another type than the engine documents.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from roofline.errors import InputError, suggest

if TYPE_CHECKING:
    import argparse

FOLDER = Path(__file__).parent / "options"
TYPES = ("int", "float", "str", "flag", "json", "choice")


@dataclass(frozen=True)
class Option:
    """A documented option.

    Attributes:
        name: as typed. kind: type of its value, one of ``TYPES``. section: where the documentation lists it.
        also: other spellings. choices: values of a choice.
    """

    name: str
    kind: str
    section: str
    also: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Server:
    """An engine's server.

    Attributes:
        engine: its id. program: words before the options. model: the option that takes the model, "" where it is positional.
        source: repository, file and commit that document the options. options: by name.
    """

    engine: str
    program: tuple[str, ...]
    model: str
    source: str
    options: Mapping[str, Option]

    def parser(self) -> argparse.ArgumentParser:
        """A parser of the documented options; it raises InputError where it refuses."""
        import argparse
        import json

        class Parser(argparse.ArgumentParser):
            def error(self, message: str) -> NoReturn:
                raise InputError(f"{self.prog}: {message}")

        kinds: dict[str, Any] = {"int": int, "float": float, "str": str, "json": json.loads, "choice": str}
        parser = Parser(prog=" ".join(self.program), allow_abbrev=False, add_help=False, exit_on_error=False)
        if not self.model:
            parser.add_argument("model")
        for option in self.options.values():
            names = (option.name, *option.also)
            if option.kind == "flag":
                parser.add_argument(*names, action="store_true")
            else:
                parser.add_argument(*names, type=kinds[option.kind], choices=option.choices or None)
        return parser

    def check(self, words: Sequence[str]) -> dict[str, Any]:
        """The values of a command line, parsed as documented. Raises InputError for a name or value that is not."""
        import argparse

        if tuple(words[: len(self.program)]) != self.program:
            raise InputError(f"{self.engine}: the command must begin with {' '.join(self.program)}")
        try:
            return vars(self.parser().parse_args(list(words[len(self.program) :])))
        except argparse.ArgumentError as error:
            raise InputError(f"{self.engine}: {error}") from None


@cache
def load_server(engine: str) -> Server:
    """The server of an engine id ("vllm", "sglang", "trtllm", "llamacpp"). Raises InputError for another."""
    known = sorted(path.stem for path in FOLDER.glob("*.toml"))
    if engine not in known:
        raise InputError(f"engine: unknown engine {engine!r}.{suggest(engine, known)} Known: {', '.join(known)}")
    with (FOLDER / f"{engine}.toml").open("rb") as file:
        data = tomllib.load(file)
    options = {}
    for name, table in data["options"].items():
        if table.get("type") not in TYPES:
            raise InputError(f"{engine}.toml {name}: type must be one of {', '.join(TYPES)}")
        options[name] = Option(
            name, table["type"], table["section"], tuple(table.get("also", ())), tuple(table.get("choices", ()))
        )
    return Server(engine, tuple(data["program"]), data["model"], data["source"], options)

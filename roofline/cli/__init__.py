"""The command line: ``main`` runs it and turns every way to fail into one line and an exit code.

0 ok · 1 a finding (with --check: it does not fit) · 2 bad input or usage · 3 an extra or a GPU is missing · 70 a defect.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from roofline.errors import RooflineError

OK, FINDING, BAD_INPUT, MISSING, INTERNAL, INTERRUPTED = 0, 1, 2, 3, 70, 130
LONGEST_MESSAGE = 600
MESH_FLAGS = ("--tp", "--pp", "--dp", "--ep", "--sp")
COMPLETION = ("--install-completion", "--show-completion")

EXTRAS = {
    "torch": "kernels", "triton": "kernels", "aiconfigurator_core": "silicon", "scipy": "silicon", "pyarrow": "silicon",
    "transformers": "oracle", "distributed": "cluster", "joblib": "cluster",
    "safetensors": "checkpoints", "gguf": "checkpoints",
}  # fmt: skip
"""Module -> the extra that installs it."""


def _fail(code: int, message: str) -> int:
    """Prints one line to stderr, however long and many-lined the message is."""
    line = " ".join(message.split())
    if len(line) > LONGEST_MESSAGE:
        line = line[: LONGEST_MESSAGE - 3] + "..."
    print(f"error: {line}", file=sys.stderr)
    return code


def _usage(error: Exception) -> int:
    """A usage error of typer: its message, and where help is."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "roofline"
    near = getattr(error, "possibilities", None)
    message = str(getattr(error, "message", "")) if near else error.format_message()  # type: ignore[attr-defined]
    hint = f" Did you mean {' or '.join(repr(option) for option in sorted(near))}?" if near else ""
    if getattr(error, "option_name", "") in MESH_FLAGS:
        hint = f" {path.split()[-1]} answers for one GPU; what-if, fit and simulate split a model over several."
    return _fail(BAD_INPUT, f"{message.rstrip('.')}.{hint} (see {path} --help)")


def _missing(error: ModuleNotFoundError) -> int:
    from roofline.install import install, install_package

    module = (error.name or "").partition(".")[0]
    extra = EXTRAS.get(module)
    how = install(extra) if extra else install_package(module)
    return _fail(MISSING, f"{module} is not installed, and this needs it: {how}")


def run(arguments: Sequence[str]) -> int:
    """Runs one command line and returns its exit code."""
    import typer

    from roofline.cli.app import command

    click_error = typer.BadParameter.__mro__[2]
    completion = bool(arguments) and arguments[0] in COMPLETION
    if completion and len(arguments) > 1:
        return _fail(
            BAD_INPUT, f"{arguments[0]}: {arguments[1]!r} is one argument too many; it recognises the shell that runs it"
        )
    try:
        result = command().main(args=list(arguments), prog_name="roofline", standalone_mode=False)
        sys.stdout.flush()
        return BAD_INPUT if completion and result else result if isinstance(result, int) else OK
    except RooflineError as error:
        return _fail(BAD_INPUT, str(error))
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("roofline"):
            return _internal(error)
        return _missing(error)
    except OSError as error:
        return _fail(BAD_INPUT, f"{error.strerror or error}: {error.filename or 'the answer cannot be written to stdout'}")
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except Exception as error:
        return _usage(error) if isinstance(error, click_error) else _internal(error)


def _internal(error: Exception) -> int:
    if os.environ.get("ROOFLINE_DEBUG"):
        import traceback

        traceback.print_exception(error)
    name = type(error).__name__
    return _fail(INTERNAL, f"internal: {name}: {error}; please report this with the command line (ROOFLINE_DEBUG=1 shows where)")


def main() -> NoReturn:
    """The ``roofline`` command; a reader that closes the pipe (``| head``) ends it quietly, as it ends other tools."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stdout is None:
        sys.exit(_fail(BAD_INPUT, "stdout is closed, so there is nowhere to write the answer to"))
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    code = run(sys.argv[1:])
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)

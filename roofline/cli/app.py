"""The command tree. A command's module is imported only when the command runs: ``--help`` costs typer and this file."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from roofline.errors import InputError, suggest

COMMANDS = {
    "what-if": "Time, throughput and memory of a model on a GPU, over any batch, context and edit.",
    "explain": "One step kernel by kernel: FLOPs, bytes, intensity, time, what binds.",
    "fit": "The largest batch and context that fit, and by how much the next one misses.",
    "simulate": "A server under a load, request by request: TTFT, TPOT, throughput, goodput, cache, a trace.",
    "paging": "Where a cache's memory goes: contiguous, power-of-two and paged allocation, sharing of blocks.",
    "speculate": "Speculative decoding: speed-up by draft length, the best one by batch, where it stops paying.",
    "plan": "The cheapest deployments that meet a service level: GPUs, parallelism, formats, batch; launch commands.",
    "fleet": "Tokens per day to GPUs, power and dollars, against the FLOPs of a training run.",
    "import-bench": "Results of vllm bench serve, SGLang bench_serving or llama-bench, beside what is predicted.",
    "compare": "Models side by side: parameters, state, FLOPs by part, intensity, largest batch, tokens per second.",
    "diffusion": "Denoising masked tokens in steps, beside autoregressive decoding: what is faster, and from when on.",
    "train": "FLOPs and GPU-hours of training, of distilling a pruned model, of quantisation-aware training.",
    "validate": "Predictions against measurements; calibration; the gate for CI.",
    "bench": "Kernels measured on the GPU that is here, beside its roofs and the usual library.",
    "plot": "Figures: roofline, latency, throughput, pareto, memory, kv, breakdown, validation, timeline.",
    "formula": "The formulas themselves: FLOPs, bytes, intensity and its limits.",
    "models": "The models in the catalogue, or everything about one.",
    "gpus": "The accelerators, or every number of one with its source.",
    "doctor": "What is installed and found, for bug reports.",
}
"""Command -> its line in the help; the module is ``roofline.cli.<command>`` with an underscore for each hyphen."""

EXAMPLES = """\
roofline: what will model M do on hardware H, why, and can I believe it?

  roofline what-if llama-2-13b --gpu h100-sxm --batch 1,16,64 --context 1024
  roofline what-if llama-2-13b --gpu h100-sxm --batch 64 --kv-heads 8 --kv-dtype fp8
  roofline formula attention

roofline --help lists the commands, roofline models and roofline gpus what they know, roofline doctor what works here."""

SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


class _AsTyped:
    """Hands an option's text on as it was typed: every option here is text or a flag, parsed by its command."""

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        return () if value is None and (param.multiple or param.nargs == -1) else value


class Light:
    """Keeps typer from importing pydantic to convert options, which doubles the time of a command.

    A typer that converts otherwise ignores it.
    """

    def get_params(self, ctx: Any) -> Any:
        params = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            vars(param)["_runtime_param"] = _AsTyped()
        return params


class Command(Light, TyperCommand):
    """A command whose options reach it as text."""


class Listed(Light, TyperGroup):
    """Commands of a table, each imported when it is named."""

    table: Mapping[str, str] = {}
    what = "command"

    def function(self, name: str) -> Any:
        """What a command of the table runs, or a whole group of commands."""
        raise KeyError(name)

    def list_commands(self, ctx: Any) -> list[str]:
        """Names in the order of the help."""
        return list(self.table)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of a name. Raises InputError, with the nearest names, for an unknown one."""
        if cmd_name not in self.table:
            if ctx.resilient_parsing:
                return None
            raise InputError(
                f"unknown {self.what} {cmd_name!r}.{suggest(cmd_name, self.table)} ({ctx.command_path} --help lists them)"
            )
        found = self.function(cmd_name)
        if isinstance(found, TyperGroup):
            return found
        app = typer.Typer(rich_markup_mode=None, add_completion=False, context_settings=SETTINGS)
        app.command(cmd_name, cls=Command, short_help=self.table[cmd_name])(found)
        return get_command(app)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """The list of commands, without importing one."""
        with formatter.section(f"{self.what.title()}s"):
            formatter.write_dl(list(self.table.items()))


class Commands(Listed):
    """The commands of ``roofline``."""

    table = COMMANDS

    def function(self, name: str) -> Any:
        """The function of the command's module that has its name; ``group()`` of a module of several commands."""
        module = importlib.import_module(f"roofline.cli.{name.replace('-', '_')}")
        return module.group() if hasattr(module, "group") else getattr(module, name.replace("-", "_"))


def _version(wanted: bool) -> None:
    if wanted:
        from roofline import __version__

        typer.echo(f"roofline {__version__}")
        raise typer.Exit


def command() -> Any:
    """The whole command line as one object with a ``main`` method."""
    app = typer.Typer(
        cls=Commands, rich_markup_mode=None, pretty_exceptions_enable=False, context_settings=SETTINGS, no_args_is_help=False
    )

    @app.callback(invoke_without_command=True)
    def roofline(
        context: typer.Context,
        version: Annotated[
            bool, typer.Option("--version", help="The version, and nothing else.", callback=_version, is_eager=True)
        ] = False,
    ) -> None:
        """Analytical roofline and cost model of LLM inference.

        Exit codes: 0 ok, 1 a finding (does not fit, with --check), 2 bad input, 3 an extra or a GPU is missing, 70 a defect.
        """
        if context.invoked_subcommand is None:
            typer.echo(EXAMPLES)

    return get_command(app)

"""``roofline plot``: the figures, one command each; their module is imported when one is drawn."""

from __future__ import annotations

import importlib
from typing import Any

import typer
from typer.main import get_command

from roofline.cli.app import SETTINGS, Listed

FIGURES = {
    "roofline": "Kernels of a decode step and of a prefill under the roofs of a GPU.",
    "latency": "Time per output token against the batch: bound, serial, expected, measured, what fits.",
    "throughput": "Output tokens per second against the batch, likewise.",
    "pareto": "Tokens per second of a user against those of a GPU, over batches and meshes.",
    "memory": "What each GPU holds against what it has.",
    "kv": "Cached state against the context, for several models.",
    "breakdown": "Where the time of a step goes.",
    "validation": "Predicted against measured times, with bands of error.",
    "timeline": "A trace of a serving run: requests and batches over time.",
}
"""Figure -> its line in the help; the function is ``roofline.cli.figures.<figure>``."""

EXAMPLES = """\
roofline plot FIGURE MODEL... --gpu NAME --out FILE draws a figure; the file's suffix (svg, png, pdf) chooses the format.

  roofline plot roofline llama-3.1-8b --gpu h100-sxm --batch 32 --out roofline.svg
  roofline plot latency llama-2-13b llama-2-13b:kv-heads=8 --gpu h100-sxm --context 1024 --out latency.png
  roofline plot kv llama-3.1-8b deepseek-v3 mamba2-2.7b --out kv.pdf

roofline plot --help lists the figures."""


class Figures(Listed):
    """The figures of ``roofline plot``."""

    table = FIGURES
    what = "figure"

    def function(self, name: str) -> Any:
        """The function that draws a figure."""
        return getattr(importlib.import_module("roofline.cli.figures"), name)


def group() -> Any:
    """All figures as one command."""
    app = typer.Typer(
        cls=Figures, name="plot", rich_markup_mode=None, add_completion=False, context_settings=SETTINGS, no_args_is_help=False
    )

    @app.callback(invoke_without_command=True, short_help="Figures.")
    def plot(context: typer.Context) -> None:
        """Figures of models on GPUs, as SVG, PNG or PDF: the same bytes for the same question.

        roofline plot latency llama-2-13b llama-2-13b:kv-heads=8 --gpu h100-sxm --context 1024 --out latency.svg
        """
        if context.invoked_subcommand is None:
            typer.echo(EXAMPLES)

    return get_command(app)

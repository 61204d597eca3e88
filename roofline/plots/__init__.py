"""Figures of models on accelerators: each function returns a ``matplotlib.figure.Figure``; ``save`` writes it.

matplotlib is imported when a figure is drawn, not before.
"""

from roofline.plots.breakdown import breakdown_plot
from roofline.plots.kv import kv_plot
from roofline.plots.latency import latency_plot, throughput_plot
from roofline.plots.lines import lines_plot
from roofline.plots.memory import memory_plot
from roofline.plots.pareto import pareto_plot
from roofline.plots.roofline import kernel_points, roofline_plot, step_point
from roofline.plots.structure import describe, digest
from roofline.plots.style import save
from roofline.plots.timeline import read_trace, timeline_plot
from roofline.plots.validation import Compared, validation_plot

__all__ = [
    "Compared",
    "breakdown_plot",
    "describe",
    "digest",
    "kernel_points",
    "kv_plot",
    "latency_plot",
    "lines_plot",
    "memory_plot",
    "pareto_plot",
    "read_trace",
    "roofline_plot",
    "save",
    "step_point",
    "throughput_plot",
    "timeline_plot",
    "validation_plot",
]

"""A typed frame: measured seconds, the Cost of each row by the models' components, and what its time model looks at."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from roofline.components.base import Component
from roofline.cost import Cost
from roofline.expected.model import Model
from roofline.validate.silicon.source import Table, hashes, joined
from roofline.work import Work


@dataclass(frozen=True)
class Frame:
    """Rows of one kernel family on one accelerator.

    Attributes:
        gpu: accelerator id. cls: class in the report. dtype, kernel: of the family; kernel starts with the framework.
        file: table it comes from.
        rows: pandas frame of the measured rows.
        seconds: measured. cost: entries are float64 arrays, one value per row.
        model: time model. columns: what that looks at; scalars stand for all rows.
        shape_of: columns of the structure that ``unseen_shape`` holds out whole. llm_of: those of the model it belongs to.
        duplicates: rows of the table that repeated another one exactly.
        family: name of the constants in hardware files; frames of one family share them.
        kin: name of a family whose constants stand in; such a frame's own are not fitted. "" for most.
        keys_of: the key columns, sorted.
    """

    gpu: str
    cls: str
    dtype: str
    kernel: str
    file: str
    rows: Any
    seconds: Any
    cost: Cost
    model: Model
    columns: Mapping[str, Any]
    shape_of: tuple[str, ...]
    llm_of: tuple[str, ...]
    duplicates: int
    family: str
    keys_of: tuple[str, ...]
    kin: str = ""

    @cached_property
    def keys(self) -> Any:
        """The key columns."""
        return self.rows[list(self.keys_of)]

    @property
    def shape(self) -> Any:
        """Label of each row's structure, "" where it has none."""
        return self._labels(self.shape_of)

    @property
    def llm(self) -> Any:
        """Label of the model that each row belongs to, "" where it belongs to none."""
        return self._labels(self.llm_of)

    def _labels(self, columns: tuple[str, ...]) -> Any:
        import numpy

        return numpy.array(joined(self.rows, columns)) if columns else numpy.full(len(self), "")

    @cached_property
    def _hashes(self) -> tuple[Any, Any]:
        found: tuple[Any, Any] = hashes(self.rows, self.keys_of)
        return found

    @property
    def order(self) -> Any:
        """The first bytes of each key's hash: an order that has nothing to do with the rows' sizes."""
        return self._hashes[0]

    @property
    def held_out(self) -> Any:
        """Which rows are held out."""
        return self._hashes[1]

    def __len__(self) -> int:
        return len(self.seconds)

    def take(self, rows: Any) -> Frame:
        """The frame with those rows only (an index or mask array)."""

        def chosen(value: Any) -> Any:
            return value[..., rows] if getattr(value, "ndim", 0) else value

        columns = {name: chosen(value) for name, value in self.columns.items()}
        part = replace(
            self, rows=self.rows.iloc[rows.nonzero()[0] if rows.dtype == bool else rows], seconds=self.seconds[rows],
            cost=self.cost.map(chosen), columns=columns,
        )  # fmt: skip
        if "_hashes" in vars(self):
            vars(part)["_hashes"] = tuple(value[rows] for value in self._hashes)
        return part


def structures(rows: Any, columns: list[str]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """(values, row numbers) of each combination of the columns: what a component is built from, and where it applies."""
    import numpy

    positions = rows.reset_index(drop=True).groupby(columns, sort=False, observed=True).indices
    for values, index in positions.items():
        many = values if isinstance(values, tuple) else (values,)
        yield tuple(int(v) if isinstance(v, numpy.integer) else v for v in many), index


class Scatter:
    """Collects Costs and columns of structures into arrays over all rows."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.parts: dict[str, dict[str, Any]] = {"flops": {}, "read": {}, "write": {}, "launches": {}, "columns": {}}

    def put(self, section: str, name: str, index: Any, value: Any) -> None:
        """Writes a value (a number or an array) at the rows of ``index``."""
        import numpy

        if name not in self.parts[section]:
            self.parts[section][name] = numpy.zeros(self.length)
        self.parts[section][name][index] = numpy.asarray(value, dtype=float) if hasattr(value, "shape") else float(value)

    def add(self, index: Any, cost: Cost) -> None:
        """Writes every entry of a Cost."""
        for section, name, value in cost.entries():
            self.put(section, name, index, value)

    @property
    def cost(self) -> Cost:
        """The Cost of all rows."""
        parts = self.parts
        return Cost(parts["flops"], parts["read"], parts["write"], parts["launches"].get("kernels", 0))

    @property
    def columns(self) -> dict[str, Any]:
        """The columns of all rows."""
        return self.parts["columns"]


class Numbers:
    """Number columns of a table as float64, each converted once; ``at`` picks rows."""

    def __init__(self, rows: Any, index: Any = None, whole: dict[str, Any] | None = None) -> None:
        self.rows, self.index = rows, index
        self.whole: dict[str, Any] = {} if whole is None else whole

    def at(self, index: Any) -> Numbers:
        """The same columns at some rows."""
        return Numbers(self.rows, index, self.whole)

    def __getitem__(self, name: str) -> Any:
        if name not in self.whole:
            self.whole[name] = floats(self.rows[name])
        return self.whole[name] if self.index is None else self.whole[name][self.index]


def evaluate(rows: Any, columns: list[str], build: Callable[..., Component], work: Callable[[Numbers], Work]) -> Cost:
    """The Cost of all rows: one component per structure, over arrays of the work that its rows do."""
    scatter, numbers = Scatter(len(rows)), Numbers(rows)
    for values, index in structures(rows, columns):
        scatter.add(index, build(*values).cost(work(numbers.at(index))))
    return scatter.cost


NOISE = {
    "LinearKernel": "", "Kernel": "", "ScaledMM": "", "torch.nn.functional.": "", "moe_torch_flow_": "", "torch_flow ": "",
    "default ": "", "default/": "", "dsa_": "", "gemm_nt_f8f8bf16 ": "", "flash_attn_": "", "experts": "", "/decode": "",
    "/prefill": "", "sgl_kernel_": "", "-kv-": "/", "kv-": "", "_as_silu": "", "mxfp4monolithic": "", "_scaled_mm": "",
    "flash_attention": "fa", "torch_linear": "linear", "causal_conv1d": "conv", "_gating_delta_rule": "",
    "gated_delta_rule": "rule", "flashinfer_cutlass_moe": "flashinfer", "_packed_decode": "",
    "wideep_compute_": "", "skip_indexer": "skip", "indexer_": "", "fused_moe_triton": "triton", "FLASHMLA_SPARSE_": "",
}  # fmt: skip
"""Fillers of kernel names, and what is left of them in the names of families."""


def family_name(framework: str, family: str) -> str:
    """A family's name: framework and kernel, the framework once and fillers left out; "=kernel" is shared by frameworks."""
    shared = family.startswith("=")
    text = family[1:] if shared else family.removeprefix(f"{framework}_").removeprefix(f"{framework}.")
    for filler, rest in NOISE.items():
        text = text.replace(filler, rest)
    if shared:
        return text
    return f"{framework}/{text}"


def floats(series: Any) -> Any:
    """A column as float64."""
    return series.to_numpy(dtype=float)


def make(
    table: Table, rows: Any, cls: str, dtype: str, kernel: str, cost: Cost, model: Model, columns: Mapping[str, Any],
    shape: list[str], llm: str | None = None, family: str = "", kin: str = "",
) -> Frame:  # fmt: skip
    """A frame of some rows of a table.

    Args:
        shape: columns whose combination ``unseen_shape`` holds out whole. llm: column of the model it belongs to.
        family: whose constants it shares ("{kernel} {dtype}" of its own by default); "=name" is shared by all frameworks.
        kin: see ``Frame``.
    """
    return Frame(
        table.gpu, cls, dtype, f"{table.framework}/{kernel}", table.file, rows, floats(rows["latency"]) * 1e-3, cost, model,
        {"bytes": cost.bytes, **columns}, tuple(shape), (llm,) if llm else (), table.duplicates,
        f"{cls} {family_name(table.framework, family or f'{kernel} {dtype}')}", tuple(table.keys), kin,
    )  # fmt: skip

"""Dense matrix multiplications: ``y[m, n] = x[m, k] w[n, k]^T`` with 16-bit inputs and outputs, by ``Linear``.

The 8-bit rows quantise their activations inside the timed region. Weights rotate over several copies, the input stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from roofline.components.latent import BatchedLinear
from roofline.components.linear import Linear
from roofline.expected.gemm import GEMM, HEADS_GEMM, QUANTISED_GEMM
from roofline.formats import format_named
from roofline.validate.silicon.frame import Frame, evaluate, floats, make
from roofline.validate.silicon.source import Table, tables
from roofline.work import Work

WEIGHTS = {
    "bfloat16": "bf16", "float16": "fp16", "fp8": "fp8", "fp8_block": "fp8-block", "int8_wo": "int8-g128", "int4_wo": "int4-g128",
    "sq": "int8", "nvfp4": "nvfp4", "fp8_static": "fp8",
}  # fmt: skip
DTYPES = {"bfloat16": "bf16", "float16": "fp16"}
BY_ROWS = ("CutlassFP8ScaledMMLinearKernel", "sglang_sgl_kernel_fp8_scaled_mm")
"""Kernels that pick their tile by the number of rows alone."""
RANK, HEAD = 512, 128
INPUT_BYTES = {"bf16": 2.0, "fp8": 1.0, "int8": 1.0, "fp4": 0.5}


def frames(gpu: str) -> Iterator[Frame]:
    """One frame per framework, kernel and weight format."""
    for table in tables(gpu, "gemm", "gemm_perf"):
        for (dtype, kernel), rows in table.rows.groupby(["gemm_dtype", "kernel_source"], sort=True):
            yield family(table, rows.reset_index(drop=True), dtype, kernel)
    yield from _absorbed(gpu)


def family(table: Table, rows: Any, dtype: str, kernel: str) -> Frame:
    """The frame of one kernel and weight format."""
    weight = format_named(WEIGHTS[dtype])
    cost = evaluate(rows, ["n", "k"], lambda n, k: Linear(k, n, weight=weight), lambda part: Work(1, part["m"]))
    narrow = weight.unit != "bf16"
    columns = {
        "m": floats(rows["m"]), "n": floats(rows["n"]), "k": floats(rows["k"]), "unit": weight.unit,
        "weight_bytes": float(weight.bits) / 8 if narrow else 2.0, "input_bytes": INPUT_BYTES[weight.unit],
        "menu": "by_rows" if kernel in BY_ROWS else "library",
    }  # fmt: skip
    model = QUANTISED_GEMM if narrow else GEMM
    return make(table, rows, "gemm", DTYPES.get(dtype, dtype), kernel, cost, model, columns, ["n", "k"])


def _absorbed(gpu: str) -> Iterator[Frame]:
    """The matmuls per head around latent attention; their weights stay in the cache."""
    for table in tables(gpu, "mla_bmm", "mla_bmm_perf"):
        for (dtype, name, kernel), rows in table.rows.groupby(["bmm_dtype", "op_name", "kernel_source"], sort=True):
            rows = rows.reset_index(drop=True)
            inputs, outputs = (HEAD, RANK) if name.endswith("pre") else (RANK, HEAD)
            weight = format_named(WEIGHTS[dtype])
            cost = evaluate(
                rows, ["num_heads"],
                lambda heads, inputs=inputs, outputs=outputs, weight=weight: BatchedLinear(heads, inputs, outputs, weight),
                lambda part: Work(1, part["num_tokens"]),
            )  # fmt: skip
            columns = {
                "m": floats(rows["num_tokens"]), "n": outputs * floats(rows["num_heads"]), "k": inputs + 0.0 * cost.bytes,
                "unit": weight.unit, "weight_bytes": float(weight.bits) / 8, "input_bytes": INPUT_BYTES[weight.unit],
            }  # fmt: skip
            yield make(
                table, rows, "gemm", f"{DTYPES.get(dtype, dtype)}-per-head", f"{kernel}/{name}", cost, HEADS_GEMM, columns,
                ["num_heads"], None, f"={DTYPES.get(dtype, dtype)}-per-head",
            )  # fmt: skip

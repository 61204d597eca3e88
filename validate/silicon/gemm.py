"""Dense matrix multiplications: ``y[m, n] = x[m, k] w[n, k]^T`` with 16-bit inputs and outputs, by ``Linear``.

The 8-bit rows quantise their activations inside the timed region. A replay goes round in several copies of the weights,
and nothing empties the last-level cache: what all copies touch together says whether they come from there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from roofline.accelerator import load_accelerator
from roofline.components.latent import BatchedLinear
from roofline.components.linear import Linear
from roofline.expected.arithmetic import ceil, clip
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
WHOLE = ("vllm/DeepGemmFp8BlockScaledMMKernel", "sglang/sglang_deepgemm_gemm_nt_f8f8bf16", "trtllm/torch_flow", "trtllm/deepgemm")
"""Kernels of fp8_block that never split the inner dimension: DeepGEMM, and TensorRT-LLM's, which was made from it."""
COPIES = {"vllm": (6, 1), "sglang": (6, 6)}
"""Framework -> copies of weights and of inputs that a replay goes round in (collector/<framework>/collect_gemm.py)."""
COLLECTORS = (*COPIES, "trtllm")
"""Frameworks whose collector is known; operands of other measurements are taken to come from memory."""
SINGLE = ("fp8_block", "nvfp4")
"""Formats of which vLLM's collector makes one copy."""
MOST_COPIES = 5
"""TensorRT-LLM's collector makes as many copies of the weights as exceed the last-level cache, at most these."""
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
        "menu": menu(table.framework, kernel, dtype),
    }  # fmt: skip
    if table.framework in COLLECTORS:
        columns["touched"] = touched(table, rows, dtype, float(weight.bits) / 8)
    model = QUANTISED_GEMM if narrow else GEMM
    return make(table, rows, "gemm", DTYPES.get(dtype, dtype), kernel, cost, model, columns, ["n", "k"])


def menu(framework: str, kernel: str, dtype: str) -> str:
    """Which tiles and splits a kernel may take."""
    if kernel in BY_ROWS:
        return "by_rows"
    return "whole" if dtype == "fp8_block" and f"{framework}/{kernel}" in WHOLE else "library"


def touched(table: Table, rows: Any, dtype: str, weight_bytes: float) -> Any:
    """Bytes that one replay goes round in."""
    m, n, k = (floats(rows[name]) for name in ("m", "n", "k"))
    weights = weight_bytes * n * k
    if table.framework == "trtllm":
        cache = load_accelerator(table.gpu).l2
        copies, inputs = clip(ceil(float(cache.value) / weights), 1.0, MOST_COPIES) if cache else MOST_COPIES, 1
    else:
        copies, inputs = COPIES[table.framework]
        if table.framework == "vllm" and dtype in SINGLE:
            copies = 1
    return copies * weights + 2.0 * inputs * m * k + 2.0 * m * n


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
                "touched": cost.bytes,
            }  # fmt: skip
            yield make(
                table, rows, "gemm", f"{DTYPES.get(dtype, dtype)}-per-head", f"{kernel}/{name}", cost, HEADS_GEMM, columns,
                ["num_heads"], None, f"={DTYPES.get(dtype, dtype)}-per-head",
            )  # fmt: skip

"""Result files of serving benchmarks, read into one kind of record.

* ``vllm bench serve --save-result``: one JSON object (vllm/benchmarks/serve.py: ``benchmark`` and ``main``; times in ms
  under ``mean_ttft_ms`` ..., lengths as ``total_input_tokens``, ``total_output_tokens``, ``completed``).
* SGLang ``bench_serving``: JSON lines (python/sglang/bench_serving.py: the ``result_details`` of ``benchmark``), the same
  names and ``mean_e2e_latency_ms``, ``random_input_len``.
* ``llama-bench -o json|jsonl|csv|md`` (ggml-org/llama.cpp tools/llama-bench/llama-bench.cpp: ``test::get_fields``): a test
  of ``n_prompt`` prompt tokens or ``n_gen`` generated ones at depth ``n_depth``, in tokens per second.

Whatever is wrong with a file, the reader raises one InputError that says what and where.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roofline.errors import InputError

LARGEST_FILE = 64 * 2**20
MOST_ROWS = 10_000
PROMPT, GENERATE = "prompt", "generate"
SERVING = "serving"
STATED = re.compile(
    r"(all F32|B?F16|(?:I?Q|TQ)\d_\w+|MXFP4 MoE|NVFP4)"
    r"(?: - (Extra small|Small|Medium|Large))?(?: - [\d.]+ bpw.*)?(?: \(guessed\))?$"
)
"""How llama.cpp ends the description of a model: its file type (src/llama-model-loader.cpp, llama_model_ftype_name)."""
NAMED = {"all f32": "fp32", "f16": "fp16", "mxfp4 moe": "gguf-mxfp4", "nvfp4": "gguf-nvfp4"}
SIZES = {"Extra small": "_xs", "Small": "_s", "Medium": "_m", "Large": "_l"}
PREFIXES = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
MARKDOWN_TEST = re.compile(r"(?:(pp)(\d+))?\+?(?:(tg)(\d+))?(?:\s*@\s*d(\d+))?")


@dataclass(frozen=True)
class Measured:
    """One measured run.

    Attributes:
        tool: "vllm bench serve", "sglang bench_serving" or "llama-bench". where: file and line or entry.
        kind: "serving", or "prompt" and "generate" for one phase alone.
        model, gpu, backend: as the file says, "" where it does not.
        isl, osl: mean tokens of a request. context: tokens cached before the phase of llama-bench.
        concurrency: requests in flight at most; None where requests came at a rate. rate: requests per second offered.
        requests: completed. at_once: whether all of them came at the beginning.
        weights: format of the weights as roofline names it, "" where the file does not say; stated: in the file's words.
        weight_bytes: size of the model. ttft_s, tpot_s: means. ttft_p99_s: percentile. output_tok_per_s: measured throughput.
    """

    tool: str
    where: str
    kind: str
    model: str
    gpu: str
    backend: str
    isl: float
    osl: float
    context: int = 0
    concurrency: int | None = None
    rate: float | None = None
    requests: int | None = None
    ttft_s: float | None = None
    ttft_p99_s: float | None = None
    tpot_s: float | None = None
    output_tok_per_s: float | None = None
    at_once: bool = False
    weights: str = ""
    stated: str = ""
    weight_bytes: float | None = None


def _number(record: Mapping[str, Any], key: str, where: str, *, needed: bool = True, least: float = 0.0) -> float | None:
    """A finite number from ``least`` on, None where it is absent and not needed; a text that is one counts (CSV)."""
    value = record.get(key)
    if value is None or value == "":
        if needed:
            raise InputError(f"{where}: {key} is missing")
        return None
    try:
        found = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not math.isfinite(found) or found < least or found > 1e15:
        raise InputError(f"{where}: {key} is {str(value)[:40]!r}; a finite number from {least:g} on belongs there")
    return found


def _needed(record: Mapping[str, Any], key: str, where: str, *, least: float = 0.0) -> float:
    found = _number(record, key, where, least=least)
    assert found is not None
    return found


def _milliseconds(record: Mapping[str, Any], key: str, where: str) -> float | None:
    found = _number(record, key, where, needed=False)
    return None if found is None else found / 1e3


def _at_once(record: Mapping[str, Any]) -> bool:
    """Whether all requests are sent at the beginning: a request rate without end, the default of both clients."""
    value = record.get("request_rate")
    return value == math.inf or (isinstance(value, str) and value.strip().lower() in ("inf", "infinity"))


def file_type(text: str) -> tuple[str, str]:
    """(format, the words that say it) of the weights in llama.cpp's description, as "llama 8B Q4_K - Medium"; "" for none."""
    match = STATED.search(text.strip())
    if match is None:
        return "", ""
    name = match[1].lower() + SIZES.get(match[2] or "", "")
    name = "q2_k" if name == "q2_k_m" else name
    return NAMED.get(name, name), match[0]


def _size(record: Mapping[str, Any]) -> float | None:
    """Bytes of the model as llama-bench states them, a number or "4.58 GiB"; None for anything else."""
    text = str(record.get("model_size") or record.get("size") or "").strip()
    number, _, unit = text.partition(" ")
    try:
        found = float(number) * PREFIXES.get(unit, 1)
    except ValueError:
        return None
    return found if 0 < found < 1e15 else None


def _rate(record: Mapping[str, Any], where: str) -> float | None:
    """Requests per second offered; None for all at once ("inf") or a trace's own times."""
    value = record.get("request_rate")
    if value is None or (isinstance(value, str) and value.strip().lower() in ("inf", "infinity", "trace", "")):
        return None
    if isinstance(value, float) and value == math.inf:
        return None
    return _number(record, "request_rate", where, needed=False)


def _text(record: Mapping[str, Any], *keys: str) -> str:
    return next((str(record[key])[:200] for key in keys if isinstance(record.get(key), str) and record[key]), "")


def _serving(record: Mapping[str, Any], where: str, tool: str) -> Measured:
    completed = int(_needed(record, "completed", where))
    if completed < 1:
        raise InputError(f"{where}: completed is 0, so nothing was measured")
    inputs, outputs = (_needed(record, key, where, least=0) for key in ("total_input_tokens", "total_output_tokens"))
    if inputs < completed or outputs < completed:
        raise InputError(
            f"{where}: {completed:,} requests with {inputs:,.0f} prompt and {outputs:,.0f} output tokens: below one each"
        )
    concurrency = _number(record, "max_concurrency", where, needed=False, least=1)
    _number(record, "duration", where, needed=False, least=1e-9)
    at_once = concurrency is None and _at_once(record)
    return Measured(
        tool, where, SERVING, _text(record, "model_id", "model", "model_path"), _text(record, "gpu"),
        _text(record, "backend", "endpoint_type"),
        inputs / completed, outputs / completed, 0,
        None if concurrency is None else int(concurrency), _rate(record, where), completed,
        _milliseconds(record, "mean_ttft_ms", where), _milliseconds(record, "p99_ttft_ms", where),
        _milliseconds(record, "mean_tpot_ms", where), _number(record, "output_throughput", where, needed=False), at_once,
    )  # fmt: skip


def _phase(record: Mapping[str, Any], where: str, prompt: int, generated: int, depth: int, speed: float) -> Measured:
    if prompt and generated:
        raise InputError(
            f"{where}: a test of {prompt} prompt and {generated} generated tokens mixes both phases; run -p and -n alone"
        )
    if not prompt and not generated:
        raise InputError(f"{where}: the test has no tokens")
    if speed <= 0:
        raise InputError(f"{where}: tokens per second are {speed:g}; a measured speed is above 0")
    return Measured(
        "llama-bench", where, PROMPT if prompt else GENERATE, _text(record, "model_filename", "model_type", "model"),
        _text(record, "gpu_info"), _text(record, "backends", "backend"), prompt, generated, depth, 1, None, None,
        prompt / speed if prompt else None, None, 1 / speed if generated else None, speed,
        False, *file_type(_text(record, "model_type", "model")), _size(record),
    )  # fmt: skip


def _llama_bench(record: Mapping[str, Any], where: str) -> Measured:
    prompt, generated = (int(_needed(record, key, where)) for key in ("n_prompt", "n_gen"))
    depth = int(_number(record, "n_depth", where, needed=False) or 0)
    return _phase(record, where, prompt, generated, depth, _needed(record, "avg_ts", where))


def _one(record: Any, where: str) -> Measured:
    """A record of whatever tool wrote it."""
    if not isinstance(record, dict):
        raise InputError(f"{where}: {type(record).__name__} instead of an object of results")
    if "avg_ts" in record or "n_prompt" in record:
        return _llama_bench(record, where)
    if "completed" in record or "total_output_tokens" in record or "mean_ttft_ms" in record:
        sglang = any(key in record for key in ("total_output_tokens_retokenized", "random_input_len", "mean_e2e_latency_ms"))
        return _serving(record, where, "sglang bench_serving" if sglang else "vllm bench serve")
    raise InputError(
        f"{where}: neither results of vllm bench serve, SGLang bench_serving nor llama-bench (no completed, no avg_ts); "
        f"it has {', '.join(str(key) for key in list(record)[:5]) or 'nothing'}"
    )


def _csv(text: str, name: str) -> Iterator[Measured]:
    try:
        rows = list(csv.DictReader(io.StringIO(text), strict=True))
    except csv.Error as error:
        raise InputError(f"{name}: not valid CSV ({error})") from None
    for number, row in enumerate(rows, 2):
        yield _llama_bench({str(key): value for key, value in row.items()}, f"{name}, line {number}")


def _markdown(text: str, name: str) -> Iterator[Measured]:
    headers: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.lstrip().startswith("|"):
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not headers:
            headers = cells
        elif not all(set(cell) <= set("-: ") for cell in cells):
            where = f"{name}, line {number}"
            row = dict(zip(headers, cells, strict=False))
            test, speed = row.get("test", ""), row.get("t/s", "")
            match = MARKDOWN_TEST.fullmatch(test.strip())
            if not test or match is None or len(cells) != len(headers):
                raise InputError(f"{where}: the row has no test such as pp512 or tg128 under the headers of llama-bench")
            value = _needed({"t/s": speed.replace("±", " ").split(" ")[0]}, "t/s", where)
            yield _phase(row, where, int(match[2] or 0), int(match[4] or 0), int(match[5] or 0), value)


def _lines(text: str, name: str) -> Iterator[Measured]:
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                yield _one(json.loads(line), f"{name}, line {number}")
            except (ValueError, RecursionError):
                raise InputError(f"{name}, line {number}: not valid JSON") from None


def _records(text: str, name: str) -> Iterator[Measured]:
    start = text.lstrip("\ufeff \t\r\n")
    if start.startswith("["):
        try:
            rows = json.loads(start)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{name}: not valid JSON ({error})") from None
        for number, row in enumerate(rows, 1):
            yield _one(row, f"{name}, entry {number}")
    elif start.startswith("{"):
        try:
            whole = json.loads(start)
        except (ValueError, RecursionError):
            yield from _lines(start, name)
        else:
            yield _one(whole, name)
    elif re.search(r"^\s*\|.*\bt/s\b", text, re.MULTILINE):
        yield from _markdown(text, name)
    elif start.partition("\n")[0].replace('"', "").startswith("build_commit"):
        yield from _csv(start, name)
    else:
        raise InputError(f"{name}: neither JSON, JSON lines, CSV nor Markdown of a benchmark")


def read_bench(path: Path) -> list[Measured]:
    """Every run of a result file. Raises InputError naming file, line and field where anything is wrong."""
    name = path.name
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise InputError(f"{name}: larger than {LARGEST_FILE // 2**20} MiB; result files are small")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise InputError(f"{name}: not UTF-8 text") from None
    found: list[Measured] = []
    for one in _records(text, name):
        found.append(one)
        if len(found) > MOST_ROWS:
            raise InputError(f"{name}: more than {MOST_ROWS:,} rows; split the file")
    if not found:
        raise InputError(f"{name}: holds no results")
    return found

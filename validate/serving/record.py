"""The committed record of the serving report: what docs show and tests compare with. Fractions have four digits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from roofline.expected.serving import ENGINE_CONSTANTS, SHARED_CONSTANTS, fitted

RECORD = Path(__file__).with_name("record.json")
ALL = "all dense models"


def _rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def write(path: Path = RECORD) -> None:
    """Writes the report of the committed constants; how the simulator agrees stays as ``benchmarks/closed_form.py`` found it."""
    from roofline.validate.serving.report import by_concurrency, data, refused, scores, with_suspects
    from roofline.validate.serving.simulated import full

    found = {
        "scores": [{name: _rounded(value) for name, value in score.record().items()} for score in scores()],
        "by_concurrency": [{name: _rounded(value) for name, value in vars(line).items()} for line in by_concurrency()],
        "refused": [
            {"structure": " ".join(filter(None, map(str, r.structure))), "rows": r.rows, "reason": r.reason} for r in refused()
        ],
        "left": [{"reason": rule.reason, "rows": rule.rows} for rule in data().rows.dropped if rule.rows],
        "experts_with_rows_that_left": _rounded(with_suspects()),
        "simulated": read(path)["simulated"],
        "full": [{name: _rounded(value) for name, value in vars(one).items()} for one in full()],
    }
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def write_agreement(found: list[dict[str, Any]], path: Path = RECORD) -> None:
    """Puts how far the closed form lies from the simulator, by engine, model and accelerator, into the record."""
    lines = [{name: _rounded(value) for name, value in line.items()} for line in found]
    path.write_text(json.dumps({**read(path), "simulated": lines}, indent=1) + "\n", encoding="utf-8")


def read(path: Path = RECORD) -> dict[str, Any]:
    """The record."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"


def _table(headers: tuple[str, ...], rows: Any) -> Iterator[str]:
    yield "| " + " | ".join(headers) + " |"
    yield "|" + "---|" * len(headers)
    for row in rows:
        yield "| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |"
    yield ""


INTRODUCTION = """\
## Whole servers

`roofline validate serving`: time per output token (TPOT) and time to first token (TTFT) of measured servers, rows of
aiconfigurator-core's `systems/silicon_sample.csv` (H100, H200; Llama-70B fp8 on B200 with nothing fitted to it), against the
closed form of a steady load (`roofline/serving/closed_form.py`) over the calibrated kernels above. Operator constants are
inherited as they are. Three constants of each engine, two shared by all and two shared ones of first tokens are fitted, with
declared priors (`roofline/expected/serving.py`), and written by `roofline validate calibrate --serving`.

* `fit`: the committed constants on the rows that they were fitted to. `unseen_model`, `unseen_gpu`: fitted anew without that
  model or GPU. `blind`: another GPU's datasheet swapped in, nothing refitted.
* Held-out figures are optimistic by as much as the form was chosen with all models in view: which kernels an engine fuses,
  which client sends in waves, gaps by kernel rather than by layer. The prior of each constant is its first guess.
* First tokens depend on the client as much as on the engine: only InferenceX's is known, and only Llama-70B is fitted;
  the models with experts (`unseen_model`) and B200 show what that is worth elsewhere. Each row's server is started as its
  launch script starts it (`validate/serving/rows.toml`: memory fraction, sequences, token budget, kernels of experts).
* The blind split misses the target of first tokens: 15 % is asked, and B200 errs by more, because of vLLM, whose first tokens
  are predicted a quarter too short there; TensorRT-LLM's reach it. No dense model but Llama-70B has first tokens to test, so
  that no figure of theirs is one of a model that the fit has not seen.
* Dense models under vLLM with 32 clients or more are predicted too short, by more the more there are (the table by
  concurrency). Something that grows with the batch is missing there; no constant was bent to hide it.
* Known misses of first tokens: under TensorRT-LLM and SGLang models with experts take 0.05 to 0.2 s more than any step of
  theirs explains, whatever the prompt's length; TensorRT-LLM's gpt-oss-120b on one H200 queues at 64 clients as if a quarter of
  the memory were there (three runs).
"""


def _simulated(record: dict[str, Any]) -> Iterator[str]:
    found = record["simulated"]
    runs = sum(line["runs"] for line in found)
    most = {name: max((line[f"{name}_most"] or 0.0) for line in found) for name in ("tpot", "ttft")}
    yield (
        f"The discrete-event simulator beside the closed form, with the same step times, on all {runs:,} runs where nothing "
        "queues (the cache holds all requests at their longest, the engine runs as many as there are clients, prompts leave two "
        "thirds of all steps' budgets free where they come in waves, and one meets at most one other at the step that it joins): "
        f"apart by at most {_percent(most['tpot'])} % per token and {_percent(most['ttft'])} % to the first token "
        "(`benchmarks/closed_form.py`). Runs whose client is unknown are given InferenceX's in both, and compared per token only."
    )
    yield ""
    headers = ("engine", "model", "gpu", "runs", "per token: apart", "most", "first token: apart", "most")
    names = ("tpot_apart", "tpot_most", "ttft_apart", "ttft_most")
    yield from _table(headers, (
        [line["engine"], line["model"], line["gpu"], line["runs"],
         *("" if line[name] is None else _percent(line[name]) for name in names)]
        for line in found
    ))  # fmt: skip
    yield (
        "Where all clients together fill the cache: seconds to first token and milliseconds per token. TensorRT-LLM admits a "
        "request only with room for its whole output, vLLM as soon as its prompt fits, SGLang with room for its whole output and "
        "0.7 to 0.098 of what the others may still write. The H100 servers of Llama-70B held half of the tokens that the 8-bit "
        "cache of their launch script would have held, and are taken for 16-bit ones; those of Qwen3-32B under SGLang held what "
        "0.8 of the memory leaves, not its default (`rows.toml` has both counts)."
    )
    yield ""
    columns = (
        "model",
        "gpu",
        "engine",
        "tp",
        "in, out",
        "clients",
        "that run",
        "TTFT",
        "closed",
        "simulated",
        "TPOT",
        "closed",
        "simulated",
    )
    yield from _table(columns, (
        [
            one["model"], one["gpu"], one["engine"], one["tp"], f"{one['isl']}, {one['osl']}", one["clients"],
            f"{one['running']:.0f}",
            *(f"{one[f'{kind}_ttft']:.1f}" for kind in ("measured", "closed", "simulated")),
            *(f"{1e3 * one[f'{kind}_tpot']:.1f}" for kind in ("measured", "closed", "simulated")),
        ]
        for one in record["full"]
    ))  # fmt: skip


def _singles() -> Iterator[str]:
    from roofline.validate.serving.requests import mean_error, singles

    found = list(singles())
    yield (
        "Single requests, no server around them, and without its host's time for a step with prompts: published decode steps of "
        "llama.cpp (its constants were fitted to these rows; 16 % with the GPU left out) and first tokens of TensorRT-LLM "
        "0.5 (none fitted; kernels of 2026 against those of 2023). "
        f"Mean error {_percent(mean_error(found, 'decode'))} % and {_percent(mean_error(found, 'first token'))} %."
    )
    yield ""
    headers = (
        "what",
        "engine",
        "model",
        "gpu",
        "weights",
        "tokens",
        "bound ms",
        "expected ms",
        "measured ms",
        "error",
        "comment",
    )
    yield from _table(headers, (
        [
            one.what, one.engine, one.model, f"{one.gpus} x {one.gpu}" if one.gpus > 1 else one.gpu, one.weights, one.context,
            *(f"{1e3 * value:.1f}" for value in (one.bound, one.expected, one.measured)), _percent(one.error),
            one.comment + ("" if one.counts else "; not in the mean"),
        ]
        for one in found
    ))  # fmt: skip


def markdown() -> Iterator[str]:
    """The section of docs/validation.md."""
    from roofline.validate.serving.targets import ANCHORS, target_of

    record = read()
    yield INTRODUCTION
    shown = [s for s in record["scores"] if s["engine"] is None and s["gpu"] is None]

    def cells(score: dict[str, Any]) -> list[Any]:
        limits = target_of(score["metric"], score["split"], score["model"])
        verdict = "" if limits is None else "met" if score["mape"] <= limits[0] else "missed"
        held = "" if limits is None else f"{_percent(limits[0])} ({_percent(limits[1])})"
        numbers = [_percent(score[name]) for name in ("mape", "median", "bias", "p90")]
        return [score["metric"], score["split"], score["model"] or ALL, score["n"], *numbers, score["refused"], held, verdict]

    headers = ("metric", "split", "model", "runs", "error", "median", "bias", "p90", "refused", "target (stretch)", "")
    yield from _table(headers, map(cells, shown))
    yield "By engine:"
    yield ""
    some = [s for s in record["scores"] if s["engine"] and s["model"] in (None, "moe") and s["split"] != "fit"]
    yield from _table(("metric", "split", "model", "engine", "runs", "error", "bias"), (
        [s["metric"], s["split"], s["model"] or ALL, s["engine"], s["n"], _percent(s["mape"]), _percent(s["bias"])] for s in some
    ))  # fmt: skip
    yield "Error per token by clients, dense models held out by model (from that number to the next):"
    yield ""
    rows = ([b["engine"], b["clients"], b["n"], _percent(b["mape"]), _percent(b["bias"])] for b in record["by_concurrency"])
    yield from _table(("engine", "clients", "runs", "error", "bias"), rows)
    yield from _simulated(record)
    yield from _singles()
    yield "aiconfigurator 0.12.0 itself on its own rows (its `cli_estimate`, run once; errors in percent):"
    yield ""
    rows = ([metric, gpu or "h100, h200", what, _percent(error), none] for metric, gpu, what, error, none in ANCHORS)
    yield from _table(("metric", "gpu", "rows", "error", "refuses"), rows)
    yield "Constants:"
    yield ""
    data = fitted()
    values = [(engine, c, own[c.name]) for engine, own in data["engine"].items() for c in ENGINE_CONSTANTS]
    values += [("all", c, data["shared"][c.name]) for c in SHARED_CONSTANTS]
    rows = ([engine, c.name, f"{value:g}", f"{c.start:g}", f"{c.low:g} to {c.high:g}", c.meaning] for engine, c, value in values)
    yield from _table(("engine", "constant", "value", "prior", "bounds", "meaning"), rows)
    yield "Rows that leave, and runs without a prediction:"
    yield ""
    yield from _table(("what", "runs", "reason"), [
        *(["left", entry["rows"], entry["reason"]] for entry in record["left"]),
        *(["refused", entry["rows"], f"{entry['structure']}: {entry['reason']}"] for entry in record["refused"]),
    ])  # fmt: skip
    whole = _percent(record["experts_with_rows_that_left"])
    yield f"With the runs that left, models with experts err {whole} % per token (fit)."
    yield ""

"""Traces of real traffic, from files: CSV, JSON lines, JSON.

=====================  ====================================================================================================
Azure LLM inference    CSV ``TIMESTAMP,ContextTokens,GeneratedTokens`` (AzurePublicDataset, 2023 and 2024)
BurstGPT               CSV ``Timestamp`` [s], ``Request tokens``, ``Response tokens`` (HPMLL/BurstGPT)
Vidur                  CSV ``arrived_at`` [s], ``num_prefill_tokens``, ``num_decode_tokens`` (microsoft/vidur)
Mooncake               JSON lines ``timestamp`` [ms], ``input_length``, ``output_length``, ``hash_ids`` of blocks of 512
                       tokens, equal where prefixes are (kvcache-ai/Mooncake, FAST25-release)
ShareGPT               a JSON list of ``conversations`` of ``from`` and ``value`` (ShareGPT_V3_unfiltered_cleaned_split):
                       texts without times; tokens are estimated from characters
anything else          CSV or JSON lines with ``arrival_s``, ``prompt_tokens``, ``output_tokens``; optionally
                       ``session`` (requests of one follow each other) and ``priority``
=====================  ====================================================================================================
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from roofline.errors import InputError
from roofline.serving.lengths import LONGEST
from roofline.serving.request import Segments
from roofline.serving.workload import EVER, MOST, Workload

ARRIVAL = ("arrival_s", "arrived_at", "arrival_time", "timestamp")
PROMPT = ("prompt_tokens", "contexttokens", "input_length", "num_prefill_tokens", "request tokens", "input_tokens")
OUTPUT = ("output_tokens", "generatedtokens", "output_length", "num_decode_tokens", "response tokens")
SESSION = ("session", "session_id", "sessionid")
HASH_BLOCK = 512
"""Tokens of a block of Mooncake's hashes."""
CHARACTERS = 4
"""Characters of a token where only the text is known."""
NUMBER = re.compile(r"[+-]?(\d{1,40}(\.\d{0,40})?|\.\d{1,40})([eE][+-]?\d{1,3})?", re.ASCII)
LARGEST_FILE = 4 * 2**30
LONGEST_LINE = 16 * 2**20


@dataclass
class _Rows:
    """What was read so far."""

    path: Path
    arrival: list[float] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    session: list[Any] = field(default_factory=list)
    priority: list[int] = field(default_factory=list)
    hashes: list[tuple[int, ...]] = field(default_factory=list)
    assumes: list[str] = field(default_factory=list)
    failed: int = 0


def _fail(path: Path, line: int | None, what: str) -> InputError:
    where = f"{path}" if line is None else f"{path}, line {line:,}"
    return InputError(f"trace: {where}: {what}")


def _column(names: dict[str, Any], wanted: tuple[str, ...]) -> Any:
    return next((names[name] for name in wanted if name in names), None)


def _tokens(value: Any, name: str, rows: _Rows, line: int, least: int = 1) -> int:
    if isinstance(value, str):
        text = value.strip()
        value = int(text) if text.isascii() and text.lstrip("+-").isdigit() and len(text) < 20 else _number(text)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value or abs(value) == math.inf:
        raise _fail(rows.path, line, f"{name} is {str(value)[:40]!r}, not a number of tokens")
    if value != int(value) or not least <= value <= LONGEST:
        raise _fail(rows.path, line, f"{name} is {value!r:.40}; a request has whole tokens from {least} to {LONGEST:,}")
    return int(value)


def _number(text: str) -> float | str:
    """A number as files write them; Python would take 1_0 and digits of other scripts as well."""
    return float(text) if NUMBER.fullmatch(text) else text


def _seconds(value: Any, rows: _Rows, line: int) -> float:
    """Seconds of a time stamp: a number, or a date and time."""
    if isinstance(value, str):
        value = _number(value.strip())
    if isinstance(value, str):
        text = value
        # Azure stamps have seven digits of a second, datetime takes six.
        head, dot, tail = text.partition(".")
        digits = len(tail) - len(tail.lstrip("0123456789"))
        text = f"{head}{dot}{tail[: min(6, digits)]}{tail[digits:]}"
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            raise _fail(rows.path, line, f"the time is {value[:40]!r}, neither a number nor a date and time") from None
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e15:
        raise _fail(rows.path, line, f"the time is {str(value)[:40]!r}, not a number")
    return float(value)


def _take(rows: _Rows, record: dict[str, Any], line: int, scale: float) -> None:
    """One request of a record with lower-case keys."""
    values = {name: record[name] for name in record}
    arrival, prompt, output = (_column(values, names) for names in (ARRIVAL, PROMPT, OUTPUT))
    for name, value, known in (("prompt", prompt, PROMPT), ("output", output, OUTPUT)):
        if value is None:
            raise _fail(rows.path, line, f"no {name} tokens; the column is called {known[0]}, or {', '.join(known[1:3])}, ...")
    size = _tokens(output, "output", rows, line, 0)
    if size == 0:
        rows.failed += 1
        return
    rows.output.append(size)
    rows.prompt.append(_tokens(prompt, "prompt", rows, line))
    rows.arrival.append(math.nan if arrival is None else _seconds(arrival, rows, line) * scale)
    session = _column(values, SESSION)
    if not isinstance(session, (str, int, float, type(None))):
        raise _fail(rows.path, line, "the session is neither text nor a number")
    rows.session.append(None if session == "" else session)
    priority = values.get("priority")
    rows.priority.append(0 if priority in (None, "") else _tokens(priority, "priority", rows, line, 0))
    hashes = values.get("hash_ids")
    if hashes is None:
        rows.hashes.append(())
    elif isinstance(hashes, list) and all(type(one) is int for one in hashes):
        if len(hashes) * HASH_BLOCK < rows.prompt[-1] or (len(hashes) - 1) * HASH_BLOCK >= rows.prompt[-1]:
            raise _fail(rows.path, line, f"{len(hashes)} hash_ids of {HASH_BLOCK} tokens for a prompt of {rows.prompt[-1]:,}")
        rows.hashes.append(tuple(hashes))
    else:
        raise _fail(rows.path, line, "hash_ids is not a list of whole numbers")
    if len(rows.prompt) > MOST:
        raise _fail(rows.path, line, f"more than {MOST:,} requests; cut the file")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with path.open("rb") as file:
        for number, raw in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), b""), 1):
            if len(raw) > LONGEST_LINE:
                raise _fail(path, number, f"longer than {LONGEST_LINE:,} bytes")
            try:
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError:
                raise _fail(path, number, "not UTF-8 text") from None
            if "\0" in text:
                raise _fail(path, number, "holds a zero byte; this is no text file")
            yield number, text


def _parsed(path: Path, text: str, line: int | None) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", None) or "nested too deeply, or a number too long"
        raise _fail(path, line or getattr(error, "lineno", None), f"not JSON: {reason}") from None


def _lower(record: Any, path: Path, line: int) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise _fail(path, line, "not an object of names and values")
    return {str(name).strip().lower(): value for name, value in record.items()}


def _read_csv(rows: _Rows) -> None:
    names: list[str] | None = None
    counted = _lines(rows.path)
    reader = csv.reader((text for _, text in counted), strict=True)
    try:
        for cells in reader:
            line = reader.line_num
            if not any(cell.strip() for cell in cells):
                continue
            if names is None:
                names = [cell.strip().lower() for cell in cells]
                if len(set(names)) != len(names):
                    raise _fail(rows.path, line, "two columns have the same name")
                if not any(name in names for name in PROMPT):
                    raise _fail(rows.path, line, f"no column of prompt tokens; call it {PROMPT[0]} (a header line names columns)")
                continue
            if len(cells) != len(names):
                raise _fail(rows.path, line, f"{len(cells)} values for {len(names)} columns")
            _take(rows, dict(zip(names, cells, strict=True)), line, 1.0)
    except csv.Error as error:
        raise _fail(rows.path, reader.line_num, f"not CSV: {error}") from None


def _read_lines(rows: _Rows) -> None:
    for line, text in _lines(rows.path):
        if not text.strip():
            continue
        record = _lower(_parsed(rows.path, text, line), rows.path, line)
        mooncake = "timestamp" in record and "input_length" in record
        _take(rows, record, line, 1e-3 if mooncake else 1.0)
        if mooncake and line == 1:
            rows.assumes.append("timestamps are milliseconds, as Mooncake writes them")


def _read_json(rows: _Rows, data: Any) -> None:
    if isinstance(data, dict) and isinstance(data.get("requests"), list):
        data = data["requests"]
    if not isinstance(data, list):
        raise _fail(rows.path, None, "a JSON trace is a list of requests or of conversations")
    for index, entry in enumerate(data, 1):
        if isinstance(entry, dict) and "conversations" in entry:
            _conversation(rows, entry["conversations"], index)
            continue
        _take(rows, _lower(entry, rows.path, index), index, 1.0)
    if any(isinstance(entry, dict) and "conversations" in entry for entry in data[:1]):
        rows.assumes.append(f"{CHARACTERS} characters are a token: the file holds texts, not tokens")


def _conversation(rows: _Rows, turns: Any, index: int) -> None:
    """The turns of a ShareGPT conversation: each answer is a request whose prompt is everything before it."""
    if not isinstance(turns, list):
        raise _fail(rows.path, index, "conversations is not a list of turns")
    said = 0
    for turn in turns:
        if not isinstance(turn, dict) or not isinstance(turn.get("value"), str) or not isinstance(turn.get("from"), str):
            raise _fail(rows.path, index, "a turn has no text under from and value")
        tokens = -(-len(turn["value"]) // CHARACTERS)
        if turn["from"].lower() in ("gpt", "chatgpt", "assistant", "bing", "bard") and said and tokens:
            rows.arrival.append(math.nan)
            rows.prompt.append(said)
            rows.output.append(tokens)
            rows.session.append(("conversation", index))
            rows.priority.append(0)
            rows.hashes.append(())
        said += tokens


def _first_text(path: Path) -> str:
    for _, text in _lines(path):
        if text.strip():
            return text.strip()
    raise _fail(path, None, "empty")


def _rows(path: Path) -> _Rows:
    rows = _Rows(path)
    first = _first_text(path)
    if first.startswith("["):
        _read_json(rows, _parsed(path, "".join(text for _, text in _lines(path)), None))
    elif first.startswith("{"):
        try:
            json.loads(first)
            whole = None
        except (ValueError, RecursionError):
            whole = "".join(text for _, text in _lines(path))
        if whole is None:
            _read_lines(rows)
        else:
            _read_json(rows, _parsed(path, whole, None))
    else:
        _read_csv(rows)
    return rows


@dataclass(frozen=True)
class _Segments:
    """What the tokens of a trace's requests are: Mooncake's blocks, or those of a session."""

    hashes: list[tuple[int, ...]]
    sessions: list[Any]

    def __call__(self, number: int) -> Segments:
        if self.hashes[number]:
            return tuple((("hash", name), HASH_BLOCK * (index + 1)) for index, name in enumerate(self.hashes[number]))
        session = self.sessions[number]
        return () if session is None else ((("session", session), EVER),)


def read_trace(
    path: str | Path, *, requests: int | None = None, rate: float | None = None, concurrency: int | None = None,
    speed: float = 1.0, seed: int = 0,
) -> Workload:  # fmt: skip
    """A workload from a file; see the module's table.

    Args:
        requests: the first so many only. rate, concurrency: in the place of the file's own times. speed: times are divided
            by it.

    Raises InputError that names the file, the line and what is wrong with it.
    """
    import numpy

    from roofline.serving.workload import _generator, arrivals

    file = Path(path)
    if not 0 < speed < 1e9:
        raise InputError(f"speed: {speed!r} is out of range; give a factor above 0")
    try:
        if file.is_dir():
            raise InputError(f"trace: {file}: a folder; name the file in it")
        if not file.is_file():
            raise InputError(f"trace: {file}: no such file")
        if file.stat().st_size > LARGEST_FILE:
            raise InputError(f"trace: {file}: larger than {LARGEST_FILE // 2**30} GiB; cut it")
        rows = _rows(file)
    except (OSError, ValueError) as error:
        raise InputError(f"trace: {file}: {getattr(error, 'strerror', None) or error}") from None
    number = len(rows.prompt)
    if not number:
        raise _fail(file, None, f"no request that gave an answer ({rows.failed:,} without output)")
    times = numpy.array(rows.arrival)
    known = ~numpy.isnan(times)
    if known.any() and not known.all():
        raise _fail(file, None, f"{int((~known).sum()):,} of {number:,} requests have no time")
    kept = numpy.arange(number) if not known.any() else numpy.argsort(times, kind="stable")
    kept = kept[: requests or number]
    sessions = [rows.session[i] for i in kept.tolist()]
    after = numpy.full(len(kept), -1)
    if known.any():
        times = (times[kept] - times[kept[0]]) / speed
    else:
        after = _follow(sessions)
        times = numpy.zeros(len(kept))
    assumes = list(rows.assumes)
    if rows.failed:
        assumes.append(f"{rows.failed:,} requests without output are left out")
    unsorted = known.any() and (numpy.diff(numpy.array(rows.arrival)) < 0).any()
    if unsorted:
        assumes.append("requests are taken in the order of their times, not of the file")
    if rate is not None:
        heads = after < 0
        times[heads] = arrivals(int(heads.sum()), rate, _generator(seed))
        assumes.append(
            f"requests arrive at {rate:g} per second (Poisson) in the order of {'their times' if unsorted else 'the file'}"
        )
    elif not known.any() and concurrency is None:
        raise _fail(file, None, "no times; say when its requests arrive: --rate or --concurrency")
    priority = numpy.array([rows.priority[i] for i in kept.tolist()])
    shares = any(rows.hashes) or any(session is not None for session in sessions)
    segments = _Segments([rows.hashes[i] for i in kept.tolist()], sessions) if shares else None
    return Workload(
        times, numpy.array([rows.prompt[i] for i in kept.tolist()]), numpy.array([rows.output[i] for i in kept.tolist()]),
        after if (after >= 0).any() else None, priority if priority.any() else None, segments, concurrency, tuple(assumes),
    )  # fmt: skip


def _follow(sessions: list[Any]) -> Any:
    """Number of the request before it in its session, -1 for none."""
    import numpy

    last: dict[Any, int] = {}
    after = numpy.full(len(sessions), -1)
    for index, session in enumerate(sessions):
        if session is not None:
            after[index] = last.get(session, -1)
            last[session] = index
    return after

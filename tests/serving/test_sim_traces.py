"""Traces: the shapes that are public, and a thousand files that are broken."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest

from roofline.errors import InputError
from roofline.serving.cluster import Cluster
from roofline.serving.lengths import SHAPES, parse_length
from roofline.serving.policies import Policy
from roofline.serving.pool import Cached
from roofline.serving.replica import Replica
from roofline.serving.steps import StepShape
from roofline.serving.traces import read_trace
from roofline.serving.workload import synthetic

# The columns of each come from its public description; the values of the first two are those of its first rows.
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2224670,879,55
"""
"""AzureLLMInferenceTrace_conv.csv (Azure/AzurePublicDataset)."""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:00.017335+00:00,2399,6
"""
MOONCAKE = """{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 2353, 2354]}
{"timestamp": 30535, "input_length": 6472, "output_length": 26, "hash_ids": [46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 2366]}
"""  # noqa: E501
"""kvcache-ai/Mooncake, FAST25-release/README.md."""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
118,GPT-4,417,0,417,API log
"""
VIDUR = "arrived_at,num_prefill_tokens,num_decode_tokens\n0.5,100,20\n1.25,200,10\n"
SHAREGPT = json.dumps(
    [
        {
            "id": "a",
            "conversations": [
                {"from": "human", "value": "x" * 40}, {"from": "gpt", "value": "y" * 80},
                {"from": "human", "value": "z" * 8}, {"from": "gpt", "value": "w" * 4},
            ],
        },
        {"id": "b", "conversations": [{"from": "human", "value": "hello you"}, {"from": "gpt", "value": "hello"}]},
    ]
)  # fmt: skip
PLAIN = """{"arrival_s": 3.5, "prompt_tokens": 7, "output_tokens": 2, "session": "s"}
{"arrival_s": 1, "prompt_tokens": 9, "output_tokens": 4}
"""


def written(folder: Path, text: str | bytes, name: str = "trace") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_azure_traces(tmp_path: Path) -> None:
    found = read_trace(written(tmp_path, AZURE))
    numpy.testing.assert_allclose(found.arrival, [0.0, 4.314579, 4.541877], atol=1e-6)
    assert (found.prompt.tolist(), found.output.tolist()) == ([374, 396, 879], [44, 109, 55])
    later = read_trace(written(tmp_path, AZURE_2024))
    numpy.testing.assert_allclose(later.arrival, [0.0, 0.007405], atol=1e-6)


def test_mooncake_traces_share_the_blocks_that_their_hashes_name(tmp_path: Path) -> None:
    found = read_trace(written(tmp_path, MOONCAKE))
    numpy.testing.assert_allclose(found.arrival, [0.0, 3.053])
    assert (found.prompt.tolist(), found.output.tolist()) == ([6955, 6472], [52, 26])
    replica = Replica(Steady(), Policy(), Cached(4096, 16))
    outcome = Cluster([replica]).serve(found)
    assert outcome.hit.tolist() == [0, 12 * 512], "twelve hashes of 512 tokens are the same"


class Steady:
    provenance, notes = "datasheet", ()

    def seconds(self, shape: StepShape) -> float:
        return 0.01

    def decode_run(self, decodes: int, context: int, steps: int) -> Any:
        return numpy.full(steps, 0.01)


def test_burstgpt_and_vidur_traces(tmp_path: Path) -> None:
    burst = read_trace(written(tmp_path, BURSTGPT))
    assert (burst.arrival.tolist(), burst.prompt.tolist(), burst.output.tolist()) == ([0, 40], [472, 1087], [18, 230])
    assert burst.assumes == ("1 requests without output are left out",)
    vidur = read_trace(written(tmp_path, VIDUR))
    assert (vidur.arrival.tolist(), vidur.prompt.tolist(), vidur.output.tolist()) == ([0, 0.75], [100, 200], [20, 10])


def test_sharegpt_conversations_become_turns_that_follow_each_other(tmp_path: Path) -> None:
    path = written(tmp_path, SHAREGPT)
    with pytest.raises(InputError, match="no times; say when its requests arrive: --rate or --concurrency"):
        read_trace(path)
    found = read_trace(path, concurrency=2)
    assert (found.prompt.tolist(), found.output.tolist(), found.after.tolist()) == ([10, 32, 3], [20, 1, 2], [-1, 0, -1])
    assert any("4 characters are a token" in line for line in found.assumes)


def test_any_other_file_and_its_order(tmp_path: Path) -> None:
    found = read_trace(written(tmp_path, PLAIN), speed=2)
    assert (found.arrival.tolist(), found.prompt.tolist()) == ([0, 1.25], [9, 7])
    assert "order of their times" in " ".join(found.assumes)
    again = read_trace(written(tmp_path, PLAIN), rate=2)
    assert again.prompt.tolist() == found.prompt.tolist()
    assert "(Poisson) in the order of their times" in " ".join(again.assumes)
    in_order = read_trace(written(tmp_path, VIDUR), rate=2)
    assert [line for line in in_order.assumes if "order" in line] == [
        "requests arrive at 2 per second (Poisson) in the order of the file"
    ]
    assert len(read_trace(written(tmp_path, PLAIN), requests=1)) == 1


def _broken(seed: int) -> Iterator[tuple[str, str | bytes]]:
    """(what is wrong, file) of broken files; each is broken for sure."""
    dice = random.Random(seed)
    rows = AZURE.splitlines()
    bad = dice.choice(
        [
            "",
            "abc",
            "-5",
            "0x10",
            "1e400",
            "nan",
            "inf",
            "-inf",
            "1.5",
            "99999999999",
            "١٢",
            "true",
            "[]",
            "1,2",
            '"',
            "1_0",
            " ",
            "-1",
        ]
    )
    line, column = dice.randrange(1, 4), dice.randrange(1, 3)
    cells = rows[line].split(",")
    cells[column] = bad
    yield "cell", "\n".join([*rows[:line], ",".join(cells), *rows[line + 1 :]])
    stamp = dice.choice(["yesterday", "2023-13-01 00:00:00", "25:00", "", "nan", "1e300", "2023-11-16T", "\u221e"])
    yield "time", "\n".join([*rows[:line], ",".join([stamp, *rows[line].split(",")[1:]]), *rows[line + 1 :]])
    yield "cells", "\n".join([*rows[:line], rows[line] + ",7" * dice.randrange(1, 4), *rows[line + 1 :]])
    yield "columns", AZURE.replace(dice.choice(["ContextTokens", "GeneratedTokens"]), "x" * dice.randrange(1, 9))
    cut = dice.randrange(2, MOONCAKE.index("\n") - 2)
    yield "cut", MOONCAKE[:cut] + "\n" + MOONCAKE.splitlines()[1]
    record = json.loads(MOONCAKE.splitlines()[0])
    key = dice.choice(["timestamp", "input_length", "output_length", "hash_ids"])
    record[key] = dice.choice(["x", {}, [[]], True, -3, 1e99, ["a"], 2.5] if key != "timestamp" else ["x", {}, [], True, 1e99])
    yield "value", json.dumps(record) + "\n"
    yield "nest", "[" * dice.randrange(2000, 200_000)
    yield "bytes", AZURE.encode() + bytes(dice.randrange(128, 256) for _ in range(20)) + b"\xff\xfe"
    yield "zero", b"\0" * dice.randrange(1, 500)
    yield (
        "nothing",
        dice.choice(["", "\n\n", "[]", "{}", "[{}]", "null", "7", '"text"', "TIMESTAMP,ContextTokens,GeneratedTokens\n"]),
    )
    yield "noise", bytes(dice.randrange(256) for _ in range(dice.randrange(1, 400)))
    turns = json.loads(SHAREGPT)
    turns[0]["conversations"][dice.randrange(4)] = dice.choice([{"from": "gpt"}, {"value": 1, "from": "gpt"}, 3, None, [], "x"])
    yield "turn", json.dumps(turns)


def test_a_reader_that_hangs_is_caught(within: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The guard of the test below, on a reader that never comes back."""
    from roofline.serving import traces

    def forever(*_: Any) -> None:
        while True:
            pass

    monkeypatch.setattr(traces, "_rows", forever)
    with pytest.raises(AssertionError, match="still running after"), within(0.2):
        traces.read_trace(written(tmp_path, AZURE))


def test_a_thousand_broken_files_give_one_clear_error_each(tmp_path: Path, within: Callable[..., Any]) -> None:
    started, count = time.monotonic(), 0
    for seed in range(84):
        for kind, text in _broken(seed):
            path = written(tmp_path, text)
            with pytest.raises(InputError) as caught, within(10.0):
                read_trace(path, concurrency=1 if kind == "turn" else None)
            message = str(caught.value)
            assert message.startswith("trace: "), (kind, message)
            assert "\n" not in message
            assert len(message) < 400, (kind, message)
            count += 1
    assert count >= 1000
    assert time.monotonic() - started < 60


def test_errors_say_where(tmp_path: Path) -> None:
    path = written(tmp_path, AZURE.replace("879", "many"))
    with pytest.raises(InputError, match="line 4: prompt is 'many', not a number of tokens"):
        read_trace(path)
    cut = tmp_path / "cut.jsonl"
    cut.write_text('{"arrival_s": 0, "prompt_tokens": 5,\n"outp', encoding="utf-8")
    with pytest.raises(InputError, match="line 2: not JSON"):
        read_trace(cut)
    with pytest.raises(InputError, match="no such file"):
        read_trace(tmp_path / "nowhere.csv")
    with pytest.raises(InputError, match="a folder; name the file in it"):
        read_trace(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "-1",
        "abc",
        "1:2:3",
        "9:3",
        "1e3",
        "lognormal:5",
        "lognormal:x:1",
        "lognormal:9:nan",
        "sharegp",
        "12k",
        "1.5",
        "٣",
    ],
)
def test_lengths_that_are_none(text: str) -> None:
    with pytest.raises(InputError, match=r"^isl: "):
        parse_length(text, "isl")


def test_lengths_have_the_mean_that_they_say() -> None:
    generator = numpy.random.Generator(numpy.random.PCG64(0))
    for text, mean in (("512", 512), ("410:512", 461), ("lognormal:512:0.6", 512)):
        length = parse_length(text, "isl")
        assert length.mean == pytest.approx(mean, rel=1e-12)
        assert length.draw(200_000, generator).mean() == pytest.approx(mean, rel=0.01)
    for name, shape in SHAPES.items():
        drawn = parse_length(name, "osl", output=True).draw(100_000, generator)
        assert numpy.median(drawn) == pytest.approx(shape.output.median, rel=0.03)


@pytest.mark.parametrize("burst", [0.5, 1.0, 3.0])
def test_arrivals_have_the_rate_and_the_variation_that_they_say(burst: float) -> None:
    times = synthetic(200_000, parse_length("1", "isl"), parse_length("1", "osl"), rate=5.0, burst=burst, seed=1).arrival
    gaps = numpy.diff(times)
    assert gaps.mean() == pytest.approx(0.2, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(burst, rel=0.03)


def test_turns_hold_what_was_said_before() -> None:
    found = synthetic(6, parse_length("10", "isl"), parse_length("5", "osl"), rate=1.0, turns=3, think_s=2.0, prefix=100)
    assert found.prompt.tolist() == [110, 125, 140] * 2
    assert found.after.tolist() == [-1, 0, 1, -1, 3, 4]
    assert found.segments is not None
    assert found.segments(1)[1][0] == found.segments(2)[1][0] != found.segments(3)[1][0]
    cut = synthetic(6, parse_length("10", "isl"), parse_length("5", "osl"), rate=1.0, turns=3, longest=140, prefix=100)
    assert cut.prompt.tolist() == [110, 125] * 2
    assert cut.after.tolist() == [-1, 0, -1, 2]


def test_a_warm_prefix_saves_its_computation() -> None:
    chat = synthetic(300, parse_length("100", "isl"), parse_length("50", "osl"), rate=2.0, turns=10, think_s=1.0, prefix=1000)
    serve: Callable[[Any], Any] = lambda pool: Cluster([Replica(Steady(), Policy(), pool)]).serve(chat)  # noqa: E731
    outcome = serve(Cached(100_000, 16))
    computed = outcome.replicas[0].totals.prompt_tokens
    assert computed + outcome.hit.sum() == chat.prompt.sum()
    assert outcome.hit.sum() / chat.prompt.sum() > 0.9
    squeezed = serve(Cached(400, 16))
    assert squeezed.hit.sum() < outcome.hit.sum()

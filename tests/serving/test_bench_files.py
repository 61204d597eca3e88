"""Result files of benchmarks: what each tool writes, and a thousand ways in which a file can be wrong."""

from __future__ import annotations

import json
import math
import random
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from roofline import InputError
from roofline.bench_files import file_type, read_bench

VLLM = {
    "date": "20260801-101010", "backend": "vllm", "model_id": "meta-llama/Llama-3.1-8B", "tokenizer_id": "x", "num_prompts": 320,
    "request_rate": "inf", "burstiness": 1.0, "max_concurrency": 32, "duration": 80.0, "completed": 320,
    "total_input_tokens": 320000, "total_output_tokens": 64000, "request_throughput": 4.0, "output_throughput": 800.0,
    "total_token_throughput": 4800.0, "mean_ttft_ms": 210.5, "median_ttft_ms": 190.0, "std_ttft_ms": 40.0, "p99_ttft_ms": 600.0,
    "mean_tpot_ms": 38.0, "median_tpot_ms": 37.5, "std_tpot_ms": 2.0, "p99_tpot_ms": 45.0, "mean_itl_ms": 38.0,
}  # fmt: skip
SGLANG = {
    "backend": "sglang", "dataset_name": "random", "request_rate": 4.0, "max_concurrency": None, "random_input_len": 1024,
    "random_output_len": 256, "random_range_ratio": 0.8, "duration": 100.0, "completed": 400, "total_input_tokens": 368000,
    "total_output_tokens": 92000, "total_output_tokens_retokenized": 91990, "request_throughput": 4.0, "input_throughput": 3680.0,
    "output_throughput": 920.0, "mean_e2e_latency_ms": 4000.0, "mean_ttft_ms": 100.0, "p99_ttft_ms": 400.0, "mean_tpot_ms": 17.0,
}  # fmt: skip
LLAMA = {
    "build_commit": "25d5b0c", "build_number": 6000, "cpu_info": "EPYC", "gpu_info": "NVIDIA GeForce RTX 3090",
    "backends": "CUDA",
    "model_filename": "llama-3-8b-q4_k_m.gguf", "model_type": "llama 8B Q4_K - Medium", "model_size": 4912898304,
    "model_n_params": 8030261312, "n_batch": 2048, "n_ubatch": 512, "n_threads": 8, "type_k": "f16", "type_v": "f16",
    "n_gpu_layers": 99, "n_prompt": 0, "n_gen": 128, "n_depth": 0, "test_time": "2026-08-01T10:10:10Z",
    "avg_ns": 1145000000, "stddev_ns": 1000, "avg_ts": 111.74, "stddev_ts": 0.1,
}  # fmt: skip
MARKDOWN = """\
ggml_cuda_init: found 1 CUDA devices:
| model                  |     size |  params | backend | ngl |          test |             t/s |
| ---------------------- | -------: | ------: | ------- | --: | ------------: | --------------: |
| llama 8B Q4_K - Medium | 4.58 GiB | 8.03 B  | CUDA    |  99 |         pp512 | 3865.39 ± 11.20 |
| llama 8B Q4_K - Medium | 4.58 GiB | 8.03 B  | CUDA    |  99 | tg128 @ d4096 |   98.15 ± 0.20  |

build: 25d5b0c (6000)
"""
CSV = ",".join(f'"{key}"' for key in LLAMA).replace('"', "") + "\n" + ",".join(f'"{value}"' for value in LLAMA.values()) + "\n"


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    def call(text: str) -> Path:
        path = tmp_path / "results"
        path.write_text(text, encoding="utf-8")
        return path

    return call


def test_vllm_bench_serve(write):
    (found,) = read_bench(write(json.dumps(VLLM)))
    assert (found.tool, found.kind, found.model) == ("vllm bench serve", "serving", "meta-llama/Llama-3.1-8B")
    assert (found.isl, found.osl, found.concurrency, found.rate, found.requests) == (1000, 200, 32, None, 320)
    assert (found.ttft_s, found.ttft_p99_s, found.tpot_s, found.output_tok_per_s) == (0.2105, 0.6, 0.038, 800.0)


def test_sglang_bench_serving_appends_lines(write):
    found = read_bench(write(json.dumps(SGLANG) + "\n" + json.dumps({**SGLANG, "request_rate": 8.0}) + "\n"))
    assert [one.tool for one in found] == ["sglang bench_serving"] * 2
    assert [one.rate for one in found] == [4.0, 8.0]
    assert (found[0].isl, found[0].osl, found[0].concurrency) == (920, 230, None)
    assert found[1].where.endswith("line 2")


@pytest.mark.parametrize(
    "text",
    [json.dumps([LLAMA]), json.dumps(LLAMA), json.dumps(LLAMA) + "\n" + json.dumps(LLAMA), CSV],
    ids=["json", "one", "jsonl", "csv"],
)
def test_llama_bench(write, text):
    found = read_bench(write(text))[0]
    assert (found.tool, found.kind, found.osl, found.context) == ("llama-bench", "generate", 128, 0)
    assert found.tpot_s == pytest.approx(1 / 111.74)
    assert found.output_tok_per_s == 111.74
    assert found.gpu == "NVIDIA GeForce RTX 3090"


def test_llama_bench_prints_markdown_after_other_lines(write):
    prompt, generate = read_bench(write(MARKDOWN))
    assert (prompt.kind, prompt.isl, prompt.output_tok_per_s) == ("prompt", 512, 3865.39)
    assert prompt.ttft_s == pytest.approx(512 / 3865.39)
    assert (generate.kind, generate.osl, generate.context, generate.output_tok_per_s) == ("generate", 128, 4096, 98.15)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"completed": 0}, "completed is 0"), ({"completed": None}, "completed is missing"),
        ({"total_output_tokens": 10}, "below one each"), ({"mean_ttft_ms": "fast"}, "mean_ttft_ms is 'fast'"),
        ({"mean_tpot_ms": -1}, "mean_tpot_ms"), ({"max_concurrency": 0}, "max_concurrency"), ({"completed": True}, "completed"),
        ({"total_input_tokens": float("nan")}, "total_input_tokens"), ({"total_input_tokens": 10**400}, "total_input_tokens"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(write, change, text):
    with pytest.raises(InputError, match=text):
        read_bench(write(json.dumps({**VLLM, **change})))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "neither JSON"),
        ("hello", "neither JSON"),
        ("[]", "no results"),
        ("{}", "neither results of vllm"),
        ("[1]", "int instead"),
        ("[" * 5000, "not valid JSON"),
        ("{" * 5000, "not valid JSON"),
        (json.dumps(VLLM)[:-5], "not valid JSON"),
        (json.dumps([{**LLAMA, "n_prompt": 512}]), "mixes both phases"),
        (json.dumps([{**LLAMA, "n_gen": 0}]), "no tokens"),
        (json.dumps([{**LLAMA, "avg_ts": 0}]), "above 0"),
        (MARKDOWN.replace("pp512", "xx512"), "no test such as pp512"),
        (CSV.replace('"111.74"', '"fast"'), "avg_ts is 'fast'"),
        ("build_commit,n_gen\n", "no results"),
        (MARKDOWN.replace("3865.39", "?"), "t/s"),
    ],
)
def test_files_that_are_none(write, text, message):
    with pytest.raises(InputError, match=message):
        read_bench(write(text))


def test_a_file_that_is_not_there_or_not_text(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        read_bench(tmp_path / "nothing")
    path = tmp_path / "binary"
    path.write_bytes(bytes(range(256)))
    with pytest.raises(InputError, match="not UTF-8"):
        read_bench(path)
    with pytest.raises(InputError, match="cannot be read"):
        read_bench(tmp_path)


SEEDS = (json.dumps(VLLM), json.dumps(SGLANG) + "\n" + json.dumps(SGLANG), json.dumps([LLAMA, LLAMA]), CSV, MARKDOWN)


def broken(random_: random.Random) -> str:
    """One of the files above with a few characters cut, swapped, repeated or replaced, or one value turned into rubbish."""
    text = random_.choice(SEEDS)
    for _ in range(random_.randint(1, 6)):
        at, to = sorted(random_.sample(range(len(text) + 1), 2)) if len(text) > 1 else (0, 0)
        kind = random_.randrange(5)
        if kind == 0:
            text = text[:at] + text[min(to, at + 40) :]
        elif kind == 1:
            text = text[:at] + "".join(random_.choices(string.printable, k=random_.randint(1, 8))) + text[at:]
        elif kind == 2:
            text = (
                text[:at]
                + random_.choice(["null", "-1", "1e999", '"x"', "NaN", "[]", "{}", "true", ",,", "|||"])
                + text[at + 4 :]
            )
        elif kind == 3:
            text = text[:to]
        else:
            text = text[at:to] + text
    return text


def refusal(path: Path) -> str | None:
    """What the reader says against a file, None where it reads it."""
    try:
        read_bench(path)
    except InputError as error:
        return str(error)
    return None


def test_a_thousand_malformed_files_give_one_clear_error_each(write, cli: Callable[..., Any], within: Callable[..., Any]):
    """Each is read, or refused in one line that names the file; nothing else is raised, and the command says the same."""
    random_ = random.Random(20260801)
    refused = 0
    for number in range(1000):
        path = write(broken(random_))
        with within(10.0):
            told = refusal(path)
        if told is not None:
            refused += 1
            assert told.startswith("results"), told
            assert len(told) < 600
            if number % 100 == 0:
                answer = cli("import-bench", path, "--gpu", "h100-sxm", "--model", "llama-3.1-8b")
                assert (answer.code, answer.out) == (2, "")
                assert answer.err.count("\n") == 1
    assert refused > 600


def test_predicted_stands_beside_measured(write, cli):
    records = cli("import-bench", write(json.dumps(VLLM)), "--gpu", "h100-sxm", "-o", "json").records
    (one,) = records
    assert (one["model"], one["engine"], one["concurrency"]) == ("llama-3.1-8b", "vllm", 32)
    assert one["measured_tpot_s"] == 0.038
    assert one["error_tpot_s"] == pytest.approx(one["predicted_tpot_s"] / 0.038 - 1)
    assert 0 < one["predicted_ttft_s"] < 1
    table = cli("import-bench", write(json.dumps(VLLM)), "--gpu", "h100-sxm")
    assert "TPOT" in table.out
    assert "210.5 ms" in table.out


def test_a_rate_and_one_phase_alone_are_predicted_too(write, cli):
    (rate,) = cli(
        "import-bench", write(json.dumps(SGLANG)), "--gpu", "h100-sxm", "--model", "llama-3.1-8b", "-o", "json"
    ).records  # fmt: skip
    assert (rate["engine"], rate["request_rate"]) == ("sglang", 4.0)
    assert rate["predicted_output_tok_per_s"] == pytest.approx(4 * 230, rel=0.01)
    prompt, generate = cli(
        "import-bench", write(MARKDOWN), "--gpu", "rtx-3090", "--model", "llama-3-8b", "--dtype", "q4_k_m", "-o", "json"
    ).records
    assert abs(generate["error_tpot_s"]) < 0.5
    assert prompt["predicted_ttft_s"] > 0
    assert (prompt["provenance"], generate["provenance"]) == ("extrapolated", "calibrated")
    assert generate["notes"]


def test_the_format_that_llama_bench_states_is_that_of_the_prediction(write, cli):
    arguments = ("--gpu", "rtx-3090", "--model", "llama-3-8b")
    for text in (MARKDOWN, json.dumps([LLAMA]), CSV):
        answer = cli("import-bench", write(text), *arguments, "-o", "json")
        generate = answer.records[-1]
        assert generate["dtype"] == "q4_k"
        named = cli("import-bench", write(text), *arguments, "--dtype", "q4_k_m", "-o", "json").records[-1]
        assert generate["predicted_tpot_s"] == named["predicted_tpot_s"]
    told = cli("import-bench", write(MARKDOWN), *arguments).out
    assert "weights in q4_k_m, as the file states (Q4_K - Medium)" in told
    wrong = cli("import-bench", write(MARKDOWN), *arguments, "--dtype", "bf16").out
    assert "states a model of 4.58 GiB in Q4_K - Medium, and llama-3-8b as predicted has 14.96 GiB" in wrong
    strange = json.dumps({**LLAMA, "model_type": "llama 8B IQ2_M - 2.7 bpw"})
    refused = cli("import-bench", write(strange), *arguments)
    assert refused.code == 2
    assert "states weights in IQ2_M - 2.7 bpw; give their format with --dtype" in refused.err


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("llama 8B Q4_K - Medium", "q4_k_m"), ("llama 70B Q5_K - Small", "q5_k_s"), ("qwen3 8B Q2_K - Medium", "q2_k"),
        ("llama 8B Q6_K", "q6_k"), ("gemma3 4B F16", "fp16"), ("gpt-oss 20B MXFP4 MoE", "gguf-mxfp4"), ("llama 8B BF16", "bf16"),
        ("llama 7B all F32", "fp32"), ("llama 8B IQ4_XS - 4.25 bpw", "iq4_xs"), ("llama 8B Q8_0 (guessed)", "q8_0"),
        ("llama-3-8b.gguf", ""),
    ],
)  # fmt: skip
def test_words_of_llama_cpp_for_a_format(text, name):
    assert file_type(text)[0] == name


@pytest.mark.parametrize("rate", ["inf", math.inf])
def test_a_run_without_a_rate_sends_everything_at_once(write, cli, rate):
    """Both clients' default: 320 requests at the beginning, served as memory and batch admit them."""
    record = {**VLLM, "request_rate": rate, "max_concurrency": None}
    (one,) = cli("import-bench", write(json.dumps(record)), "--gpu", "h100-sxm", "-o", "json").records
    assert (one["at_once"], one["predicted_concurrency"], one["concurrency"]) == (True, 320, None)
    (few,) = cli("import-bench", write(json.dumps(VLLM)), "--gpu", "h100-sxm", "-o", "json").records
    assert one["predicted_ttft_s"] > 5 * few["predicted_ttft_s"]
    assert one["predicted_output_tok_per_s"] > few["predicted_output_tok_per_s"]
    assert "320 at once" in cli("import-bench", write(json.dumps(record)), "--gpu", "h100-sxm").out


@pytest.mark.parametrize(
    ("record", "arguments", "text"),
    [
        ({**VLLM, "model_id": "nobody/nothing"}, ("--gpu", "h100-sxm"), "name the model with --model"),
        ({**VLLM, "model_id": ""}, ("--gpu", "h100-sxm"), "does not say which model"),
        (VLLM, (), "gpu: say which"), (VLLM, ("--gpu", "h100-sxm,h200-sxm"), "one kind of GPU"),
        ({**VLLM, "max_concurrency": None, "request_rate": "trace"}, ("--gpu", "h100-sxm"), "load is not known"),
        ({**VLLM, "duration": 0}, ("--gpu", "h100-sxm"), "duration is '0'"),
        (VLLM, ("--gpu", "h100-sxm", "--dtype", "fp8,int8"), "one set of formats"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_said(write, cli, record, arguments, text):
    answer = cli("import-bench", write(json.dumps(record)), *arguments)
    assert answer.code == 2
    assert text in answer.err

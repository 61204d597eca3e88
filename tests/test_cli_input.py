"""What is typed: numbers with thousands, names, letters, pipes, closed streams; ambiguous input is refused by its option."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from roofline.cli.edit_options import BY_NAME
from roofline.cli.options import complete_gpus
from roofline.cli.sweeps import whole_numbers
from roofline.configs.load import load_model
from roofline.errors import InputError
from roofline.formulas import formula

ROOT = Path(__file__).parents[1]
GPT = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 1000, "max_position_embeddings": 2048, "torch_dtype": "bfloat16",
}  # fmt: skip
Cli = Callable[..., Any]


@pytest.mark.parametrize("text", ["2,048", "969,100", "1,000", "7,969,100", "064", "1,07", "100,050"])
def test_what_may_be_thousands_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"batch: .*(may be one number|starts with a zero)"):
        whole_numbers([text], "batch")


@pytest.mark.parametrize(
    ("text", "values"), [("256,512", [256, 512]), ("2048,512", [2048, 512]), ("4,2", [4, 2]), ("0,8", [0, 8])]
)
def test_lists_that_cannot_be_one_number_are_lists(text: str, values: list[int]) -> None:
    assert whole_numbers([text], "batch", least=0) == values


def test_sizes_read_well_and_the_one_to_type_can_be_typed(cli: Cli) -> None:
    sizes = ("llama-3.1-8b", "-g", "h100-sxm", "-c", 250)
    (row,) = cli("fit", *sizes, "--json").records
    assert row["largest_batch"] > 1000
    assert f"largest batch {row['largest_batch']:,} at" in cli("fit", *sizes).out
    assert f"largest context {row['largest_context_tokens']:,} tokens at batch 1" in cli("fit", *sizes).out
    assert f"the largest batch there is {row['largest_batch']}\n" in cli("what-if", *sizes, "-b", 9999).out


def test_one_gpu_under_two_names_is_one(cli: Cli) -> None:
    assert len(cli("what-if", "llama-3.1-8b", "-g", "h100,h100-sxm", "--json").records) == 1


def test_a_share_is_asked_for_as_a_share(cli: Cli) -> None:
    for text in ("90%", "nan"):
        answer = cli("what-if", "llama-3.1-8b", "-g", "h100", "--memory-fraction", text)
        assert "write a share such as 0.9" in answer.err
        assert "1:512" not in answer.err


def test_an_empty_name_is_said_to_be_empty(cli: Cli) -> None:
    for name in ("", " "):
        assert "model: the name is empty" in cli("what-if", name, "-g", "h100").err


def test_a_shortened_name_is_answered_with_the_full_one(cli: Cli) -> None:
    for name in ("mixtral-8x7b", "mixtral-8x7b-instruct-v0.1"):
        assert "'mixtral-8x7b-v0.1'" in cli("models", name).err


def test_widths_of_formats_are_fractions(cli: Cli) -> None:
    half = formula("attention", values={"s": Fraction(1, 2)}).to_dict()
    for text in ("s=0.5", "s=1/2"):
        assert cli("formula", "attention", "--set", text, "--json").records[0]["bytes"] == half["bytes"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("attention", "--set", "S=1,S=2"), "set twice"),
        (("attention", "--set", "s=x"), "not a number of bytes"),
        (("attention", "--set", "S=0,T=0"), "T = 0"),
        (("attention", "--set", "E=2"), "no E"),
        (("attention", "--set", "N=32,K=5"), "do not divide"),
        (("--set", "S=1"), "--set is for"),
        (("--model", "gpt2"), "--model is for"),
    ],
)
def test_letters_that_mean_nothing_are_refused(cli: Cli, arguments: tuple[str, ...], told: str) -> None:
    answer = cli("formula", *arguments)
    assert (answer.code, answer.out) == (2, "")
    assert told in answer.err


def test_examples_in_the_help_keep_their_lines(cli: Cli) -> None:
    assert "\n  roofline formula attention\n" in cli("formula", "--help").out


def test_completion_goes_on_behind_a_comma() -> None:
    assert complete_gpus("h100-sxm,h200-s") == ["h100-sxm,h200-sxm"]
    assert BY_NAME["dtype"].complete("bf16,fp8-") == ["bf16,fp8-block"]


def test_completion_takes_no_shell(cli: Cli) -> None:
    answer = cli("--install-completion", "tcsh")
    assert (answer.code, answer.out) == (2, "")
    assert "'tcsh'" in answer.err


def test_a_config_may_come_from_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "piped"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=(json.dumps(GPT),), daemon=True)
    writer.start()
    assert load_model(str(pipe)).params == load_model(GPT).params
    writer.join()


def program(shell: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "R": f"{sys.executable} -m roofline"}
    return subprocess.run(
        ["bash", "-c", shell], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )


def test_streams_that_cannot_be_written_are_bad_input(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(json.dumps(GPT), encoding="utf-8")
    closed = program("$R gpus >&-")
    assert closed.returncode == 2
    assert closed.stderr == "error: stdout is closed, so there is nowhere to write the answer to\n"
    full = program("$R gpus >/dev/full")
    assert full.returncode == 2
    assert full.stderr.count("\n") == 1
    assert "stdout" in full.stderr
    assert program(f"$R models /dev/stdin -o json <{tmp_path}/c.json").returncode == 0
    assert program(f"cat {tmp_path}/c.json | $R models <(cat) -o json").returncode == 0


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "marked.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(GPT).encode())
    assert load_model(path).params == load_model(GPT).params


def test_bitsandbytes_is_known_by_its_keys() -> None:
    named = {**GPT, "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    assert load_model({**GPT, "quantization_config": {"load_in_4bit": True}}).weight_bytes == load_model(named).weight_bytes


@pytest.mark.parametrize("wrong", [{"bits": 5, "group_size": 128}, {"bits": 4, "group_size": 0}])
def test_integers_that_gptq_does_not_pack_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(InputError, match=r"GPTQ packs|is no group"):
        load_model({**GPT, "quantization_config": {"quant_method": "gptq", **wrong}})


def test_edits_in_a_csv_can_be_pasted(cli: Cli) -> None:
    answer = cli("what-if", "llama-3.1-8b", "-g", "h100", "--kv-heads", 2, "--dtype", "fp8", "-o", "csv")
    assert list(csv.DictReader(io.StringIO(answer.out)))[1]["edits"] == "--kv-heads 2 --dtype fp8"


SPECULATE = ("speculate", "vicuna-13b-v1.3", "-g", "a100-80gb", "-b", 1)
ACCURACY = ("--accuracy", "0.7,0.15", "--accuracy", "0.6,0.15")


def test_a_tree_is_labelled_by_nodes_and_depth_and_never_cut(cli: Cli) -> None:
    answer = cli(*SPECULATE, "--draft-cost", "0.02", "--tree", "4,6", *ACCURACY)
    assert "4 / 2" in answer.out
    assert "6 nodes of depth 2 at batch 1" in answer.out
    refused = cli(*SPECULATE, "--draft-cost", "0.02", "--tree", "16,64", *ACCURACY)
    assert refused.code == 2
    assert "more than the 6 that --accuracy describes" in refused.err


def test_speculation_says_what_fits_what_is_too_long_and_in_which_format(cli: Cli) -> None:
    sizes = (*SPECULATE, "--draft-cost", "0.02", "--alpha", 0.8)
    assert cli(*sizes, "--check").code == 0
    assert cli(*sizes[:-6], "-b", 256, *sizes[-4:], "--check").code == 1
    assert "longer than the 2,048 that the config admits" in cli(*sizes).out
    (row,) = cli(*sizes, "-c", 128, "--gamma", 1, "--json").records
    assert "cached state in fp16" in row["assumes"]
    assert not any("longer" in line for line in row["assumes"])
    assert row["not_modelled"]


def test_draft_lengths_asked_for_are_all_that_is_answered(cli: Cli) -> None:
    for target in ((), SPECULATE[1:]):
        rows = cli("speculate", *target, "--alpha", 0.8, "--draft-cost", "0.05", "--gamma", 1, "--json").records
        assert [row["gamma"] for row in rows] == [1]
    assert "draft-cost: -1 is negative" in cli("speculate", "--alpha", 0.8, "--draft-cost", "-1").err


def test_a_sweep_that_is_too_large_names_the_import(cli: Cli) -> None:
    answer = cli("what-if", "llama-3.1-8b", "-g", "h100", "-b", "1:1000:+1", "-c", "1:1000:+1")
    assert "from roofline.sweep import decode_sweep" in answer.err


def test_an_imbalance_that_no_expert_ranks_can_have_is_refused(cli: Cli) -> None:
    """The busiest of n ranks holds at most n times the mean; a model whose experts are not spread has no busiest rank."""
    load = ("--rate", 1, "--isl", 10, "--osl", 10, "--requests", 5)
    for command, more in (("what-if", ()), ("simulate", load)):
        question = (command, "mixtral-8x7b-v0.1", "-g", "h100-sxm", "--tp", 2, *more)
        for arguments, text in (
            (("--imbalance", 100), "imbalance: 100 is the busiest expert rank's share of the mean, and ep is 1"),
            (("--ep", 2, "--imbalance", 2.5), "imbalance: 2.5 is more than the 2 expert ranks of --ep"),
        ):
            answer = cli(*question, *arguments)
            assert (answer.code, answer.out) == (2, "")
            assert text in answer.err
        assert cli(*question, "--ep", 2, "--imbalance", 2).code == 0
    dense = cli("what-if", "llama-3.1-8b", "-g", "h100-sxm", "--tp", 2, "--imbalance", 1.5)
    assert (dense.code, "no experts, no ranks" in dense.err) == (2, True)

"""A plan in Python: one question, one answer, the command's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from roofline import InputError, load_accelerator
from roofline.planner.demand import demand
from roofline.planner.sensitivity import label
from roofline.planner.solve import Question, confirm, seek, solve
from roofline.serving.metrics import Objective

LOAD, LIMITS = demand(400, 100, rate=4.0), Objective(ttft_s=1.0, tpot_s=0.02)
QUESTION = Question(
    "llama-3.2-1b", LOAD, LIMITS, [load_accelerator("h100-sxm")], most=2, kv=["bf16"], bound=True, shown=1, requests=200
)  # fmt: skip


def test_the_answer_is_what_the_command_says(cli):
    answer = solve(QUESTION)
    command = "plan llama-3.2-1b --isl 400 --osl 100 --rate 4 --ttft 1s --tpot 20ms --gpus h100-sxm --max-gpus 2 --kv-dtype bf16"
    (record,) = cli(*command.split(), "--bound", "--show", 1, "--requests", 200, "-o", "json").records
    choice = answer.chosen.confirmed[0]
    assert (record["gpus"], record["weights"], record["usd_per_hour"]) == (
        choice.plan.gpus, choice.plan.formats[0], choice.plan.usd_per_hour
    )  # fmt: skip
    assert record["max_num_seqs"] == choice.plan.batch
    assert answer.launch_model == "meta-llama/Llama-3.2-1B"


def test_each_setup_and_each_simulation_is_seen_go_by():
    setups, simulations = [], []

    def watch(candidates):
        for setup in candidates:
            setups.append(setup)
            yield setup

    sought = seek(QUESTION, watch)
    assert setups
    assert not sought.chosen.confirmed
    answer = confirm(sought, lambda: simulations.append(None))
    assert len(simulations) == len(answer.chosen.confirmed) + len(answer.chosen.refuted) == 1
    assert label(answer.chosen.confirmed[0].plan) == label(solve(QUESTION).chosen.confirmed[0].plan)


def test_a_draft_without_its_acceptance_is_refused():
    with pytest.raises(InputError, match="alpha: speculation needs"):
        solve(replace(QUESTION, draft="mtp"))

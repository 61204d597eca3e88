"""Training against inference: the 6 N D rule, distillation of a pruned model, QAT."""

from __future__ import annotations

import pytest

from roofline import InputError, Work, edits, load_model
from roofline.training import distillation, forward_flops, quantisation_aware_training, training_flops

LLAMA = load_model("llama-3.1-8b")


def test_training_is_six_flop_per_parameter_and_token_plus_attention():
    tokens, sequence = 2048 * 1000, 2048
    embedding, norms = 128256 * 4096, 65 * 4096
    matrices = LLAMA.params - embedding - norms
    attention = 3 * 1000 * 4 * 32 * 128 * 32 * (sequence * (sequence + 1) // 2)
    assert training_flops(LLAMA, tokens, sequence) == 6 * matrices * tokens + attention


def test_a_forward_is_a_prefill_with_all_logits():
    assert forward_flops(LLAMA, 512, 512) == LLAMA.cost(Work(1, 512, 0, all_logits=True)).matrix_flops
    assert forward_flops(LLAMA, 768, 512) * 2 == 3 * forward_flops(LLAMA, 512, 512)


def test_distilling_minitron_costs_a_fraction_of_training_it():
    """Minitron (arXiv 2407.14679): 94 B tokens of distillation in place of 8 T of pre-training, up to 40x fewer tokens."""
    student = edits.apply(LLAMA, [edits.prune_width("hidden=3072,ffn=9216")])
    found = distillation(student, LLAMA, 94 * 10**9, 8 * 10**12, 8192)
    teacher_share = 1 + forward_flops(LLAMA, 10**6, 8192) / training_flops(student, 10**6, 8192)
    assert found.saving == pytest.approx(8e12 / 94e9 / float(teacher_share), rel=1e-9)
    assert 40 < found.saving < 85


def test_qat_pays_elementwise_work_on_every_weight_in_every_step():
    found = quantisation_aware_training(LLAMA, 10**9, 4096, 10**6)
    assert found.fake_quant_flop == 6 * LLAMA.params * 1000
    assert found.overhead < 1e-3


def test_bad_sizes_are_refused():
    with pytest.raises(InputError, match="tokens"):
        training_flops(LLAMA, 0, 4096)

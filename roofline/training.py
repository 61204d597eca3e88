"""What training costs against inference: forward and backward FLOPs, distillation of a pruned model, QAT.

Convention: a backward pass costs twice the matrix FLOPs of its forward pass (one matmul for the gradient of the inputs,
one for that of the weights), so a training step costs three forwards: the "6 N D" rule where attention is small (Kaplan
et al. 2020, arXiv 2001.08361; scaling book, training chapter). Recomputed activations are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from roofline.errors import InputError, UnsupportedModel
from roofline.model import Model
from roofline.numeric import ratio, scale, whole
from roofline.work import Work

FORWARDS_PER_STEP = 3
QAT_VECTOR_FLOPS = 6
"""Elementwise FLOPs of fake quantisation per weight and step: scale, round, clamp (2), shift, rescale."""


def forward_flops(model: Model, tokens: int, sequence: int) -> Any:
    """Matrix FLOPs of one forward pass over ``tokens`` tokens in sequences of ``sequence``, logits on every token.

    Whole sequences are counted exactly; a rest that is no whole sequence counts in proportion.
    """
    if model.encoder is not None:
        raise UnsupportedModel(f"{model.name}: training an encoder beside the decoder is not supported")
    if tokens < 1 or sequence < 1:
        raise InputError(f"tokens: {tokens} tokens in sequences of {sequence} are out of range; give 1 or more of both")
    one = model.for_prefill.cost(Work(1, sequence, 0, all_logits=True)).matrix_flops
    return scale(one, ratio(tokens, sequence)) if isinstance(one, (int, Fraction)) else one * tokens / sequence


def training_flops(model: Model, tokens: int, sequence: int) -> Any:
    """Matrix FLOPs of training on ``tokens`` tokens: three forwards."""
    return whole(FORWARDS_PER_STEP * forward_flops(model, tokens, sequence))


@dataclass(frozen=True)
class Distillation:
    """Healing a pruned model by its teacher, against training the pruned model from scratch.

    Attributes:
        distill_flop: a training step of the student and a forward pass of the teacher on every token.
        scratch_flop: training the student on the tokens of a pre-training run.
    """

    distill_flop: Any
    scratch_flop: Any

    @property
    def saving(self) -> float:
        """How many times cheaper distilling is."""
        return float(self.scratch_flop / self.distill_flop)


def distillation(student: Model, teacher: Model, tokens: int, scratch_tokens: int, sequence: int) -> Distillation:
    """FLOPs of distilling ``student`` from ``teacher`` on ``tokens`` tokens, against ``scratch_tokens`` from scratch.

    Minitron (arXiv 2407.14679) distils with 94 B tokens where its parent was trained with 8 T.
    """
    distilled = training_flops(student, tokens, sequence) + forward_flops(teacher, tokens, sequence)
    return Distillation(whole(distilled), training_flops(student, scratch_tokens, sequence))


@dataclass(frozen=True)
class QAT:
    """Quantisation-aware training: inference costs what the format costs; training pays on top.

    Attributes:
        training_flop: matrix FLOPs of the training run, as without quantisation.
        fake_quant_flop: elementwise FLOPs that quantise and dequantise every weight in each step.
    """

    training_flop: Any
    fake_quant_flop: int

    @property
    def overhead(self) -> float:
        """Extra elementwise FLOPs over the matrix FLOPs of training."""
        return float(self.fake_quant_flop / self.training_flop)


def quantisation_aware_training(model: Model, tokens: int, sequence: int, batch_tokens: int) -> QAT:
    """QAT over ``tokens`` tokens in steps of ``batch_tokens``: weights are fake-quantised once per step."""
    steps = -(-tokens // batch_tokens)
    return QAT(training_flops(model, tokens, sequence), QAT_VECTOR_FLOPS * model.params * steps)

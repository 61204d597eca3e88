"""Distillation: a student learns the distribution of its teacher.

``weight * T^2 * KL(teacher || student)`` at temperature T, plus ``(1 - weight)`` of the cross-entropy with the tokens
themselves; T^2 keeps gradients of one size whatever the temperature (Hinton et al. 2015, arXiv 1503.02531). Minitron heals
pruned networks by the first term alone (arXiv 2407.14679, section 3).
"""

from __future__ import annotations

import torch
from torch.nn import functional


def divergence(student: torch.Tensor, teacher: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """``KL(teacher || student)`` of logits ``[..., vocabulary]`` over a temperature, averaged over tokens; times T^2."""
    log_student = functional.log_softmax(student / temperature, -1)
    log_teacher = functional.log_softmax(teacher.detach() / temperature, -1)
    return temperature**2 * (log_teacher.exp() * (log_teacher - log_student)).sum(-1).mean()


def distillation_loss(
    student: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor | None = None, *,
    temperature: float = 1.0, weight: float = 1.0,
) -> torch.Tensor:  # fmt: skip
    """The loss of logits ``[..., vocabulary]`` against a teacher's and, with ``weight`` below 1, against ``labels [...]``.

    Raises ValueError for a weight outside of [0, 1], and where labels are needed and missing.
    """
    if not 0 <= weight <= 1:
        raise ValueError(f"weight {weight} is not from 0 to 1")
    if weight < 1 and labels is None:
        raise ValueError(f"with weight {weight}, {1 - weight:g} of the loss is against labels, and there are none")
    loss = weight * divergence(student, teacher, temperature)
    if labels is not None and weight < 1:
        loss = loss + (1 - weight) * functional.cross_entropy(student.flatten(0, -2), labels.flatten())
    return loss

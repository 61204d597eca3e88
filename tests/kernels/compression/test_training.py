"""Training in fewer bits and distillation: gradients, what comes back, and what is stored."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest

pytest.importorskip("triton")

import torch

from roofline.edits.edit import apply
from roofline.kernels.compression.affine import Grid, round_to_nearest
from roofline.kernels.compression.distillation import distillation_loss, divergence
from roofline.kernels.compression.network import Decoder
from roofline.kernels.compression.qat import fake_quantize, frozen, prepare
from roofline.kernels.compression.quantize import Compressed
from roofline.model import Model

Layer = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
Correlated = Callable[[int], tuple[Decoder, torch.Tensor, torch.Tensor]]


def test_the_gradient_of_fake_quantisation_is_straight_through_inside_the_range_and_none_outside() -> None:
    from roofline.kernels.compression.qat import FakeQuantize

    grid = Grid(4, 8, asymmetric=False)
    values = torch.tensor([[-0.9, -0.31, 0.0, 0.2, 0.44, 0.69, 0.8, 2.0]], requires_grad=True)
    rounded = FakeQuantize.apply(values, torch.tensor([[0.1]]), torch.tensor([[8.0]]), grid)
    rounded.backward(torch.arange(1.0, 9.0)[None])
    assert values.grad is not None
    assert values.grad.tolist() == [[0.0, 2.0, 3.0, 4.0, 5.0, 6.0, 0.0, 0.0]]
    assert torch.allclose(rounded, torch.tensor([[-0.8, -0.3, 0.0, 0.2, 0.4, 0.7, 0.7, 0.7]]))


def test_fake_quantisation_is_what_is_stored(layer: Layer) -> None:
    weight = layer(0)[0]
    assert torch.equal(fake_quantize(weight, "int3-g32-asym"), round_to_nearest(weight, "int3-g32-asym").dequantized())


@pytest.mark.parametrize("name", ["int2-g16-asym", "int3-g32"])
def test_training_while_quantised_recovers_part_of_the_loss(name: str) -> None:
    """At least a third of what rounding costs a small trained network comes back, and what is stored gives that loss."""
    torch.manual_seed(0)
    x = torch.randn(256, 32)
    y = torch.tanh(x @ torch.randn(32, 24) / 4) @ torch.randn(24, 16) / 3
    network = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 16))

    def loss() -> torch.Tensor:
        return (network(x) - y).square().mean()

    def train(rate: float, steps: int = 200) -> None:
        optimiser = torch.optim.Adam(network.parameters())
        for step in range(steps):
            optimiser.param_groups[0]["lr"] = rate * (1 - step / steps)
            optimiser.zero_grad()
            loss().backward()
            optimiser.step()

    train(1e-2)
    whole = loss().item()
    prepare(network, name, keep=())
    rounded = loss().item()
    train(3e-3)
    trained = loss().item()
    stored = frozen(network)
    assert whole < rounded / 2
    assert trained - whole < 2 / 3 * (rounded - whole)
    assert loss().item() == pytest.approx(trained)
    assert set(stored) == {"0", "2"}
    assert torch.equal(network[0].weight, stored["0"].dequantized())


def test_a_trained_network_is_stored_as_the_edit_says(correlated: Correlated, described: Model) -> None:
    network, tokens, _ = correlated(0)
    made = prepare(copy.deepcopy(network), "int4-g32-asym")
    optimiser = torch.optim.SGD(made.parameters(), lr=1e-2)
    distillation_loss(made(tokens[:1]), network(tokens[:1])).backward()
    optimiser.step()
    with torch.no_grad():
        trained = made(tokens[:1])
        found = Compressed(made, frozen(made), "int4-g32-asym", "qat")
        assert torch.equal(found.network(tokens[:1]), trained)
    assert len(found.weights) == 7 * network.sizes.layers
    assert found.stored_bytes == apply(described, [found.edit]).weight_bytes


def test_distillation_is_zero_at_the_teacher_and_its_gradient_the_difference_of_distributions() -> None:
    generator = torch.Generator().manual_seed(4)
    teacher = torch.randn(3, 11, generator=generator)
    assert divergence(teacher, teacher, 2.0).item() == pytest.approx(0, abs=1e-6)
    student = torch.randn(3, 11, generator=generator, requires_grad=True)
    T = 2.0
    distillation_loss(student, teacher, temperature=T).backward()
    right = T * (torch.softmax(student.detach() / T, -1) - torch.softmax(teacher / T, -1)) / 3
    assert student.grad is not None
    assert torch.allclose(student.grad, right, atol=1e-6)


def test_distillation_mixes_in_the_labels_and_wants_them() -> None:
    generator = torch.Generator().manual_seed(5)
    student, teacher = torch.randn(2, 4, 7, generator=generator)
    labels = torch.tensor([1, 0, 6, 3])
    plain = torch.nn.functional.cross_entropy(student, labels)
    assert distillation_loss(student, teacher, labels, weight=0.0).item() == pytest.approx(plain.item())
    half = distillation_loss(student, teacher, labels, weight=0.5)
    assert half.item() == pytest.approx((plain + divergence(student, teacher)).item() / 2)
    with pytest.raises(ValueError, match=r"0.5 of the loss is against labels"):
        distillation_loss(student, teacher, weight=0.5)

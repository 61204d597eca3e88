"""Compression: what the methods gain, what they store against what the formats and edits say, and what training heals."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("triton")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roofline.checkpoints.agreement import compare
from roofline.checkpoints.headers import read_headers
from roofline.components.base import weight_bytes
from roofline.components.linear import Linear
from roofline.configs.load import load_model
from roofline.edits.edit import apply
from roofline.formats import format_named
from roofline.kernels.compression.affine import Grid, Quantized, output_error, round_to_nearest
from roofline.kernels.compression.awq import awq, scaled
from roofline.kernels.compression.checkpoint import packed, write
from roofline.kernels.compression.distillation import distillation_loss, divergence
from roofline.kernels.compression.gptq import Hessian, gptq
from roofline.kernels.compression.minitron import importance, prune
from roofline.kernels.compression.network import Decoder, Sizes
from roofline.kernels.compression.qat import fake_quantize, frozen, prepare
from roofline.kernels.compression.quantize import METHODS, Compressed, quantize
from roofline.kernels.gemm_int4 import gemm_int4
from roofline.kernels.packing import pack_awq, pack_gptq, pack_gptq_zeros, pack_rows, unpack_awq, unpack_gptq_zeros, unpack_rows
from roofline.model import Model

SEEDS = (0, 1, 2)
SIZES = Sizes(vocabulary=256, D=128, F=256, N=4, K=2, H=32, layers=2)
FORMATS = ["int4-g32-asym", "int3-g32-asym", "int4-g64", "int3-g64"]
MARGIN_GPTQ, MARGIN_ORDER, MARGIN_AWQ = 0.65, 0.45, 0.9
"""Largest output error over that of rounding to nearest."""
MARGIN_FULL, MARGIN_ROOT = 0.75, 1.01
"""Largest output error of AWQ over that of the fixed exponents 1 and 1/2; where 1/2 is near the best, they may be equal."""


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Operations here are small: threads would wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@cache
def layer(seed: int, inputs: int = 128, outputs: int = 64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A weight, and correlated inputs with large channels: some to work against, others to judge by."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(16, inputs, generator=generator) / 4
    gains = torch.exp(torch.randn(inputs, generator=generator))

    def draw() -> torch.Tensor:
        noise = 0.3 * torch.randn(512, inputs, generator=generator)
        return (torch.randn(512, 16, generator=generator) @ mix + noise) * gains

    return torch.randn(outputs, inputs, generator=generator) * inputs**-0.5, draw(), draw()


def hessian_of(x: torch.Tensor) -> Hessian:
    hessian = Hessian(x.shape[1])
    hessian.add(x)
    return hessian


@cache
def correlated(seed: int) -> tuple[Decoder, torch.Tensor, torch.Tensor]:
    """A decoder whose activations are correlated, tokens to work against, tokens to judge by."""
    generator = torch.Generator().manual_seed(100 + seed)
    tokens = torch.randint(0, SIZES.vocabulary, (2, 8, 64), generator=generator)
    return Decoder.seeded(SIZES, seed, rank=16), tokens[0], tokens[1]


@cache
def described() -> Model:
    """The model of those sizes in 16 bits."""
    return load_model(SIZES.config())


# Packing and the affine grid.


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 8), st.integers(1, 3), st.integers(1, 5), st.integers(0, 2**31))
def test_a_stream_of_bits_is_read_back_and_holds_nothing_else(bits: int, blocks: int, columns: int, seed: int) -> None:
    codes = torch.randint(0, 1 << bits, (32 * blocks, columns), generator=torch.Generator().manual_seed(seed))
    words = pack_rows(codes, bits)
    assert torch.equal(unpack_rows(words, bits), codes)
    assert 32 * words.numel() == bits * codes.numel()


def test_packed_words_are_those_of_autogptq_and_autoawq() -> None:
    """Nibble i of a GPTQ word is row i; of an AWQ word, column 0 2 4 6 1 3 5 7 (AutoAWQ, packing_utils)."""
    codes = torch.arange(8)
    assert int(pack_gptq(codes[:, None])[0, 0]) & 0xFFFFFFFF == 0x76543210
    assert int(pack_awq(codes[None])[0, 0]) & 0xFFFFFFFF == 0x75316420
    many = torch.randint(0, 16, (5, 24), generator=torch.Generator().manual_seed(0))
    assert torch.equal(unpack_awq(pack_awq(many)), many)
    assert torch.equal(unpack_gptq_zeros(pack_gptq_zeros(many)), many)


@pytest.mark.parametrize("name", ["int2-g16", "int3-g32-asym", "int4-g64", "int4-g32-asym", "int8-g128"])
def test_no_weight_is_further_than_half_a_scale_from_its_code(name: str) -> None:
    """But for the rounding of the scale to fp16, which can move the last code by 2^-11 of the range."""
    weight = torch.randn(24, 256, generator=torch.Generator().manual_seed(1))
    made = round_to_nearest(weight, name)
    steps = made.scales.float().repeat_interleave(made.grid.group, 1)
    slack = made.grid.largest * 2**-11
    assert ((weight - made.dequantized()).abs() <= (0.5 + slack) * steps + 1e-7).all()
    assert int(made.codes.max()) <= made.grid.largest


@pytest.mark.parametrize("name", ["int4-g128", "int4-g128-asym", "int3-g64-asym", "int3-g128", "int2-g32-asym", "int8-g32"])
def test_stored_bits_per_weight_are_the_fraction_of_the_format(name: str) -> None:
    weight = torch.randn(64, 384, generator=torch.Generator().manual_seed(2))
    made = round_to_nearest(weight, name)
    fmt = format_named(name)
    assert made.format == fmt
    assert 8 * made.stored_bytes == fmt.bits * weight.numel()
    assert made.stored_bytes == weight_bytes(Linear(384, 64, weight=fmt).params())
    stored = made.stored()
    codes = unpack_rows(stored["codes"], made.grid.bits).T
    zeros = unpack_rows(stored["zeros"], made.grid.bits).view(-1, 64).T if "zeros" in stored else None
    again = Quantized(made.grid, codes, stored["scales"], zeros)
    assert torch.equal(again.dequantized(), made.dequantized())


@pytest.mark.parametrize("name", ["fp8", "int4", "int9-g32", "q4_k"])
def test_a_format_without_a_grid_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="not a format of integers by group"):
        Grid.named(name)


def test_inputs_that_are_no_whole_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="100 inputs are not whole groups of 32"):
        round_to_nearest(torch.zeros(8, 100), "int4-g32")


# GPTQ and AWQ.


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("seed", SEEDS)
def test_gptq_beats_rounding_to_nearest_on_inputs_it_has_not_seen(seed: int, name: str) -> None:
    weight, x, held = layer(seed)
    nearest = output_error(weight, round_to_nearest(weight, name).dequantized(), held)
    made = gptq(weight, hessian_of(x), name)
    ordered = gptq(weight, hessian_of(x), name, act_order=True)
    assert output_error(weight, made.dequantized(), held) < MARGIN_GPTQ * nearest
    assert output_error(weight, ordered.dequantized(), held) < MARGIN_ORDER * nearest
    assert made.stored_bytes == ordered.stored_bytes == made.format.bytes(weight.numel())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("seed", SEEDS)
def test_awq_beats_plain_scaling_on_inputs_it_has_not_seen(seed: int, name: str) -> None:
    """Plain: no scale by activations at all, or one of a fixed exponent."""
    weight, x, held = layer(seed)
    made = awq([weight], x, name)

    def error(alpha: float) -> float:
        return output_error(weight, scaled([weight], x, name, alpha).dequantized()[0], held)

    mine = output_error(weight, made.dequantized()[0], held)
    assert mine < MARGIN_AWQ * error(0)
    assert mine < MARGIN_FULL * error(1)
    assert mine < MARGIN_ROOT * error(0.5)
    assert 0 < made.alpha < 1


def test_a_hessian_is_that_of_all_tokens_in_whatever_parts_they_come() -> None:
    x = layer(0)[1]
    parts = Hessian(128)
    for rows in (x[:100].view(2, 50, 128), x[100:101], x[101:]):
        parts.add(rows)
    right = 2 * x.double().T @ x.double() / len(x)
    assert torch.allclose(parts.matrix, right, rtol=1e-12)
    assert torch.allclose(hessian_of(x).matrix, right, rtol=1e-12)


def test_gptq_of_uncorrelated_inputs_is_rounding_to_nearest() -> None:
    """A Hessian without off-diagonal elements leaves nothing to make up for."""
    weight = layer(0)[0]
    hessian = Hessian(128)
    hessian.matrix = torch.eye(128, dtype=torch.float64)
    made, nearest = gptq(weight, hessian, "int4-g32-asym"), round_to_nearest(weight, "int4-g32-asym")
    assert torch.equal(made.codes, nearest.codes)


def test_blocks_of_gptq_only_gather_updates() -> None:
    weight, x, _ = layer(0)
    one, many = (gptq(weight, hessian_of(x), "int4-g32-asym", block=block) for block in (32, 128))
    assert float((one.dequantized() - many.dequantized()).abs().max()) < 1e-6


def test_gptq_hands_errors_on_as_the_optimal_update_says() -> None:
    """Rounding one input and solving for the rest exactly: the second input moves by -e H_12 / H_22."""
    x = torch.tensor([[1.0, 0.8], [0.2, 1.0], [1.0, 0.9], [0.5, 0.1]])
    weight = torch.tensor([[0.33, 0.71]])
    made = gptq(weight, hessian_of(x), "int2-g1", damping=0.0)
    first = made.dequantized(torch.float64)[0, 0]
    second = x.double().T @ x.double()
    optimal = 0.71 + (0.33 - first) * second[0, 1] / second[1, 1]
    scale, _ = Grid.named("int2-g1").fit(optimal[None, None])
    assert made.scales[0, 1].double() == scale[0, 0]


def test_an_input_never_seen_is_stored_as_zero() -> None:
    weight, x, _ = layer(1)
    dead = x.clone()
    dead[:, 5] = 0
    made = gptq(weight, hessian_of(dead), "int4-g32", act_order=True)
    assert (made.dequantized()[:, 5] == 0).all()


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("method", METHODS)
def test_what_is_stored_multiplies_in_the_kernel(method: str) -> None:
    """A checkpoint's tensors go into ``gemm_int4`` as they lie, and give the product with the dequantised weight."""
    weight, x, held = layer(2, outputs=40)
    if method == "awq":
        made = awq([weight], x, "int4-g32-asym").parts[0]
    elif method == "rtn":
        made = round_to_nearest(weight, "int4-g32-asym")
    else:
        made = gptq(weight, hessian_of(x), "int4-g32-asym", act_order=method == "gptq-order")
    rows = held[:9].half()
    if method == "gptq-order":
        assert made.order is not None
        words, zeros, order = pack_gptq(made.codes.T), pack_gptq_zeros(made.zeros.T), made.order.to(torch.int32)
        out = gemm_int4(rows, words, made.scales.T.contiguous(), zeros, order)
    else:
        stored = packed(made, "awq" if method == "awq" else "gptq")
        out = gemm_int4(rows, stored["qweight"], stored["scales"].contiguous(), stored["qzeros"])
    right = rows.double() @ made.dequantized(torch.float64).T
    assert float((out.double() - right).square().mean().sqrt() / right.square().mean().sqrt()) < 6e-4


# Whole networks against the edits of the model.


@pytest.mark.parametrize("name", ["int4-g32-asym", "int3-g32-asym"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_network_by_gptq_or_awq_is_nearer_to_the_whole_one(seed: int, name: str) -> None:
    """KL divergence of next tokens, on tokens not seen: GPTQ below 2/3 of rounding to nearest, AWQ below 0.95."""
    network, tokens, held = correlated(seed)
    found = {}
    for method in METHODS:
        with torch.no_grad():
            found[method] = float(divergence(quantize(network, name, method, tokens).network(held), network(held)))
    assert max(found["gptq"], found["gptq-order"]) < 2 / 3 * found["rtn"]
    assert found["awq"] < 0.95 * found["rtn"]


def test_the_network_is_the_model_parameter_by_parameter() -> None:
    network = correlated(0)[0]
    assert sum(parameter.numel() for parameter in network.parameters()) == described().params
    assert described().family == "llama"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["int4-g32-asym", "int3-g32-asym", "int4-g64", "int8-g32-asym"])
def test_stored_bytes_are_those_of_the_edited_model(name: str, method: str) -> None:
    network, tokens, _ = correlated(0)
    made = quantize(network, name, method, tokens[:1])
    assert made.stored_bytes == apply(described(), [made.edit]).weight_bytes


@pytest.mark.parametrize(
    ("name", "method", "extra"),
    [("int4-g32-asym", "awq", 0), ("int3-g32-asym", "gptq", 0), ("int4-g64", "rtn", 16 * 14), ("int4-g32-asym", "gptq-order", 0)],
)
def test_a_written_checkpoint_is_what_its_config_describes(name: str, method: str, extra: int, tmp_path: Path) -> None:
    """To the byte, but for what a container needs beside: the shape of each weight, or the group of each input."""
    pytest.importorskip("safetensors")
    network, tokens, _ = correlated(0)
    made = quantize(network, name, method, tokens[:1])
    folder = write(tmp_path, made)
    if method == "gptq-order":
        extra = sum(4 * weight.codes.shape[1] for weight in made.weights.values())
    agreement = compare(read_headers(folder), load_model(str(folder / "config.json")))
    assert agreement.same_params
    assert agreement.stored_bytes == agreement.bytes + extra
    assert agreement.bytes == apply(described(), [made.edit]).weight_bytes


def test_a_written_checkpoint_holds_the_tensors_themselves(tmp_path: Path) -> None:
    load_file = pytest.importorskip("safetensors.torch").load_file
    network, tokens, _ = correlated(0)
    made = quantize(network, "int4-g32-asym", "awq", tokens[:1])
    tensors = load_file(write(tmp_path, made) / "model.safetensors")
    name = "model.layers.1.mlp.down_proj"
    assert torch.equal(unpack_awq(tensors[f"{name}.qweight"]).T, made.weights[name].codes.long())
    assert torch.equal(tensors[f"{name}.scales"].T, made.weights[name].scales)


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("name", ["int4-g32-asym", "int3-g32-asym"])
def test_a_gptq_container_is_read_input_by_input(name: str, act_order: bool) -> None:
    """As AutoGPTQ dequantises: each input's codes by the scale and the zero point, plus one, of the group it names."""
    weight, x, _ = layer(1)
    made = gptq(weight, hessian_of(x), name, act_order=act_order)
    stored = packed(made, "gptq")
    bits = made.grid.bits
    codes, zeros = unpack_rows(stored["qweight"], bits), unpack_gptq_zeros(stored["qzeros"], bits)
    groups = stored["g_idx"].long() if act_order else torch.arange(128) // 32
    assert torch.bincount(groups).tolist() == [32] * 4
    assert torch.equal(((codes - zeros[groups]) * stored["scales"].float()[groups]).T, made.dequantized())


@pytest.mark.parametrize(("name", "method"), [("int3-g32", "rtn"), ("int4-g32", "gptq-order")])
def test_weights_without_a_container_are_refused(name: str, method: str, tmp_path: Path) -> None:
    network, tokens, _ = correlated(0)
    with pytest.raises(ValueError, match="have no container; quantise to an asymmetric format"):
        write(tmp_path, quantize(network, name, method, tokens[:1]))


def test_an_unknown_method_is_refused() -> None:
    network, tokens, _ = correlated(0)
    with pytest.raises(ValueError, match="'best' is none of rtn, gptq, gptq-order, awq"):
        quantize(network, "int4-g32", "best", tokens)


# Training.


def test_the_gradient_of_fake_quantisation_is_straight_through_inside_the_range_and_none_outside() -> None:
    from roofline.kernels.compression.qat import FakeQuantize

    grid = Grid(4, 8, asymmetric=False)
    values = torch.tensor([[-0.9, -0.31, 0.0, 0.2, 0.44, 0.69, 0.8, 2.0]], requires_grad=True)
    rounded = FakeQuantize.apply(values, torch.tensor([[0.1]]), torch.tensor([[8.0]]), grid)
    rounded.backward(torch.arange(1.0, 9.0)[None])
    assert values.grad is not None
    assert values.grad.tolist() == [[0.0, 2.0, 3.0, 4.0, 5.0, 6.0, 0.0, 0.0]]
    assert torch.allclose(rounded, torch.tensor([[-0.8, -0.3, 0.0, 0.2, 0.4, 0.7, 0.7, 0.7]]))


def test_fake_quantisation_is_what_is_stored() -> None:
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


def test_a_trained_network_is_stored_as_the_edit_says() -> None:
    network, tokens, _ = correlated(0)
    made = prepare(copy.deepcopy(network), "int4-g32-asym")
    optimiser = torch.optim.SGD(made.parameters(), lr=1e-2)
    distillation_loss(made(tokens[:1]), network(tokens[:1])).backward()
    optimiser.step()
    with torch.no_grad():
        trained = made(tokens[:1])
        found = Compressed(made, frozen(made), "int4-g32-asym", "qat")
        assert torch.equal(found.network(tokens[:1]), trained)
    assert len(found.weights) == 7 * SIZES.layers
    assert found.stored_bytes == apply(described(), [found.edit]).weight_bytes


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


# Minitron.

DEAD_NEURONS, DEAD_LAYER, DEAD_CHANNEL = (3, 100, 255), 1, 77
FOUR = Sizes(vocabulary=64, D=128, F=256, N=4, K=2, H=32, layers=3)


@cache
def planted() -> tuple[Decoder, torch.Tensor]:
    """A decoder in float64 with three dead neurons in each layer and a dead layer, and tokens."""
    network = Decoder.seeded(FOUR, 7).double()
    with torch.no_grad():
        for layer_ in network.model.layers:
            layer_.mlp.gate_proj.weight[list(DEAD_NEURONS)] = 0
        last = network.model.layers[DEAD_LAYER]
        last.self_attn.o_proj.weight.zero_()
        last.mlp.down_proj.weight.zero_()
    return network, torch.randint(0, FOUR.vocabulary, (3, 16), generator=torch.Generator().manual_seed(8))


def test_dead_neurons_and_layers_rank_last_and_pruning_them_changes_nothing() -> None:
    network, tokens = planted()
    scores = importance(network, tokens)
    for neurons in scores.neurons:
        assert set(neurons.argsort()[:3].tolist()) == set(DEAD_NEURONS)
    assert int(scores.layers.argmin()) == DEAD_LAYER
    assert float(scores.layers[DEAD_LAYER]) == pytest.approx(0, abs=1e-12)
    with torch.no_grad():
        right = network(tokens)
        assert torch.allclose(prune(network, scores, ffn=253).network(tokens), right, rtol=0, atol=1e-10)
        assert torch.allclose(prune(network, scores, layers=2).network(tokens), right, rtol=0, atol=1e-10)
        assert not torch.allclose(prune(network, scores, ffn=252).network(tokens), right, rtol=0, atol=1e-4)
        assert not torch.allclose(prune(network, scores, layers=1).network(tokens), right, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("N", "K"), [(6, 6), (6, 3)])
def test_dead_heads_rank_last_and_pruning_them_changes_nothing(N: int, K: int) -> None:
    """A head is dead with its values, and so is every query head that shares them."""
    sizes = Sizes(vocabulary=64, D=96, F=64, N=N, K=K, H=16, layers=2)
    network = Decoder.seeded(sizes, 9).double()
    with torch.no_grad():
        for layer_, head in zip(network.model.layers, (2, 0), strict=True):
            layer_.self_attn.v_proj.weight[16 * head : 16 * (head + 1)] = 0
    tokens = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(10))
    scores = importance(network, tokens)
    group = N // K
    for layer_scores, head in zip(scores.heads, (2, 0), strict=True):
        assert set(layer_scores.argsort()[:group].tolist()) == set(range(head * group, (head + 1) * group))
    made = prune(network, scores, kv_heads=K - 1)
    assert [edit.flag for edit in made.edits] == [f"--prune-width heads={N - group},kv-heads={K - 1}"]
    with torch.no_grad():
        right = network(tokens)
        assert torch.allclose(made.network(tokens), right, rtol=0, atol=1e-10)
        assert not torch.allclose(prune(network, scores, kv_heads=K - 2).network(tokens), right, rtol=0, atol=1e-4)


def test_a_dead_channel_ranks_last() -> None:
    network, tokens = copy.deepcopy(planted()[0]), planted()[1]
    with torch.no_grad():
        network.model.embed_tokens.weight[:, DEAD_CHANNEL] = 0
        for layer_ in network.model.layers:
            layer_.self_attn.o_proj.weight[DEAD_CHANNEL] = 0
            layer_.mlp.down_proj.weight[DEAD_CHANNEL] = 0
    assert int(importance(network, tokens).channels.argmin()) == DEAD_CHANNEL


def test_the_pruned_network_is_the_pruned_model() -> None:
    """``--prune-width`` and ``--prune-depth`` of the model count the parameters of the pruned weights."""
    network, tokens = planted()
    made = prune(network, importance(network, tokens), hidden=96, ffn=200, heads=2, layers=2)
    whole = load_model(FOUR.config())
    edited = apply(whole, made.edits)
    assert [edit.flag for edit in made.edits] == ["--prune-width hidden=96,ffn=200,heads=2", "--prune-depth 2"]
    assert sum(parameter.numel() for parameter in made.network.parameters()) == edited.params
    assert load_model(made.network.sizes.config()).params == edited.params
    assert torch.isfinite(made.network(tokens)).all()


def test_sizes_that_cannot_be_pruned_to_are_refused() -> None:
    network, tokens = planted()
    scores = importance(network, tokens)
    with pytest.raises(ValueError, match="F = 300 is not between 1 and 256"):
        prune(network, scores, ffn=300)
    with pytest.raises(ValueError, match="3 heads do not divide over 2 key-value heads"):
        prune(network, scores, heads=3)


def test_distillation_heals_a_pruned_network() -> None:
    """Three eighths of the neurons are kept; thirty steps bring the divergence from the whole network below 0.6 of it."""
    network, tokens, held = correlated(0)
    made = prune(network, importance(network, tokens), ffn=96).network
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        teacher = network(held)

    def distance() -> float:
        with torch.no_grad():
            return divergence(made(held), teacher).item()

    before = distance()
    optimiser = torch.optim.Adam(made.parameters(), lr=5e-4)
    for _ in range(30):
        batch = torch.randint(0, SIZES.vocabulary, (8, 32), generator=generator)
        with torch.no_grad():
            target = network(batch)
        optimiser.zero_grad()
        distillation_loss(made(batch), target).backward()
        optimiser.step()
    assert distance() < 0.6 * before

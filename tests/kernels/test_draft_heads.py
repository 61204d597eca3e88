"""Medusa heads and the EAGLE step: their PyTorch references against their Costs, and greedy decoding behind either."""

from __future__ import annotations

from functools import cache

import pytest

pytest.importorskip("triton")

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from roofline.components.draft_heads import MedusaHeads as MedusaCost
from roofline.configs.load import load_model
from roofline.errors import InputError, UnsupportedModel
from roofline.formats import FP16
from roofline.kernels.compression.network import Decoder, Sizes
from roofline.kernels.draft_heads import EagleHead, MedusaHeads, generate
from roofline.model import Model
from roofline.speculative.heads import eagle_step, medusa_heads
from roofline.work import Work

SIZES = Sizes(vocabulary=96, D=64, F=80, N=4, K=4, H=16, layers=2)
VICUNA = {
    "model_type": "llama", "vocab_size": 32000, "max_position_embeddings": 2048, "torch_dtype": "float16",
    "tie_word_embeddings": False,
}  # fmt: skip
EAGLE_PARAMS = ((4096, 11008, 32, 32, 32, 0.24e9), (5120, 13824, 40, 40, 40, 0.37e9), (8192, 28672, 64, 8, 80, 0.99e9))
"""D, F, heads, key-value heads, layers, parameters of the draft for 7B, 13B and 70B (arXiv 2401.15077, section 4.2)."""


@cache
def target() -> Decoder:
    return Decoder.seeded(SIZES, 3)


@cache
def described() -> Model:
    return load_model(SIZES.config())


def executed(module: torch.nn.Module, *inputs: torch.Tensor) -> int:
    """Matrix FLOPs that torch counts; fused attention on a CPU would not be among them."""
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        module(*inputs)
    return counter.get_total_flops()


@pytest.mark.parametrize(("heads", "layers"), [(1, 1), (5, 1), (3, 2)])
def test_medusa_heads_are_their_cost(heads: int, layers: int) -> None:
    network, cost = MedusaHeads(target(), heads, layers), medusa_heads(described(), heads, layers)
    assert sum(parameter.numel() for parameter in network.parameters()) == cost.params
    rows = 7
    work = Work(rows, 1, all_logits=True)
    assert executed(network, torch.zeros(rows, SIZES.D)) == cost.cost(work).matrix_flops
    assert cost.cost(work).read["weights"] == cost.weight_bytes == 2 * cost.params
    assert cost.cost(work).launches == heads * (layers + 1)


def test_parameters_of_medusa_heads_are_the_formula() -> None:
    heads = MedusaCost(64, 96, 5, 2, weight=FP16)
    assert heads.params() == {FP16: 5 * (2 * 64 * 64 + 64 * 96), heads.activation: 5 * 2 * 64}


def test_the_eagle_step_is_its_cost() -> None:
    network, cost = EagleHead(target()), eagle_step(described())
    assert sum(parameter.numel() for parameter in network.parameters()) == cost.params
    rows = 5
    flops = executed(network, torch.zeros(rows, 1, SIZES.D), torch.zeros(rows, 1, dtype=torch.long))
    assert flops == cost.cost(Work(rows, 1, all_logits=True)).matrix_flops


@pytest.mark.parametrize(("D", "F", "N", "K", "layers", "params"), EAGLE_PARAMS)
def test_eagle_heads_have_the_published_parameters(D: int, F: int, N: int, K: int, layers: int, params: float) -> None:
    sizes = {"hidden_size": D, "intermediate_size": F, "num_attention_heads": N, "num_key_value_heads": K}
    model = load_model({**VICUNA, **sizes, "num_hidden_layers": layers})
    assert round(eagle_step(model).params / 1e9, 2) == params / 1e9


def test_untrained_medusa_heads_guess_what_the_target_does() -> None:
    hidden = torch.randn(4, SIZES.D, generator=torch.Generator().manual_seed(0))
    logits = MedusaHeads(target(), 3)(hidden)
    assert torch.equal(logits, target().lm_head(hidden).expand(3, -1, -1))


def test_an_eagle_head_that_copies_its_state_has_the_logits_of_the_target() -> None:
    head = EagleHead(target())
    with torch.no_grad():
        head.join.weight.copy_(torch.cat([torch.zeros(SIZES.D, SIZES.D), torch.eye(SIZES.D)], 1))
        head.join.bias.zero_()
        head.layer.self_attn.o_proj.weight.zero_()
        head.layer.mlp.down_proj.weight.zero_()
    hidden = torch.randn(2, 3, SIZES.D, generator=torch.Generator().manual_seed(1))
    found, logits = head(hidden, torch.tensor([[1, 2, 3], [4, 5, 6]]))
    assert torch.equal(found, hidden)
    assert torch.equal(logits, target().lm_head(hidden))


def test_an_eagle_chain_attends_to_the_whole_text_and_to_its_own_guesses() -> None:
    torch.manual_seed(1)
    head, text = EagleHead(target()), torch.tensor([3, 1, 4, 1, 5])
    with torch.no_grad():
        hidden = target().model(text[None, :-1])[0]
        guesses = head.draft(hidden, text, 2)
        states, logits = head(hidden[None], text[None, 1:])
        assert guesses[0] == logits[0, -1].argmax()
        longer = torch.cat([hidden[None], states[:, -1:]], 1)
        _, logits = head(longer, torch.cat([text[1:], guesses[:1]])[None])
        assert guesses[1] == logits[0, -1].argmax()
        assert not torch.allclose(head(hidden[None, -1:], text[None, -1:])[0], states[:, -1:], atol=1e-3)


def plain(prompt: torch.Tensor, number: int) -> torch.Tensor:
    """Greedy decoding, one pass per token."""
    text = prompt
    with torch.no_grad():
        for _ in range(number):
            text = torch.cat([text, target()(text[None])[0, -1].argmax().reshape(1)])
    return text[len(prompt) :]


@pytest.mark.parametrize("kind", ["medusa", "eagle", "oracle", "none"])
def test_greedy_decoding_behind_any_draft_is_that_of_the_target(kind: str) -> None:
    """With an oracle as draft a pass gives length + 1 tokens, with none one; the tokens are the same."""
    torch.manual_seed(0)
    prompt = torch.tensor([5, 17, 80])
    right = plain(prompt, 12)
    heads = {"medusa": MedusaHeads(target(), 3), "eagle": EagleHead(target())}

    def oracle(hidden: torch.Tensor, text: torch.Tensor, number: int) -> torch.Tensor:
        assert len(text) == len(hidden) + 1
        done = len(text) - len(prompt)
        return right[done : done + number]

    length = 0 if kind == "none" else 3
    found, passes = generate(target(), prompt, 12, heads[kind].draft if kind in heads else oracle, length)
    assert torch.equal(found, right)
    assert passes == {"oracle": 4, "none": 13}.get(kind, passes)
    assert 4 <= passes <= 13


def test_what_has_no_hidden_state_to_draft_from_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="draft of its own"):
        eagle_step(load_model("whisper-large-v3"))
    with pytest.raises(InputError, match="0 Medusa heads are out of range"):
        medusa_heads(described(), 0)

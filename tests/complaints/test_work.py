"""Operations and bytes of attention and projections."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest

from roofline import Model, Work, load_model
from roofline.components.attention import Attention, AttentionBlock
from roofline.components.latent import LatentAttention
from roofline.components.linear import Linear
from roofline.components.mla import MLA
from roofline.edits import apply, unfused
from roofline.model import Layer


@pytest.mark.complaint("D25", "num_key_value_heads")
def test_fused_and_unfused_attention_load_the_same_keys(config_of: Callable[..., dict[str, Any]]) -> None:
    """hahnyuan/LLM-Viewer#12: the fused path loaded keys once per query head."""
    work = Work(4, 1, 1023)
    model = load_model(config_of("llama-3-8b"))
    fused, baseline = model.cost(work).read["state"], apply(model, [unfused()]).cost(work).read["state"]
    assert fused == baseline == 4 * 1024 * 32 * 2 * 8 * 128 * 2


@pytest.mark.complaint("D32", "12582912 = 4*12*64*64*64")
def test_attention_costs_what_its_shapes_say() -> None:
    """pytorch/pytorch#195460: FlopCounterMode counts nothing for the fused operator on a CPU."""
    assert Attention(12, 12, 64, mask="full").cost(Work(1, 64, 0)).matrix_flops == 12582912


@pytest.mark.complaint("D33", "12960 = 4*2*5*9*9*4")
def test_attention_is_counted_once() -> None:
    """pytorch/pytorch#134804: counted in the operator and again in its decomposition."""
    core = Attention(5, 5, 4, mask="full")
    assert core.cost(Work(2, 9, 0)).matrix_flops == 12960


@pytest.mark.complaint("D35", "1536")
def test_queries_behind_longer_keys_see_a_rectangle_and_a_triangle() -> None:
    """facebookresearch/xformers#1402: 4 queries, 10 keys of 8, values of 16; the second product took 6^2 for its pairs.

    The thread counts the triangle as T^2 / 2; the diagonal is whole here, T (T + 1) / 2, hence T / 2 pairs more.
    """
    flops = Attention(1, 1, 8, 16).cost(Work(1, 4, 6)).matrix_flops
    assert flops == 2 * (8 + 16) * (4 * 6 + 4 * 5 // 2)
    assert flops - 2 * (8 + 16) * Fraction(4, 2) == 1536


@pytest.mark.complaint("D36", "134217728")
def test_every_query_head_computes() -> None:
    """facebookresearch/xformers#1404: 8 query heads counted as 2, the number of key-value heads."""
    shape = Work(1, 256, 0)
    assert Attention(8, 2, 64, mask="full").cost(shape).matrix_flops == 134217728
    assert Attention(2, 2, 64, mask="full").cost(shape).matrix_flops == 33554432


@pytest.mark.complaint("D37", "half (S*(S+1)/2)")
def test_a_causal_prefill_is_a_triangle() -> None:
    """modular/modular#5557, AI-Hypercomputer/maxtext#1972: the whole square counted."""
    S = 1000
    causal, full = (Attention(4, 2, 8, mask=mask).cost(Work(3, S, 0)).matrix_flops for mask in ("causal", "full"))
    assert causal == 3 * 4 * 4 * 8 * (S * (S + 1) // 2)
    assert full == 3 * 4 * 4 * 8 * S * S


@pytest.mark.complaint("D38", "FLOPs = 1337344")
def test_a_multiply_add_is_two() -> None:
    """facebookresearch/fvcore#108: multiply-adds of a 784-512-512-10 network under the name of FLOPs."""
    widths = (784, 512, 512, 10)
    layers = [Linear(inputs, outputs) for inputs, outputs in pairwise(widths)]
    assert sum(layer.cost(Work(1, 1)).matrix_flops for layer in layers) == 1337344


@pytest.mark.complaint("D40", "D*Dh*(N+2*Nkv)")
def test_projections_follow_the_heads(
    config_of: Callable[..., dict[str, Any]], attention_blocks: Callable[[Model], list[AttentionBlock]]
) -> None:
    """vllm-project/vllm#19290: 3 D^2 for the projections of Gemma 2, where D is not N H and K is not N."""
    (block,) = {replace(block, mask="causal", size=None) for block in attention_blocks(load_model(config_of("gemma-2-27b")))}
    projection = block.parts[0]
    assert isinstance(projection, Linear)
    assert sum(projection.params().values()) == 4608 * 128 * (32 + 2 * 16)
    assert sum(projection.params().values()) != 3 * 4608**2


@pytest.mark.complaint("D42", "2*B*N*S*((512+64)+512)")
def test_absorbed_and_expanded_latent_attention_differ() -> None:
    """flashinfer-ai/flashinfer#1640: absorbed, a score takes 576 products and a sum 512; expanded, 192 and 128."""
    B, S = 3, 4096
    block = next(block for block in load_model("deepseek-v3").layers[0].blocks if isinstance(block, MLA))

    def core(form: str) -> Any:
        parts = Layer((replace(block, form=form),)).parts
        return next(part for part in parts if isinstance(part, (Attention, LatentAttention)))

    decode = Work(B, 1, S - 1)
    assert core("absorbed").cost(decode).matrix_flops == 2 * B * 128 * S * ((512 + 64) + 512)
    assert core("expanded").cost(decode).matrix_flops == 2 * B * 128 * S * ((128 + 64) + 128)

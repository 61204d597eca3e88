"""Latent attention: the published figures of DeepSeek-V2, V3 and Kimi-K2, and the laws between its forms.

Sources: DeepSeek-V2 (arXiv 2405.04434) tables 1 and 9; the published config.json files; FlashMLA README (layout of the
fp8 cache); parameter totals of the transformers 5.24 classes on the meta device.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from roofline.components.attention import Attention, AttentionBlock
from roofline.components.latent import LatentAttention, layout_bytes
from roofline.components.mla import MLA, Expand
from roofline.configs.load import load_model
from roofline.cost import Cost
from roofline.errors import InputError, UnsupportedModel
from roofline.formats import BF16, FP8
from roofline.symbols import symbols
from roofline.work import Ragged, Work, decode, prefill

V3 = MLA(D=7168, N=128, Q=1536, R=512, P=64, H=128)
SMALL = MLA(D=48, N=6, Q=20, R=14, P=4, H=10, value_dim=8)


def core(block: MLA) -> LatentAttention:
    """The attention kernel of a block."""
    (found,) = (part for part in block.parts if isinstance(part, LatentAttention))
    return found


def per_cached_token(component: LatentAttention, stream: str = "state") -> Cost:
    """What one more cached token adds to a decode step."""
    more, fewer = component.cost(decode(1, 1000)), component.cost(decode(1, 999))
    return Cost({"bf16": more.matrix_flops - fewer.matrix_flops}, {stream: more.read[stream] - fewer.read[stream]})


@pytest.mark.parametrize(
    ("name", "total", "active", "elements"),
    [
        ("deepseek-v2", 235_741_434_880, 21_375_800_320, 34_560),
        ("deepseek-v2-lite", 15_706_484_224, 2_661_150_208, 15_552),
        ("deepseek-v3", 671_026_404_352, 37_552_282_624, 35_136),
        ("deepseek-r1", 671_026_404_352, 37_552_282_624, 35_136),
        ("kimi-k2", 1_026_408_209_408, 32_861_477_888, 35_136),
    ],
)
def test_parameters_and_cache_of_published_models(name: str, total: int, active: int, elements: int) -> None:
    model = load_model(name)
    assert model.params == total
    assert model.active_params == active
    assert model.kv_bytes_per_token == 2 * elements
    assert model.state_bytes(1) == 2 * elements


def test_prefill_form_keeps_parameters_and_state() -> None:
    model = load_model("deepseek-v3")
    assert model.for_prefill is not model
    assert model.for_prefill.params_by_format == model.params_by_format
    assert model.for_prefill.state_bytes(1000) == model.state_bytes(1000)
    assert model.for_prefill.for_prefill is model.for_prefill


def test_absorbed_decode_of_v3_does_278528_flop_over_1152_bytes_per_cached_token() -> None:
    cost = per_cached_token(core(V3))
    assert cost.matrix_flops == 278_528
    assert cost.bytes == 1152
    assert float(cost.intensity) == pytest.approx(241.8, abs=0.05)


def test_fp8_latents_take_656_bytes_and_raise_the_intensity() -> None:
    block = replace(V3, kv=FP8)
    assert layout_bytes(block.layout) == 512 + 4 * 4 + 64 * 2
    assert float(per_cached_token(core(block)).intensity) == pytest.approx(424.6, abs=0.05)
    assert layout_bytes(replace(block, scaled=False).layout) == 576


def test_kimi_k2_has_half_the_heads_and_half_the_intensity() -> None:
    assert float(per_cached_token(core(replace(V3, N=64))).intensity) == pytest.approx(120.9, abs=0.05)


def test_absorbed_matrices_replace_the_expansion() -> None:
    absorbed = sum(part.cost(decode(1, 0)).matrix_flops for part in V3.parts if part.name.startswith("absorb"))
    assert absorbed == 2 * 128 * 128 * 512 + 2 * 128 * 512 * 128 == 33_554_432


def test_expanded_latents_cost_33554432_flop_each_and_81920_per_pair() -> None:
    block = replace(V3, form="expanded")
    expand, attention = (part for part in block.parts if part.name in ("expand", "attention"))
    assert expand.cost(decode(1, 1000)).matrix_flops == 33_554_432 * 1001
    assert attention.cost(decode(1, 1000)).matrix_flops == 81_920 * 1001
    assert attention.cost(decode(1, 1000)).read["activations"] == 128 * 192 * 2 + 81_920 * 1001


def test_expanded_cache_holds_81920_bytes_per_token() -> None:
    block = replace(V3, form="cached")
    assert sum(piece.bytes(1) for piece in block.state()) == 81_920
    (attention,) = (part for part in block.parts if part.kind == "attention")
    assert attention.cost(decode(1, 999)).read["state"] == 81_920 * 1000


@pytest.mark.parametrize("form", ["absorbed", "expanded", "cached"])
def test_every_form_has_the_parameters_of_the_paper(form: str) -> None:
    D, N, Q, R, P, H, V = symbols("D N Q R P H V")
    block = MLA(D=D, N=N, Q=Q, R=R, P=P, H=H, value_dim=V, form=form)
    weights = D * Q + Q * N * (H + P) + D * (R + P) + R * N * (H + V) + N * V * D
    assert (block.params()[BF16] - weights - Q - R).expand() == 0


def test_without_a_query_rank_one_matrix_projects_the_queries() -> None:
    full = MLA(D=48, N=6, Q=None, R=14, P=4, H=10, value_dim=8)
    assert full.params()[BF16] == 48 * 6 * 14 + 48 * 18 + 14 + 14 * 6 * 18 + 6 * 8 * 48


def test_first_prefill_expands_the_new_tokens_only_and_a_chunk_all_latents() -> None:
    (expand,) = (part for part in SMALL.prefill_form().parts if isinstance(part, Expand))
    assert expand.cost(prefill(3, 50)).matrix_flops == 2 * 14 * 6 * 18 * 3 * 50
    assert expand.cost(prefill(3, 50)).read["state"] == 0
    chunk = expand.cost(prefill(3, 50, cached=70))
    assert chunk.matrix_flops == 2 * 14 * 6 * 18 * 3 * 120
    assert chunk.read["state"] == 3 * 70 * 2 * 18


def test_expansion_reads_its_weights_once_for_a_ragged_batch() -> None:
    (expand,) = (part for part in SMALL.prefill_form().parts if isinstance(part, Expand))
    mixed = expand.cost(Ragged((Work(1, 3, 5), Work(2, 7, 0))))
    assert mixed.read["weights"] == expand.cost(prefill(1, 1)).read["weights"]
    assert mixed.matrix_flops == 2 * 14 * 6 * 18 * (8 + 14)


def test_absorbed_core_equals_multi_query_attention_that_stores_its_values_in_its_keys() -> None:
    work = Work(3, 5, 11)
    mine, mqa = core(SMALL).cost(work), Attention(N=6, K=1, H=18, value_dim=14).cost(work)
    assert mine.flops == mqa.flops
    assert mine.write == mqa.write
    assert mine.read["state"] * 32 == mqa.read["state"] * 18


def test_latent_of_rank_2_k_h_without_rotary_has_the_state_of_grouped_attention() -> None:
    K, H = symbols("K H")
    latent = MLA(D=48, N=6, Q=20, R=2 * K * H, P=0, H=H)
    grouped = AttentionBlock(D=48, N=6, K=K, H=H)
    assert sum(piece.bytes(7) for piece in latent.state()) == sum(piece.bytes(7) for piece in grouped.state())


def test_decoding_is_cheaper_absorbed_and_prefilling_cheaper_expanded() -> None:
    model = load_model("deepseek-v3")
    step, prompt = decode(1, 4096), prefill(1, 4096)
    assert model.cost(step).matrix_flops < model.for_prefill.cost(step).matrix_flops
    assert model.cost(prompt).matrix_flops > model.for_prefill.cost(prompt).matrix_flops


def test_unknown_form_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="form: 'naive'"):
        MLA(D=48, N=6, Q=20, R=14, P=4, H=10, form="naive")


def config(**changes: object) -> dict[str, object]:
    """A small DeepSeek-V3 config."""
    base: dict[str, object] = {
        "model_type": "deepseek_v3", "hidden_size": 48, "intermediate_size": 56, "moe_intermediate_size": 22,
        "num_hidden_layers": 4, "num_attention_heads": 6, "q_lora_rank": 20, "kv_lora_rank": 14, "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 3,
        "first_k_dense_replace": 1, "vocab_size": 96, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
    }  # fmt: skip
    return {key: value for key, value in {**base, **changes}.items() if value != "absent"}


def kinds(model_config: dict[str, object]) -> str:
    """One letter per layer: d for a dense feed-forward, m for routed experts."""
    return "".join("m" if any(b.name == "moe" for b in layer.blocks) else "d" for layer in load_model(model_config).layers)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "dmmm"),
        ({"first_k_dense_replace": 3}, "dddm"),
        ({"first_k_dense_replace": 0, "moe_layer_freq": 2}, "mdmd"),
        ({"n_routed_experts": None}, "dddd"),
        ({"mlp_layer_types": ["sparse", "dense", "dense", "sparse"]}, "mddm"),
    ],
)
def test_config_keys_decide_which_layers_are_routed(changes: dict[str, object], expected: str) -> None:
    assert kinds(config(**changes)) == expected


def test_missing_query_rank_is_not_guessed() -> None:
    with pytest.raises(InputError, match="q_lora_rank is missing"):
        load_model(config(q_lora_rank="absent"))
    assert load_model(config(q_lora_rank=None)).params != load_model(config()).params


def test_unknown_kind_of_feed_forward_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="mlp_layer_types has 'hash_moe'"):
        load_model(config(mlp_layer_types=["dense", "hash_moe", "sparse", "sparse"]))


def test_prediction_layers_are_named_as_left_out() -> None:
    assert load_model(config(num_nextn_predict_layers=2)).not_modelled == (
        "2 multi-token-prediction layers (num_nextn_predict_layers)",
    )

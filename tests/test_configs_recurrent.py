"""Readers and catalogue of fixed-state models: parameters, state and formats against published and counted figures.

Parameter counts are those of the transformers 5.24 classes on the meta device, where no other source is named. State
per layer follows vLLM's model_executor/layers/mamba/mamba_utils.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from roofline.components.base import StatePiece
from roofline.components.gated_latent import DepthAttention
from roofline.components.mamba import Mamba2Block
from roofline.configs.load import load_model, read_catalog
from roofline.errors import InputError, UnsupportedModel
from roofline.formats import BF16, FP32
from roofline.model import Model
from roofline.work import Work, decode, prefill

MIB = 2**20


def fixed(model: Model) -> list[tuple[int, dict[str, StatePiece]]]:
    """(layers, pieces of fixed state by name) of the layers that keep any."""
    kept = [(count, {piece.name: piece for piece in pieces if piece.grows_with == "nothing"}) for count, pieces in model.state]
    return [(count, pieces) for count, pieces in kept if pieces]


STATES = {
    "mamba-2.8b": (64, 81_920, 15_360, 0),
    "mamba2-2.7b": (64, 655_360, 16_128, 0),
    "codestral-mamba-7b": (64, 1_048_576, 30_720, 0),
    "jamba-v0.1": (28, 131_072, 24_576, 4 * 2 * 8 * 128 * 2),
    "nemotron-h-8b": (24, 1_048_576, 30_720, 16_384),
    "nemotron-h-56b": (54, 4_194_304, 61_440, 40_960),
    "nemotron-3-nano-30b-a3b": (23, 524_288, 18_432, 6 * 2 * 2 * 128 * 2),
    "qwen3-next-80b-a3b": (36, 524_288, 24_576, 24_576),
    "qwen3.5-397b-a17b": (45, 1_048_576, 36_864, 30_720),
    "kimi-linear-48b-a3b": (20, 524_288, 36_864, 7 * 1152),
    "kimi-k3": (69, 1_572_864, 110_592, 24 * 1152),
}
"""Recurrent layers, elements of recurrence and of convolution per layer, bytes of bf16 cache per token."""


@pytest.mark.parametrize("name", STATES)
def test_state_per_layer_and_growth_per_token(name: str) -> None:
    layers, recurrent, convolution, growth = STATES[name]
    model = load_model(name)
    found = fixed(model)
    assert sum(count for count, _ in found) == layers
    for _, pieces in found:
        assert (pieces["recurrent"].elements, pieces["conv"].elements) == (recurrent, convolution)
    assert model.kv_bytes_per_token == growth
    assert model.state_elements_per_sequence == layers * (recurrent + convolution)


PARAMETERS = {
    "mamba-2.8b": (2_768_345_600, 2_768_345_600),
    "mamba2-2.7b": (2_702_599_680, 2_702_599_680),
    "codestral-mamba-7b": (7_285_403_648, 7_285_403_648),
    "falcon-mamba-7b": (7_272_665_088, 7_272_665_088),
    "jamba-v0.1": (51_570_323_328, 12_110_311_296),
    "jamba-1.5-large": (398_555_145_696, 94_149_338_592),
    "nemotron-h-8b": (8_100_852_736, 8_100_852_736),
    "nemotron-h-56b": (56_324_350_464, 56_324_350_464),
    "nemotron-3-nano-30b-a3b": (31_577_937_344, 3_580_073_408),
    "nemotron-3-super-120b-a12b": (120_668_687_360, 12_770_216_960),
    "nemotron-3-ultra-550b-a55b": (549_308_968_960, 56_058_818_560),
    "qwen3-next-80b-a3b": (79_674_391_296, 3_874_929_408),
    "qwen3.5-27b": (26_895_998_464, 26_895_998_464),
    "qwen3.5-35b-a3b": (34_660_610_688, 3_454_988_928),
    "qwen3.5-122b-a10b": (122_111_526_912, 9_771_288_576),
    "qwen3.5-397b-a17b": (396_346_350_336, 17_349_040_896),
    "rwkv-4-7b": (7_392_649_216, 7_392_649_216),
    "rwkv-7-1.5b": (1_527_404_544, 1_527_404_544),
    "rwkv-7-2.9b": (2_947_735_040, 2_947_735_040),
    "lfm2-1.2b": (1_170_340_608, 1_170_340_608),
}
"""Total parameters, and those that one token meets, input embedding included; RWKV-7 as its paper counts (2503.14456)."""


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_counts_of_the_catalogue(name: str) -> None:
    model = load_model(name)
    assert (model.params, model.active_params) == PARAMETERS[name]


ROUNDED = {
    "bamba-9b": "9.78",
    "granite-4.0-h-small": "32",
    "granite-4.0-h-tiny": "7",
    "falcon-h1-7b": "7.59",
    "zamba2-7b": "7.36",
    "recurrentgemma-2b": "2.68",
    "lfm2-8b-a1b": "8.3",
    "minimax-text-01": "456",
    "kimi-linear-48b-a3b": "49",
}
"""Billions of parameters as the models' pages on Hugging Face print them."""


@pytest.mark.parametrize("name", ROUNDED)
def test_parameter_counts_round_to_those_of_the_model_cards(name: str) -> None:
    printed = ROUNDED[name]
    digits = len(printed.partition(".")[2])
    assert f"{load_model(name).params / 1e9:.{digits}f}" == printed


def test_activated_parameters_of_minimax_and_kimi_k3() -> None:
    """MiniMax-01 (arXiv 2501.08313): 45.9 billion of 456, embedding and head left out; Kimi-K3: 104 billion of 2.8 trillion."""
    minimax, kimi = load_model("minimax-text-01"), load_model("kimi-k3")
    assert f"{(minimax.active_params - 2 * 200_064 * 6144) / 1e9:.1f}" == "45.9"
    assert f"{(kimi.active_params - 163_840 * 7168) / 1e9:.0f}" == "104"
    assert f"{kimi.params / 1e12:.1f}" == "2.8"


KIMI = {
    "model_type": "kimi_linear", "hidden_size": 2304, "intermediate_size": 9216, "moe_intermediate_size": 1024,
    "num_hidden_layers": 27, "num_attention_heads": 32, "num_key_value_heads": 32, "q_lora_rank": None,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "num_experts": 256,
    "num_experts_per_token": 8, "num_shared_experts": 1, "first_k_dense_replace": 1, "vocab_size": 163840,
    "tie_word_embeddings": False, "linear_num_heads": 32, "linear_head_dim": 128, "linear_conv_kernel_dim": 4,
    "layer_types": ["full_attention" if index and index % 4 == 0 else "linear_attention" for index in range(27)],
    "torch_dtype": "bfloat16",
}  # fmt: skip


def test_kimi_linear_with_the_layer_pattern_of_the_transformers_class() -> None:
    model = load_model(KIMI)
    assert (model.params, model.active_params) == (49_133_074_464, 3_494_852_640)
    assert model.kv_bytes_per_token == 6 * 1152


def test_recurrent_state_of_qwen3_6_27b_for_four_sequences() -> None:
    """lmstudio-ai/lmstudio-bug-tracker#1862: 48 DeltaNet layers; 598.5 MiB where both kinds of state are kept in fp32."""
    model = load_model("qwen3.6-27b")
    elements = 48 * (48 * 128 * 128 + 10240 * 3)
    assert model.state_elements_per_sequence == elements
    assert 4 * FP32.bytes(elements) == 598.5 * MIB
    assert model.kv_bytes_per_token * 262_144 == 16_384 * MIB


def test_recurrence_in_fp32_and_convolution_in_the_model_dtype() -> None:
    for name, layers, values, channels in (
        ("qwen3.6-27b", 48, 48 * 128 * 128, 10240),
        ("kimi-linear-48b-a3b", 20, 524_288, 12_288),
    ):
        model = load_model(name)
        assert model.state_bytes_per_sequence == layers * (4 * values + 2 * 3 * channels)


def test_eight_of_thirty_two_layers_of_qwen3_5_9b_grow() -> None:
    """AlexsJones/llmfit#203. Dimensions: defaults of transformers' Qwen3_5TextConfig."""
    config = {
        "model_type": "qwen3_5_text", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32,
        "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256, "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "vocab_size": 248320, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    model = load_model(config)
    assert model.params == 8_953_803_264
    assert model.kv_bytes_per_token == 8 * 2 * 4 * 256 * 2
    assert sum(count for count, _ in fixed(model)) == 24


def test_granite_4_tiny_grows_by_its_four_attention_layers_only() -> None:
    """ollama/ollama#12186: a context eight times as long, with attention in 4 of 40 layers."""
    model = load_model("granite-4.0-h-tiny")
    assert model.kv_bytes_per_token == 4 * 2 * 4 * 128 * 2
    assert model.state_bytes(131_072) - model.state_bytes(16_384) == (131_072 - 16_384) * 8192
    assert sum(count for count, _ in fixed(model)) == 36


def test_nemotron_h_state_is_attention_layers_plus_fixed_state() -> None:
    """NVIDIA/TensorRT-LLM#5371: M, *, - and E of the pattern; state per sequence beside the cache."""
    model = load_model("nemotron-h-8b")
    pattern = read_catalog("nemotron-h-8b")["config"]["hybrid_override_pattern"]
    kinds = {"M": "recurrent", "*": "kv", "-": None}
    found = [next((piece.name for piece in layer.state() if piece.name != "conv"), None) for layer in model.layers]
    assert found == [kinds[letter] for letter in pattern]
    assert model.state_bytes(1000) == 1000 * 16_384 + 24 * 2 * (1_048_576 + 30_720)


def test_state_of_a_hybrid_is_the_sum_over_all_its_groups_of_layers() -> None:
    """vllm-project/vllm#36030: every kind of layer counts, not the first one alone."""
    model = load_model("jamba-v0.1")
    assert len(model.state) > 1
    by_layer = sum(piece.bytes(5000) for layer in model.layers for piece in layer.state())
    assert model.state_bytes(5000) == by_layer == 5000 * 16_384 + 28 * 2 * (131_072 + 24_576)


@pytest.mark.parametrize("name", ["codestral-mamba-7b", "qwen3-next-80b-a3b", "nemotron-h-8b", "minimax-text-01"])
def test_a_prefill_runs_the_recurrence_in_chunks(name: str) -> None:
    model = load_model(name)
    work = prefill(1, 1024)
    assert model.for_prefill.params == model.params
    assert model.for_prefill.state == model.state
    assert model.for_prefill.cost(work).matrix_flops > model.cost(work).matrix_flops
    assert model.for_prefill.cost(work).flops["vector"] < model.cost(work).flops["vector"]


def test_mamba_prefills_as_it_decodes() -> None:
    model = load_model("mamba-2.8b")
    assert model.for_prefill is model


def test_decode_traffic_of_a_mamba_model_is_weights_and_twice_the_state() -> None:
    model = load_model("codestral-mamba-7b")
    cost = model.cost(decode(8, 100_000))
    table = 2 * 32_768 * 4096
    assert cost.read["weights"] == model.weight_bytes - table + 8 * 2 * 4096
    assert cost.read["state"] == cost.write["state"] == 8 * model.state_bytes_per_sequence
    assert cost.read["state"] == model.cost(decode(8, 0)).read["state"]


def test_zamba_stores_the_shared_block_once_and_reads_it_at_every_use() -> None:
    config = read_catalog("zamba2-7b")["config"]
    uses = len(config["hybrid_layer_ids"])
    once, twice = load_model({**config, "num_mem_blocks": 1}), load_model({**config, "num_mem_blocks": 2})
    wide, width, F = 2 * 3584, 3584, 14_336
    block = 3 * wide * wide + wide * width + 3 * width * F + wide + width
    assert twice.params - once.params == block
    work = decode(1, 10)
    assert once.cost(work) == twice.cost(work)
    assert once.cost(work).read["weights"] > 2 * (once.params - 32_000 * width + (uses - 1) * block)


def test_quantised_experts_leave_other_modules_in_the_model_dtype() -> None:
    """NVFP4 experts as ModelOpt writes them: everything that the list names stays."""
    config = dict(read_catalog("nemotron-3-super-120b-a12b")["config"])
    config["quantization_config"] = {
        "quant_method": "modelopt", "quant_algo": "NVFP4",
        "ignore": ["lm_head", "*.in_proj", "*.out_proj", "*.[qkvo]_proj", "*.shared_experts*", "*latent_proj*"],
    }  # fmt: skip
    model = load_model(config)
    small = {fmt.name: number for fmt, number in model.params_by_format.items()}
    assert sum(small.values()) == 120_668_687_360
    assert small["nvfp4"] == 40 * 512 * 2 * 1024 * 2688


def test_the_shapes_of_kimi_k3s_experts_decide_its_bytes() -> None:
    formats = {fmt.element_bits: number for fmt, number in load_model("kimi-k3").params_by_format.items()}
    assert formats[4] == 92 * 896 * 3 * 3584 * 3072


def test_parameters_of_kimi_k3_are_those_of_its_published_shapes() -> None:
    """Matrix by matrix: hidden 7168, 96 heads of 128, 896 experts on a latent of 3584, 69 delta and 24 latent layers."""
    D, V, latent, values = 7168, 163_840, 3584, 96 * 128
    delta = 5 * D * values + D * 128 + 128 * values + D * 96 + 4 * 3 * values + 96 + values + 128
    attention = D * 1536 + 1536 + 1536 * 96 * 192 + D * 576 + 512 + 512 * 96 * 256 + 2 * D * values
    experts = 896 * 3 * latent * 3072 + 2 * D * latent + latent + 896 * D + 3 * D * 2 * 3072
    norms, depth = 93 * 2 * D + D, 93 * 2 * 2 * D + 2 * D
    total = 2 * V * D + 3 * D * 33_792 + 92 * experts + 69 * delta + 24 * attention + norms + depth
    assert load_model("kimi-k3").params == total


def test_depth_attention_of_kimi_k3_sees_the_blocks_of_twelve_layers_that_are_behind_it() -> None:
    model = load_model("kimi-k3")
    blocks = [[part.blocks for part in layer.blocks if isinstance(part, DepthAttention)] for layer in model.layers]
    assert [blocks[index] for index in (0, 1, 11, 12, 13, 92)] == [[0, 1], [1, 1], [1, 1], [1, 2], [2, 2], [8, 8]]
    assert isinstance(model.final[0], DepthAttention)
    assert model.final[0].blocks == 8


def test_depth_attention_reads_every_block_and_the_running_sum() -> None:
    cost = DepthAttention(D=10, blocks=3).cost(Work(2, 5, 0))
    assert cost.read["activations"] == 2 * 10 * 10 * (3 + 2)
    assert cost.write["activations"] == 2 * 10 * 10 * 2
    assert cost.flops["vector"] == 10 * 10 * (6 * 4 + 1 + 4)


CLASS_DEFAULTS = {
    "recurrent_gemma": (
        {**read_catalog("recurrentgemma-2b")["config"], "num_key_value_heads": 10, "intermediate_size": 7680},
        2_010_263_040,
    ),
    "zamba2": (
        {
            "model_type": "zamba2", "hidden_size": 2560, "num_hidden_layers": 54, "num_attention_heads": 32, "mamba_d_state": 64,
            "mamba_d_conv": 4, "mamba_expand": 2, "mamba_ngroups": 1, "n_mamba_heads": 8, "adapter_rank": 128,
            "vocab_size": 32000, "hybrid_layer_ids": [6, 12, 18, 24, 30, 36, 42, 47, 51], "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
        },
        2_481_848_336,
    ),
    "olmo_hybrid": (
        {
            "model_type": "olmo_hybrid", "hidden_size": 3840, "intermediate_size": 11008, "num_hidden_layers": 32,
            "num_attention_heads": 30, "num_key_value_heads": 30, "linear_num_key_heads": 30, "linear_num_value_heads": 30,
            "linear_key_head_dim": 96, "linear_value_head_dim": 192, "linear_conv_kernel_dim": 4, "vocab_size": 100_352,
            "layer_types": ["full_attention" if index % 4 == 3 else "linear_attention" for index in range(32)],
            "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        },
        7_430_870_688,
    ),
    "falcon_h1": (
        {
            "model_type": "falcon_h1", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "mamba_d_ssm": 1024, "mamba_n_heads": 128,
            "mamba_d_head": "auto", "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4,
            "vocab_size": 128_000, "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        },
        8_514_961_408,
    ),
    "lfm2_moe": (
        {
            **read_catalog("lfm2-8b-a1b")["config"], "num_hidden_layers": 32,
            "layer_types": ["full_attention" if index % 4 == 2 else "conv" for index in range(32)],
        },
        11_280_731_136,
    ),
}  # fmt: skip
"""Configs with the defaults of transformers 5.24's classes, and the parameters of those classes on the meta device."""


@pytest.mark.parametrize("family", CLASS_DEFAULTS)
def test_parameters_of_class_defaults(family: str) -> None:
    config, right = CLASS_DEFAULTS[family]
    assert load_model(config).params == right


MAMBA2 = {
    "model_type": "mamba2", "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 16, "state_size": 32,
    "n_groups": 2, "conv_kernel": 4, "expand": 2, "vocab_size": 100, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
NEMOTRON = {
    key: value for key, value in read_catalog("nemotron-h-8b")["config"].items() if key not in ("hybrid_override_pattern",)
}  # fmt: skip


def test_state_format_follows_the_config_and_is_noted_where_it_does_not_say() -> None:
    silent, spoken = load_model(MAMBA2), load_model({**MAMBA2, "mamba_ssm_dtype": "float32"})
    assert {pieces["recurrent"].format for _, pieces in fixed(silent)} == {BF16}
    assert {pieces["recurrent"].format for _, pieces in fixed(spoken)} == {FP32}
    assert {pieces["conv"].format for _, pieces in fixed(spoken)} == {BF16}
    assert any("recurrent state" in note for note in silent.assumes)
    assert not any("recurrent state" in note for note in spoken.assumes)


def test_block_types_spell_the_same_pattern_as_letters() -> None:
    letters = load_model({**NEMOTRON, "hybrid_override_pattern": "M-*-", "num_hidden_layers": 4})
    words = load_model({**NEMOTRON, "layers_block_type": ["mamba", "mlp", "attention", "mlp"], "num_hidden_layers": 4})
    newer = load_model(
        {**NEMOTRON, "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"], "num_hidden_layers": 4}
    )
    assert letters.layers == words.layers == newer.layers


def test_heads_follow_from_the_width_where_the_config_says_auto() -> None:
    config = read_catalog("bamba-9b")["config"]
    assert load_model({**config, "mamba_d_head": "auto"}).layers == load_model(config).layers
    block = load_model(config).layers[0].blocks[1]
    assert isinstance(block, Mamba2Block)
    assert (block.heads, block.head_dim) == (128, 64)


def changed(base: dict[str, Any], **keys: Any) -> dict[str, Any]:
    return {name: value for name, value in (base | keys).items() if value != "absent"}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (changed(MAMBA2, head_dim=15), "do not make the mixer's width of 128"),
        (changed(MAMBA2, state_size="absent"), "ssm_state_size"),
        (changed(MAMBA2, num_heads="absent", head_dim="absent"), "mamba_num_heads is missing"),
        (changed(MAMBA2, mamba_ssm_dtype="int3"), "mamba_ssm_dtype 'int3'"),
        (changed(NEMOTRON), "hybrid_override_pattern is missing"),
        (changed(NEMOTRON, hybrid_override_pattern="M-*-"), "4 letters for 52 layers"),
        (changed(KIMI, layer_types="absent"), "full_attn_layers and kda_layers are missing"),
        (changed(KIMI, linear_attn_config={"full_attn_layers": [1], "kda_layers": [1, 2]}), "each of the 27 layers once"),
        (changed(KIMI, mlp_layer_types=["dense"]), "mlp_layer_types has 1 entries for 27 layers"),
        (changed(read_catalog("recurrentgemma-2b")["config"], block_types=[]), "block_types is missing"),
        (changed(read_catalog("zamba2-7b")["config"], hybrid_layer_ids="absent"), "layers_block_type is missing"),
        (changed(read_catalog("rwkv-7-1.5b")["config"], head_dim=60), "head_dim 60 does not divide"),
        (changed(read_catalog("rwkv-7-1.5b")["config"], a_low_rank_dim="absent"), "a_low_rank_dim"),
        (changed(read_catalog("zamba2-7b")["config"], num_attention_heads=33), "does not divide twice the hidden_size"),
    ],
)
def test_a_bad_config_is_refused_with_the_key_that_is_wrong(config: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_model(config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (changed(NEMOTRON, hybrid_override_pattern="MX", num_hidden_layers=2), "'X'"),
        (changed(NEMOTRON, layers_block_type=["mamba", "retention"], num_hidden_layers=2), "hybrid_override_pattern has"),
        (changed(read_catalog("lfm2-1.2b")["config"], layer_types=["retention"] * 16), "'retention' layers"),
        (changed(read_catalog("minimax-text-01")["config"], shared_intermediate_size=8), "shared_intermediate_size"),
        ({"model_type": "xlstm"}, "mLSTM"),
        ({"model_type": "rwkv6"}, "RWKV-6"),
        (changed(read_catalog("rwkv-7-1.5b")["config"], attn={"layers": [3]}), "attention layers between"),
        (changed(read_catalog("rwkv-7-1.5b")["config"], value_dim=[4096] * 24), "value_dim"),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        load_model(config)


def test_prediction_layers_are_left_out_and_named() -> None:
    for name, note in (("qwen3.5-27b", "mtp_num_hidden_layers"), ("nemotron-3-super-120b-a12b", "num_nextn_predict_layers")):
        assert any(note in left_out for left_out in load_model(name).not_modelled)


@pytest.mark.parametrize("name", sorted({*STATES, *PARAMETERS, *ROUNDED}))
def test_every_model_costs_something_exact_in_every_step(name: str) -> None:
    model = load_model(name)
    for work in (Work(1, 1, 0), Work(1, 1, 4096)):
        assert type(model.cost(work).matrix_flops) is int
    first, later = model.cost(decode(1, 1)), model.cost(decode(1, 4097))
    growth = later.read["state"] - first.read["state"]
    full = model.kv_bytes_per_token * 4096
    assert growth == full or name == "recurrentgemma-2b"

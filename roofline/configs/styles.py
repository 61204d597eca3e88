"""What the code of each dense family fixes and its config does not say: the styles.

Which norms, which biases, which feed-forward, what a missing key means. Whatever the config itself states decides.
Sources: the configuration and modelling files of transformers 5.24 (``models/<family>``), and the modelling files that
families outside it publish beside their weights (baichuan, chatglm, internlm2, mimo, minicpm, orion, phi-msft, qwen,
xverse).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from roofline.configs.config import Config

Flag = bool | str | tuple[str, bool]
"""True, False, the config key that says which (False where it is missing), or (key, what a missing key means)."""


@dataclass(frozen=True)
class Modules:
    """Module names of a checkpoint, which its quantisation lists go by.

    Fused projections share one name. Prefixes end in a dot.
    """

    layers: str = "model.layers."
    attention: str = "self_attn."
    qkvo: tuple[str, str, str, str] = ("q_proj", "k_proj", "v_proj", "o_proj")
    mlp: str = "mlp."
    gate_up_down: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    head: str = "lm_head"


@dataclass(frozen=True)
class Style:
    """What a family's code fixes.

    Attributes:
        norm: "rms", "layer" (weight and bias), "layer-no-bias", "none" (no parameters).
        norms: "pre" (before mixer and feed-forward), "post" (after both), "sandwich" (both), "parallel" (one norm, mixer
            and feed-forward side by side), "parallel-two".
        qkv_bias, o_bias, mlp_bias, head_bias: biases.
        gated: three-matrix feed-forward.
        qk_norm: as in AttentionBlock, where ``qk_norm_if`` holds; qk_norm_bias: with a shift.
        tied: whether head and embedding share weights where the config does not say.
        positions: config key of a learned position table, "" for none.
        position_offset: extra rows of that table.
        rotary: whether heads are rotated; "windowed": only those of windowed layers, where there are any.
        rotary_part: the part of each head that is rotated where the config does not say.
        final_norm: a norm before the head.
        period: layers from one full-attention layer to the next where the code alternates, None where it does not.
        still: every so many layers one does not rotate, unless the config says otherwise; 0 for none.
        windows: whether the code reads sliding_window at all.
        kv_heads: key-value heads where the config does not say: a number, "all" (the family knows no others), None for
            as many as query heads, noted.
        head_dim: head dimension where the config does not say, None for D / N.
        widening: F / D where the config does not say, 0 where it must.
        embedding_norm: a norm behind the embedding.
        modules: names of the modules.
        reads: feature keys of ``guard`` that the style or its reader takes into account, beside those of its flags.
    """

    norm: str = "rms"
    norms: str = "pre"
    qkv_bias: Flag = False
    o_bias: Flag = False
    mlp_bias: Flag = False
    head_bias: Flag = False
    gated: bool = True
    qk_norm: str = ""
    qk_norm_if: Flag = True
    qk_norm_bias: bool = False
    tied: bool = False
    positions: str = ""
    position_offset: int = 0
    rotary: bool | str = True
    rotary_part: float = 1.0
    final_norm: bool = True
    period: int | None = None
    still: int = 0
    windows: bool = False
    kv_heads: int | str | None = None
    head_dim: int | None = None
    widening: int = 0
    embedding_norm: bool = False
    modules: Modules = Modules()
    reads: tuple[str, ...] = ()

    @property
    def keys(self) -> set[str]:
        """The config keys that its flags read."""
        flags = (self.qkv_bias, self.o_bias, self.mlp_bias, self.head_bias, self.qk_norm_if)
        named = {flag if isinstance(flag, str) else flag[0] for flag in flags if not isinstance(flag, bool)}
        return named | set(self.reads) | ({"no_rope_layers"} if self.still else set())


def resolve(value: Flag, config: Config) -> bool:
    """A flag of a style: itself, or what the config key it names says."""
    if isinstance(value, bool):
        return value
    key, default = (value, False) if isinstance(value, str) else value
    return config.flag(key, default)


ATTENTION_BIAS: dict[str, Any] = {"qkv_bias": "attention_bias", "o_bias": "attention_bias"}
BIASES: dict[str, Any] = {**ATTENTION_BIAS, "mlp_bias": "mlp_bias"}
ALL_BIASES: dict[str, Any] = {"qkv_bias": True, "o_bias": True, "mlp_bias": True}

FUSED = Modules(qkvo=("qkv_proj", "qkv_proj", "qkv_proj", "o_proj"), gate_up_down=("gate_up_proj", "gate_up_proj", "down_proj"))
FUSED_MLP = Modules(gate_up_down=("gate_up_proj", "gate_up_proj", "down_proj"))
GPT2 = Modules("transformer.h.", "attn.", ("c_attn", "c_attn", "c_attn", "c_proj"), "mlp.", ("c_fc", "c_fc", "c_proj"))
GPTJ = Modules("transformer.h.", "attn.", ("q_proj", "k_proj", "v_proj", "out_proj"), "mlp.", ("fc_in", "fc_in", "fc_out"))
MEGATRON = ("query_key_value", "query_key_value", "query_key_value", "dense")
MEGATRON_MLP = ("dense_h_to_4h", "dense_h_to_4h", "dense_4h_to_h")
NEOX = Modules("gpt_neox.layers.", "attention.", MEGATRON, "mlp.", MEGATRON_MLP, "embed_out")
BLOOM = Modules("transformer.h.", "self_attention.", MEGATRON, "mlp.", MEGATRON_MLP)
CHATGLM = Modules("transformer.encoder.layers.", "self_attention.", MEGATRON, "mlp.", MEGATRON_MLP, "transformer.output_layer")
OPT = Modules("model.decoder.layers.", "self_attn.", ("q_proj", "k_proj", "v_proj", "out_proj"), "", ("fc1", "fc1", "fc2"))
MPT = Modules("transformer.blocks.", "attn.", ("Wqkv", "Wqkv", "Wqkv", "out_proj"), "ffn.", ("up_proj", "up_proj", "down_proj"))
PHI = Modules(qkvo=("q_proj", "k_proj", "v_proj", "dense"), gate_up_down=("fc1", "fc1", "fc2"))
QWEN = Modules("transformer.h.", "attn.", ("c_attn", "c_attn", "c_attn", "c_proj"), "mlp.", ("w2", "w1", "c_proj"))
INTERNLM2 = Modules(
    attention="attention.", qkvo=("wqkv", "wqkv", "wqkv", "wo"),
    mlp="feed_forward.", gate_up_down=("w1", "w3", "w2"), head="output",
)  # fmt: skip
PHI_MSFT = Modules(
    "transformer.h.", "mixer.", ("Wqkv", "Wqkv", "Wqkv", "out_proj"), "mlp.", ("fc1", "fc1", "fc2"), "lm_head.linear"
)  # fmt: skip

STYLES: dict[str, Style] = {
    "llama": Style(**BIASES),
    "arcee": Style(**BIASES, gated=False),
    "apertus": Style(**ATTENTION_BIAS, gated=False, qk_norm="head"),
    "aquila": Style(),
    "baichuan": Style(kv_heads="all", modules=Modules(qkvo=("W_pack", "W_pack", "W_pack", "o_proj"))),
    "bloom": Style(
        norm="layer", gated=False, tied=True, kv_heads="all", widening=4, rotary=False, embedding_norm=True, modules=BLOOM,
        **ALL_BIASES,
    ),
    "chatglm": Style(
        qkv_bias=("add_qkv_bias", False), o_bias="add_bias_linear", mlp_bias="add_bias_linear", rotary_part=0.5, modules=CHATGLM,
    ),
    "codegen": Style(
        norm="layer", norms="parallel", gated=False, mlp_bias=True, head_bias=True, kv_heads="all", widening=4, modules=GPTJ,
    ),
    "cohere": Style(
        norm="layer-no-bias", norms="parallel", tied=True, qk_norm="full", qk_norm_if="use_qk_norm", **ATTENTION_BIAS,
    ),
    "cohere2": Style(
        norm="layer-no-bias", norms="parallel", tied=True, rotary="windowed", period=4, windows=True, **ATTENTION_BIAS,
    ),
    "cwm": Style(mlp_bias="mlp_bias", windows=True, kv_heads=8, head_dim=128),
    "ernie4_5": Style(qkv_bias="use_bias", o_bias="use_bias", mlp_bias="use_bias", tied=True, head_dim=128),
    "exaone": Style(**BIASES),
    "exaone4": Style(norms="post", qk_norm="head", rotary="windowed", period=4, windows=True),
    "falcon": Style(
        norm="layer", qkv_bias="bias", o_bias="bias", mlp_bias="bias", gated=False, tied=True, widening=4, modules=BLOOM,
        reads=("multi_query", "parallel_attn", "new_decoder_architecture"),
    ),
    "gemma": Style(tied=True, head_dim=256, **ATTENTION_BIAS),
    "gemma2": Style(norms="sandwich", tied=True, period=2, windows=True, head_dim=256, **ATTENTION_BIAS),
    "gemma3_text": Style(norms="sandwich", qk_norm="head", tied=True, period=6, windows=True, head_dim=256, **ATTENTION_BIAS),
    "vaultgemma": Style(tied=True, period=2, windows=True, head_dim=256, **ATTENTION_BIAS),
    "glm": Style(qkv_bias=("attention_bias", True), rotary_part=0.5, kv_heads=2, head_dim=128, modules=FUSED_MLP),
    "glm4": Style(
        norms="sandwich", qkv_bias=("attention_bias", True), rotary_part=0.5, kv_heads=2, head_dim=128, modules=FUSED_MLP,
    ),
    "gpt2": Style(
        norm="layer", gated=False, tied=True, kv_heads="all", widening=4, rotary=False, positions="n_positions", modules=GPT2,
        **ALL_BIASES,
    ),
    "gpt_bigcode": Style(
        norm="layer", gated=False, tied=True, widening=4, rotary=False, positions="n_positions", modules=GPT2,
        reads=("multi_query",), **ALL_BIASES,
    ),
    "gpt_neo": Style(
        norm="layer", o_bias=True, mlp_bias=True, gated=False, tied=True, kv_heads="all", widening=4, rotary=False,
        positions="max_position_embeddings", windows=True,
        modules=Modules(
            "transformer.h.", "attn.attention.", ("q_proj", "k_proj", "v_proj", "out_proj"), "mlp.", ("c_fc", "c_fc", "c_proj")
        ),
    ),
    "gpt_neox": Style(
        norm="layer", qkv_bias=("attention_bias", True), o_bias=("attention_bias", True), mlp_bias=True, gated=False,
        kv_heads="all", rotary_part=0.25, modules=NEOX, reads=("use_parallel_residual",),
    ),
    "gptj": Style(
        norm="layer", norms="parallel", gated=False, mlp_bias=True, head_bias=True, kv_heads="all", widening=4, modules=GPTJ,
    ),
    "granite": Style(**BIASES),
    "helium": Style(qkv_bias="attention_bias", mlp_bias="mlp_bias", head_dim=128),
    "hunyuan_v1_dense": Style(qk_norm="head", qk_norm_if=("use_qk_norm", True), **ATTENTION_BIAS),
    "hyperclovax": Style(**BIASES),
    "internlm": Style(qkv_bias="bias", o_bias="bias"),
    "internlm2": Style(qkv_bias="bias", o_bias="bias", modules=INTERNLM2),
    "internlm3": Style(qkv_bias="qkv_bias", o_bias="bias", mlp_bias="bias", kv_heads=2, head_dim=128),
    "iquestcoder": Style(**BIASES, head_dim=128),
    "jais2": Style(
        norm="layer", qkv_bias=("attention_bias", True), o_bias=("attention_bias", True), mlp_bias=("mlp_bias", True),
        gated=False,
    ),
    "mimo": Style(qkv_bias=("attention_bias", True), windows=True),
    "minicpm": Style(tied=True),
    "ministral": Style(windows=True, kv_heads=8),
    "ministral3": Style(windows=True, kv_heads=8, head_dim=128),
    "mistral": Style(windows=True, kv_heads=8),
    "mpt": Style(
        norm="layer-no-bias", gated=False, tied=True, rotary=False, modules=MPT, reads=("attn_config",),
    ),
    "nemotron": Style(norm="layer", gated=False, rotary_part=0.5, **BIASES),
    "nemotron-nas": Style(**BIASES, reads=("block_configs",)),
    "olmo": Style(norm="none", **ATTENTION_BIAS),
    "olmo2": Style(norms="post", qk_norm="full", **ATTENTION_BIAS),
    "olmo3": Style(norms="post", qk_norm="full", period=4, windows=True, **ATTENTION_BIAS),
    "opt": Style(
        norm="layer", qkv_bias=("enable_bias", True), o_bias=("enable_bias", True), mlp_bias=("enable_bias", True), gated=False,
        tied=True, kv_heads="all", rotary=False, positions="max_position_embeddings", position_offset=2, modules=OPT,
    ),
    "orion": Style(norm="layer"),
    "persimmon": Style(
        norm="layer", gated=False, kv_heads="all", qk_norm="head", qk_norm_if=("qk_layernorm", True), qk_norm_bias=True,
        rotary_part=0.5, modules=Modules(qkvo=MEGATRON, gate_up_down=MEGATRON_MLP), **ALL_BIASES,
    ),
    "phi": Style(
        norm="layer", norms="parallel", gated=False, head_bias=True, qk_norm="head", qk_norm_if="qk_layernorm", qk_norm_bias=True,
        rotary_part=0.5, modules=PHI, **ALL_BIASES,
    ),
    "phi-msft": Style(
        norm="layer", norms="parallel", gated=False, head_bias=True, rotary_part=0.5, widening=4, modules=PHI_MSFT,
        **ALL_BIASES,
    ),
    "phi3": Style(windows=True, modules=FUSED),
    "qwen": Style(qkv_bias=True, kv_heads="all", modules=QWEN, reads=("qkv_bias",)),
    "qwen2": Style(qkv_bias=True, windows=True, kv_heads=32, reads=("attention_bias", "qkv_bias")),
    "Dream": Style(qkv_bias=True, windows=True, kv_heads=32),
    "qwen3": Style(qk_norm="head", windows=True, kv_heads=32, head_dim=128, **ATTENTION_BIAS),
    "qwen3_vl_text": Style(qk_norm="head", windows=True, kv_heads=32, head_dim=128, **ATTENTION_BIAS),
    "seed_oss": Style(
        qkv_bias=("attention_bias", True), o_bias="attention_out_bias", mlp_bias="mlp_bias", kv_heads=8, head_dim=128,
    ),
    "smollm3": Style(tied=True, windows=True, still=4, kv_heads=4, **BIASES),
    "stablelm": Style(
        norm="layer", qkv_bias="use_qkv_bias", qk_norm="full", qk_norm_if="qk_layernorm", rotary_part=0.25, kv_heads=32,
        reads=("use_parallel_residual",),
    ),
    "starcoder2": Style(
        norm="layer", qkv_bias=("use_bias", True), o_bias=("use_bias", True), mlp_bias=("use_bias", True), gated=False, tied=True,
        windows=True, kv_heads=2, modules=Modules(gate_up_down=("c_fc", "c_fc", "c_proj")),
    ),
    "xglm": Style(
        norm="layer", gated=False, tied=True, kv_heads="all", rotary=False,
        modules=Modules("model.layers.", "self_attn.", ("q_proj", "k_proj", "v_proj", "out_proj"), "", ("fc1", "fc1", "fc2")),
        **ALL_BIASES,
    ),
    "xverse": Style(kv_heads="all"),
}  # fmt: skip

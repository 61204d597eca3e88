"""DeepSeek-V4: window, CSA and HCA attention, hyper-connections, experts in 4 bits.

Keys decide: ``compress_ratios`` (0, 4 or 128 per layer; a last entry belongs to the multi-token-prediction layer) or
``layer_types`` with ``compress_rates`` say which layer compresses how. The first ``num_hash_layers`` layers pick experts
by token id; they keep their router for the weights, so that they cost what the others cost.
Source: transformers 5.24, models/deepseek_v4; counts are checked against its class on the meta device.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from roofline.components.compressed import INDEX_KEY, CompressedAttention
from roofline.components.hyper_connections import HyperConnection, HyperHead, hyper_apply, hyper_spread
from roofline.components.moe import MoE
from roofline.configs.config import Config
from roofline.configs.dense import assemble, formats_of, make_norm
from roofline.configs.readers.deepseek import STYLE, moe_of, without_prediction_layers
from roofline.configs.storage import Storage
from roofline.errors import InputError, UnsupportedModel
from roofline.formats import FORMATS, FP8, Format
from roofline.model import Layer, Model

WINDOW, CSA, HCA = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
OF_RATIO = {0: WINDOW, 4: CSA, 128: HCA}
RATES = {CSA: 4, HCA: 128}
PROJECTIONS = {
    "q_a": "q_a_proj", "q_b": "q_b_proj", "kv": "kv_proj", "o_a": "o_a_proj", "o_b": "o_b_proj",
    "index": "compressor.indexer.q_b_proj",
}  # fmt: skip
FP4_EXPERTS: Format = replace(FORMATS["mxfp4"], name="mxfp4-fp8", unit="fp8", note="one 8-bit scale per 32; multiplied in fp8")
"""V4's experts: stored in 4 bits, widened to fp8 without loss before they are multiplied (arXiv 2606.19348)."""


def schedule(config: Config, layers: int) -> list[tuple[str, int]]:
    """(kind, tokens per compressed entry) of each layer."""
    ratios = config.per_layer("compress_ratios", layers)
    types = config.per_layer("layer_types", layers)
    if types is not None:
        rates = {kind: config.section("compress_rates").size_or(rate, kind) for kind, rate in RATES.items()}
        for found in types[:layers]:
            if found != WINDOW and found not in rates:
                raise UnsupportedModel(f"config: {config.where}layer_types has {found!r:.40}; DeepSeek-V4's three are supported")
        return [(found, rates.get(found, 0)) for found in types[:layers]]
    if ratios is None:
        raise InputError(f"config: {config.where}compress_ratios (or layer_types) is missing; it says which layers compress")
    for found in ratios[:layers]:
        if found not in OF_RATIO:
            raise UnsupportedModel(f"config: {config.where}compress_ratios has {found!r:.40}; 0, 4 and 128 are supported")
    return [(OF_RATIO[found], found) for found in ratios[:layers]]


def attention_of(config: Config, storage: Storage, prefix: str, kind: str, every: int) -> CompressedAttention:
    """The attention of one layer."""
    heads, width, groups = config.heads, config.size("head_dim"), config.size("o_groups")
    if config.size_or(1, "num_key_value_heads", note=False) != 1:
        raise UnsupportedModel(f"config: {config.where}num_key_value_heads other than 1 is not supported with compressed entries")
    if heads * width % groups:
        raise InputError(f"config: {config.where}o_groups {groups} does not divide the {heads} x {width} output elements")
    rotary = config.size("qk_rope_head_dim", least=0) if "qk_rope_head_dim" in config else config.rotary
    if rotary >= width:
        raise InputError(f"config: {config.where}qk_rope_head_dim {rotary} is not below head_dim {width}")
    indexed: dict[str, Any] = {}
    if kind == CSA:
        indexed = {
            "overlap": True,
            "k": config.size("index_topk"),
            "index_heads": config.size("index_n_heads"),
            "index_dim": config.size("index_head_dim"),
        }
    return CompressedAttention(
        D=config.width,
        N=heads,
        H=width,
        P=rotary,
        Q=config.size("q_lora_rank"),
        groups=groups,
        rank=config.size("o_lora_rank"),
        window=config.size("sliding_window"),
        every=every,
        kv=FP8 if storage.cached is None else storage.cached,
        base=storage.base,
        **indexed,
        **formats_of(storage, prefix, PROJECTIONS),  # type: ignore[arg-type]
    )


def experts_of(config: Config, storage: Storage, index: int) -> MoE:
    """The experts of one layer, in the format that the quantisation names for them, else expert_dtype."""
    block = moe_of(config, storage, f"model.layers.{index}.mlp.")
    own = storage.special(f"layers.{index}.ffn.experts")
    if own is not None:
        return replace(block, weight=own)
    stored = config.text("expert_dtype")
    if not stored and "quantization_config" in config:
        stored = config.section("quantization_config").text("expert_dtype")
    if stored not in ("", "fp4", "fp8"):
        raise UnsupportedModel(f"config: {config.where}expert_dtype {stored!r:.40} is not supported; fp4 and fp8 are")
    return replace(block, weight=FP4_EXPERTS) if stored == "fp4" else block


def hashed_layers(config: Config, layers: int) -> int:
    """Layers that pick experts by token id."""
    types = config.per_layer("mlp_layer_types", layers)
    return sum(found == "hash_moe" for found in types) if types is not None else config.size_or(0, "num_hash_layers", least=0)


def read_compressed(config: Config, storage: Storage, name: str) -> Model:
    """A decoder in the style of DeepSeek-V4.

    Raises InputError for a missing key, UnsupportedModel for a feature that is not modelled.
    """
    for key in ("kv_source_layer_ids", "index_source_layer_ids"):
        if key in config:
            raise UnsupportedModel(f"config: {config.where}{key}: compressed entries shared across layers are not supported")
    width, streams = config.width, config.size("hc_mult")
    connection = HyperConnection(width, streams, config.size_or(20, "hc_sinkhorn_iters"), storage.base)
    norm = make_norm("rms", width, storage, "norm", residual=False)
    apply = hyper_apply(width, streams, storage.base)
    layers = []
    for index, (kind, every) in enumerate(schedule(config, config.layers)):
        mixer = attention_of(config, storage, f"model.layers.{index}.self_attn.", kind, every)
        experts = experts_of(config, storage, index)
        layers.append(Layer((connection, norm, mixer, apply, connection, norm, experts, apply)))
    config.assume(f"cached entries in fp8 with a bf16 rotary part, index entries in {INDEX_KEY} (as the model was trained)")
    model = assemble(config, STYLE, storage, tuple(layers), name)
    hashed = hashed_layers(config, config.layers)
    table = f"token-to-expert tables of {hashed} hash-routed layers (integers, {config.vocabulary} rows each)"
    model = replace(
        model,
        embedding=(*model.embedding, hyper_spread(width, streams, storage.base)),
        final=(HyperHead(width, streams, storage.base), replace(norm, name="final_norm")),
        not_modelled=(table,) if hashed else (),
    )
    return without_prediction_layers(config, model)

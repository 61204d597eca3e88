"""MiniMax-M3: block-sparse attention in most layers, a mixture of experts with a shared one, wide dense layers first.

Source: transformers 5.24, models/minimax_m3_vl (configuration and modelling), against whose classes on the meta device
counts are checked. The router's correction is a buffer there and no parameter here.
"""

from __future__ import annotations

from dataclasses import fields, replace

from roofline.components.attention import AttentionBlock
from roofline.components.base import Component
from roofline.components.block_sparse import BlockSparseAttention
from roofline.components.moe import MoE
from roofline.configs.config import Config
from roofline.configs.dense import assemble, attention_of, layer_of, mlp_of
from roofline.configs.guard import left_out, refuse_unread
from roofline.configs.readers.moe import Family, moe_of, sparse_layers
from roofline.configs.storage import Storage
from roofline.configs.styles import Style
from roofline.errors import InputError, UnsupportedModel
from roofline.model import Layer, Model

STYLE = Style(qk_norm="head")
FAMILY = Family(STYLE)
SECTION = "sparse_attention_config"
SPARSE = "minimax_m3_sparse"
READ = (SECTION, "use_qk_norm", "layer_types", "num_local_experts", "moe_layer_freq")

NAMES = {
    "heads": ("index_n_heads", "sparse_num_index_heads"),
    "dim": ("index_head_dim", "sparse_index_dim"),
    "size": ("index_block_size", "sparse_block_size"),
    "count": ("index_topk_blocks", "sparse_topk_blocks"),
    "local": ("index_local_blocks", "sparse_local_block"),
}
"""What -> (key at the top, key in the section, which wins)."""


def _section(config: Config) -> Config:
    return config.section(SECTION) if config.get(SECTION) else Config({}, f"{config.where}{SECTION}.", config.assumes)


def index_sizes(config: Config) -> dict[str, int]:
    """The sizes of the indexer. Raises UnsupportedModel for a selection without the query's own block."""
    section = _section(config)
    found: dict[str, int] = {}
    for what, (flat, nested) in NAMES.items():
        holder, key = (section, nested) if nested in section else (config, flat)
        found[what] = holder.size(key, least=0)
    kind = config.text("model_type")
    if found["local"] != 1:
        raise UnsupportedModel(
            f"{kind}: {found['local']} blocks that are always kept (sparse_local_block) are not supported, only 1"
        )
    for key, value in (("sparse_init_block", 0), ("sparse_score_type", "max")):
        if section.get(key, value) != value:
            raise UnsupportedModel(f"{kind}: {section.where}{key} = {section.get(key)!r:.40} is not supported, only {value!r}")
    return found


def sparse_attention_layers(config: Config, layers: int) -> list[bool]:
    """Which layers select blocks: ``layer_types``, else ``sparse_attention_freq`` of the section, else none.

    Raises UnsupportedModel for a layer of another type, or one whose indexer has a value path of its own.
    """
    kinds = config.per_layer("layer_types", layers)
    if kinds:
        strange = next((kind for kind in kinds[:layers] if kind not in (SPARSE, "full_attention")), None)
        if strange is not None:
            raise UnsupportedModel(f"{config.text('model_type')}: layers of type {strange!r:.40} (layer_types) are not supported")
        return [kind == SPARSE for kind in kinds[:layers]]
    section = _section(config)
    flags = section.per_layer("sparse_attention_freq", layers)
    if not flags or not section.flag("use_sparse_attention", True):
        return [False] * layers
    values_off = section.per_layer("sparse_disable_index_value", layers) or [1] * layers
    if any(flag and not off for flag, off in zip(flags[:layers], values_off, strict=False)):
        raise UnsupportedModel(
            f"{config.text('model_type')}: an index branch with values (sparse_disable_index_value) is not supported"
        )
    return [bool(flag) for flag in flags[:layers]]


def block_sparse(block: AttentionBlock, config: Config, storage: Storage, prefix: str) -> BlockSparseAttention:
    """The same block over selected blocks of keys."""
    sizes = index_sizes(config)
    if sizes["heads"] != block.K:
        raise InputError(f"config: {sizes['heads']} index heads for {block.K} key-value heads; there must be one for each")
    own = {item.name: getattr(block, item.name) for item in fields(block)}
    index = storage.linear(f"{prefix}index_q_proj")
    overrides = (*block.overrides, *((("i", index),) if index != block.weight else ()))
    return BlockSparseAttention(
        **{**own, "mask": "blocks", "size": (sizes["size"], sizes["count"]), "overrides": overrides},
        index_heads=sizes["heads"], index_dim=sizes["dim"], index_rotary=min(block.rotary, sizes["dim"]), index=storage.base,
    )  # fmt: skip


def experts_of(config: Config, storage: Storage, prefix: str, index: int) -> MoE:
    """The experts of one layer, by the names that checkpoints give them."""
    first, second = storage.linear(f"{prefix}experts.0.w1"), storage.linear(f"{prefix}experts.0.w2")
    moe = moe_of(config, FAMILY, storage, prefix, index)
    return replace(moe, weight=first, down_weight=None if second == first else second)


def read_minimax_m3(config: Config, storage: Storage, name: str) -> Model:
    """A MiniMax-M3 text decoder. Raises UnsupportedModel for a feature that its code does not have."""
    kind = config.text("model_type")
    for key in ("attention_output_gate", "use_sliding_window"):
        if config.flag(key, False):
            raise UnsupportedModel(f"{kind}: {config.where}{key} is not supported in this family")
    if config.text("qk_norm_type", "per_head") != "per_head" or not config.flag("use_qk_norm", True):
        raise UnsupportedModel(f"{kind}: only norms of queries and keys per head (qk_norm_type) are supported")
    plain = Config({key: value for key, value in config.data.items() if key != "layer_types"}, config.where, config.assumes)
    refuse_unread(plain, kind, READ, windows=False)
    routed, selects = sparse_layers(config, config.layers), sparse_attention_layers(config, config.layers)
    layers: list[Layer] = []
    for index in range(config.layers):
        prefix = f"model.layers.{index}."
        mixer: AttentionBlock = attention_of(config, STYLE, storage, f"{prefix}self_attn.")
        if selects[index]:
            mixer = block_sparse(mixer, config, storage, f"{prefix}self_attn.")
        feed_forward: Component
        if routed[index]:
            feed_forward = experts_of(config, storage, f"{prefix}block_sparse_moe.", index)
        else:
            feed_forward = mlp_of(config, STYLE, storage, f"{prefix}mlp.", config.size("dense_intermediate_size"))
        layers.append(layer_of("rms", "pre", mixer, feed_forward, config.width, storage))
    model = assemble(config, STYLE, storage, tuple(layers), name)
    return replace(model, assumes=tuple(config.assumes), not_modelled=left_out(config))

"""Parameters of vision towers and of the projectors that lead from them into a language model.

Towers stand outside the token path: they are counted, not costed. Each function takes the tower's section of the config
(and what else its width depends on) and returns an exact number of parameters. Sources: the modelling files of
transformers 5.24 (``models/clip``, ``siglip``, ``siglip2``, ``llama4``, ``minimax_m3_vl``, ``qwen3_vl``, ``qwen3_5``,
``pixtral``, ``gemma4``, ``mllama``, ``kimi_k25``, ``step3p7``), checked against those classes on the meta device.
"""

from __future__ import annotations

from roofline.configs.config import Config
from roofline.errors import InputError, UnsupportedModel


def encoder_layer(D: int, F: int, *, attention_bias: bool = True, mlp_bias: bool = True) -> int:
    """One pre-norm layer: four square projections, a plain feed-forward, two LayerNorms."""
    attention = 4 * D * D + (4 * D if attention_bias else 0)
    feed_forward = 2 * D * F + (F + D if mlp_bias else 0)
    return attention + feed_forward + 4 * D


def _layers(vision: Config, **biases: bool) -> int:
    return vision.layers * encoder_layer(vision.width, vision.feed_forward, **biases)


def _patch(vision: Config, channels: str = "num_channels") -> int:
    """Inputs of the patch embedding: the values of one square patch of an image."""
    side = vision.size("patch_size")
    return vision.size_or(3, channels, note=False) * side * side


def _patches(vision: Config) -> int:
    side = vision.size("image_size") // vision.size("patch_size")
    return side * side


def clip(vision: Config) -> int:
    """CLIP ViT: class token, learned positions, norms before and after."""
    D = vision.width
    return D + _patch(vision) * D + (_patches(vision) + 1) * D + 4 * D + _layers(vision)


def _pooling_head(D: int, F: int) -> int:
    """SigLIP's attention pooling: a probe, one attention, a norm, a feed-forward."""
    return D + 4 * D * D + 4 * D + 2 * D + 2 * D * F + F + D


def siglip(vision: Config) -> int:
    """SigLIP: patch embedding with bias, learned positions, a norm behind, and the pooling head unless switched off."""
    D = vision.width
    head = _pooling_head(D, vision.feed_forward) if vision.flag("vision_use_head", True) else 0
    return _patch(vision) * D + D + _patches(vision) * D + _layers(vision) + 2 * D + head


def siglip2(vision: Config) -> int:
    """SigLIP 2 (NaFlex): as SigLIP with a fixed table of positions that is resized to the image."""
    D = vision.width
    positions = vision.size_or(256, "num_patches")
    head = _pooling_head(D, vision.feed_forward) if vision.flag("vision_use_head", True) else 0
    return _patch(vision) * D + D + positions * D + _layers(vision) + 2 * D + head


def llama4(vision: Config) -> int:
    """Llama 4's ViT with its pixel-shuffle adapter of two matrices."""
    D = vision.width
    inner, outer = vision.size("projector_input_dim"), vision.size("projector_output_dim")
    adapter = vision.size("intermediate_size") * inner + outer * outer
    return D + _patch(vision) * D + (_patches(vision) + 1) * D + 4 * D + _layers(vision) + adapter


def _merger(wide: int, out: int, normed: int) -> int:
    """Qwen's patch merger: a LayerNorm, a square matrix, a projection."""
    return 2 * normed + wide * wide + wide + wide * out + out


def qwen_vl(vision: Config) -> int:
    """Qwen3-VL and Qwen3.5: positions, patches over two frames, one merger and one more per deep-stack layer."""
    D, out = vision.width, vision.size("out_hidden_size")
    wide = D * vision.size("spatial_merge_size") ** 2
    patch = _patch(vision, "in_channels") * vision.size("temporal_patch_size") * D + D
    positions = vision.size("num_position_embeddings") * D
    layers = vision.size("depth") * encoder_layer(D, vision.feed_forward)
    deep = len(vision.items("deepstack_visual_indexes") or [])
    return patch + positions + layers + _merger(wide, out, D) + deep * _merger(wide, out, wide)


def pixtral(vision: Config) -> int:
    """Pixtral: RMS norms, gated feed-forward, no biases, rotary positions."""
    D = vision.width
    head_dim = vision.size_or(D // vision.heads, "head_dim", note=False)
    attention = 4 * D * vision.heads * head_dim
    layer = attention + 3 * D * vision.feed_forward + 2 * D
    return _patch(vision) * D + D + vision.layers * layer


def gemma4(vision: Config) -> int:
    """Gemma 4's ViT: sandwich norms, query-key norms, gated feed-forward, a table of positions per axis."""
    D, H = vision.width, vision.head_dim
    attention = 2 * D * H * (vision.heads + vision.kv_heads) + 2 * H
    layer = attention + 3 * D * vision.feed_forward + 4 * D
    return 2 * vision.size("position_embedding_size") * D + _patch(vision) * D + vision.layers * layer


def mllama(vision: Config) -> int:
    """Llama 3.2 Vision: local and gated global layers, tile and position tables."""
    D, F = vision.width, vision.feed_forward
    layer = encoder_layer(D, F, attention_bias=False)
    tokens = _patches(vision) + 1
    tiles = vision.size("max_num_tiles")
    ratios = len(vision.items("supported_aspect_ratios") or []) or _aspect_ratios(tiles)
    positions = 1 + tokens * D + (ratios + 1) * tiles * tokens * D
    tile_tables = 2 * (1 + (ratios + 1) * tiles * D)
    local, gated = vision.layers, vision.size("num_global_layers")
    return D + _patch(vision) * D + positions + tile_tables + 4 * D + (local + gated) * layer + 2 * gated


def minimax_m3(vision: Config) -> int:
    """MiniMax-M3's ViT: patches of two frames without a bias, a norm in front, none behind."""
    D = vision.width
    merging = vision.section("img_token_compression_config") if "img_token_compression_config" in vision else vision
    frames = vision.optional_size("temporal_patch_size") or merging.size_or(2, "temporal_patch_size")
    return frames * _patch(vision) * D + 2 * D + _layers(vision)


def _aspect_ratios(tiles: int) -> int:
    """Ways to lay out up to ``tiles`` tiles as a rectangle."""
    return sum(1 for width in range(1, tiles + 1) for height in range(1, tiles + 1) if width * height <= tiles)


def moonvit(vision: Config) -> int:
    """Kimi's MoonViT: a square table of positions, a norm behind; separate or fused projections count the same."""
    D = vision.size("hidden_size", "vt_hidden_size")
    F = vision.size("intermediate_size", "vt_intermediate_size")
    L = vision.size("num_hidden_layers", "vt_num_hidden_layers")
    side = vision.size("pos_emb_height", "init_pos_emb_height") * vision.size("pos_emb_width", "init_pos_emb_width")
    return _patch(vision) * D + D + side * D + L * encoder_layer(D, F) + 2 * D


def moonvit_v2(vision: Config) -> int:
    """Kimi K3's MoonViT: queries, keys and values of a width of their own, RMS norms, a norm behind; biases by flags.

    Positions in time are not learned. Source: kimi_k3 in SGLang and in vLLM (MoonViT3d), which load the released weights.
    """
    for key, value in (("norm_type", "rmsnorm"), ("mlp_type", "mlp2"), ("pos_emb_type", "divided_fixed")):
        if vision.text(key, value) != value:
            raise UnsupportedModel(f"kimi_k3: a vision tower with {vision.where}{key} = {vision.text(key)!r:.40} is not modelled")
    D, F, L = vision.size("vt_hidden_size"), vision.size("vt_intermediate_size"), vision.size("vt_num_hidden_layers")
    inner = vision.size_or(D, "qkv_hidden_size")
    attention = 4 * D * inner + (3 * inner + D if vision.flag("attn_bias", False) else 0)
    feed_forward = 2 * D * F + (F + D if vision.flag("linear_bias", False) else 0)
    patches = _patch(vision) * D + (D if vision.flag("patch_embed_proj_bias", False) else 0)
    positions = vision.size("init_pos_emb_height") * vision.size("init_pos_emb_width") * D
    return patches + positions + L * (attention + feed_forward + 2 * D) + D


def perceptron(inputs: int, hidden: int, outputs: int, *, bias: bool = True) -> int:
    """Two matrices with an activation between."""
    return inputs * hidden + hidden * outputs + (hidden + outputs if bias else 0)


def feature_layers(config: Config, key: str = "vision_feature_layer") -> int:
    """From how many of a tower's layers a projector reads. Raises InputError when the key is neither number nor list."""
    value = config.get(key, -1)
    if isinstance(value, list):
        return len(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"config: {config.where}{key} must be a layer or a list of layers")
    return 1

"""Wrappers: a text model in a section of its own, with towers that turn images into its tokens.

The text section is read by the reader of its own model_type; the tower and the projector are counted exactly and stand
outside the token path. A wrapper whose tower cannot be counted is refused by name: its text section can be given alone.
Sources: modelling and configuration files of transformers 5.24 (``models/<wrapper>``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from roofline.configs.config import Config
from roofline.configs.families import READERS, reader_of
from roofline.configs.readers import towers
from roofline.configs.storage import Storage
from roofline.configs.unsupported import UNSUPPORTED
from roofline.errors import InputError, UnsupportedModel
from roofline.model import Model

Projector = Callable[[Config, Config, Config], int]
"""Parameters between tower and text model, from the wrapper's, the tower's and the text model's section."""


def _inside(config: Config, vision: Config, text: Config) -> int:
    return 0


def _llava(config: Config, vision: Config, text: Config) -> int:
    seen = vision.width * towers.feature_layers(config)
    return towers.perceptron(seen, text.width, text.width, bias=config.flag("multimodal_projector_bias", True))


def _gemma3(config: Config, vision: Config, text: Config) -> int:
    return vision.width * text.width + vision.width


def _gemma4(config: Config, vision: Config, text: Config) -> int:
    return vision.width * text.width


def _mistral3(config: Config, vision: Config, text: Config) -> int:
    D, merged = vision.width, config.size("spatial_merge_size") ** 2
    seen = D * towers.feature_layers(config)
    bias = config.flag("multimodal_projector_bias", False)
    return D + merged * D * D + towers.perceptron(seen, text.width, text.width, bias=bias)


def _lfm2(config: Config, vision: Config, text: Config) -> int:
    wide = vision.width * config.size("downsample_factor") ** 2
    norm = 2 * wide if config.flag("projector_use_layernorm", True) else 0
    hidden = config.size("projector_hidden_size")
    return norm + towers.perceptron(wide, hidden, text.width, bias=config.flag("projector_bias", True))


def _kimi(config: Config, vision: Config, text: Config) -> int:
    D = vision.size("mm_hidden_size", "hidden_size", "vt_hidden_size")
    kernel = vision.items("merge_kernel_size") or [2, 2]
    if len(kernel) != 2 or not all(isinstance(side, int) and side > 0 for side in kernel):
        raise InputError(f"config: {vision.where}merge_kernel_size must be two positive whole numbers, not {kernel!r:.60}")
    height, width = kernel
    wide = D * height * width
    return 2 * D + towers.perceptron(wide, wide, text.width)


def _kimi_k3(config: Config, vision: Config, text: Config) -> int:
    if vision.text("mm_projector_type", "patchmergerv2") != "patchmergerv2":
        raise UnsupportedModel(f"kimi_k3: a {vision.text('mm_projector_type')!r:.40} projector is not modelled")
    height, width = vision.get("merge_kernel_size", [2, 2])
    wide = vision.size("mm_hidden_size", "vt_hidden_size") * height * width
    return towers.perceptron(wide, wide, text.width, bias=False) + text.width


def _minimax_m3(config: Config, vision: Config, text: Config) -> int:
    hidden = config.size_or(text.width, "projector_hidden_size")
    merging = config.section("img_token_compression_config") if "img_token_compression_config" in config else vision
    merged = merging.size_or(2, "spatial_merge_size") ** 2
    return towers.perceptron(vision.width, hidden, text.width) + towers.perceptron(merged * text.width, hidden, text.width)


def _mllama(config: Config, vision: Config, text: Config) -> int:
    return vision.size("vision_output_dim") * text.width + text.width


def _llama4(config: Config, vision: Config, text: Config) -> int:
    return vision.size("vision_output_dim") * text.width


@dataclass(frozen=True)
class Wrapper:
    """One kind of wrapper.

    Attributes:
        text: model_type of a text section that names none.
        vision: kind of a vision section that names none.
        projector: see ``Projector``.
        tower: what counts the tower, whatever its section calls itself; None for the one of its kind.
    """

    text: str
    vision: str
    projector: Projector = field(default=_inside, compare=False)
    tower: Callable[[Config], int] | None = field(default=None, compare=False)


TOWERS: dict[str, Callable[[Config], int]] = {
    "clip_vision_model": towers.clip,
    "siglip_vision_model": towers.siglip,
    "siglip2_vision_model": towers.siglip2,
    "llama4_vision_model": towers.llama4,
    "pixtral": towers.pixtral,
    "gemma4_vision": towers.gemma4,
    "mllama_vision_model": towers.mllama,
    "moonvit": towers.moonvit,
    "kimi_k25_vision": towers.moonvit,
    "minimax_m3_vl_vision": towers.minimax_m3,
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), towers.qwen_vl),
    **dict.fromkeys(("qwen3_vl_vision", "qwen3_vl_moe_vision", "qwen3_5_vision", "qwen3_5_moe_vision"), towers.qwen_vl),
}

WRAPPERS: dict[str, Wrapper] = {
    "llava": Wrapper("llama", "clip_vision_model", _llava),
    "gemma3": Wrapper("gemma3_text", "siglip_vision_model", _gemma3),
    "gemma4": Wrapper("gemma4_text", "gemma4_vision", _gemma4),
    "llama4": Wrapper("llama4_text", "llama4_vision_model", _llama4),
    "mistral3": Wrapper("mistral", "pixtral", _mistral3),
    "ministral3": Wrapper("ministral3", "pixtral", _mistral3),
    "mllama": Wrapper("mllama_text_model", "mllama_vision_model", _mllama),
    "lfm2_vl": Wrapper("lfm2", "siglip2_vision_model", _lfm2),
    "kimi_k25": Wrapper("kimi_k2", "moonvit", _kimi),
    "kimi_k3": Wrapper("kimi_linear", "kimi_k3_vision", _kimi_k3, towers.moonvit_v2),
    "minimax_m3_vl": Wrapper("minimax_m3_vl_text", "minimax_m3_vl_vision", _minimax_m3, towers.minimax_m3),
    "qwen3_vl": Wrapper("qwen3_vl_text", "qwen3_vl"),
    "qwen3_vl_moe": Wrapper("qwen3_vl_moe_text", "qwen3_vl_moe"),
    "qwen3_5": Wrapper("qwen3_5_text", "qwen3_5"),
    "qwen3_5_moe": Wrapper("qwen3_5_moe_text", "qwen3_5_moe"),
}

TEXT_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "vocab_size": 32000,
    },
    "mistral": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 32000,
    },
    "gemma3_text": {
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208, "sliding_window": 4096,
    },
}  # fmt: skip
"""Class defaults that published text sections leave out."""


def text_section(config: Config, wrapper: Wrapper) -> Config:
    """The text section as a config of its own: with its model_type, tying and the defaults of its class."""
    section = config.section("text_config")
    keys: dict[str, Any] = {"model_type": wrapper.text, **section.data}
    if config.get("tie_word_embeddings") is not None:
        keys["tie_word_embeddings"] = config.get("tie_word_embeddings")
    text = Config(keys, section.where, config.assumes)
    return text.filled(TEXT_DEFAULTS.get(text.text("model_type"), {}))


def _alone(config: Config) -> str:
    """How to get the text model by itself, where its family has a reader."""
    family = config.section("text_config").get("model_type")
    return "; give the contents of text_config alone for the text model" if family in READERS else ""


def tower_params(config: Config, wrapper: Wrapper, text: Config) -> int:
    """Parameters of the vision tower and the projector. Raises UnsupportedModel naming a tower that cannot be counted."""
    vision = config.section("vision_config")
    kind = vision.text("model_type") or wrapper.vision
    if wrapper.tower is None and kind not in TOWERS:
        raise UnsupportedModel(
            f"{config.text('model_type')}: the parameters of a {kind} vision tower are not modelled{_alone(config)}"
        )
    count = wrapper.tower or TOWERS[kind]
    return count(vision) + wrapper.projector(config, vision, text)


def read_wrapper(config: Config, storage: Storage, name: str) -> Model:
    """The text model of a wrapper, with its vision tower counted beside it."""
    kind = config.text("model_type")
    if kind not in WRAPPERS:
        raise UnsupportedModel(f"{kind}: {UNSUPPORTED.get(kind, 'this multimodal wrapper')} is not supported{_alone(config)}")
    wrapper = WRAPPERS[kind]
    for section in ("audio_config", "audio_tower_config"):
        if isinstance(config.get(section), Mapping):
            raise UnsupportedModel(
                f"{kind}: the audio tower of {section} is not modelled; give the contents of text_config alone"
            )
    text = text_section(config, wrapper)
    model: Model = reader_of(text.text("model_type"))(text, storage, name)
    counted, left_out = 0, "vision tower: the config does not describe one (vision_config is missing); not counted"
    if isinstance(config.get("vision_config"), Mapping):
        counted = tower_params(config, wrapper, text)
        left_out = f"vision tower and projector: {counted} parameters outside the token path, counted but not costed"
    return replace(
        model, tower_params=counted, not_modelled=(*model.not_modelled, left_out), assumes=tuple(config.assumes), family=kind
    )

"""Which layer sees what: full attention, a sliding window, a chunk; from ``layer_types`` or the older keys.

Sources: the configuration files of transformers 5.24 (``models/<family>/configuration_<family>.py``): explicit
``layer_types`` win; before them families wrote ``sliding_window_pattern``, ``max_window_layers`` with
``use_sliding_window`` (Qwen), ``attention_types`` (GPT-Neo) or ``no_rope_layers`` with ``attention_chunk_size`` (Llama 4).
"""

from __future__ import annotations

from collections.abc import Callable

from roofline.configs.config import Config
from roofline.errors import InputError, UnsupportedModel

Mask = tuple[str, int | None]
"""(mask, size) as ``components.masks`` takes them."""

FULL: Mask = ("causal", None)


def every(period: int, *, offset: int = -1) -> Callable[[int], bool]:
    """Whether a layer index is the full-attention one of its period: the last one, or the one at ``offset``."""
    return lambda index: index % period == offset % period


def _windowed(config: Config, key: str = "sliding_window") -> Mask:
    return "window", config.size(key)


def _named(config: Config, kinds: list[object]) -> list[Mask]:
    """Masks of explicit layer types."""
    masks: list[Mask] = []
    for kind in kinds:
        if kind in ("full_attention", "attention", "global"):
            masks.append(FULL)
        elif kind in ("sliding_attention", "local"):
            masks.append(_windowed(config))
        elif kind == "chunked_attention":
            masks.append(("chunk", config.size("attention_chunk_size")) if "attention_chunk_size" in config else FULL)
        else:
            raise UnsupportedModel(f"{config.where}layer_types: {kind!r:.40} layers are not supported in this family")
    return masks


def _period(config: Config, layers: int, period: int) -> list[Mask] | None:
    """Masks of a ``sliding_window_pattern``: a period, or letters such as "LLLG"; None where no window is set."""
    if config.get("sliding_window") is None:
        return None
    pattern = config.get("sliding_window_pattern", config.get("_sliding_window_pattern"))
    if isinstance(pattern, str):
        if not pattern or set(pattern) - {"L", "G"}:
            raise InputError(f"config: {config.where}sliding_window_pattern {pattern!r:.40} must be a number or letters L and G")
        return [_windowed(config) if pattern[index % len(pattern)] == "L" else FULL for index in range(layers)]
    if pattern is None:
        config.assume(f"{config.where}layer_types: one layer in {period} is full attention, the others see sliding_window")
    else:
        period = config.size("sliding_window_pattern", "_sliding_window_pattern")
    full = every(period)
    return [FULL if full(index) else _windowed(config) for index in range(layers)]


def _chunked(config: Config, layers: int) -> list[Mask]:
    """Llama 4: layers with rotary embedding attend inside chunks, those without to everything."""
    rotary = rotary_layers(config, layers)
    return [("chunk", config.size("attention_chunk_size")) if rotary[index] else FULL for index in range(layers)]


def rotary_layers(config: Config, layers: int, interval: int = 4) -> list[bool]:
    """Which layers rotate: ``no_rope_layers`` (1 rotates, 0 does not), else all but every ``no_rope_layer_interval``-th."""
    flags = config.per_layer("no_rope_layers", layers) if config.items("no_rope_layers") else None
    if flags:
        return [bool(flag) for flag in flags[:layers]]
    still = every(config.size_or(interval, "no_rope_layer_interval"))
    return [not still(index) for index in range(layers)]


def _global_local(config: Config, layers: int) -> list[Mask]:
    """GPT-Neo's ``attention_types``: [[[kinds], repeats], ...]."""
    kinds: list[object] = []
    for entry in config.items("attention_types") or []:
        if not (isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], list) and isinstance(entry[1], int)):
            raise InputError(f"config: {config.where}attention_types must be a list of [kinds, repeats]")
        kinds += entry[0] * entry[1]
    if len(kinds) != layers:
        raise InputError(f"config: {config.where}attention_types has {len(kinds)} entries for {layers} layers")
    return [_windowed(config, "window_size") if kind == "local" else FULL for kind in kinds]


def masks_of(config: Config, layers: int, period: int | None = None) -> list[Mask]:
    """The mask of every layer.

    Args:
        config: the text section of a config.
        layers: number of layers.
        period: for families whose code alternates, the layers from one full-attention layer to the next; the config's
            own ``layer_types`` or ``sliding_window_pattern`` win over it.

    A ``sliding_window`` without a pattern holds for every layer, unless ``use_sliding_window`` or ``max_window_layers``
    is there: then it must be switched on, and starts at layer ``max_window_layers``.
    Raises InputError for lists of a wrong length, UnsupportedModel for a layer type that is not attention.
    """
    kinds = config.per_layer("layer_types", layers)
    if kinds:
        return _named(config, kinds[:layers])
    if "attention_types" in config:
        return _global_local(config, layers)
    if "attention_chunk_size" in config and "sliding_window" not in config:
        return _chunked(config, layers)
    if period is not None:
        return _period(config, layers, period) or [FULL] * layers
    if config.optional_size("sliding_window", least=0) in (None, 0):
        return [FULL] * layers
    first = 0
    if "use_sliding_window" in config or "max_window_layers" in config:
        if not config.flag("use_sliding_window", False):
            return [FULL] * layers
        first = config.size_or(0, "max_window_layers", least=0)
    return [FULL if index < first else _windowed(config) for index in range(layers)]

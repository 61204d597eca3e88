"""What the configs of fixed-state models have in common: names of layer types, state formats, the mixers of Mamba.

The same number stands under many names; every function here lists them, the first present one counts. Sources: the
configuration and modelling files of transformers 5.24 (``models/<family>``), and for state formats vLLM
(model_executor/layers/mamba/mamba_utils.py): the convolution keeps the model's dtype, the recurrence takes
``mamba_ssm_dtype`` or ``mamba_ssm_cache_dtype`` where the config has one.
"""

from __future__ import annotations

from dataclasses import replace

from roofline.components.mamba import Mamba2Block, MambaBlock
from roofline.configs.config import Config
from roofline.configs.storage import DTYPES, Storage
from roofline.errors import InputError, UnsupportedModel
from roofline.formats import FORMATS, Format
from roofline.model import Model

ATTENTION, RECURRENT, HYBRID = "attention", "recurrent", "hybrid"
KINDS = {
    "attention": ATTENTION, "full_attention": ATTENTION, "mamba": RECURRENT, "linear_attention": RECURRENT,
    "conv": RECURRENT, "recurrent": RECURRENT, "hybrid": HYBRID,
}  # fmt: skip
"""Name of a layer type in a config -> what it is; older configs name the mixer, newer ones the class of mixer."""


def layer_kinds(config: Config, layers: int, *keys: str) -> list[str] | None:
    """The kind of every layer from the first of ``keys`` that is a list; None where none is.

    Raises UnsupportedModel for a type that is none of attention, recurrent, hybrid.
    """
    for key in keys:
        found = config.per_layer(key, layers)
        if found is not None:
            for kind in found:
                if kind not in KINDS:
                    raise UnsupportedModel(f"config: {config.where}{key} has {kind!r:.40} layers, which are not supported here")
            return [KINDS[kind] for kind in found[:layers]]
    return None


def periodic(layers: int, period: int, offset: int) -> list[str]:
    """Attention in every ``period``-th layer, the first time at ``offset``; recurrent layers elsewhere."""
    return [ATTENTION if index % period == offset else RECURRENT for index in range(layers)]


def partial_rotary(config: Config, fraction: float) -> int:
    """Rotated elements per head: what the config says, else the fraction that the family's code fixes (noted)."""
    parameters = config.get("rope_parameters", {})
    nested = isinstance(parameters, dict) and parameters.get("partial_rotary_factor") is not None
    if nested or "partial_rotary_factor" in config:
        return config.rotary
    config.assume(f"partial_rotary_factor = {fraction} (not in the config)")
    return int(fraction * config.head_dim)


def state_format(config: Config, storage: Storage) -> Format:
    """How the recurrent state is stored: what the config says, else the model's dtype (noted)."""
    for key in ("mamba_ssm_dtype", "mamba_ssm_cache_dtype"):
        name = config.text(key)
        if name in ("", "auto"):
            continue
        if name not in DTYPES:
            raise InputError(f"config: {config.where}{key} {name!r:.40} is not one of {', '.join(sorted(DTYPES))}")
        return FORMATS[DTYPES[name]]
    config.assume(f"recurrent state in {storage.base.name}, the model's dtype (no mamba_ssm_dtype in the config)")
    return storage.base


def overrides_of(storage: Storage, prefix: str, modules: dict[str, str]) -> dict[str, Format | tuple[tuple[str, Format], ...]]:
    """``weight`` and ``overrides`` of a block from the module paths of its projections."""
    found = {short: storage.linear(prefix + module) for short, module in modules.items()}
    formats = list(found.values())
    common = max(set(formats), key=formats.count)
    return {"weight": common, "overrides": tuple((short, fmt) for short, fmt in found.items() if fmt != common)}


def rank_of(config: Config, *keys: str) -> int:
    """Rank of dt: a number, or ceil(D / 16) for "auto" or where it is missing."""
    if any(config.get(key) not in (None, "auto") for key in keys):
        return config.size(*(key for key in keys if config.get(key) != "auto"))
    return -(-config.width // 16)


def expanded(config: Config) -> int:
    """Width of a mixer that is a multiple of the residual stream's."""
    return config.size_or(2, "expand", "mamba_expand", "expansion_factor") * config.width


def mamba_of(config: Config, storage: Storage, prefix: str, inner: int, inner_norms: str = "") -> MambaBlock:
    """The Mamba mixer of one layer, of width ``inner``."""
    return MambaBlock(
        D=config.width,
        inner=inner,
        J=config.size("state_size", "mamba_d_state"),
        R=rank_of(config, "time_step_rank", "mamba_dt_rank"),
        width=config.size("conv_kernel", "mamba_d_conv"),
        conv_bias=config.flag("use_conv_bias", config.flag("mamba_conv_bias", True)),
        bias=config.flag("use_bias", config.flag("mamba_proj_bias", False)),
        inner_norms=inner_norms,
        activation=storage.base,
        state_format=state_format(config, storage),
        **overrides_of(storage, prefix, {"in": "in_proj", "x": "x_proj", "dt": "dt_proj", "out": "out_proj"}),  # type: ignore[arg-type]
    )


HEADS = ("mamba_num_heads", "mamba_n_heads", "n_mamba_heads", "num_heads")
HEAD_DIM = ("mamba_head_dim", "mamba_d_head", "mamba_headdim")


def mamba_heads(config: Config, inner: int | None) -> tuple[int, int]:
    """(heads, width of a head) of a Mamba-2 mixer; one of them follows from the other where the mixer's width is known."""
    heads = config.optional_size(*HEADS)
    named = [key for key in HEAD_DIM if config.get(key) != "auto"]
    if HEADS[-1] in config:
        named.append("head_dim")
    head_dim = config.optional_size(*named)
    if inner is not None:
        heads = inner // head_dim if heads is None and head_dim is not None else heads
        head_dim = inner // heads if head_dim is None and heads is not None else head_dim
    if heads is None or head_dim is None:
        raise InputError(f"config: {config.where}{HEADS[0] if heads is None else HEAD_DIM[0]} is missing; it cannot be guessed")
    if inner is not None and heads * head_dim != inner:
        raise InputError(f"config: {config.where}{heads} Mamba heads of {head_dim} do not make the mixer's width of {inner}")
    return heads, head_dim


def mamba2_of(config: Config, storage: Storage, prefix: str, inner: int | None, *, normed: bool = True) -> Mamba2Block:
    """The Mamba-2 mixer of one layer.

    Args:
        inner: width of the mixer, which heads times their dimension must make; None where they alone define it.
        normed: whether a gated norm follows the scan.
    """
    heads, head_dim = mamba_heads(config, inner)
    bias = config.flag("use_bias", config.flag("mamba_proj_bias", config.flag("add_bias_linear", False)))
    return Mamba2Block(
        D=config.width,
        heads=heads,
        head_dim=head_dim,
        J=config.size("ssm_state_size", "state_size", "mamba_d_state"),
        groups=config.size("n_groups", "mamba_n_groups", "mamba_ngroups"),
        width=config.size("conv_kernel", "mamba_d_conv", "conv_dimension"),
        conv_bias=config.flag("use_conv_bias", config.flag("mamba_conv_bias", True)),
        in_bias=bias,
        out_bias=config.flag("projectors_bias", bias),
        normed=normed,
        chunk=config.size_or(256, "chunk_size", "mamba_chunk_size"),
        activation=storage.base,
        state_format=state_format(config, storage),
        **overrides_of(storage, prefix, {"in": "in_proj", "out": "out_proj"}),  # type: ignore[arg-type]
    )


def without_prediction(config: Config, model: Model, *keys: str) -> Model:
    """The model, with the multi-token-prediction layers that the config counts under ``keys`` named as left out."""
    extra = config.optional_size(*keys, least=0) or 0
    if extra == 0:
        return model
    note = f"{extra} multi-token-prediction layer{'s' if extra > 1 else ''} ({keys[0]})"
    return replace(model, not_modelled=(*model.not_modelled, note))

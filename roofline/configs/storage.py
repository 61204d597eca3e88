"""How a checkpoint stores its weights: the base dtype and, module by module, what quantization_config says.

Sources: the quantization_config keys of transformers (gptq, awq, fp8, compressed-tensors, mxfp4, bitsandbytes,
modelopt) as its documentation and the published configs give them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from roofline.configs.config import Config
from roofline.errors import InputError, UnsupportedModel
from roofline.formats import BF16, FORMATS, FP8, INT8, Format, format_named, grouped

DTYPES = {
    "float32": "fp32", "float": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16",
    "torch.float32": "fp32", "torch.float16": "fp16", "torch.bfloat16": "bf16",
}  # fmt: skip

Resolver = Callable[[str], Format]


@dataclass(frozen=True)
class Storage:
    """Formats of one checkpoint.

    Attributes:
        base: dtype of everything that is not quantised; activations and cached state use it too.
        quantised: format of quantised linear layers, None where nothing is.
        keeps: whether a module path ("model.layers.0.self_attn.q_proj") stays in the base dtype.
    """

    base: Format = BF16
    quantised: Format | None = None
    keeps: Callable[[str], bool] = field(default=lambda path: False, compare=False)

    def linear(self, path: str) -> Format:
        """Storage of the linear layer at a module path."""
        return self.base if self.quantised is None or self.keeps(path) else self.quantised


def base_format(config: Config) -> Format:
    """The dtype of the config; bf16, noted, where it names none."""
    name = config.get("torch_dtype", config.get("dtype"))
    if name is None:
        config.assume("dtype = bfloat16 (not in the config)")
        return BF16
    if not isinstance(name, str) or name not in DTYPES:
        raise InputError(f"config: {config.where}torch_dtype {name!r:.40} is not one of {', '.join(sorted(set(DTYPES)))}")
    return FORMATS[DTYPES[name]]


def _matcher(entries: list[str]) -> Callable[[str], bool]:
    """Whether a module path is named by a list of exact paths, path prefixes, globs ("*") and regexes ("re:...")."""
    patterns = []
    for entry in entries:
        if entry.startswith("re:"):
            patterns.append(re.compile(entry[3:]))
        else:
            body = re.escape(entry).replace(r"\*", ".*")
            patterns.append(re.compile(rf"(?:.*\.)?{body}(?:\..*)?$"))
    return lambda path: any(pattern.match(path) for pattern in patterns)


def _ignored(quantisation: Config) -> list[str]:
    entries: list[str] = []
    for key in ("modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules", "llm_int8_skip_modules"):
        entries += [entry for entry in quantisation.items(key) or [] if isinstance(entry, str)]
    return entries


def _group(quantisation: Config, asymmetric: bool) -> Format:
    bits, group = quantisation.size("bits", "w_bit"), quantisation.size("group_size", "q_group_size", least=-1)
    if group <= 0:
        return INT8 if bits == 8 else Format(f"int{bits}-channel", FORMATS["int8"].bits * bits / 8, bits, "bf16", "one scale per channel, not counted")
    return grouped(bits, group, asymmetric=asymmetric)


def _fp8(quantisation: Config) -> Format:
    block = quantisation.items("weight_block_size")
    if not block:
        return FP8
    if block != [128, 128]:
        raise UnsupportedModel(f"quantization_config: fp8 blocks of {block} are not supported; 128x128 are")
    return FORMATS["fp8-block-ue8m0" if quantisation.get("scale_fmt") == "ue8m0" else "fp8-block"]


def _compressed(quantisation: Config) -> Format:
    groups = quantisation.get("config_groups", {})
    if not isinstance(groups, dict) or len(groups) != 1:
        raise UnsupportedModel("quantization_config: compressed-tensors with other than one config group is not supported")
    name = next(iter(groups))
    weights = quantisation.section("config_groups").section(name).section("weights")
    bits, kind, strategy = weights.size("num_bits"), weights.text("type"), weights.text("strategy")
    if kind == "float" and bits == 8:
        return FP8 if strategy in ("channel", "tensor") else FORMATS["fp8-block"]
    if kind == "float" and bits == 4:
        return FORMATS["nvfp4"]
    if kind == "int" and strategy == "group":
        return grouped(bits, weights.size("group_size"), asymmetric=not weights.flag("symmetric", True))
    if kind == "int" and bits == 8:
        return INT8
    raise UnsupportedModel(f"quantization_config: compressed-tensors weights of {bits}-bit {kind} by {strategy} are not supported")


def read_storage(config: Config, inner: Config | None = None) -> Storage:
    """The storage that a config describes; ``inner`` is the text section where the dtype stands there.

    Raises UnsupportedModel for a quantisation method that is not modelled, InputError for a malformed section.
    """
    source = inner if inner is not None and ("torch_dtype" in inner or "dtype" in inner) else config
    base = base_format(source)
    holder = next((c for c in (config, inner) if c is not None and "quantization_config" in c), None)
    if holder is None:
        return Storage(base)
    quantisation = holder.section("quantization_config")
    method = quantisation.text("quant_method").lower()
    keeps = _matcher([*_ignored(quantisation), "lm_head", "embed_tokens"])
    if method == "gptq":
        return Storage(base, _group(quantisation, not quantisation.flag("sym", True)), keeps)
    if method == "awq":
        return Storage(base, _group(quantisation, quantisation.flag("zero_point", True)), keeps)
    if method in ("fp8", "fbgemm_fp8"):
        return Storage(base, _fp8(quantisation), keeps)
    if method == "compressed-tensors":
        return Storage(base, _compressed(quantisation), keeps)
    if method == "mxfp4":
        return Storage(base, FORMATS["mxfp4"], keeps)
    if method == "modelopt":
        algorithm = quantisation.text("quant_algo").upper()
        if algorithm in ("NVFP4", "FP8"):
            return Storage(base, FORMATS[algorithm.lower()], keeps)
        raise UnsupportedModel(f"quantization_config: modelopt {algorithm or 'without quant_algo'} is not supported")
    if method == "bitsandbytes":
        if quantisation.flag("load_in_8bit", False):
            return Storage(base, INT8, keeps)
        double = quantisation.flag("bnb_4bit_use_double_quant", False)
        return Storage(base, format_named("nf4-double" if double else "nf4"), keeps)
    raise UnsupportedModel(f"quantization_config: quant_method {method!r} is not supported")

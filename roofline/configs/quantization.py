"""What each quantisation method writes into a config, and the storage it means.

Sources: the quantisation guides of transformers (gptq, awq, fp8, fbgemm_fp8, mxfp4, bitsandbytes, eetq,
compressed-tensors), the compressed-tensors schema, the hf_quant_config.json files that NVIDIA ModelOpt writes, and the
dynamic rules of GPTQModel. Scales per tensor or per channel are not counted: they are less than 0.01 bit per element.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

from roofline.configs.config import Config
from roofline.configs.storage import Names, Special, Storage, canonical, heads_of, nothing_special
from roofline.errors import InputError, UnsupportedModel
from roofline.formats import FORMATS, FP8, INT8, Format, grouped

IGNORED = ("modules_to_not_convert", "ignored_layers", "llm_int8_skip_modules")
LISTED = ("ignore", "exclude_modules")
HEADS = ("lm_head", "embed_out", "output_layer", "output", "head")
NEVER = ("embed_tokens", "wte", "word_embeddings", "embed_in", "gate", "router", "shared_expert_gate")
KNOWN = (
    "aqlm", "auto-round", "bitnet", "fp_quant", "higgs", "hqq", "intel/neural-compressor", "quanto", "quark", "quip", "spqr",
    "torchao", "vptq",
)  # fmt: skip

GPTQ_BITS = (2, 3, 4, 8)
BITSANDBYTES = ("load_in_4bit", "load_in_8bit", "_load_in_4bit", "_load_in_8bit")

FP8_BLOCK = {"ue8m0": (8, "-ue8m0"), "": (32, "")}


def weight_only(fmt: Format) -> Format:
    """The same storage, dequantised before a multiplication in 16 bits."""
    return fmt if fmt.unit == "bf16" else replace(fmt, name=f"{fmt.name}-a16", unit="bf16")


def fp8_block(block: list[Any], scale_format: str = "") -> Format:
    """fp8 with one scale per block of rows x columns: an fp32 one, or 8 bits for "ue8m0"."""
    if len(block) != 2 or not all(type(size) is int and 0 < size <= 2**16 for size in block):
        raise InputError(f"quantization_config: weight_block_size {block!r:.60} must be two positive whole numbers")
    bits, suffix = FP8_BLOCK["ue8m0" if scale_format == "ue8m0" else ""]
    name = f"fp8-block{suffix}" if block == [128, 128] else f"fp8-block{suffix}-{block[0]}x{block[1]}"
    return Format(
        name, 8 + Fraction(bits, block[0] * block[1]), 8, "fp8", f"one {bits}-bit scale per {block[0]}x{block[1]} block"
    )


def integers(bits: int, group: int, *, asymmetric: bool) -> Format:
    """Integer weights that are dequantised to 16 bits: by group, or by channel where ``group`` is not positive."""
    if not 2 <= bits <= 8:
        raise InputError(f"quantization_config: {bits}-bit integers are not a storage format; 2 to 8 bits are")
    if group > 0:
        return grouped(bits, group, asymmetric=asymmetric)
    return Format(f"int{bits}-channel", Fraction(bits), bits, "bf16", "one scale per channel, not counted")


def entries(section: Config, keys: tuple[str, ...]) -> list[str]:
    """Module names under any of the keys."""
    found = [entry for key in keys for entry in section.items(key) or []]
    if not all(isinstance(entry, str) for entry in found):
        raise InputError(f"config: {section.where}{'/'.join(keys)} must be lists of module names")
    return found


def keeping(section: Config, *, head: bool = True) -> Callable[[str], bool]:
    """What a method leaves in the base dtype: the modules it lists, embeddings, routers and (``head``) the output."""
    names = Names([*entries(section, IGNORED), *NEVER, *(HEADS if head else ())])
    return lambda path: path in names


def cached_format(section: Config) -> Format | None:
    """The format of cached keys and values that the checkpoint asks for, None for none."""
    scheme = section.get("kv_cache_scheme", section.get("kv_cache_quant_algo"))
    if scheme is None:
        return None
    if isinstance(scheme, Mapping):
        scheme = f"{'FP' if scheme.get('type') == 'float' else 'INT'}{scheme.get('num_bits')}"
    named = {"FP8": FP8, "INT8": INT8, "NVFP4": FORMATS["nvfp4"]}
    if not isinstance(scheme, str) or scheme.upper() not in named:
        raise UnsupportedModel(f"quantization_config: a key-value cache in {scheme!r:.40} is not supported")
    return named[scheme.upper()]


def group_size(section: Config, *keys: str) -> int:
    """Weights per scale; -1 for one scale per channel."""
    size = section.size(*keys, least=-1)
    if size == 0:
        raise InputError(f"config: {section.where}{keys[0]} = 0 is no group; give a positive size, or -1 for a scale per channel")
    return size


def _gptq_bits(bits: int) -> int:
    if bits not in GPTQ_BITS:
        raise InputError(
            f"quantization_config: {bits}-bit weights are none that GPTQ packs; those have {', '.join(map(str, GPTQ_BITS))}"
        )
    return bits


def read_gptq(section: Config, base: Format) -> Storage:
    """GPTQ: integers by group; ``dynamic`` rules of GPTQModel change or spare single modules."""
    bits, group = _gptq_bits(section.size("bits")), group_size(section, "group_size")
    asymmetric = not section.flag("sym", True)
    rules: list[tuple[re.Pattern[str], Format]] = []
    dynamic = section.section("dynamic") if section.get("dynamic") else Config({})
    for pattern in dynamic.data:
        try:
            regex = re.compile(pattern[2:] if pattern[:2] in ("+:", "-:") else pattern)
        except re.error as error:
            raise InputError(f"config: {dynamic.where}{pattern!r:.40} is not a valid regex ({error})") from None
        if pattern.startswith("-:"):
            rules.append((regex, base))
            continue
        own = dynamic.section(pattern)
        size = group_size(own, "group_size") if "group_size" in own else group
        own_bits = _gptq_bits(own.size_or(bits, "bits", note=False))
        rules.append((regex, integers(own_bits, size, asymmetric=not own.flag("sym", not asymmetric))))

    def ruled(path: str) -> Format | None:
        return next((fmt for regex, fmt in rules if regex.match(path)), None)

    kept = keeping(section, head=not section.flag("lm_head", False))
    blocks = section.items("modules_in_block_to_quantize") or []
    inside = Names([str(name) for block in blocks for name in (block if isinstance(block, list) else [block])])
    return Storage(
        base,
        integers(bits, group, asymmetric=asymmetric),
        lambda path: kept(path) or (bool(blocks) and path not in inside),
        ruled,
    )


def read_awq(section: Config, base: Format) -> Storage:
    """AWQ: integers by group, with a zero point unless the config says otherwise."""
    group = group_size(section, "group_size", "q_group_size")
    return Storage(
        base, integers(section.size("bits", "w_bit"), group, asymmetric=section.flag("zero_point", True)), keeping(section)
    )


def read_fp8(section: Config, base: Format) -> Storage:
    """fp8, with a scale per tensor or per block; layers of another format by ``quantized_layers``."""
    block = section.items("weight_block_size")
    fmt = FP8 if not block else fp8_block(block, section.text("scale_fmt"))
    return Storage(base, fmt, keeping(section), layered(section), cached_format(section))


def read_bitsandbytes(section: Config, base: Format) -> Storage:
    """LLM.int8, or 4-bit blocks of 64 with an fp32 scale, itself quantised by "double quantisation"."""
    if section.flag("load_in_8bit", section.flag("_load_in_8bit", False)):
        return Storage(base, INT8, keeping(section))
    if section.flag("load_in_4bit", section.flag("_load_in_4bit", False)):
        double = section.flag("bnb_4bit_use_double_quant", False)
        return Storage(base, FORMATS["nf4-double" if double else "nf4"], keeping(section))
    raise InputError(f"config: {section.where}load_in_8bit and load_in_4bit are both missing or false; one must be true")


def _executed(fmt: Format, activations: Any) -> Format:
    """The format with the unit that multiplies it: 16 bits unless the activations are quantised as well."""
    if not isinstance(activations, Mapping) or activations.get("num_bits") == 16:
        return weight_only(fmt)
    wanted = f"{activations.get('num_bits')}-bit {activations.get('type', 'int')}"
    kind = {"8-bit int": "int8", "8-bit float": "fp8", "4-bit float": "fp4"}.get(wanted)
    if kind is None:
        raise UnsupportedModel(f"quantization_config: activations as {wanted:.40} are not supported")
    return fmt if fmt.unit == kind else replace(fmt, name=f"{fmt.name}-a{kind}", unit=kind)


def _group_format(group: Config) -> Format:
    """The format of one config group of compressed-tensors."""
    weights = group.section("weights")
    bits, kind, size = (
        weights.size("num_bits"),
        weights.text("type", "int"),
        weights.size_or(0, "group_size", least=-1, note=False),
    )
    strategy = weights.text("strategy", "group" if size > 0 else "channel")
    fmt: Format | None = None
    if kind == "float" and strategy == "block":
        fmt = fp8_block(weights.items("block_structure") or []) if bits == 8 else None
    elif kind == "float" and bits == 8:
        fmt = FP8 if strategy in ("channel", "tensor") else FORMATS["mxfp8"] if size == 32 else None
    elif kind == "float" and bits == 4:
        fmt = {16: FORMATS["nvfp4"], 32: FORMATS["mxfp4"]}.get(size)
    elif kind == "int":
        fmt = integers(bits, size if strategy == "group" else 0, asymmetric=not weights.flag("symmetric", True))
    if fmt is None:
        raise UnsupportedModel(f"quantization_config: {bits}-bit {kind} weights by {strategy} of {size} are not supported")
    return _executed(fmt, group.get("input_activations"))


def read_compressed(section: Config, base: Format) -> Storage:
    """compressed-tensors: config groups, each for the modules it targets, less those under ``ignore``."""
    if section.get("sparsity_config") and section.section("sparsity_config").text("format", "dense") != "dense":
        raise UnsupportedModel("quantization_config: compressed sparse weights (sparsity_config) are not supported")
    default: Format | None = None
    rules: list[tuple[Names, Format]] = []
    groups = section.section("config_groups")
    for name in groups.data:
        group = groups.section(name)
        fmt, targets = _group_format(group), entries(group, ("targets",)) or ["Linear"]
        if "Linear" in targets:
            default = default or fmt
        rules.append((Names([target for target in targets if target != "Linear"]), fmt))
    if not rules:
        raise InputError(f"config: {section.where}config_groups is empty; it says how the weights are stored")
    ignored = Names([*entries(section, LISTED), *NEVER])

    def targeted(path: str) -> Format | None:
        return next((fmt for names, fmt in rules if path in names), None)

    return Storage(base, default, lambda path: path in ignored, targeted, cached_format(section))


MODELOPT: dict[str, Callable[[int], Format]] = {
    "FP8": lambda group: FP8,
    "FP8_PER_CHANNEL_PER_TOKEN": lambda group: FP8,
    "FP8_PB_WO": lambda group: weight_only(fp8_block([128, 128])),
    "MXFP8": lambda group: FORMATS["mxfp8"],
    "NVFP4": lambda group: FORMATS["nvfp4"],
    "NVFP4_AWQ": lambda group: FORMATS["nvfp4"],
    "W4A16_NVFP4": lambda group: weight_only(FORMATS["nvfp4"]),
    "MXFP4": lambda group: FORMATS["mxfp4"],
    "W4A16_AWQ": lambda group: grouped(4, group or 128),
    "W4A8_AWQ": lambda group: replace(grouped(4, group or 128), name=f"int4-g{group or 128}-afp8", unit="fp8"),
    "W8A8_SQ_PER_CHANNEL": lambda group: INT8,
    "W8A16": lambda group: weight_only(INT8),
}
BLOCKS = {"NVFP4": 16, "NVFP4_AWQ": 16, "W4A16_NVFP4": 16, "MXFP4": 32, "MXFP8": 32}


def _algorithm(section: Config) -> Format:
    """The format of a ModelOpt algorithm, for a checkpoint or for one of its layers."""
    name = section.text("quant_algo").upper()
    if name not in MODELOPT:
        raise UnsupportedModel(f"quantization_config: the ModelOpt quant_algo {name!r:.40} is not supported")
    group = section.size_or(BLOCKS.get(name, 0), "group_size", least=0, note=False)
    if name in BLOCKS and group not in (0, BLOCKS[name]):
        raise UnsupportedModel(f"quantization_config: {name} with blocks of {group} is not supported, only of {BLOCKS[name]}")
    return MODELOPT[name](group)


def layered(section: Config) -> Special:
    """Formats by ``quantized_layers``: {module: {"quant_algo": ...}}, for the module and all below it."""
    if not section.get("quantized_layers"):
        return nothing_special
    layers = section.section("quantized_layers")
    found: dict[str, Format] = {}
    for name in layers.data:
        found[canonical(name)] = _algorithm(layers.section(name))

    def named(path: str) -> Format | None:
        return next((found[module] for module in heads_of(canonical(path)) if module in found), None)

    return named


def read_modelopt(section: Config, base: Format) -> Storage:
    """NVIDIA ModelOpt: one algorithm for all linear layers, or MIXED_PRECISION with one for each layer it lists."""
    if "quant_algo" not in section and "config_groups" in section:
        return read_compressed(section, base)
    names = Names([*entries(section, (*IGNORED, *LISTED)), *NEVER])
    special, cached = layered(section), cached_format(section)
    if section.text("quant_algo").upper() == "MIXED_PRECISION":
        return Storage(base, None, lambda path: path in names, special, cached)
    heads = Names(HEADS)
    return Storage(base, _algorithm(section), lambda path: path in names or path in heads, special, cached)


METHODS: dict[str, Callable[[Config, Format], Storage]] = {
    "gptq": read_gptq,
    "awq": read_awq,
    "fp8": read_fp8,
    "fbgemm_fp8": read_fp8,
    "compressed-tensors": read_compressed,
    "modelopt": read_modelopt,
    "modelopt_fp4": read_modelopt,
    "bitsandbytes": read_bitsandbytes,
    "mxfp4": lambda section, base: Storage(base, FORMATS["mxfp4"], keeping(section)),
    "eetq": lambda section, base: Storage(base, weight_only(INT8), keeping(section)),
}


def read_quantization(section: Config, base: Format) -> Storage:
    """The storage of a quantised checkpoint.

    Raises UnsupportedModel for a method that is not modelled, InputError for a section that cannot be understood.
    """
    method = section.text("quant_method").lower()
    if not method and "quant_algo" in section:
        method = "modelopt"
    if not method and any(key in section for key in BITSANDBYTES):
        method = "bitsandbytes"
    if method in METHODS:
        return METHODS[method](section, base)
    if not method and "bits" in section and "group_size" in section:
        raise UnsupportedModel("quantization_config: weights as MLX stores them (bits and group_size only) are not modelled yet")
    if not method:
        raise InputError(f"config: {section.where}quant_method is missing; it says how the weights are stored")
    known = "is known, its storage is not modelled yet" if method in KNOWN else f"is unknown; known are {', '.join(METHODS)}"
    raise UnsupportedModel(f"quantization_config: quant_method {method!r:.40} {known}")

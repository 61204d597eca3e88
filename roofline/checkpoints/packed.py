"""Which tensors of a safetensors checkpoint belong together, and how many parameters a packed one holds.

A quantised module is stored as several tensors: packed integers, scales, zero points, an order of inputs. Their shapes
and dtypes say how many weights the packed one holds. Layouts: AutoGPTQ and GPTQModel (qweight packed along inputs),
AutoAWQ (along outputs), compressed-tensors (weight_packed), NVIDIA ModelOpt (two fp4 per byte), gpt-oss (_blocks and
_scales), bitsandbytes (absmax, SCB), DeepSeek (weight_scale_inv; two fp4 per int8 in V4).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from roofline.checkpoints.stored import Tensor, Weight
from roofline.errors import InputError

NAMES = {
    "BF16": "bf16", "F16": "fp16", "F32": "fp32", "F64": "fp64", "F8_E4M3": "fp8", "F8_E5M2": "fp8", "I8": "int8", "U8": "uint8",
    "I16": "int16", "I32": "int32", "I64": "int64", "F4": "fp4", "BOOL": "bool", "F8_E8M0": "ue8m0",
}  # fmt: skip
LEARNED = ("BF16", "F16", "F32", "F64", "F8_E4M3", "F8_E5M2", "F4", "I8")
ONE_BYTE = ("I8", "U8", "F8_E4M3", "F8_E5M2")

SIDE = (
    "weight_scale_inv", "weight_scale_2", "weight_scale", "weight_global_scale", "input_global_scale", "weight_zero_point",
    "weight_shape", "weight_g_idx", "input_scale", "activation_scale", "k_scale", "v_scale", "q_scale", "prob_output_scale",
    "qzeros", "scales", "g_idx", "SCB", "weight_format", "scale", "scale_inv", "pre_quant_scale",
)  # fmt: skip
"""Last parts of tensors that serve a quantised weight of the same module, or of the parameter that they extend."""
ALWAYS = ("input_scale", "activation_scale", "k_scale", "v_scale", "q_scale", "prob_output_scale", "input_global_scale")
"""Those of activations and caches, which may stand beside weights of 16 bits."""
PACKED = ("qweight", "weight_packed", "_blocks", "_packed")
BUFFERS = re.compile(
    r"(^|\.)(rotary_emb\..*|(.*\.)?inv_freq|masked_bias|position_ids|num_batches_tracked|rope_freqs\.weight|"
    r"rope_factors_(long|short)\.weight)$"
)
MASKS = re.compile(r"(^|\.)(attn|attention|self_attn|attn\.attention)\.bias$")


def is_buffer(name: str, tensor: Tensor) -> bool:
    """Whether a tensor is not learned: rotary frequencies, a causal mask of four dimensions, integers of unknown use."""
    if BUFFERS.search(name) or tensor.dtype not in LEARNED:
        return True
    return MASKS.search(name) is not None and len(tensor.shape) == 4


def _serves(name: str, tensors: Mapping[str, Tensor]) -> str | None:
    """The packed or 8-bit tensor that a tensor belongs to, None where it stands for itself."""
    if ".weight." in name:
        owner = name.partition(".weight.")[0] + ".weight"
        return owner if owner in tensors else None
    stem, _, last = name.rpartition(".")
    for side in SIDE:
        if last == side:
            owners = [f"{stem}.{owner}" for owner in ("qweight", "weight_packed", "weight")]
        elif last.endswith(f"_{side}"):
            owners = [f"{stem}.{last.removesuffix(side)}{owner}".rstrip("_") for owner in ("blocks", "packed", "")]
        else:
            continue
        for owner in owners:
            found = tensors.get(owner)
            if found is None:
                continue
            if side in ALWAYS or owner.endswith(PACKED) or found.dtype in ONE_BYTE:
                return owner
    return None


def _sibling(owner: str, sides: Mapping[str, Tensor], *lasts: str) -> Tensor | None:
    """The first of the tensors that serve ``owner`` whose name ends in one of ``lasts``."""
    for last in lasts:
        for name, tensor in sides.items():
            if name.rpartition(".")[2] == last or name.endswith(f"_{last}"):
                return tensor
    return None


def _ratio(owner: str, packed: int, plain: int) -> int:
    """Bits of an element, from 32-bit words and elements along the packed dimension."""
    bits, rest = divmod(32 * packed, plain) if plain else (0, 1)
    if rest or not 1 <= bits <= 8:
        raise InputError(f"weights: the shapes of {owner} and its scales give no whole number of bits per weight")
    return bits


def _integer_bits(owner: str, tensor: Tensor, sides: Mapping[str, Tensor], bits: int | None) -> int:
    """Bits of an element that is packed into 32-bit words, from its zero points or order of inputs, else ``bits``."""
    zeros, scales = _sibling(owner, sides, "qzeros"), _sibling(owner, sides, "scales")
    if zeros is not None and scales is not None and len(zeros.shape) == 2 == len(scales.shape):
        return _ratio(owner, zeros.shape[1], scales.shape[1])
    order = _sibling(owner, sides, "g_idx", "weight_g_idx")
    if order is not None and order.elements and len(tensor.shape) == 2:
        return _ratio(owner, tensor.shape[0 if owner.endswith("qweight") else 1], order.elements)
    points = _sibling(owner, sides, "weight_zero_point")
    if points is not None and len(points.shape) == 2 == len(tensor.shape) and points.dtype == "I32":
        return _ratio(owner, points.shape[0], tensor.shape[0])
    if bits is None:
        raise InputError(
            f"weights: how many bits {owner} packs cannot be told from its shape; the quantization_config of the "
            "config.json beside it says so, and there is none"
        )
    return bits


def _four_bits(owner: str, tensor: Tensor, sides: Mapping[str, Tensor]) -> str | None:
    """The 4-bit format of a tensor of bytes, None where each byte is one weight."""
    if owner.endswith("_blocks"):
        return "mxfp4"
    if _sibling(owner, sides, "absmax") is not None:
        state = next((name.rpartition("__")[2] for name in sides if ".quant_state." in name), "nf4")
        return state if state in ("nf4", "fp4") else "nf4"
    scale = _sibling(owner, sides, "weight_scale", "scale", "scales")
    if scale is None or tensor.dtype not in ("U8", "I8"):
        return None
    if scale.dtype in ("F8_E8M0", "U8"):
        return "mxfp4"
    return "nvfp4" if tensor.dtype == "U8" and scale.dtype == "F8_E4M3" else None


def _weight(owner: str, tensor: Tensor, sides: Mapping[str, Tensor], bits: int | None) -> Weight:
    """One weight with the tensors that serve it."""
    extra = sum(side.bytes for side in sides.values())
    stem, _, last = owner.rpartition(".")
    if last in ("qweight", "weight_packed"):
        name = f"{stem}.weight"
        four = _four_bits(owner, tensor, sides) if tensor.dtype == "U8" else None
        if four is not None:
            return Weight(name, four, 2 * tensor.elements, tensor.bytes, extra)
        if tensor.dtype != "I32":
            raise InputError(f"weights: {owner} holds {tensor.dtype}; packed integers of 32 bits were expected")
        width = _integer_bits(owner, tensor, sides, bits)
        return Weight(name, f"int{width}", 32 * tensor.elements // width, tensor.bytes, extra)
    four = _four_bits(owner, tensor, sides)
    name = owner.removesuffix("_blocks")
    if four is not None:
        return Weight(name, four, 2 * tensor.elements, tensor.bytes, extra)
    scale = _sibling(owner, sides, "weight_scale", "scale")
    micro = tensor.dtype == "F8_E4M3" and scale is not None and scale.dtype in ("U8", "F8_E8M0") and "_inv" not in owner
    kind = "mxfp8" if micro and scale is not None and 32 * scale.elements == tensor.elements else NAMES.get(tensor.dtype)
    return Weight(name, kind or tensor.dtype.lower(), tensor.elements, tensor.bytes, extra)


def unpacked(tensors: Mapping[str, Tensor], bits: int | None = None) -> tuple[tuple[Weight, ...], tuple[Weight, ...]]:
    """(weights, buffers) of the tensors of a checkpoint.

    Args:
        bits: of packed integers whose shapes do not say, from the config's quantization_config.

    Raises InputError where a packed tensor cannot be understood.
    """
    serving: dict[str, dict[str, Tensor]] = {}
    owners = []
    for name, tensor in tensors.items():
        owner = _serves(name, tensors)
        if owner is None:
            owners.append(name)
        else:
            serving.setdefault(owner, {})[name] = tensor
    weights, buffers = [], []
    for name in owners:
        tensor, sides = tensors[name], serving.get(name, {})
        if name.endswith(PACKED) or sides or not is_buffer(name, tensor):
            weights.append(_weight(name, tensor, sides, bits))
        else:
            buffers.append(Weight(name, NAMES.get(tensor.dtype, tensor.dtype.lower()), tensor.elements, tensor.bytes))
    return tuple(weights), tuple(buffers)

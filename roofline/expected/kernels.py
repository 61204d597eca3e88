"""Kernels of an engine on an accelerator, and the expected time of each operator of a rank's step.

Each component asks the time model of its kind (``registry``) with the constants of the accelerator's ``[calibration]``;
``engines.toml`` says which family of constants belongs to which operator of an engine. Nothing here is fitted.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from roofline.accelerator import Accelerator, load_accelerator
from roofline.components.attention import Attention
from roofline.components.base import Component
from roofline.components.collective import Collective
from roofline.components.latent import LatentAttention
from roofline.components.linear import Linear
from roofline.components.mla import ExpandedAttention
from roofline.components.moe import GroupedLinear
from roofline.errors import UnsupportedModel
from roofline.expected.arithmetic import maximum, minimum, where
from roofline.expected.calibration import Family, base_of, families, like, scale_of, transferred
from roofline.expected.collective import wire_bytes
from roofline.expected.load import Load
from roofline.expected.model import MICROSECOND, Chip
from roofline.expected.moe import copied
from roofline.expected.registry import MODELS
from roofline.formats import Format
from roofline.work import Work

ENGINES = Path(__file__).with_name("engines.toml")
STREAMED = 0.8
"""Achieved fraction of the memory bandwidth in norms and other passes over the residual stream (the prior of streams)."""
INPUT_BYTES = {"bf16": 2.0, "fp8": 1.0, "int8": 1.0, "fp4": 0.5}
BY_ROWS = ("CutlassFP8", "sglang/fp8")
"""Families whose kernels pick their tile by the number of rows alone."""
COPIES = ("trtllm/cutlass", "trtllm/nongated")
"""Families whose kernels copy rows expert by expert and walk all experts of the rank, hit or not."""
APART = ("sglang/fa3",)
"""Families whose kernels write keys and values of different widths one after the other."""
WHOLE = ("DeepGemm", "deepgemm", "trtllm/fp8_block")
"""Families whose kernels never split the inner dimension."""
UNPACKED = ("trtllm/",)
"""Engines whose prefill kernels do not pack the query heads of a group into one tile."""
TILES = (16, 32, 64, 128)
KINDS = {"all-gather": "all_gather", "reduce-scatter": "reduce_scatter", "all-to-all": "alltoall", "send": "all_gather"}
"""Collectives as time models name them; a send moves its message once, like a gathering of two ranks."""

Seconds = Callable[[Load], Any]


@cache
def engines() -> dict[str, dict[str, Any]]:
    """The file of engines."""
    return tomllib.loads(ENGINES.read_text(encoding="utf-8"))


def kernels_of(engine: str, accelerator: Accelerator, family: str) -> Kernels:
    """The kernels that an engine runs for a family of models. Raises UnsupportedModel for an engine without a list."""
    table = engines().get(engine, {})
    if "fused" not in table:
        known = [name for name, entry in engines().items() if "fused" in entry]
        raise UnsupportedModel(f"{engine} has no list of calibrated kernels; there are lists of {', '.join(known)}")
    pairs = {name: tuple(part.strip() for part in text.split("|")) for name, text in table.items() if isinstance(text, str)}
    fused = [name for name, entry in table["fused"].items() if {"*", family} & set(entry["families"])]
    return Kernels(accelerator, {name: (pair[0], pair[1]) for name, pair in pairs.items()}, tuple(fused))


def borrowed(engine: str, found: Iterable[str]) -> list[str]:
    """What is to be said of families of kernels that were timed under another engine, one sentence for each such engine."""
    reasons = engines()[engine].get("borrowed", {})
    used = {family.partition(" ")[2].partition("/")[0] for family in found}
    return [f"kernels timed under {other} stand for some of {engine}'s: {why}" for other, why in reasons.items() if other in used]


DEFAULT_BASE = "h100-sxm"
"""Whose constants a device takes that has none and names nobody: datasheet rates and clocks swap."""


def base_for(accelerator: Accelerator) -> str:
    """Whose constants an accelerator takes. Raises UnsupportedModel where its file lacks what a swap needs."""
    if accelerator.calibration:
        return base_of(accelerator)
    chip = accelerator.chip
    if accelerator.vendor != "NVIDIA" or not {"sm_count", "boost_clock"} <= set(chip) or not accelerator.l2:
        raise UnsupportedModel(f"{accelerator.id} has no calibrated kernels, and is no NVIDIA device that could borrow some")
    return DEFAULT_BASE


@dataclass(frozen=True)
class Kernels:
    """The kernels that an engine runs on an accelerator, with their constants.

    Attributes:
        accelerator: the device. names: operator ("linear fp8", "decode bf16", ...) -> (family, time model).
        fused: operators whose activations the kernel before them quantises.
    """

    accelerator: Accelerator
    names: Mapping[str, tuple[str, str]]
    fused: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        base = base_for(self.accelerator)
        self.__dict__["known"] = families(base)
        own = self.accelerator if base == self.accelerator.id else load_accelerator(base)
        self.__dict__["chips"] = (Chip(own), Chip(self.accelerator))

    def constants(self, operator: str) -> tuple[Family, dict[str, float]]:
        """(family, its constants on this device) of an operator. Raises UnsupportedModel where it has none.

        A kernel of narrow formats takes the launch of the engine's 16-bit one: its own was timed with the launches of the
        pass that quantises activations, which engines either fuse into the kernel before (``fused``: the pass is left out)
        or launch as a kernel more.
        """
        family = None
        if operator in self.names:
            name, model = self.names[operator]
            family = like(self.__dict__["known"], name, model)
        if family is None:
            raise UnsupportedModel(f"{self.accelerator.id} has no calibrated kernel for {operator!r}")
        own, chip = self.__dict__["chips"]
        constants = dict(family.constants)
        if family.model == "gemm_q":
            plain = self.constants("linear bf16")[0]
            constants["launch_us"] = min(plain.constants["launch_us"], constants["launch_us"])
            if operator in self.fused:
                constants = {name: value for name, value in constants.items() if not name.startswith("quantise")}
        if own.accelerator.id != chip.accelerator.id:
            constants = transferred(constants, own, chip, scale_of(self.accelerator, family.model))
        return family, constants

    def get(self, operator: str) -> tuple[Family, Callable[[Mapping[str, Any]], Any]]:
        """(family, columns -> seconds) of an operator. Raises UnsupportedModel where it has no constants."""
        family, constants = self.constants(operator)
        seconds, chip = MODELS[family.model].seconds, self.chip
        return family, lambda columns: seconds(columns, chip, constants)

    def quantises(self, operator: str, family: Family) -> int:
        """Kernels beside the matmul that quantise its input."""
        return int(family.model == "gemm_q" and operator not in self.fused)

    @property
    def chip(self) -> Chip:
        """The device as floats."""
        chip: Chip = self.__dict__["chips"][1]
        return chip


def storage(weight: Format) -> str:
    """The format under which kernels are listed: all 16-bit floats run like bf16."""
    return "bf16" if weight.name == "fp16" else weight.name


def _works(value: Any) -> Any:
    """1 where there is something to do, 0 where not."""
    return where(value > 0, 1.0, 0.0)


def matmul(kernels: Kernels, inputs: Any, outputs: Any, weight: Format, rows: Callable[[Load], Any], operator: str) -> Any:
    """(family, seconds) of a dense matrix multiplication."""
    family, seconds = kernels.get(operator)
    n, k = float(outputs), float(inputs)
    narrow = weight.unit != "bf16"
    fixed = {
        "unit": weight.unit, "input_bytes": INPUT_BYTES[weight.unit], "weight_bytes": float(weight.bits) / 8 if narrow else 2.0,
        "menu": _menu(family.name), "n": n, "k": k,
    }  # fmt: skip
    stored = float(weight.bits) / 8 * n * k

    def run(load: Load) -> Any:
        m = rows(load)
        safe = maximum(m, 1.0)
        return _works(m) * seconds({**fixed, "m": safe, "bytes": stored + 2.0 * (k + n) * safe})

    return family, run


def _menu(family: str) -> str:
    """Which tiles and splits a kernel of a family may take, as ``expected.gemm`` names them."""
    if any(name in family for name in BY_ROWS):
        return "by_rows"
    return "whole" if any(name in family for name in WHOLE) else "library"


def affine(part: Component) -> tuple[float, float]:
    """(bytes of a step, bytes per token more) of a component whose cost is affine in its tokens."""
    one, two = (part.cost(Work(tokens)).bytes for tokens in (1, 2))
    return float(2 * one - two), float(two - one)


def _attention_bytes(part: Component) -> tuple[float, float]:
    """(bytes per token, bytes per key) of an attention core, from its cost."""
    near, far = (part.cost(Work(1, 1, S)).bytes for S in (0, 1))
    return float(2 * near - far), float(far - near)


def attention(kernels: Kernels, part: Attention, write: float) -> tuple[Family, Seconds, Family, Seconds]:
    """Decode and prefill of a softmax attention; ``write`` is bytes per token of the cache write."""
    if part.mask not in ("causal", "window"):
        raise UnsupportedModel(f"the mask {part.mask!r} has no time model")
    kv = "fp8" if part.kv.element_bits == 8 else "bf16"
    decode, decoding = kernels.get(f"decode {kv}")
    prefill, filling = kernels.get(f"prefill {kv}")
    window = float(part.size) if part.mask == "window" else 0.0
    per_token, per_key = _attention_bytes(part)
    N, K, H = float(part.N), float(part.K), float(part.H)
    value = H if part.value_dim is None else float(part.value_dim)
    packed = not any(name in prefill.name for name in UNPACKED)
    launches = 2.0 if value < H and any(name in decode.name for name in APART) else 1.0

    def one(load: Load) -> Any:
        keys = load.context + load.new
        keys = minimum(keys, window) if window else keys
        n = maximum(load.decodes, 1.0)
        moved = n * (load.new * (per_token + write) + per_key * keys)
        columns = {
            "sequences": n, "groups": K, "heads_per_group": N / K * load.new, "keys": keys, "windowed": 1.0 if window else 0.0,
            "width": 0.5 * (H + value), "key_bytes": float(part.kv.bytes_per_element), "bytes": moved, "launches": launches,
            "warm": 0.0,
        }  # fmt: skip
        return _works(load.decodes) * decoding(columns)

    def many(load: Load) -> Any:
        chunks, new = maximum(load.chunks, 1.0), maximum(load.chunk, 1.0)
        seen = load.behind + new
        keys = minimum(load.behind, window - 1.0) + new if window else seen
        columns = {
            "sequences": chunks, "tokens": new, "behind": load.behind, "groups": K if packed else N,
            "heads_per_group": N / K if packed else 1.0, "width": H, "value_width": value, "window": window or 1e9,
            "bytes": chunks * (new * (per_token + write) + per_key * keys), "write_bytes": chunks * new * write, "unit": "bf16",
        }  # fmt: skip
        return _works(load.prompt_tokens) * filling(columns)

    return decode, one, prefill, many


def latent(kernels: Kernels, part: LatentAttention, write: float) -> tuple[Family, Seconds]:
    """Decode of latent attention over everything cached."""
    kv = "fp8" if part.layout[0][1].element_bits == 8 else "bf16"
    family, seconds = kernels.get(f"latent_decode {kv}")
    per_token, per_key = _attention_bytes(part)
    flops = float(part.cost(Work(1, 1, 1)).matrix_flops - part.cost(Work(1, 1, 0)).matrix_flops)

    def run(load: Load) -> Any:
        n, keys = maximum(load.decodes, 1.0), load.context + load.new
        moved = n * (load.new * (per_token + write) + per_key * keys)
        columns = {
            "core.heads": part.N * load.new, "core.sequences": n, "core.entries": keys, "core.flops": flops * n * load.new * keys,
            "core.bytes": moved, "core.unit": "bf16", "bytes": moved,
        }  # fmt: skip
        return _works(load.decodes) * seconds(columns)

    return family, run


def expanded(kernels: Kernels, part: ExpandedAttention, write: float) -> tuple[Family, Seconds]:
    """Prefill of latent attention over keys and values that were expanded for it."""
    family, seconds = kernels.get("latent_prefill")
    per_token, per_key = _attention_bytes(part)
    N, H, value = float(part.N), float(part.H), float(part.value_dim or part.H)

    def run(load: Load) -> Any:
        chunks, new = maximum(load.chunks, 1.0), maximum(load.chunk, 1.0)
        keys = load.behind + new
        columns = {
            "sequences": chunks, "tokens": new, "behind": load.behind, "groups": N, "heads_per_group": 1.0, "width": H,
            "value_width": value, "window": 1e9, "write_bytes": chunks * new * write, "unit": "bf16",
            "bytes": chunks * (new * (per_token + write) + per_key * keys), "block": 128,
        }  # fmt: skip
        return _works(load.prompt_tokens) * seconds(columns)

    return family, run


def experts(kernels: Kernels, up: GroupedLinear, down: GroupedLinear, ranks: float) -> tuple[Family, Seconds, float]:
    """(family, seconds without the launch, launch) of two grouped matmuls over the tokens of ``ranks`` ranks, routed evenly.

    An expert's rows fill whole tiles: on average half a tile more than its share, and never less than one.
    """
    weight = up.weight
    operator = f"experts {storage(weight)}"
    family, seconds = kernels.get(operator)
    launch = kernels.constants(operator)[1]["launch_us"] * MICROSECOND
    unit = "bf16" if weight.name == "mxfp4" and "w4a16" in family.name else weight.unit
    chosen, held = float(up.k), float(up.E)
    expert = {name: float(part.weight.bytes(part.inputs * part.outputs)) for name, part in (("up", up), ("down", down))}
    moved = copies = sum(_affine_activations(part) for part in (up, down))
    walks_all = any(name in family.name for name in COPIES)
    fixed = {
        "unit": unit, "input_bytes": INPUT_BYTES.get(unit, 2.0), "weight_bytes": float(weight.bits) / 8,
        "up.n": float(up.outputs), "up.k": float(up.inputs), "down.n": float(down.outputs), "down.k": float(down.inputs),
    }  # fmt: skip
    if walks_all:
        inputs = float(up.inputs)
        copies = chosen * copied(inputs, float(down.inputs), INPUT_BYTES.get(unit, 2.0), weight.name == "fp8-block")
        moved = copies + 4.0 * inputs

    def run(load: Load) -> Any:
        tokens = maximum(load.tokens, 1.0) * ranks
        chance = min(chosen / held, 1.0)
        hit = held if chance == 1.0 else held * (1.0 - (1.0 - chance) ** tokens)
        share = tokens * chosen / hit
        columns = {
            **fixed, "walked": held if walks_all else hit, "activation_bytes": moved * tokens, "copied_bytes": copies * tokens,
            "up.weights": hit * expert["up"], "down.weights": hit * expert["down"],
            **{f"tiles{rows}": hit * maximum(1.0, share / rows + 0.5) for rows in TILES},
        }  # fmt: skip
        return seconds(columns) - launch

    return family, run, launch


def _affine_activations(part: GroupedLinear) -> float:
    return float(part.cost(Work(2)).activation_bytes) - float(part.cost(Work(1)).activation_bytes)


def reduce(kernels: Kernels, part: Collective, rows: Callable[[Load], Any]) -> tuple[Family, Seconds]:
    """An all-reduce by the engine's own kernel."""
    family, seconds = kernels.get("all_reduce")
    size, ranks = float(part.activation.bytes(part.elements)), float(part.ranks)

    def run(load: Load) -> Any:
        message = size * maximum(rows(load), 1.0)
        wire = wire_bytes("all_reduce", ranks, message)
        return seconds({"ranks": ranks, "wire": wire, "at_once": (ranks - 1.0) * message})

    return family, run


def gather(kernels: Kernels, part: Collective, rows: Callable[[Load], Any]) -> tuple[Family, Seconds]:
    """Collectives that move a message without adding up."""
    family, seconds = kernels.get("alltoall" if part.operation == "all-to-all" else "collective")
    unit = float(part.activation.bytes(part.elements)) * float(part.copies)
    kind = KINDS[part.operation]
    whole = part.ranks if kind != "alltoall" else 1

    def run(load: Load) -> Any:
        message = unit * whole * maximum(rows(load), 1.0)
        wire = wire_bytes(kind, float(part.ranks), message)
        return seconds({"ranks": float(part.ranks), "wire": wire, "at_once": message / part.ranks})

    return family, run


def streamed(kernels: Kernels, fixed: float, per_token: float, rows: Callable[[Load], Any]) -> Seconds:
    """A pass over a stream of activations: its bytes at the rate that streams attain; launches are the engine's business."""
    rate = kernels.chip.bandwidth * STREAMED
    return lambda load: (fixed + per_token * rows(load)) / rate


def activation_bytes(part: Linear) -> float:
    """Bytes per token of the pass that engines run behind a projection whose gate the model counts as fused into it."""
    return 0.0 if part.stored is None else float(part.activation.bytes(part.outputs + part.stored))


def rotary_bytes(part: Component) -> float:
    """Bytes per token of rotated queries, keys and values; the write into the cache is timed with the attention."""
    one, two = (part.cost(Work(tokens)).activation_bytes for tokens in (1, 2))
    return float(two - one)

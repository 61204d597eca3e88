"""How far expected times of servers were off where the fit had not seen the model or the accelerator.

The figures stand in ``serving.toml`` beside the constants: by engine and kind of model, by how many sequences ran at once,
and of the accelerator that no constant has seen.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from roofline.expected.serving import batches, fitted, plain_of, span


@dataclass(frozen=True)
class Error:
    """Errors of measured servers, as fractions of the measurement.

    Attributes:
        mean: of the absolute error. bias: of the error itself, above zero where expected times are too long; None for unknown.
        split: "unseen_model", "unseen_gpu" or "blind": what the constants behind it had not seen.
        models: the only ones that were measured; nothing where they are many. gpus: that the figure is of alone.
        least, most: sequences at once that the figure is of; None for all.
    """

    mean: float
    bias: float | None = None
    split: str = "unseen_model"
    models: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    least: int | None = None
    most: int | None = None

    @property
    def size(self) -> str:
        """ "7 % (6 % too short on average)"."""
        return f"{100 * self.mean:.0f} %{tendency(self.bias)}"

    @property
    def of(self) -> str:
        """What it is an error on: "on models it has not seen", with the models where there are few."""
        unseen = "models" if self.split == "unseen_model" else "a GPU"
        if self.gpus:
            unseen = f"{', '.join(self.gpus)}, which"
        return f"on {unseen} it has not seen{f' ({chr(44).join(self.models)} alone)' if self.models else ''}"

    @property
    def at(self) -> str:
        """Of how many sequences at once: "64 to 127 at once"; "" for all."""
        if self.least is None:
            return ""
        return f"{span((self.least, self.most or self.least))} at once"


def tendency(bias: float | None) -> str:
    """In which direction times err, in words: " (3 % too long on average)"; "" where that is unknown, or nothing."""
    if bias is None or round(100 * abs(bias)) == 0:
        return ""
    return f" ({100 * abs(bias):.0f} % too {'long' if bias > 0 else 'short'} on average)"


def _error(entry: Mapping[str, Any], **more: Any) -> Error:
    models, gpus = (tuple(entry.get(name, ())) for name in ("models", "gpus"))
    return Error(float(entry["mape"]), float(entry["bias"]), entry.get("split", "unseen_model"), models, gpus, **more)


def _group(experts: bool) -> str:
    return "moe" if experts else "dense"


def error_of(engine: str, experts: bool, metric: str = "tpot", gpu: str = "") -> Error | None:
    """The error on models or GPUs that the fit has not seen; that of ``gpu`` alone where none of its runs was fitted.

    Args:
        experts: whether the model has some. metric: "tpot" or "ttft".

    None where nothing is known.
    """
    if (plain := plain_of(engine)) is not None:
        return Error(plain.error) if metric == "tpot" else None
    wanted = (metric, engine, _group(experts))
    found = [entry for entry in fitted()["error"] if (entry["metric"], entry["engine"], entry["group"]) == wanted]
    own = [entry for entry in found if gpu in entry.get("gpus", ())]
    general = [entry for entry in found if "gpus" not in entry]
    return next(map(_error, own or general), None)


def bands(engine: str, experts: bool) -> tuple[Error, ...]:
    """Errors per token by how many sequences ran at once, on models that the fit has not seen; nothing where unknown."""
    own = [b for b in fitted().get("band", ()) if (b["engine"], b["group"]) == (engine, _group(experts))]
    ends = [*(band["clients"] - 1 for band in own[1:]), *(min(2 * band["clients"] - 1, batches(engine)[1]) for band in own[-1:])]
    return tuple(_error(band, least=band["clients"], most=end) for band, end in zip(own, ends, strict=True))


def error_at(engine: str, experts: bool, sequences: Collection[float], gpu: str = "") -> Error | None:
    """The largest error per token of the bands that batches of one replica lie in, or nearest to; None where nothing is known.

    Of an engine or a GPU without bands, and of no batches, it is that of all runs.
    """
    whole = error_of(engine, experts, gpu=gpu)
    known = bands(engine, experts)
    if not known or not sequences or whole is None or whole.gpus:
        return whole
    inside = (next((band for band in reversed(known) if (band.least or 0) <= number), known[0]) for number in sequences)
    return max(inside, key=lambda band: band.mean)

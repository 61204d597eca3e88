"""A fleet: tokens per day to accelerators, power and dollars, against the FLOPs of a training run.

A day of tokens needs ``tokens per day / (seconds of a day x tokens per second of an instance x utilisation)`` instances:
utilisation is the share of an instance's full throughput that a day uses on average, since load rises and falls while
instances stay. FLOPs are matrix FLOPs: a decode step at the mean context and a prompt's share of each output token for
inference, three forwards for training.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from roofline.errors import InputError
from roofline.model import Model
from roofline.planner.demand import Demand
from roofline.planner.search import Plan
from roofline.work import Work

DAY = 86_400


@dataclass(frozen=True)
class Fleet:
    """A fleet that serves so many tokens a day.

    Attributes:
        tokens_per_day: output tokens. utilisation: see the module. plan: the instance that is repeated.
        instance_tok_per_s: output tokens per second of an instance at its full load.
    """

    tokens_per_day: float
    utilisation: float
    plan: Plan
    instance_tok_per_s: float

    def __post_init__(self) -> None:
        if not 0 < self.tokens_per_day < 1e21:
            raise InputError(
                f"tokens-per-day: {self.tokens_per_day!r} is out of range; give output tokens above 0, such as 8.6e12"
            )
        if not 0 < self.utilisation <= 1:
            raise InputError(f"utilisation: {self.utilisation!r} is not in (0, 1]; it is the mean share of full load")

    @property
    def instances(self) -> int:
        """Instances of the plan."""
        return math.ceil(self.tokens_per_day / DAY / (self.instance_tok_per_s * self.utilisation))

    @property
    def gpus(self) -> int:
        """Accelerators."""
        return self.instances * self.plan.gpus


def forward_per_token(model: Model, load: Demand) -> float:
    """Matrix FLOPs of one output token: its decode step at the mean context, and its share of the prompt."""
    decode = model.cost(Work(1, 1, load.lengths().context)).matrix_flops
    prompt = model.for_prefill.cost(Work(1, load.isl)).matrix_flops
    return float(decode) + float(prompt) / load.osl


@dataclass(frozen=True)
class Comparison:
    """Inference of a day against a training run.

    Attributes:
        day_flop, training_flop: matrix FLOPs. tokens_days: days until as many tokens are served as were trained on.
        flop_days: days until serving has taken as many FLOPs as training.
    """

    day_flop: float
    training_flop: float
    tokens_days: float
    flop_days: float


def compare(model: Model, load: Demand, tokens_per_day: float, trained_tokens: float, sequence: int) -> Comparison:
    """A day of serving against training the same model on ``trained_tokens`` tokens in sequences of ``sequence``."""
    from roofline.training import training_flops

    if not 1 <= trained_tokens < 1e18:
        raise InputError(f"trained-tokens: {trained_tokens!r} is out of range; give tokens of the training run, such as 32e12")
    day = forward_per_token(model, load) * tokens_per_day
    training = float(training_flops(model, round(trained_tokens), sequence))
    return Comparison(day, training, trained_tokens / tokens_per_day, training / day)


def fleet_record(fleet: Fleet, price: Any, watt: float | None) -> dict[str, Any]:
    """Accelerators, power and dollars of a fleet."""
    gpus, per_day = fleet.gpus, fleet.tokens_per_day
    usd = None if price is None else price.usd * gpus * 24
    power = None if watt is None else watt * gpus
    return {
        "instances": fleet.instances,
        "gpus": gpus,
        "utilisation": fleet.utilisation,
        "instance_tok_per_s": fleet.instance_tok_per_s,
        "watt": power,
        "kwh_per_day": None if power is None else power * 24 / 1e3,
        "joule_per_output_token": None if power is None else power * DAY / per_day,
        "usd_per_day": usd,
        "usd_per_mtok_output": None if usd is None else usd / per_day * 1e6,
    }

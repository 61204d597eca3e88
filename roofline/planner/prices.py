"""What an accelerator costs per hour and draws in watts, as far as its file says; nothing is guessed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from roofline.accelerator import Accelerator
from roofline.errors import InputError

UNDATED = "undated"


@dataclass(frozen=True)
class Rent:
    """A rental price in USD per accelerator hour.

    Attributes:
        usd: the one to count with: the median of the newest dated entries. low, high: of all entries of that year, and of
            those without a date.
        source: where it comes from, with its date.
    """

    usd: float
    low: float
    high: float
    source: str


def rent(accelerator: Accelerator, given: Mapping[str, float] | None = None) -> Rent | None:
    """The price of an accelerator: as given by the user for its id, or for "" (all), else as its file says, else None."""
    for key in (accelerator.id, ""):
        if given and key in given:
            return Rent(given[key], given[key], given[key], "as given")
    dated = [price for price in accelerator.prices if price.date != UNDATED] or list(accelerator.prices)
    if not dated:
        return None
    newest = max(price.date for price in dated)
    latest = sorted((p for p in dated if p.date == newest), key=lambda price: price.usd_per_hour.value)
    year = [p for p in accelerator.prices if p.date[:4] == newest[:4] or p.date == UNDATED]
    values = [float(price.usd_per_hour.value) for price in latest]
    middle = len(values) // 2
    usd = values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) / 2
    spread = [float(price.usd_per_hour.value) for price in year]
    providers = " to ".join(dict.fromkeys(p.provider for p in (latest[0], latest[-1]) if p.provider))
    return Rent(usd, min(spread), max(spread), f"{newest}, {providers or 'provider not stated'}")


def price_words(gpu: str, price: Rent | None) -> str:
    """What an accelerator is taken to cost, and who says so."""
    if price is None:
        return f"price of {gpu}: no dated price is known; give --price {gpu}=USD"
    return f"price of {gpu}: {price.usd:g} USD per GPU and hour ({price.source})"


def watts(accelerator: Accelerator) -> float | None:
    """The thermal design power of an accelerator [W], an upper bound of what it draws on average; None where unknown."""
    power = accelerator.chip.get("tdp")
    return None if power is None else float(power.value)


def parse_prices(texts: list[str] | None, ids: Mapping[str, str]) -> dict[str, float]:
    """``--price 2.5`` for every GPU, or ``--price h100-sxm=2.5,h200-sxm=3.2``; ``ids`` maps every accepted name to an id.

    Raises InputError for a text that is neither, or a GPU that is not planned with.
    """
    found: dict[str, float] = {}
    for text in (part for given in texts or [] for part in given.split(",")):
        name, equals, value = text.rpartition("=")
        if equals and name.strip() not in ids:
            raise InputError(f"price: {name.strip()!r} is not among the GPUs of this plan; name one of {', '.join(sorted(ids))}")
        try:
            usd = float(value)
        except ValueError:
            raise InputError(f"price: {text!r} is not a price; write USD per GPU and hour, as in --price h100-sxm=2.5") from None
        if not 0 < usd < 1e6:
            raise InputError(f"price: {text!r} is out of range; give USD per GPU and hour above 0")
        found[ids[name.strip()] if equals else ""] = usd
    return found

"""Quantities: every prefix against Decimal, GiB and GB kept apart, parsing that names the field."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roofline import InputError
from roofline.units import (
    UNITS,
    bandwidth,
    capacity,
    count,
    flop,
    flop_rate,
    latency,
    parse_quantity,
    to_base,
    traffic,
)

DECIMAL_POWERS = {"": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
BINARY_POWERS = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50}


@pytest.mark.parametrize(("prefix", "power"), DECIMAL_POWERS.items())
@pytest.mark.parametrize("base", ["B", "B/s", "FLOP", "FLOP/s", "Hz", "W"])
def test_every_decimal_prefix(prefix, power, base):
    """kerncraft once had T = 1e13."""
    assert Decimal(int(UNITS[prefix + base][1])) == Decimal(10) ** power


@pytest.mark.parametrize(("prefix", "power"), BINARY_POWERS.items())
def test_every_binary_prefix(prefix, power):
    assert UNITS[prefix + "B"][1] == 2**power


def test_capacity_is_binary_and_traffic_decimal():
    """Tools that print bytes / 1024 as GB are the field's commonest slip."""
    assert capacity(2**30) == "1.00 GiB"
    assert capacity(10**9) == "0.93 GiB"
    assert traffic(10**9) == "1.000 GB"
    assert traffic(2**30) == "1.074 GB"
    assert bandwidth(3350 * 10**9) == "3.350 TB/s"
    assert flop(2 * 10**12) == "2.000 TFLOP"
    assert flop_rate(989 * 10**12) == "989.0 TFLOP/s"


def test_latencies_choose_a_readable_unit():
    assert latency(0.00802082388059702) == "8.021 ms"
    assert latency(2.5e-6) == "2.500 us"
    assert latency(12.3456) == "12.35 s"
    assert count(13015864320) == "13,015,864,320"


def test_values_parse_exactly():
    assert to_base(Fraction("3.35"), "TB/s", "bytes/s", "bandwidth") == 3350000000000
    assert to_base(81559, "MiB", "bytes", "memory") == 85520809984
    assert parse_quantity("40ms", "seconds", "--tpot", "s") == Fraction(1, 25)
    assert parse_quantity("1", "seconds", "--ttft", "s") == 1


@pytest.mark.parametrize("text", ["", "fast", "1 2", "nan", "-", "1e9999", "5 parsecs"])
def test_bad_quantities_name_the_field(text):
    with pytest.raises(InputError, match="--tpot"):
        parse_quantity(text, "seconds", "--tpot", "s")


def test_a_unit_of_another_dimension_is_refused():
    with pytest.raises(InputError, match=r"bandwidth.*flop/s"):
        to_base(1, "TFLOP/s", "bytes/s", "bandwidth")


@given(st.integers(1, 10**21))
def test_printed_traffic_is_within_its_last_digit(n):
    number, unit = traffic(n).split()
    value = Decimal(number.replace(",", "")) * Decimal(int(UNITS[unit][1]))
    assert abs(value - n) <= Decimal(n) * Decimal("0.0006")

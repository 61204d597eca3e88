"""Numbers as the command line reads them."""

from __future__ import annotations

from fractions import Fraction

import pytest

from roofline.cli.sweeps import fractions, names, whole_numbers
from roofline.errors import InputError


@pytest.mark.parametrize(
    ("texts", "values"),
    [
        (["64"], [64]),
        (["1,16,64"], [1, 16, 64]),
        (["1", "16,64"], [1, 16, 64]),
        (["1:512:x2"], [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]),
        (["1:500:x2"], [1, 2, 4, 8, 16, 32, 64, 128, 256]),
        (["1024:8192:+1024"], [1024 * n for n in range(1, 9)]),
        (["10:25:+10"], [10, 20]),
        (["log:1:512:10"], [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]),
        (["log:1:4:9"], [1, 2, 3, 4]),
        (["4Ki,1Mi"], [4096, 2**20]),
        (["131_072"], [131072]),
        (["1e3"], [1000]),
        (["8,1:8:x2"], [8, 1, 2, 4]),
        (["7:7:+1"], [7]),
    ],
)
def test_lists_and_sweeps_give_each_whole_number_once_in_order(texts: list[str], values: list[int]) -> None:
    assert whole_numbers(texts, "batch") == values


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("-1", "out of range"), ("0", "out of range"), ("1e30", "out of range"), ("9" * 40, "out of range"),
        ("1.5", "not a whole number"), ("nan", "not a number"), ("inf", "not a number"), ("", "not a number"),
        ("1,,2", "not a number"), ("1e999999999", "not a number"), ("4k", "ambiguous"), ("4G", "unknown suffix"),
        ("8:1:x2", "starts above its end"), ("1:8:x1", "never ends"), ("1:8:+0", "never ends"), ("0:8:x2", "start above 0"),
        ("1:8", "not a sweep"), ("1:8:2", "not a sweep"), ("log:1:8", "not a sweep"), ("log:1:8:1", "number of points"),
        ("1:1e12:+1", "more than 100,000 values"), ("1:1e40:x2", "out of range"), ("log:1:8:1e9", "more than 100,000 values"),
    ],
)  # fmt: skip
def test_what_is_no_sensible_number_is_refused_with_field_and_reason(text: str, reason: str) -> None:
    with pytest.raises(InputError, match=rf"^batch: .*{reason}"):
        whole_numbers([text], "batch")


def test_a_context_may_be_zero() -> None:
    assert whole_numbers(["0"], "context", least=0) == [0]


def test_shares_are_exact_and_within_zero_and_one() -> None:
    assert fractions(["0.9"], "memory-fraction") == [Fraction(9, 10)]
    assert fractions(["0.5:1:+0.25"], "memory-fraction") == [Fraction(1, 2), Fraction(3, 4), 1]
    for text in ("0", "1.01", "-0.5"):
        with pytest.raises(InputError, match="memory-fraction"):
            fractions([text], "memory-fraction")


def test_names_come_once_each_and_an_empty_one_is_refused() -> None:
    assert names(["h100, h200", "h100"], "gpu") == ["h100", "h200"]
    with pytest.raises(InputError, match="gpu: an empty name"):
        names(["h100,"], "gpu")

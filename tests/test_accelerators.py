"""Hardware files: every number is sourced, identities hold, bad files are refused with the field's name."""

from __future__ import annotations

import tomllib
from fractions import Fraction

import pytest

from roofline import InputError, load_accelerator
from roofline.accelerator import HARDWARE, KINDS, accelerator_ids

IDS = accelerator_ids()

GOOD = """
id = "mine"
name = "Mine"
vendor = "Me"
kind = "gpu"
architecture = "sm_90"
[compute]
bf16 = { value = 100, unit = "TFLOP/s", kind = "measured", source = "own benchmark" }
[memory]
nominal = { value = 24, unit = "GB", kind = "datasheet", source = "own datasheet" }
bandwidth = { value = 1.008, unit = "TB/s", kind = "datasheet", source = "own datasheet" }
"""


def test_the_skus_that_people_ask_for_are_there():
    for name in (
        "h100", "h100-sxm", "h100-pcie", "h100-nvl", "h200", "h20", "h800", "a100", "a100-40gb", "a100-80gb", "l4", "l40s",
        "a10g", "b200", "gb200", "b300", "rtx-4090", "4090", "rtx-5090", "rtx-pro-6000", "mi300x", "mi325x", "mi355x",
        "tpu-v5e", "tpu-v5p", "tpu-v6e", "apple-m4-max", "epyc-9654",
    ):  # fmt: skip
        assert load_accelerator(name).bandwidth.value > 0


@pytest.mark.parametrize("name", IDS)
def test_every_number_has_value_unit_kind_and_source(name):
    accelerator = load_accelerator(name)
    assert accelerator.id == name
    data = tomllib.loads((HARDWARE / f"{name}.toml").read_text(encoding="utf-8"))
    tables = [*data["compute"].values(), *data["memory"].values(), *data.get("chip", {}).values()]
    tables += [entry["usd_per_hour"] for entry in data.get("price", ())]
    for table in tables:
        assert set(table) == {"value", "unit", "kind", "source"}
        assert table["kind"] in KINDS
        assert len(table["source"]) > 8


def states_its_identity(name):
    chip = load_accelerator(name).chip
    return {"sm_count", "matrix_flop_per_clock_per_sm"} <= set(chip) and ("matrix_clock" in chip or "boost_clock" in chip)


@pytest.mark.parametrize("name", [name for name in IDS if states_its_identity(name)])
def test_the_peak_equals_units_times_flop_per_clock_times_clock(name):
    chip = load_accelerator(name).chip
    clock = chip.get("matrix_clock", chip.get("boost_clock"))
    derived = chip["sm_count"].value * chip["matrix_flop_per_clock_per_sm"].value * clock.value
    assert float(derived) == pytest.approx(float(load_accelerator(name).rate("bf16")), rel=2.5e-3)


def test_the_h100_identity_and_its_three_capacities():
    h100 = load_accelerator("h100-sxm")
    assert 132 * 4096 * 1830 * 10**6 == 989_429_760_000_000
    assert h100.rate("bf16") == 989 * 10**12
    assert h100.bandwidth.value == 3350 * 10**9
    assert h100.nominal.value == 80 * 10**9
    assert h100.reported.value == 81559 * 2**20
    assert float(h100.visible.value) / 2**30 == pytest.approx(79.18, abs=0.005)
    assert states_its_identity("h100-sxm")
    assert h100.capacity is h100.visible
    assert h100.visible.value < h100.reported.value


@pytest.mark.parametrize("name", IDS)
def test_capacities_are_ordered_and_peaks_dense(name):
    accelerator = load_accelerator(name)
    if accelerator.visible and accelerator.reported:
        assert accelerator.visible.value < accelerator.reported.value
    for unit, factor in (("fp8", 2), ("fp4", 8)):
        if unit in accelerator.compute:
            assert accelerator.rate(unit) <= Fraction(12, 10) * factor * accelerator.rate("bf16"), "a sparse rate?"


def test_aliases_are_unique_and_lead_to_their_file():
    seen = {}
    for name in IDS:
        for alias in load_accelerator(name).aliases:
            assert alias not in seen, f"{alias}: {seen.get(alias)} and {name}"
            assert alias not in IDS
            seen[alias] = name
            assert load_accelerator(alias).id == name


def test_an_unknown_name_suggests_near_ones():
    with pytest.raises(InputError, match=r"h10.*Did you mean.*h100"):
        load_accelerator("h10")


def test_a_file_of_ones_own_loads(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(GOOD)
    mine = load_accelerator(str(path))
    assert mine.bandwidth.value == 1008 * 10**9
    assert mine.capacity_rung == "nominal"
    assert mine.compute["bf16"].kind == "measured"


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        (', source = "own benchmark"', "", "bf16: source is missing"),
        ('"own benchmark"', '""', "source is empty"),
        ('kind = "measured"', 'kind = "guessed"', "kind must be one of"),
        ('"TFLOP/s"', '"TFLOPS"', "unknown unit 'TFLOPS'"),
        ('"TFLOP/s"', '"TB/s"', "measures bytes/s"),
        ("value = 100", "value = -1", "positive"),
        ("value = 100", 'value = "100"', "positive number"),
        ("value = 100", "value = nan", "not valid TOML"),
        ("bandwidth", "bandwith", "bandwidth is missing"),
        ("bf16", "fp16", "bf16 is missing"),
        ('vendor = "Me"', "", "vendor is missing"),
        ("[memory]", "[memory", "not valid TOML"),
        ("[compute]", "[calc]", "compute"),
    ],
)
def test_bad_files_are_refused_with_the_field(tmp_path, old, new, complaint):
    assert old in GOOD
    path = tmp_path / "mine.toml"
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(InputError, match=complaint) as error:
        load_accelerator(str(path))
    assert "mine.toml" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        load_accelerator(str(tmp_path / "none.toml"))


def test_a_file_of_ones_own_is_read_anew(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(GOOD)
    before = load_accelerator(path)
    path.write_text(GOOD.replace("1.008", "2"))
    assert (before.bandwidth.value, load_accelerator(path).bandwidth.value) == (1008 * 10**9, 2 * 10**12)
    assert load_accelerator(str(path)) == load_accelerator(path)

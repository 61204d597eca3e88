"""Every collected config.json gives exact parameters and exact state, or is refused with the feature that is missing.

The right numbers are those of transformers 5.24 classes on the meta device (column ``params_oracle`` of C_configs.csv, in
the scope that ``params_scope`` names) and of their caches (the other columns); an empty cell means that nobody measured.
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from roofline.configs.load import load_model
from roofline.errors import UnsupportedModel
from roofline.model import Model

CASES = Path(__file__).parents[2] / "shared" / "cases"
TABLE = CASES / "C_configs.csv"

pytestmark = pytest.mark.skipif(not TABLE.is_file(), reason="the shared reference configs are not beside this checkout")

NOT_IN_TABLE = {
    "THUDM__chatglm3-6b": 6_243_584_000,
    "XiaomiMiMo__MiMo-7B-Base": 7_622_619_136,
    "microsoft__phi-2_msft": 2_779_683_840,
    "mistralai__Ministral-3-3B": 3_429_006_336,
    "moonshotai__Kimi-K2-Instruct": 1_026_408_209_408,
    "tf-default__DbrxConfig": 2_459_207_680,
    "tf-default__MllamaTextConfig": 9_775_192_080,
    "tf-default__NemotronConfig": 17_642_041_344,
}
"""Text parameters where transformers cannot build the file as it is: the class that its model_type stands for, built."""


def table() -> dict[str, dict[str, str]]:
    """Rows of the table by file stem."""
    if not TABLE.is_file():
        return {}
    with TABLE.open(newline="", encoding="utf-8") as file:
        return {Path(row["file"]).stem: row for row in csv.DictReader(file)}


ROWS = table()


def cell(row: dict[str, str], column: str) -> int | None:
    """A count of the table, None where its cell is empty."""
    return int(float(row[column])) if row[column] else None


def spare_columns(config: dict[str, Any]) -> int:
    """Elements per sequence that the transformers cache keeps beyond what the recurrence needs.

    A causal convolution over k positions needs the k - 1 before the current one; the cache keeps k. One element per
    channel and layer is spare.
    """
    text = config.get("text_config", config)
    kinds = text.get("layer_types") or []
    if "linear_num_key_heads" in text:
        keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
        values = text["linear_num_value_heads"] * text["linear_value_head_dim"]
        return int(kinds.count("linear_attention") * (2 * keys + values))
    if "hybrid_override_pattern" in text:
        inner = text["mamba_num_heads"] * text["mamba_head_dim"]
        return int(text["hybrid_override_pattern"].count("M") * (inner + 2 * text["n_groups"] * text["ssm_state_size"]))
    if text["model_type"] == "mamba2":
        return int(text["num_hidden_layers"] * (text["expand"] * text["hidden_size"] + 2 * text["n_groups"] * text["state_size"]))
    if "conv_L_cache" in text:
        return int(kinds.count("conv") * text["hidden_size"])
    return 0


def differences(stem: str, model: Model) -> list[str]:
    """What the model says otherwise than the table."""
    row = ROWS[stem]
    config = json.loads((CASES / row["file"]).read_text(encoding="utf-8"))
    claims = {
        "parameters": (
            model.params_total if row["params_scope"] == "all" else model.params,
            cell(row, "params_oracle") or NOT_IN_TABLE.get(stem),
        ),
        "state bytes per token": (
            model.kv_bytes_per_token,
            cell(row, "kv_bytes_per_token_bf16"),
        ),
        "fixed state elements": (
            model.state_elements_per_sequence + spare_columns(config),
            cell(row, "fixed_state_elems_per_seq"),
        ),
    }
    return [f"{what}: {ours}, not {right}" for what, (ours, right) in claims.items() if right is not None and ours != right]


def read(stem: str) -> Model | str:
    """The model of a config, or the message of its refusal."""
    try:
        return load_model(CASES / ROWS[stem]["file"])
    except UnsupportedModel as refusal:
        return str(refusal)


def family_of(stem: str) -> set[str]:
    """The families that a config names: its own and that of its text section."""
    config = json.loads((CASES / ROWS[stem]["file"]).read_text(encoding="utf-8"))
    return {config["model_type"], config.get("text_config", config).get("model_type", config["model_type"])}


@pytest.mark.parametrize("stem", ROWS)
def test_a_config_is_read_exactly_or_refused_by_name(stem: str) -> None:
    model = read(stem)
    if isinstance(model, str):
        assert any(family in model for family in family_of(stem))
        pytest.skip(model)
    assert differences(stem, model) == []


def test_no_config_is_wrong_and_all_are_in_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    verdicts: Counter[str] = Counter()
    wrong = {}
    for stem in ROWS:
        model = read(stem)
        found = [] if isinstance(model, str) else differences(stem, model)
        verdicts["refused" if isinstance(model, str) else "wrong" if found else "exact"] += 1
        if found:
            wrong[stem] = found
    with capsys.disabled():
        print(f"\n{verdicts['exact']} configs exact, {verdicts['refused']} refused, {verdicts['wrong']} wrong")
    assert wrong == {}
    assert set(ROWS) == {path.stem for path in (CASES / "configs").glob("*.json")}


def test_every_number_of_the_table_is_compared() -> None:
    """Parameters of all rows; the per-token state and the fixed state wherever somebody measured them."""
    assert [stem for stem, row in ROWS.items() if not row["params_oracle"] and stem not in NOT_IN_TABLE] == []
    assert sum(cell(row, "kv_bytes_per_token_bf16") is not None for row in ROWS.values()) > 50
    assert sum(bool(cell(row, "fixed_state_elems_per_seq")) for row in ROWS.values()) >= 6

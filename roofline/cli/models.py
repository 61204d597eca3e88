"""``roofline models``: the catalogue, or everything about one model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from roofline.cli.bundles import bundled
from roofline.cli.options import complete_models
from roofline.cli.output import OUTPUT, Output
from roofline.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roofline.model import Model


def _billions(number: int) -> str:
    return f"{number / 1e9:,.2f}"


def _record(name: str, entry: dict[str, Any], model: Model) -> dict[str, Any]:
    from roofline.memory import plain

    return {
        "name": name,
        "full_name": entry.get("full_name"),
        "family": model.family or entry.get("config", {}).get("model_type"),
        "params": model.params,
        "active_params": model.active_params,
        "weight_bytes": plain(model.weight_bytes),
        "kv_bytes_per_token_bf16": model.kv_bytes_per_token,
        "state_bytes_per_sequence": model.state_bytes_per_sequence,
        "max_context_tokens": model.max_context,
        "layers": len(model.layers),
        "source": entry.get("source"),
    }


def _list(out: Output) -> None:
    from roofline.configs.load import load_model, model_names, read_catalog
    from roofline.errors import RooflineError

    records: list[dict[str, Any]] = []
    broken = []
    for name in model_names():
        try:
            records.append(_record(name, read_catalog(name), load_model(name)))
        except RooflineError as error:
            broken.append(f"{name}: {error}")

    def cells() -> tuple[Sequence[str], Sequence[Sequence[Any]]]:
        headers = ["name", "full name", "params\nbillion", "active\nbillion", "KV bytes\nper token", "max context\ntokens"]
        rows = [
            [
                r["name"], r["full_name"] or "-", _billions(r["params"]), _billions(r["active_params"]),
                f"{r['kv_bytes_per_token_bf16']:,}", f"{r['max_context_tokens']:,}" if r["max_context_tokens"] else "-",
            ]
            for r in records
        ]  # fmt: skip
        return headers, rows

    out.records(records, cells)
    out.note("", *broken, "KV in bf16, below any window; roofline models NAME shows the layers")


def _layers(model: Model) -> list[dict[str, Any]]:
    """The groups of equal layers: how many, what they consist of."""
    return [
        {
            "count": number,
            "layer": layer.name,
            "blocks": [block.name for block in layer.blocks],
            "params": int(sum(layer.params().values())),
            "state": [
                {"name": piece.name, "elements": piece.elements, "format": piece.format.name, "window": piece.window}
                for piece in layer.state()
            ],
        }
        for number, layer in model.groups
    ]


def _state_text(pieces: Sequence[dict[str, Any]]) -> str:
    return ", ".join(
        f"{piece['name']} {piece['elements']:,} {piece['format']}{' within ' + str(piece['window']) if piece['window'] else ''}"
        for piece in pieces
    )


def _details(name: str, out: Output) -> None:
    from roofline.configs.load import load_model, normalise, read_catalog
    from roofline.units import capacity

    model = load_model(name)
    try:
        entry = read_catalog(normalise(name))
    except KeyError:
        entry = {"source": name}
    layers = _layers(model)
    record = {
        **_record(model.name, entry, model),
        "tower_params": model.tower_params,
        "layer_groups": layers,
        "assumes": list(model.assumes),
        "not_modelled": list(model.not_modelled),
    }
    context = f"{model.max_context:,} tokens" if model.max_context else "not stated"
    out.note(
        out.paint(f"{record['full_name'] or model.name} ({record['family']})", "bold"),
        f"parameters: {model.params:,}, {model.active_params:,} of them active per token; {capacity(model.weight_bytes)} stored",
        *([f"towers outside the text path: {model.tower_params:,} parameters"] if model.tower_params else []),
        f"cached state: {model.kv_bytes_per_token:,} bytes per token in bf16, {model.state_bytes_per_sequence:,} per sequence",
        f"longest context: {context}",
        *(f"assumes: {line}" for line in model.assumes),
        *(f"not modelled: {line}" for line in model.not_modelled),
        f"source: {entry.get('source')}",
        "",
    )
    out.records(
        [record],
        lambda: (
            ["layers", "blocks", "params each", "state: elements per entry"],
            [[g["count"], ", ".join(g["blocks"]), f"{g['params']:,}", _state_text(g["state"])] for g in layers],
        ),
    )


@bundled(out=OUTPUT)
def models(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="A model, or the path of a config.json; without it, the catalogue.",
            autocompletion=complete_models,
        ),
    ] = None,
    stored: Annotated[
        bool,
        typer.Option("--stored", help="Bytes per module from the headers of a local model; exit with 1 when the config differs."),
    ] = False,
    *,
    out: Output,
) -> int:
    """The models in the catalogue, or everything about one."""
    if stored and name is None:
        raise InputError("--stored: say which model: a folder with safetensors files, or a .gguf file")
    if stored:
        from roofline.cli.stored import show_stored

        return show_stored(str(name), out)
    if name is None:
        _list(out)
    else:
        _details(name, out)
    return 0

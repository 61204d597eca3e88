"""``roofline paging``: where a cache's memory goes under each way of allocating it, and what sharing saves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from roofline.cli import sweeps
from roofline.cli.bundles import bundled
from roofline.cli.options import complete_models
from roofline.cli.output import OUTPUT, Cells, Output
from roofline.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roofline.paging import Lengths, Usage

Record = dict[str, Any]
NOT_MODELLED = "prefixes that requests share, preemption, block tables, states of fixed size"


def _one(text: str | None, field: str, default: int, least: int = 1) -> int:
    values = sweeps.whole_numbers([text], field, least) if text else [default]
    if len(values) > 1:
        raise InputError(f"{field}: paging answers for one value")
    return values[0]


def _record(found: Usage, lengths: Lengths, block: int, token_bytes: Any, about: Record) -> Record:
    from roofline.memory import plain

    return {
        "schema": 1,
        **about,
        "policy": found.policy,
        "prompt_tokens": lengths.prompt,
        "output_tokens": lengths.output,
        "longest_tokens": lengths.longest,
        "spread": float(lengths.spread),
        "block_tokens": block if found.policy == "paged" else None,
        "token_share": float(found.tokens),
        "reserved_share": float(found.reserved),
        "internal_share": float(found.internal),
        "external_share": float(found.external),
        "slots_per_request": float(found.slots),
        "bytes_per_request": None if token_bytes is None else plain(found.slots * token_bytes),
        "not_modelled": NOT_MODELLED.split(", "),
    }


def _cells(records: Sequence[Record]) -> Cells:
    def percent(record: Record, key: str) -> str:
        return f"{100 * record[key]:.1f}"

    least = min(record["slots_per_request"] for record in records)
    headers = [
        "policy", "tokens\n%", "reserved\n%", "internal\nwaste %", "external\nwaste %", "slots per\nrequest",
        "requests\nto paged",
    ]  # fmt: skip
    shares = ("token_share", "reserved_share", "internal_share", "external_share")
    rows = [
        [
            r["policy"],
            *(percent(r, key) for key in shares),
            f"{r['slots_per_request']:,.0f}",
            f"{least / r['slots_per_request']:.2f}",
        ]
        for r in records
    ]
    if records[0]["bytes_per_request"] is not None:
        headers.append("GiB per\nrequest")
        rows = [[*row, f"{r['bytes_per_request'] / 2**30:,.3f}"] for row, r in zip(rows, records, strict=True)]
    return headers, rows


def _sharing(lengths: Lengths, samples: int, block: int) -> str:
    from roofline.paging import copies_on_write, sharing

    alone, together = sharing(lengths.prompt, samples, lengths.output, block)
    copies = copies_on_write(lengths.prompt, samples, block)
    return (
        f"{samples} outputs of one prompt of {lengths.prompt:,}: {alone:,} blocks alone, {together:,} shared "
        f"({100 * (alone - together) / alone:.1f} % saved), {copies} copied on write"
    )


def _beams(lengths: Lengths, beams: int, block: int) -> str:
    from roofline.serving.beams import beam_sharing

    saved, copies = beam_sharing(lengths.prompt, beams, lengths.output, block)
    return (
        f"{beams} beams of one prompt of {lengths.prompt:,}: {100 * saved:.1f} % of their blocks saved over an output of "
        f"{lengths.output:,}, {copies:,.0f} copied on write (each beam follows any beam of the step before, all equally likely)"
    )


@bundled(out=OUTPUT)
def paging(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="Adds bytes: a catalogue name, or the path of a config.json.", autocompletion=complete_models
        ),
    ] = None,
    isl: Annotated[
        str | None, typer.Option("--isl", "--input-len", metavar="N", help="Mean prompt tokens.  [default: 161]")
    ] = None,
    osl: Annotated[
        str | None, typer.Option("--osl", "--output-len", metavar="N", help="Mean output tokens.  [default: 338]")
    ] = None,
    max_model_len: Annotated[
        str | None, typer.Option("--max-model-len", metavar="N", help="Longest request that is admitted.  [default: 2048]")
    ] = None,
    block_size: Annotated[str | None, typer.Option("--block-size", metavar="N", help="Tokens of a block.  [default: 16]")] = None,
    spread: Annotated[
        str, typer.Option("--spread", metavar="CV", help="Standard deviation over mean of both lengths, 0 for fixed ones.")
    ] = "1",
    samples: Annotated[
        str | None, typer.Option("--samples", metavar="N", help="Outputs of one prompt: adds what sharing blocks saves.")
    ] = None,
    beams: Annotated[
        str | None, typer.Option("--beams", metavar="N", help="Beams of a search: adds what they share, step by step.")
    ] = None,
    *,
    out: Output,
) -> int:
    """Where a cache's memory goes: contiguous, power-of-two, oracle and paged allocation; what sharing blocks saves.

    The defaults are the conversations of the vLLM paper (ShareGPT).

    roofline paging opt-13b --isl 161 --osl 338 --samples 4
    """
    from fractions import Fraction

    from roofline.paging import POLICIES, Lengths, expected_waste, usage

    try:
        variation = Fraction(spread)
    except (ValueError, ZeroDivisionError):
        raise InputError(f"spread: {spread!r} is not a number; give a standard deviation over the mean, like 1") from None
    lengths = Lengths(_one(isl, "isl", 161, 0), _one(osl, "osl", 338), _one(max_model_len, "max-model-len", 2048), variation)
    block = _one(block_size, "block-size", 16)
    token_bytes: Any = None
    about: Record = {"model": None}
    if model is not None:
        from roofline.cli.points import kv_bytes_per_token
        from roofline.configs.load import load_model

        loaded = load_model(model)
        token_bytes, about = kv_bytes_per_token(loaded), {"model": loaded.name}
    requests = lengths.requests()
    records = [
        _record(usage(policy, requests, lengths.longest, block), lengths, block, token_bytes, about) for policy in POLICIES
    ]
    paged, contiguous = records[-1], records[0]
    more = contiguous["slots_per_request"] / paged["slots_per_request"]
    out.note(
        out.paint(
            f"paged allocation holds {more:.2f} times the requests of contiguous regions: {100 * paged['token_share']:.1f} % of "
            f"the memory holds tokens, against {100 * contiguous['token_share']:.1f} %",
            "bold",
        ),
        *([_sharing(lengths, _one(samples, "samples", 1), block)] if samples else []),
        *([_beams(lengths, _one(beams, "beams", 1), block)] if beams else []),
        "",
    )
    out.records(records, lambda: _cells(records))
    mean = lengths.prompt + lengths.output
    out.note(
        "",
        f"assumes: independent log-normal lengths, standard deviation {float(variation):g} means, cut at {lengths.longest:,}",
        "assumes: a request counts for as long as it lives; regions of contiguous allocators are powers of two (buddy system)",
        f"assumes: a finished sequence of {mean:,} tokens wastes {100 * float(expected_waste(mean, block)):.2f} % of its blocks",
        f"not modelled: {NOT_MODELLED}",
    )
    return 0

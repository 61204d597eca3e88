"""``roofline validate``: predictions against measurements, calibration, and the gate for CI."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from roofline.cli.bundles import bundled
from roofline.cli.options import complete_gpus
from roofline.cli.output import OUTPUT, Output
from roofline.errors import InputError, suggest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

WHAT = {
    "silicon": "measured operators of a GPU against bound and expected time",
    "serving": "measured servers against the closed form over calibrated kernels: TPOT and TTFT, held out by model and GPU",
    "published": "published kernel rates and throughputs against the datasheet",
    "kernels": "own kernels: traffic counted, code compiled, times measured",
    "all": "silicon, serving and published",
    "calibrate": "fit the constants of a GPU and write them into its hardware file; with --serving those of servers",
    "gate": "predictions against the committed digest, errors against the committed record",
    "host": "two measured roofs of this machine and a few torch operations between them",
    "own": "your own measurements: --file with a CSV or JSON of operators",
}
EXAMPLES = """\
roofline validate WHAT sets predictions beside measurements.

  roofline validate published
  roofline validate own --file measured.csv --gpu h100-sxm
  roofline validate serving

published and own need nothing more; serving and silicon read the tables of others (extra silicon).
roofline validate --help lists all, docs/howto/read-a-validation-report.md says how to read a line."""
OK, FINDING = 0, 1


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def _show_scores(scores: Sequence[Any], out: Output) -> None:
    whole = out.format == "table"
    shown = [score for score in scores if score.band is None] if whole else scores

    def cells() -> tuple[list[str], list[list[Any]]]:
        headers = [
            "class", "kernel", "dtype", "split", *([] if whole else ["band"]), "n", "ratio", "error\n%", "p90\n%", "bound\n%",
            "noise\n%", "target\n%", "", "beats\nbound", "dropped", "constants",
        ]  # fmt: skip
        rows = [
            [
                s.cls, s.kernel, s.dtype, s.split, *([] if whole else [s.band or "all"]), s.n, f"{s.median_ratio:.2f}",
                _percent(s.mape), _percent(s.p90), _percent(s.plain), _percent(s.noise_floor), _percent(s.target),
                {None: "", True: "met", False: "missed"}[s.met],
                s.bound_violations, s.dropped, s.constants,
            ]
            for s in shown
        ]  # fmt: skip
        return headers, rows

    out.records((score.record() for score in shown), cells)


def _silicon(gpu: str, classes: list[str] | None, out: Output, plots: str | None) -> int:
    from roofline.accelerator import load_accelerator
    from roofline.validate.record import harder
    from roofline.validate.report import score_silicon

    with out.bar(f"scoring {gpu}"):
        scores = list(score_silicon(gpu, classes))
    _show_scores([*scores, *harder(load_accelerator(gpu).id, classes)], out)
    whole = [score for score in scores if score.band is None]
    judged = [score for score in scores if score.met is not None]
    unexplained = sum(score.bound_violations for score in whole if not score.explained)
    out.note(
        "",
        f"{sum(s.n for s in whole):,} rows; targets met {sum(bool(s.met) for s in judged)} of {len(judged)}; "
        f"{unexplained} rows beat the bound without a reason",
        "error: mean |expected - measured| / measured on rows that no constant has seen; bound: the same of the datasheet bound",
    )
    if plots is not None:
        from roofline.validate.plots import draw

        out.note(f"wrote {', '.join(draw(gpu, classes, plots))}")
    return OK


def _serving(out: Output) -> int:
    from roofline.validate.serving.report import by_concurrency, data, refused, scores, with_suspects
    from roofline.validate.serving.targets import ANCHORS

    found = list(scores())
    shown = found if out.format != "table" else [score for score in found if score.engine is None and score.gpu is None]

    def cells() -> tuple[list[str], list[list[Any]]]:
        headers = [
            "metric", "split", "model", "n", "error\n%", "median\n%", "bias\n%", "p90\n%", "refused", "target\n%",
            "stretch\n%", "",
        ]  # fmt: skip
        rows = [
            [
                s.metric, s.split, s.model or "all dense", s.n, _percent(s.mape), _percent(s.median), _percent(s.bias),
                _percent(s.p90), s.refused, *(_percent(limit) for limit in s.target or (None, None)),
                "" if s.target is None else "met" if s.mape <= s.target[0] else "missed",
            ]
            for s in shown
        ]  # fmt: skip
        return headers, rows

    out.records((score.record() for score in shown), cells)
    left = data().rows.dropped
    out.note(
        "",
        "error per token of dense runs held out by model, by engine and clients:",
        *(f"  {b.engine:7} {b.clients:4d} clients  {_percent(b.mape)} % (bias {_percent(b.bias)} %, {b.n} runs)"
          for b in by_concurrency()),
        "aiconfigurator 0.12.0 on its own rows:",
        *(f"  {metric} {_percent(error)} % ({gpu + ', ' if gpu else ''}{rows}; refuses {none})"
          for metric, gpu, rows, error, none in ANCHORS),
        *(f"refused: {r.rows} runs of {' '.join(map(str, r.structure))}: {r.reason}" for r in refused()),
        *(f"left: {d.rows} runs: {d.reason}" for d in left if d.rows),
        f"with the runs that left, experts err {_percent(with_suspects())} % per token (fit)",
    )  # fmt: skip
    return OK


def _published(out: Output) -> int:
    from textwrap import shorten

    from roofline.validate.anchors import kernels, throughput

    records = [*kernels(), *throughput()]
    out.records(records, lambda: (
        ["published", "gpu", "roof", "ratio", "source"],
        [[r["what"], r["gpu"], r["roof"], f"{r['ratio']:.2f}", shorten(r["source"].partition(",")[0], 36, placeholder=" ...")]
         for r in records],
    ))  # fmt: skip
    out.note("", "ratio: published over what the datasheet allows; nothing may exceed 1; -o json has pages and comments")
    return FINDING if any(record["ratio"] > 1 for record in records) else OK


def _kernel_row(line: dict[str, Any]) -> list[Any]:
    from roofline.units import latency, traffic

    expected, counted, time, fraction = (line[key] for key in ("expected", "counted", "measured_s", "roof_fraction"))
    judged = counted or line["registers"] is not None or line["failures"]
    return [
        line["kernel"], line["case"], traffic(expected) if expected else "-", traffic(counted) if counted else "-",
        f"{counted / expected:g}" if counted and expected else "-",
        ("wrong" if line["failures"] else "ok") if judged else "",
        *("-" if line[key] is None else line[key] for key in ("registers", "spills", "shared")), line["matrix_unit"] or "-",
        "-" if time is None else latency(time), "-" if fraction is None else f"{fraction:.2f}",
    ]  # fmt: skip


def _kernels(names: str, out: Output) -> int:
    from roofline.kernels.registry import KERNELS, check
    from roofline.validate.kernels import evidence, summary

    chosen = [check(name.strip()) for name in names.split(",")] if names else list(KERNELS)
    with out.bar("proving kernels"):
        records = evidence(chosen)

    def cells() -> tuple[list[str], list[list[Any]]]:
        headers = [
            "kernel", "case", "expected", "counted", "ratio", "", "registers", "spills", "shared", "unit", "measured", "of roof",
        ]  # fmt: skip
        return headers, [_kernel_row(line) for line in summary(records)]

    out.records(records, cells)
    failures = sorted({f"{r['kernel']} {r['case']}: {failure}" for r in records for failure in r["failures"]})
    measured = sum(record["measured_s"] is not None for record in records)
    cases = {(record["kernel"], record["case"]) for record in records}
    wrong = {(record["kernel"], record["case"]) for record in records if record["failures"]}
    right = "counted equals expected as integers, compiled for sm_90"
    holds = f"{len(wrong)} of {len(cases)} cases are wrong" if wrong else right
    out.note(
        "", *failures, f"{len(records)} records; {holds}, measured: {measured}",
        *([] if measured else ["no GPU record is committed (roofline bench makes one)"]),
    )  # fmt: skip
    return FINDING if failures else OK


def _calibrate(
    gpu: str, classes: list[str] | None, base: str | None, scale: bool, splits: bool, folder: Path | None, out: Output
) -> int:
    from roofline.accelerator import HARDWARE, load_accelerator
    from roofline.validate.calibrate import borrowed, calibrate, fit_scale, section, write

    name, target = load_accelerator(gpu).id, HARDWARE if folder is None else folder
    if base is not None:
        factor = fit_scale(name, load_accelerator(base).id) if scale else None
        changed = write(name, lambda date: borrowed(name, load_accelerator(base).id, factor, date), target)
        out.note(f"{name}: constants of {base}" + (f", cycles of 16-bit matmuls times {factor}" if factor else ""))
    else:
        found = calibrate(name, classes, watch=lambda families: out.watch(families, f"fitting {name}"))
        changed = write(name, lambda date: section(found, date), target, some=classes is not None)
        out.records(
            ({"family": f.family, "model": f.model.name, "rows": f.fitted, "held_out": f.held_out, "mape": f.mape, **f.constants}
             for f in found),
            lambda: (["family", "model", "rows", "held out", "error\n%"],
                     [[f.family, f.model.name, f.fitted, f.held_out, _percent(f.mape)] for f in found]),
        )  # fmt: skip
    out.note("", f"{target.name}/{name}.toml {'written' if changed else 'is as it was'}")
    if splits or base is not None or folder is None:
        with out.bar(f"scoring {name}") as step:
            _record(name, classes, splits, step)
    return OK


def _calibrate_serving(folder: Path | None, out: Output) -> int:
    from roofline.expected.serving import DATA
    from roofline.validate.serving.record import write
    from roofline.validate.serving.write import calibrate

    target = DATA if folder is None else folder / DATA.name
    with out.bar("fitting servers"):
        found, changed = calibrate(target)
    rows = [{"engine": engine, **own} for engine, own in found.engines.items()] + [{"engine": "shared", **found.shared}]
    out.records(rows, lambda: (
        ["engine", "constant", "value"],
        [[row["engine"], name, f"{value:g}"] for row in rows for name, value in row.items() if name != "engine"],
    ))  # fmt: skip
    out.note("", f"{target.name} {'written' if changed else 'is as it was'}")
    if folder is None:
        write()
    return OK


def _record(gpu: str, classes: list[str] | None, splits: bool, step: Callable[[], None]) -> None:
    """Writes the committed record of an accelerator; other classes, and harder splits without a refit, stay as they were."""
    from roofline.validate.record import RECORDS, merge
    from roofline.validate.report import score_silicon

    fresh = list(score_silicon(gpu, classes))
    if splits:
        from roofline.validate.splits import refits

        for score in refits(gpu, classes):
            fresh.append(score)
            step()
    merge(RECORDS / f"{gpu}.csv", fresh)


def _gate(update: bool, out: Output) -> int:
    from roofline.validate.gate import compare_errors, compare_predictions, predictions, read_digest, write_digest
    from roofline.validate.record import read, recorded_gpus

    head = list(out.watch(predictions(), "predicting", len(read_digest()) or None))
    if update:
        write_digest(head)
        out.note(f"digest of {len(head)} predictions written")
        return OK
    findings = list(compare_predictions(head, read_digest()))
    try:
        from roofline.validate.report import score_silicon
        from roofline.validate.silicon.source import root

        root()
        for gpu in out.watch(recorded_gpus(), "comparing"):
            findings += compare_errors(score_silicon(gpu), read(gpu))
    except ModuleNotFoundError as error:
        from roofline.install import install

        out.note(f"silicon errors are not compared: {error.name} is not installed ({install('silicon')})")
    out.records(
        ({"kind": f.kind, "subject": f.subject, "detail": f.detail, "blocks": f.blocks} for f in findings),
        lambda: (["finding", "subject", "detail", ""],
                 [[f.kind, f.subject, f.detail, "blocks" if f.blocks else ""] for f in findings]),
    )  # fmt: skip
    blocking = sum(finding.blocks for finding in findings)
    out.note("", f"{len(head)} predictions compared; {len(findings)} findings, {blocking} block (--update accepts predictions)")
    return FINDING if blocking else OK


def _host(out: Output) -> int:
    from roofline.units import bandwidth, flop_rate, latency
    from roofline.validate.host import measure, too_fast

    roofs, placed = measure()
    out.records(
        ({"operation": p.name, "flop": p.flops, "bytes": p.bytes, "bound_s": p.bound_s, "measured_s": p.measured_s,
          "ratio": p.ratio} for p in placed),
        lambda: (["operation", "bound", "measured", "ratio"],
                 [[p.name, latency(p.bound_s), latency(p.measured_s), f"{p.ratio:.2f}"] for p in placed]),
    )  # fmt: skip
    out.note("", f"roofs of one thread, measured: {bandwidth(roofs['bandwidth'])}, {flop_rate(roofs['rate'])}")
    out.note("memory: the best of reading, copying and adding; bytes count once for each operand and result")
    out.note(
        *(
            f"{one.name} takes {one.ratio:.2f} of its bound: the roofs were disturbed, or a cache held its data; measure again"
            for one in too_fast(placed)
        )
    )
    return OK


def _own(file: str | None, gpu: str, out: Output) -> int:
    from pathlib import Path

    from roofline.accelerator import load_accelerator
    from roofline.validate.own_report import report_own

    if file is None:
        raise InputError("file: validate own needs --file with your measurements (CSV or JSON)")
    scores = report_own(Path(file), load_accelerator(gpu).id)
    _show_scores(scores, out)
    out.note(*(score.note for score in scores if score.note and score.band is None))
    beaten = [score for score in scores if score.bound_violations and score.band is None]
    out.note(
        *(
            f"{score.cls} {score.kernel} {score.dtype}: {score.bound_violations} of {score.n} rows are faster than {gpu} allows; "
            "check their timer, type and shape"
            for score in beaten
        )
    )
    return FINDING if any(score.bound_violations for score in scores) else OK


def _classes(names: Iterable[str]) -> list[str] | None:
    from roofline.validate.silicon.suite import check_class

    chosen = [part.strip() for name in names for part in name.split(",")]
    for name in chosen:
        check_class(name)
    return chosen or None


@bundled(out=OUTPUT)
def validate(
    what: Annotated[
        str,
        typer.Argument(
            metavar="WHAT", help="; ".join(f"{name}: {text}" for name, text in WHAT.items()), autocompletion=lambda: list(WHAT),
            show_default=False,
        ),
    ] = "",
    gpu: Annotated[
        str, typer.Option(help="The accelerator whose measurements are meant.", autocompletion=complete_gpus)
    ] = "h100-sxm",
    cls: Annotated[
        str, typer.Option("--class", metavar="CLASS", help="Operator classes, or kernels, comma separated; all without it.")
    ] = "",
    file: Annotated[
        str | None,
        typer.Option(help="own: CSV or JSON with class, latency_us, dtype; gemm m,n,k; attention_decode and attention_prefill "
                          "batch,new,history,heads,kv_heads,head_dim,window."),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(help="calibrate: take the constants of this accelerator instead.", autocompletion=complete_gpus),
    ] = None,
    scale: Annotated[bool, typer.Option("--scale", help="calibrate: with --base, fit one factor on 16-bit matmuls.")] = False,
    splits: Annotated[bool, typer.Option("--splits", help="calibrate: refit and score the harder splits, too.")] = False,
    serving: Annotated[bool, typer.Option("--serving", help="calibrate: fit the constants of servers instead.")] = False,
    folder: Annotated[str | None, typer.Option(help="calibrate: write to hardware files in this folder instead.")] = None,
    plots: Annotated[str | None, typer.Option(help="silicon: draw expected against measured into this folder.")] = None,
    update: Annotated[bool, typer.Option("--update", help="gate: accept the predictions of this state.")] = False,
    *,
    out: Output,
) -> int:  # fmt: skip
    """Predictions against measurements: operator by operator, on rows that no constant has seen."""
    from pathlib import Path

    if not what:
        out.note(EXAMPLES)
        return OK
    if what not in WHAT:
        raise InputError(f"validate: {what!r} is not one of {', '.join(WHAT)}.{suggest(what, WHAT)}")
    if what == "silicon":
        return _silicon(gpu, _classes([cls] if cls else []), out, plots)
    if what == "all":
        return _silicon(gpu, _classes([cls] if cls else []), out, plots) or _serving(out) or _published(out)
    if what == "serving":
        return _serving(out)
    if what == "published":
        return _published(out)
    if what == "kernels":
        return _kernels(cls, out)
    if what == "calibrate" and serving:
        return _calibrate_serving(None if folder is None else Path(folder), out)
    if what == "calibrate":
        return _calibrate(
            gpu, _classes([cls] if cls else []), base, scale, splits, None if folder is None else Path(folder), out
        )  # fmt: skip
    if what == "gate":
        return _gate(update, out)
    return _host(out) if what == "host" else _own(file, gpu, out)

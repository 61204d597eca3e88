"""Every measured row of a GPU against its bound and expected time, beside a plain read of the same files, in one run.

    python benchmarks/silicon.py [--gpu h100-sxm] [--json]

CPU seconds of one process, imports left out: what `roofline validate silicon` does (keys hashed, Costs by the components,
bound, expected time, scores), and the same tables read by pandas and nothing else. The ratio is the figure to quote.
"""

from __future__ import annotations

import argparse
import json
import sys
from time import process_time

import pandas
import pyarrow.parquet  # noqa: F401  (pandas imports it at its first read)

from roofline.validate.report import score_silicon
from roofline.validate.silicon.source import folder_of, root
from roofline.validate.silicon.suite import frames


def measure(gpu: str) -> dict[str, object]:
    """Seconds of the evaluation, and of a plain read of its files."""
    start = process_time()
    scores = score_silicon(gpu)
    seconds = process_time() - start
    found = list(frames(gpu))
    paths = sorted({root() / folder_of(gpu) / f"{frame.file}.parquet" for frame in found})
    start = process_time()
    read = sum(len(pandas.read_parquet(path)) for path in paths)
    plain = process_time() - start
    rows = sum(map(len, found))
    return {
        "gpu": gpu, "files": len(paths), "rows_read": read, "rows": rows, "scores": len(scores), "plain_read_s": plain,
        "evaluation_s": seconds, "rows_per_s": rows / seconds, "ratio": seconds / plain,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", default="h100-sxm")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = measure(options.gpu)
    if options.json:
        json.dump(found, sys.stdout, indent=1)
        print()
    else:
        print(
            f"{found['gpu']}: {found['rows']:,} rows of {found['files']} files in {found['evaluation_s']:.1f} s "
            f"({found['rows_per_s']:,.0f} rows/s); a plain read takes {found['plain_read_s']:.1f} s; ratio {found['ratio']:.1f}"
        )


if __name__ == "__main__":
    main()

"""CPU time of the command line, beside a bare interpreter in the same run.

    python benchmarks/cli.py [-n RUNS] [-o results.json]

Each command runs in a process of its own; its CPU seconds (user and system) come from the operating system's account of
finished children, and the median over the runs is printed, with what it costs above ``python -c pass``. One run before
the first is not counted: it writes the byte code. The commands take turns, so that a busy machine disturbs all alike.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tabulate import tabulate

ROOT = Path(__file__).parents[1]
LLAMA_2_13B = {
    "model_type": "llama", "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40,
    "vocab_size": 32000, "torch_dtype": "float16",
}  # fmt: skip


def cpu_seconds(command: list[str], environment: dict[str, str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def measure(commands: dict[str, list[str]], runs: int) -> dict[str, list[float]]:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPATH"] = str(ROOT)
    times: dict[str, list[float]] = {name: [] for name in commands}
    for turn in range(runs + 1):
        for name, command in commands.items():
            seconds = cpu_seconds(command, environment)
            if turn:
                times[name].append(seconds)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU time of the command line.")
    parser.add_argument("-n", "--runs", type=int, default=15, help="runs of each command (default 15)")
    parser.add_argument("-o", "--output", type=Path, help="write the results as JSON, too")
    options = parser.parse_args()
    roofline = [sys.executable, "-m", "roofline"]
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "llama-2-13b.json")
        model.write_text(json.dumps(LLAMA_2_13B), encoding="utf-8")
        question = [*roofline, "what-if", str(model), "--gpu", "h100-sxm", "--context", "1024"]
        commands = {
            "python -c pass": [sys.executable, "-c", "pass"],
            "python -c 'import typer'": [sys.executable, "-c", "import typer"],
            "roofline --help": [*roofline, "--help"],
            "roofline what-if": question,
            "roofline what-if, 1000 points": [*question, "--batch", "1:1000:+1", "-o", "jsonl"],
            "roofline what-if --kv-heads 8": [*question, "--kv-heads", "8"],
            "roofline what-if, does not fit": [*question, "--batch", "512"],
            "roofline formula attention": [*roofline, "formula", "attention"],
        }
        times = measure(commands, options.runs)
    bare = statistics.median(times["python -c pass"])
    results = {
        name: {"median_cpu_s": statistics.median(seconds), "least_cpu_s": min(seconds), "runs": len(seconds)}
        for name, seconds in times.items()
    }
    rows = [
        [name, f"{r['median_cpu_s']:.3f}", f"{r['least_cpu_s']:.3f}", f"{r['median_cpu_s'] - bare:.3f}"]
        for name, r in results.items()
    ]
    print(tabulate(rows, headers=["command", "median CPU s", "least CPU s", "above python -c pass"], disable_numparse=True))
    if options.output:
        options.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

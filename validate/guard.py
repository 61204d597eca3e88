"""What the pytest fixture ``roofline`` does: a test fails when a kernel leaves its share of the roof or moves more bytes.

Times need a GPU, counted bytes triton's interpreter (TRITON_INTERPRET=1): two runs of pytest. In the run that cannot give one of
them its tests are skipped, or fail where ``--roofline-require`` names it.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from roofline.cost import Cost
from roofline.errors import InputError
from roofline.install import install

if TYPE_CHECKING:
    from roofline.accelerator import Accelerator
    from roofline.validate.counted import Counts

MAKERS = ("nvidia", "amd", "geforce", "tesla", "instinct")
"""Words of a device's name that its accelerator's id leaves out."""
MOST_LINES = 20
"""Differences that a message lists."""


def accelerator_of(device: str) -> Accelerator:
    """The accelerator of a device's name as its driver gives it ("NVIDIA H100 80GB HBM3"). Raises InputError."""
    from roofline.accelerator import load_accelerator
    from roofline.validate.measured import gpu_id

    words = [word for word in gpu_id(device).split("-") if word not in MAKERS and not word.startswith("hbm")]
    try:
        return load_accelerator("-".join(words))
    except InputError:
        raise InputError(f"gpu: {device!r} is not known; give --roofline-gpu NAME, or the path of a TOML file") from None


def traffic(counts: Counts) -> dict[str, int]:
    """Counted bytes by kernel, argument and direction, and FLOPs of dots by operand type; what is zero is left out.

    Keys read "kernel.argument read", "kernel.argument written", "kernel.argument atomic" and "kernel dot bf16".
    """
    found: dict[str, int] = {}
    for kernel, tally in counts.kernels.items():
        for direction, counter in (("read", tally.read), ("written", tally.written), ("atomic", tally.atomic)):
            found |= {f"{kernel}.{argument} {direction}": number for argument, number in counter.items() if number}
        found |= {f"{kernel} dot {kind}": number for kind, number in tally.dot.items() if number}
    return dict(sorted(found.items()))


def _amount(key: str, number: int) -> str:
    return f"{number:,} {'FLOP' if ' dot ' in key else 'B'}"


def growth(before: Mapping[str, int], now: Mapping[str, int]) -> list[str]:
    """One line for each count that is above the baseline, or that the baseline does not have."""
    lines = []
    for key, number in now.items():
        if key not in before:
            lines.append(f"{key}: {_amount(key, number)}, none before")
        elif number > before[key]:
            more = 100 * (number / before[key] - 1)
            lines.append(f"{key}: {_amount(key, before[key])} -> {_amount(key, number)} (+{more:.3g} %)")
    return lines


def excess(counts: Counts, expected: Cost | Mapping[str, int], at_most: float) -> list[str]:
    """One line for each amount that is above ``at_most`` times what was expected.

    A Cost is compared in its sums, bytes read and bytes written; a mapping by argument, all directions together, and an
    argument that it does not name may move nothing.
    """
    if isinstance(expected, Cost):
        pairs = [
            ("bytes read", sum(counts.read.values()), int(expected.bytes_read)),
            ("bytes written", sum(counts.written.values()) + sum(counts.atomic.values()), int(expected.bytes_written)),
        ]
    else:
        moved = counts.read + counts.written + counts.atomic
        pairs = [(name, moved[name], expected.get(name, 0)) for name in sorted({*moved, *expected})]
    return [
        f"{what}: {found:,} B, {right:,} B expected" + (f" ({found / right:.4g} times)" if right else "")
        for what, found, right in pairs
        if found > at_most * right
    ]


@dataclass(frozen=True)
class Guard:
    """The fixture of one test.

    Attributes:
        test: its node id. gpu: name of the accelerator whose roofs count, "" for the one that is here.
        baseline: the file of committed traffic. update: write it. required: "times", "traffic": fail instead of skipping.
        record: takes (name, value) for the report (JUnit's properties). fell: collects tests below their baseline.
    """

    test: str
    gpu: str
    baseline: Path
    update: bool
    required: frozenset[str]
    record: Callable[[str, Any], None]
    fell: list[str]

    def _cannot(self, what: str, reason: str) -> NoReturn:
        __tracebackhide__ = True
        if what in self.required:
            pytest.fail(f"{reason} (--roofline-require {what})")
        pytest.skip(reason)

    def seconds(self, call: Callable[[], Any]) -> float:
        """Median seconds of a call on the GPU: CUDA events, L2 overwritten before each, as a CUDA graph where it can be one.

        Skips the test where there is no GPU, or where triton interprets.
        """
        __tracebackhide__ = True
        if os.environ.get("TRITON_INTERPRET") == "1":
            self._cannot("times", "triton interprets (TRITON_INTERPRET=1): times are measured in a run without it")
        try:
            import torch
        except ModuleNotFoundError:
            self._cannot("times", f"torch is not installed: {install('kernels')}")
        if not torch.cuda.is_available():
            self._cannot("times", "no CUDA device: times are measured on a GPU")
        from roofline.validate.measured import Clock

        measured, _, _ = Clock().both([call])
        return measured.median

    def share(self, cost: Cost, seconds: float, gpu: str = "") -> float:
        """The part of the roof that a measured time reaches: the bound of the Cost on the accelerator over the time.

        Raises InputError for an unknown accelerator, and for a time that is none.
        """
        from roofline.timing import time

        if not 0 < seconds < float("inf"):
            raise InputError(f"seconds: {seconds} is no time; give the seconds of one call")
        return float(time(cost, self._accelerator(gpu)).bound) / seconds

    def _accelerator(self, gpu: str) -> Accelerator:
        from roofline.accelerator import load_accelerator

        name = gpu or self.gpu
        if name:
            return load_accelerator(name)
        import torch

        if not torch.cuda.is_available():
            raise InputError("gpu: there is none here; say whose roofs count: gpu='h100-sxm', or --roofline-gpu NAME")
        return accelerator_of(torch.cuda.get_device_properties(0).name)

    def check_share(self, cost: Cost, seconds: float | Callable[[], Any], *, at_least: float, gpu: str = "") -> float:
        """Fails the test when a kernel reaches less than ``at_least`` of the roof, or more than the whole of it.

        Args:
            cost: what a call has to do at least. seconds: of a call, or the call, which is then timed (``seconds``).
            at_least: share of the bound, 0 < at_least <= 1. gpu: instead of the run's.

        Returns the share.
        """
        __tracebackhide__ = True
        from roofline.timing import time
        from roofline.units import bandwidth, flop_rate, latency, traffic

        if not 0 < at_least <= 1:
            raise InputError(f"at_least: {at_least} is no share of the roof; give one above 0 and at most 1")
        taken = self.seconds(seconds) if callable(seconds) else seconds
        chip = self._accelerator(gpu)
        share, timing = self.share(cost, taken, chip.id if gpu or self.gpu else gpu), time(cost, chip)
        self.record("roofline_share", round(share, 4))
        roof = f"{traffic(cost.bytes)} at {bandwidth(chip.bandwidth.value)}"
        if timing.bound_by != "memory":
            unit = max((unit for unit in cost.flops if unit in chip.compute), key=lambda unit: cost.flops[unit])
            roof = f"{cost.flops[unit] / 1e9:,.4g} GFLOP at {flop_rate(chip.rate(unit))} {unit}"
        told = f"measured {latency(taken)}, bound {latency(timing.bound)} ({timing.bound_by}: {roof}; {chip.id}, datasheet)"
        if share > 1:
            pytest.fail(
                f"{share:.2f} of the roof is more than there is: {told}\n"
                "the Cost counts too much, the inputs stay in a cache, or this is another GPU"
            )
        if share < at_least:
            pytest.fail(f"{share:.2f} of the roof, at least {at_least:.2f} wanted: {told}")
        return share

    @contextlib.contextmanager
    def counting(self) -> Iterator[Counts]:
        """Counts what triton's interpreter loads, stores and multiplies inside; skips the test where it does not interpret."""
        __tracebackhide__ = True
        if os.environ.get("TRITON_INTERPRET") != "1":
            self._cannot("traffic", "traffic is counted in triton's interpreter: set TRITON_INTERPRET=1 for the whole run")
        try:
            from roofline.validate.counted import counting
        except ModuleNotFoundError as error:
            self._cannot("traffic", f"{error.name} is not installed: {install('kernels')}")
        with counting() as counts:
            yield counts

    def check_traffic(
        self, counts: Counts, expected: Cost | Mapping[str, int] | None = None, *, at_most: float = 1.0, name: str = ""
    ) -> None:
        """Fails the test when counted traffic is above what was expected, or above the committed baseline.

        Args:
            counts: of ``counting``, after its block. expected: a Cost (bytes read, bytes written) or bytes by argument;
                without it the baseline counts: every argument and direction of every kernel, and dot FLOPs.
            at_most: times the expectation. name: of the entry in the baseline, where a test has several.
        """
        __tracebackhide__ = True
        if not counts.kernels:
            pytest.fail("no triton kernel was launched inside counting(): there is nothing to compare")
        self.record("roofline_bytes", sum(counts.read.values()) + sum(counts.written.values()) + sum(counts.atomic.values()))
        if expected is not None:
            lines = excess(counts, expected, at_most)
            if lines:
                limit = "" if at_most == 1 else f", at most {at_most:g} times as much is allowed"
                pytest.fail("\n  ".join([f"more traffic than expected{limit}:", *lines[:MOST_LINES]]))
            return
        entry = f"{self.test} {name}".strip()
        now, known = traffic(counts), self._committed()
        if self.update:
            known[entry] = now
            self.baseline.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n", encoding="utf-8")
            return
        if entry not in known:
            pytest.fail(
                f"{self.baseline.name} has no entry {entry!r}: run pytest --roofline-update on what to keep, and commit the file"
            )
        before = known[entry]
        lines = growth(before, now)
        if lines:
            gone = [f"{key}: gone (was {_amount(key, before[key])})" for key in before if key not in now]
            pytest.fail("\n  ".join([
                f"more traffic than in {self.baseline.name}:", *[*lines, *gone][:MOST_LINES],
                "if that is meant: pytest --roofline-update, and commit the file",
            ]))  # fmt: skip
        if now != before:
            self.fell.append(entry)

    def _committed(self) -> dict[str, dict[str, int]]:
        try:
            found = json.loads(self.baseline.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise InputError(f"{self.baseline.name}: cannot be read ({error}); pytest --roofline-update writes it") from None
        if not isinstance(found, dict) or not all(isinstance(entry, dict) for entry in found.values()):
            raise InputError(f"{self.baseline.name}: is not a baseline; remove it and run pytest --roofline-update")
        return found

"""What a measurement ran on: the device and its clocks, the software, the commit."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path
from typing import Any

QUERIED = (
    "name",
    "driver_version",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "power.draw",
    "temperature.gpu",
    "persistence_mode",
)


def device_state() -> dict[str, str]:
    """What nvidia-smi says of the device: clocks, power, driver. Empty where there is none."""
    query = ["nvidia-smi", f"--query-gpu={','.join(QUERIED)}", "--format=csv,noheader", "-i", "0"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(QUERIED, (part.strip() for part in done.stdout.splitlines()[0].split(",")), strict=False))


def commit() -> str:
    """The commit of the checkout that is measured, with "+" where files differ from it; empty outside one."""
    here = Path(__file__).resolve().parent
    try:
        said = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--match=", "--dirty=+"],
            cwd=here, capture_output=True, text=True, check=True, timeout=10,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ""
    return said.stdout.strip()


def versions() -> dict[str, str]:
    """What the times depend on beside the device: software and the commit."""
    import torch
    import triton

    from roofline import __version__

    return {
        "torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda or "",
        "python": platform.python_version(), "roofline": __version__, "commit": commit(),
    }  # fmt: skip


def identity() -> dict[str, Any]:
    """The device and the versions."""
    import torch

    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "units": properties.multi_processor_count,
        "capability": list(torch.cuda.get_device_capability(0)),
        "versions": versions(),
    }

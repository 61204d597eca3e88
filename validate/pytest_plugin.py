"""The pytest plugin: a fixture ``roofline`` with which the tests of another repository guard its kernels.

Installed with the package; until a test asks for the fixture it imports nothing but pytest. ``validate/guard.py`` has what
the fixture does, docs/howto/ci.md how it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from roofline.validate.guard import Guard

BASELINE = "roofline-baseline.json"
KINDS = ("times", "traffic")
FALLEN: pytest.StashKey[list[str]] = pytest.StashKey()
"""Tests whose traffic is below the baseline."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Which GPU, which baseline, and what may not be skipped."""
    group = parser.getgroup("roofline", "kernels against the roofline model")
    group.addoption("--roofline-gpu", metavar="NAME", help="the accelerator whose roofs count (roofline gpus); else the one here")
    group.addoption(
        "--roofline-require", action="append", default=[], choices=KINDS,
        help="fail where times cannot be measured, or traffic cannot be counted, instead of skipping the test",
    )  # fmt: skip
    group.addoption("--roofline-update", action="store_true", help="write the counted traffic to the baseline")
    parser.addini("roofline_gpu", "the accelerator whose roofs count", default="")
    parser.addini("roofline_baseline", f"file with the committed traffic, from the root (default: {BASELINE})", default=BASELINE)


@pytest.fixture
def roofline(request: pytest.FixtureRequest) -> Guard:
    """Shares of the roof and traffic of this test's kernels: check_share, check_traffic, seconds, counting."""
    from roofline.validate.guard import Guard

    config = request.config
    if config.getoption("roofline_update") and hasattr(config, "workerinput"):
        raise pytest.UsageError("--roofline-update writes one file: run it without pytest-xdist (-n 0)")
    return Guard(
        test=request.node.nodeid,
        gpu=config.getoption("roofline_gpu") or config.getini("roofline_gpu"),
        baseline=config.rootpath / config.getini("roofline_baseline"),
        update=config.getoption("roofline_update"),
        required=frozenset(config.getoption("roofline_require")),
        record=lambda name, value: request.node.user_properties.append((name, value)),
        fell=config.stash.setdefault(FALLEN, []),
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Says where traffic fell, so that the gain can be kept."""
    fallen = config.stash.get(FALLEN, [])
    if fallen:
        terminalreporter.section("roofline")
        for test in fallen:
            terminalreporter.line(f"{test}: less traffic than the baseline")
        terminalreporter.line("pytest --roofline-update keeps the gain: commit the baseline that it writes")

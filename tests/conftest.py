"""Reference data that lies beside the checkout and is no part of it."""

from __future__ import annotations

from pathlib import Path

import pytest

SHARED = Path(__file__).parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder ``../shared``; a skip where it is absent."""
    if not SHARED.is_dir():
        pytest.skip("the shared reference data are not beside this checkout")
    return SHARED

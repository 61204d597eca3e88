"""The kernels' tests run in Triton's interpreter, which must be chosen before triton is imported."""

import os
from collections.abc import Iterator

import pytest

os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def interpreted() -> Iterator[None]:
    """The interpreter with its arithmetic put right, for tests that count nothing."""
    from roofline.validate.counted import counting

    with counting():
        yield

"""The fixture ``meta``: the helper module beside this file, or a skip where transformers or torch is not installed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

HELPER = Path(__file__).with_name("meta.py")


@pytest.fixture(scope="session")
def meta() -> ModuleType:
    """``build(model_type, **config)``, ``count_flops(model, batch, new, cached)`` and ``parameters(model)``."""
    pytest.importorskip("torch", reason="needs torch (extra oracle)")
    pytest.importorskip("transformers", reason="needs transformers (extra oracle)")
    name = "roofline_oracle_meta"
    spec = importlib.util.spec_from_file_location(name, HELPER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module

"""Which reader reads which model_type: the one table to extend for a new family."""

from __future__ import annotations

from roofline.configs.dense import STYLES

READERS: dict[str, str] = {name: "dense:read_dense" for name in STYLES}
"""model_type -> "module:function" under ``roofline.configs``; the module is imported when its family is met."""

UNSUPPORTED: dict[str, str] = {}
"""model_type -> the feature that is missing, for families that are known and not modelled."""

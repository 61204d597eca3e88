"""Which reader reads which model_type: the one table to extend for a new family."""

from __future__ import annotations

from roofline.configs.dense import STYLES

LATENT = ("deepseek_v2", "deepseek_v3", "kimi_k2", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite")

READERS: dict[str, str] = dict.fromkeys(STYLES, "dense:read_dense") | dict.fromkeys(LATENT, "deepseek:read_latent")
"""model_type -> "module:function" under ``roofline.configs``; the module is imported when its family is met."""

UNSUPPORTED: dict[str, str] = {}
"""model_type -> the feature that is missing, for families that are known and not modelled."""

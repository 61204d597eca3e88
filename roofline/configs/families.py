"""Which reader reads which model_type: the one table to extend for a new family."""

from __future__ import annotations

from roofline.configs.dense import STYLES

LATENT = ("deepseek_v2", "deepseek_v3", "kimi_k2", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite")
SPARSE = (
    "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "flex_olmo", "phimoe", "granitemoe", "granitemoeshared", "glm4_moe",
    "ernie4_5_moe", "hunyuan_v1_moe", "minimax_m2", "gpt_oss", "cohere2_moe",
)  # fmt: skip

READERS: dict[str, str] = {
    **dict.fromkeys(STYLES, "dense:read_dense"),
    **dict.fromkeys(LATENT, "deepseek:read_latent"),
    **dict.fromkeys(SPARSE, "moe:read_moe"),
    "dbrx": "moe:read_dbrx",
    "llama4_text": "moe_mixed:read_llama4",
    "mimo_v2_flash": "moe_mixed:read_mimo_v2",
    "step3p5": "moe_mixed:read_step",
    "step3p7": "moe_mixed:read_step",
    **dict.fromkeys(("deepseek_v4", "deepseek_ref"), "deepseek_v4:read_compressed"),
}
"""model_type -> "module:function" under ``roofline.configs``; the module is imported when its family is met."""

UNSUPPORTED: dict[str, str] = {}
"""model_type -> the feature that is missing, for families that are known and not modelled."""

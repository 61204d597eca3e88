"""Families that are known and not modelled, each with the feature that is missing."""

from __future__ import annotations

EXPERTS = "a mixture of experts with rules of its own"
LATENT = "multi-head latent attention with rules of its own"
WRAPPER = "a wrapper of a text model and towers of other senses"
SEQUENCE = "an encoder-decoder of this kind"
ENCODER = "an encoder without causal decoding"

UNSUPPORTED: dict[str, str] = {
    **dict.fromkeys(
        (
            "afmoe", "aria", "aria_text", "bailing_moe", "deepseek", "doge", "dots1", "exaone_moe", "flint", "grok-1",
            "hy_v3", "inkling_text", "jetmoe", "kolibri1", "laguna", "mellum", "muse_spark", "sarvam_moe", "solar_open",
            "granitemoe_swa", "arctic", "minicpm_moe",
        ),
        EXPERTS,
    ),
    **dict.fromkeys(
        (
            "axk1", "axk2", "bailing_hybrid", "hy_v4", "longcat_flash", "minicpm3", "mistral4", "mistral_large4", "plm",
            "sarvam_mla", "youtu",
        ),
        LATENT,
    ),
    **dict.fromkeys(("qwen4_exp", "qwen4_exp_text", "lara_mini", "zaya", "lfm3", "flex_hybrid"), "a hybrid of layer kinds"),
    "zamba": "a Mamba mixer of several heads (n_mamba_heads)",
    "xlstm": "the mLSTM mixer",
    "rwkv5": "the matrix-valued recurrence of RWKV-5",
    "rwkv6": "the matrix-valued recurrence of RWKV-6",
    "gemma3n": "a MobileNetV5 vision tower beside an audio tower",
    "step3p7": "the vision tower of Step 3.7",
    "bitnet": "a norm inside attention and feed-forward (sub-layer norms)",
    "blt": "byte patches (a local encoder and decoder around the latent model)",
    "deci": "key-value heads that differ by layer (num_key_value_heads_per_layer)",
    "diffllama": "differential attention",
    "nanochat": "a norm of queries and keys without weights",
    "openai-gpt": "norms behind each half without a final one",
    "phi3small": "block-sparse attention",
    "phi4_multimodal": "adapters of speech and vision inside the layers",
    "telechat": "a feed-forward with biases of its own",
    "ctrl": "sinusoidal positions of CTRL",
    "xlnet": "two-stream attention",
    "reformer": "attention by hashing",
    **dict.fromkeys(
        (
            "aya_vision", "chameleon", "deepseek_vl", "deepseek_vl_v2", "emu3", "fuyu", "gemma4_unified", "glm4v", "glm4v_moe",
            "hunyuan_vl", "idefics2", "idefics3", "internvl", "internvl_chat", "janus", "llava_next", "llava_onevision",
            "minicpmv", "molmo2", "moshi", "ovis2", "paligemma", "pixtral", "qwen2_5_omni", "qwen2_5_vl", "qwen2_audio",
            "qwen2_vl", "qwen3_omni_moe", "smolvlm", "video_llava", "vipllava", "voxtral",
        ),
        WRAPPER,
    ),
    **dict.fromkeys(
        (
            "blenderbot", "led", "longt5", "m2m_100", "marian", "nllb-moe", "pegasus", "pegasus_x", "plbart", "prophetnet",
            "switch_transformers", "t5gemma", "udop", "umt5",
        ),
        SEQUENCE,
    ),
    **dict.fromkeys(
        (
            "albert", "bert", "big_bird", "camembert", "deberta", "deberta-v2", "distilbert", "electra", "ernie", "modernbert",
            "mpnet", "nomic_bert", "roberta", "roformer", "xlm-roberta",
        ),
        ENCODER,
    ),
}  # fmt: skip
"""model_type -> the feature that is missing. A family that gets a reader is read, whatever stands here."""

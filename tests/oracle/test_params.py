"""Parameters of every config at hand equal those of the transformers class, built on the meta device; or it is refused.

Three kinds of config: real files (collected ones and those that aiconfigurator installs), the defaults of every family's
configuration class, and small random variations. A refusal names what is missing; a wrong number or a traceback fails.
"""

from __future__ import annotations

import importlib.util
import json
import random
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from roofline.configs.families import READERS
from roofline.configs.load import load_model
from roofline.errors import InputError, UnsupportedModel
from roofline.model import Model

pytestmark = [pytest.mark.oracle, pytest.mark.slow]

SEED = 20240607
VARIATIONS = 12
COLLECTED = Path(__file__).parents[3] / "shared" / "cases" / "configs"


def installed() -> list[Path]:
    """Config files of the installed aiconfigurator package, without its side files on quantisation."""
    spec = importlib.util.find_spec("aiconfigurator_core")
    if spec is None or spec.origin is None:
        return []
    found = (Path(spec.origin).parent / "model_configs").glob("*_config.json")
    return sorted(path for path in found if not path.stem.endswith("_hf_quant_config"))


FILES = [*sorted(COLLECTED.glob("*.json")), *installed()]


def read(config: Mapping[str, Any], *refusals: type[Exception]) -> Model:
    """The model; a skip with the message of the refusal where there is none."""
    try:
        return load_model(config)
    except (UnsupportedModel, *refusals) as refusal:
        pytest.skip(str(refusal))


def compare(meta: ModuleType, config: Mapping[str, Any], model: Model) -> None:
    """Text parameters, and all of them where the config has towers, against transformers."""
    expected = meta.parameters_of(config)
    if expected is None:
        pytest.skip(f"{config['model_type']}: transformers has no such class")
    text, everything = expected
    assert model.params == text
    assert everything is None or model.params_total == everything


@pytest.mark.skipif(not FILES, reason="neither the shared configs nor aiconfigurator_core are here")
@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_parameters_of_real_configs(meta: ModuleType, path: Path) -> None:
    config = json.loads(path.read_text(encoding="utf-8"))
    compare(meta, config, read(config))


@pytest.mark.parametrize("family", sorted(READERS))
def test_parameters_of_default_configs(meta: ModuleType, family: str) -> None:
    """The defaults of a family's configuration class, as ``to_dict`` writes them; some contradict themselves."""
    config = meta.default_config(family)
    if config is None:
        pytest.skip(f"{family}: transformers has no such class")
    compare(meta, config, read(config, InputError))


NO_MATTER = (
    "use_cache", "return_dict", "output_hidden_states", "output_attentions", "output_router_logits", "is_decoder",
    "is_encoder_decoder", "add_cross_attention", "torchscript",
)  # fmt: skip
"""Switches that say how a model is run, or what a file is a part of."""

NOT_THE_CONFIG = {
    ("bart", "tie_word_embeddings"): "untied, the class keeps a fourth table that nothing reads",
    ("mbart", "tie_word_embeddings"): "untied, the class keeps a fourth table that nothing reads",
    ("t5", "tie_word_embeddings"): "the class ties whatever the config says; published T5 v1.1 does not",
    ("mt5", "tie_word_embeddings"): "the class ties whatever the config says; published mT5 does not",
    ("t5", "is_gated_act"): "derived from feed_forward_proj",
    ("mt5", "is_gated_act"): "derived from feed_forward_proj",
    ("kimi_linear", "tie_word_embeddings"): "the class cannot tie",
    ("nemotron_h", "tie_word_embeddings"): "the class cannot tie",
    ("mllama_text_model", "tie_word_embeddings"): "the class cannot tie",
    ("zamba2", "tie_word_embeddings"): "untying the head, the class also parts the blocks that layers share",
}
"""Where transformers 5.24 does something else than the config says."""


def text_parameters(meta: ModuleType, config: Mapping[str, Any]) -> int | None:
    """Text parameters by transformers; None for a config that its classes refuse or cannot build."""
    try:
        expected = meta.parameters_of(config)
    except Exception:
        return None
    return None if expected is None else int(expected[0])


@pytest.mark.parametrize("family", sorted(READERS))
def test_parameters_follow_every_switch_or_it_is_refused(meta: ModuleType, family: str) -> None:
    """Each true or false key of a default configuration, turned over."""
    config = meta.default_config(family)
    if config is None or "text_config" in config:
        pytest.skip(f"{family}: transformers has no such class of its own")
    switches = [key for key, value in config.items() if isinstance(value, bool) and key not in NO_MATTER]
    wrong = {}
    for key in switches:
        turned = {**config, key: not config[key]}
        expected = text_parameters(meta, turned)
        try:
            found = load_model(turned).params
        except (InputError, UnsupportedModel):
            continue
        if expected not in (None, found) and (family, key) not in NOT_THE_CONFIG:
            wrong[key] = (found, expected)
    assert wrong == {}


FLAGS: dict[str, tuple[str, ...]] = {
    "llama": ("attention_bias", "mlp_bias"),
    "mistral": (),
    "qwen2": (),
    "qwen3": ("attention_bias",),
    "gemma": ("attention_bias",),
    "gemma2": ("attention_bias",),
    "gemma3_text": ("attention_bias",),
    "phi": ("qk_layernorm",),
    "phi3": (),
    "stablelm": ("use_qkv_bias", "use_parallel_residual", "qk_layernorm"),
    "gpt_neox": ("attention_bias", "use_parallel_residual"),
    "starcoder2": ("use_bias",),
    "cohere": ("attention_bias", "use_qk_norm"),
    "cohere2": ("attention_bias",),
    "granite": ("attention_bias", "mlp_bias"),
    "nemotron": ("attention_bias", "mlp_bias"),
    "olmo": ("attention_bias",),
    "olmo2": ("attention_bias",),
    "olmo3": ("attention_bias",),
    "glm": ("attention_bias",),
    "glm4": ("attention_bias",),
    "seed_oss": ("attention_bias", "attention_out_bias", "mlp_bias"),
    "smollm3": ("attention_bias", "mlp_bias"),
    "apertus": ("attention_bias", "mlp_bias"),
    "arcee": ("attention_bias", "mlp_bias"),
    "ernie4_5": ("use_bias",),
    "hunyuan_v1_dense": ("attention_bias",),
    "exaone4": (),
    "persimmon": ("qk_layernorm",),
    "mixtral": (),
    "qwen3_moe": ("attention_bias",),
    "olmoe": ("attention_bias",),
    "gpt2": (),
    "gpt_bigcode": ("multi_query",),
    "gptj": (),
    "falcon": ("bias", "parallel_attn", "multi_query", "new_decoder_architecture", "alibi"),
    "bloom": (),
    "opt": ("enable_bias", "do_layer_norm_before"),
    "mpt": (),
}
"""Families that are varied, and their switches; each is set to true, to false, or left out."""

NO_GROUPS = ("gpt_neox", "persimmon", "phi")
HEAD_DIM = ("llama", "mistral", "qwen3", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "seed_oss", "granite", "nemotron",
            "mixtral", "qwen3_moe", "smollm3", "ernie4_5", "hunyuan_v1_dense", "arcee", "exaone4")  # fmt: skip
"""Families whose class reads head_dim."""


def variation(family: str, draw: random.Random) -> dict[str, Any]:
    """A small config of a family: random sizes and switches, some of them left out."""
    N = draw.choice((2, 4, 6, 8))
    K = N if family in NO_GROUPS else draw.choice([k for k in range(1, N + 1) if N % k == 0])
    H, L, V = 2 * draw.randint(2, 12), draw.randint(1, 5), draw.randint(70, 300)
    D, F = N * H, 2 * draw.randint(10, 90)
    config: dict[str, Any] = {"model_type": family}
    if family in ("gpt2", "gpt_bigcode", "gptj"):
        config |= {"n_embd": D, "n_head": N, "n_layer": L, "n_inner": draw.choice((F, None)), "vocab_size": V, "n_positions": F}
        if family == "gptj":
            config["rotary_dim"] = H
    elif family == "falcon":
        config |= {"hidden_size": D, "num_attention_heads": N, "num_hidden_layers": L, "vocab_size": V, "num_kv_heads": K}
        config |= {"ffn_hidden_size": F}
    elif family == "bloom":
        config |= {"hidden_size": D, "n_head": N, "n_layer": L, "vocab_size": V}
    elif family == "opt":
        config |= {"hidden_size": D, "num_attention_heads": N, "num_hidden_layers": L, "vocab_size": V, "ffn_dim": F}
        config |= {"word_embed_proj_dim": D, "max_position_embeddings": F}
    elif family == "mpt":
        config |= {"d_model": D, "n_heads": N, "n_layers": L, "vocab_size": V, "expansion_ratio": 4}
    else:
        config |= {
            "hidden_size": D, "num_attention_heads": N, "num_key_value_heads": K, "num_hidden_layers": L,
            "intermediate_size": F, "vocab_size": V, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        }  # fmt: skip
        if family in HEAD_DIM:
            config["head_dim"] = 2 * draw.randint(2, 12)
        if family in ("mixtral", "qwen3_moe", "olmoe"):
            experts = {"mixtral": "num_local_experts"}.get(family, "num_experts")
            config |= {experts: draw.randint(3, 9), "num_experts_per_tok": 2}
        if family == "qwen3_moe":
            config["moe_intermediate_size"] = 2 * draw.randint(4, 20)
    for key in ("tie_word_embeddings", *FLAGS[family]):
        value = draw.choice((True, False, None))
        if value is not None:
            config[key] = value
    return config


@pytest.mark.parametrize("number", range(VARIATIONS))
@pytest.mark.parametrize("family", FLAGS)
def test_parameters_of_random_configs(meta: ModuleType, family: str, number: int) -> None:
    config = variation(family, random.Random(f"{SEED} {family} {number}"))
    model = read(config)
    assert model.params == meta.parameters(meta.build(**config)), config

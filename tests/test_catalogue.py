"""Named models: exact parameters and key-value bytes per token, and entries that can be found and checked.

Parameters: those of transformers 5.24 classes on the meta device, which equal the published totals; for models that
transformers cannot build, the totals that their publishers give. Key-value bytes: 2 K H L elements of two bytes.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from roofline.configs import load
from roofline.configs.load import full_name, load_model, model_names, normalise, read_catalog
from roofline.errors import InputError

PARAMETERS = {
    "llama-2-7b": 6_738_415_616, "llama-2-13b": 13_015_864_320, "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248, "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248, "llama-3.1-70b": 70_553_706_496, "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400, "llama-3.2-3b": 3_212_749_824, "llama-3.3-70b": 70_553_706_496,
    "mistral-7b-v0.1": 7_241_732_096, "mistral-nemo-instruct-2407": 12_247_782_400,
    "mistral-small-24b-instruct-2501": 23_572_403_200, "mistral-large-instruct-2407": 122_610_069_504,
    "qwen2.5-0.5b": 494_032_768, "qwen2.5-1.5b": 1_543_714_304, "qwen2.5-3b": 3_085_938_688, "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664, "qwen2.5-32b": 32_763_876_352, "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920, "qwen3-1.7b": 1_720_574_976, "qwen3-4b": 4_022_468_096, "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200, "qwen3-32b": 32_762_123_264, "qwen-7b": 7_721_324_544,
    "phi-2": 2_779_683_840, "phi-3-mini-4k": 3_821_079_552, "phi-3.5-mini": 3_821_079_552, "phi-4": 14_659_507_200,
    "falcon-7b": 6_921_720_704, "falcon-40b": 41_303_293_952, "falcon-180b": 178_557_088_768,
    "opt-125m": 125_239_296, "opt-13b": 12_853_473_280, "opt-30b": 29_974_540_288,
    "gpt2": 124_439_808, "gpt2-xl": 1_557_611_200, "gpt-j-6b": 6_050_882_784, "gpt-neo-2.7b": 2_651_307_520,
    "gpt-neox-20b": 20_554_567_680, "pythia-6.9b": 6_857_302_016, "pythia-12b": 11_846_072_320,
    "bloom": 176_247_271_424, "bloom-7b1": 7_069_016_064, "mpt-7b": 6_649_286_656,
    "gemma-2b": 2_506_172_416, "gemma-7b": 8_537_680_896,
    "olmo-2-0325-32b": 32_234_279_936, "olmo-2-1124-13b": 13_716_198_400,
    "starcoder": 15_517_456_384, "starcoder2-3b": 3_030_371_328, "starcoder2-7b": 7_173_923_840, "starcoder2-15b": 15_957_889_024,
    "stablelm-2-1_6b": 1_644_515_328, "smollm3-3b": 3_075_098_624, "c4ai-command-r-plus": 103_810_674_688,
    "granite-3.1-2b": 2_533_531_648, "glm-4-9b-chat": 9_399_951_360, "chatglm3-6b": 6_243_584_000,
    "exaone-3.5-7.8b": 7_818_448_896, "seed-oss-36b": 36_151_104_512, "apertus-8b-instruct-2509": 8_053_338_176,
    "baichuan2-7b-base": 7_505_973_248, "baichuan2-13b-base": 13_896_668_160,
    "internlm2_5-7b": 7_737_708_544, "internlm3-8b": 8_804_241_408, "minicpm-2b-sft-bf16": 2_724_880_896,
    "mimo-7b-base": 7_622_619_136, "yi-6b": 6_061_035_520, "yi-34b": 34_388_917_248,
    # Pruned and to be pruned: arXiv 2402.16819, 2407.14679 and 2408.11796, tables of dimensions.
    "nemotron-4-15b": 15_628_775_424, "minitron-8b-base": 8_271_699_968, "minitron-4b-base": 4_190_509_056,
    "llama-3.1-minitron-4b-width-base": 4_512_746_496, "llama-3.1-minitron-4b-depth-base": 4_540_469_248,
    "mistral-nemo-minitron-8b-base": 8_414_105_600,
}  # fmt: skip

MIXTURES = {
    "llama-4-scout-17b-16e": (107_769_861_120, 17_172_894_720), "llama-4-maverick-17b-128e": (400_711_848_960, 17_184_691_200),
    "mixtral-8x7b-v0.1": (46_702_792_704, 12_879_925_248), "mixtral-8x22b-v0.1": (140_620_634_112, 39_152_031_744),
    "qwen3-30b-a3b": (30_532_122_624, 3_353_032_704), "qwen3-235b-a22b": (235_093_634_560, 22_190_763_520),
    "qwen3-next-80b-a3b": (79_674_391_296, 3_874_929_408), "qwen3.5-27b": (26_895_998_464, 26_895_998_464),
    "qwen3.5-35b-a3b": (34_660_610_688, 3_454_988_928), "qwen3.5-397b-a17b": (396_346_350_336, 17_349_040_896),
    "gpt-oss-20b": (20_914_757_184, 4_187_440_704), "gpt-oss-120b": (116_829_156_672, 5_711_982_912),
    "deepseek-v2": (235_741_434_880, 21_375_800_320), "deepseek-v2-lite": (15_706_484_224, 2_661_150_208),
    "deepseek-v3": (671_026_404_352, 37_552_282_624), "deepseek-v3.1": (671_026_404_352, 37_552_282_624),
    "deepseek-v3.2": (671_877_929_216, 38_403_807_488), "kimi-k2": (1_026_408_209_408, 32_861_477_888),
    "kimi-k2.5": (1_026_408_209_408, 32_861_477_888), "glm-4.5": (352_797_814_784, 33_632_251_904),
    "glm-4.6": (352_797_814_784, 33_632_251_904), "glm-4.5-air": (106_852_245_504, 13_424_123_904),
    "glm-5": (743_911_199_232, 41_784_709_632), "minimax-m2.5": (228_689_748_992, 11_030_537_216),
    "minimax-m3": (426_174_565_632, 25_962_466_560), "jamba-v0.1": (51_570_323_328, 12_110_311_296),
    "jamba-1.5-large": (398_555_145_696, 94_149_338_592), "nemotron-3-nano-30b-a3b": (31_577_937_344, 3_580_073_408),
    "tencent-hunyuan-large": (388_701_405_440, 51_322_077_440), "mamba-2.8b": (2_768_345_600, 2_768_345_600),
    "mamba2-2.7b": (2_702_599_680, 2_702_599_680), "codestral-mamba-7b": (7_285_403_648, 7_285_403_648),
    "nemotron-h-8b": (8_100_852_736, 8_100_852_736), "nemotron-h-56b": (56_324_350_464, 56_324_350_464),
}  # fmt: skip
"""Total and active parameters of the text model, the input embedding among the active ones."""

KV_BYTES = {
    "llama-2-7b": 524_288, "llama-2-13b": 819_200, "llama-2-70b": 327_680, "llama-3.1-8b": 131_072, "llama-3.1-70b": 327_680,
    "llama-3.1-405b": 516_096, "mistral-7b-v0.1": 131_072, "mistral-nemo-instruct-2407": 163_840,
    "qwen2.5-7b": 57_344, "qwen2.5-72b": 327_680, "qwen3-8b": 147_456, "qwen3-32b": 262_144,
    "falcon-7b": 8_192, "falcon-40b": 122_880, "falcon-180b": 163_840, "phi-3-mini-4k": 393_216, "phi-4": 204_800,
    "opt-13b": 819_200, "gemma-2b": 18_432, "gpt2": 36_864, "starcoder2-7b": 65_536, "chatglm3-6b": 28_672,
}  # fmt: skip
"""OPT-13B: "800 KB per token", Kwon et al. 2023 (arXiv 2309.06180), section 4."""


@pytest.mark.parametrize(("name", "parameters"), PARAMETERS.items(), ids=PARAMETERS)
def test_parameters_of_named_models(name: str, parameters: int) -> None:
    assert load_model(name).params == parameters


@pytest.mark.parametrize(("name", "counts"), MIXTURES.items(), ids=MIXTURES)
def test_total_and_active_parameters_of_named_models(name: str, counts: tuple[int, int]) -> None:
    model = load_model(name)
    assert (model.params, model.active_params) == counts


@pytest.mark.parametrize(("name", "per_token"), KV_BYTES.items(), ids=KV_BYTES)
def test_kv_bytes_per_token_of_named_models(name: str, per_token: int) -> None:
    assert load_model(name).kv_bytes_per_token == per_token


def test_published_sizes_of_the_pruned_models() -> None:
    """Minitron-4B is a "4.2B" model and Nemotron-4 a "15B" one."""
    assert round(load_model("minitron-4b-base").params / 1e9, 1) == 4.2
    assert round(load_model("nemotron-4-15b").params / 1e9) == 16


@pytest.mark.parametrize("name", model_names())
def test_an_entry_names_its_model_and_its_source(name: str) -> None:
    entry = read_catalog(name)
    assert set(entry) == {"full_name", "source", "config"}
    assert "/" in entry["full_name"]
    assert entry["source"].strip()
    assert load_model(entry["full_name"]) == load_model(name)
    assert load_model(name).params > 0


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("meta-llama/Llama-2-13b-hf", "llama-2-13b"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("  LLAMA-2-70B ", "llama-2-70b"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("mistralai/Mistral-Nemo-Instruct-2407", "mistral-nemo-instruct-2407"),
        ("microsoft/Phi-3-mini-4k-instruct", "phi-3-mini-4k"),
        ("microsoft/phi-4", "phi-4"),
        ("tiiuae/falcon-180B", "falcon-180b"),
    ],
)
def test_owner_case_and_suffix_do_not_matter(written: str, name: str) -> None:
    assert normalise(written) == name
    assert load_model(written) == load_model(name)


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [("llama-2-14b", "llama-2-13b"), ("qwen2.5-7", "qwen2.5-7b"), ("phi-3-mini", "phi-3-mini-4k"), ("gtp2", "gpt2")],
)
def test_an_unknown_name_is_answered_with_a_near_one(wrong: str, meant: str) -> None:
    with pytest.raises(InputError, match=f"unknown model '{wrong}'.*Did you mean.*'{meant}'"):
        load_model(wrong)


def test_a_tied_head_is_stored_once() -> None:
    small = load_model("llama-3.2-1b")
    assert small.head[0].params() == {}
    assert load_model("llama-3.1-8b").head[0].params() != {}


def test_equal_layers_are_one_object() -> None:
    assert len({id(layer) for layer in load_model("llama-2-70b").layers}) == 1
    assert len({id(layer) for layer in load_model("smollm3-3b").layers}) == 2


def test_a_catalogued_model_loads_in_three_milliseconds() -> None:
    """The best of several: what the machine does beside is no cost of loading."""
    load_model("gpt2")
    taken = []
    for _ in range(20):
        load._load_named.cache_clear()
        start = time.perf_counter()
        load_model("llama-2-70b")
        taken.append(time.perf_counter() - start)
    assert min(taken) < 3e-3


def test_an_engine_loads_a_full_name_or_the_folder_of_a_config(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text("{}")
    assert full_name("llama-3.1-8b") == "meta-llama/Llama-3.1-8B"
    assert full_name(str(file)) == str(tmp_path)
    assert full_name(str(tmp_path)) == str(tmp_path)

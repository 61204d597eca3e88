"""Compressed attention, hyper-connections and DeepSeek-V4: published figures, laws and limits.

Sources: DeepSeek-V4 (arXiv 2606.19348), sections 2 and 5 and its comparison with V3.2 at a context of one million tokens;
the published config.json files; entry and state layouts of vLLM, models/deepseek_v4; parameter totals of the transformers
5.24 class on the meta device.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from roofline.components.attention import Attention
from roofline.components.compressed import CompressedAttention, CompressWrite, compressed_layout
from roofline.components.hyper_connections import HyperConnection, HyperHead, hyper_apply
from roofline.components.latent import LatentAttention, layout_bytes
from roofline.components.sparse import IndexScores
from roofline.configs.load import load_model
from roofline.errors import InputError, UnsupportedModel
from roofline.formats import BF16, FORMATS, FP8, FP32
from roofline.model import Layer, Model
from roofline.work import Ragged, Work, decode, prefill

MILLION = 2**20
CSA = CompressedAttention(
    D=48, N=6, H=16, P=4, Q=20, groups=3, rank=10, window=9, every=4, overlap=True, k=5, index_heads=3, index_dim=8
)  # fmt: skip
HCA = CompressedAttention(D=48, N=6, H=16, P=4, Q=20, groups=3, rank=10, window=9, every=7)


def core(block: CompressedAttention) -> LatentAttention:
    """The attention kernel of a block."""
    (found,) = (part for part in block.parts if isinstance(part, LatentAttention))
    return found


def with_fp8_index(model: Model) -> Model:
    """The model with index entries in fp8, one fp32 scale each (132 bytes)."""

    def edit(layer: Layer) -> Layer:
        index = FORMATS["fp8-token"]
        blocks = (replace(b, index=index) if isinstance(b, CompressedAttention) else b for b in layer.blocks)
        return replace(layer, blocks=tuple(blocks))

    return replace(model, layers=tuple(edit(layer) for layer in model.layers))


def matrix_flops(model: Model, cached: int) -> dict[str, float]:
    """Matrix FLOPs of one decoded token by kernel."""
    found: dict[str, float] = {}
    for count, part in model.counted:
        found[part.name] = found.get(part.name, 0) + float(count * part.cost(decode(1, cached)).matrix_flops)
    return found


def weighted(model: Model, cached: int) -> float:
    """FLOPs of one decoded token in equivalents of fp8: 16-bit and 32-bit ones count twice, 4-bit ones half."""
    weights = {"bf16": 2, "fp32": 2, "fp8": 1, "fp4": 0.5}
    return sum(weights[unit] * float(v) for unit, v in model.cost(decode(1, cached)).flops.items() if unit in weights)


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("deepseek-v4-flash", 284_332_230_231, 13_799_622_231),
        ("deepseek-v4-pro", 1_572_997_179_491, 49_779_058_787),
    ],
)
def test_parameters_of_v4(name: str, total: int, active: int) -> None:
    model = load_model(name)
    assert model.params == total
    assert model.active_params == active


@pytest.mark.parametrize(
    ("name", "at_a_million", "at_128k", "at_a_million_fp8_index"),
    [
        ("deepseek-v4-pro", 5_299_115_008, 682_750_976, 5_802_431_488),
        ("deepseek-v4-flash", 3_700_378_624, 476_040_192, 4_052_700_160),
    ],
)
def test_state_of_v4_at_long_contexts(name: str, at_a_million: int, at_128k: int, at_a_million_fp8_index: int) -> None:
    model = load_model(name)
    assert model.state_bytes(MILLION) == at_a_million
    assert model.state_bytes(131_072) == at_128k
    assert with_fp8_index(model).state_bytes(MILLION) == at_a_million_fp8_index


def test_entries_take_584_bytes_in_fp8_and_2_per_element_in_bf16() -> None:
    assert layout_bytes(compressed_layout(512, 64, FP8)) == 448 + 8 + 128 == 584
    assert layout_bytes(compressed_layout(512, 64, BF16)) == 1024


@pytest.mark.parametrize(
    ("name", "share_of_v32", "of_the_paper"), [("deepseek-v4-pro", 0.1051, 0.10), ("deepseek-v4-flash", 0.0734, 0.07)]
)
def test_cache_at_a_million_tokens_is_a_tenth_of_v32(name: str, share_of_v32: float, of_the_paper: float) -> None:
    share = load_model(name).state_bytes(MILLION) / (61 * (656 + 132) * MILLION)
    assert share == pytest.approx(share_of_v32, abs=5e-5)
    assert share == pytest.approx(of_the_paper, abs=0.006)


@pytest.mark.parametrize(("name", "layers", "share"), [("deepseek-v4-pro", 61, 0.0202), ("deepseek-v4-flash", 43, 0.0200)])
def test_cache_at_a_million_tokens_is_two_percent_of_grouped_attention(name: str, layers: int, share: float) -> None:
    grouped = layers * 2 * 8 * 128 * 2 * MILLION
    assert load_model(name).state_bytes(MILLION) / grouped == pytest.approx(share, abs=5e-4)


@pytest.mark.parametrize(
    ("name", "flops", "attention", "index", "mhc"),
    [
        ("deepseek-v4-pro", 303.2, 76.67, 128.85, 0.17),
        ("deepseek-v4-flash", 140.3, 23.61, 90.19, 0.07),
    ],
)
def test_flops_per_token_of_v4_at_a_million_tokens(name: str, flops: float, attention: float, index: float, mhc: float) -> None:
    found = matrix_flops(load_model(name), MILLION)
    assert sum(found.values()) / 1e9 == pytest.approx(flops, abs=0.05)
    assert found["attention"] / 1e9 == pytest.approx(attention, abs=0.01)
    assert found["index_scores"] / 1e9 == pytest.approx(index, abs=0.01)
    assert found["hyper_proj"] / 1e9 == pytest.approx(mhc, abs=0.01)


def test_flops_per_token_of_v32_and_v3_at_a_million_tokens() -> None:
    assert sum(matrix_flops(load_model("deepseek-v3.2"), MILLION).values()) / 1e9 == pytest.approx(1157.7, abs=0.05)
    assert sum(matrix_flops(load_model("deepseek-v3"), MILLION).values()) / 1e9 == pytest.approx(17_889, abs=0.5)


@pytest.mark.parametrize(
    ("name", "at_4k", "at_128k"),
    [
        ("deepseek-v4-pro", 108.6, 132.2),
        ("deepseek-v4-flash", 29.1, 42.6),
        ("deepseek-v3.2", 113.8, 240.7),
        ("deepseek-v3", 142.8, 2300.2),
    ],
)
def test_flops_per_token_at_shorter_contexts(name: str, at_4k: float, at_128k: float) -> None:
    model = load_model(name)
    assert sum(matrix_flops(model, 4096).values()) / 1e9 == pytest.approx(at_4k, abs=0.07)
    assert sum(matrix_flops(model, 131_072).values()) / 1e9 == pytest.approx(at_128k, abs=0.07)


@pytest.mark.parametrize(
    ("name", "plain", "in_fp8", "of_the_paper"),
    [("deepseek-v4-pro", 0.265, 0.2704, 0.27), ("deepseek-v4-flash", 0.122, 0.1017, 0.10)],
)
def test_flops_relative_to_v32_are_the_papers(name: str, plain: float, in_fp8: float, of_the_paper: float) -> None:
    """The weighting is inferred: 16-bit kernels (core attention, compressors, hyper-connections, head) count twice."""
    model, reference, cached = load_model(name), load_model("deepseek-v3.2"), 10**6
    flops = sum(matrix_flops(model, cached).values()) / sum(matrix_flops(reference, cached).values())
    assert flops == pytest.approx(plain, abs=5e-4)
    equivalents = weighted(model, cached) / weighted(reference, cached)
    assert equivalents == pytest.approx(in_fp8, abs=5e-4)
    assert equivalents == pytest.approx(of_the_paper, abs=0.005)


def test_intensity_of_the_core_per_entry() -> None:
    for name, expected in (("deepseek-v4-flash", 224), ("deepseek-v4-pro", 449)):
        block = next(b for layer in load_model(name).layers for b in layer.blocks if isinstance(b, CompressedAttention))
        assert 4 * block.N * block.H / layout_bytes(block.layout) == pytest.approx(expected, abs=0.5)


@pytest.mark.parametrize("work", [decode(2, 37), prefill(1, 40), Work(3, 6, 50)])
@pytest.mark.parametrize("block", [replace(CSA, k=10**6), HCA], ids=["csa", "hca"])
def test_entries_of_one_token_without_window_are_attention_with_one_shared_head(block: CompressedAttention, work: Work) -> None:
    every_token = replace(block, every=1, window=None, overlap=False, index_heads=0)
    mine, shared = core(every_token).cost(work), Attention(N=6, K=1, H=16).cost(work)
    assert mine.flops == shared.flops
    assert mine.write == shared.write
    assert 2 * mine.read["state"] == shared.read["state"]


@pytest.mark.parametrize("cached", [0, 3, 8, 27, 28, 100])
def test_a_query_sees_its_window_and_the_complete_blocks(cached: int) -> None:
    step, seen = decode(1, cached), cached + 1
    assert core(CSA).scored(step) == (min(seen, 9) + min(5, seen // 4),) * 2
    assert core(HCA).scored(step) == (min(seen, 9) + seen // 7,) * 2
    (index,) = (part for part in CSA.parts if isinstance(part, IndexScores))
    assert index.cost(step).matrix_flops == 2 * 3 * 8 * (seen // 4)


def pieces(block: CompressedAttention, cached: int) -> dict[str, int]:
    """State bytes by name."""
    found: dict[str, int] = {}
    for piece in block.state():
        found[piece.name] = found.get(piece.name, 0) + int(piece.bytes(cached))
    return found


def test_state_counts_whole_blocks_and_the_open_one() -> None:
    assert pieces(CSA, 30) == {
        "window": 9 * 16 * 2,
        "compressed": 7 * 16 * 2,
        "compressed_open": 8 * 2 * 2 * 16 * 4,
        "index": 7 * 8 * 17 // 32,
        "index_open": 8 * 2 * 2 * 8 * 4,
    }
    assert pieces(HCA, 30) == {"window": 9 * 16 * 2, "compressed": 4 * 16 * 2, "compressed_open": 7 * 2 * 16 * 4}


def test_a_compressor_writes_one_entry_per_complete_block() -> None:
    (pool,) = (part for part in HCA.parts if isinstance(part, CompressWrite))
    waiting = 4 * 2 * 16
    assert pool.cost(decode(1, 6)).write["state"] == waiting + 32
    assert pool.cost(decode(1, 6)).read["state"] == waiting * 6
    assert pool.cost(decode(1, 13)).read["state"] == waiting * 6
    assert pool.cost(decode(1, 7)).write["state"] == waiting
    assert pool.cost(decode(1, 7)).read["state"] == 0
    assert pool.cost(prefill(1, 30)).write["state"] == 7 * waiting + 4 * 32
    assert pool.cost(prefill(1, 30)).read["state"] == 0


def pooled_from_state(every: int, overlap: bool, T: int, S: int) -> int:
    """Projections of one series that blocks completed by T new tokens take from the S behind, block by block."""
    taken = 0
    for block in range(S // every, (S + T) // every):
        own = range(block * every, (block + 1) * every)
        before = range(max(0, (block - 1) * every), block * every) if overlap else range(0)
        taken += sum(token < S for token in (*own, *before))
    return taken


@pytest.mark.parametrize("every", [1, 3, 4])
@pytest.mark.parametrize("block", [CSA, HCA], ids=["csa", "hca"])
def test_a_chunk_reads_back_the_projections_that_its_blocks_pool(block: CompressedAttention, every: int) -> None:
    (pool, *_) = (part for part in replace(block, every=every).parts if isinstance(part, CompressWrite))
    for T in (1, 2, 3, 5, 11):
        for S in range(13):
            cost = pool.cost(Work(2, T, S))
            assert cost.read["state"] == 2 * 4 * 2 * 16 * pooled_from_state(every, block.overlap, T, S)
            learned = 4 * every * pool.series * 16 + 2 * 16
            assert cost.read["weights"] == (learned if (S + T) // every > S // every else 0)


def test_a_ragged_batch_reads_what_a_compressor_learned_once() -> None:
    (pool,) = (part for part in HCA.parts if isinstance(part, CompressWrite))
    groups = (Work(1, 3, 5), Work(2, 8, 0), Work(1, 1, 7))
    assert pool.cost(Ragged(groups)).read["weights"] == pool.cost(groups[1]).read["weights"] > 0
    assert pool.cost(groups[2]).read["weights"] == 0


def test_steps_over_a_context_write_every_entry_once() -> None:
    for part in CSA.parts:
        if isinstance(part, CompressWrite):
            steps = sum(part.cost(decode(1, cached)).flops["special"] for cached in range(50))
            assert steps == part.cost(prefill(1, 50)).flops["special"] == 12 * 8 * part.dim


def test_parameters_of_the_layer_kinds() -> None:
    projections = 48 * 20 + 20 * 96 + 48 * 16 + 96 * 10 + 30 * 48
    window = replace(HCA, every=0)
    assert sum(window.params().values()) == projections + 20 + 16 + 6
    assert sum(HCA.params().values()) - sum(window.params().values()) == 48 * 2 * 16 + 7 * 16 + 16
    indexer = 48 * 4 * 8 + 4 * 2 * 8 + 8 + 20 * 24 + 48 * 3
    assert sum(CSA.params().values()) - sum(window.params().values()) == 48 * 4 * 16 + 4 * 2 * 16 + 16 + indexer
    assert window.params()[FP32] == 6


def test_hyper_connections() -> None:
    site = HyperConnection(48, 4)
    assert site.params() == {FP32: 24 * 4 * 48 + 24 + 3}
    assert site.cost(decode(1, 9)).matrix_flops == 2 * (2 + 4) * 4 * 4 * 48
    assert HyperHead(48, 4).params() == {FP32: 4 * 4 * 48 + 4 + 1}
    assert HyperHead(48, 4).cost(decode(1, 9)).matrix_flops == 2 * 4 * 4 * 48


def test_coefficients_of_hyper_connections_are_read_as_they_were_written() -> None:
    project, collapse = (part.cost(decode(3, 9)) for part in HyperConnection(48, 4).parts)
    streams, output = 3 * 2 * 4 * 48, 3 * 2 * 48
    assert project.write["activations"] == collapse.read["activations"] - streams == 3 * 4 * 24
    mixing = collapse.write["activations"] - output
    assert hyper_apply(48, 4).cost(decode(3, 9)).read["activations"] == streams + output + mixing
    assert mixing == 3 * 4 * 20


def config(**changes: object) -> dict[str, object]:
    """A small DeepSeek-V4 config."""
    base: dict[str, object] = {
        "model_type": "deepseek_v4", "hidden_size": 48, "moe_intermediate_size": 22, "num_hidden_layers": 4,
        "num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 16, "qk_rope_head_dim": 4, "q_lora_rank": 20,
        "o_groups": 3, "o_lora_rank": 10, "sliding_window": 9, "compress_ratios": [0, 128, 4, 128, 0],
        "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 3, "num_hash_layers": 1, "hc_mult": 4,
        "index_n_heads": 3, "index_head_dim": 8, "index_topk": 5, "vocab_size": 96, "torch_dtype": "bfloat16",
        "tie_word_embeddings": False, "num_nextn_predict_layers": 1,
    }  # fmt: skip
    return {key: value for key, value in {**base, **changes}.items() if value != "absent"}


def rates(model_config: dict[str, object]) -> list[int]:
    """Tokens per compressed entry of each layer."""
    return [b.every for layer in load_model(model_config).layers for b in layer.blocks if isinstance(b, CompressedAttention)]


def test_both_spellings_of_the_schedule_agree() -> None:
    kinds = ["sliding_attention", *["heavily_compressed_attention", "compressed_sparse_attention"] * 2][:4]
    newer = config(
        compress_ratios="absent", layer_types=kinds,
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
    )  # fmt: skip
    assert rates(newer) == rates(config()) == [0, 128, 4, 128]
    assert load_model(newer).params == load_model(config()).params


def test_what_is_left_out_is_named() -> None:
    assert load_model(config()).not_modelled == (
        "token-to-expert tables of 1 hash-routed layers (integers, 96 rows each)",
        "1 multi-token-prediction layer (num_nextn_predict_layers)",
    )


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"compress_ratios": "absent"}, InputError, "compress_ratios"),
        ({"compress_ratios": [0, 2, 4, 128]}, UnsupportedModel, "compress_ratios has 2"),
        ({"compress_ratios": [0, 4]}, InputError, "compress_ratios has 2 entries for 4 layers"),
        ({"kv_source_layer_ids": [0]}, UnsupportedModel, "kv_source_layer_ids"),
        ({"expert_dtype": "fp3"}, UnsupportedModel, "expert_dtype 'fp3'"),
        ({"o_groups": 5}, InputError, "o_groups 5 does not divide"),
        ({"num_key_value_heads": 2}, UnsupportedModel, "num_key_value_heads"),
        ({"hc_mult": "absent"}, InputError, "hc_mult"),
    ],
)
def test_bad_keys_are_refused_by_name(changes: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        load_model(config(**changes))


def test_experts_are_stored_in_four_bits_and_multiplied_in_eight() -> None:
    cost = load_model(config(expert_dtype="fp4")).cost(decode(1, 9))
    assert cost.flops["fp8"] == 4 * 3 * 6 * 48 * 22
    assert load_model(config()).cost(decode(1, 9)).flops.get("fp8", 0) == 0

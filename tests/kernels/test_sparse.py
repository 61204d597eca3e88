"""Sparse and compressed attention as wholes: their limits are dense attention, and compressors are one recurrence.

The compressors and the hyper-connection are compared with the modules of transformers (models/deepseek_v4) where those are
installed.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

pytest.importorskip("triton")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roofline.components.compressed import compressed_layout
from roofline.components.latent import layout_bytes
from roofline.formats import FP8
from roofline.kernels import compressed_attention as compressed
from roofline.kernels import csa_compress, dsa_indexer, hyper_connections, mla_decode, sparse_mla_decode
from roofline.kernels.buffers import poisoned
from roofline.kernels.csa_compress import compress
from roofline.kernels.flash_decoding import Decode, flash_decoding
from roofline.kernels.flash_decoding import expected as dense_expected
from roofline.kernels.index_keys import INDEX, dequantise, quantise, to_pages
from roofline.kernels.parts import Blocks, Parts
from roofline.kernels.rotary import angle_table
from roofline.kernels.topk_select import topk_select
from roofline.kernels.types import Source
from roofline.validate.counted import counting

BLOCKS = Blocks(16, 2, rows=16)


def selection(source: Source, lengths: torch.Tensor, longest: int, k: int, every: int = 1) -> torch.Tensor:
    """What an indexer of random queries over random keys selects for one new token of each sequence."""
    B, page, heads = len(lengths), 8, 3
    pages = -(-longest // page)
    q, scales = quantise(source.normal(B, 1, heads, 128, dtype="fp32"), "fp8")
    keys = to_pages(*quantise(source.normal(B * pages, page, 128, dtype="fp32"), "fp8"))
    table = source.permutation(B * pages).view(B, pages)
    weights = source.normal(B, 1, heads, dtype="fp32")
    scores = dsa_indexer.dsa_indexer(q, scales, weights, keys, table, lengths, longest, page, 1.0, every, Parts(16, 2))
    return topk_select(scores, lengths, k, every)


@pytest.mark.parametrize("packed", [False, True])
def test_selecting_everything_is_dense_latent_attention_bit_for_bit(packed: bool) -> None:
    dense = mla_decode.Dense("everything", "bf16", (44, 19), 6, 128, 32, page=8, packed=packed, parts=BLOCKS)
    tensors = mla_decode.inputs(dense, "cpu")
    with counting():
        out = mla_decode.launch(dense, tensors)["out"]
        selected = selection(Source("selection", "cpu"), tensors["lengths"], tensors["longest"], k=45)
        chosen = {name: value for name, value in tensors.items() if name != "longest"} | {"selected": selected}
        sparse = sparse_mla_decode.sparse_mla_decode(**chosen, rank=dense.R, scale=dense.scale, parts=BLOCKS)
    assert torch.equal(sparse, out)
    case = sparse_mla_decode.Selected("all", "bf16", (44, 19), 6, 128, 32, page=8, packed=packed, k=45, parts=BLOCKS)
    assert sparse_mla_decode.expected(case, chosen).useful == mla_decode.expected(dense, tensors).useful


def test_a_selection_attends_to_the_best_scored_entries_only() -> None:
    """The three kernels in a row; entries that were not selected are NaN, and the result is not."""
    case = sparse_mla_decode.Selected("best", "bf16", (44, 19), 6, 128, 32, page=8, k=12, parts=BLOCKS)
    tensors = sparse_mla_decode.inputs(case, "cpu")
    with counting():
        selected = selection(Source("selection", "cpu"), tensors["lengths"], 45, case.k)
        slots = torch.gather(tensors["table"].long(), 1, selected[:, 0].long() // 8) * 8 + selected[:, 0] % 8
        entries = tensors["cache"].view(-1, 160)
        kept = torch.full_like(entries, float("nan"))
        kept[slots.flatten()] = entries[slots.flatten()]
        tensors |= {"selected": selected, "cache": kept.view_as(tensors["cache"])}
        out = sparse_mla_decode.launch(case, tensors)["out"]
    right = sparse_mla_decode.reference(case, tensors)["out"]
    assert torch.allclose(out.double(), right, rtol=0.02, atol=0.005)


@pytest.mark.parametrize("indexed", [True, False], ids=["csa", "hca"])
def test_entries_of_one_token_without_window_are_attention_with_one_shared_head(indexed: bool) -> None:
    """m = 1, no overlap: an entry is its token's value, normalised and rotated; k reaches all of them."""
    S, N, H, page = 37, 4, 32, 8
    source = Source("one-token", "cpu")
    pages = -(-(S + 1) // page)
    table, lengths = source.permutation(pages)[None], torch.tensor([S + 1], dtype=torch.int32)
    x, q = source.normal(S + 1, 2 * H, dtype="fp32"), source.normal(1, 1, N, H, dtype="fp32")
    cache = torch.zeros(pages, page, H)
    bias, starts, cached = source.normal(1, H, dtype="fp32"), source.integers([0, S + 1]), source.integers([0])
    options: dict[str, Any] = {"window": 0, "every": 1, "longest": S + 1, "page": page, "scale": H**-0.5, "parts": BLOCKS}
    with counting():
        compress(
            x, torch.zeros(1, 1, 2 * H), bias, torch.ones(H), angle_table(S + 1, 8), table, starts, cached, cache, S + 1, page
        )  # fmt: skip
        selected = selection(source, lengths, S + 1, k=50) if indexed else None
        mine = compressed.compressed_attention(q, cache, cache, table, table, lengths, **options, selected=selected)
        shared = cache[:, :, None]
        right = flash_decoding(q, shared, shared, table, lengths, S + 1, parts=Parts(16, 2))
    assert torch.allclose(mine, right, rtol=1e-5, atol=1e-6)
    plain = cache[table[0].long()].view(-1, H)[: S + 1, : H - 8]
    values = x[:, :H] / x[:, :H].square().mean(1, keepdim=True).add(1e-6).sqrt()
    assert torch.allclose(plain, values[:, : H - 8], rtol=1e-5, atol=1e-6)
    case = compressed.Compressed("one", "fp32", (S,), N, H, 0, 1, 50 if indexed else 0, page=page, sinks=False, parts=BLOCKS)
    one = compressed.expected(case, {"selected": selected}).useful
    all_heads = dense_expected(Decode("one", "fp32", (S,), N, 1, H, page=page, parts=Parts(16, 2)), {}).useful
    assert one.flops == all_heads.flops
    assert one.write == all_heads.write
    assert 2 * one.read["state"] == all_heads.read["state"]


@dataclasses.dataclass
class Compressor:
    """One sequence that is compressed in any number of steps."""

    every: int
    overlap: bool
    dim: int
    dtype: str
    tokens: int

    def __post_init__(self) -> None:
        source, series = Source(f"{self.every} {self.overlap} {self.dim}", "cpu"), 2 if self.overlap else 1
        self.x = source.normal(self.tokens, 2 * series * self.dim, dtype=self.dtype)
        self.bias = source.normal(self.every, series * self.dim, dtype="fp32")
        self.gain = source.normal(self.dim, dtype=self.dtype)
        self.angles = angle_table(self.tokens + self.every, 4)
        self.pages = 1 + self.tokens // self.every // 3
        self.table = source.permutation(self.pages)[None]

    def run(self, chunks: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Entries and state after the chunks, each a step."""
        cache = torch.full((self.pages, 3, self.dim), float("nan"), dtype=self.x.dtype)
        series = 2 if self.overlap else 1
        state = torch.full((1, series * self.every, 2 * series * self.dim), float("nan"))
        done = 0
        for chunk in chunks:
            compress(
                self.x[done : done + chunk], state, self.bias, self.gain, self.angles, self.table,
                torch.tensor([0, chunk], dtype=torch.int32), torch.tensor([done], dtype=torch.int32), cache, chunk, 3,
            )  # fmt: skip
            done += chunk
        return cache[self.table[0].long()].view(-1, self.dim), state


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    every=st.integers(1, 5), overlap=st.booleans(), dim=st.sampled_from([6, 16, 22]), dtype=st.sampled_from(["bf16", "fp32"]),
    chunks=st.lists(st.integers(1, 13), min_size=1, max_size=3), decoded=st.integers(0, 4),
)  # fmt: skip
def test_chunks_and_steps_make_what_one_prefill_makes(
    every: int, overlap: bool, dim: int, dtype: str, chunks: list[int], decoded: int
) -> None:
    """Bit for bit, entries and state: in one step, in chunks followed by single tokens, and token by token."""
    tokens = sum(chunks) + decoded
    compressor = Compressor(every, overlap, dim, dtype, tokens)
    with counting():
        entries, state = compressor.run([tokens])
        for steps in ([*chunks, *[1] * decoded], [1] * tokens):
            others, handed = compressor.run(steps)
            assert torch.equal(others[: tokens // every], entries[: tokens // every])
            assert torch.equal(torch.nan_to_num(handed, 9e9), torch.nan_to_num(state, 9e9))
    assert entries[: tokens // every].isfinite().all()
    assert entries[tokens // every :].isnan().all()


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    scores=st.lists(st.sampled_from([-3.5, -1.0, -0.0, 0.0, 1e-38, 0.5, 2.0, 3e38]), min_size=1, max_size=40),
    k=st.integers(1, 45),
)
def test_selection_equals_a_stable_sort_whatever_ties(scores: list[float], k: int) -> None:
    row = torch.tensor(scores)
    with counting():
        chosen = topk_select(row[None, None], torch.tensor([len(scores)], dtype=torch.int32), k, block=16)[0, 0]
    right = sorted(range(len(scores)), key=lambda at: (-scores[at], at))[:k]
    assert chosen[: len(right)].tolist() == sorted(right)


def test_rows_are_stored_in_the_bytes_that_the_formats_say() -> None:
    for name, size in (("fp8", 132), ("mxfp4", 68)):
        assert sum(INDEX[name].sizes(128)) == INDEX[name].format.bytes(128) == size
    cache = compressed.pack(torch.zeros(2, 5, 512, dtype=torch.bfloat16))
    assert cache.shape[1] == 5 * 584 == 5 * layout_bytes(compressed_layout(512, 64, FP8))


@pytest.mark.parametrize(("index", "bound"), [("fp8", 2**-4), ("mxfp4", 1 / 4)])
def test_index_rows_come_back_within_half_a_step(index: str, bound: float) -> None:
    rows = torch.randn(9, 128, generator=torch.Generator().manual_seed(1))
    back = dequantise(*quantise(rows, index), index)
    largest = rows.double().unflatten(1, (-1, INDEX[index].group)).abs().amax(2).repeat_interleave(INDEX[index].group, 1)
    assert 0 < ((back - rows).abs() / largest).max() <= bound
    assert torch.equal(dequantise(*quantise(back.float(), "mxfp4"), "mxfp4"), back) or index == "fp8"


def test_packed_entries_keep_the_rotary_part_and_round_the_rest_to_fp8() -> None:
    entries = torch.randn(2, 3, 256, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    back = compressed.unpack(compressed.pack(entries), 3, 256, torch.bfloat16)
    assert torch.equal(back[..., 192:], entries[..., 192:].double())
    error = (back - entries.double()).abs()[..., :192] / entries.double().abs()[..., :192].clamp(min=0.05)
    assert 0 < error.max() < 2**-3


def test_the_mix_of_streams_is_doubly_stochastic_and_keeps_their_sum() -> None:
    case = hyper_connections.Streams("law", "fp32", 5, 4, 24)
    tensors = hyper_connections.inputs(case, "cpu")
    with counting():
        _, coefficients = hyper_connections.collapse(tensors["x"], tensors["weight"], tensors["base"], tensors["scales"])
        silent = hyper_connections.apply(tensors["x"], torch.zeros(5, 24), coefficients)
    mix = coefficients[:, 4:].view(5, 4, 4)
    assert torch.allclose(mix.sum(1), torch.ones(5, 4), atol=1e-5)
    assert torch.allclose(mix.sum(2), torch.ones(5, 4), atol=2e-3)
    assert torch.allclose(silent.sum(1), tensors["x"].sum(1), atol=0.02)


def deepseek(**changes: Any) -> Any:
    """A small config of transformers' DeepSeek-V4."""
    models = pytest.importorskip("transformers.models.deepseek_v4.configuration_deepseek_v4")
    base = {
        "hidden_size": 24, "head_dim": 32, "num_attention_heads": 2, "num_hidden_layers": 2, "qk_rope_head_dim": 8,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 7}, "q_lora_rank": 16,
        "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"], "partial_rotary_factor": 0.25,
        "index_n_heads": 2, "index_head_dim": 16, "index_topk": 3, "hc_mult": 4, "hc_sinkhorn_iters": 20,
    }  # fmt: skip
    return models.DeepseekV4Config(**{**base, **changes})


def initialised(module: torch.nn.Module) -> torch.nn.Module:
    """The module with random parameters."""
    generator = torch.Generator().manual_seed(5)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    return module


@pytest.mark.parametrize("overlap", [True, False], ids=["csa", "hca"])
def test_compressor_equals_that_of_transformers(overlap: bool) -> None:
    config = deepseek()
    modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    name = "DeepseekV4CSACompressor" if overlap else "DeepseekV4HCACompressor"
    module, T, page = initialised(getattr(modeling, name)(config)), 30, 3
    hidden = torch.randn(1, T, 24, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        right = module(hidden, torch.zeros(1, T, 16), torch.arange(T)[None], None, 0)[0][0, 0]
        x = torch.cat([module.kv_proj(hidden), module.gate_proj(hidden)], 2)[0]
        positions = torch.arange(T + 4)[None]
        cos, sin = module.rotary_emb(hidden, positions, layer_type="compress")
    every, pages = module.position_bias.shape[0], -(-len(right) // page)
    cache, table = torch.zeros(pages, page, 32), torch.arange(pages, dtype=torch.int32)[None]
    state = torch.zeros(1, every * (2 if overlap else 1), x.shape[1])
    with counting():
        compress(
            x, state, module.position_bias.data, module.kv_norm.weight.data, torch.cat([cos[0], sin[0]], 1), table,
            torch.tensor([0, T], dtype=torch.int32), torch.tensor([0], dtype=torch.int32), cache, T, page,
            config.rms_norm_eps,
        )  # fmt: skip
    assert torch.allclose(cache.view(-1, 32)[: len(right)], right, rtol=1e-4, atol=1e-5)


def test_hyper_connection_equals_that_of_transformers() -> None:
    config = deepseek()
    modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    module = initialised(modeling.DeepseekV4HyperConnection(config))
    x = torch.randn(1, 5, 4, 24, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        post, mix, right = module(x)
    with counting():
        collapsed, coefficients = hyper_connections.collapse(
            x[0], module.fn.data, module.base.data, module.scale.data, config.hc_sinkhorn_iters, epsilon=config.hc_eps
        )
    assert config.hc_eps == config.rms_norm_eps
    assert torch.allclose(collapsed, right[0], rtol=1e-4, atol=1e-5)
    assert torch.allclose(coefficients, torch.cat([post[0], mix[0].flatten(1)], 1), rtol=1e-4, atol=1e-5)


def test_index_compressor_writes_keys_that_the_indexer_reads() -> None:
    case = dataclasses.replace(csa_compress.CASES[-1], name="keys", batch=((21, 0),))
    assert case.index
    tensors = csa_compress.inputs(case, "cpu")
    source, entries = Source("q", "cpu"), 21 // case.every
    q = source.normal(1, 1, 3, 128, dtype="fp32")
    weights = source.normal(1, 1, 3, dtype="fp32")
    length = torch.tensor([21], dtype=torch.int32)
    with counting():
        compress(**tensors)
        scores = dsa_indexer.dsa_indexer(
            *quantise(q, "fp8"), weights, tensors["cache"], tensors["table"], length, 21, case.page, 1.0, case.every, Parts(16, 1)
        )
    keys = csa_compress.reference(case, tensors)["entries"][:entries]
    right = weights[0, 0].double() @ torch.relu(q[0, 0].double() @ keys.T)
    assert torch.allclose(scores[0, 0].double(), right, rtol=0.1, atol=0.05 * float(right.abs().max()))


@pytest.mark.parametrize("splits", [1, 2, 5])
def test_compressed_attention_of_an_idle_row_is_zero_and_leaves_its_neighbours_alone(splits: int) -> None:
    T, parts = 3, Blocks(16, splits, rows=16)
    whole = compressed.Compressed("idle", "bf16", (20, 20, 20), 5, 64, 6, 4, T=T, page=4, sinks=False, parts=parts)
    tensors = compressed.inputs(whole, "cpu")
    with counting(), poisoned():
        right = compressed.launch(whole, tensors)["out"]
        given = compressed.launch(whole, {**tensors, "lengths": torch.tensor([0, 2, 23], dtype=torch.int32)})["out"]
    assert not given[0].any()
    assert not given[1, 0].any()
    assert given[1, 1:].abs().sum() > 0
    assert torch.isfinite(given).all()
    assert torch.equal(given[2], right[2])

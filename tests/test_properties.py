"""Properties of any dense decoder: monotone, linear where it should be, bounded by physics."""

from __future__ import annotations

from dataclasses import replace

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roofline import Deployment, Ragged, Work, load_accelerator
from roofline.components.attention import Attention, AttentionBlock
from roofline.components.feedforward import MLP
from roofline.components.linear import Embedding, Linear
from roofline.components.mixing import rms_norm
from roofline.cost import Cost
from roofline.model import Layer, Model
from roofline.timing import Timing, time

H100 = load_accelerator("h100-sxm")
settings.register_profile("quick", max_examples=60, deadline=None)
settings.load_profile("quick")


def decoder(D, F, N, K, H, L, V, **attention) -> Model:
    layer = Layer(
        (
            rms_norm(D, residual=True),
            AttentionBlock(D, N, K, H, rotary=H, **attention),
            rms_norm(D, residual=True),
            MLP(D, F),
        )
    )
    head = Linear(D, V, rows="logit_rows", name="head")
    return Model("any", (Embedding(V, D),), (layer,) * L, (rms_norm(D, residual=True),), (head,))


@st.composite
def decoders(draw):
    K, G = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    sizes = {name: draw(st.integers(1, 64)) for name in ("D", "F", "H", "V")}
    return decoder(N=K * G, K=K, L=draw(st.integers(1, 5)), **sizes)


works = st.builds(Work, st.integers(1, 64), st.integers(1, 64), st.integers(0, 4096))


def quantities(cost: Cost):
    return {(section, key): value for section, key, value in cost.entries()}


@given(decoders(), works, st.sampled_from(["B", "T", "S"]))
def test_cost_grows_with_batch_new_tokens_and_context(model, work, axis):
    larger = replace(work, **{axis: getattr(work, axis) + 1})
    small, large = quantities(model.cost(work)), quantities(model.cost(larger))
    assert all(large[key] >= small[key] for key in small)
    assert model.cost(larger).matrix_flops > model.cost(work).matrix_flops


@given(decoders(), works)
def test_cost_grows_with_layers_and_grouping_changes_nothing(model, work):
    deeper = replace(model, layers=(*model.layers, model.layers[0]))
    assert deeper.cost(work).matrix_flops > model.cost(work).matrix_flops
    one_by_one = Cost.total(
        (1, component.cost(work)) for component in (*model.embedding, *model.layers, *model.final, *model.head)
    )
    assert model.cost(work) == one_by_one
    distinct = replace(model, layers=tuple(replace(layer, name=f"layer{i}") for i, layer in enumerate(model.layers)))
    assert distinct.cost(work) == model.cost(work)
    assert len(distinct.groups) == len(model.layers)
    assert len(model.groups) == 1


@given(works, st.integers(1, 8), st.integers(1, 32))
def test_gqa_with_all_heads_is_mha_and_with_one_head_is_mqa(work, N, H):
    mha, mqa = Attention(N, N, H), Attention(N, 1, H)
    cost = mha.cost(work)
    assert cost.flops["bf16"] == mqa.cost(work).flops["bf16"], "sharing keys saves bytes, not FLOPs"
    assert cost.read["state"] == N * mqa.cost(work).read["state"]
    assert mha.state()[0].elements == 2 * N * H
    assert mqa.state()[0].elements == 2 * H


@given(works, st.integers(1, 8), st.integers(1, 32))
def test_a_window_that_covers_everything_is_full_causal_attention(work, N, H):
    wide = Attention(N, N, H, mask="window", size=work.S + work.T)
    assert wide.cost(work) == Attention(N, N, H).cost(work)
    chunk = Attention(N, N, H, mask="chunk", size=work.S + work.T)
    assert chunk.cost(work) == Attention(N, N, H).cost(work)


@given(works, st.integers(1, 32), st.integers(1, 32), st.integers(1, 4))
def test_scaling_laws_of_the_dense_terms(work, D, F, H):
    small, wide, both = MLP(D, F), MLP(2 * D, F), MLP(2 * D, 2 * F)
    assert wide.cost(work).matrix_flops == 2 * small.cost(work).matrix_flops
    assert both.cost(work).matrix_flops == 4 * small.cost(work).matrix_flops
    assert both.cost(work).read["weights"] == 4 * small.cost(work).read["weights"]
    assert both.cost(work).activation_bytes == 2 * small.cost(work).activation_bytes
    core, wide_core = Attention(4, 2, H), Attention(4, 2, 2 * H)
    assert wide_core.cost(work).matrix_flops == 2 * core.cost(work).matrix_flops
    assert wide_core.cost(work).read["state"] == 2 * core.cost(work).read["state"]
    assert wide_core.cost(work).flops["special"] == core.cost(work).flops["special"]


@given(decoders(), works)
def test_bound_is_at_most_serial_is_at_most_the_number_of_streams_times_bound(model, work):
    timing = time(model.cost(work), H100)
    assert 0 < timing.bound <= timing.serial <= len(timing.streams) * timing.bound
    assert timing.streams[timing.bound_by] == timing.bound


@given(decoders(), st.lists(works, min_size=1, max_size=4))
def test_a_ragged_batch_reads_weights_once_and_pays_attention_per_group(model, groups):
    ragged = model.cost(Ragged(tuple(groups)))
    alone = Cost.total((1, model.cost(group)) for group in groups)
    assert ragged.matrix_flops == alone.matrix_flops
    assert ragged.read["state"] == alone.read["state"]
    assert ragged.write == alone.write
    table_rows = model.embedding[0].cost(groups[0]).read["weights"] // groups[0].tokens
    once = model.cost(groups[0]).read["weights"] - table_rows * groups[0].tokens
    assert ragged.read["weights"] == once + table_rows * sum(group.tokens for group in groups)
    assert ragged.launches == model.cost(groups[0]).launches


def test_selective_batching_of_the_lecture():
    """Lengths 3, 9 and 5 run as one [17, D] matmul and three attentions."""
    model = decoder(40, 56, 6, 2, 12, 3, 101)
    batch = Ragged((Work(1, 3), Work(1, 9), Work(1, 5)))
    assert batch.tokens == 17
    linear = Linear(40, 56)
    assert linear.cost(batch) == linear.cost(Work(1, 17))
    core = Attention(6, 2, 12)
    assert core.cost(batch).matrix_flops == 4 * 6 * 12 * (6 + 45 + 15)
    assert model.cost(batch).matrix_flops < model.cost(Work(1, 17)).matrix_flops


@given(decoders(), st.integers(1, 40), st.integers(0, 40), st.integers(1, 40))
def test_chunked_prefill_does_the_work_of_one_prefill(model, first, cached, second):
    whole = model.cost(Work(2, first + second, cached, all_logits=True))
    parts = model.cost(Work(2, first, cached, all_logits=True)) + model.cost(Work(2, second, cached + first, all_logits=True))
    assert parts.matrix_flops == whole.matrix_flops
    assert parts.write["state"] == whole.write["state"]
    assert parts.read["weights"] > whole.read["weights"]


@given(decoders(), st.integers(1, 8), st.integers(1, 30), st.integers(1, 30))
def test_the_cache_saves_and_a_generation_is_the_sum_of_its_steps(model, batch, prompt, output):
    deployment = Deployment(model, H100)
    cached = deployment.generate(batch, prompt, output)
    steps = [deployment.prefill(batch, prompt), *(deployment.decode(batch, prompt + i) for i in range(output - 1))]
    assert cached.cost == Cost.total((1, step.cost) for step in steps)
    assert cached.e2e_bound_s == pytest.approx(sum(step.bound_s for step in steps))
    naive = deployment.generate(batch, prompt, output, cached=False)
    assert naive.cost.matrix_flops >= cached.cost.matrix_flops


def test_naive_generation_grows_with_the_cube_of_its_length():
    core_only = replace(decoder(1, 1, 64, 64, 512, 1, 1), head=(), embedding=())
    deployment = Deployment(core_only, H100)

    def attention_flops(length):
        total = 0
        for n in range(1, length + 1):
            total += Attention(64, 64, 512).cost(Work(1, n, 0)).matrix_flops
        return total

    assert attention_flops(400) / attention_flops(200) == pytest.approx(8, rel=0.03)
    naive = deployment.generate(1, 1, 200, cached=False).cost.matrix_flops
    assert naive > attention_flops(200)


@given(decoders(), st.integers(0, 4096))
def test_the_largest_batch_fits_and_the_next_does_not(model, context):
    small = replace(H100, visible=replace(H100.nominal, value=10**6))
    deployment = Deployment(model, small)
    found = deployment.largest_batch(context)
    if found.size:
        assert deployment.decode(found.size, context).memory.fits
    missing = deployment.decode(found.size + 1, context).memory
    assert not missing.fits
    assert found.missing_bytes == missing.required_bytes - missing.capacity_bytes


def test_arrays_of_timings_name_the_stream_of_each_point():
    timing = Timing(numpy.array([1.0, 5.0]), numpy.array([2.0, 1.0]), 0.0)
    assert timing.bound.tolist() == [2.0, 5.0]
    assert timing.bound_by.tolist() == ["compute", "memory"]


def test_matrix_units_share_their_silicon_so_their_times_add():
    mixed = time(Cost(flops={"bf16": 989 * 10**12, "fp8": 989 * 10**12}), H100)
    alone = time(Cost(flops={"bf16": 989 * 10**12}), H100)
    assert alone.compute == 1.0
    assert 1.49 < mixed.compute < 1.51


def test_work_for_a_unit_the_chip_lacks_runs_on_its_16_bit_unit():
    a100 = load_accelerator("a100-sxm-80gb")
    assert "fp8" not in a100.compute
    assert a100.unit_for("fp8") == "bf16"
    assert a100.rate("fp8") == a100.rate("bf16")

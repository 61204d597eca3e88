"""Parallelism: what ranks hold and send, links and algorithms, pipelines, refusals, and the command line."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roofline import Deployment, InputError, UnsupportedModel, Work, load_accelerator, load_model
from roofline.cli import run
from roofline.components.attention import AttentionBlock
from roofline.components.collective import ALGORITHMS, Collective, alpha_beta, bytes_by_link, bytes_sent, hops
from roofline.components.moe import MoE
from roofline.edits import apply, dtype
from roofline.parallel.experts import distinct_ranks
from roofline.parallel.layouts import layouts
from roofline.parallel.mesh import Mesh, bubble, kv_heads_per_rank, padded_vocabulary, stage_layers
from roofline.parallel.ranks import Sharded
from roofline.parallel.shard import shard
from roofline.sharded import ShardedDeployment

H100, A100 = load_accelerator("h100-sxm"), load_accelerator("a100-sxm")
LLAMA, DEEPSEEK, QWEN = load_model("llama-3.1-70b"), load_model("deepseek-v3"), load_model("qwen3-235b-a22b")


def on(model, mesh: Mesh, gpu=H100) -> ShardedDeployment:
    return ShardedDeployment(model, gpu, mesh=mesh)


def reduced(ring_values: list[int], parts: int) -> tuple[list[int], int]:
    """A ring all-reduce played out on vectors of ``parts`` entries: (sum at every rank, entries that one rank sent)."""
    n = len(ring_values)
    data = [[value * (part + 1) for part in range(parts)] for value in ring_values]
    chunk = parts // n
    sent = 0
    for step in range(n - 1):
        moves = [(rank, (rank - step) % n) for rank in range(n)]
        values = {rank: [data[rank][piece * chunk + i] for i in range(chunk)] for rank, piece in moves}
        for rank, piece in moves:
            for i in range(chunk):
                data[(rank + 1) % n][piece * chunk + i] += values[rank][i]
        sent += chunk
    for step in range(n - 1):
        moves = [(rank, (rank + 1 - step) % n) for rank in range(n)]
        values = {rank: [data[rank][piece * chunk + i] for i in range(chunk)] for rank, piece in moves}
        for rank, piece in moves:
            for i in range(chunk):
                data[(rank + 1) % n][piece * chunk + i] = values[rank][i]
        sent += chunk
    assert all(row == data[0] for row in data)
    return data[0], sent


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_ring_bytes_are_those_of_a_ring_played_out(ranks):
    parts = 12 * ranks
    total, sent = reduced([3 * rank + 1 for rank in range(ranks)], parts)
    assert total[0] == sum(3 * rank + 1 for rank in range(ranks))
    assert bytes_sent("all-reduce", "ring", ranks, parts) == sent
    assert hops("all-reduce", "ring", ranks) == 2 * (ranks - 1)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_costs_nothing_alone_and_no_less_than_one_message(algorithm):
    assert bytes_sent("all-reduce", algorithm, 1, 100) == hops("all-reduce", algorithm, 1) == 0
    assert bytes_sent("all-reduce", algorithm, 2, 100) >= 100
    assert bytes_sent("all-reduce", algorithm, 8, 800) >= bytes_sent("all-reduce", "switch", 8, 800) == 800


def test_small_messages_want_few_hops_and_large_ones_few_bytes():
    times = {
        size: {name: alpha_beta("all-reduce", name, 8, size, 5e-6, 450e9) for name in ("ring", "one-shot", "two-shot")}
        for size in (8192, 2**28)
    }
    assert min(times[8192], key=times[8192].__getitem__) == "one-shot"
    assert times[2**28]["two-shot"] < times[2**28]["one-shot"]
    assert times[2**28]["ring"] == pytest.approx(14 * 5e-6 + 1.75 * 2**28 / 450e9)


def test_two_levels_save_the_network():
    near, far = bytes_by_link("all-reduce", "switch", 16, 2, 8000)
    assert (near, far) == (8000, 1000)
    assert bytes_by_link("all-to-all", "ring", 16, 2, 1600) == (700, 800)
    assert bytes_by_link("all-gather", "ring", 16, 2, 10) == (140, 10)
    assert bytes_by_link("send", "ring", 2, 2, 10) == (0, 10)


def test_unknown_operations_and_algorithms_are_refused():
    for call in (lambda: bytes_sent("gossip", "ring", 2, 1), lambda: hops("all-reduce", "star", 2)):
        with pytest.raises(InputError, match="is not one of"):
            call()


def test_key_value_heads_stop_shrinking_at_one():
    assert [kv_heads_per_rank(2, tp) for tp in (1, 2, 4, 8)] == [2, 1, 1, 1]
    state = [sum(stage.kv_bytes_per_token for stage in Sharded(QWEN, H100, Mesh(tp)).stages) for tp in (1, 2, 4, 8)]
    assert state == [94 * 4 * 512, 94 * 2 * 512, 94 * 512, 94 * 512]


def test_norms_routers_and_latents_are_replicated():
    (stage,) = Sharded(DEEPSEEK, H100, Mesh(8)).stages
    for name in ("norm", "moe.router"):
        whole, rank = (sum(n * sum(p.params().values()) for n, p in m.counted if p.name == name) for m in (DEEPSEEK, stage))
        assert whole == rank > 0
    assert stage.kv_bytes_per_token == DEEPSEEK.kv_bytes_per_token == 70272


def test_ranks_hold_the_model_once_but_for_what_is_replicated():
    (stage,) = Sharded(LLAMA, H100, Mesh(8)).stages
    norms = sum(n * sum(p.params().values()) for n, p in LLAMA.counted if p.kind == "norm")
    assert 8 * (stage.params - norms) == LLAMA.params - norms


def test_eight_ranks_compute_what_one_computes():
    work = Work(4, 1, 1000)
    (stage,) = Sharded(LLAMA, H100, Mesh(8)).stages
    assert 8 * stage.cost(work).matrix_flops == LLAMA.cost(work).matrix_flops
    assert 8 * stage.cost(work).read["state"] == LLAMA.cost(work).read["state"]


def test_all_reduces_of_a_tensor_parallel_step():
    """Two per layer and one behind the embedding, each of the residual stream; logits are gathered."""
    ranks = Sharded(LLAMA, A100, Mesh(8))
    sums = [(n, c) for n, c in ranks.collectives if c.operation == "all-reduce"]
    assert sum(n for n, _ in sums) == 2 * 80 + 1
    (stage,) = ranks.stages
    message = 16 * 8192 * 2
    logits = 16 * (128256 // 8) * 2
    assert stage.cost(Work(16, 1, 100)).sent["nvlink"] == 161 * message * Fraction(14, 8) + 7 * logits
    assert Sharded(LLAMA, H100, Mesh(8)).stages[0].cost(Work(16, 1, 100)).sent["nvlink"] == 161 * message + 7 * logits


def test_links_are_streams_of_the_bound_and_of_the_sum():
    step = on(LLAMA, Mesh(8)).decode(16, 1000)
    assert set(step.timing.streams) == {"memory", "compute", "vector", "nvlink"}
    assert step.serial_s == pytest.approx(sum(step.timing.streams.values()))
    slow = replace(H100, links={"nvlink": replace(H100.links["nvlink"], bandwidth=replace(H100.bandwidth, value=10**9))})
    assert on(LLAMA, Mesh(8), slow).decode(16, 1000).bound_by == "nvlink"


def test_placement_chooses_the_link():
    """Eight H100 share a server; a group of sixteen has two, and a pipeline crosses between them."""
    assert set(on(LLAMA, Mesh(8)).decode(1, 10).cost.sent) == {"nvlink"}
    assert set(on(LLAMA, Mesh(16)).decode(1, 10).cost.sent) == {"nvlink", "network"}
    assert set(on(LLAMA, Mesh(8, node=4)).decode(1, 10).cost.sent) == {"nvlink", "network"}
    assert set(on(LLAMA, Mesh(8, 2)).decode(1, 10).cost.sent) == {"nvlink", "network"}
    assert set(on(LLAMA, Mesh(4, 2)).decode(1, 10).cost.sent) == {"nvlink"}
    with pytest.raises(InputError, match="unevenly"):
        on(load_model("qwen3-8b"), Mesh(1, 1)).mesh.place(replace(H100, node_accelerators=5), 7)
    with pytest.raises(InputError, match="need the link 'network'"):
        on(LLAMA, Mesh(8, 2), replace(H100, links={"nvlink": H100.links["nvlink"]}))


def test_pipeline_stages_hold_their_layers():
    assert stage_layers(61, 4) == [15, 15, 16, 15]
    assert stage_layers(80, 4) == [20] * 4
    stages = Sharded(LLAMA, H100, Mesh(1, 4)).stages
    assert [len(stage.layers) for stage in stages] == [20] * 4
    assert sum(stage.params for stage in stages) == LLAMA.params
    tied = load_model("llama-3.2-1b")
    split = Sharded(tied, H100, Mesh(1, 2)).stages
    assert sum(stage.params for stage in split) == tied.params + 128256 * 2048, "the last stage stores the tied head as well"


def test_a_tower_is_cut_and_stands_on_the_first_stage():
    model = load_model("gemma-3-27b-it")
    assert model.tower_params > 0
    first, last = Sharded(model, H100, Mesh(2, 2)).stages
    assert first.tower_params == -(-model.tower_params // 2)
    assert last.tower_params == 0
    assert 0.5 < float(first.weight_bytes + last.weight_bytes) / float(model.weight_bytes) < 0.55


def test_a_decode_step_needs_room_for_its_own_keys():
    whole, rank = Deployment(LLAMA, H100).decode(8, 1000).memory, on(LLAMA, Mesh(8)).decode(8, 1000).memory
    assert rank.new_kv_bytes * 8 == whole.new_kv_bytes == 8 * 327680
    assert on(LLAMA, Mesh(2, 4)).decode(8, 1000).memory.new_kv_bytes * 8 == whole.new_kv_bytes


def test_pipelined_steps():
    """One sequence passes every stage; a full pipeline takes a turn of the slowest stage per microbatch."""
    one = Deployment(LLAMA, H100).decode(1, 1000)
    alone = on(LLAMA, Mesh(1, 4)).decode(1, 1000)
    assert alone.bound_s == pytest.approx(one.bound_s, rel=1e-3)
    full = on(LLAMA, Mesh(1, 4)).decode(64, 1000)
    stage = max(Deployment(s, H100).decode(16, 1000).bound_s for s in Sharded(LLAMA, H100, Mesh(1, 4)).stages)
    assert full.bound_s == pytest.approx(4 * stage, rel=1e-3)
    assert full.bound_s < Deployment(LLAMA, H100).decode(64, 1000).bound_s
    assert bubble(4, 1) == Fraction(3, 4)
    assert bubble(4, 12) == Fraction(1, 5)


def test_pipelined_prefill_pays_the_bubble():
    deployment = on(LLAMA, Mesh(1, 4))
    first, many = deployment.prefill(1, 2048), deployment.prefill(13, 2048)
    slowest = max(s.bound_s for s in (Deployment(stage, H100).prefill(1, 2048) for stage in deployment.ranks.stages))
    assert many.bound_s == pytest.approx(first.bound_s + 12 * slowest, rel=1e-3)
    assert first.bound_s == pytest.approx(Deployment(LLAMA, H100).prefill(1, 2048).bound_s, rel=0.01)


def test_tokens_of_a_pipeline():
    """Each stage stores its own layers of every sequence: with p stages a pool of the same size holds p times the tokens."""
    for stages in (1, 2, 4, 8):
        (per_token,) = {stage.kv_bytes_per_token for stage in Sharded(LLAMA, H100, Mesh(1, stages)).stages}
        assert per_token * stages == LLAMA.kv_bytes_per_token


def test_experts_cut_spread_and_both():
    held = {
        mesh: next(p for n, p in Sharded(DEEPSEEK, H100, mesh).stages[0].counted if p.name == "moe.down")
        for mesh in (Mesh(8), Mesh(8, ep=8), Mesh(8, ep=4))
    }
    assert [(p.E, p.inputs, p.k) for p in held.values()] == [(256, 256, 8), (32, 2048, 1), (64, 1024, 2)]
    assert len({sum(p.params().values()) for p in held.values()}) == 1


def test_distinct_ranks_of_a_token():
    """Against every choice of 3 out of 8 experts on 4 ranks, and the group limit of DeepSeek-V3."""
    from itertools import combinations

    choices = [len({expert // 2 for expert in chosen}) for chosen in combinations(range(8), 3)]
    assert distinct_ranks(8, 3, 4) == Fraction(sum(choices), len(choices))
    assert distinct_ranks(8, 8, 4) == 4
    assert math.isclose(float(distinct_ranks(256, 8, 256)), 8)


def test_attention_data_parallelism_divides_sequences_and_sends_tokens():
    mesh = Mesh(dp=8, ep=8)
    step = on(DEEPSEEK, mesh).decode(256, 4096)
    assert step.memory.kv_bytes == 32 * 4096 * 70272
    per_token = 2 * 58 * distinct_ranks(256, 8, 8) * Fraction(7, 8) * 7168 * 2
    assert step.cost.sent["nvlink"] == 32 * per_token
    single = Deployment(DEEPSEEK, H100).decode(256, 4096)
    gathered = [p for n, p in Sharded(DEEPSEEK, H100, mesh).stages[0].counted if p.name == "moe.down"]
    (down,) = gathered
    whole = next(p for n, p in DEEPSEEK.counted if p.name == "moe.down")
    assert down.cost(Work(32)).matrix_flops * 8 == whole.cost(Work(256)).matrix_flops
    assert float(down.cost(Work(32)).read["weights"]) * 8 == pytest.approx(float(whole.cost(Work(256)).read["weights"]))
    assert step.bound_s < single.bound_s


def test_a_busy_expert_rank_works_more():
    even, busy = (on(DEEPSEEK, Mesh(dp=8, ep=8, imbalance=load)).decode(4096, 512) for load in (Fraction(1), Fraction(2)))
    assert busy.cost.matrix_flops > 1.2 * even.cost.matrix_flops


def test_a_spread_cache_shrinks_where_heads_cannot():
    """Eight ranks and four key-value heads: without spreading each head is stored twice."""
    kept, spread = (on(QWEN, Mesh(8, sp=sp)).decode(8, 65536) for sp in (1, 2))
    assert spread.memory.kv_bytes * 2 == kept.memory.kv_bytes
    assert spread.cost.read["state"] < 0.51 * kept.cost.read["state"]
    assert spread.cost.matrix_flops == pytest.approx(float(kept.cost.matrix_flops), rel=1e-3)
    latent = [on(DEEPSEEK, Mesh(8, sp=sp)).decode(8, 65536).memory.kv_bytes for sp in (1, 8)]
    assert latent[0] == 8 * latent[1]
    with pytest.raises(UnsupportedModel, match="spreading the cache"):
        on(load_model("gpt-oss-120b"), Mesh(8, sp=2))


@pytest.mark.parametrize(
    ("model", "mesh", "text"),
    [
        ("falcon-7b", Mesh(2), "query heads 71 does not divide by 2"),
        ("phi-3-medium-4k", Mesh(4), "10 key-value heads neither divide by 4"),
        ("qwen3-235b-a22b", Mesh(8, ep=8, dp=1, pp=95), "95 stages for 94 layers"),
        ("deepseek-v3", Mesh(32), "is 576, not a whole number of fp8-block blocks of 128"),
        ("llama-3.1-8b", Mesh(2, ep=2), "has no experts to spread"),
        ("mixtral-8x7b-v0.1", Mesh(16, ep=16), "experts (ep) 8 does not divide by 16"),
    ],
)
def test_what_does_not_divide_is_refused(model, mesh, text):
    with pytest.raises(InputError) as error:
        Sharded(load_model(model), H100, mesh)
    assert text in str(error.value)


def test_what_no_rule_covers_is_refused_by_name():
    for model, text in (("whisper-large-v3", "encoder-decoders"), ("rwkv-7-2.9b", "TimeMix7"), ("zamba2-7b", "Linear")):
        with pytest.raises(UnsupportedModel, match=text):
            Sharded(load_model(model), H100, Mesh(2))


@pytest.mark.parametrize(
    "sizes", [{"tp": 0}, {"pp": -1}, {"ep": 3, "tp": 8}, {"sp": 3, "tp": 8}, {"imbalance": Fraction(1, 2)}, {"microbatches": 0}]
)
def test_meshes_that_cannot_be_are_refused(sizes):
    with pytest.raises(InputError):
        Mesh(**sizes)


def test_group_quantised_weights_divide_by_whole_groups():
    model = apply(load_model("qwen2.5-14b"), [dtype("int4-g128")])
    with pytest.raises(InputError, match="int4-g128 blocks of 128"):
        Sharded(model, H100, Mesh(8))
    assert Sharded(load_model("qwen2.5-14b"), H100, Mesh(8)).stages


SHARDABLE = (
    "llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v3.2", "gemma-3-27b-it", "gpt-oss-20b", "nemotron-h-8b", "qwen3-next-80b-a3b",
    "kimi-linear-48b-a3b", "minimax-text-01", "falcon-h1-7b", "deepseek-v4-flash", "granite-4.0-h-small",
)  # fmt: skip


@pytest.mark.parametrize("name", SHARDABLE)
def test_every_kind_of_mixer_is_cut_in_two(name):
    """Two ranks hold the model once, but for what is replicated, and compute each matmul once or twice."""
    model = load_model(name)
    (stage,) = Sharded(model, H100, Mesh(2)).stages
    assert 0.5 <= float(stage.weight_bytes / model.weight_bytes) < 0.56
    work = Work(8, 1, 300)
    assert 0.5 <= float(stage.cost(work).matrix_flops / model.cost(work).matrix_flops) < 0.75
    prefill = [m.for_prefill.cost(Work(1, 300)).matrix_flops for m in (stage, model)]
    assert 0.5 <= float(prefill[0] / prefill[1]) < 0.75


@settings(max_examples=25, deadline=None)
@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4]), st.integers(1, 64), st.integers(0, 4096))
def test_arrays_and_numbers_agree_on_every_mesh(tp, pp, batch, context):
    numpy = pytest.importorskip("numpy")
    deployment = on(load_model("llama-3.1-8b"), Mesh(tp, pp))
    plain = deployment.decode(batch, context)
    swept = deployment.decode(numpy.array([float(batch)]), numpy.array([float(context)]))
    assert float(swept.bound_s[0]) == pytest.approx(plain.bound_s, rel=1e-12)
    assert float(swept.serial_s[0]) == pytest.approx(plain.serial_s, rel=1e-12)
    assert float(numpy.asarray(swept.memory.required_bytes).ravel()[0]) == pytest.approx(float(plain.memory.required_bytes))
    assert plain.bound_s <= plain.serial_s


def test_blocks_of_equal_heads_stay_equal_objects():
    part, summed = shard(next(b for b in LLAMA.layers[0].blocks if isinstance(b, AttentionBlock)), 8)
    assert summed
    assert (part.N, part.K, part.H) == (8, 1, 128)
    assert len(Sharded(LLAMA, H100, Mesh(8)).stages[0].groups) == len(LLAMA.groups)
    assert padded_vocabulary(50257) == 50304


def test_layouts_are_all_products_and_say_why_not():
    found = layouts(DEEPSEEK, H100, 8)
    assert {mesh.ranks for mesh in found.possible} == {8}
    assert Mesh(8) in found.possible
    assert Mesh(dp=8, ep=8) in found.possible
    dense = layouts(load_model("falcon-7b"), H100, 8)
    assert [mesh.flags for mesh in dense.possible] == ["--pp 8"]
    assert all("query heads 71" in why for _, why in dense.refused)


def test_explain_lists_collectives_among_kernels():
    parts = {part.name: part for part in on(LLAMA, Mesh(8)).explain(Work(16, 1, 100, all_logits=True))}
    assert parts["all_reduce"].count == 160
    assert parts["all_reduce"].timing.links["nvlink"] > 0
    assert isinstance(next(c for _, c in Sharded(LLAMA, H100, Mesh(8)).collectives), Collective)
    assert not any(isinstance(p, MoE) for _, p in Sharded(DEEPSEEK, H100, Mesh(8)).stages[0].counted)


def cli(capsys, *arguments: str) -> tuple[int, str, str]:
    code = run([*arguments])
    return code, *capsys.readouterr()


def test_what_if_over_meshes(capsys):
    code, out, _ = cli(capsys, "what-if", "llama-3.1-70b", "-g", "h100-sxm", "--tp", "4,8", "-b", "64", "--json")
    four, eight = json.loads(out)
    assert code == 0
    assert (four["gpus"], eight["gpus"]) == (4, 8)
    assert eight["mesh"] == "--tp 8"
    assert four["fits"]
    assert eight["tpot_bound_s"] < four["tpot_bound_s"]
    assert any("all-reduce by switch" in line for line in eight["assumes"])


def test_what_if_proposes_more_gpus(capsys):
    code, out, _ = cli(capsys, "what-if", "llama-3.1-70b", "-g", "h100-sxm", "-b", "8")
    assert code == 0
    assert "--tp 2" in out.splitlines()[-1]


def test_fit_names_memory_when_no_layout_fits(capsys):
    code, out, _ = cli(capsys, "fit", "deepseek-v3", "-g", "h200-sxm", "--gpus", "2", "--check")
    first = out.splitlines()[0]
    assert code == 1
    assert "no layout fits" in first
    assert "GiB of memory per GPU, and 139.80 GiB is there" in first


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--tp", "3"), "tp: query heads 64 does not divide by 3"),
        (("--tp", "0"), "tp: '0' is out of range"),
        (("--ep", "2"), "ep: 2 does not divide"),
        (("--node", "4"), "node: a server's size"),
        (("--tp", "2", "--gpus", "2"), "gpus: every layout is tried"),
    ],
)
def test_bad_meshes_are_one_line_on_stderr(capsys, arguments, text):
    code, out, err = cli(capsys, "fit", "llama-3.1-70b", "-g", "h100-sxm", *arguments)
    assert (code, out) == (2, "")
    assert text in err


def test_imbalance_and_microbatches_are_options_of_a_mesh(cli):
    """The busiest expert rank sets the pace; with one batch in flight stages wait for each other (bubbles)."""

    def bound(*arguments: object) -> tuple[str, float]:
        (found,) = cli("what-if", *arguments, "--gpu", "h100-sxm", "--batch", 64, "--context", 2000, "-o", "json").records
        return found["mesh"], found["tpot_bound_s"]

    spread = ("qwen3-30b-a3b", "--tp", 4, "--ep", 4)
    even, uneven = bound(*spread), bound(*spread, "--imbalance", 1.5)
    assert (even[0], uneven[0]) == ("--tp 4 --ep 4", "--tp 4 --ep 4 --imbalance 1.5")
    assert uneven[1] > even[1]
    stages = ("llama-3.1-70b", "--pp", 4)
    full, one = bound(*stages), bound(*stages, "--microbatches", 1)
    assert one[0] == "--pp 4 --microbatches 1"
    assert one[1] > full[1]
    for arguments, text in (
        (("--imbalance", 2), "imbalance: it matters with several GPUs only"), (("--tp", 2, "--imbalance", 0.5), "imbalance: "),
        (("--tp", 2, "--microbatches", 0), "microbatches: "), (("--tp", 2, "--imbalance", "1,2"), "imbalance: '1,2' are several"),
    ):  # fmt: skip
        answer = cli("what-if", "llama-3.1-8b", "--gpu", "h100-sxm", *arguments)
        assert (answer.code, answer.err.count("\n")) == (2, 1)
        assert text in answer.err

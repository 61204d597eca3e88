"""Wrong numbers that users of other tools reported, and ours beside the right ones.

Each check stands for one entry of the collected complaints (D_complaints.json, kept beside the checkout); its docstring
names the public thread. Figures that the file states are quoted with the check, and a test compares the quotes with the
file.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from roofline import Deployment, Model, Work, load_accelerator, load_model
from roofline.accelerator import Accelerator, Quantity
from roofline.allocation import Settings, allocate
from roofline.components.attention import Attention, AttentionBlock
from roofline.components.latent import LatentAttention
from roofline.components.linear import Linear
from roofline.components.mla import MLA
from roofline.edits import apply, dtype, kv_dtype, unfused
from roofline.engines.profile import load_engine
from roofline.formats import FORMATS
from roofline.model import Layer
from roofline.parallel.layouts import layouts
from roofline.parallel.mesh import Mesh, kv_heads_per_rank
from roofline.parallel.ranks import Sharded
from roofline.sharded import ShardedDeployment

FILE = Path(__file__).parents[2] / "shared" / "cases" / "D_complaints.json"

GIB, MIB = 2**30, 2**20


@dataclass(frozen=True)
class Check:
    """One complaint: the check, and the figures of the file that it claims to reproduce."""

    run: Callable[[], None]
    quotes: tuple[str, ...]


CHECKS: dict[str, Check] = {}


def complaint(name: str, *quotes: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Registers the check of a complaint with the figures that it quotes from the file."""

    def register(run: Callable[[], None]) -> Callable[[], None]:
        CHECKS[name] = Check(run, quotes)
        return run

    return register


def dense(family: str, D: int, N: int, K: int, F: int, L: int, V: int, **more: Any) -> dict[str, Any]:
    """The keys of a dense decoder's config.json."""
    return {
        "model_type": family, "hidden_size": D, "num_attention_heads": N, "num_key_value_heads": K, "intermediate_size": F,
        "num_hidden_layers": L, "vocab_size": V, "torch_dtype": "bfloat16", "tie_word_embeddings": False, **more,
    }  # fmt: skip


QWEN3_4B = dense("qwen3", 2560, 32, 8, 9728, 36, 151936, head_dim=128, attention_bias=False, tie_word_embeddings=True)
LLAMA_2_7B = dense("llama", 4096, 32, 32, 11008, 32, 32000)
LLAMA_3_8B = dense("llama", 4096, 32, 8, 14336, 32, 128256)
LLAMA_30B = dense("llama", 6656, 52, 52, 17920, 60, 32000, torch_dtype="float16")
MISTRAL_7B = dense("mistral", 4096, 32, 8, 14336, 32, 32000, sliding_window=4096)
GEMMA_2_27B = dense("gemma2", 4608, 32, 16, 36864, 46, 256000, head_dim=128, sliding_window=4096, tie_word_embeddings=True)
GEMMA_3_27B = dense(
    "gemma3_text", 5376, 32, 16, 21504, 62, 262208, head_dim=128, sliding_window=1024, sliding_window_pattern=6,
    tie_word_embeddings=True,
)  # fmt: skip
MIXTRAL = dense("mixtral", 4096, 32, 8, 14336, 32, 32000, num_local_experts=8, num_experts_per_tok=2)
GPT_OSS_120B = dense(
    "gpt_oss", 2880, 64, 8, 2880, 36, 201088, head_dim=64, attention_bias=True, num_local_experts=128,
    num_experts_per_tok=4, sliding_window=128, layer_types=["sliding_attention", "full_attention"] * 18,
)  # fmt: skip
QWEN35_9B = dense(
    "qwen3_5_text", 4096, 16, 4, 12288, 32, 248320, head_dim=256, attn_output_gate=True, full_attention_interval=4,
    layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 8,
    linear_conv_kernel_dim=4, linear_key_head_dim=128, linear_num_key_heads=16, linear_num_value_heads=32,
    linear_value_head_dim=128, mamba_ssm_dtype="float32", partial_rotary_factor=0.25,
)  # fmt: skip


def rtx_4080() -> Accelerator:
    """A 16 GB card at 716.8 GB/s (NVIDIA Ada whitepaper)."""
    sheet = "NVIDIA Ada whitepaper"
    return replace(
        load_accelerator("rtx-4090"),
        bandwidth=Quantity(716_800_000_000, "datasheet", sheet),
        nominal=Quantity(16_000_000_000, "datasheet", sheet),
        reported=None,
        visible=None,
    )


def attention_blocks(model: Model) -> list[AttentionBlock]:
    return [block for layer in model.layers for block in layer.blocks if isinstance(block, AttentionBlock)]


def state_of(model: Model, name: str, cached: int) -> Any:
    """Bytes of the state pieces of one name, per sequence."""
    return sum(number * piece.bytes(cached) for number, pieces in model.state for piece in pieces if piece.name == name)


@complaint("D01", "36*8*128*2*2 = 147456")
def head_dim_is_not_the_width_over_the_heads() -> None:
    """LMCache/LMCache#688: the key head_dim was ignored, and 2560 / 32 = 80 taken for 128."""
    model = load_model(QWEN3_4B)
    assert model.kv_bytes_per_token == 147456
    (block,) = {*attention_blocks(model)}
    assert (block.N, block.K, block.H) == (32, 8, 128)
    assert sum(block.params().values()) == 2560 * 128 * (2 * 32 + 2 * 8) + 2 * 128
    core = next(part for part in block.parts if isinstance(part, Attention))
    assert core.cost(Work(1, 1, 1023)).matrix_flops == 4 * 32 * 128 * 1024


@complaint("D02", "61*(512+64)", "35136", "70272")
def a_latent_is_key_and_value_at_once() -> None:
    """LMCache/LMCache#694: the latent counted twice, its rotary part not at all."""
    model = load_model("deepseek-v3")
    assert sum(number * piece.elements for number, pieces in model.state for piece in pieces) == 35136
    assert model.kv_bytes_per_token == 70272
    assert model.state_bytes(1000) == 1000 * 70272


@complaint("D04", "10.41 GB", "(10*131072 + 52*1024)*8192")
def windowed_layers_stop_growing() -> None:
    """unslothai/unsloth#4757: 81.38 GB for gemma-3-27b at 131072, every layer taken for a global one."""
    found = load_model(GEMMA_3_27B).state_bytes(131072)
    assert found == (10 * 131072 + 52 * 1024) * 8192
    assert round(found / GIB, 2) == 10.41


@complaint("D05", "10.72 GB = 61*576*2*163840")
def latents_do_not_come_in_heads() -> None:
    """unslothai/unsloth#4757: 2.08 GB for DeepSeek-V3.1 at 163840. The thread's GLM-5 counts its 79th, MTP layer as well."""
    assert load_model("deepseek-v3").state_bytes(163840) == 61 * 576 * 2 * 163840
    assert round(61 * 576 * 2 * 163840 / GIB, 2) == 10.72
    assert round(load_model("kimi-k2").state_bytes(262144) / GIB, 2) == 17.16
    glm = load_model("glm-5")
    assert len(glm.layers) == 78
    assert round(state_of(glm, "latent", 202752) / 78 * 79 / GIB, 2) == 17.18


@complaint("D07", "KV 16384 MiB + recurrent 598.5 MiB", "about 47 GB")
def a_recurrent_layer_keeps_the_same_at_any_length() -> None:
    """lmstudio-ai/lmstudio-bug-tracker#1862: all 64 layers of Qwen3.6-27B billed; llama.cpp keeps the recurrence in fp32."""
    model = load_model("qwen3.6-27b")
    cache = state_of(model, "kv", 262144)
    recurrent = 4 * model.state_elements_per_sequence * 4
    assert cache == 16384 * MIB
    assert recurrent == 4 * 48 * (48 * 128 * 128 + 10240 * 3) * 4
    assert recurrent == Fraction(5985, 10) * MIB
    whole = FORMATS["q8_0"].bytes(model.params) + cache + recurrent
    assert abs(float(whole) / 1e9 - 47) < 1


@complaint("D08", "8.5 GB at 8k context", "67 t/s measured")
def a_hybrid_fits_and_streams_few_keys() -> None:
    """AlexsJones/llmfit#203: Qwen3.5-9B in Q8_0 at 8K declared not to fit a 16 GB card and to run at 40.9 tok/s.

    8 of 32 layers cache keys. The measured rate lies below our bound and above four fifths of it.
    """
    model = apply(load_model(QWEN35_9B), [dtype("q8_0")])
    assert model.kv_bytes_per_token == 8 * 2 * 4 * 256 * 2
    step = Deployment(model, rtx_4080()).decode(1, 8192)
    assert step.memory.fits
    assert step.memory.kv_bytes == 8192 * 32768 + model.state_bytes_per_sequence
    assert 67 < step.output_tok_per_s < 67 / 0.8
    stored = FORMATS["q8_0"].bytes(model.params - 248320 * 4096)
    assert 8.5e9 < stored + step.memory.kv_bytes < 9e9, "the lookup table stays on the host"


@complaint("D10", "growth only from attention layers (4 of 40 in granite-4 tiny)")
def only_attention_layers_grow() -> None:
    """ollama/ollama#12186: 28 GB more for granite4 tiny between 16384 and 131072 tokens."""
    model = load_model("granite-4.0-h-tiny")
    growing = [number for number, pieces in model.state for piece in pieces if piece.grows_with == "token"]
    assert (sum(growing), len(model.layers)) == (4, 40)
    growth = model.state_bytes(131072) - model.state_bytes(16384)
    assert growth == (131072 - 16384) * 4 * 2 * 4 * 128 * 2
    assert growth < 1e9


@complaint("D11", "compute buffer about 2.4 GB more")
def a_fit_counts_the_workspace() -> None:
    """ollama/ollama#17201: weights and cache of DeepSeek-V2-Lite at 32K, and nothing for activations.

    The thread's figure is what one engine reserves; ours is what one kernel of the prefill holds at the least.
    """
    model = load_model("deepseek-v2-lite")
    memory = Deployment(model, load_accelerator("h100-sxm")).prefill(1, 32768).memory
    assert memory.required_bytes == model.weight_bytes + 32768 * 27 * 576 * 2 + memory.workspace_bytes
    widest = 32768 * (2048 + 10944) * 2
    assert widest <= memory.workspace_bytes < 2.4e9
    tight = replace(memory, capacity_bytes=memory.total_bytes + memory.workspace_bytes - 1)
    assert tight.capacity_bytes > tight.total_bytes
    assert not tight.fits


@complaint("D13", "2*L*Nkv*head_dim*bytes")
def a_token_costs_two_vectors_per_key_value_head() -> None:
    """jranaraki/vllm-fit#2: the width multiplied by the number of heads once more."""
    for config, expected in ((LLAMA_2_7B, 524288), (LLAMA_3_8B, 131072)):
        assert 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * 128 * 2 == expected
        assert load_model(config).kv_bytes_per_token == expected


@complaint("D14", "131072 B/token")
def the_width_is_not_the_width_of_the_keys() -> None:
    """vllm-project/vllm#29736: Llama-3-8B as if it had 32 key-value heads."""
    assert load_model(LLAMA_3_8B).kv_bytes_per_token == 131072


@complaint("D15", "architecture formula")
def the_cache_does_not_follow_the_parameters() -> None:
    """Osmantic/ODS#3324: the cache taken for a share of the parameter count."""
    few, many = load_model(MIXTRAL), load_model({**MIXTRAL, "num_local_experts": 64})
    assert many.params > 7 * few.params
    assert many.state_bytes(32768) == few.state_bytes(32768) == 32768 * 131072


@complaint("D17", "some engines ignore the window")
def a_window_is_in_the_config_and_can_be_ignored() -> None:
    """Andyyyy64/whichllm#124: Mistral-7B-v0.1 unchanged by its window. Both kinds of runtime, side by side."""
    honoured, ignored = load_model(MISTRAL_7B), load_model({**MISTRAL_7B, "sliding_window": None})
    assert honoured.state_bytes(131072) == honoured.state_bytes(4096) == 4096 * 131072
    assert ignored.state_bytes(131072) == 131072 * 131072
    gemma = load_model({**GEMMA_3_27B, "layer_types": ["full_attention"] * 62, "sliding_window_pattern": None})
    assert gemma.state_bytes(131072) == 62 * 131072 * 8192


@complaint("D18", "626949 and 1007303 tokens (64.68, 103.92 GiB)")
def the_format_of_weights_is_not_that_of_the_cache() -> None:
    """redhat-performance/configiq#112: fp8 keys assumed beside NVFP4 weights, and pages that contradict each other.

    The two logs have one cost per token, so both caches are stored alike; our pool divided by our tokens is our cost.
    """
    logs = (Fraction("64.68") * GIB / 626949, Fraction("103.92") * GIB / 1007303)
    assert abs(float(logs[0] / logs[1]) - 1) < 1e-4
    plain, packed = load_model(GEMMA_3_27B), apply(load_model(GEMMA_3_27B), [dtype("nvfp4")])
    assert packed.state == plain.state
    for model in (load_model("llama-3.1-70b"), apply(load_model("llama-3.1-70b"), [dtype("nvfp4")])):
        found = allocate(model, load_accelerator("h200-sxm"), Mesh(2), load_engine("vllm"), Settings())
        tokens, pool = found.tokens(found.pool.best), found.pool.best
        assert tokens is not None
        assert tokens * 163840 <= pool < (tokens + 16) * 163840


@complaint("D22", "131072*327680 = 40.0 GiB")
def the_pool_must_hold_one_request() -> None:
    """ai-dynamo/dynamo#10104: a plan for Llama-3.1-70B-FP8 whose longest request exceeds the pool, hence a crash loop."""
    model = apply(load_model("llama-3.1-70b"), [dtype("fp8")])
    one = allocate(model, load_accelerator("h100-sxm"), Mesh(), load_engine("vllm"), Settings(max_model_len=131072))
    assert one.request_bytes == 131072 * 327680 == 40 * GIB
    assert not one.fits
    assert one.longest < 131072
    two = allocate(model, load_accelerator("h100-sxm"), Mesh(2), load_engine("vllm"), Settings(max_model_len=131072))
    assert two.request_bytes == 20 * GIB
    assert two.fits


@complaint("D19", "18*(T+128)*1024 B", "1.1341 GiB/seq (72.6 GiB for 64)", "36*T*1024 = 2.2637")
def every_other_layer_is_windowed() -> None:
    """ai-dynamo/aiconfigurator#1537: 64 sequences of gpt-oss-120b at fp8 refused, all 36 layers taken for global."""
    T = 65536 + 400
    model = apply(load_model(GPT_OSS_120B), [kv_dtype("fp8")])
    assert model.state_bytes(T) == 18 * (T + 128) * 1024
    assert round(model.state_bytes(T) / GIB, 4) == 1.1341
    assert round(64 * model.state_bytes(T) / GIB, 1) == 72.6
    everywhere = apply(load_model({**GPT_OSS_120B, "layer_types": ["full_attention"] * 36}), [kv_dtype("fp8")])
    assert everywhere.state_bytes(T) == 36 * T * 1024
    assert round(everywhere.state_bytes(T) / GIB, 4) == 2.2637


@complaint("D21", "does not fit in any layout")
def the_error_names_memory() -> None:
    """ai-dynamo/aiconfigurator#437: DeepSeek-V3 on two H200 answered with a hint about latency; no layout holds it."""
    gpu, model = load_accelerator("h200-sxm"), load_model("deepseek-v3")
    found = layouts(model, gpu, 2)
    memories = [ShardedDeployment(model, gpu, mesh=mesh).decode(1, 1).memory for mesh in found.possible]
    assert memories
    assert not any(memory.fits for memory in memories)
    least = min(memory.required_bytes for memory in memories)
    assert least > 2 * gpu.capacity.value


@complaint("D23", "per-microbatch KV of all stages")
def a_pipeline_holds_as_many_tokens_as_its_stages_hold_of_their_layers() -> None:
    """microsoft/vidur#18: whether the layers of a pipeline count twice. A stage keeps its layers' share of every token."""
    model, gpu = load_model("llama-3.1-70b"), load_accelerator("h100-sxm")
    pool = 10 * GIB
    for stages in (1, 2, 4, 8):
        ranks = Sharded(model, gpu, Mesh(1, stages))
        tokens = min(pool // stage.kv_bytes_per_token for stage in ranks.stages)
        assert tokens == stages * pool // (80 * 2 * 8 * 128 * 2)


@complaint("D26", "norms replicated; choice depends on placement")
def norms_are_on_every_rank_and_placement_chooses_the_link() -> None:
    """cli99/llm-analysis#27: norms divided by the ranks, and a group of up to eight sent over the network."""
    model, gpu = load_model("llama-3.1-70b"), load_accelerator("h100-sxm")
    for tp in (2, 8):
        (stage,) = Sharded(model, gpu, Mesh(tp)).stages
        assert sum(n for n, part in stage.counted if part.kind == "norm" and part.params() == {FORMATS["bf16"]: 8192}) == 161
        assert {*stage.cost(Work(1)).sent} == {"nvlink"}
    (stage,) = Sharded(model, gpu, Mesh(16)).stages
    assert {*stage.cost(Work(1)).sent} == {"nvlink", "network"}


@complaint("D29", "max(1, ceil(Nkv/TP)) heads per GPU")
def key_value_heads_are_replicated_below_one() -> None:
    """inference-sim, sim/latency/kv_capacity.go: two key-value heads at four ranks taken for half a head each."""
    assert [kv_heads_per_rank(2, tp) for tp in (1, 2, 4, 8)] == [2, 1, 1, 1]
    config = dense("llama", 4096, 32, 2, 14336, 32, 128256)
    per_gpu = [
        Sharded(load_model(config), load_accelerator("h100-sxm"), Mesh(tp)).stages[0].kv_bytes_per_token for tp in (2, 4, 8)
    ]
    assert per_gpu == [32 * 2 * 128 * 2] * 3


@complaint("D25", "num_key_value_heads")
def fused_and_unfused_attention_load_the_same_keys() -> None:
    """hahnyuan/LLM-Viewer#12: the fused path loaded keys once per query head."""
    work = Work(4, 1, 1023)
    model = load_model(LLAMA_3_8B)
    fused, baseline = model.cost(work).read["state"], apply(model, [unfused()]).cost(work).read["state"]
    assert fused == baseline == 4 * 1024 * 32 * 2 * 8 * 128 * 2


@complaint("D27", "attention layers only plus fixed Mamba cache per sequence")
def a_pattern_names_the_layers_that_cache() -> None:
    """NVIDIA/TensorRT-LLM#5371: KV in all 118 layers of Nemotron-H-56B, no state of its Mamba layers."""
    model = load_model("nemotron-h-56b")
    assert len(model.layers) == 118
    assert model.kv_bytes_per_token == 10 * 2 * 8 * 128 * 2
    assert model.state_elements_per_sequence == 54 * (256 * 64 * 256 + 3 * (256 * 64 + 2 * 8 * 256))


@complaint("D30", "sum over KV groups")
def the_state_of_a_hybrid_is_the_sum_of_its_groups() -> None:
    """vllm-project/vllm#36030: one group of a Mamba-attention hybrid counted, and the context overestimated."""
    model = load_model("nemotron-h-56b")
    fixed = model.state_bytes_per_sequence
    assert fixed > 0
    assert model.state_bytes(10000) == fixed + 10000 * 40960
    gpu = load_accelerator("h200-sxm")
    largest = Deployment(model, gpu).largest_context(1)
    assert largest.size is not None
    needed = model.weight_bytes + fixed + (largest.size + 2) * 40960  # the step adds a token of its own
    workspace = Deployment(model, gpu).decode(1, largest.size + 1).memory.workspace_bytes
    assert needed + workspace - gpu.capacity.value == largest.missing_bytes > 0


@complaint("D31", "latent/compressed dims")
def compressed_entries_are_not_heads() -> None:
    """vllm-project/vllm#44376: DeepSeek-V4 stored with the dimensions of multi-head attention.

    Per layer 584 bytes for an entry (448 in fp8 with their scales, 64 in bf16), one per 4 or 128 tokens, a window of
    128, and 68 bytes of index (arXiv 2606.19348).
    """
    model = load_model("deepseek-v4-flash")
    S = 131072
    entries = 21 * (S // 4) * (584 + 68) + 20 * (S // 128) * 584 + 43 * 128 * 584
    assert model.state_bytes(S) == entries + model.state_bytes_per_sequence
    assert model.state_bytes(S) * 200 < S * 43 * 2 * 64 * 512 * 2


@complaint("D32", "12582912 = 4*12*64*64*64")
def attention_costs_what_its_shapes_say() -> None:
    """pytorch/pytorch#195460: FlopCounterMode counts nothing for the fused operator on a CPU."""
    assert Attention(12, 12, 64, mask="full").cost(Work(1, 64, 0)).matrix_flops == 12582912


@complaint("D33", "12960 = 4*2*5*9*9*4")
def attention_is_counted_once() -> None:
    """pytorch/pytorch#134804: counted in the operator and again in its decomposition."""
    core = Attention(5, 5, 4, mask="full")
    assert core.cost(Work(2, 9, 0)).matrix_flops == 12960


@complaint("D35", "1536")
def queries_behind_longer_keys_see_a_rectangle_and_a_triangle() -> None:
    """facebookresearch/xformers#1402: 4 queries, 10 keys of 8, values of 16; the second product took 6^2 for its pairs.

    The thread counts the triangle as T^2 / 2; the diagonal is whole here, T (T + 1) / 2, hence T / 2 pairs more.
    """
    flops = Attention(1, 1, 8, 16).cost(Work(1, 4, 6)).matrix_flops
    assert flops == 2 * (8 + 16) * (4 * 6 + 4 * 5 // 2)
    assert flops - 2 * (8 + 16) * Fraction(4, 2) == 1536


@complaint("D36", "134217728")
def every_query_head_computes() -> None:
    """facebookresearch/xformers#1404: 8 query heads counted as 2, the number of key-value heads."""
    shape = Work(1, 256, 0)
    assert Attention(8, 2, 64, mask="full").cost(shape).matrix_flops == 134217728
    assert Attention(2, 2, 64, mask="full").cost(shape).matrix_flops == 33554432


@complaint("D37", "half (S*(S+1)/2)")
def a_causal_prefill_is_a_triangle() -> None:
    """modular/modular#5557, AI-Hypercomputer/maxtext#1972: the whole square counted."""
    S = 1000
    causal, full = (Attention(4, 2, 8, mask=mask).cost(Work(3, S, 0)).matrix_flops for mask in ("causal", "full"))
    assert causal == 3 * 4 * 4 * 8 * (S * (S + 1) // 2)
    assert full == 3 * 4 * 4 * 8 * S * S


@complaint("D38", "FLOPs = 1337344")
def a_multiply_add_is_two() -> None:
    """facebookresearch/fvcore#108: multiply-adds of a 784-512-512-10 network under the name of FLOPs."""
    widths = (784, 512, 512, 10)
    layers = [Linear(inputs, outputs) for inputs, outputs in pairwise(widths)]
    assert sum(layer.cost(Work(1, 1)).matrix_flops for layer in layers) == 1337344


@complaint("D40", "D*Dh*(N+2*Nkv)")
def projections_follow_the_heads() -> None:
    """vllm-project/vllm#19290: 3 D^2 for the projections of Gemma 2, where D is not N H and K is not N."""
    (block,) = {replace(block, mask="causal", size=None) for block in attention_blocks(load_model(GEMMA_2_27B))}
    projection = block.parts[0]
    assert isinstance(projection, Linear)
    assert sum(projection.params().values()) == 4608 * 128 * (32 + 2 * 16)
    assert sum(projection.params().values()) != 3 * 4608**2


@complaint("D42", "2*B*N*S*((512+64)+512)")
def absorbed_and_expanded_latent_attention_differ() -> None:
    """flashinfer-ai/flashinfer#1640: absorbed, a score takes 576 products and a sum 512; expanded, 192 and 128."""
    B, S = 3, 4096
    block = next(block for block in load_model("deepseek-v3").layers[0].blocks if isinstance(block, MLA))

    def core(form: str) -> Any:
        parts = Layer((replace(block, form=form),)).parts
        return next(part for part in parts if isinstance(part, (Attention, LatentAttention)))

    decode = Work(B, 1, S - 1)
    assert core("absorbed").cost(decode).matrix_flops == 2 * B * 128 * S * ((512 + 64) + 512)
    assert core("expanded").cost(decode).matrix_flops == 2 * B * 128 * S * ((128 + 64) + 128)


@complaint("D43", "780 MiB at f16")
def the_cache_has_the_dtype_of_the_model() -> None:
    """abetlen/llama-cpp-python#66: LLaMA-30B at 512 tokens with a cache in fp32, 1560 MB."""
    model = load_model(LLAMA_30B)
    assert model.state_bytes(512) == 780 * MIB
    assert apply(model, [kv_dtype("fp32")]).state_bytes(512) == 1560 * MIB


@pytest.mark.parametrize("name", CHECKS)
def test_our_number_is_the_right_one(name: str) -> None:
    CHECKS[name].run()


@pytest.mark.skipif(not FILE.is_file(), reason="the collected complaints are not beside this checkout")
def test_every_complaint_has_a_check() -> None:
    right = {entry["id"]: entry["right"] for entry in json.loads(FILE.read_text(encoding="utf-8"))}
    assert {*CHECKS} == {*right}
    missing = {name: quote for name, check in CHECKS.items() for quote in check.quotes if quote not in right[name]}
    assert missing == {}, "figures quoted that the file does not state"

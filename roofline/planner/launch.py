"""The command that launches a deployment, in an engine's documented options; every one is parsed by them before it is shown."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, field
from typing import Any

from roofline.engines.documented import load_server
from roofline.errors import InputError
from roofline.planner.search import Plan

WHOLE = 256
"""Context lengths are rounded up to a multiple of this."""
WIDE = "fp32"
"""Weights that engines would narrow to 16 bits while they load, unless told not to."""
ONLINE = {"vllm": ("fp8",), "sglang": ("fp8",), "trtllm": (), "llamacpp": ()}
"""Formats that an engine makes from a 16-bit checkpoint while it loads."""
TRTLLM_CACHES = ("fp8", "nvfp4")
"""Formats of KvCacheConfig.dtype beside the model's own (tensorrt_llm/llmapi/llm_args.py)."""
PREFILL, DECODE = "prefill", "decode"


@dataclass(frozen=True)
class Launch:
    """One kind of instance.

    Attributes:
        words: the command. instances: how often it is started. role: "prefill" or "decode" of a disaggregated
            deployment, "router" for what stands in front of them, else "". files: name -> contents that it reads.
        notes: what the command cannot say.
    """

    words: tuple[str, ...]
    instances: int
    role: str = ""
    files: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """The command as a shell takes it."""
        return shlex.join(self.words)


@dataclass(frozen=True)
class _Asked:
    """What is said to an engine, in its neutral form."""

    model: str
    plan: Plan
    role: str
    draft: str | None
    weights: str | None
    kv: str | None
    length: int
    fraction: float | None
    kept: bool


def _wide(asked: _Asked) -> list[str]:
    """The option that keeps weights of 32 bits, where the plan was made for them."""
    return ["--dtype", "float32"] if asked.plan.setup.variant.weights == WIDE else []


def _vllm(asked: _Asked) -> tuple[list[str], dict[str, str]]:
    mesh, plan = asked.plan.setup.mesh, asked.plan
    words = ["--tensor-parallel-size", str(mesh.tp)]
    words += ["--pipeline-parallel-size", str(mesh.pp)] if mesh.pp > 1 else []
    words += ["--data-parallel-size", str(mesh.dp)] if mesh.dp > 1 else []
    words += ["--enable-expert-parallel"] if mesh.ep > 1 else []
    words += ["--decode-context-parallel-size", str(mesh.sp)] if mesh.sp > 1 else []
    words += ["--max-model-len", str(asked.length), "--max-num-seqs", str(plan.batch)]
    words += ["--max-num-batched-tokens", str(plan.budget), "--enable-chunked-prefill"]
    words += ["--gpu-memory-utilization", f"{asked.fraction:g}"] if asked.fraction else []
    words += ["--enable-prefix-caching"] if asked.kept else []
    words += _wide(asked)
    words += ["--quantization", asked.weights] if asked.weights else []
    words += ["--kv-cache-dtype", asked.kv] if asked.kv else []
    if plan.drafting and asked.draft:
        how = {"method": "mtp"} if asked.draft == "mtp" else {"model": asked.draft}
        words += ["--speculative-config", json.dumps({**how, "num_speculative_tokens": plan.drafting.gamma})]
    if asked.role:
        words += ["--kv-transfer-config", json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_both"})]
    return words, {}


def _sglang(asked: _Asked) -> tuple[list[str], dict[str, str]]:
    mesh, plan = asked.plan.setup.mesh, asked.plan
    words = ["--tp-size", str(mesh.tp * mesh.dp)]
    words += ["--pp-size", str(mesh.pp)] if mesh.pp > 1 else []
    words += ["--dp-size", str(mesh.dp), "--enable-dp-attention"] if mesh.dp > 1 else []
    words += ["--ep-size", str(mesh.ep)] if mesh.ep > 1 else []
    words += ["--context-length", str(asked.length), "--max-running-requests", str(plan.batch * mesh.dp)]
    words += ["--chunked-prefill-size", str(plan.budget * mesh.dp)]
    words += ["--mem-fraction-static", f"{asked.fraction:g}"] if asked.fraction else []
    words += _wide(asked)
    words += ["--quantization", asked.weights] if asked.weights else []
    words += ["--kv-cache-dtype", "fp8_e4m3" if asked.kv == "fp8" else asked.kv] if asked.kv else []
    if plan.drafting and asked.draft:
        own = asked.draft == "mtp"
        words += ["--speculative-algorithm", "NEXTN" if own else "STANDALONE"]
        words += [] if own else ["--speculative-draft-model-path", asked.draft]
        gamma = plan.drafting.gamma
        words += ["--speculative-num-steps", str(gamma), "--speculative-eagle-topk", "1"]
        words += ["--speculative-num-draft-tokens", str(gamma + 1)]
    words += ["--disaggregation-mode", asked.role] if asked.role else []
    return words, {}


def _trtllm(asked: _Asked) -> tuple[list[str], dict[str, str]]:
    mesh, plan = asked.plan.setup.mesh, asked.plan
    words = ["--backend", "pytorch", "--tp_size", str(mesh.tp * mesh.dp)]
    words += ["--pp_size", str(mesh.pp)] if mesh.pp > 1 else []
    words += ["--ep_size", str(mesh.ep)] if mesh.ep > 1 else []
    words += ["--max_seq_len", str(asked.length), "--max_batch_size", str(plan.batch), "--max_num_tokens", str(plan.budget)]
    words += ["--enable_chunked_prefill"]
    words += ["--kv_cache_free_gpu_memory_fraction", f"{asked.fraction:g}"] if asked.fraction else []
    lines = []
    if mesh.dp > 1:
        lines.append("enable_attention_dp: true")
    if asked.plan.setup.variant.weights == WIDE:
        lines.append("dtype: float32")
    if asked.kv and asked.kv not in TRTLLM_CACHES:
        raise InputError(f"emit: TensorRT-LLM keeps caches in {' or '.join(TRTLLM_CACHES)}, not in {asked.kv}")
    if asked.kv or asked.kept:
        lines += ["kv_cache_config:", *([f"  dtype: {asked.kv}"] if asked.kv else [])]
        lines += ["  enable_block_reuse: true"] if asked.kept else []
    if plan.drafting and asked.draft:
        own = asked.draft == "mtp"
        lines += ["speculative_config:", f"  decoding_type: {'MTP' if own else 'DraftTarget'}"]
        length = "num_nextn_predict_layers" if own else "max_draft_len"
        lines += [f"  {length}: {plan.drafting.gamma}"] + ([] if own else [f"  speculative_model_dir: {asked.draft}"])
    if asked.role:
        lines += ["cache_transceiver_config:", "  backend: DEFAULT"]
    if not lines:
        return words, {}
    name = f"{asked.role or 'extra'}.yaml"
    return [*words, "--extra_llm_api_options", name], {name: "\n".join(lines) + "\n"}


def _llamacpp(asked: _Asked) -> tuple[list[str], dict[str, str]]:
    mesh, plan = asked.plan.setup.mesh, asked.plan
    words = ["--n-gpu-layers", "999", "--ctx-size", str(plan.batch * asked.length), "--parallel", str(plan.batch)]
    words += ["--batch-size", str(max(2048, plan.budget)), "--ubatch-size", str(plan.budget)]
    words += ["--cache-type-k", asked.kv, "--cache-type-v", asked.kv] if asked.kv else []
    words += ["--split-mode", "layer", "--tensor-split", ",".join(["1"] * mesh.pp)] if mesh.pp > 1 else []
    if plan.drafting and asked.draft:
        words += ["--model-draft", asked.draft, "--n-gpu-layers-draft", "999", "--draft-max", str(plan.drafting.gamma)]
    return words, {}


WRITERS = {"vllm": _vllm, "sglang": _sglang, "trtllm": _trtllm, "llamacpp": _llamacpp}


def _router(engine: str, prefill: int, decode: int) -> list[Launch]:
    """What joins the halves of a disaggregated TensorRT-LLM deployment; other engines bring routers of their own."""
    if engine != "trtllm":
        return []

    def servers(count: int, first: int) -> str:
        urls = "".join(f"    - localhost:{first + number}\n" for number in range(count))
        return f"  num_instances: {count}\n  urls:\n{urls}"

    text = "hostname: localhost\nport: 8000\nbackend: pytorch\n"
    text += f"context_servers:\n{servers(prefill, 8001)}generation_servers:\n{servers(decode, 8001 + prefill)}"
    return [Launch(("trtllm-serve", "disaggregated", "-c", "disaggregated.yaml"), 1, "router", {"disaggregated.yaml": text})]


def _notes(engine: str, asked: _Asked, stored: str) -> tuple[str, ...]:
    setup = asked.plan.setup
    weights, mesh = setup.variant.weights, setup.mesh
    found = []
    if weights != stored and weights not in ONLINE[engine]:
        found.append(f"{asked.model} must be a checkpoint in {weights}; {setup.engine.name} does not make one while loading")
    servers = -(-mesh.ranks // (setup.accelerator.node_accelerators or 8))
    if servers > 1:
        found.append(f"an instance spans {servers} servers; start it there as {setup.engine.name} documents for several nodes")
    if asked.role and engine in ("vllm", "sglang"):
        found.append(f"a router of {setup.engine.name} joins prefilling and decoding instances")
    if engine == "llamacpp":
        found.append("the model must be a GGUF file; a quantised cache needs flash attention")
    return tuple(found)


def launches(
    plan: Plan, model: str, longest: int, stored: tuple[str, str], draft: str | None = None, kept: bool = False
) -> list[Launch]:  # fmt: skip
    """The commands of a deployment under its own engine, each parsed by the engine's documented options.

    Args:
        model: what the engine loads. longest: tokens of the longest request. stored: formats of the checkpoint's weights
            and cache. draft: what drafts ("mtp" for the model's own layer). kept: whether prefixes are kept; SGLang does so
            unless told not to.

    Raises InputError for a cache format that the engine does not offer, or drafting that it has no option for.
    """
    engine = plan.setup.engine.id
    server = load_server(engine)
    parts = [(plan.prefill, PREFILL), (plan, DECODE)] if plan.prefill else [(plan, "")]
    if engine == "llamacpp" and plan.prefill:
        raise InputError("emit: llama.cpp has no disaggregated serving")
    if engine == "llamacpp" and draft == "mtp":
        raise InputError("emit: llama.cpp drafts with a model of its own; give --draft a model")
    found = []
    for part, role in parts:
        assert part is not None
        weights, kv = part.setup.variant.weights, part.setup.variant.kv
        cpp = engine == "llamacpp"
        length = longest if cpp else -(-longest // WHOLE) * WHOLE
        made = weights if weights != stored[0] and weights in ONLINE[engine] else None
        fraction = None if cpp else part.setup.fraction(part.budget, part.batch)
        asked = _Asked(model, part, role, draft, made, kv if kv != stored[1] else None, length, fraction, kept)
        words, files = WRITERS[engine](asked)
        named = [server.model, model] if server.model else [model]
        command = (*server.program, *named, *words)
        server.check(command)
        found.append(Launch(command, part.instances, role, files, _notes(engine, asked, stored[0])))
    return [*found, *(_router(engine, found[0].instances, found[1].instances) if plan.prefill else [])]


def script(found: list[Launch]) -> str:
    """The commands as a shell script: files first, then each command with how often it runs; what they share is said once."""
    lines: list[str] = []
    told: set[str] = set()
    for launch in found:
        lines += [f"# {note}" for note in launch.notes if note not in told]
        told |= set(launch.notes)
        for name, text in launch.files.items():
            lines += [f"cat > {name} <<'EOF'", text.rstrip("\n"), "EOF"]
        times = f" x {launch.instances} behind a load balancer" if launch.instances > 1 else ""
        lines += [f"# {launch.role or 'instance'}{times}", launch.command]
    return "\n".join(lines)


def launch_records(found: list[Launch]) -> list[dict[str, Any]]:
    """The commands as data."""
    return [
        {
            "role": one.role or "instance", "instances": one.instances, "command": one.command, "argv": list(one.words),
            "files": one.files, "notes": list(one.notes),
        }
        for one in found
    ]  # fmt: skip

"""Diffusion language models: a block of masked tokens is denoised in several bidirectional steps.

A denoising step is the same function of (B, T, S) as any other: T is what is recomputed, S what is read from a cache.
Full-sequence denoising (LLaDA, arXiv 2502.09992) recomputes prompt and answer in every step; Fast-dLLM (arXiv
2505.22618) keeps a cache of the prefix, or of prefix and suffix ("dual"), refreshed once per block; block diffusion
(arXiv 2503.09573, LLaDA 2.0) denoises one block after another behind an exact cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from roofline.cost import Cost
from roofline.edits import apply, bidirectional
from roofline.errors import InputError, UnsupportedModel
from roofline.inference import Deployment, frame
from roofline.memory import Memory, plain, usable
from roofline.model import Model
from roofline.numeric import ceil_div, maximum, ratio
from roofline.timing import Timing, time
from roofline.work import Work

if TYPE_CHECKING:
    import pandas

CACHES = ("none", "prefix", "dual", "block")


@dataclass(frozen=True)
class Denoising:
    """How an answer is denoised.

    Attributes:
        output_tokens: tokens of the answer.
        block: tokens that are denoised together; at most ``output_tokens``.
        steps: denoising steps per block.
        cache: "none", "prefix", "dual" or "block".
        guidance: classifier-free guidance: every step runs a second, unconditional sequence.

    Raises InputError naming what is out of range.
    """

    output_tokens: int
    block: int
    steps: int
    cache: str = "none"
    guidance: bool = False

    def __post_init__(self) -> None:
        for name in ("output_tokens", "block", "steps"):
            if getattr(self, name) < 1:
                raise InputError(f"{name.replace('_', ' ')}: {getattr(self, name)} is out of range; give 1 or more")
        if self.block > self.output_tokens:
            raise InputError(f"block: {self.block} is longer than the {self.output_tokens} output tokens")
        if self.steps > self.block:
            raise InputError(f"steps: {self.steps} steps for a block of {self.block}: each step must finish a token")
        if self.cache not in CACHES:
            raise InputError(f"cache: {self.cache!r} is not one of {', '.join(CACHES)}")

    @property
    def tokens_per_step(self) -> Any:
        """Tokens that a step finishes on average; a last block that is shorter takes as many steps."""
        return ratio(self.output_tokens, self.steps * ceil_div(self.output_tokens, self.block))

    def sequences(self, batch: int) -> int:
        """Sequences that a step runs for ``batch`` requests."""
        return 2 * batch if self.guidance else batch

    def work(self, batch: int, prompt: int) -> Iterator[tuple[int, Work]]:
        """(number of steps, their work) of a whole generation; the prompt of a cached one is prefilled first."""
        return self.work_in(self.steps, batch, prompt)

    def work_in(self, steps: int, batch: int, prompt: int) -> Iterator[tuple[int, Work]]:
        """As ``work``, with another number of steps per block."""
        sequences = self.sequences(batch)
        whole = prompt + self.output_tokens
        if self.cache == "block":
            yield 1, Work(sequences, prompt, 0)
        for index in range(ceil_div(self.output_tokens, self.block)):
            done = prompt + index * self.block
            length = min(self.block, whole - done)
            yield from self._block(steps, sequences, whole, done, length)

    def _block(self, steps: int, sequences: int, whole: int, done: int, length: int) -> Iterator[tuple[int, Work]]:
        full = Work(sequences, whole, 0, all_logits=True)
        if self.cache == "none":
            yield steps, full
            return
        if self.cache == "block":
            yield steps, Work(sequences, length, done, all_logits=True)
            return
        yield 1, full
        if steps > 1:
            fresh = length if self.cache == "dual" else whole - done
            yield steps - 1, Work(sequences, fresh, whole - fresh, all_logits=True)


@dataclass(frozen=True)
class Denoised:
    """A generation by denoising, beside the autoregressive one of the same model.

    Attributes:
        steps: denoising steps in all. cost: FLOPs and bytes of the whole generation.
        memory: what must fit; without a cache no state is kept.
        e2e_bound_s, e2e_serial_s: prompt to last token, under perfect overlap in each step and without any [s].
        autoregressive_e2e_bound_s: the same for decoding token by token with a cache.
        break_even_tokens_per_step: tokens that a step of this plan must finish on average to be as fast as decoding, at
            the bound; None where prefill and refreshes of the cache alone take longer than decoding.
    """

    model: str
    gpu: str
    batch: int
    prompt_tokens: int
    plan: Denoising
    steps: int
    cost: Cost = field(repr=False)
    memory: Memory
    e2e_bound_s: float
    e2e_serial_s: float
    autoregressive_e2e_bound_s: float
    break_even_tokens_per_step: float | None

    @property
    def output_tok_per_s(self) -> float:
        """Output tokens of the batch over the end-to-end time at the bound."""
        return self.batch * self.plan.output_tokens / self.e2e_bound_s

    @property
    def speedup(self) -> float:
        """End-to-end time of autoregressive decoding over that of denoising, both at the bound."""
        return self.autoregressive_e2e_bound_s / self.e2e_bound_s

    def to_dict(self) -> dict[str, Any]:
        """All figures under keys that carry their unit."""
        return {
            "model": self.model,
            "gpu": self.gpu,
            "batch": self.batch,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.plan.output_tokens,
            "block_tokens": self.plan.block,
            "steps_per_block": self.plan.steps,
            "tokens_per_step": plain(self.plan.tokens_per_step),
            "cache": self.plan.cache,
            "guidance": self.plan.guidance,
            "steps": self.steps,
            "matrix_flop": plain(self.cost.matrix_flops),
            "moved_bytes": plain(self.cost.bytes),
            "weight_bytes": plain(self.memory.weight_bytes),
            "kv_bytes": plain(self.memory.kv_bytes),
            "required_bytes": plain(self.memory.required_bytes),
            "capacity_bytes": plain(self.memory.capacity_bytes),
            "fits": self.memory.fits,
            "e2e_bound_s": self.e2e_bound_s,
            "e2e_serial_s": self.e2e_serial_s,
            "output_tok_per_s_bound": self.output_tok_per_s,
            "autoregressive_e2e_bound_s": self.autoregressive_e2e_bound_s,
            "speedup_over_autoregressive": self.speedup,
            "break_even_tokens_per_step": self.break_even_tokens_per_step,
            "provenance": "datasheet",
        }

    def to_frame(self) -> pandas.DataFrame:
        """As ``to_dict``, one row."""
        return frame([self.to_dict()])


def bidirectional_model(model: Model) -> Model:
    """The model as a denoiser runs it: no causal mask inside a step.

    Raises InputError where its attention cannot be bidirectional, UnsupportedModel for an encoder-decoder.
    """
    if model.encoder is not None:
        raise UnsupportedModel(f"{model.name}: denoising behind an encoder is not supported")
    return apply(model, [bidirectional()])


def break_even_tokens_per_step(deployment: Deployment, batch: Any, context: Any, block: int) -> Any:
    """Tokens that a step over a block must finish to be as fast as decoding one token at a time, both at the bound.

    ``time(B, T = block, S) / time(B, T = 1, S)``: about 1 while weights and cache dominate (any step that finishes two
    tokens wins), about ``block`` once the matmuls are compute-bound. Reads as a formula for symbols in one regime.
    """
    denoiser = bidirectional_model(deployment.model)
    step = time(denoiser.cost(Work(batch, block, context, all_logits=True)), deployment.accelerator)
    token = time(deployment.model.cost(Work(batch, 1, context)), deployment.accelerator)
    return step.bound / token.bound


def denoise(deployment: Deployment, batch: int, prompt: int, plan: Denoising) -> Denoised:
    """A whole generation by denoising on one device."""
    model = bidirectional_model(deployment.model)
    seen: dict[Work, tuple[Cost, Any, Timing]] = {}

    def one(work: Work) -> tuple[Cost, Any, Timing]:
        if work not in seen:
            cost, workspace = model.step(work)
            seen[work] = cost, workspace, time(cost, deployment.accelerator)
        return seen[work]

    def bound(steps: int) -> float:
        return float(sum(number * one(work)[2].bound for number, work in plan.work_in(steps, batch, prompt)))

    works = list(plan.work(batch, prompt))
    kept = 0 if plan.cache == "none" else plan.sequences(batch) * model.state_bytes(prompt + plan.output_tokens)
    workspace: Any = 0
    for _, work in works:
        workspace = maximum(workspace, one(work)[1])
    decoding = deployment.generate(batch, prompt, plan.output_tokens).e2e_bound_s
    return Denoised(
        deployment.model.name, deployment.accelerator.id, batch, prompt, plan,
        steps=sum(number for number, work in works if work.all_logits),
        cost=Cost.total((number, one(work)[0]) for number, work in works),
        memory=Memory(model.weight_bytes, kept, workspace, usable(deployment.accelerator, deployment.memory_fraction)),
        e2e_bound_s=bound(plan.steps),
        e2e_serial_s=sum(number * one(work)[2].serial for number, work in works),
        autoregressive_e2e_bound_s=decoding,
        break_even_tokens_per_step=_break_even(plan.block, bound(1), bound(2), decoding),
    )  # fmt: skip


def _break_even(block: int, one: float, two: float, decoding: float) -> float | None:
    """Tokens per step at which a plan takes as long as decoding, from its time with one and with two steps per block.

    The time is linear in the steps, so both give the line; what ``decoding`` affords of it is a number of steps.
    """
    affordable = 1 + (decoding - one) / (two - one)
    return block / affordable if affordable > 0 else None

"""What an engine lets run in its next step.

========================  ============================================================================================
``static``                a batch starts when the one before has ended to its last token (FasterTransformer)
``continuous``            sequences join and leave at every step; prompts run whole, beside decodes (Orca)
``chunked``               decodes first, prompts fill what is left of a token budget, in chunks (vLLM 1, Sarathi-Serve)
``prefill-first``         waiting prompts run before any decode, which stalls meanwhile (vLLM 0, SGLang, TensorRT-LLM
                          without chunked context)
``priority``              as chunked; smaller priorities first, and they push larger ones out
========================  ============================================================================================
"""

from __future__ import annotations

from dataclasses import dataclass

from roofline.errors import InputError, suggest
from roofline.serving.expectation import Estimate

SCHEDULERS = ("chunked", "continuous", "prefill-first", "priority", "static")
PREEMPTIONS = ("recompute", "swap")
OF_ENGINE = {"vllm": "chunked", "sglang": "prefill-first", "trtllm": "prefill-first", "llamacpp": "chunked"}
"""Engine -> the scheduler that its defaults come closest to."""
RESERVES = {"trtllm": "oracle"}
"""Engine -> how it gives out its cache, where not by blocks as tokens come. TensorRT-LLM's default capacity policy,
GUARANTEED_NO_EVICT, admits a request only if its prompt and all tokens that it may generate fit beside the others, and never
interrupts one (TensorRT-LLM documentation, useful runtime options)."""

ESTIMATES = {"sglang": Estimate()}
"""Engine -> what it keeps free for requests that run, where it admits others by an expectation of their outputs."""


@dataclass(frozen=True)
class Policy:
    """How a replica schedules.

    Attributes:
        scheduler: one of ``SCHEDULERS``. sequences: the most that run at once. batched_tokens: token budget of a step.
        preemption: what happens to a request that must make room: "recompute" or "swap".
        overhead_s: seconds of the host per step that nothing hides.
        estimate: how admission expects outputs; None admits whoever's prompt fits.

    Raises InputError for a name that is unknown or a size out of range.
    """

    scheduler: str = "chunked"
    sequences: int = 256
    batched_tokens: int = 8192
    preemption: str = "recompute"
    overhead_s: float = 0.0
    estimate: Estimate | None = None

    def __post_init__(self) -> None:
        for value, known, field in (
            (self.scheduler, SCHEDULERS, "scheduler"), (self.preemption, PREEMPTIONS, "preemption"),
        ):  # fmt: skip
            if value not in known:
                raise InputError(f"{field}: unknown {value!r}.{suggest(value, known)} Known: {', '.join(known)}")
        if not 1 <= self.sequences <= 2**20:
            raise InputError(f"max-num-seqs: {self.sequences} is out of range; give 1 to {2**20:,}")
        if self.chunks and self.batched_tokens < self.sequences:
            raise InputError(
                f"max-num-batched-tokens: {self.batched_tokens:,} is less than max-num-seqs {self.sequences:,}, so not every "
                "sequence could decode; raise it, or lower --max-num-seqs"
            )
        if self.batched_tokens < 1:
            raise InputError(f"max-num-batched-tokens: {self.batched_tokens} is out of range; give 1 or more")
        if not 0 <= self.overhead_s < 60:
            raise InputError(f"overhead: {self.overhead_s!r} is out of range; give seconds from 0 to 60")

    @property
    def chunks(self) -> bool:
        """Whether prompts are cut to what is left of the budget."""
        return self.scheduler in ("chunked", "priority")

    @property
    def stalls(self) -> bool:
        """Whether decodes wait while prompts run."""
        return self.scheduler in ("prefill-first", "static")

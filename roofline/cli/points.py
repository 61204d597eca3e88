"""The points of a what-if: every variant of the model on every GPU at every size, and what is known about each."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Any

from roofline.accelerator import Accelerator
from roofline.cli.edit_options import Chosen
from roofline.cli.prompts import Prompt, prompt_step
from roofline.errors import InputError
from roofline.formats import BF16, Format
from roofline.inference import Deployment, Generation, Step
from roofline.memory import Memory, plain
from roofline.model import Model

if TYPE_CHECKING:
    from roofline.cli.expected_times import Expected
    from roofline.parallel.mesh import Mesh

MOST_POINTS = 100_000
SCHEMA = 1
BASE, EDITED = "base", "edited"


@dataclass(frozen=True)
class Variant:
    """A model as it is, or after edits.

    Attributes:
        flags: the edits as the command line spells them, empty for the model as it is.
        model: the edited model.
        cached: False for the naive generation that keeps no cache.
    """

    flags: tuple[str, ...]
    model: Model
    cached: bool = True

    @property
    def kind(self) -> str:
        """ "base" or "edited"."""
        return EDITED if self.flags else BASE

    @property
    def label(self) -> str:
        """The edits, or "base"."""
        return " ".join(self.flags) or BASE


def variants(model: Model, chosen: Chosen, *, cached: bool = True) -> list[Variant]:
    """The model as it is, then each combination of edits; without a cache as an edit of its own."""
    edited = []
    if chosen.values:
        from roofline.edits import apply

        edited = [Variant(tuple(edit.flag for edit in edits), apply(model, edits)) for edits in chosen.combinations()]
    if not cached:
        edited = [Variant((*v.flags, "--no-cache"), v.model, False) for v in (edited or [Variant((), model)])]
    return [Variant((), model), *edited]


def judged(compared: Sequence[Variant], chosen: Chosen) -> list[Variant]:
    """The variants that --check judges: the edited ones; the model as it is where it was asked for, or nothing was edited."""
    edited = list(compared[1:])
    return edited if edited and len(edited) >= chosen.count else list(compared)


def main_format(model: Model) -> Format:
    """The format that most parameters are stored in."""
    params = model.params_by_format
    return max(params, key=params.__getitem__) if params else BF16


def state_formats(model: Model) -> list[str]:
    """Names of the formats of cached state."""
    return sorted({piece.format.name for _, pieces in model.state for piece in pieces})


def kv_bytes_per_token(model: Model) -> Any:
    """Bytes of state, as stored, that one more token adds below any window."""
    return sum(
        Fraction(number * piece.elements, piece.every) * piece.format.bytes_per_element
        for number, pieces in model.state
        for piece in pieces
        if piece.grows_with == "token"
    )


def source_length(model: Model, given: int | None) -> int:
    """Length of the encoder's output: as given, or as the config fixes it. Raises InputError when nothing says it."""
    if model.encoder is None:
        if given is not None:
            raise InputError(f"source-len: {model.name} has no encoder")
        return 0
    length = model.encoder.tokens if given is None else given
    if length is None:
        raise InputError(f"source-len: {model.name} has an encoder; say how many tokens it encodes: --source-len 512")
    return length


@dataclass(frozen=True)
class Point:
    """One point.

    Attributes:
        variant, accelerator, fraction: what runs, where, on which share of the memory.
        step: the decode step, or, without a cache, the pass over the whole sequence that gives one token.
        first: the prefill, where an input length was given. generation: where an output length was given too.
        last: memory of the generation's last step, where both were given.
        input_tokens, output_tokens: as given.
        mesh: how the model is split over several GPUs, None for one. ranks: the model as they hold it.
        expected: the calibrated time of the step, where it was looked for.
    """

    variant: Variant
    accelerator: Accelerator
    fraction: Fraction
    step: Step
    first: Prompt | None = None
    generation: Generation | None = None
    last: Memory | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    mesh: Mesh | None = None
    ranks: Any = None
    expected: Expected | None = None

    @property
    def context(self) -> int:
        """Tokens behind the step."""
        return int(self.step.context_tokens if self.variant.cached else self.step.new_tokens - 1)

    @property
    def longest(self) -> int:
        """The longest context that was asked for."""
        return max(self.context, (self.input_tokens or 0) + (self.output_tokens or 0))

    @property
    def phases(self) -> list[tuple[str, Memory]]:
        """(what runs, its memory) of everything that was asked for at this point."""
        found = [(f"context {self.context:,}", self.step.memory)]
        if self.first is not None:
            found.append((self.first.name, self.first.memory))
        if self.last is not None:
            found.append((f"the last of {(self.input_tokens or 0) + (self.output_tokens or 0):,} tokens", self.last))
        return found

    @property
    def tightest(self) -> tuple[str, Memory]:
        """The phase that needs most memory."""
        return min(self.phases, key=lambda phase: phase[1].spare_bytes)

    @property
    def fits(self) -> bool:
        """Whether every phase that was asked for fits."""
        return all(bool(memory.fits) for _, memory in self.phases)

    def record(self, assumes: Sequence[str], left: Sequence[str] = ()) -> dict[str, Any]:
        """All figures under keys that carry their unit; nothing rounded, None where a figure was not asked for.

        ``left`` is what the figures leave out.
        """
        step, memory, first, whole = self.step, self.step.memory, self.first, self.generation
        return {
            "schema": SCHEMA,
            "model": step.model,
            "variant": self.variant.kind,
            "edits": list(self.variant.flags),
            "gpu": step.gpu,
            "gpus": self.mesh.ranks if self.mesh else 1,
            "mesh": self.mesh.flags if self.mesh else "",
            "convention": step.convention,
            "batch": step.batch,
            "context_tokens": self.context,
            "dtype": main_format(self.variant.model).name,
            "kv_dtype": "+".join(state_formats(self.variant.model)) or None,
            "weight_bytes": plain(memory.weight_bytes),
            "kv_bytes": plain(memory.kv_bytes),
            "total_bytes": plain(memory.total_bytes),
            "new_kv_bytes": plain(memory.new_kv_bytes),
            "workspace_bytes": plain(memory.workspace_bytes),
            "required_bytes": plain(memory.required_bytes),
            "capacity_bytes": plain(memory.capacity_bytes),
            "memory_fraction": float(self.fraction),
            "prefill_required_bytes": plain(first.memory.required_bytes) if first else None,
            "prefill_fits": bool(first.memory.fits) if first else None,
            "generation_required_bytes": plain(max(m.required_bytes for _, m in self.phases[1:])) if self.last else None,
            "fits": self.fits,
            "tpot_bound_s": step.bound_s,
            "tpot_serial_s": step.serial_s,
            **(self.expected.record() if self.expected else {"tpot_expected_s": None}),
            "output_tok_per_s_bound": step.output_tok_per_s,
            "output_tok_per_s_per_user_bound": step.output_tok_per_s_per_user,
            "bound_by": step.bound_by,
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "prefill_chunk_tokens": first.chunk if first else None,
            "ttft_bound_s": first.bound_s if first else None,
            "ttft_serial_s": first.serial_s if first else None,
            "e2e_bound_s": whole.e2e_bound_s if whole else None,
            "e2e_serial_s": whole.e2e_serial_s if whole else None,
            "generation_tpot_bound_s": whole.tpot_bound_s if whole else None,
            "generation_output_tok_per_s_bound": whole.output_tok_per_s if whole else None,
            "generation_total_tok_per_s_bound": whole.total_tok_per_s if whole else None,
            "provenance": "datasheet",
            "assumes": list(assumes),
            "not_modelled": list(left),
        }


@dataclass(frozen=True)
class Question:
    """Sizes, GPUs and conventions of a what-if; ``points`` answers for any variants.

    Attributes:
        batches, contexts, inputs, outputs, fractions: values of each; a context of None follows input and output.
        meshes: how the model is split over GPUs; None for one.
        chunk: tokens of a prompt that one prefill step takes, None for all.
    """

    accelerators: Sequence[Accelerator]
    batches: Sequence[int]
    contexts: Sequence[int | None]
    inputs: Sequence[int | None] = (None,)
    outputs: Sequence[int | None] = (None,)
    fractions: Sequence[Fraction] = (Fraction(1),)
    convention: str = "exact"
    source: int | None = None
    meshes: Sequence[Mesh | None] = (None,)
    chunk: int | None = None
    deployments: dict[Any, Deployment] = field(default_factory=dict, compare=False, repr=False)

    def check_size(self, variant_count: int) -> int:
        """The points of so many variants. Raises InputError when the cross product is larger than anybody reads."""
        count = variant_count
        for values in self._axes:
            count *= len(values)
        if count > MOST_POINTS:
            raise InputError(
                f"sweep: {count:,} points are more than {MOST_POINTS:,}; take larger steps, or, in Python, "
                "from roofline.sweep import decode_sweep"
            )
        return count

    @cached_property
    def _axes(self) -> tuple[Sequence[Any], ...]:
        return (self.accelerators, self.meshes, self.fractions, self.inputs, self.outputs, self.contexts, self.batches)

    def deployment(self, variant: Variant, accelerator: Accelerator, fraction: Fraction, mesh: Mesh | None = None) -> Deployment:
        """The variant on the accelerator, or on a mesh of them."""
        key = (variant.flags, accelerator.id, fraction, mesh)
        if key not in self.deployments:
            if mesh is None:
                self.deployments[key] = Deployment(variant.model, accelerator, self.convention, fraction)
            else:
                from roofline.sharded import ShardedDeployment

                self.deployments[key] = ShardedDeployment(variant.model, accelerator, self.convention, fraction, mesh)
        return self.deployments[key]

    def points(self, variant: Variant) -> Iterator[Point]:
        """All points of one variant, the batch running fastest."""
        for accelerator, mesh, fraction, prompt, output, context, batch in itertools.product(*self._axes):
            deployment = self.deployment(variant, accelerator, fraction, mesh)
            yield self.point(variant, deployment, batch, context, prompt, output)

    def point(
        self, variant: Variant, deployment: Deployment, batch: int, context: int | None, prompt: int | None, output: int | None
    ) -> Point:
        """One point; a context of None is the longest that input and output lead to."""
        if output is not None and variant.model.encoder is not None:
            raise InputError("osl: whole generations of encoder-decoders are not modelled; leave out --osl")
        whole = None
        if prompt is not None and output is not None:
            whole = deployment.generate(batch, prompt, output, cached=variant.cached)
        found = self.sized(variant, deployment, batch, context, prompt, output)
        if whole is not None and found.first is not None:
            whole = replace(whole, ttft_bound_s=found.first.bound_s, ttft_serial_s=found.first.serial_s)
        return replace(found, generation=whole)

    def sized(
        self, variant: Variant, deployment: Deployment, batch: int, context: int | None, prompt: int | None, output: int | None
    ) -> Point:
        """The point without the times of a generation, which no question about memory needs."""
        longest = (prompt or 0) + (output or 0)
        length = longest if context is None else context
        source = source_length(variant.model, self.source)
        cached = variant.cached

        def one(tokens: int) -> Step:
            if cached:
                return deployment.decode(batch, tokens, source=source)
            step = deployment.prefill(batch, tokens + 1, source=source)
            return replace(step, memory=replace(step.memory, kv_bytes=0))

        step, first, last = one(length), None, None
        if prompt is not None:
            first = prompt_step(deployment, batch, prompt, self.chunk, source, keep=cached)
        if prompt is not None and output is not None:
            last = step.memory if length == longest else one(longest).memory
        return Point(
            variant, deployment.accelerator, deployment.memory_fraction, step, first, None, last, prompt, output,
            getattr(deployment, "mesh", None), getattr(deployment, "ranks", None),
        )  # fmt: skip

"""How long one iteration of an engine takes: the contract between time models and everything that serves requests.

An iteration mixes prompts and decoding sequences. Its shape is a handful of sums; ``StepTimes`` turns it into seconds.
``BoundSteps`` is the datasheet's lower bound, ``step_times`` the best that is known of a deployment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from roofline.errors import InputError, UnsupportedModel
from roofline.inference import Deployment
from roofline.serving.sums import Stage, stage_of

if TYPE_CHECKING:
    import numpy

    from roofline.engines.profile import Profile
    from roofline.model import Model


@dataclass(frozen=True)
class StepShape:
    """One iteration of an engine, over one data-parallel replica of the deployment.

    Attributes:
        prefill_tokens: new prompt tokens computed in this step, all chunks.
        prefill_pairs: query-key pairs of their causal attention: the sum over chunks of ``T S + T (T + 1) / 2``.
        prefills: chunks.
        decodes: sequences that decode.
        decode_context: sum of their cached tokens.
        drafted: draft tokens that each of them verifies beside its own new token.
    """

    prefill_tokens: int = 0
    prefill_pairs: int = 0
    prefills: int = 0
    decodes: int = 0
    decode_context: int = 0
    drafted: int = 0


class StepTimes(Protocol):
    """Seconds of iterations.

    Attributes:
        provenance: "datasheet" for a bound, "calibrated" for fitted times.
        notes: what the times rest on, and where they leave the range of what was fitted.
    """

    @property
    def provenance(self) -> str: ...

    @property
    def notes(self) -> tuple[str, ...]: ...

    def seconds(self, shape: StepShape) -> float:
        """Seconds of one step."""
        ...

    def decode_run(self, decodes: int, context: int, steps: int) -> numpy.ndarray[Any, Any]:
        """Seconds of ``steps`` successive decode-only steps; the context grows by ``decodes`` with each."""
        ...


class BoundSteps:
    """The datasheet's bound of a deployment's steps: the longest stream of the whole step's work.

    Kernels whose work is a sum over tokens, cached tokens and pairs are counted exactly for any mixture. Those that bend
    with a sequence's length (windows, compressed or selected caches) are counted from below: the lower convex hull of
    their work over the contexts from ``shortest`` to ``longest`` at the mean context. It is exact where all sequences are
    on one side of a window.

    Args:
        deployment: on one device or a mesh; a step is one of its data-parallel replicas.
        shortest, longest: contexts that occur; None for the longest that the config admits.

    Raises InputError for the lecture's convention, which has no prefill; UnsupportedModel for an encoder-decoder.
    """

    provenance = "datasheet"

    def __init__(self, deployment: Deployment, *, shortest: int = 0, longest: int | None = None) -> None:
        if deployment.convention != "exact":
            raise InputError("convention: steps of an engine are counted exactly; use --convention exact")
        if deployment.model.encoder is not None:
            raise UnsupportedModel(f"{deployment.model.name}: serving of encoder-decoders is not modelled")
        admitted = longest or deployment.model.max_context or 2**17
        ranks = getattr(deployment, "ranks", None)
        stages = (deployment.model,) if ranks is None else ranks.stages
        reach = (min(shortest, admitted), admitted)
        self.deployment = deployment
        self.notes: tuple[str, ...] = ("step times are the datasheet's bound: no launch, host or scheduling time",)
        self._stages: list[Stage] = [stage_of(model, deployment.accelerator, reach) for model in stages]
        mesh = getattr(deployment, "mesh", None)
        self._turns: int = 1 if mesh is None else mesh.microbatches or mesh.pp

    def seconds(self, shape: StepShape) -> float:
        if len(self._stages) == 1:
            return self._stages[0].seconds(shape)
        turns = max(1, min(shape.decodes + shape.prefills, self._turns))
        part = shape if turns == 1 else _part(shape, turns)
        each = [stage.seconds(part) for stage in self._stages]
        return max(sum(each), turns * max(each))

    def decode_run(self, decodes: int, context: int, steps: int) -> numpy.ndarray[Any, Any]:
        import numpy

        contexts = context + decodes * numpy.arange(steps, dtype=numpy.float64)
        if len(self._stages) == 1:
            whole: numpy.ndarray[Any, Any] = self._stages[0].decode_seconds(decodes, contexts)
            return whole
        turns = min(decodes, self._turns)
        each = [stage.decode_seconds(-(-decodes // turns), numpy.floor(contexts / turns)) for stage in self._stages]
        longest: numpy.ndarray[Any, Any] = numpy.maximum(sum(each), turns * numpy.max(each, axis=0))
        return longest


def _part(shape: StepShape, turns: int) -> StepShape:
    """The microbatch with most sequences when a step is cut into ``turns``; sums that need no whole number are means."""

    def up(value: int) -> int:
        return -(-value // turns)

    return StepShape(
        up(shape.prefill_tokens), up(shape.prefill_pairs), up(shape.prefills), up(shape.decodes),
        shape.decode_context // turns, shape.drafted,
    )  # fmt: skip


def check_served(model: Model, length: int | None = None) -> None:
    """Raises InputError for a model that engines do not serve token by token, or a request that is longer than it admits."""
    if model.encoder is not None:
        raise InputError(f"model: {model.name} is an encoder-decoder; serving of encoder-decoders is not modelled")
    if model.denoiser:
        raise InputError(
            f"model: {model.name} is a diffusion model, which does not write token by token; see roofline diffusion {model.name}"
        )
    longest = model.max_context
    if length is not None and longest is not None and length > longest:
        raise InputError(f"isl: a request of {length:,} tokens exceeds the {longest:,} that {model.name} admits")


def step_times(
    deployment: Deployment, engine: Profile | None = None, *, shortest: int = 0, longest: int | None = None
) -> StepTimes:
    """The best step times that are known of a deployment under an engine: calibrated where constants exist, else the bound.

    ``notes`` of the result says which, and why.
    """
    reason = "" if engine is not None else "no engine was named"
    if engine is not None:
        from roofline.serving.calibrated import ExpectedSteps

        try:
            return ExpectedSteps(deployment, engine.id, engine.asked)
        except UnsupportedModel as error:
            reason = str(error)
    bound = BoundSteps(deployment, shortest=shortest, longest=longest)
    bound.notes = (*bound.notes, f"not calibrated: {reason}")
    return bound

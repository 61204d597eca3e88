"""Expected times of an engine's iterations: calibrated kernels, and the constants fitted to whole servers.

``ExpectedSteps`` answers what ``BoundSteps`` answers. What depends on a number of rows alone (matrix multiplications,
experts, collectives, passes) is remembered by that number; attention is evaluated for each step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from roofline.expected.arithmetic import maximum
from roofline.expected.errors import Error, bands, error_at, error_of
from roofline.expected.kernels import DEFAULT_BASE, borrowed, kernels_of, storage
from roofline.expected.load import Load
from roofline.expected.operators import LOAD, ROWS, Operator, operators
from roofline.expected.plain import plain_operators
from roofline.expected.serving import (
    Busy,
    Serving,
    batches,
    measured_versions,
    outside,
    outside_prompts,
    plain_of,
    serving_of,
    span,
    step_seconds,
    untested,
)  # fmt: skip
from roofline.inference import Deployment
from roofline.model import Model

if TYPE_CHECKING:
    import numpy

    from roofline.serving.steps import StepShape

FEW = 64
"""Numbers of rows that are evaluated one by one; from then on a block of them at once."""
BLOCK = 512
ENOUGH = 8
"""Numbers of rows for which an array is worth its while."""
SMALL = 0.01
"""Share of the parameters below which a format does not count."""
KEEP = 1 << 20
"""Numbers of rows beyond which nothing is remembered."""


class ByRows:
    """Seconds of all operators that look at one number of rows, by that number."""

    def __init__(self, over: str, found: list[Operator]) -> None:
        self._operators, self._prompts = found, over == "prompts"
        self._known: dict[float, tuple[float, float]] = {}

    def _load(self, rows: Any) -> Load:
        """A step of that many rows: whichever number of rows an operator looks at, it is this one."""
        nothing = 0.0 * rows
        return Load(nothing, nothing, 1.0 + nothing, rows) if self._prompts else Load(rows, nothing)

    def _sums(self, rows: Any) -> tuple[Any, Any]:
        load, kernels, dispatch = self._load(rows), 0.0, 0.0
        for operator in self._operators:
            seconds = operator.count * operator.seconds(load)
            if operator.kind == "dispatch":
                dispatch = dispatch + seconds
            else:
                kernels = kernels + seconds
        return kernels, dispatch

    def at(self, rows: float) -> tuple[float, float]:
        """(seconds, seconds of expert launches) of that many rows."""
        if not self._operators or rows <= 0:
            return 0.0, 0.0
        if rows not in self._known:
            if len(self._known) < FEW or rows != int(rows) or rows >= KEEP:
                self._known[rows] = self._sums(float(rows))
            else:
                self._fill(int(rows) // BLOCK * BLOCK)
        return self._known[rows]

    def prepare(self, rows: set[float]) -> None:
        """Works out many numbers of rows at once."""
        missing = sorted(number for number in rows if 0 < number < KEEP and number not in self._known)
        if self._operators and len(missing) >= ENOUGH:
            self._learn(missing)

    def _fill(self, start: int) -> None:
        self._learn(range(max(start, 1), start + BLOCK))

    def _learn(self, rows: Sequence[float]) -> None:
        import numpy

        numbers = numpy.array(rows, dtype=numpy.float64)
        kernels, dispatch = self._sums(numbers)
        kernels = numpy.broadcast_to(kernels, numbers.shape)
        pairs = zip(numbers.tolist(), kernels.tolist(), numpy.broadcast_to(dispatch, numbers.shape).tolist(), strict=True)
        for number, *sums in pairs:
            self._known.setdefault(number, (sums[0], sums[1]))


class Stage:
    """The kernels of one pipeline stage's rank."""

    def __init__(self, model: Model, found: list[Operator]) -> None:
        self._rows: Mapping[str, ByRows] = {over: ByRows(over, [o for o in found if o.over == over]) for over in ROWS}
        self._other = [operator for operator in found if operator.over == LOAD]
        self.launches = float(sum(operator.count * operator.launches for operator in found))
        self.layers = float(len(model.layers))

    def prepare(self, loads: Sequence[Load]) -> None:
        """Works out at once what the steps need that depends on a number of rows alone."""
        for over, known in self._rows.items():
            known.prepare({float(ROWS[over](load)) for load in loads})

    def busy(self, load: Load) -> Busy:
        """Kernels of a step; ``load.context`` may be an array, the rest is numbers."""
        kernels: Any = 0.0
        dispatch = 0.0
        for over, known in self._rows.items():
            sums = known.at(ROWS[over](load))
            kernels, dispatch = kernels + sums[0], dispatch + sums[1]
        for operator in self._other:
            kernels = kernels + operator.count * operator.seconds(load)
        return Busy(kernels, dispatch, self.launches, self.layers)


def _operators(deployment: Deployment, engine: str, stages: tuple[Model, ...]) -> list[list[Operator]]:
    """The kernels of each stage: calibrated ones, or achieved fractions for an engine that has none."""
    plain = plain_of(engine)
    if plain is not None:
        return [plain_operators(stage, deployment.accelerator, plain) for stage in stages]
    kernels = kernels_of(engine, deployment.accelerator, deployment.model.family)
    return [operators(stage, kernels) for stage in stages]


class ExpectedSteps:
    """Calibrated times of a deployment's iterations under an engine.

    Args:
        deployment: on one device or a mesh; a step is one of its data-parallel replicas.
        engine: id of an engine that constants were fitted to. version: that is asked about, "" for those measured.
        kernels: of each stage, None for the engine's own.

    Attributes:
        engine: its id.
        error: mean absolute error per token on models that the fit had not seen, or on the GPU where it has seen no run of it,
            as a fraction; None where unknown. ``error_at`` says that of a batch.
        notes: what the times rest on. outside: how the deployment leaves the calibrated range, nothing where it does not;
            batches and prompts that leave it are told by ``expected.serving.left_range``.

    Raises UnsupportedModel naming a component or kernel without constants, or an engine without them.
    """

    provenance = "calibrated"

    def __init__(
        self, deployment: Deployment, engine: str, version: str = "", kernels: Sequence[Sequence[Operator]] | None = None
    ) -> None:  # fmt: skip
        self.constants: Serving = serving_of(engine)
        self.engine = engine
        model, accelerator = deployment.model, deployment.accelerator
        ranks, mesh = getattr(deployment, "ranks", None), getattr(deployment, "mesh", None)
        stages = (model,) if ranks is None else ranks.stages
        kernels = _operators(deployment, engine, stages) if kernels is None else [list(found) for found in kernels]
        self._stages = [Stage(stage, found) for stage, found in zip(stages, kernels, strict=True)]
        self._turns = 1 if mesh is None else mesh.microbatches or mesh.pp
        experts = any(part.kind == "grouped_linear" for _, part in model.counted)
        stored = model.params_by_format
        formats = {storage(fmt) for fmt, elements in stored.items() if elements > SMALL * sum(stored.values())}
        number = 1 if mesh is None else mesh.ranks
        self._experts, self._gpu = experts, accelerator.id
        token = error_of(engine, experts, gpu=accelerator.id)
        self.error = None if token is None else token.mean
        said = (*outside(engine, accelerator.id, number, len(model.layers), formats), *untested(engine, version))
        if not accelerator.calibration and plain_of(engine) is None:
            said = (*said, f"{accelerator.id} has no kernels of its own: those of {DEFAULT_BASE} with the datasheet swapped")
        said = (*said, *borrowed(engine, (operator.family for found in kernels for operator in found)))
        if len(stages) > 1:
            said = (*said, f"pipeline stages are outside the calibrated range of {engine}")
        mean = "" if token is None else f"; {self._errors(token)}"
        far = "extrapolated from those " if said else ""
        rest = f"step times are {far}calibrated to {engine} servers{measured_versions(engine)}{mean}"
        self.notes: tuple[str, ...] = (rest, *said, *outside_prompts(engine))
        self.outside: tuple[str, ...] = tuple(said)

    @property
    def calibrated_range(self) -> bool:
        """Whether the deployment lies inside the range that the constants were fitted in."""
        return not self.outside

    def error_at(self, sequences: Collection[float]) -> Error | None:
        """The largest error per token of the bands that batches of one replica lie in; None where nothing is known."""
        return error_at(self.engine, self._experts, sequences, self._gpu)

    @property
    def errors(self) -> tuple[float, ...]:
        """Mean absolute errors per token, as fractions, by how many sequences run at once; that of all where no more is known."""
        known = bands(self.engine, self._experts)
        return tuple(band.mean for band in known) or (() if self.error is None else (self.error,))

    def _errors(self, token: Error) -> str:
        """What the errors per token and to the first token are, and of which runs."""
        first = error_of(self.engine, self._experts, "ttft", self._gpu)
        worst = max(bands(self.engine, self._experts), key=lambda band: band.mean, default=None)
        text = f"mean error {token.of}: {token.size} per token"
        if worst is not None and not token.gpus and round(100 * worst.mean) > round(100 * token.mean):
            text += f", most at {worst.at}, {worst.size}"
        if first is None:
            text += "; not known to the first token"
        else:
            where = "" if first.of == token.of else f" {first.of}"
            text += f"; {first.size} to the first token{where}"
        return text if token.gpus else f"{text}; inside the calibrated range ({span(batches(self.engine))} at once)"

    def request_seconds(self, running: float) -> float:
        """What passes between a request's arrival and its scheduling [s]."""
        return float(self.constants.request_seconds(running))

    def _load(self, shape: StepShape, turns: int = 1) -> Load:
        decodes, chunks = shape.decodes / turns, shape.prefills / turns
        chunk = shape.prefill_tokens / shape.prefills if shape.prefills else 0.0
        pairs = shape.prefill_pairs / shape.prefills if shape.prefills else 0.0
        behind = max(0.0, (pairs - chunk * (chunk + 1.0) / 2.0) / chunk) if chunk else 0.0
        context = shape.decode_context / shape.decodes if shape.decodes else 0.0
        return Load(decodes, context, chunks, chunk, behind, 1.0 + shape.drafted)

    def _turns_of(self, sequences: int) -> int:
        """Microbatches of a step."""
        return max(1, min(sequences, self._turns)) if len(self._stages) > 1 else 1

    def prepare(self, shapes: Iterable[StepShape]) -> None:
        """Works out at once what many steps share; their times come faster after it, and are the same."""
        loads = [self._load(shape, self._turns_of(shape.decodes + shape.prefills)) for shape in shapes]
        for stage in self._stages:
            stage.prepare(loads)

    def seconds(self, shape: StepShape) -> float:
        """Seconds of one step."""
        turns = self._turns_of(shape.decodes + shape.prefills)
        return float(self._over_stages(self._load(shape, turns), turns))

    def decode_seconds(self, decodes: int, context: float) -> float:
        """Seconds of one step that only decodes, with so many tokens cached behind each sequence."""
        turns = self._turns_of(decodes)
        return float(self._over_stages(Load(decodes / turns, float(context)), turns))

    def _over_stages(self, load: Load, turns: int) -> Any:
        """One way through all stages, or as many turns of the slowest as there are microbatches."""
        each = [step_seconds(stage.busy(load), load, self.constants) for stage in self._stages]
        if len(each) == 1:
            return each[0]
        slowest = each[0]
        for one in each[1:]:
            slowest = maximum(slowest, one)
        return maximum(sum(each), turns * slowest)

    def decode_run(self, decodes: int, context: int, steps: int) -> numpy.ndarray[Any, Any]:
        """Seconds of ``steps`` successive decode-only steps; the context grows by ``decodes`` with each."""
        import numpy

        contexts = context / decodes + numpy.arange(steps, dtype=numpy.float64)
        turns = self._turns_of(decodes)
        seconds = self._over_stages(Load(decodes / turns, contexts), turns)
        return numpy.broadcast_to(seconds, (steps,)).astype(numpy.float64)

"""What every kernel of this folder states about itself, in one shape; nothing heavy is imported here.

A kernel's file holds its reference in plain arithmetic, the Triton kernel, a host function that chooses tiles by shape and
device, and a ``SPEC``: the cases that prove it and what each launch is expected to ask of the machine. The expectation
starts from the component of the model (its Cost is the useful work) and adds what the launch repeats or pads, as formulas.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from roofline.cost import Cost


@dataclass(frozen=True)
class Case:
    """One point at which a kernel is proved, compiled or measured; kernels add their dimensions.

    Attributes:
        name: unique within a kernel. dtype: operand type, a name of ``types.TYPES``.
    """

    name: str
    dtype: str

    @property
    def precision(self) -> str:
        """The key of its tolerance: the narrowest type that rounds a result."""
        return self.dtype


@dataclass(frozen=True)
class Moved:
    """Bytes of one argument of a kernel.

    Attributes:
        stream: the stream of the component's Cost that it belongs to ("weights", "activations", "state"), or "" for what
            the launch adds: block tables, lengths, partial results.
        read, written: distinct bytes, each direction.
        requested: bytes that all programs together ask to read; None where each byte is read once.
    """

    stream: str
    read: int = 0
    written: int = 0
    requested: int | None = None

    @property
    def loads(self) -> int:
        """Bytes that programs request."""
        return self.read if self.requested is None else self.requested


@dataclass(frozen=True)
class Launch:
    """One Triton kernel of a host function: its programs, and bytes by parameter."""

    programs: int
    moved: Mapping[str, Moved]


@dataclass(frozen=True)
class Expected:
    """What a host function asks of the machine, integer for integer.

    Attributes:
        useful: the component's Cost: distinct bytes by stream, useful FLOPs.
        kernels: each Triton kernel that it launches, once; summed over a stream, the distinct bytes are ``useful``'s.
        dot: triton's name of the type that the matrix unit multiplies, "" where no dot runs.
        executed: FLOPs of its dots by the geometry of tiles alone: how many, how large.
        needed: those among them that the reference needs, counted from shapes and its own mask, never from the component:
            what the component's matrix FLOPs are held against. The rest are edges of tiles and masked pairs.
        added: dot FLOPs that the launch adds in other types, by triton's name (a small system solved in fp32).
        tf32: FLOPs of fp32 dots, in either, whose operands may be rounded to tf32.
    """

    useful: Cost
    kernels: Mapping[str, Launch]
    dot: str = ""
    executed: int = 0
    needed: Callable[[], int] = int
    added: Mapping[str, int] = field(default_factory=dict)
    tf32: int = 0

    @property
    def dots(self) -> dict[str, int]:
        """FLOPs that dots execute, by type."""
        found = Counter(self.added)
        if self.dot:
            found[self.dot] += self.executed
        return dict(+found)

    @property
    def flops(self) -> int:
        """FLOPs that dots execute."""
        return sum(self.dots.values())


@dataclass(frozen=True)
class Tolerance:
    """How far from the float64 reference an output may be.

    Attributes:
        rms: root mean square of the error over that of the reference. reason: what rounds.
        row: the same for each row alone (along the last axis), in multiples of ``rms``: a row of few elements scatters.
        element: the error of each element over the rms of its row, or over itself where it is larger, in multiples of
            ``rms``. Rounding to nearest errs by at most 1.7 times its own rms, and a sum of roundings rarely by more than
            four times.
    """

    rms: float
    reason: str
    row: float = 2.0
    element: float = 4.0


EVERYWHERE = ("sm_90", "sm_80", "sm_100", "gfx942")
"""Architectures for a build that is compiled for each."""


@dataclass(frozen=True)
class Build:
    """A production shape to compile for a GPU that need not be there.

    Attributes:
        case: the shape; the launch chooses its tiles as it would on that GPU.
        units: kernel name -> matrix instruction that its sm_90 code must contain ("HGMMA", "QGMMA", "IGMMA", "HMMA", ...).
        tma: names of kernels that must move tiles with TMA on sm_90.
        targets: architectures that it is compiled for.
    """

    case: Case
    units: Mapping[str, str] = field(default_factory=dict)
    tma: tuple[str, ...] = ()
    targets: tuple[str, ...] = ("sm_90",)


Tensors = dict[str, Any]


@dataclass(frozen=True)
class Spec:
    """One kernel.

    Attributes:
        name: as in the registry. component: the component of the model whose work it does.
        cases: where it is proved in the interpreter.
        inputs: (case, device) -> arguments of the host function, seeded by the case's name.
        reference: (case, inputs) -> outputs in float64 (or exact integers), plain arithmetic.
        launch: (case, inputs) -> outputs of the Triton kernel, by the reference's names.
        expected: (case, inputs) -> Expected. It reads lengths and tables from the inputs, never values.
        tolerance: by ``Case.precision``.
        builds: production shapes to compile.
        measured: shapes to time on a GPU.
        timed: (case, inputs) -> the kernel and nothing else, where ``launch`` does more for the sake of the comparison.
        library: (case, inputs) -> a function that does the same with the library a user would call, or None. It gives the
            reference's outputs in their order, as many as it makes, perhaps with heads in front of tokens.
    """

    name: str
    component: str
    cases: tuple[Case, ...]
    inputs: Callable[[Any, str], Tensors]
    reference: Callable[[Any, Tensors], Tensors]
    launch: Callable[[Any, Tensors], Tensors]
    expected: Callable[[Any, Tensors], Expected]
    tolerance: Mapping[str, Tolerance]
    builds: tuple[Build, ...] = ()
    measured: tuple[Case, ...] = ()
    library: Callable[[Any, Tensors], Callable[[], Any] | None] | None = None
    timed: Callable[[Any, Tensors], Any] | None = None

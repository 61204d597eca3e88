"""Counted evidence: what a Triton launch asks of memory and matrix units, integer for integer, without a GPU.

``counting()`` watches Triton's interpreter while kernels run in it and gives, per kernel argument, the bytes requested and
the distinct bytes touched, in each direction; the bytes that masks left out; dot FLOPs by operand type; special
functions and other elementwise operations; programs. An access that lies in no tensor argument raises ``OutOfBounds``, so
that a run is a memory sanitizer too.

A tensor that is passed twice, and views of one piece of memory, count under the first parameter that holds the address.
Bytes are what programs request: what a cache saves between them, and the 32-byte sectors that DRAM moves, are not in them.

Triton's interpreter computes with the raw bits of bfloat16 (its sums and dots are silently wrong by many orders of
magnitude) and truncates where a GPU rounds to nearest even when it casts to bfloat16 or an 8-bit float; within
``counting()`` both are put right. It needs TRITON_INTERPRET=1 before triton is first imported; importing this module first
is enough.

The hooks use private names of triton. ``counting()`` refuses to start when one is missing, and ``counted_check.check()``
counts a kernel whose counts are known; run it after a change of triton's version.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")

import numpy as np
import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime import interpreter as interpreter_module

from roofline.validate.rounding import HarnessError, as_bf16, casting, converting, decoded, is_bf16

interpreter: Any = interpreter_module

SPECIAL = ("exp", "exp2", "log", "log2", "sin", "cos", "sqrt", "precise_sqrt", "rsqrt", "erf")
"""Operations of the special-function unit."""
BINARY = ("fadd", "fsub", "fmul", "fdiv", "precise_divf", "frem", "minimumf", "maximumf", "maxnumf")
COMPARISONS = tuple(f"fcmp{order}{test}" for order in "OU" for test in ("LT", "GT", "LE", "GE", "EQ", "NE"))
OTHER = ("fma", "clampf", "select", "fabs", "floor", "ceil", "minnumf")
NEWER = ("fneg",)
"""Operations that not every triton has."""
ELEMENTWISE = (*SPECIAL, *BINARY, *COMPARISONS, *OTHER)
ARITHMETIC = {**dict.fromkeys((*BINARY, "fabs", "minnumf", *NEWER), 1), "fma": 2}
"""Elementwise operations that the model counts as vector FLOPs, each so many; comparisons, selections and casts are none."""

BUILDER_HOOKS = (
    "create_masked_load", "create_masked_store", "create_atomic_rmw", "create_atomic_cas", "create_dot", "cast_impl",
    "create_barrier", "set_grid_idx", *(f"create_{name}" for name in ELEMENTWISE),
)  # fmt: skip
COUNTERS = {"read": "read", "write": "written", "atomic": "atomic"}
"""Kind of access -> the counter that it adds to."""


class OutOfBounds(IndexError):
    """A kernel addressed memory that belongs to none of its tensor arguments."""


@dataclass
class Tally:
    """What programs did. Bytes and FLOPs are ints, keyed by the kernel's parameter name."""

    read: Counter[str] = field(default_factory=Counter)
    written: Counter[str] = field(default_factory=Counter)
    atomic: Counter[str] = field(default_factory=Counter)
    masked: Counter[str] = field(default_factory=Counter)
    """Bytes of lanes that a mask kept from being read."""
    dot: Counter[str] = field(default_factory=Counter)
    """FLOPs of ``tl.dot`` by operand type, padding of tiles included."""
    tf32: int = 0
    """FLOPs among them of fp32 operands that a GPU rounds to tf32, 11 bits, first; here they keep 24."""
    operations: Counter[str] = field(default_factory=Counter)
    """Elements by elementwise operation."""
    reduced: int = 0
    scanned: int = 0
    shared: Counter[str] = field(default_factory=Counter)
    """Elements by argument that one program stores and another loads, in either order: a race."""
    unordered: Counter[str] = field(default_factory=Counter)
    """Elements by argument that lanes of one program store and other lanes load, with no barrier between."""
    programs: int = 0
    launches: int = 0
    touched: dict[tuple[str, str, int], np.ndarray[Any, Any]] = field(default_factory=dict, repr=False)
    """(kind, argument, first address) -> which bytes of it were touched."""

    def unique(self, kind: str) -> Counter[str]:
        """Distinct bytes per argument: the compulsory traffic. ``kind`` is "read", "write" or "atomic"."""
        found: Counter[str] = Counter()
        for (of, name, _), bytes_touched in self.touched.items():
            if of == kind:
                found[name] += int(np.count_nonzero(bytes_touched))
        return found

    @property
    def rewritten(self) -> Counter[str]:
        """Bytes per argument that were stored to more than once: between programs, a race."""
        return +(self.written - self.unique("write"))

    @property
    def special(self) -> int:
        """Elements that went through the special-function unit."""
        return sum(self.operations[name] for name in SPECIAL)

    @property
    def vector(self) -> int:
        """Elementwise FLOPs, padding of blocks included; a sum or maximum of n elements takes n."""
        return self.reduced + sum(each * self.operations[name] for name, each in ARITHMETIC.items())


@dataclass
class Counts(Tally):
    """What the launches inside one ``counting()`` did, all together and kernel by kernel.

    Distinct bytes are distinct within one kernel: what a second kernel reads again has to be moved again.
    """

    kernels: dict[str, Tally] = field(default_factory=dict)

    def unique(self, kind: str) -> Counter[str]:
        return sum((tally.unique(kind) for tally in self.kernels.values()), Counter())


NOBODY, SEVERAL = 0, -1
FOLLOWED = 1 << 30
"""Bytes of the largest argument whose bytes are told apart; of a larger one only what is requested counts."""
LANES = 1 << 32
"""A lane is known by its place in a block of so many elements: blocks of one size lie on a program's threads alike."""


@dataclass
class _Marks:
    """Who touched each byte of an argument last in this launch: program, epoch of barriers, lane of its block."""

    program: Any
    epoch: Any
    lane: Any

    @classmethod
    def of(cls, length: int) -> _Marks:
        """Marks of bytes that nobody touched: zeros, which take no memory until they are written."""
        return cls(np.zeros(length, np.int32), np.zeros(length, np.int32), np.zeros(length, np.int64))


@dataclass
class _Watch:
    """Which argument an address belongs to, and what has been counted."""

    counts: Counts = field(default_factory=Counts)
    spans: list[tuple[int, int, str]] = field(default_factory=list)
    alive: list[Any] = field(default_factory=list)
    tallies: tuple[Tally, ...] = ()
    where: tuple[int, ...] = ()
    program: int = NOBODY
    epoch: int = 0
    """Barriers that the launch has passed; each program begins a new one."""
    marks: dict[tuple[str, str, int], _Marks] = field(default_factory=dict)

    def add(self, counter: str, key: str, amount: int) -> None:
        """Adds to a counter of the kernel that runs and of all together."""
        for tally in self.tallies:
            getattr(tally, counter)[key] += amount

    def increase(self, total: str, amount: int = 1) -> None:
        """Adds to a plain total of the kernel that runs and of all together."""
        for tally in self.tallies:
            setattr(tally, total, getattr(tally, total) + amount)

    def launch(self, kernel: str, arguments: list[tuple[str, Any]]) -> None:
        """Takes the arguments of a launch; keeps the tensors, so that no address is used twice."""
        self.tallies = (self.counts, self.counts.kernels.setdefault(kernel, Tally()))
        self.increase("launches")
        self.spans.clear()
        self.marks.clear()
        self.program, self.epoch = NOBODY, 0
        for name, value in arguments:
            tensor = getattr(value, "base", value) if type(value).__name__ == "TensorDescriptor" else value
            if hasattr(tensor, "untyped_storage") and tensor.numel():
                first = tensor.data_ptr()
                last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
                self.spans.append((first, first + (last + 1) * tensor.element_size(), name))
                self.alive.append(tensor)

    def access(self, kind: str, pointers: Any, mask: Any) -> None:
        """Counts one load, store or atomic of a block of pointers."""
        addresses = pointers.data
        taken = np.broadcast_to(np.asarray(True if mask is None else mask.data, dtype=bool), addresses.shape)
        live = addresses[taken]
        lanes = np.flatnonzero(taken) * LANES + addresses.size
        size = max(8, pointers.get_element_ty().primitive_bitwidth) // 8
        if kind == "read" and live.size < addresses.size and self.spans:
            self.add("masked", self._owner(addresses, live), (addresses.size - live.size) * size)
        if not live.size:
            return
        low, high = int(live.min()), int(live.max()) + size
        for first, last, name in self.spans:
            if first <= low and high <= last:
                self._count(kind, name, first, last, live, size, lanes)
                return
        for first, last, name in self.spans:
            inside = (live >= first) & (live + size <= last)
            if inside.any():
                self._count(kind, name, first, last, live[inside], size, lanes[inside])
                live, lanes = live[~inside], lanes[~inside]
        if live.size:
            arguments = ", ".join(name for _, _, name in self.spans)
            raise OutOfBounds(
                f"{kind} of {live.size} x {size} bytes from {int(live.min()):#x} in program {self.where}: "
                f"in none of the tensors {arguments}"
            )

    def _owner(self, addresses: Any, live: Any) -> str:
        """The argument that a partly masked block belongs to: by its live lanes, else by where it starts."""
        at = int(live[0]) if live.size else int(addresses.min())
        before = [span for span in self.spans if span[0] <= at]
        return max(before)[2] if before else min(self.spans)[2]

    def _count(self, kind: str, name: str, first: int, last: int, live: Any, size: int, lanes: Any) -> None:
        self.add(COUNTERS[kind], name, live.size * size)
        if last - first > FOLLOWED:
            return
        key, mine = (kind, name, first), self.tallies[-1].touched
        touched = mine.get(key)
        if touched is None:
            touched = mine[key] = np.zeros(last - first, dtype=bool)
        offsets = (live - np.uint64(first)).astype(np.int64).ravel()
        for byte in range(size):
            touched[offsets + byte] = True
        if kind != "atomic":
            self._order(kind, name, first, offsets, size, last - first, lanes)

    def _order(self, kind: str, name: str, first: int, offsets: Any, size: int, length: int, lanes: Any) -> None:
        """Finds loads and stores of one place by two programs, or by two lanes of one with no barrier between."""
        mine = self.marks.get((kind, name, first))
        if mine is None:
            mine = self.marks[kind, name, first] = _Marks.of(length)
        other = self.marks.get(("write" if kind == "read" else "read", name, first))
        if other is not None:
            by = other.program[offsets]
            self.add("shared", name, int(((by != NOBODY) & (by != self.program)).sum()))
            same = (by == self.program) & (other.epoch[offsets] == self.epoch) & (other.lane[offsets] != lanes)
            self.add("unordered", name, int(same.sum()))
        before = mine.program[offsets]
        by = np.where((before == NOBODY) | (before == self.program), self.program, SEVERAL)
        lane = np.where(
            (before == self.program) & (mine.epoch[offsets] == self.epoch) & (mine.lane[offsets] != lanes), SEVERAL, lanes
        )
        for byte in range(size if kind == "write" else 1):
            mine.program[offsets + byte] = by
            mine.epoch[offsets + byte] = self.epoch
            mine.lane[offsets + byte] = lane


def _elementwise(watch: _Watch, name: str, method: Any) -> Any:
    """Counts an elementwise operation and computes it in float32 for bfloat16."""

    def operation(self: Any, *operands: Any, **options: Any) -> Any:
        if name != "select" and any(is_bf16(operand) for operand in operands):
            result = method(self, *(decoded(operand) for operand in operands), **options)
            result = result if name in COMPARISONS else as_bf16(result.data)
        else:
            result = method(self, *operands, **options)
        watch.add("operations", name, result.data.size)
        return result

    return operation


LEAST_INNER = {8: 32}
"""Bits of an operand -> the fewest elements that a dot multiplies and sums, where they are not 16."""


def specialised(value: Any) -> Any:
    """An argument as the compiler takes it: a whole 1 is a constant."""
    return tl.constexpr(1) if type(value) is int and value == 1 else value


def _dot(watch: _Watch, method: Any) -> Any:
    """Counts a dot; bfloat16 is multiplied in float32, int8 exactly (in float64, whose sums are whole here)."""

    def dot(self: Any, a: Any, b: Any, accumulator: Any, *rest: Any, **options: Any) -> Any:
        *batch, rows, inner = a.data.shape
        size = int(np.prod(batch, dtype=np.int64)) * rows * inner * b.data.shape[-1]
        if inner < LEAST_INNER.get(a.dtype.scalar.primitive_bitwidth, 16):
            raise HarnessError(f"a dot sums {inner} products of {a.dtype.scalar}: too few to be compiled")
        watch.add("dot", str(a.dtype.scalar), 2 * size)
        if a.dtype.scalar == tl.float32 and rest[0] != ir.INPUT_PRECISION.IEEE:
            watch.increase("tf32", 2 * size)
        if a.dtype.scalar == tl.int8:
            product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64)).astype(np.int32)
            return interpreter.TensorHandle(product + accumulator.data, accumulator.dtype.scalar)
        return method(self, decoded(a), decoded(b), accumulator, *rest, **options)

    return dot


def _refused(what: str) -> Any:
    """An operation that would not be counted."""

    def refuse(self: Any, *operands: Any, **options: Any) -> Any:
        raise HarnessError(f"{what} is not counted: say what it multiplies, and hook it")

    return refuse


def _folded(watch: _Watch, kind: str, method: Any) -> Any:
    """Counts a reduction or a scan; one over bfloat16 runs in float32."""

    def folded(self: Any, operands: Any) -> Any:
        watch.increase(kind, operands[0].handle.data.size)
        if not any(is_bf16(operand.handle) for operand in operands):
            return method(self, operands)
        if len(operands) != 1:
            raise HarnessError(f"{kind}: a fold over several bfloat16 operands; cast them to fp32 first")
        wide = decoded(operands[0].handle)
        block = tl.block_type(tl.float32, list(wide.data.shape))
        result = method(self, (tl.core.tensor(wide, block),))
        result = result[0] if isinstance(result, (list, tuple)) else result
        if result.dtype != tl.float32:
            return result
        data = result.handle.data
        narrow = tl.block_type(tl.bfloat16, list(data.shape)) if result.type.is_block() else tl.bfloat16
        return tl.core.tensor(as_bf16(data), narrow)

    return folded


def missing_hooks() -> list[str]:
    """Names that the hooks need and the installed triton's interpreter lacks."""
    needed = {
        "InterpreterBuilder": BUILDER_HOOKS,
        "ReduceOps": ("apply_impl",),
        "ScanOps": ("apply_impl",),
        "GridExecutor": ("_init_args_hst",),
    }
    missing = [
        f"{owner}.{name}"
        for owner, names in needed.items()
        for name in names
        if name not in vars(getattr(interpreter, owner, object))
    ]
    return missing + [name for name in ("_convert_float", "_patch_lang_tensor", "TensorHandle") if not hasattr(interpreter, name)]


@contextmanager
def counting() -> Iterator[Counts]:
    """Counts every Triton launch inside the block.

    Raises HarnessError where the installed triton lacks a name that the hooks need, or compiles instead of interpreting.
    """
    missing = missing_hooks()
    if missing:
        raise HarnessError(f"this triton's interpreter has changed: {', '.join(missing)} not found; counts would be wrong")
    watch = _Watch()
    replaced: list[tuple[Any, str, Any]] = []

    def replace(owner: Any, name: str, value: Any) -> None:
        replaced.append((owner, name, vars(owner).get(name)))
        setattr(owner, name, value)

    def accessing(kind: str, method: Any, mask_at: int | None) -> Any:
        def access(self: Any, *operands: Any, **options: Any) -> Any:
            pointers = next(one for one in operands if hasattr(one, "get_element_ty") and one.dtype.is_ptr())
            watch.access(kind, pointers, None if mask_at is None else operands[mask_at])
            return method(self, *operands, **options)

        return access

    def begin(self: Any, *index: int) -> None:
        watch.increase("programs")
        watch.where = index
        watch.program, watch.epoch = watch.program + 1, watch.epoch + 1
        original["set_grid_idx"](self, *index)

    def barrier(self: Any, *operands: Any, **options: Any) -> Any:
        watch.epoch += 1
        return original["create_barrier"](self, *operands, **options)

    def arguments(self: Any, positional: Any, named: Any) -> Any:
        hosted = init(self, positional, named)
        watch.launch(self.fn.__name__, [*zip(self.arg_names, hosted[0], strict=False), *hosted[1].items()])
        return [specialised(value) for value in hosted[0]], {name: specialised(value) for name, value in hosted[1].items()}

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    builder, init, patch = interpreter.InterpreterBuilder, interpreter.GridExecutor._init_args_hst, interpreter._patch_lang_tensor
    original = dict(vars(builder))
    for name, kind, mask_at in (
        ("create_masked_load", "read", 1), ("create_masked_store", "write", 2),
        ("create_atomic_rmw", "atomic", 3), ("create_atomic_cas", "atomic", None),
    ):  # fmt: skip
        replace(builder, name, accessing(kind, original[name], mask_at))
    for name in (*ELEMENTWISE, *(name for name in NEWER if f"create_{name}" in original)):
        replace(builder, f"create_{name}", _elementwise(watch, name, original[f"create_{name}"]))
    replace(builder, "set_grid_idx", begin)
    replace(builder, "create_barrier", barrier)
    replace(builder, "create_dot", _dot(watch, original["create_dot"]))
    if "create_dot_scaled" in original:
        replace(builder, "create_dot_scaled", _refused("tl.dot_scaled"))
    replace(builder, "cast_impl", casting(original["cast_impl"]))
    replace(builder, "get_bf16", lambda self, value: as_bf16(np.array([value], dtype=np.float32)))
    for owner, kind in ((interpreter.ReduceOps, "reduced"), (interpreter.ScanOps, "scanned")):
        replace(owner, "apply_impl", _folded(watch, kind, owner.apply_impl))
    replace(interpreter.GridExecutor, "_init_args_hst", arguments)
    replace(interpreter, "_convert_float", converting(interpreter._convert_float))
    replace(interpreter, "_patch_lang_tensor", patched)
    try:
        with np.errstate(all="ignore"):  # a GPU has no floating-point warnings
            yield watch.counts
    finally:
        for owner, name, value in reversed(replaced):
            if value is None:
                delattr(owner, name)
            else:
                setattr(owner, name, value)

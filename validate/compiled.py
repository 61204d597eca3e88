"""Compiled evidence: what a kernel becomes for a GPU that need not be there, and gates on it.

A launch runs on tensors without memory (torch's meta device) while every Triton kernel that it starts is recorded with its
arguments; each is then compiled for the target with exactly the tiles, warps and stages that the launch chose for it.
The machine code gives registers, spills, shared memory, occupancy and the matrix instructions in use.

Triton either interprets or compiles in one process, so this runs in a process of its own: ``run`` starts it, and
``python -m roofline.validate.compiled`` is it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roofline.errors import RooflineError
from roofline.kernels.device import DEVICES, Device, target
from roofline.kernels.registry import KERNELS, load
from roofline.kernels.spec import Build, Spec

MATRIX = ("HGMMA", "QGMMA", "IGMMA", "HMMA", "IMMA", "QMMA", "UTCHMMA", "UTCQMMA", "UTCIMMA", "v_mfma")
MOVES = ("UTMALDG", "UTMASTG", "LDGSTS", "LDG", "STG", "MUFU.EX2")
MOST_REGISTERS = 255
FP8_ABSENT = ("sm_80",)


class CompileError(RooflineError):
    """The process that compiles failed as a whole."""


@dataclass(frozen=True)
class Compiled:
    """One Triton kernel compiled for one architecture.

    Attributes:
        kernel, case: of the registry. function: the Triton kernel. arch: the target.
        registers: 32-bit registers per thread. spills: spill stores and loads in the code.
        shared: bytes of shared memory per program, out of ``shared_limit``.
        warps: per program. occupancy: programs that one unit holds at a time.
        instructions: how often each matrix and memory instruction stands in the code.
        loops: (loop depth, "load" | "store" | "dot") -> bytes or FLOPs of one iteration of one program, masks ignored.
        failures: gates that it does not pass.
        seconds: time to compile.
    """

    kernel: str
    case: str
    function: str
    arch: str
    registers: int
    spills: int
    shared: int
    shared_limit: int
    warps: int
    occupancy: int
    instructions: dict[str, int] = field(default_factory=dict)
    loops: dict[str, int] = field(default_factory=dict)
    failures: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def matrix_unit(self) -> str:
        """The matrix instructions in use, most frequent first."""
        used = [name for name in MATRIX if self.instructions.get(name)]
        return " ".join(sorted(used, key=lambda name: -self.instructions[name]))


@dataclass(frozen=True)
class Call:
    """A recorded launch: the kernel, its arguments by name, the options of the compiler."""

    function: Any
    arguments: dict[str, Any]
    options: dict[str, Any]


@contextmanager
def recording() -> Iterator[list[Call]]:
    """Collects launches instead of running them."""
    from triton.runtime.jit import JITFunction

    calls: list[Call] = []

    def record(self: Any, *positional: Any, grid: Any, warmup: bool, **named: Any) -> None:
        arguments = dict(zip(self.arg_names, positional, strict=False))
        options = {name: value for name, value in named.items() if name not in self.arg_names}
        arguments |= {name: value for name, value in named.items() if name in self.arg_names}
        calls.append(Call(self, arguments, options))

    run, JITFunction.run = JITFunction.run, record
    try:
        yield calls
    finally:
        JITFunction.run = run


def _source(call: Call) -> Any:
    """The kernel with its arguments' types, as triton's own launcher would specialise it."""
    import torch
    from triton.compiler import ASTSource

    names = {
        torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float8_e4m3fn: "fp8e4nv",
        torch.float8_e5m2: "fp8e5", torch.int8: "i8", torch.uint8: "u8", torch.int32: "i32", torch.int64: "i64", torch.bool: "i1",
    }  # fmt: skip
    constant = {param.name for param in call.function.params if param.is_constexpr}
    signature, constants, attributes = {}, {}, {}
    for index, name in enumerate(call.function.arg_names):
        value = call.arguments[name]
        if name in constant or value is None or (type(value) is int and value == 1):
            signature[name], constants[name] = "constexpr", value
        elif type(value).__name__ == "TensorDescriptor":
            signature[name] = f"tensordesc<{names[value.base.dtype]}{list(value.block_shape)}>"
        elif isinstance(value, torch.Tensor):
            signature[name] = "*" + names[value.dtype]
            if value.storage_offset() * value.element_size() % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
        elif type(value) is bool:
            signature[name] = "u1"
        elif type(value) is int:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32"
    return ASTSource(call.function, signature, constexprs=constants, attrs=attributes)


def _tool(name: str, *arguments: str) -> str:
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    try:
        done = subprocess.run([str(path), *arguments], capture_output=True, text=True, check=False)
    except OSError as error:
        raise CompileError(f"{name} does not run: {error}") from error
    if done.returncode:
        raise CompileError(f"{name} ended with {done.returncode}: {(done.stdout + done.stderr).strip()[-300:]}")
    return done.stdout


def _nvidia(binary: Any) -> tuple[int, int, Counter[str]]:
    """Registers, spills and instructions of a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        usage = re.search(r"REG:(\d+)", _tool("cuobjdump", "-res-usage", file.name))
        code = _tool("nvdisasm", "-c", file.name)
    found = Counter(re.findall(r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9]+(?:\.EX2)?)", code))
    if usage is None or not int(usage[1]):
        raise CompileError("cuobjdump says nothing of registers")
    if not found["EXIT"]:
        raise CompileError("nvdisasm shows no instructions")
    return int(usage[1]), found["STL"] + found["LDL"], found


def _amd(binary: Any) -> tuple[int, int, Counter[str]]:
    """Registers, spills and instructions of an AMD code object."""
    code = binary.asm["amdgcn"]

    def number(name: str) -> int:
        match = re.search(rf"\.{name}:\s*(\d+)", code)
        if match is None:
            raise CompileError(f"the code object says nothing of {name}")
        return int(match[1])

    spills = number("vgpr_spill_count") + number("sgpr_spill_count")
    return number("vgpr_count"), spills, Counter(re.findall(r"v_mfma", code))


ELEMENT = {
    "bf16": 2,
    "si8": 1,
    "ui8": 1,
    "si32": 4,
    "f16": 2,
    "f32": 4,
    "f64": 8,
    "i8": 1,
    "i16": 2,
    "i32": 4,
    "i64": 8,
    "f8E4M3FN": 1,
    "f8E5M2": 1,
    "i1": 1,
}


def _elements(shape: str) -> int:
    count = 1
    for size in re.findall(r"(\d+)x", shape):
        count *= int(size)
    return count


def loops(ttir: str) -> dict[str, int]:
    """Bytes and dot FLOPs that one program asks for, by loop depth, from Triton's first intermediate form.

    The later forms repeat what a pipeline loads ahead. Masks are ignored, and loops of one depth are taken together.
    """
    depth, open_loops, found = 0, list[int](), Counter[str]()
    for line in ttir.splitlines():
        if re.search(r"scf\.(for|while)", line):
            open_loops.append(depth)
        key = len(open_loops)
        if match := re.search(r"tt\.(load|store) .*? : (?:tensor<((?:\d+x)*))?!tt\.ptr<(\w+)>", line):
            found[f"{key}.{match[1]}"] += _elements(match[2] or "") * ELEMENT[match[3]]
        if match := re.search(r"tt\.descriptor_(load|store).*?tensordesc<(?:tensor<)?((?:\d+x)+)(\w+)", line):
            found[f"{key}.{match[1]}"] += _elements(match[2]) * ELEMENT[match[3]]
        if match := re.search(r"tt\.dot .*: tensor<(?:\d+x)*(\d+)x([a-z]\w*)> \* tensor<[^>]*> -> tensor<((?:\d+x)+)", line):
            found[f"{key}.dot"] += 2 * int(match[1]) * _elements(match[3])
        depth += line.count("{") - line.count("}")
        while open_loops and depth <= open_loops[-1]:
            open_loops.pop()
    return dict(found)


def occupancy(device: Device, registers: int, shared: int, warps: int, warp_size: int) -> int:
    """Programs that one unit holds, by registers (in blocks of 8 per thread), shared memory (1 KiB each) and threads."""
    threads = warps * warp_size
    by_registers = device.registers // max(1, -(-registers // 8) * 8 * threads)
    return min(by_registers, device.shared_per_unit // (shared + 1024), device.threads // threads)


def gates(build: Build, compiled: Compiled, device: Device) -> Iterator[str]:
    """What must hold: it can be launched; on sm_90 it does not spill and uses the stated matrix unit and TMA."""
    if compiled.shared > device.shared:
        yield f"{compiled.shared} B of shared memory, the limit is {device.shared}"
    if compiled.occupancy < 1:
        yield f"{compiled.registers} registers x {compiled.warps} warps do not fit one unit"
    if compiled.arch != "sm_90":
        return
    if compiled.spills:
        yield f"{compiled.spills} spill instructions"
    unit = build.units.get(compiled.function)
    if unit and not compiled.instructions.get(unit):
        yield f"no {unit} in the code, but {compiled.matrix_unit or 'no matrix instruction'}"
    if compiled.function in build.tma and not compiled.instructions.get("UTMALDG"):
        yield "no TMA load in the code"


def compile_build(spec: Spec, build: Build, arch: str) -> list[Compiled]:
    """Every kernel that the launch of a build starts, compiled for an architecture."""
    import triton
    from triton.backends.compiler import GPUTarget

    nvidia = arch.startswith("sm_")
    where = GPUTarget("cuda", int(arch.removeprefix("sm_")), 32) if nvidia else GPUTarget("hip", arch, 64)
    with target(arch) as device, recording() as calls:
        spec.launch(build.case, spec.inputs(build.case, "meta"))
    if not calls:
        raise CompileError("the launch starts no kernel")
    results = []
    for call in calls:
        began = time.perf_counter()
        binary = triton.compile(_source(call), target=where, options=call.options)
        seconds = time.perf_counter() - began
        registers, spills, found = _nvidia(binary) if nvidia else _amd(binary)
        shared, warps = binary.metadata.shared, binary.metadata.num_warps
        result = Compiled(
            spec.name, build.case.name, call.function.__name__, arch, registers, spills, shared, device.shared, warps,
            occupancy(device, registers, shared, warps, where.warp_size),
            {name: found[name] for name in (*MATRIX, *MOVES) if found[name]}, loops(binary.asm["ttir"]), (), seconds,
        )  # fmt: skip
        results.append(dataclasses.replace(result, failures=tuple(gates(build, result, device))))
    return results


def failed(kernel: str, case: str, arch: str, why: str) -> Compiled:
    """The record of a build that gave no code: it has no registers, and a failure."""
    return Compiled(kernel, case, "", arch, 0, 0, 0, 0, 0, 0, failures=(f"not compiled: {why}",))


def compile_all(kernels: Iterable[str], archs: Iterable[str]) -> Iterator[Compiled]:
    """Every build of the kernels, for those of the architectures that it is meant for. One that fails says so."""
    for kernel, case, arch in wanted(kernels, archs):
        try:
            spec = load(kernel)
            yield from compile_build(spec, next(build for build in spec.builds if build.case.name == case), arch)
        except Exception as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            yield failed(kernel, case, arch, f"{type(error).__name__}: {' '.join(lines)[-300:]}")


def wanted(kernels: Iterable[str], archs: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """(kernel, case, architecture) of every build, or ("", "") in place of the last two for a kernel whose file fails."""
    chosen = tuple(archs)
    for name in kernels:
        try:
            builds = load(name).builds
        except Exception:
            yield name, "", ""
            continue
        yield from ((name, build.case.name, arch) for build in builds for arch in chosen if arch in build.targets)


def complete(announced: Iterable[tuple[str, str, str]], found: Iterable[Compiled], why: str) -> list[Compiled]:
    """The records, and one that says so for every build that has none."""
    records = list(found)
    seen = {(one.kernel, one.case, one.arch) for one in records}
    return [*records, *(failed(*one, why) for one in announced if one not in seen)]


def run(kernels: Iterable[str] = KERNELS, archs: Iterable[str] = DEVICES) -> list[Compiled]:
    """Compiles in a process of its own, with a cache that lasts as long as it.

    A build that fails, or that the process did not live to compile, has a record with the failure.
    """
    chosen, targets = tuple(kernels), tuple(archs)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, "-m", "roofline.validate.compiled", ",".join(chosen), ",".join(targets)],
            capture_output=True, text=True, check=False, env={**environment, "TRITON_CACHE_DIR": cache},
        )  # fmt: skip
    announced, *records = [json.loads(line) for line in done.stdout.splitlines()] or [[(name, "", "") for name in chosen]]
    found = [Compiled(**{**record, "failures": tuple(record["failures"])}) for record in records]
    last = (done.stderr.strip().splitlines() or ["no record of it"])[-1]
    return complete([tuple(one) for one in announced], found, f"the process ended with {done.returncode}, {last}")


if __name__ == "__main__":
    chosen = [argument.split(",") for argument in sys.argv[1:3]]
    print(json.dumps(list(wanted(*chosen))), flush=True)
    for one in compile_all(*chosen):
        print(json.dumps(dataclasses.asdict(one)), flush=True)

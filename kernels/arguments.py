"""What host functions ask of their arguments, before a kernel reads memory by them.

Devices, types, shapes and strides are attributes of a tensor on the host: checking them costs a microsecond and never
waits for a GPU. Values that lie on a GPU are not read; those of tensors on the CPU, where the interpreter runs, are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from roofline.errors import InputError

HALF = (torch.bfloat16, torch.float16)
FLOATING = (*HALF, torch.float32)
NARROW = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
INT32 = (torch.int32,)
SINGLE = (torch.float32,)
WIDEST_HEAD = 256
"""Elements of a head whose tiles fit on a chip."""
MOST_REGISTERS = 255
"""32-bit registers of a thread."""


def _names(types: Sequence[torch.dtype]) -> str:
    return " or ".join(str(one).removeprefix("torch.") for one in types)


def _packed_rows(tensor: torch.Tensor) -> bool:
    """Whether the elements behind the first dimension lie behind each other."""
    expected = 1
    for size, stride in zip(reversed(tensor.shape[1:]), reversed(tensor.stride()[1:]), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _fits(given: Sequence[int], shape: tuple[int | None, ...]) -> bool:
    if len(given) != len(shape):
        return False
    for size, real in zip(shape, given, strict=True):  # noqa: SIM110 (all() takes three times as long)
        if size is not None and size != real:
            return False
    return True


def check(
    name: str, tensor: torch.Tensor | None, shape: tuple[int | None, ...], types: Sequence[torch.dtype],
    like: torch.Tensor | None = None, strides: str = "contiguous",
) -> None:  # fmt: skip
    """Refuses a tensor that a kernel would read wrongly; None, an argument left out, passes.

    Args:
        shape: sizes, None for any. types: those taken. like: a tensor on whose device it must be, unless
            one has no memory.
        strides: "contiguous"; "rows" where rows may lie apart, as in a slice of a wider tensor; "any".

    Raises InputError, naming the argument, what it is and what it should be.
    """
    if tensor is None:
        return
    if not isinstance(tensor, torch.Tensor):
        raise InputError(f"{name}: {type(tensor).__name__} is no tensor")
    given = tensor.shape
    if not _fits(given, shape):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise InputError(f"{name}: shape {tuple(given)} does not fit the other arguments; ({wanted}) does")
    if tensor.dtype not in types:
        raise InputError(f"{name}: {_names([tensor.dtype])} is not taken here; pass {_names(types)}")
    if like is not None and tensor.device != like.device and not (tensor.is_meta or like.is_meta):
        raise InputError(f"{name}: on {tensor.device}, and other arguments on {like.device}; move it there")
    if strides == "any" or tensor.is_contiguous() or not tensor.numel():
        return
    if strides != "rows" or not _packed_rows(tensor):
        raise InputError(f"{name}: shape {tuple(given)} with strides {tensor.stride()} is a view; pass {name}.contiguous()")


def check_heads(N: int, K: int, width: int) -> None:
    """Refuses query heads that do not share key-value heads evenly, and elements of a head that do not fit on a chip."""
    if not K or N % K:
        raise InputError(f"q: {N} query heads do not divide over {K} key-value heads")
    if not 1 <= width <= WIDEST_HEAD:
        raise InputError(f"q: heads of {width} elements; 1 to {WIDEST_HEAD} fit on a chip, unfused_attention takes more")


def check_tile(name: str, warps: int, sums: int, **sides: int) -> None:
    """Refuses a tile that cannot be compiled, or that certainly spills.

    Its sides are those of a matrix unit, powers of two from 16 on. ``sums`` numbers in fp32 are held from step to step by
    ``warps`` warps, and a thread has at most 255 registers. What passes is right on every GPU; that it spills nothing and
    fits on a chip is shown only for the tiles that a launch chooses at the shapes in ``SPEC.builds``.
    """
    for side, size in sides.items():
        if size < 16 or size & (size - 1):
            raise InputError(f"{name}: {side}={size}; the sides of a tile are powers of two from 16 on")
    if not 1 <= warps <= 32 or warps & (warps - 1):
        raise InputError(f"{name}: {warps} warps; pass a power of two up to 32")
    each = -(-sums // (32 * warps))
    if each > MOST_REGISTERS:
        shape = ", ".join(f"{side}={size}" for side, size in sides.items())
        raise InputError(
            f"{name}: {shape} keeps {each} sums in each thread of {warps} warps, which has {MOST_REGISTERS} registers;"
            f" pass smaller sides or more warps, or leave {name} out"
        )


def within(name: str, value: float, least: float, most: float = float("inf")) -> None:
    """Refuses a number out of its range, NaN as well. Raises InputError."""
    if not least <= value <= most:
        bounds = f"at least {least}" if most == float("inf") else f"from {least} to {most}"
        raise InputError(f"{name}: {value} is out of range; pass a number {bounds}")


def readable(tensor: torch.Tensor) -> bool:
    """Whether values can be looked at without waiting for a GPU."""
    return bool(tensor.device.type == "cpu")


def check_indices(name: str, tensor: torch.Tensor | None, limit: int, least: int = 0) -> None:
    """Refuses indices out of ``least ... limit - 1``, where they can be read. Raises InputError."""
    if tensor is not None and readable(tensor) and tensor.numel():
        low, high = (int(bound) for bound in tensor.aminmax())
        if low < least or high >= limit:
            raise InputError(f"{name}: {low if low < least else high} is out of range; pass {least} to {limit - 1}")


def check_values(name: str, tensor: torch.Tensor, least: float, most: float = float("inf")) -> None:
    """Refuses numbers out of a range, NaN as well, where they can be read. Raises InputError."""
    if readable(tensor) and tensor.numel():
        for bound in tensor.aminmax():
            within(name, bound.item(), least, most)


def check_distinct(name: str, tensor: torch.Tensor, limit: int) -> None:
    """Refuses places in memory that do not exist or that two programs would write, where they can be read. InputError."""
    check_indices(name, tensor, limit)
    if readable(tensor) and len(tensor.unique()) < tensor.numel():
        raise InputError(f"{name}: {tensor.tolist()} names a place twice; each is written once")


def check_starts(name: str, starts: torch.Tensor, rows: int, longest: int | None, like: torch.Tensor) -> int:
    """Refuses ``starts [B + 1]`` that do not cut ``rows`` rows into sequences of at most ``longest``; returns B.

    Where values cannot be read, a ``longest`` is refused that no B sequences of so many rows could have.
    """
    check(name, starts, (None,), INT32, like)
    sequences = len(starts) - 1
    if sequences < 0:
        raise InputError(f"{name}: empty; pass where each sequence begins, and the end")
    if longest is not None and longest * sequences < rows:
        raise InputError(f"longest: {longest} rows in each of {sequences} sequences are fewer than {rows}; pass the most of one")
    if readable(starts):
        lengths = starts.diff()
        if int(starts[0]) or int(starts[-1]) != rows or (sequences and int(lengths.min()) < 0):
            raise InputError(f"{name}: {starts.tolist()} does not cut {rows} rows; it rises from 0 to their number")
        if longest is not None and sequences and int(lengths.max()) > longest:
            raise InputError(f"longest: {longest}, and a sequence has {int(lengths.max())} rows; pass the most of one")
    return sequences


def check_pages(
    table: torch.Tensor, lengths: torch.Tensor, longest: int | None, page: int, pages: int, queries: torch.Tensor,
    name: str = "table", every: int = 1,
) -> None:  # fmt: skip
    """Refuses a ``table [B, columns]`` whose rows are too short for ``lengths [B]`` tokens of ``queries [B, ...]``.

    Args:
        longest: the largest length, which is judged by itself where the lengths cannot be read.
        page, pages: entries of a page, and how many pages there are. every: tokens per entry.
    """
    check("lengths", lengths, (len(queries),), INT32, queries)
    check(name, table, (len(queries), None), INT32, queries)
    room = table.shape[1] * page
    if readable(lengths) and len(lengths):
        found = int(lengths.max())
        if longest is not None and found > longest:
            raise InputError(f"longest: {longest}, and a sequence has {found} tokens; pass the largest of lengths")
        longest = found
        if int(lengths.min()) < 0:
            raise InputError(f"lengths: {int(lengths.min())} is negative; an idle row has 0")
    if longest is not None and longest // every > room:
        raise InputError(f"{name}: rows of {table.shape[1]} pages hold {room}, and the longest sequence has {longest // every}")
    check_indices(name, table, pages)

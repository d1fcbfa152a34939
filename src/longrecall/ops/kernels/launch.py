"""What every kernel file shares: how operands are rounded, products under Triton's interpreter, block sizes.

Kernels round the operands of a matrix product to one dtype and add up in float32. bfloat16 inputs stay bfloat16.
float16 inputs are multiplied as tf32, which holds every float16 and has float32's range, so a large state cannot
overflow. float32 inputs are multiplied as three products of tf32 each, or as one where torch is told that this is good
enough (`torch.set_float32_matmul_precision`).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from longrecall.ops.execution import interpreting_triton, may_prefetch
from longrecall.ops.kernels import dependent_launch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Arithmetic:
    """The dtype to which operands of products are rounded, and how tl.dot treats float32."""

    dtype: torch.dtype
    """torch.bfloat16 or torch.float32; also the dtype of states and scores that wait in memory for a product."""
    precision: str
    """`input_precision` of tl.dot: "ieee", "tf32" or "tf32x3"."""

    def constants(self) -> dict[str, Any]:
        """The constexpr arguments that `product` needs."""
        dot = tl.bfloat16 if self.dtype == torch.bfloat16 else tl.float32
        return {"DOT": dot, "UPCAST": interpreting(), "PRECISION": self.precision}


def interpreting() -> bool:
    """Whether kernels run in Triton's CPU interpreter; decided by TRITON_INTERPRET when they are defined."""
    return interpreting_triton()


def arithmetic(dtype: torch.dtype) -> Arithmetic:
    """How to multiply inputs of this dtype (bfloat16, float16 or float32)."""
    if dtype == torch.bfloat16:
        return Arithmetic(torch.bfloat16, "ieee")
    loose = dtype == torch.float16 or torch.get_float32_matmul_precision() != "highest"
    return Arithmetic(torch.float32, "ieee" if interpreting() else "tf32" if loose else "tf32x3")


MOST_ROWS = 2**16 - 1
"""Programs along the second and third axis of a grid at most."""


def why_not_tensors(*tensors: Tensor) -> str | None:
    """Why no kernel can take these tensors, in words; None = device and dtypes are fine."""
    for x in tensors:
        if x.dtype not in DTYPES:
            return f"only float32, float16 and bfloat16 are supported, not {str(x.dtype).removeprefix('torch.')}"
        if x.device.type != "cuda" and not interpreting():
            return f"the tensors must be on a CUDA device, not on {x.device.type}"
    return None


def block(size: int, largest: int) -> int:
    """The block width for `size` channels: a power of two between 16, the least of tl.dot, and `largest`."""
    return int(max(16, min(largest, triton.next_power_of_2(size))))


def product_block(size: int, largest: int, dtype: torch.dtype) -> int:
    """As `block`, for an operand of a product in `dtype`: on a GPU its rows have at least 128 bytes.

    Triton 3.6 computes products of narrower tiles wrongly on Hopper. What is past `size` is masked.
    """
    least = 16 if interpreting() else 128 // dtype.itemsize
    return max(least, block(size, largest))


def processors(x: Tensor) -> int:
    """Multiprocessors of the device of `x`; 1 for the interpreter."""
    return _processors(x.device) if x.is_cuda else 1


@functools.cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def walkers(x: Tensor, tiles: int, groups: int, each: int) -> int:
    """Programs that share `tiles` tiles, `groups` times side by side: in all about `each` for each multiprocessor."""
    return int(max(1, min(each * processors(x) // groups, tiles)))


LEAST_CHUNKS = 4
"""Chunks of a segment at least: a launch more takes as long as walking some."""

PROGRAMS = 2
"""Programs of a walk per multiprocessor up to which its sequence is cut."""


def segments(programs: int, chunks: int, processors: int, *, products: bool = False) -> int:
    """Into how many segments, walked side by side, to cut a sequence of `chunks` that `programs` walk in one piece.

    A segment has ceil(chunks / segments) chunks, the last one the rest: one at least. `products`: joining segments
    takes a matrix product for each of them, one after the other. Those and the chunks of a segment, chunks / segments,
    add up: least where both are alike.
    """
    wanted = min(PROGRAMS * processors // programs, chunks // LEAST_CHUNKS)
    wanted = min(wanted, math.isqrt(chunks)) if products else wanted
    return int(triton.cdiv(chunks, triton.cdiv(chunks, max(1, wanted))))


# Sizes that vary from call to call, or say nothing about alignment: a kernel is not compiled anew for their values.
VARYING = ["B", "T", "N", "first", "chunks", "segments", "Hk", "Hv", "R", "P"]


MOST_KINDS = 1024
"""Kinds of arguments that a kernel remembers; then it begins anew, as lengths may differ with every call."""


def kernel(function: Any) -> Any:
    """triton.jit without compiling anew for other values of the sizes in `VARYING`, and with cheaper launches."""
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    options = {"do_not_specialize": [name for name in VARYING if name in names]}
    if interpreting():
        return triton.jit(function, **options)
    made = Kernel(function, **options)
    return made if why_not_remembered(made) is None else triton.jit(function, **options)


def why_not_remembered(made: Kernel) -> str | None:
    """Why the launches of a kernel are left to Triton's own way, in words; None = `Kernel` knows the Triton installed.

    What `Kernel` builds on is no public interface and may change with any release of Triton. So what is used is looked
    for, not a version; where something is missing Triton launches its kernels itself, more slowly.
    """
    missing = [name for name in ("run", "arg_names", "signature") if not hasattr(made, name)]
    missing += [name for name in ("launch_enter_hook", "launch_exit_hook") if not hasattr(triton.knobs.runtime, name)]
    return f"Triton {triton.__version__} has no {', '.join(missing)}" if missing else None


def can_start(compiled: Any, grid: tuple[int, ...], args: tuple[Any, ...]) -> bool:
    """Whether `start` knows how to launch what Triton compiled."""
    if any(not hasattr(compiled, name) for name in ("run", "function", "packed_metadata")):
        return False
    try:
        taken = inspect.signature(compiled.run)
    except (TypeError, ValueError):
        # Written in C: it does not say what it takes.
        return callable(compiled.run)
    try:
        taken.bind(*(*grid, 1, 1)[:3], 0, None, None, None, None, None, *args)
    except TypeError:
        return False
    return True


class Kernel(triton.JITFunction):  # type: ignore[misc]
    """A kernel that remembers what it launched for arguments of a kind, and launches that without looking it up.

    Triton's own launch looks at the environment, makes a string of all options and binds every argument anew. Arguments
    are of one kind where types, dtypes, integers, constants and what addresses are modulo 16 are the same: Triton
    compiles the same code for them.
    """

    def __init__(self, function: Any, **options: Any) -> None:
        super().__init__(function, **options)
        self.places: dict[tuple[type, ...], tuple[Any, Any]] = {}
        self.remembered: dict[Any, tuple[Any, tuple[Any, ...]]] = {}
        self.early = dependent_launch.CONSTANT in getattr(self, "arg_names", ())

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return functools.partial(self.launch, grid)

    def launch(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        """Run on the current device: all arguments by position, all constants by name."""
        types = tuple(map(type, args))
        places = self.places.get(types)
        if places is None:
            places = self.places[types] = (_getter(types, Tensor), _getter(types, int))
        tensors, integers = places[0](args), places[1](args)
        kind = [(x.dtype, x.data_ptr() % 16) for x in tensors]
        device = torch.cuda.current_device()
        prefetch = self.early and may_prefetch()
        key = (types, integers, *kind, *constants.items(), device, prefetch)
        found = self.remembered.get(key)
        if found is not None:
            compiled, values = found
            start(compiled, device, (*grid, 1, 1)[:3], *args, *values)
            return
        if len(self.remembered) >= MOST_KINDS:
            self.remembered.clear()
        if self.early:
            constants |= dependent_launch.options(device, prefetch=prefetch)
        compiled = self.run(*args, grid=grid, warmup=False, **constants)
        rest = [self.signature.parameters[name] for name in self.arg_names[len(args) :]]
        values = tuple(constants.get(one.name, one.default) for one in rest)
        if can_start(compiled, grid, (*args, *values)):
            self.remembered[key] = (compiled, values)


def start(compiled: Any, device: int, grid: tuple[int, ...], *args: Any) -> None:
    """Launch a compiled kernel on the current device and its stream, with constants among the arguments.

    Triton's own way makes a dictionary for hooks and calls both of them, also where nobody put any there.
    """
    runtime = triton.knobs.runtime
    hooks = (runtime.launch_enter_hook, runtime.launch_exit_hook)
    if any(getattr(hook, "calls", hook) for hook in hooks):
        compiled[grid](*args)
        return
    stream = torch._C._cuda_getCurrentRawStream(device)
    compiled.run(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *args)


def _getter(types: tuple[type, ...], kind: type) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """What picks the arguments of `kind` out of arguments of these types."""
    places = [index for index, found in enumerate(types) if issubclass(found, kind)]
    if len(places) > 1:
        return operator.itemgetter(*places)
    return lambda args: tuple(args[place] for place in places)


@triton.jit
def product(a, b, total, DOT: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr):
    """total + a @ b, operands rounded to DOT; then upcast for the interpreter, which multiplies bfloat16 wrongly."""
    a = a.to(DOT)
    b = b.to(DOT)
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, total, input_precision=PRECISION)


@triton.jit
def softmax_step(
    logits, value, largest, total, mixed, DOT: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """A running softmax after more logits ``[M, N]``, -inf = not seen, and their values ``[N, D]``.

    Its parts: the largest logit ``[M]``, the sum of exp(logit - largest), the sum of values ``[M, D]`` weighed by that.
    """
    larger = tl.maximum(largest, tl.max(logits, 1))
    # Nothing seen yet: -inf less -inf has no value.
    base = tl.where(larger == float("-inf"), 0.0, larger)
    kept, shares = tl.exp(largest - base), tl.exp(logits - base[:, None])
    total = total * kept + tl.sum(shares, 1)
    mixed = product(shares, value, mixed * kept[:, None], DOT, UPCAST, PRECISION)
    return larger, total, mixed


@triton.jit
def suffix_sum(x):
    """Sums of x from each row to the last, along axis 0."""
    return tl.sum(x, 0, keep_dims=True) - tl.cumsum(x, 0) + x


def on_device(x: Tensor) -> Any:
    """Triton launches on the current device, which need not be the one of `x`: a context that makes it so."""
    here = not x.is_cuda or x.get_device() == torch.cuda.current_device()
    return contextlib.nullcontext() if here else torch.cuda.device(x.device)

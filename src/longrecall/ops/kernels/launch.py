"""What every kernel file shares: how operands are rounded, products under Triton's interpreter, block sizes.

Kernels round the operands of a matrix product to one dtype and add up in float32. bfloat16 inputs stay bfloat16.
float16 inputs are multiplied as tf32. It holds every float16 number and has the range of float32, so a large state
cannot overflow. A product of float32 inputs is computed as three products in tf32, or as one where torch was told that
this is precise enough (`torch.set_float32_matmul_precision`).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import operator
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from longrecall.ops.execution import interpreting_triton, may_prefetch
from longrecall.ops.kernels import dependent_launch
from longrecall.ops.readable import LOWEST_ADDRESS, check_arguments

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Arithmetic:
    """The dtype to which operands of products are rounded, and how tl.dot treats float32."""

    dtype: torch.dtype
    """torch.bfloat16 or torch.float32; also the dtype in which states and scores are stored for a later product."""
    precision: str
    """`input_precision` of tl.dot: "ieee", "tf32" or "tf32x3"."""

    def constants(self) -> dict[str, Any]:
        """The constexpr arguments that `product` needs."""
        dot = tl.bfloat16 if self.dtype == torch.bfloat16 else tl.float32
        return {"DOT": dot, "UPCAST": interpreting(), "PRECISION": self.precision}


def interpreting() -> bool:
    """Whether kernels run in Triton's CPU interpreter. TRITON_INTERPRET decides it when a kernel is defined."""
    return interpreting_triton()


def arithmetic(dtype: torch.dtype) -> Arithmetic:
    """How to multiply inputs of this dtype (bfloat16, float16 or float32)."""
    if dtype == torch.bfloat16:
        return Arithmetic(torch.bfloat16, "ieee")
    loose = dtype == torch.float16 or torch.get_float32_matmul_precision() != "highest"
    return Arithmetic(torch.float32, "ieee" if interpreting() else "tf32" if loose else "tf32x3")


MOST_ROWS = 2**16 - 1
"""The most programs along the second or third axis of a grid."""


def why_not_tensors(*tensors: Tensor) -> str | None:
    """Why no kernel can take these tensors, in words; None = device and dtypes are fine."""
    for x in tensors:
        if x.dtype not in DTYPES:
            return f"only float32, float16 and bfloat16 are supported, not {str(x.dtype).removeprefix('torch.')}"
        if x.device.type != "cuda" and not interpreting():
            return f"the tensors must be on a CUDA device, not on {x.device.type}"
    return None


def block(size: int, largest: int) -> int:
    """The block width for `size` channels: a power of two from 16, the least that tl.dot takes, to `largest`."""
    return int(max(16, min(largest, triton.next_power_of_2(size))))


def product_block(size: int, largest: int, dtype: torch.dtype) -> int:
    """As `block`, for an operand of a product in `dtype`: on a GPU its rows have at least 128 bytes.

    Triton 3.6 computes products of narrower tiles wrongly on Hopper. The caller masks the columns past `size`.
    """
    least = 16 if interpreting() else 128 // dtype.itemsize
    return max(least, block(size, largest))


def processors(x: Tensor) -> int:
    """Multiprocessors of the device of `x`; 1 for the interpreter."""
    return _processors(x.device) if x.is_cuda else 1


@functools.cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def shared_memory(x: Tensor) -> int:
    """Bytes of shared memory that a program can have on the device of `x`; the interpreter has no limit."""
    return _shared_memory(x.device) if x.is_cuda else sys.maxsize


@functools.cache
def _shared_memory(device: torch.device) -> int:
    properties = torch.cuda.get_device_properties(device)
    # What a program gets if it asks for more than the usual 48 KiB; AMD's GPUs know no such request.
    return int(getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block))


def walkers(x: Tensor, tiles: int, groups: int, each: int) -> int:
    """How many programs share `tiles` tiles, for each of `groups` groups: about `each` per multiprocessor in all."""
    return int(max(1, min(each * processors(x) // groups, tiles)))


LEAST_CHUNKS = 4
"""The fewest chunks of a segment: one more launch takes as long as walking over a few chunks."""

PROGRAMS = 2
"""A sequence is cut into segments while a walk has at most this many programs per multiprocessor."""


def segments(programs: int, chunks: int, processors: int, *, products: bool = False) -> int:
    """Number of segments into which a sequence is cut, so that they can be walked side by side.

    `programs` would walk the `chunks` of the sequence in one piece. A segment has ceil(chunks / segments) chunks; the
    last one has the rest, at least one. With `products`, joining the segments takes one matrix product for each, one
    after the other. The time then grows with segments + chunks / segments, which is least where both are equal.
    """
    wanted = min(PROGRAMS * processors // programs, chunks // LEAST_CHUNKS)
    wanted = min(wanted, math.isqrt(chunks)) if products else wanted
    return int(triton.cdiv(chunks, triton.cdiv(chunks, max(1, wanted))))


# Sizes that vary from call to call, or that say nothing about alignment. No kernel is compiled anew for their values.
VARYING = ["B", "T", "N", "first", "chunks", "segments", "Hk", "Hv", "R", "P"]


MOST_KINDS = 1024
"""Kinds of arguments that a kernel remembers. Lengths may differ with every call, so then it forgets all of them."""


def kernel(function: Any) -> Any:
    """triton.jit with cheaper launches, and without a new compilation for other values of the sizes in `VARYING`."""
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    options = {"do_not_specialize": [name for name in VARYING if name in names]}
    if interpreting():
        return _interpreted(function, options)
    made = Kernel(function, **options)
    return made if why_not_remembered(made) is None else FusedKernel(function, **options)


def _interpreted(function: Any, options: dict[str, Any]) -> Any:
    """A kernel that Triton's interpreter runs, with its arguments checked."""
    made = triton.jit(function, **options)
    run, name = made.run, function.__name__

    def checked(*args: Any, **constants: Any) -> Any:
        check_arguments(name, zip(made.arg_names, args, strict=False))
        return run(*args, **constants)

    made.run = checked
    return made


def why_not_remembered(made: Kernel) -> str | None:
    """Why Triton itself has to launch a kernel, in words; None = `Kernel` can do so with the installed Triton.

    `Kernel` uses parts of Triton that are not public and may change with any release. So it looks for these parts, not
    for a version. Where one is missing, Triton launches its kernels itself, which is slower.
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
        # It is written in C, so its signature cannot be read.
        return callable(compiled.run)
    try:
        taken.bind(*(*grid, 1, 1)[:3], 0, None, None, None, None, None, *args)
    except TypeError:
        return False
    return True


class FusedKernel(triton.JITFunction):  # type: ignore[misc]
    """A kernel in which a product and a sum may become one instruction with one rounding; its arguments are checked.

    Fusing was the default of every Triton up to 3.9. 3.10 leaves it out unless a launch asks for it.
    """

    def run(self, *args: Any, **options: Any) -> Any:
        self._check(args)
        return super().run(*args, **({"enable_fp_fusion": True} | options))

    def _check(self, args: tuple[Any, ...]) -> None:
        check_arguments(self.fn.__name__, zip(self.arg_names, args, strict=False))


class Kernel(FusedKernel):
    """A kernel that remembers the compiled code for each kind of arguments, and launches it directly.

    Triton's own launch reads the environment, makes a string of all options and binds every argument anew. Arguments
    are of one kind if their types, dtypes, integers, constants and addresses modulo 16 are the same. Triton compiles
    the same code for all arguments of one kind.
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
            self._check(args)
            places = self.places[types] = (_getter(types, Tensor), _getter(types, int))
        tensors, integers = places[0](args), places[1](args)
        kind = [(x.dtype, (address := x.data_ptr()) % 16, address < LOWEST_ADDRESS) for x in tensors]
        device = torch.cuda.current_device()
        prefetch = self.early and may_prefetch()
        key = (types, integers, *kind, *constants.items(), device, prefetch)
        found = self.remembered.get(key)
        if found is not None:
            compiled, values = found
            start(compiled, device, (*grid, 1, 1)[:3], *args, *values)
            return
        # Types, and whether addresses are suspicious, belong to the kind: what is remembered was found to be whole.
        self._check(args)
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
    """Launch a compiled kernel on the current device and its stream; the arguments include the constants.

    Triton's own launch makes a dictionary for its two hooks and calls both, even where nobody has set any.
    """
    runtime = triton.knobs.runtime
    hooks = (runtime.launch_enter_hook, runtime.launch_exit_hook)
    if any(getattr(hook, "calls", hook) for hook in hooks):
        compiled[grid](*args)
        return
    stream = torch._C._cuda_getCurrentRawStream(device)
    compiled.run(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *args)


def _getter(types: tuple[type, ...], kind: type) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """A function that picks the arguments of `kind` out of arguments of these types."""
    places = [index for index, found in enumerate(types) if issubclass(found, kind)]
    if len(places) > 1:
        return operator.itemgetter(*places)
    return lambda args: tuple(args[place] for place in places)


@triton.jit
def product(a, b, total, DOT: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr):
    """total + a @ b, operands rounded to DOT; in float32 in the interpreter, which multiplies bfloat16 wrongly."""
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
    """The running softmax after more logits ``[M, N]`` and their values ``[N, D]``; a logit of -inf does not count.

    It has three parts: the largest logit ``[M]``, the sum of exp(logit - largest) ``[M]``, and the sum of the values
    ``[M, D]``, weighted by the same exponentials.
    """
    larger = tl.maximum(largest, tl.max(logits, 1))
    # Where no logit has counted yet, -inf - (-inf) would be NaN.
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
    """A context in which the device of `x` is the current one, on which Triton launches."""
    here = not x.is_cuda or x.get_device() == torch.cuda.current_device()
    return contextlib.nullcontext() if here else torch.cuda.device(x.device)

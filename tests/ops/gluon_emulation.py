"""Kernels in Gluon run as plain Python on torch tensors: what they compute, without layouts, threads or a GPU.

Triton's interpreter has no Gluon. Here a kernel's source is executed with stand-ins for the functions it calls. Shared
memory starts as NaN, so that what nothing wrote shows. What is not emulated, a function that no kernel used so far,
fails by its name.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

SOURCES = Path(__file__).parents[2] / "src/longrecall/ops/triton/hopper"


class Layout:
    """Any layout: it says where numbers lie, not which they are."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.value = self


class Index(int):
    """A program's place in the grid."""

    def to(self, _: torch.dtype) -> int:
        return int(self)


class Pointer:
    """Places in a flat tensor."""

    def __init__(self, numbers: Tensor, place: Any = 0) -> None:
        self.numbers, self.place = numbers, place

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.numbers, self.place + more)


class Shared:
    """A view of shared memory."""

    def __init__(self, view: Tensor) -> None:
        self.view = view

    def index(self, place: int) -> Shared:
        return Shared(self.view[place])

    def slice(self, first: int, count: int, dim: int = 0) -> Shared:
        return Shared(self.view.narrow(dim, first, count))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.view.permute(order))

    def load(self, _: Layout) -> Tensor:
        return self.view.clone()

    def store(self, value: Tensor) -> None:
        assert value.shape == self.view.shape and value.dtype == self.view.dtype
        self.view.copy_(value)

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], _: Layout) -> Shared:
        return Shared(self.view.view(dtype).view(shape))


def _load(pointer: Pointer, mask: Tensor | None = None, other: float = 0.0) -> Tensor:
    places = torch.as_tensor(pointer.place)
    if mask is None:
        return pointer.numbers[places]
    return torch.where(mask, pointer.numbers[torch.where(mask, places, 0)], torch.tensor(other).to(pointer.numbers))


def _store(pointer: Pointer, value: Tensor) -> None:
    pointer.numbers[torch.as_tensor(pointer.place)] = value.to(pointer.numbers.dtype)


def _allocate(dtype: torch.dtype, shape: list[int], _: Layout, value: Tensor | None = None) -> Shared:
    return Shared(torch.full(shape, float("nan"), dtype=dtype) if value is None else value.to(dtype).clone())


def _inline(asm: str, _: str, args: list[Tensor], **__: Any) -> tuple[Tensor, Tensor]:
    """The one piece of assembly in use: a number as a sum of two bfloat16."""
    assert asm.count("cvt.rn.bf16x2.f32") == 2 and asm.count("sub.f32") == 2
    high = args[0].bfloat16()
    return high, (args[0] - high.float()).bfloat16()


def kernel(file: str, name: str) -> Callable[..., None]:
    """A kernel of ops/triton/hopper: a function of grid, tensors and sizes, then constants by name."""
    program, programs = [0, 0, 0], [1, 1, 1]
    gl = SimpleNamespace(
        constexpr=lambda value: value,
        **dict.fromkeys(("NVMMADistributedLayout", "DotOperandLayout", "SliceLayout", "BlockedLayout"), Layout),
        SwizzledSharedLayout=Layout,
        **{kind: getattr(torch, kind) for kind in ("float32", "bfloat16", "int64")},
        program_id=lambda axis: Index(program[axis]),
        num_programs=lambda axis: programs[axis],
        static_range=range,
        arange=lambda first, last, _=None: torch.arange(first, last),
        zeros=lambda shape, dtype, _=None: torch.zeros(shape, dtype=dtype),
        where=torch.where,
        exp2=torch.exp2,
        maximum=lambda x, least: x.clamp(min=least),
        associative_scan=lambda x, axis, _: x.cumsum(axis),
        join=lambda a, b: torch.stack((a, b), -1),
        convert_layout=lambda x, _, **__: x,
        thread_barrier=lambda: None,
        allocate_shared_memory=_allocate,
        inline_asm_elementwise=_inline,
        load=_load,
        store=_store,
    )
    copies = SimpleNamespace(
        async_copy_global_to_shared=lambda to, pointer, mask=None: to.store(_load(pointer, mask)),
        commit_group=lambda: None,
        wait_group=lambda _: None,
    )
    names = {
        "gl": gl,
        "gluon": SimpleNamespace(jit=lambda function: function),
        "gluon_kernel": lambda function: function,
        "async_copy": copies,
        "mma_v2": lambda a, b, c: c + a.float() @ b.float(),
    }
    lines = (SOURCES / file).read_text().splitlines()
    exec("\n".join(line for line in lines if not line.startswith("from ")), names)

    def run(grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        programs[:] = (*grid, 1, 1)[:3]
        given = [Pointer(x.view(-1)) if isinstance(x, Tensor) else x for x in args]
        for place in itertools.product(*map(range, programs)):
            program[:] = place
            names[name](*given, **constants)

    return run

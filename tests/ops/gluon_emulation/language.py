"""Gluon's functions on tensors. Layouts say where numbers lie, not which they are: they are taken and left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.ops.gluon_emulation import ptx
from tests.ops.gluon_emulation.hazards import Hazard, Names
from tests.ops.gluon_emulation.memory import Chain, Pointer
from tests.ops.gluon_emulation.registers import Constant, Register, Scalar
from tests.ops.gluon_emulation.shared import Traffic


class Layout:
    """Any layout, and as a constant."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.value = self

    @classmethod
    def get_default_for(cls, *_: Any, **__: Any) -> Layout:
        return cls()


LAYOUTS = (
    "BlockedLayout", "SliceLayout", "DotOperandLayout", "NVMMADistributedLayout", "NVMMASharedLayout",
    "SwizzledSharedLayout",
)  # fmt: skip


def _arange(first: int, last: int, layout: Any = None) -> Register:
    count = last - first
    if count & (count - 1):
        raise Hazard(f"a range of {count}: Triton takes powers of two alone")
    return torch.arange(first, last).as_subclass(Register)


def _where(condition: Any, yes: Any, no: Any) -> Any:
    return torch.where(torch.as_tensor(condition), yes, no)


def _between(least: bool) -> Callable[[Any, Any], Any]:
    """`minimum` or `maximum`, of integers or tiles."""

    def choose(a: Any, b: Any) -> Any:
        if isinstance(a, int) and isinstance(b, int):
            return Scalar(min(a, b) if least else max(a, b))
        return torch.minimum(*map(torch.as_tensor, (a, b))) if least else torch.maximum(*map(torch.as_tensor, (a, b)))

    return choose


def _scan(x: Tensor, axis: int, combine: Callable[[Any, Any], Any], reverse: bool = False) -> Tensor:
    parts = list(x.unbind(axis))
    parts = parts[::-1] if reverse else parts
    for place in range(1, len(parts)):
        parts[place] = combine(parts[place - 1], parts[place])
    return torch.stack(parts[::-1] if reverse else parts, axis)


def _reduce(x: Any, axis: int, combine: Callable[..., Any]) -> Any:
    """By halves, of a tile or of several at once."""
    tiles = x if isinstance(x, tuple) else (x,)
    parts = [tuple(one) for one in zip(*(tile.unbind(axis) for tile in tiles), strict=True)]
    while len(parts) > 1:
        joined = [combine(*a, *b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
        parts = [one if isinstance(one, tuple) else (one,) for one in joined]
    return parts[0] if isinstance(x, tuple) else parts[0][0]


def _assembly(asm: str, constraints: str, args: list[Any], *, dtype: Any, is_pure: bool, pack: int) -> Any:
    return ptx.run(asm, constraints, args, dtype, pack)


def language(traffic: Traffic, chain: Chain, program: list[int], programs: list[int]) -> dict[str, Names]:
    """Gluon's modules by name, for the program at that place of the grid."""
    gl = Names(
        "gl",
        **dict.fromkeys(LAYOUTS, Layout),
        **{kind: getattr(torch, kind) for kind in ("float32", "bfloat16", "int32", "int64", "uint32")},
        constexpr=lambda value: Constant(value) if type(value) is int else value,
        program_id=lambda axis: Scalar(program[axis]),
        num_programs=lambda axis: Scalar(programs[axis]),
        static_range=range,
        arange=_arange,
        zeros=lambda shape, dtype, layout=None: torch.zeros(shape, dtype=dtype).as_subclass(Register),
        zeros_like=torch.zeros_like,
        full_like=torch.full_like,
        where=_where,
        exp=torch.exp,
        exp2=torch.exp2,
        rsqrt=torch.rsqrt,
        reduce=_reduce,
        minimum=_between(True),
        maximum=_between(False),
        sum=torch.sum,
        reshape=torch.reshape,
        expand_dims=torch.unsqueeze,
        associative_scan=_scan,
        join=lambda a, b: torch.stack((a, b), -1),
        split=lambda x: x.unbind(-1),
        convert_layout=lambda x, layout, assert_trivial=False: x.clone(),
        allocate_shared_memory=traffic.allocate,
        inline_asm_elementwise=_assembly,
        load=Pointer.load,
        store=Pointer.store,
    )
    copies = Names(
        "async_copy",
        commit_group=traffic.commit, wait_group=traffic.wait,
    )  # fmt: skip
    ampere = {"async_copy": copies, "mma_v2": _small_product}
    hopper = {
        "fence_async_shared": traffic.fence, "warpgroup_mma": traffic.multiply,
        "warpgroup_mma_wait": traffic.wait_products,
    }  # fmt: skip
    package = "triton.experimental.gluon"
    return {
        "triton.experimental": Names("triton.experimental", gluon=Names("gluon", jit=lambda function: function)),
        package: Names("gluon", language=gl),
        "triton.language.extra.cuda": Names("cuda", gdc_wait=chain.wait, gdc_launch_dependents=chain.let_next),
        f"{package}.language.nvidia.ampere": Names("ampere", **ampere),
        f"{package}.language.nvidia.hopper": Names("hopper", **ampere, **hopper),
    }


def _small_product(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """A product of one warp, of bfloat16 in registers."""
    if {a.dtype, b.dtype} != {torch.bfloat16} or c.dtype != torch.float32 or c.shape != (len(a), b.shape[1]):
        raise Hazard(f"{a.dtype} {list(a.shape)} times {list(b.shape)} onto {list(c.shape)}")
    return c + a.float() @ b.float()

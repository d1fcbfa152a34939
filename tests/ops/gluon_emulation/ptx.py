"""Inline assembly, an instruction after the other: registers are 32 bits of all lanes at once.

Approximate instructions are computed to float32's precision. Inputs of less than 32 bits come packed, the first of them
in the low half; shuffles take the last axis of a tile for the 32 lanes of a warp.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.ops.gluon_emulation.hazards import Hazard
from tests.ops.gluon_emulation.registers import Register

LANES = 32

LEAST = 2.0**-126
"""The least number that `.ftz` does not take for 0."""


def _float(bits: Tensor) -> Tensor:
    return bits.contiguous().view(torch.float32)


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32)


def _flush(x: Tensor) -> Tensor:
    return torch.where(x.abs() < LEAST, 0.0, x)


def _on_floats(function: Callable[..., Tensor], flushed: bool = False) -> Callable[..., Tensor]:
    if flushed:
        return lambda *x: _bits(_flush(function(*(_flush(_float(one)) for one in x))))
    return lambda *x: _bits(function(*map(_float, x)))


def _pair(high: Tensor, low: Tensor) -> Tensor:
    """Two numbers rounded to bfloat16 in one register."""
    return _bits(torch.stack((_float(low), _float(high)), -1).bfloat16())[..., 0]


def _from_lane(x: Tensor, lane: Tensor) -> Tensor:
    if x.shape[-1] != LANES:
        raise Hazard(f"a shuffle of {list(x.shape)}, which has no axis of {LANES} lanes")
    return x.gather(-1, lane.long().expand(x.shape))


def _across(x: Tensor, mask: Tensor, *rest: Tensor) -> Tensor:
    _everyone(*rest)
    return _from_lane(x, torch.arange(LANES) ^ mask)


def _from_one(x: Tensor, lane: Tensor, *rest: Tensor) -> Tensor:
    _everyone(*rest)
    return _from_lane(x, lane.expand(LANES))


def _everyone(bounds: Tensor, members: Tensor) -> None:
    if int(bounds) != LANES - 1 or int(members) != -1:
        raise NotImplementedError("shuffles within parts of a warp are not emulated")


INSTRUCTIONS: dict[str, Callable[..., Tensor]] = {
    "mov.b32": lambda x: x,
    "mov.u32": lambda x: x,
    "and.b32": torch.bitwise_and,
    "shl.b32": torch.bitwise_left_shift,
    "setp.ne.u32": torch.ne,
    "selp.b32": lambda yes, no, p: torch.where(p, yes, no),
    "shfl.sync.bfly.b32": _across,
    "shfl.sync.idx.b32": _from_one,
    "add.f32": _on_floats(torch.add),
    "sub.f32": _on_floats(torch.sub),
    "mul.f32": _on_floats(torch.mul),
    # Of NaN and a number it takes the number.
    "min.f32": _on_floats(torch.fmin),
    "ex2.approx.ftz.f32": _on_floats(torch.exp2, flushed=True),
    "lg2.approx.ftz.f32": _on_floats(torch.log2, flushed=True),
    "rsqrt.approx.ftz.f32": _on_floats(torch.rsqrt, flushed=True),
    "rcp.approx.ftz.f32": _on_floats(torch.reciprocal, flushed=True),
    "tanh.approx.f32": _on_floats(torch.tanh),
    "cvt.rn.bf16x2.f32": _pair,
}
"""What each instruction makes of its operands' bits."""


@functools.cache
def _parse(asm: str) -> tuple[tuple[str, str, tuple[str, ...]], ...]:
    """Instruction, result and operands of every line but declarations."""
    lines = (line.strip() for line in asm.strip().removeprefix("{").removesuffix("}").split(";"))
    parsed = []
    for line in lines:
        if not line or line.startswith(".reg"):
            continue
        name, _, rest = line.partition(" ")
        if name not in INSTRUCTIONS:
            raise NotImplementedError(f"the instruction {name} is not emulated: see tests/ops/gluon_emulation/ptx.py")
        result, *operands = (part.strip() for part in rest.split(","))
        parsed.append((name, result, tuple(operands)))
    return tuple(parsed)


def _check_registers(asm: str, constraints: list[str], results: int) -> None:
    """A result that is written before the last input is read needs a register of its own, "&"."""
    inputs = {f"${place}" for place in range(results, len(constraints))}
    lines = _parse(asm)
    last = max((place for place, (_, _, used) in enumerate(lines) if inputs & set(used)), default=-1)
    for place, constraint in enumerate(constraints):
        if constraint.startswith("=") != (place < results):
            raise Hazard(f"{results} results, but the constraints are {','.join(constraints)}")
        first = next((line for line, (_, to, _) in enumerate(lines) if to == f"${place}"), len(lines))
        if place < results and "&" not in constraint and first < last:
            raise Hazard(f"${place} is written before all inputs are read, yet may share a register with one")


def _immediate(text: str) -> Tensor:
    bits = int(text[2:], 16) if text.startswith("0f") else int(text, 0)
    return torch.tensor(bits - 2**32 if bits >= 2**31 else bits, dtype=torch.int32)


def _unpacked(x: Tensor, pack: int) -> list[Tensor]:
    """The registers of an input: `pack` numbers beside each other."""
    if x.shape[-1] % pack if x.dim() else pack > 1:
        raise Hazard(f"{list(x.shape)} cannot be taken {pack} at a time")
    groups = x.unflatten(-1, (-1, pack)) if pack > 1 else x[..., None]
    if x.element_size() * pack % 4:
        raise Hazard(f"{pack} numbers of {x.dtype} do not fill registers")
    return list(_bits(groups).unbind(-1))


def run(asm: str, constraints: str, args: list[Tensor], dtype: Any, pack: int) -> Any:
    """`gl.inline_asm_elementwise`: a result, or a tuple of them where `dtype` is one."""
    kinds = dtype if isinstance(dtype, tuple) else (dtype,)
    given = [register for x in args for register in _unpacked(x.as_subclass(Tensor), pack)]
    each = [kind.itemsize * pack // 4 for kind in kinds]
    required = constraints.replace(" ", "").split(",")
    if len(required) != sum(each) + len(given):
        raise Hazard(f"{sum(each)} results and {len(given)} inputs, but the constraints are {constraints}")
    _check_registers(asm, required, sum(each))
    found = {f"${place}": x for place, x in enumerate(given, sum(each))} | {"%laneid": torch.arange(LANES)}
    for name, result, operands in _parse(asm):
        values = [found[one] if one in found else _immediate(one) for one in operands]
        made = INSTRUCTIONS[name](*values)
        found[result] = made if made.dtype == torch.bool else made.int()
    results, place = [], 0
    for kind, count in zip(kinds, each, strict=True):
        registers = torch.stack([found[f"${place + one}"] for one in range(count)], -1)
        results.append(registers.view(kind).flatten(-2) if pack > 1 else registers.view(kind)[..., 0])
        place += count
    tiles = tuple(x.as_subclass(Register) for x in results)
    return tiles if isinstance(dtype, tuple) else tiles[0]

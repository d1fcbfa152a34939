"""Kernels in Gluon run as plain Python on torch tensors: what they compute, without layouts, threads or a GPU.

Triton's interpreter has no Gluon, and Gluon renames its functions from release to release. Here the source of a module
of Gluon kernels is executed with stand-ins for what it imports from Gluon, programs one after the other. Copies and
products that run beside the program end only where it waits for them. What a GPU would do only now and then (a result
used too early, a buffer overwritten too late, a barrier or a fence left out, a number that two programs write) raises
`Hazard`. What is not emulated fails by its name.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import inspect
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from longrecall.ops.kernels.dependent_launch import CONSTANT
from tests.ops.gluon_emulation.hazards import Hazard, Names
from tests.ops.gluon_emulation.language import language
from tests.ops.gluon_emulation.memory import NOBODY, Chain, Memory, Pointer
from tests.ops.gluon_emulation.registers import Scalar, scalars
from tests.ops.gluon_emulation.shared import Shared, Traffic

__all__ = ["Hazard", "execute", "install", "load"]

PACKAGE = "longrecall.ops"

SOURCES = Path(__file__).parents[3] / "src" / Path(*PACKAGE.split("."))

OPTIONS = ("num_warps", "maxnreg")
"""Arguments of a launch that are none of the kernel."""

OWNED = "state"
"""The argument that a kernel may read ahead."""


def load(name: str) -> Any:
    """A module of ops/ by its path in it ("delta_rule.hopper.walk") whose kernels, launched as on a GPU, run here."""
    return _Machine().module(name)


def execute(source: str, early: int = 0) -> Any:
    """The same from its text, launched early or not (see longrecall/ops/kernels/dependent_launch.py)."""
    return _Machine(early).execute(source, "<emulated>")


def install(monkeypatch: pytest.MonkeyPatch, early: int = 0) -> list[str]:
    """Have the kernels serve bfloat16 tensors of the CPU wherever they would serve a Hopper GPU's.

    Returns the names of the kernels that have run, in their order. `early` is for those that can be launched so.
    """
    from longrecall.ops.kernels import hopper

    machine = _Machine(early)
    for file in SOURCES.glob("*/hopper/*.py"):
        if "triton.experimental.gluon" in file.read_text():
            name = ".".join(file.relative_to(SOURCES).with_suffix("").parts)
            package = importlib.import_module(f"{PACKAGE}.{name}".rpartition(".")[0])
            monkeypatch.setitem(sys.modules, f"{PACKAGE}.{name}", machine.module(name))
            monkeypatch.setattr(package, file.stem, machine.module(name), raising=False)
    monkeypatch.setattr(hopper, "why_not", lambda x, *_: None if x.dtype == torch.bfloat16 else "not bfloat16")
    return machine.ran


class _Machine:
    """Runs kernels, a program at a time."""

    def __init__(self, early: int = 0) -> None:
        self.ran: list[str] = []
        self.chain = Chain(early)
        self.program, self.programs, self.traffic = [0, 0, 0], [1, 1, 1], Traffic()
        self.modules: dict[str, Any] = language(self.traffic, self.chain, self.program, self.programs)
        ours = {"gluon_kernel": functools.partial(_Kernel, self), "async_load": self.traffic.copy}
        ours |= {"barrier": self.traffic.barrier, "reinterpret": Shared.reinterpret}
        self.modules[f"{PACKAGE}.kernels.gluon"] = Names("gluon", **ours)

    def module(self, name: str) -> Any:
        known = f"{PACKAGE}.{name}"
        if known not in self.modules:
            file = SOURCES / Path(*name.split(".")).with_suffix(".py")
            self.modules[known] = self.execute(file.read_text(), str(file))
        return self.modules[known]

    def execute(self, source: str, file: str) -> Any:
        names = {"__builtins__": {**vars(builtins), "__import__": self.find, "range": scalars}, "__name__": file}
        exec(compile(source, file, "exec", dont_inherit=True), names)
        return SimpleNamespace(**names)

    def find(self, name: str, *args: Any) -> Any:
        """`import` in a kernel's module."""
        if name in self.modules:
            return self.modules[name]
        if name.startswith(f"{PACKAGE}.") and ".hopper." in name:
            return self.module(name.removeprefix(f"{PACKAGE}."))
        return builtins.__import__(name, *args)

    def launch(self, function: Callable[..., None], grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        self.ran.append(function.__name__)
        self.programs[:] = (*grid, 1, 1)[:3]
        memories: dict[int, Memory] = {}
        names = inspect.signature(function).parameters
        given = [self._argument(x, name == OWNED, memories) for name, x in zip(names, args, strict=False)]
        sizes = {name: value for name, value in constants.items() if name not in OPTIONS}
        # Not every kernel can be launched early: the others have waited before they begin.
        chain = self.chain if CONSTANT in names else Chain()
        if CONSTANT in names:
            sizes[CONSTANT] = chain.early
        for number, place in enumerate(itertools.product(*map(range, self.programs))):
            self.program[:] = place
            for memory in memories.values():
                memory.program, memory.chain = number, chain
            self.traffic.begin()
            chain.begin()
            function(*given, **sizes)
            chain.end()
            self.traffic.end()

    def _argument(self, x: Any, owned: bool, memories: dict[int, Memory]) -> Any:
        """An argument as the kernel has it; None stays None. Tensors that begin at one address share their memory."""
        if isinstance(x, Tensor):
            numbers = x.view(-1)
            fresh = Memory(numbers, torch.full(numbers.shape, NOBODY), self.chain)
            memory = memories.setdefault(numbers.data_ptr(), fresh)
            memory.owned |= owned
            return Pointer(memory)
        if isinstance(x, float):
            return float(torch.tensor(x, dtype=torch.float32))
        return None if x is None else Scalar(x)


class _Kernel:
    """A kernel that is launched as on a GPU: `kernel[grid](*tensors_and_sizes, **constants)`."""

    def __init__(self, machine: _Machine, function: Callable[..., None]) -> None:
        self.machine, self.function = machine, function

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self.machine.launch, self.function, grid)

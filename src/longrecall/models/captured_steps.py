"""What a model keeps of captured work: for the tensors that it has now, a few at a time, for one caller at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from longrecall.ops.execution import backend_from_environment
from longrecall.ops.readable import WHOLE

KEPT = 4
"""Captured steps and segments a model keeps, those used last."""

Made = TypeVar("Made")


class CapturedSteps(dict[Any, Any]):
    """Key -> what was captured, for tensors that lie at `where`; a copy of the model starts without any."""

    def __init__(self) -> None:
        super().__init__()
        self.where: tuple[Any, ...] = ()
        self._turn = threading.Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> CapturedSteps:
        return CapturedSteps()

    def __reduce__(self) -> tuple[type[CapturedSteps], tuple[()]]:
        return CapturedSteps, ()

    @contextmanager
    def alone(self) -> Iterator[bool]:
        """Whether nobody else is inside, in this thread or another; who is not alone must leave the steps alone.

        A step has one memory: two who decode by turns in it would read each other's state.
        """
        alone = self._turn.acquire(blocking=False)
        try:
            yield alone
        finally:
            if alone:
                self._turn.release()


def modules_of(model: nn.Module) -> list[nn.Module]:
    """Every module of the model, itself the first; one that is shared may come several times."""
    # Several times as fast as `modules()`: this comes before every text that is generated.
    found: list[nn.Module] = []
    parents: set[nn.Module] = set()
    level = [model]
    while level:
        found += level
        inner = dict.fromkeys([module for module in level if module._modules and module not in parents])
        parents.update(inner)
        level = [child for module in inner for child in module._modules.values() if child is not None]
    return found


def tensors_of(modules: list[nn.Module]) -> list[Tensor]:
    """Every parameter and buffer of these modules themselves; one that is shared comes several times."""
    tables: list[Any] = [module._parameters for module in modules]
    tables += [module._buffers for module in modules]
    return [tensor for table in tables if table for tensor in table.values() if tensor is not None]


def addresses(model: nn.Module) -> tuple[Any, ...]:
    """Where every parameter and buffer lies, and as what: captured work is valid as long as none has changed that."""
    tensors = tensors_of(modules_of(model))
    kinds = [] if set(map(type, tensors)) <= WHOLE else list(map(type, tensors))
    tensors = in_memory(tensors)
    types, shapes = [tensor.dtype for tensor in tensors], [tensor.shape for tensor in tensors]
    # Hundreds of tuples less than the strides of all of them.
    contiguous = list(map(Tensor.is_contiguous, tensors))
    strides = [] if all(contiguous) else list(map(Tensor.stride, tensors))
    return list(map(Tensor.data_ptr, tensors)), kinds, types, shapes, strides


def in_memory(tensors: list[Tensor]) -> list[Tensor]:
    """The same, with what quantised or sharded tensors are made of in their place: these have no memory themselves."""
    if set(map(type, tensors)) <= WHOLE:
        return tensors
    found: list[Tensor] = []
    for tensor in tensors:
        # This comes before every text, and asking such a tensor for anything takes microseconds.
        whole = type(tensor) in WHOLE
        inner = [] if whole else [part for part in vars(tensor).values() if isinstance(part, Tensor)]
        found += [tensor] if whole else inner or parts_of(tensor)
    return found


def parts_of(tensor: Tensor) -> list[Tensor]:
    """The tensors in which the numbers of a tensor lie, in a fixed order: itself, or what it is made of."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in parts_of(getattr(tensor, name))]


def circumstances(device: torch.device) -> tuple[Any, ...]:
    """What else decides which work is recorded, where it is not plain: autocast, float32's precision, the backend."""
    found: list[Any] = []
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        found.append(torch.get_autocast_dtype(device.type))
    if (precision := torch.get_float32_matmul_precision()) != "highest":
        found.append(precision)
    if backend := backend_from_environment():
        found.append(backend)
    return tuple(found)


def kept(
    steps: CapturedSteps,
    model: nn.Module,
    key: tuple[Any, ...],
    make: Callable[[], Made],
    where: tuple[Any, ...] | None = None,
) -> Made:
    """What was captured under `key` for the model as it is now; made when there is none.

    `where`: the model's `addresses`, from a caller that has just looked them up.

    Raises:
        torch.OutOfMemoryError: memory is short even after all that was captured before has been given up.
    """
    forget_moved(steps, model, where)
    key = (*key, *circumstances(next(model.parameters()).device))
    found = steps.pop(key, None)
    if found is None:
        # Before, as much of a room as is given up may be needed for the new one.
        while len(steps) >= KEPT:
            steps.pop(next(iter(steps)))
        found = _made(steps, make)
    steps[key] = found
    return found  # type: ignore[no-any-return]


def forget_moved(steps: CapturedSteps, model: nn.Module, where: tuple[Any, ...] | None = None) -> None:
    """Give up what was captured for tensors that lie elsewhere by now; `where`: as for `kept`."""
    where = addresses(model) if where is None else where
    if where != steps.where:
        steps.clear()
        steps.where = where


def _made(steps: CapturedSteps, make: Callable[[], Made]) -> Made:
    try:
        return make()
    except torch.OutOfMemoryError:
        if not steps:
            raise
    # Not inside `except`, where the error still holds what was half made.
    steps.clear()
    return make()

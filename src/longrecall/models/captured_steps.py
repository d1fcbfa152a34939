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
    types, shapes = [tensor.dtype for tensor in tensors], [tensor.shape for tensor in tensors]
    # Hundreds of tuples less than the strides of all of them.
    contiguous = list(map(Tensor.is_contiguous, tensors))
    strides = [] if all(contiguous) else list(map(Tensor.stride, tensors))
    whole = set(map(type, tensors)) <= WHOLE
    places = tensors if whole else [part for tensor in tensors for part in parts_of(tensor)]
    return list(map(Tensor.data_ptr, places)), [] if whole else list(map(type, tensors)), types, shapes, strides


def parts_of(tensor: Tensor) -> list[Tensor]:
    """The tensors in which the numbers of a tensor lie: itself, or what a quantised or sharded one is made of.

    Such a tensor has no memory of its own, so its address says nothing.
    """
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

    `where`: the model's `addresses`, for who has just looked them up.

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

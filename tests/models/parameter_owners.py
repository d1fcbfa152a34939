"""Weights that are there only while the modules that own them run, as FSDP2 has them between two gathers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class Gone(Tensor):
    """A weight in the place of the real one: it has sizes, a dtype and a device, but every operation refuses."""

    place: str

    @staticmethod
    def __new__(cls, whole: Tensor, name: str) -> Gone:
        made: Gone = torch.Tensor._make_wrapper_subclass(
            cls, whole.shape, dtype=whole.dtype, device=whole.device, requires_grad=whole.requires_grad
        )
        made.place = name
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        gone = next(x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, Gone))
        raise AssertionError(f"{gone.place} is read outside of the module that owns it, by {func}")


@contextmanager
def gathered_by(model: nn.Module, units: Iterable[nn.Module]) -> Iterator[dict[str, int]]:
    """Inside, the weights of each unit are there only while it is called; those of no unit's always are.

    A unit owns what it holds itself and what is in those of its modules that are no units, as with FSDP2: where units
    are in one another, the inner one. Yields how many times each unit was entered, by name.
    """
    chosen = set(units)
    counts = {name: 0 for name, module in model.named_modules() if module in chosen}
    names = {module: name for name, module in model.named_modules()}
    undo: list[Callable[[], None]] = []

    def owned(module: nn.Module) -> Iterator[nn.Module]:
        yield module
        for child in module.children():
            if child not in chosen:
                yield from owned(child)

    def watch(unit: nn.Module) -> None:
        real = {
            (part, key): value for part in owned(unit) for key, value in part._parameters.items() if value is not None
        }
        gone = {place: Gone(value, f"{names[place[0]]}.{place[1]}") for place, value in real.items()}
        depth = 0

        def put(values: dict[Any, Any]) -> None:
            for (part, key), value in values.items():
                part._parameters[key] = value

        def enter(*_: Any) -> None:
            nonlocal depth
            depth += 1
            counts[names[unit]] += 1
            put(real)

        def leave(*_: Any) -> None:
            nonlocal depth
            depth -= 1
            if not depth:
                put(gone)

        put(gone)
        hooks = unit.register_forward_pre_hook(enter), unit.register_forward_hook(leave, always_call=True)
        undo.append(lambda: put(real))
        undo.extend(hook.remove for hook in hooks)

    for unit in chosen:
        watch(unit)
    try:
        yield counts
    finally:
        for back in undo:
            back()

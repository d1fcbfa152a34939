"""Whose weights may be read: a module's own in its forward, and those of a part that nobody has changed.

A module's weights are sure to be there while it runs, entered through ``__call__``. Before that, hooks may have to
bring them: FSDP2 gathers the shards of a weight and frees them again afterwards, others bring weights from the CPU or
unpack quantised ones. Adapters put another module in the place of a layer.

So a module reads its own parameters in its forward, and calls its parts. Where the part would compute the same, a
product of several parts' weights may be formed at once instead; `may_read` is the one place that says where.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.nn.modules import module as of_all_modules

from longrecall.ops.readable import WHOLE

KINDS = WHOLE | {FakeTensor}
"""Whole tensors; fake ones, of a model that only says what it would do, stand for such."""


def are_whole(weights: Iterable[Tensor | None]) -> bool:
    """Whether weights are tensors with all their numbers, and no shards (DTensors) or other stand-ins for them."""
    return KINDS.issuperset(map(type, weights))


def is_hooked(module: nn.Module) -> bool:
    """Whether calling a module does more than its class says: hooks, or a forward method that was put in."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
        or of_all_modules._global_forward_hooks
        or of_all_modules._global_forward_pre_hooks
    )


def may_read(part: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether the module around a part may read the part's weights itself, in place of calling the part.

    The part must be exactly of this kind, without hooks, and its weights whole tensors. One whose weights are computed
    from others (a parametrization) or that FSDP2 shards by itself is of another class.
    """
    return type(part) is kind and not is_hooked(part) and are_whole(part._parameters.values())


class Visit(NamedTuple):
    """Given to a module in the place of its input: the module calls `work` in its forward and returns what that gives.

    So a layer can work with weights that lie in another one, while that one's weights are there.
    """

    work: Callable[..., Any]


Forward = TypeVar("Forward", bound=Callable[..., Any])


def visitable(forward: Forward) -> Forward:
    """The forward method of a module in which weights may lie that other layers use: it takes a `Visit` too."""

    @functools.wraps(forward)
    def visited(self: nn.Module, x: Any, *given: Any, **named: Any) -> Any:
        return x.work(*given) if type(x) is Visit else forward(self, x, *given, **named)

    return cast(Forward, visited)


def inside(owners: Sequence[nn.Module], work: Callable[..., Any], *tensors: Tensor | None) -> Any:
    """Return ``work(*tensors)``, called in the forward of the owners, of which each is in the one before.

    Where all weights of the last owner are there already it is called at once: hooks that do other things than bring
    weights do not see it. `tensors` are all that gradients flow to beside the weights: hooks see them as the inputs.
    """
    if not any(map(is_hooked, owners)) or _are_here(list(owners[-1].parameters())):
        return work(*tensors)
    outermost, *rest = owners
    return outermost(Visit(lambda *given: inside(rest, work, *given)), *tensors)


def _are_here(weights: Sequence[Tensor]) -> bool:
    return are_whole(weights) and not any(weight.is_meta for weight in weights)

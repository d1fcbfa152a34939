"""What a kernel holds in registers: tiles, integers, and sums that products are still added to."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import Tensor

from tests.ops.gluon_emulation.hazards import Hazard


class Register(Tensor):
    """A tile. As in Triton `x += y` makes a new one: who has the old one keeps it."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What torch does for every subclass, which takes twice as long where nearly all results are one tensor."""
        if not all(issubclass(cls, kind) for kind in types):
            return NotImplemented
        with torch._C.DisableTorchFunctionSubclass():
            made = function(*args, **(kwargs or {}))
        if type(made) is Tensor:
            return made.as_subclass(cls)
        if isinstance(made, tuple | list):
            return type(made)([x.as_subclass(cls) if type(x) is Tensor else x for x in made])
        return made

    @property
    def type(self) -> Any:
        return SimpleNamespace(layout=None)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        # PyTorch compares no unsigned numbers: they get more bits.
        return super().to(torch.int64) % 2**32 if torch.uint32 in args else super().to(*args, **kwargs)

    def __iadd__(self, other: Any) -> Any:
        return self + other

    def __isub__(self, other: Any) -> Any:
        return self - other

    def __imul__(self, other: Any) -> Any:
        return self * other


def register(x: Tensor) -> Register:
    """A tile of its own with the numbers of x."""
    return x.clone().as_subclass(Register)


def _whole(function: Callable[..., Any]) -> Callable[..., Any]:
    """An operation on integers whose result is a `Scalar`, too. Negative numbers are divided otherwise on a GPU."""
    divides = function in (operator.floordiv, operator.mod)

    def apply(self: Scalar, other: Any) -> Any:
        if not isinstance(other, int):
            return NotImplemented
        if divides and (self < 0 or other < 0):
            raise Hazard(f"{int(self)} divided by {int(other)}: Triton rounds towards zero, Python down")
        return Scalar(function(int(self), int(other)))

    return apply


class Constant(int):
    """An integer known when a kernel is compiled."""

    @property
    def value(self) -> int:
        return int(self)


class Scalar(int):
    """An integer that is no constant."""

    __add__ = __radd__ = _whole(operator.add)
    __mul__ = __rmul__ = _whole(operator.mul)
    __sub__, __rsub__ = _whole(operator.sub), _whole(lambda a, b: b - a)
    __floordiv__, __mod__ = _whole(operator.floordiv), _whole(operator.mod)
    __rshift__, __and__ = _whole(operator.rshift), _whole(operator.and_)

    def to(self, dtype: torch.dtype) -> Any:
        if dtype.is_floating_point:
            return torch.tensor(int(self), dtype=dtype).as_subclass(Register)
        return Scalar(int(self) % 2**32) if dtype == torch.uint32 else self


def scalars(*bounds: int) -> Iterator[Scalar]:
    """`range` in a kernel."""
    return map(Scalar, range(*map(int, bounds)))


class Pending:
    """The sum that an asynchronous product adds to: only products and waits may take it before it is waited for."""

    def __init__(self, value: Tensor, product: object) -> None:
        self.value, self.product = value, product

    def __getattr__(self, name: str) -> NoReturn:
        raise Hazard(f"a product's result is used (.{name}) that has not been waited for")

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any, **__: Any) -> NoReturn:
        raise Hazard(f"a product's result is used ({function.__name__}) that has not been waited for")

    def __mul__(self, *_: Any) -> NoReturn:
        raise Hazard("a product's result is used that has not been waited for")

    __add__ = __radd__ = __sub__ = __rsub__ = __rmul__ = __neg__ = __getitem__ = __len__ = __mul__

"""Arithmetic of values in Triton's interpreter without the way through Triton's compiler.

Of an addition of two blocks, the interpreter works out the common type, casts, makes both blocks of one shape, asks a
builder, and looks at the result's size: a hundred times the work of the addition. All but the sum itself follows from
the two types. So the first operation of its kind goes the plain way; what type came out is remembered, and from then on
NumPy adds the two arrays, of which it repeats the smaller one as Triton does. Types that NumPy does not have, such as
bfloat16, always go the plain way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

ARITHMETIC = {"add": "add", "sub": "subtract", "mul": "multiply", "truediv": "divide"}
COMPARISONS = {"lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal", "eq": "equal"}
COMPARISONS |= {"ne": "not_equal"}
BITS = {"and": "bitwise_and", "or": "bitwise_or"}
NUMBERS = (int, float)
_WHOLE = slice(None, None, None)


class Arithmetic:
    """The operators of `triton.language.tensor`, by the names that they have in the class."""

    def __init__(self) -> None:
        import numpy
        from triton.language import core
        from triton.runtime import interpreter

        self._core, self._numpy, self._semantic = core, numpy, interpreter.interpreter_semantic
        self._handle, self._plain_dtype = interpreter.TensorHandle, interpreter._get_np_dtype
        self._native = {"fp32", "fp64", "int32", "int64"}

    def quick(self, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        """The operator called `name`, which does what `plain` does; `plain` itself where there is no quicker one."""
        bare = name.strip("_")
        if name == "__getitem__":
            return self._indexing(plain)
        if name != f"__{bare}__":
            return plain
        for names in (ARITHMETIC, COMPARISONS, BITS):
            if bare in names:
                return self._operator(bare, getattr(self._numpy, names[bare]), plain)
            if bare[:1] == "r" and bare[1:] in names and names is not COMPARISONS:
                return self._operator(bare[1:], getattr(self._numpy, names[bare[1:]]), plain, turned=True)
        return plain

    def _operator(self, name: str, compute: Any, plain: Callable[..., Any], turned: bool = False) -> Callable[..., Any]:
        """An operator of two values, or of a value and a number; `turned`: the number comes first."""
        rules: dict[Any, Any] = {}
        tensor, constexpr, make, array = self._core.tensor, self._core.constexpr, self._made, self._numpy.array

        def operate(one: Any, other: Any, **_: Any) -> Any:
            kind = type(other)
            if kind is constexpr:
                other = other.value
                kind = type(other)
            key = (one.type.name, other.type.name if kind is tensor else kind)
            rule = rules.get(key)
            if rule is None:
                result = plain(one, other)
                if key not in rules:
                    rules[key] = self._rule(name, one, other, result)
                return result
            like, width, cast_one, cast_other = rule
            left = one.handle.data
            if kind is tensor:
                right = other.handle.data
                if width:  # a place in memory and a distance, which is counted in bytes
                    return make(left + width * right.astype("uint64"), one.handle.dtype, like)
                if cast_other is not None:
                    right = right.astype(cast_other)
            else:
                try:
                    right = array([other], cast_other)
                except OverflowError:
                    return plain(one, other)
            if cast_one is not None:
                left = left.astype(cast_one)
            return make(compute(right, left) if turned else compute(left, right), like.dtype, like)

        return operate

    def _rule(self, name: str, one: Any, other: Any, result: Any) -> tuple[Any, int, Any, Any] | None:
        """A value like the results, the bytes of what a place holds, what both operands are cast to; None: plain."""
        first, number = one.dtype, type(other) is not self._core.tensor
        if first.is_ptr():
            if name != "add" or number or other.dtype.name not in ("int32", "int64"):
                return None
            return result, max(1, first.element_ty.primitive_bitwidth // 8), None, None
        if number and type(other) not in NUMBERS:
            return None
        second = self._semantic.to_tensor_type(other) if number else other.dtype
        if second.is_ptr() or first.is_block() or second.is_block():
            return None
        common = self._semantic.computation_type_impl(first, False, second, number, name == "truediv")
        if name in BITS:
            fits = first.name == second.name == "int1" and not number
        else:
            fits = common.name in self._native and {first.name, second.name} <= self._native | {"int1"}
            fits = fits and (common.is_floating() or name != "truediv")
        if not fits or result.dtype.name != ("int1" if name in COMPARISONS else common.name):
            return None
        dtype = self._plain_dtype(common)
        casts = [None if kind.name == common.name else dtype for kind in (first, second)]
        return result, 0, casts[0], dtype if number else casts[1]

    def _indexing(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """``x[:, None]``: new axes, the only index that there is."""
        made: dict[Any, Any] = {}
        make = self._made

        def index(one: Any, axes: Any, **_: Any) -> Any:
            if type(axes) is not tuple or not one.type.is_block():
                return plain(one, axes)
            if not all(axis is None or (type(axis) is slice and axis == _WHOLE) for axis in axes):
                return plain(one, axes)
            key = (one.type.name, *(axis is None for axis in axes))
            like = made.get(key)
            if like is None:
                like = made[key] = plain(one, axes)
                return like
            return make(one.handle.data[axes], one.handle.dtype, like)

        return index

    def _made(self, data: Any, dtype: Any, like: Any) -> Any:
        """A value of the type of another one. Its array is of the right size as it is: nothing is looked at."""
        handle, value = object.__new__(self._handle), object.__new__(self._core.tensor)
        handle.data, handle.dtype, handle.attr = data, dtype, {}
        value.handle, value.type, value.dtype = handle, like.type, like.dtype
        value.shape, value.numel = like.shape, like.numel
        return value

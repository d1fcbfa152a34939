"""Triton's CPU interpreter in less than half of the time: what it works out again and again is worked out once.

As it comes, the interpreter spends nearly all of its time on types. It looks through all names of `triton.language`
whenever one jit function calls another, builds every type and every shape anew for each value, and computes for each
sum of integers whether it overflows, of which it makes no use unless it is asked to debug. What a kernel computes, and
the order in which it does, stay as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

from tests.quick_arithmetic import Arithmetic


def quicken(patch: pytest.MonkeyPatch) -> None:
    """Replace parts of the interpreter by quicker ones. Without Triton nothing is done; parts by other names stay."""
    if find_spec("triton") is None:
        return
    from triton import knobs

    if not knobs.runtime.interpret:  # with a GPU, the same parts of Triton compile kernels
        return
    parts = (prepare_once_a_launch, call_directly, no_unread_overflows, remember_types, equal_shapes_are_ready)
    for part in (*parts, half_a_float32_is_moved):
        try:
            part(patch)
        except AttributeError:  # another version of Triton: slower, and as right
            continue


def prepare_once_a_launch(patch: pytest.MonkeyPatch) -> None:
    """The language is made ready once for each launch of a kernel, not for each function that the kernel calls."""
    from triton import language
    from triton.runtime import interpreter

    prepare = interpreter._patch_lang
    # Functions of triton.language itself look their names up in its core.
    everything = SimpleNamespace(__globals__={"language": language, "core": language.core})
    running: list[Any] = []

    def prepare_first(function: Any) -> Any:
        if running:
            return SimpleNamespace(restore=lambda: None)
        running.append(prepare(everything))
        return SimpleNamespace(restore=lambda: running.pop().restore())

    patch.setattr(interpreter, "_patch_lang", prepare_first)


def call_directly(patch: pytest.MonkeyPatch) -> None:
    """A function of the language is called without the two wrappers that check and pass on one argument."""
    from triton.language import core
    from triton.runtime import interpreter

    check = core.builtin(lambda: None).__code__
    plain, semantic, arithmetic = interpreter._patch_attr, interpreter.interpreter_semantic, Arithmetic()

    def patch_attr(place: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        if getattr(member, "__code__", None) is not check:
            plain(place, name, member, builder, scope)
            return
        function = member.__wrapped__

        def call(*arguments: Any, **options: Any) -> Any:
            options["_semantic"] = semantic
            return function(*arguments, **options)

        scope.set_attr(place, name, arithmetic.quick(name, call) if place is core.tensor else call)

    patch.setattr(interpreter, "_patch_attr", patch_attr)


def no_unread_overflows(patch: pytest.MonkeyPatch) -> None:
    """Sums of integers are not checked for an overflow where the check's result is thrown away."""
    from triton.runtime.interpreter import interpreter_builder

    options = interpreter_builder.options
    if not options.debug:
        patch.setattr(interpreter_builder, "options", dataclasses.replace(options, sanitize_overflow=False))


def remember_types(patch: pytest.MonkeyPatch) -> None:
    """A type of blocks, the shape of a value and the NumPy type of a type are made once; none of them changes."""
    from triton.language import core
    from triton.runtime import interpreter

    made: dict[Any, dict[str, Any]] = {}
    shapes: dict[Any, tuple[Any, Any]] = {}
    make: Callable[..., None] = core.block_type.__init__
    measure: Callable[..., None] = core.tensor.__init__

    def make_once(self: Any, element_ty: Any, shape: Any) -> None:
        values = shape.values if type(shape) is core.tuple else shape
        # Constants of a kernel stand for their values; a type's name tells all types apart.
        key = (element_ty.name, getattr(element_ty, "address_space", ""), *(getattr(n, "value", n) for n in values))
        if key not in made:
            make(self, element_ty, shape)
            made[key] = self.__dict__
        else:
            self.__dict__ = made[key].copy()

    def measure_once(self: Any, handle: Any, kind: Any) -> None:
        key = tuple(kind.shape.values) if type(kind) is core.block_type else () if not kind.is_block() else None
        if key is None or key not in shapes:
            measure(self, handle, kind)
            if key is not None:
                shapes[key] = self.shape, self.numel
            return
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.shape, self.numel = shapes[key]

    patch.setattr(core.block_type, "__init__", make_once)
    patch.setattr(core.tensor, "__init__", measure_once)

    found: dict[str, Any] = {}
    find = interpreter._get_np_dtype

    def find_once(kind: Any) -> Any:
        if kind.name not in found:
            found[kind.name] = find(kind)
        return found[kind.name]

    patch.setattr(interpreter, "_get_np_dtype", find_once)


def equal_shapes_are_ready(patch: pytest.MonkeyPatch) -> None:
    """Two values of one shape are not looked at axis by axis."""
    from triton.language.semantic import TritonSemantic

    broadcast = TritonSemantic.broadcast_impl_value

    def unless_equal(self: Any, left: Any, right: Any) -> Any:
        one, other = left.type, right.type
        if one.is_block() and other.is_block():
            if one.shape.values == other.shape.values:
                return left, right
        elif not (one.is_block() or other.is_block()):
            return left, right
        return broadcast(self, left, right)

    patch.setattr(TritonSemantic, "broadcast_impl_value", unless_equal)


def half_a_float32_is_moved(patch: pytest.MonkeyPatch) -> None:
    """bfloat16 is the first half of float32: its bits move, but for the least numbers, of which the plain way asks."""
    import numpy
    from triton.runtime import interpreter

    convert = interpreter._convert_float
    moves = {("fp32", "bf16"): (numpy.uint32, numpy.uint16, -16), ("bf16", "fp32"): (numpy.uint16, numpy.uint32, 16)}
    infinite, most = {numpy.uint16: 0x7F80, numpy.uint32: 0x7F800000}, {numpy.uint16: 0x7F, numpy.uint32: 0x7FFFFF}

    def move(numbers: Any, kind: Any, wanted: Any, rounding: Any) -> Any:
        how = None if rounding is not None else moves.get((kind.name, wanted.name))
        if how is None:
            return convert(numbers, kind, wanted, rounding)
        given, made, places = how
        bits = numpy.ascontiguousarray(numbers).view(given)
        if (((bits & infinite[given]) == 0) & ((bits & most[given]) != 0)).any():
            return convert(numbers, kind, wanted, rounding)
        return (bits >> -places).astype(made) if places < 0 else bits.astype(made) << places

    patch.setattr(interpreter, "_convert_float", move)

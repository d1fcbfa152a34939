"""What a function on tensors asks of torch, recorded once and repeated without the modules that asked.

On a CPU a token of a small model takes longer in Python (modules, checks, the choice of backends) than in arithmetic.
For inputs of the same shapes the same calls of torch follow each other every time. They are written down, and repeated
on memory that stays where it is, as a CUDA graph repeats kernels: views of such memory are made once, results go to
where the first ones went, and what depends on weights alone is formed once. All calls are the same in the same order,
so the numbers are the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MOST_KEPT = 1 << 20
"""Bytes of a result that gets memory for good. With larger ones the calls themselves take the time."""

WHOLE_VECTORS = 16
"""Products are joined where their widths are multiples of it: a row is added up in the same order then."""

_READS_BACK = {"aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::equal", "aten::allclose"}
_COPIES = {"aten::to", "aten::_to_copy", "aten::clone", "aten::contiguous"}
_BINDINGS = (torch._C._VariableFunctions, torch._C._nn)


class NotRecordable(Exception):
    """The calls depend on numbers and not on shapes alone, or change what was there before; the message says which."""


class Call(NamedTuple):
    """One call of an operator: what it was given, and what it returned."""

    operator: Any
    args: tuple[Any, ...]
    options: dict[str, Any]
    found: Any

    @property
    def given(self) -> list[Tensor]:
        """The tensors among the arguments."""
        return _tensors((self.args, self.options))

    @property
    def results(self) -> list[Tensor]:
        """The tensors that it returned."""
        return _tensors(self.found)

    @property
    def changed(self) -> list[Tensor]:
        """The tensors among the arguments that it writes to."""
        schema = self.operator._schema
        if not schema.is_mutable:
            return []
        places = enumerate(schema.arguments)
        changed = [(i, x.name) for i, x in places if x.alias_info is not None and x.alias_info.is_write]
        return _tensors([self.args[i] if i < len(self.args) else self.options.get(name) for i, name in changed])

    @property
    def made(self) -> list[Tensor]:
        """Results in memory of their own."""
        before = {_memory(tensor) for tensor in self.given}
        return [tensor for tensor in self.results if _memory(tensor) not in before]


class RecordedCalls:
    """``function(given, *state) -> (result, *new state)`` on tensors of its own, which `state` and `given` are.

    Call it after `given` and `state` have been written: it returns `result`, overwritten by the next call, and puts the
    new state into `state`. `prepare` forms what depends on weights alone; call it when they may have changed in place.

    Args:
        function: writes to nothing but tensors that it makes.
        given, state: what to record with; they are copied.

    Raises:
        NotRecordable: the function looks at numbers, draws random ones or writes to others' tensors, or the new state
            has other shapes than the old one.
    """

    @torch.inference_mode()
    def __init__(self, function: Callable[..., Sequence[Tensor]], given: Tensor, state: Sequence[Tensor]) -> None:
        self.given, *self.state = [_copy(tensor) for tensor in (given, *state)]
        inputs = [self.given, *self.state]
        survey = _Survey(inputs)
        with cast(Any, _NoReading)(), survey:
            first = function(*inputs)
        for before, after in zip(self.state, first[1:], strict=True):
            if (before.shape, before.dtype) != (after.shape, after.dtype):
                raise NotRecordable("the state changes its shape")
        program = _Program(survey)
        with program:
            second = function(*inputs)
        program.check_end()
        expected = [_copy(tensor) for tensor in first]
        self.preparations, self._run = program.preparations, program.compiled(second, self.state)
        self._check(expected)

    def _check(self, expected: list[Tensor]) -> None:
        before = [_copy(tensor) for tensor in self.state]
        found = [self(), *self.state]
        if not all(_same(x, y) for x, y in zip(found, expected, strict=True)):
            raise NotRecordable("repeated calls give other numbers")
        for buffer, tensor in zip(self.state, before, strict=True):
            buffer.copy_(tensor)

    @torch.inference_mode()
    def prepare(self) -> None:
        """Form what is formed of weights alone."""
        for preparation in self.preparations:
            preparation()

    @torch.inference_mode()
    def __call__(self) -> Tensor:
        """The result for what is in `given` and `state`."""
        found: Tensor = self._run()
        return found


class _NoReading(TorchFunctionMode):
    """Refuses what takes numbers out of a tensor without calling an operator."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.tolist, Tensor.numpy, Tensor.__array__):
            raise NotRecordable(f"{func.__name__} reads numbers back")
        return func(*args, **(kwargs or {}))


class _Watch(TorchDispatchMode):
    """Sees every call of an operator inside, in its order."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        cast(Any, super()).__init__()
        self.calls: list[Call] = []
        self.inputs = {_memory(tensor) for tensor in inputs}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = self.answer(func, args, kwargs or {})
        self.calls.append(Call(func, args, kwargs or {}, found))
        return found

    def answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the caller gets."""
        return func(*args, **kwargs)


class _Survey(_Watch):
    """The first look: what is refused, which results are written to later, which products have one input."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__(inputs)
        self.own: set[int] = set()
        self.written: set[int] = set()

    def answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = Call(func, args, kwargs, None)
        if func._schema.name in _READS_BACK or _counts(call):
            raise NotRecordable(f"{func} reads numbers back")
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise NotRecordable(f"{func} draws random numbers")
        for tensor in call.changed:
            if _memory(tensor) not in self.own:
                raise NotRecordable(f"{func} writes to a tensor that was there before")
            self.written.add(_memory(tensor))
        call = call._replace(found=super().answer(func, args, kwargs))
        self.own |= {_memory(tensor) for tensor in call.made}
        return call.found

    def written_later(self) -> set[int]:
        """The numbers of the calls whose results are written to afterwards."""
        return {i for i, call in enumerate(self.calls) if any(_memory(x) in self.written for x in call.made)}

    def joined(self) -> dict[int, list[int]]:
        """Products of one token's vector with several weights, by the number of the first: they can be one product."""
        groups: dict[int, list[int]] = {}
        for index, call in enumerate(self.calls):
            if _is_product(call.operator, call.args):
                x, weight = call.args[:2]
                whole = weight.shape[0] % WHOLE_VECTORS == 0 and _memory(weight) not in self.own | self.inputs
                if whole and x.numel() == x.shape[-1] and _memory(x) not in self.written:
                    groups.setdefault(id(x), []).append(index)
        several = [indices for indices in groups.values() if len(indices) > 1]
        sizes = [sum(self.calls[i].args[1].nbytes for i in indices) for indices in several]
        return {indices[0]: indices for indices, size in zip(several, sizes, strict=True) if size <= MOST_KEPT}


class _Program(_Watch):
    """The second look, at the same calls on the same inputs: what is done once, and the code of what is repeated."""

    def __init__(self, survey: _Survey) -> None:
        super().__init__(())
        self.inputs = survey.inputs
        self.expected = [call.operator for call in survey.calls]
        self.written = survey.written_later()
        self.joined = survey.joined()
        self.weights = {first: [survey.calls[i].args[1] for i in found] for first, found in self.joined.items()}
        self.pieces: dict[int, Tensor] = {}
        self.preparations: list[Callable[[], Any]] = []
        self.lines: list[str] = []
        self.space: dict[str, Any] = {}
        self.known: dict[int, str] = {}
        # Memory made inside, by whether it stays where it is; and what of it holds the same numbers every time.
        self.moving: set[int] = set()
        self.changing: set[int] = set(self.inputs)
        self.locals: dict[int, str] = {}

    def check_end(self) -> None:
        if len(self.calls) != len(self.expected):
            raise NotRecordable("the calls differ from run to run")

    def answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        index = len(self.calls)
        if index >= len(self.expected) or self.expected[index] is not func:
            raise NotRecordable("the calls differ from run to run")
        if index in self.joined:
            self._join(self.joined[index], args[0], self.weights[index])
        if func._schema.is_mutable:
            return self._change(func, args, kwargs)
        call = Call(func, args, kwargs, func(*args, **kwargs))
        if index in self.pieces and _same(self.pieces[index], call.found):
            return self.pieces[index]
        if call.made:
            self._make(call, index)
        elif any(_memory(tensor) in self.moving for tensor in call.results):
            self._write_line(call)
        # All else is a view of memory that stays: it was made now, for good.
        return call.found

    def _change(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that writes to tensors: repeated as it is, by the quickest name it has."""
        quick = getattr(torch._C.TensorBase, func._schema.name.removeprefix("aten::"), None)
        works = False
        if quick is not None and isinstance(args[0], Tensor) and args[0].nbytes <= MOST_KEPT:
            trial = _copy(args[0])
            works = _tries(lambda: quick(trial, *args[1:], **kwargs))
        found = func(*args, **kwargs)
        works = works and _same(trial, args[0])
        self._write_line(Call(func, args, kwargs, None), quick if works else func._op)
        return found

    def _make(self, call: Call, index: int) -> None:
        """A call with results in memory of their own."""
        found, small = call.found, all(tensor.nbytes <= MOST_KEPT for tensor in call.results)
        if small and index not in self.written and not self._varies(call) and isinstance(found, Tensor):
            self.preparations.append(lambda: found.copy_(call.operator._op(*call.args, **call.options)))
            return
        self.changing |= {_memory(tensor) for tensor in call.made}
        quick = _into(call) if small and isinstance(found, Tensor) else None
        if quick is not None:
            self._write_line(call._replace(found=None), *quick)
            return
        self.moving |= {_memory(tensor) for tensor in call.made}
        self._write_line(call)

    def _varies(self, call: Call) -> bool:
        return any(_memory(tensor) in self.changing for tensor in call.given)

    def _join(self, indices: list[int], x: Tensor, weights: list[Tensor]) -> None:
        """One product in the place of several, whose results are pieces of its result."""
        weight = torch.cat(weights)
        whole = torch.ops.aten.linear.default(x, weight)
        call = Call(torch.ops.aten.linear.default, (x, weight), {}, whole)
        quick = _into(call)
        if quick is None:
            return
        parts = whole.split([weight.shape[0] for weight in weights], dim=-1)
        alone = [torch.ops.aten.linear.default(x, weight) for weight in weights]
        if not all(_same(part, other) for part, other in zip(parts, alone, strict=True)):
            return
        self.preparations.append(lambda: torch.cat(weights, out=weight))
        self.changing.add(_memory(whole))
        self._write_line(call._replace(found=None), *quick)
        self.pieces.update(zip(indices, parts, strict=True))

    def _write_line(self, call: Call, function: Any = None, args: Any = None, options: Any = None) -> None:
        args = call.args if args is None else args
        options = call.options if options is None else options
        parts = [self._name(x) for x in args] + [f"{name}={self._name(x)}" for name, x in options.items()]
        line = f"{self._global(function or call.operator._op)}({', '.join(parts)})"
        if call.found is not None:
            names = [self._local(x) if isinstance(x, Tensor) else "_" for x in self._several(call.found)]
            line = f"{names[0] if isinstance(call.found, Tensor) else ', '.join(names) + ','} = {line}"
        self.lines.append(line)

    @staticmethod
    def _several(found: Any) -> Sequence[Any]:
        return [found] if isinstance(found, Tensor) else found

    def _local(self, tensor: Tensor) -> str:
        return self.locals.setdefault(id(tensor), f"v{len(self.locals)}")

    def _global(self, value: Any) -> str:
        # The value is kept in the space, so that its id stays its own.
        name = self.known.setdefault(id(value), f"g{len(self.known)}")
        self.space[name] = value
        return name

    def _name(self, value: Any) -> str:
        if isinstance(value, Tensor) and id(value) in self.locals:
            return self.locals[id(value)]
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(self._name, value))}]"
        if value is None or type(value) in (bool, int, str):
            return repr(value)
        return self._global(value)

    def compiled(self, results: Sequence[Tensor], state: Sequence[Tensor]) -> Callable[[], Tensor]:
        """What is repeated, as a function of Python; `results`: what it returns, and what becomes the `state`."""
        lines = list(self.lines)
        pairs = [(after, before) for after, before in zip(results[1:], state, strict=True) if after is not before]
        sources = []
        for index, (after, _) in enumerate(pairs):
            name = self._name(after)
            if _memory(after) in self.inputs:
                # It lies where something is to be written, perhaps before it is read.
                lines.append(f"s{index} = {self._global(Tensor.clone)}({name})")
                name = f"s{index}"
            sources.append(name)
        copy = self._global(Tensor.copy_)
        lines += [f"{copy}({self._name(before)}, {name})" for (_, before), name in zip(pairs, sources, strict=True)]
        lines.append(f"return {self._name(results[0])}")
        source = "\n  ".join(["def run():", *lines])
        # Written here, of names that are numbers: no text from outside gets into it.
        exec(compile(source, "<recorded calls>", "exec"), self.space)
        run: Callable[[], Tensor] = self.space["run"]
        return run


def _into(call: Call) -> tuple[Any, tuple[Any, ...], dict[str, Any]] | None:
    """How the call's result gets to where it lies now: a function, its arguments and options; None = no such way."""
    operator, found = call.operator, call.found
    name = operator._schema.name.removeprefix("aten::")
    if operator._schema.name in _COPIES:
        source = call.args[0]
        return (Tensor.copy_, (found, source), {}) if source.shape == found.shape else None
    if name == "linear" and not _is_product(operator, call.args):
        return None  # with a bias it would be added apart, and rounded twice
    if not any("out" in overload for overload in operator.overloadpacket.overloads()):
        return None
    trial = _copy(found).fill_(0)
    functions = [getattr(binding, name, None) for binding in _BINDINGS]
    for function in filter(None, functions):
        if _tries(partial(function, *call.args, **call.options, out=trial)) and _same(trial, found):
            return function, call.args, {**call.options, "out": found}
    return None


def _counts(call: Call) -> bool:
    """Whether the shape of a result depends on numbers."""
    if call.operator._schema.name == "aten::index":
        return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in call.given[1:])
    return torch.Tag.dynamic_output_shape in call.operator.tags


def _is_product(operator: Any, args: tuple[Any, ...]) -> bool:
    return operator is torch.ops.aten.linear.default and (len(args) == 2 or args[2] is None)


def _tries(call: Callable[[], Any]) -> bool:
    """Whether a call works at all."""
    try:
        call()
    except (RuntimeError, TypeError):
        return False
    return True


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _copy(tensor: Tensor) -> Tensor:
    """The same numbers in memory of their own, with the same strides."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _same(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors hold the same numbers, NaN where NaN is."""
    return x.shape == y.shape and x.dtype == y.dtype and bool(((x == y) | ((x != x) & (y != y))).all())

"""Which implementation of an op runs, and why not the others: one registry and one chooser for all of them.

The file of an op's public function declares the op (`declare`): its functions in plain torch, the module of its
kernels, and for which calls the kernels are not faster. That module has a function `why_not`, which says in words why
the kernels cannot serve a call. The module, and Triton with it, is imported when the op is first called.

Some launches of these kernels have a second kernel, in Gluon, for Hopper GPUs: ops/hopper_kernels.py registers them,
and `Op.explain` says of each whether it runs.

One rule for every op. A backend that is named, by `backend=` or by LONGRECALL_BACKEND in the environment, serves the
call or the call raises. There are two exceptions, for the environment alone, which names a backend for all ops at once:

- Norms, convolutions and all other ops that are no recurrences run in plain torch under "reference", "chunked" and
  every backend that has only recurrences.
- Such an op also runs in plain torch where its kernels are not built for the sizes of a call, or are not faster.

Where no backend is named, a call takes the kernels if its tensors are on a GPU, the kernels can serve it and are
faster.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from longrecall.errors import UserError, did_you_mean
from longrecall.installing import install_command
from longrecall.ops import execution, hopper_kernels, peers
from longrecall.ops.execution import backend_from_environment, choices_noted, interpreting_triton
from longrecall.ops.readable import WHOLE, check_no_shards, check_numbers

Inputs = Mapping[str, Tensor | None]
"""The tensors of a call by name, in the dtypes that the caller gave; the first one is not None."""

REFERENCE, CHUNKED, TRITON = "reference", "chunked", "triton"

NO_FLOAT64 = "float64 is left to the other backends"

OLDEST_CAPABILITY = (8, 0)
"""bfloat16 and tf32 products: Ampere and later."""

FEWEST_ROWS = 16
"""With fewer rows the launch from Python takes longest, and plain torch launches faster."""

_INSTALLED = importlib.util.find_spec("triton") is not None
"""Looked up once, at import. torch.compile would trace a cached function, and warn."""
_NOT_INSTALLED = f"Triton is not installed; {install_command('triton')}"


Presumed = Iterable[tuple[str, Tensor | None, int]]
"""Weights that a kernel reads: the name, the tensor, and how many numbers the kernel presumes that it has."""


def kernel(
    module: str, function: str, on: str | None = None, presumes: Callable[..., Presumed] | None = None
) -> Callable[..., Any]:
    """A function of a module of kernels under `longrecall.ops`, imported when it is first called.

    torch.compile does not trace it. `on` is for functions that launch on the current device: it names the argument
    whose device becomes the current one for the call. `presumes`: of the arguments of a call, which are then checked.
    """
    path = f"longrecall.ops.{module}"

    imported: list[Any] = []

    def call(*args: Any, **inputs: Any) -> Any:
        # To ask the import system for what is there takes as long as all the checks of a launch.
        if not imported:
            imported.append(importlib.import_module(path))
        found = getattr(imported[0], function)
        if presumes is not None:
            check_numbers(function, *presumes(*args, **inputs))
        if on is None:
            return found(*args, **inputs)
        x = inputs[on]
        with torch.cuda.device(x.device if x.is_cuda else -1):
            return found(*args, **inputs)

    disabled: Callable[..., Any] = torch.compiler.disable(call)
    return disabled


def few_rows(inputs: Inputs) -> str | None:
    """Why kernels are not faster for the first tensor, whose last dimension is a row, in words; None = they are."""
    x = next(iter(inputs.values()))
    assert x is not None
    if x.numel() < FEWEST_ROWS * x.shape[-1] or not x.numel():
        return f"fewer than {FEWEST_ROWS} rows are left to plain torch"
    return None


def never_slow(_: Inputs) -> str | None:
    """None: for kernels that are faster for every call."""
    return None


@dataclass(frozen=True, eq=False)
class Op:
    """An op and its implementations, as its family declares them. The methods answer for a single call."""

    name: str
    kernels: str | None = None
    """The module of its Triton kernels under `longrecall.ops`; None = it has none."""
    asks: str = "why_not"
    """The function of that module that says why a call cannot be served."""
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """Backend -> function, for recurrences. The public function of any other op calls its kernels or torch itself."""
    plain: tuple[str, ...] = (REFERENCE,)
    """Backends in plain torch, the definition first."""
    slow: Callable[[Inputs], str | None] = few_rows
    """Why kernels are not faster for a call, in words; None = they are."""
    plain_for: Callable[[Inputs], str] | None = None
    """The best of `plain` for a call; None = the first."""
    compiler_fuses: bool = False
    """Whether the plain torch runs under torch.compile, which fuses it."""
    covers: tuple[str, ...] = ()
    """Ops that are part of this one: they are not called where its kernels run."""
    low_products: bool = False
    """Whether its chunked function takes `products`, the dtype in which matrices are multiplied."""

    @property
    def recurrence(self) -> bool:
        """Whether every backend has a function that computes the whole op."""
        return bool(self.functions)

    def backends(self) -> list[str]:
        """Names of the backends that have this op."""
        return [name for name in BACKENDS if name in self.plain or BACKENDS[name].has(self)]

    def chosen(self, inputs: Inputs, backend: str | None = None, **options: Any) -> str:
        """The name of the backend that serves a call; `options` are for the kernels' `why_not`.

        Raises:
            UserError: the backend that is named is unknown, or cannot serve the call.
        """
        name, _ = self._choose(inputs, backend, options)
        return self._note(name, inputs, backend, options) if execution.open_notes else name

    def on_kernels(self, inputs: Inputs, backend: str | None = None, **options: Any) -> bool:
        """Whether the kernels serve a call; all else as `chosen`."""
        if backend in self.plain and not execution.open_notes:
            return False
        name, _ = self._choose(inputs, backend, options)
        return (self._note(name, inputs, backend, options) if execution.open_notes else name) == TRITON

    def why_plain(self, inputs: Inputs, backend: str | None = None, **options: Any) -> str | None:
        """Why the kernels do not serve a call, in words; None = they do. All else as `chosen`."""
        name, reason = self._choose(inputs, backend, options)
        if execution.open_notes and self._note(name, inputs, backend, options) != TRITON:
            return reason or "the choice is only noted here"
        return None if name == TRITON else reason

    def why_unasked(self, x: Tensor) -> str | None:
        """Why the kernels cannot be chosen for x, whatever its shape, in words; None = they may be. Cheap to ask."""
        if self.compiler_fuses and torch.compiler.is_compiling():
            return "torch.compile fuses it itself"
        named = backend_from_environment()
        if named is None:
            return None if x.is_cuda else "the tensors are not on a GPU"
        check_known(named, asked=False)
        return None if named == TRITON else f"LONGRECALL_BACKEND is {named}"

    def why_no_kernels(self, inputs: Inputs, **options: Any) -> str | None:
        """Why the kernels cannot serve a call, in words; None = they can, whether or not they are faster."""
        if self.kernels is None:
            return f"{self.name} has no kernel"
        if reason := why_no_kernels():
            return reason
        for x in inputs.values():
            if x is not None and x.dtype == torch.float64:
                return NO_FLOAT64
        return self._ask(inputs, options)

    def explain(self, inputs: Inputs, backend: str | None = None, **options: Any) -> Choice:
        """Which backend a call would take, and why it would not take each other backend of this op."""
        name, no_kernels = self._choose(inputs, backend, options)
        named = backend or backend_from_environment()
        reasons: dict[str, str] = {}
        for other in self.backends():
            if other != name:
                reason = BACKENDS[other].why_not(self.name, inputs, **options)
                if reason is None and other == TRITON:
                    reason = no_kernels
                if reason is None and named is None:
                    reason = f"{name} serves it faster" if other in self.plain else "taken only when it is named"
                reasons[other] = reason or f"{named} was asked for"
        return Choice(
            self.name, name, reasons, hopper_kernels.inside(self.name, inputs, options) if name == TRITON else {}
        )

    def _choose(self, inputs: Inputs, backend: str | None, options: dict[str, Any]) -> tuple[str, str | None]:
        """The backend of a call, and why it is not the kernels; None = it is."""
        if not torch.compiler.is_compiling() and not WHOLE.issuperset(map(type, inputs.values())):
            check_no_shards(self.name, inputs)
        if backend is not None:
            return self._named(backend, inputs, options, asked=True)
        if self.compiler_fuses and torch.compiler.is_compiling():
            return self.plain[0], "torch.compile fuses it itself"
        named = backend_from_environment()
        if named is not None:
            return self._named(named, inputs, options, asked=False)
        first = next(iter(inputs.values()))
        assert first is not None
        if not first.is_cuda:
            reason: str | None = "the tensors are not on a GPU"
        else:
            reason = self.slow(inputs) or self.why_no_kernels(inputs, **options)
        if reason is None:
            return TRITON, None
        return self.plain[0] if self.plain_for is None else self.plain_for(inputs), reason

    def _plain(self, inputs: Inputs) -> str:
        return self.plain[0] if self.plain_for is None else self.plain_for(inputs)

    def _named(self, name: str, inputs: Inputs, options: dict[str, Any], *, asked: bool) -> tuple[str, str | None]:
        """A backend that the call (`asked`) or the environment names."""
        check_known(name, asked)
        plain = f"{'backend' if asked else 'LONGRECALL_BACKEND'} is {name}"
        if name in self.plain:
            return name, plain
        if not self.recurrence and not BACKENDS[name].has(self):
            if asked:
                raise UserError(f'unknown backend "{name}" of {self.name}; there are {", ".join(self.backends())}')
            return self.plain[0], plain
        if asked or self.recurrence:
            reason = BACKENDS[name].why_not(self.name, inputs, **options)
        else:
            # The environment names one backend for all ops: plain torch runs where no kernel is built.
            reason = why_no_kernels() or self._why_not_tensors(inputs)
            if reason is None:
                size = self.slow(inputs) or self._ask(inputs, options)
                return (name, plain) if size is None else (self._plain(inputs), size)
        if reason is None:
            return name, plain
        raise UserError(f'backend "{name}" cannot serve this call of {self.name}: {reason}{_cure(asked)}')

    def _why_not_tensors(self, inputs: Inputs) -> str | None:
        """Why no kernel of any size can take these tensors, in words."""
        elsewhere = None
        for x in inputs.values():
            if x is not None and x.dtype == torch.float64:
                return NO_FLOAT64
            if x is not None and not x.is_cuda:
                elsewhere = x
        if elsewhere is None or interpreting_triton():
            return None
        return f"the tensors must be on a CUDA device, not on {elsewhere.device.type}"

    def _ask(self, inputs: Inputs, options: dict[str, Any]) -> str | None:
        """Why the kernels are not built for a call, from their module."""
        module = importlib.import_module(f"longrecall.ops.{self.kernels}")
        reason: str | None = getattr(module, self.asks)(**inputs, **options)
        return reason

    def _note(self, name: str, inputs: Inputs, backend: str | None, options: dict[str, Any]) -> str:
        """Add the choice to the list of `noting_choices`, if there is one; then plain torch runs in its place."""
        notes = choices_noted()
        if notes is None:
            return name
        if backend is None:
            notes.append(self.explain(inputs, backend, **options))
        return name if name in self.plain else self._plain(inputs)


@dataclass(frozen=True)
class Choice:
    """Which implementation a call takes."""

    op: str
    chosen: str
    """Name of a backend."""
    why_not: dict[str, str]
    """Each other backend that has the op -> why it is not that one, in words."""
    hopper: dict[str, str | None] = field(default_factory=dict)
    """Where Triton is chosen: each kernel for Hopper that may replace one of its own -> why not; None = it does."""


@dataclass(frozen=True)
class Backend:
    """One implementation of the ops."""

    name: str
    purpose: str
    """What it is good for."""
    kernels: bool = False
    """Whether it takes inputs in the dtypes they have. Other backends get them in the accumulation dtype."""
    peer: bool = False
    """Whether it is another package, which has only recurrences (ops/peers.py)."""

    @property
    def functions(self) -> dict[str, Callable[..., Any]]:
        """Its recurrences by the name of the op."""
        return {op.name: op.functions[self.name] for op in OPS.values() if self.name in op.functions}

    @property
    def ops(self) -> list[str]:
        """Names of all ops that it has, recurrences or not."""
        return sorted(op.name for op in OPS.values() if self.has(op))

    def has(self, op: Op) -> bool:
        """Whether it has a function or a kernel for an op; torch code in the op's public function does not count."""
        return op.kernels is not None if self.name == TRITON else self.name in op.functions

    def why_not_here(self) -> str | None:
        """Why it can serve nothing on this machine, in words; None = it can."""
        if self.peer:
            return peers.why_not_here(self.name)
        return why_no_kernels() if self.name == TRITON else None

    def why_not(self, op: str, inputs: Inputs, **options: Any) -> str | None:
        """Why it cannot serve a call of an op, in words; None = it can."""
        if self.peer:
            return peers.why_not(self.name, op, inputs)
        found = OPS[op]
        if self.name == TRITON:
            return found.why_no_kernels(inputs, **options)
        return None if self.name in found.plain else f"{op} has no function {self.name}"


OPS: dict[str, Op] = {}
"""Every op by its name, from the declarations; complete once `longrecall.ops` is imported."""

BACKENDS = {
    backend.name: backend
    for backend in (
        Backend(REFERENCE, "the step-by-step definition; used for one-token decoding"),
        Backend(CHUNKED, "matrix products over chunks in plain torch; CPU and GPU, any dtype"),
        Backend(TRITON, "fused kernels for NVIDIA GPUs; float32, float16, bfloat16", kernels=True),
        Backend("fla", "flash-linear-attention's kernels, when named; bfloat16", kernels=True, peer=True),
        Backend("flash_qla", "FlashQLA's kernels, when named; bfloat16, heads of 128", kernels=True, peer=True),
    )
}
"""The implementations of the ops, by name; `why_not` of each says why it cannot serve a call.

>>> list(BACKENDS)
['reference', 'chunked', 'triton', 'fla', 'flash_qla']
"""


def declare(op: Op) -> Op:
    """Enter an op into the registry."""
    if op.name in OPS:
        raise ValueError(f'there is an op "{op.name}" already')
    OPS[op.name] = op
    return op


def recurrence_functions(op: str, **functions: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """The given functions by backend, together with those of other packages that have the op."""
    known = [name for name, peer in peers.PEERS.items() if any(op == served for served, _ in peer.functions)]
    return {**functions, **{name: partial(peers.run, name, op) for name in known}}


def why_no_kernels() -> str | None:
    """Why no kernel can run on this machine, in words; None = they can. TRITON_INTERPRET=1 needs no GPU."""
    if not _INSTALLED:
        return _NOT_INSTALLED
    if interpreting_triton():
        return None
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if torch.cuda.get_device_capability() < OLDEST_CAPABILITY:
        major, minor = torch.cuda.get_device_capability()
        return f"the GPU has compute capability {major}.{minor}; 8.0 or later is needed"
    return None


def why_no_gluon() -> str | None:
    """Why the kernels in Gluon for Hopper, which replace some Triton kernels, cannot run here; None = they can."""
    if reason := why_no_kernels():
        return reason
    return hopper_kernels.why_none_here()


def why_no_kernel(op: str, inputs: Inputs, **options: Any) -> str | None:
    """Why the kernels of an op cannot serve a call, in words; None = they can. `inputs` may be empty tensors."""
    return OPS[op].why_no_kernels(inputs, **options)


def check_known(name: str, asked: bool) -> None:
    """Raise UserError unless there is a backend of this name, which a call (`asked`) or the environment names."""
    if name not in BACKENDS:
        near = did_you_mean(name, BACKENDS)
        raise UserError(f'unknown backend "{name}"; there are {", ".join(BACKENDS)}{_cure(asked)}.{near}')


def _cure(asked: bool) -> str:
    return "" if asked else ". LONGRECALL_BACKEND names it; without it every call takes what serves it best"

"""How ops run: what their callers promise them, and what the environment asks for.

Callers make promises with context managers. Each replaces one field of a frozen value, `Execution`, for the current
thread, until its block ends. `current` returns the value that holds now.

Only this file reads the environment of ops, at the moment when somebody asks. An empty variable counts as not set. An
unknown value of one of our variables raises; the variables of other packages are read as those packages read them.

| variable | values |
|---|---|
| LONGRECALL_BACKEND | the backend of every op, a name of `ops.BACKENDS`; not set: each call takes what serves it best |
| LONGRECALL_GLUON | 0: no kernel in Gluon runs, only those in Triton; 1 or not set: they run wherever they can |
| LONGRECALL_EARLY | 0: no programmatic dependent launch of kernels; 1 or not set: on GPUs that have it |
| TRITON_INTERPRET | Triton's: its kernels run on a CPU |
| FLA_TILELANG | flash-linear-attention's: 0 leaves tilelang out |
| CUDA_HOME, CUDA_PATH | the CUDA toolkit's: where nvcc is |
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from longrecall.errors import UserError

if TYPE_CHECKING:
    from longrecall.ops.context.group import ContextGroup, RowPieces

BACKEND, GLUON, EARLY = "LONGRECALL_BACKEND", "LONGRECALL_GLUON", "LONGRECALL_EARLY"


@dataclass(frozen=True, eq=False)
class Padding:
    """Padding that comes after all real tokens of its row."""

    mask: Tensor
    """bool ``[B, T]``: True for the first tokens of each row, False for the rest."""
    kept: dict[Any, Any] = field(default_factory=dict)
    """What follows from the mask, computed once for all layers."""


class Kept:
    """What a part of the model that runs twice received from the rank before, for its second run (checkpointing)."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.replays = False
        """Whether this is not the first run."""
        self.place = 0

    def begin(self) -> None:
        """A run begins."""
        self.replays, self.place = bool(self.tensors), 0

    def add(self, tensor: Tensor) -> Tensor:
        """Keep what the first run received; returns it."""
        self.tensors.append(tensor.detach())
        return tensor

    def next(self) -> Tensor:
        """What the first run received at this place."""
        self.place += 1
        return self.tensors[self.place - 1].clone()


@dataclass(frozen=True, eq=False)
class Execution:
    """The promises that hold for the ops that are called now."""

    prefetch: bool = False
    """A kernel may read weights and its own state while the kernel launched before it is still running."""
    padding: Padding | None = None
    """The mask that is known to have its padding at the end."""
    unread_states: bool = False
    """The new states will not be used."""
    fixed_shapes: bool = False
    """No length may depend on values of tensors: they cannot be read back while a CUDA graph is recorded."""
    columns_in_order: bool = False
    """Columns of caches hold the tokens of a row one after the other, the same in all rows, with padding behind."""
    whole_texts: bool = False
    """No text is cut into segments, however long it is."""
    choices: list[Any] | None = None
    """The list to which every choice of a backend is added, while plain torch runs instead; None = no list."""
    context: ContextGroup | None = None
    """The ranks over which every sequence is cut (context parallelism); None = sequences are whole."""
    row_pieces: RowPieces | None = None
    """Where the pieces of sequences lie among rows that are documents; None = every row is a piece of one sequence."""
    kept: Kept | None = None
    """What a part of the model that runs twice has received; None = it runs once."""


PLAIN = Execution()
"""Nothing is promised."""

_current: ContextVar[Execution] = ContextVar("longrecall_execution", default=PLAIN)


def current() -> Execution:
    """The promises that hold now. torch.compile cannot trace context variables: under it there are none."""
    return PLAIN if torch.compiler.is_compiling() else _current.get()


@contextlib.contextmanager
def _with(**fields: Any) -> Iterator[None]:
    token = _current.set(replace(_current.get(), **fields))
    try:
        yield
    finally:
        _current.reset(token)


def prefetching() -> contextlib.AbstractContextManager[None]:
    """Inside, no kernel writes a weight or a state that the kernel launched right after it reads.

    Earlier writes are safe once one ordinary kernel, such as one of torch, was launched after them.
    """
    return _with(prefetch=True)


def may_prefetch() -> bool:
    """Whether `prefetching` holds now. It is asked when a kernel is launched, which torch.compile does not trace."""
    return _current.get().prefetch


def padding_at_the_end(mask: Tensor) -> contextlib.AbstractContextManager[None]:
    """Inside, `mask` bool ``[B, T]`` is known to be True for some first tokens of each row and False for the rest."""
    return _with(padding=Padding(mask))


def unread_states() -> contextlib.AbstractContextManager[None]:
    """Inside, the new states are not used: a mixer may leave out those that take extra time to compute."""
    return _with(unread_states=True)


def states_are_wanted() -> contextlib.AbstractContextManager[None]:
    """Inside, the new states are used, whatever was promised around it."""
    return _with(unread_states=False)


def states_are_unread() -> bool:
    """Whether `unread_states` holds now; never under torch.compile."""
    return current().unread_states


def as_states_are_read_now(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, for later calls (in a checkpoint's backward) under what holds now of states and where they are.

    That is the promise of `unread_states` and the context group. A backward runs in other threads, and outside of the
    blocks that hold now, or inside of others: memory tokens are read whole where a text is cut over ranks.
    """
    if torch.compiler.is_compiling():
        return function
    now = _current.get()
    kept = None if now.context is None else Kept()
    fields = {"unread_states": now.unread_states, "context": now.context, "row_pieces": now.row_pieces, "kept": kept}

    def call(*args: Any) -> Any:
        if kept is not None:
            kept.begin()
        with _with(**fields):
            return function(*args)

    return call


def with_context(group: ContextGroup | None) -> contextlib.AbstractContextManager[None]:
    """Inside, sequences are cut over `group`; None = they are whole (`longrecall.context.context_parallel`)."""
    return _with(context=group)


def context() -> ContextGroup | None:
    """The ranks over which sequences are cut now; None = they are whole, and always under torch.compile."""
    return current().context


def with_row_pieces(pieces: RowPieces | None) -> contextlib.AbstractContextManager[None]:
    """Inside, rows are documents and pieces of sequences lie among them (`longrecall.context.row_pieces`)."""
    return _with(row_pieces=pieces)


def row_pieces() -> RowPieces | None:
    """Where pieces of sequences lie among rows that are documents; None = every row is one."""
    return current().row_pieces


def kept() -> Kept | None:
    """What the part of the model that runs now received in its first run; None = it runs once."""
    return current().kept


def columns_in_order() -> contextlib.AbstractContextManager[None]:
    """Inside, column i of every cache is a row's token i, and padding stands behind all tokens.

    A layer with a window then returns its cache whole: what the window cannot reach any more is for the caller to drop.
    """
    return _with(columns_in_order=True)


def columns_are_in_order() -> bool:
    """Whether `columns_in_order` holds here; never under torch.compile."""
    return current().columns_in_order


def whole_texts() -> contextlib.AbstractContextManager[None]:
    """Inside, a forward pass without gradients reads any text in one pass, with the memory which that takes."""
    return _with(whole_texts=True)


def texts_are_whole() -> bool:
    """Whether `whole_texts` holds now."""
    return current().whole_texts


def fixed_shapes() -> contextlib.AbstractContextManager[None]:
    """Inside, no layer reads values back to choose a length. None can while a graph is recorded."""
    return _with(fixed_shapes=True)


def shapes_are_fixed(device: torch.device) -> bool:
    """Whether lengths must not depend on values: in `fixed_shapes`, in torch.compile, or while a graph is recorded."""
    if torch.compiler.is_compiling() or _current.get().fixed_shapes:
        return True
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


open_notes = 0
"""Open blocks of `noting_choices`, of all threads; `choices_noted` says whether this thread has one.

Every call of an op reads it: a number is read faster than a context variable, or than a function is called.
"""


@contextlib.contextmanager
def noting_choices(choices: list[Any]) -> Iterator[None]:
    """Inside, every choice of a backend is added to the list, and plain torch runs in place of the chosen one."""
    global open_notes
    open_notes += 1
    try:
        with _with(choices=choices):
            yield
    finally:
        open_notes -= 1


def choices_noted() -> list[Any] | None:
    """The list of `noting_choices`; None outside of such a block and under torch.compile."""
    return current().choices


def backend_from_environment() -> str | None:
    """The name in LONGRECALL_BACKEND, which `ops.backends` checks; None = each call takes what serves it best."""
    return os.environ.get(BACKEND) or None


def gluon_wanted() -> bool:
    """Whether LONGRECALL_GLUON lets kernels in Gluon run; raises UserError on an unknown value."""
    return _switch(GLUON)


def early_launches_wanted() -> bool:
    """Whether LONGRECALL_EARLY lets kernels be launched early; raises UserError on an unknown value."""
    return _switch(EARLY)


def interpreting_triton() -> bool:
    """Whether Triton runs its kernels in its interpreter, on a CPU. Triton looks when a kernel is defined."""
    value = os.environ.get("TRITON_INTERPRET")
    # The words that Triton reads as yes.
    return value is not None and (value == "1" or value.lower() in ("true", "yes", "on", "y"))


def fla_leaves_tilelang_out() -> bool:
    """Whether flash-linear-attention was told not to use tilelang."""
    return os.environ.get("FLA_TILELANG") == "0"


def cuda_homes() -> list[str]:
    """Folders in which the CUDA toolkit may be, those that the environment names first."""
    named = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"))
    return [*filter(None, named), "/usr/local/cuda"]


def _switch(name: str) -> bool:
    value = os.environ.get(name)
    if not value or value == "1":
        return True
    if value == "0":
        return False
    raise UserError(f'{name} must be 0 or 1, not "{value}"')

"""Which implementation of each op runs on this machine, and why not the others, without a model or a call.

What a single call takes depends on its tensors too: `Op.explain` answers for one, `longrecall info --backends CKPT` for
every layer of a model.
"""

from __future__ import annotations

import importlib
from dataclasses import asdict, dataclass, field
from typing import Any

from longrecall.errors import first_line
from longrecall.ops import BACKENDS, hopper_kernels
from longrecall.ops.backends import OPS, TRITON, Op, check_known, why_no_gluon, why_no_kernels
from longrecall.ops.execution import BACKEND, backend_from_environment


@dataclass(frozen=True)
class OpHere:
    """What an op takes on this machine."""

    op: str
    runs: list[str]
    """Backends that its calls take; the first wherever it can serve the call."""
    why_not: dict[str, str]
    """Each other backend that has the op -> why not, in words."""
    hopper: dict[str, str | None] = field(default_factory=dict)
    """Where Triton runs: each kernel for Hopper that may replace one of its own -> why not; None = it does."""


def describe_backends() -> list[dict[str, Any]]:
    """Return every backend of the recurrences: its ops, what it is good for, and why it cannot run here, if so.

    Of "triton" also `without_gluon`: why its kernels for Hopper leave everything to the plain ones; None = they do not.
    """
    found = []
    for backend in BACKENDS.values():
        reason = backend.why_not_here()
        facts = {"name": backend.name, "usable": reason is None, "reason": reason, "purpose": backend.purpose}
        found.append({**facts, "ops": backend.ops})
        if backend.name == TRITON:
            found[-1]["without_gluon"] = why_no_gluon()
    return found


def ops_here() -> list[dict[str, Any]]:
    """Return what each op takes on this machine, as `OpHere` in plain data, in alphabetical order.

    Raises:
        UserError: LONGRECALL_BACKEND names a backend that there is not.
    """
    return [asdict(op_here(OPS[name])) for name in sorted(OPS)]


def op_here(op: Op) -> OpHere:
    """Return what an op takes on this machine."""
    reasons = {name: reason for name in op.backends() if (reason := _why_not(op, name)) is not None}
    named = backend_from_environment()
    if named is None:
        runs = [name for name in (TRITON, *reversed(op.plain)) if name in op.backends() and name not in reasons]
        others = {name: "taken only when it is named" for name in op.backends()}
    else:
        check_known(named, asked=False)
        takes = named if named in op.plain or BACKENDS[named].has(op) else op.plain[0]
        runs = [takes] if takes not in reasons else []
        others = {name: f"{BACKEND} is {named}" for name in op.backends()}
    why_not = {name: reasons.get(name, others[name]) for name in op.backends() if name not in runs}
    hopper: dict[str, str | None] = {}
    if TRITON in runs:
        reason = hopper_kernels.why_none_here()
        hopper = {one.name: reason for one in hopper_kernels.HOPPER_KERNELS.values() if op.name in one.ops}
    return OpHere(op.name, runs, why_not, hopper)


def _why_not(op: Op, backend: str) -> str | None:
    """Why a backend can serve no call of an op here, in words; None = it can."""
    if backend in op.plain:
        return None
    reason = BACKENDS[backend].why_not_here()
    if reason is not None or backend != TRITON:
        return reason
    return why_no_kernels() or _why_no_module(op)


def _why_no_module(op: Op) -> str | None:
    """Why the module of an op's kernels cannot be imported, in words; None = it can. Its Triton may be of any kind."""
    try:
        importlib.import_module(f"longrecall.ops.{op.kernels}")
    except Exception as error:
        return f"its kernels cannot be imported: {type(error).__name__}: {first_line(error)}"
    return None

"""One registry and one rule for all ops: what serves a call, and why the others do not."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from longrecall.errors import UserError
from longrecall.ops import (
    backends,
    best_chunks,
    gated_linear_attention,
    generalised_delta_rule,
    linear_recurrence,
    long_convolution,
    selected_attention,
    selective_scan,
    short_convolution,
    weighted_average,
)
from longrecall.ops.backends import BACKENDS, OPS, TRITON, Op, declare
from longrecall.ops.convolution.head_products import pair_products
from longrecall.ops.delta_rule.gates import delta_gates
from longrecall.ops.delta_rule.subheads import subhead_delta_rule
from longrecall.ops.execution import noting_choices
from longrecall.ops.linear_attention.stepped_values import stepped_values
from longrecall.ops.norms.op import gated_rms_norm, rms_norm, silu_product
from longrecall.ops.projections.biased import column_sums
from longrecall.ops.projections.embedding import look_up
from longrecall.ops.time_mixing.op import gated_group_norm, mix_with_previous

# Before a fixture takes TRITON_INTERPRET away, by which kernels are defined: other tests launch them.
KERNELS = (
    {op.name: importlib.import_module(f"longrecall.ops.{op.kernels}") for op in OPS.values() if op.kernels}
    if importlib.util.find_spec("triton")
    else {}
)

X, HEADS = torch.ones(2, 20, 32), torch.ones(2, 20, 2, 16)
GATES, RANKS = torch.ones(2, 20, 2), torch.zeros(1, 20, 1, dtype=torch.long)

CALLS: dict[str, Callable[..., Any]] = {
    "gated_linear_attention": lambda **o: gated_linear_attention(HEADS, HEADS, HEADS, None, **o),
    "subhead_delta_rule": lambda **o: subhead_delta_rule(HEADS, HEADS, HEADS, None, GATES, **o),
    "selective_scan": lambda **o: selective_scan(X, X, -torch.ones(32, 4), *torch.ones(2, 2, 20, 4), **o),
    "linear_recurrence": lambda **o: linear_recurrence(X, -X, **o),
    "weighted_average": lambda **o: weighted_average(X, X, -X, torch.ones(32), **o),
    "rms_norm": lambda **o: rms_norm(X, torch.ones(32), 1e-5, **o),
    "gated_rms_norm": lambda **o: gated_rms_norm(X, X, torch.ones(32), 1e-5, **o),
    "silu_product": lambda **o: silu_product(X, X, **o),
    "delta_gates": lambda **o: delta_gates(GATES, GATES, torch.ones(2), torch.ones(2), 1.0, **o),
    "short_convolution": lambda **o: short_convolution(X, torch.ones(32, 4), **o),
    "depthwise_convolution": lambda **o: short_convolution(X, torch.ones(32, 4), activation=None, **o),
    "long_convolution": lambda **o: long_convolution(X, torch.ones(32, 8), **o),
    "head_products": lambda **o: pair_products(HEADS, HEADS, **o),
    "stepped_values": lambda **o: stepped_values(HEADS, GATES, torch.ones(2), lambda v: (v, v), **o),
    "mix_with_previous": lambda **o: mix_with_previous(X, torch.ones(2, 32), **o),
    "gated_group_norm": lambda **o: gated_group_norm(
        HEADS, X, torch.ones(32), torch.ones(32), 1e-5, torch.float32, **o
    ),
    "column_sums": lambda **o: column_sums(X[0], **o),
    "look_up": lambda **o: look_up(torch.zeros(40, dtype=torch.long), X[0].clone().requires_grad_(), **o),
    "selected_attention": lambda **o: selected_attention(HEADS, HEADS, HEADS, RANKS.expand(2, -1, -1), None, 4, **o),
    "best_chunks": lambda **o: best_chunks(X, X, RANKS[..., 0].expand(2, -1), 2, **o),
}


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LONGRECALL_BACKEND", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(backends, "_INSTALLED", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("op", list(CALLS))
def test_kernels_that_are_named_serve_or_raise(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms and convolutions used to run in plain torch, in silence."""
    CALLS[op]()
    with pytest.raises(
        UserError, match=f'backend "triton" cannot serve this call of .*{op}.*: there is no CUDA device'
    ):
        CALLS[op](backend="triton")
    monkeypatch.setenv("LONGRECALL_BACKEND", "triton")
    with pytest.raises(UserError, match=rf"this call of {op}: there is no CUDA device\. LONGRECALL_BACKEND names it"):
        CALLS[op]()
    # On a GPU too, where the tensors are elsewhere.
    monkeypatch.setattr(backends, "why_no_kernels", lambda: None)
    with pytest.raises(UserError, match=f"this call of {op}: the tensors must be on a CUDA device, not on cpu"):
        CALLS[op]()


@pytest.mark.parametrize("op", list(CALLS))
def test_a_backend_that_nobody_knows_is_named_for_every_op(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGRECALL_BACKEND", "tritn")
    with pytest.raises(UserError, match=r'unknown backend "tritn"; there are .* Did you mean "triton"'):
        CALLS[op]()


@pytest.mark.parametrize("op", list(CALLS))
@pytest.mark.parametrize("name", ["reference", "chunked"])
def test_plain_torch_serves_every_op(op: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGRECALL_BACKEND", name)
    CALLS[op]()


def test_backends_of_recurrences_leave_the_rest_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGRECALL_BACKEND", "fla")
    assert torch.equal(CALLS["rms_norm"](), CALLS["rms_norm"](backend="reference"))
    CALLS["selected_attention"]()
    with pytest.raises(UserError, match='backend "fla" cannot serve this call of gated_linear_attention'):
        CALLS["gated_linear_attention"]()
    monkeypatch.setenv("LONGRECALL_BACKEND", "triton")
    monkeypatch.setattr(backends, "why_no_kernels", lambda: None)
    with pytest.raises(UserError, match="generalised_delta_rule has no kernel"):
        generalised_delta_rule(HEADS, HEADS, HEADS, HEADS, HEADS, HEADS)


def test_kernels_are_completed_by_plain_torch_where_they_are_not_built_for_a_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under the environment, which names one backend for all ops; a call that names it itself raises."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("LONGRECALL_BACKEND", "triton")
    norm, convolution = OPS["rms_norm"], OPS["short_convolution"]
    few = {"x": X[:1, :3], "weight": torch.ones(32)}
    assert norm.why_plain(few) == "fewer than 16 rows are left to plain torch"
    taps = {"x": X, "weight": torch.ones(32, 3)}
    assert convolution.why_plain(taps, activation="silu") == "the kernels know convolutions of 4 taps, not of 3"
    with pytest.raises(UserError, match="convolutions of 4 taps, not of 3"):
        convolution.chosen(taps, "triton", activation="silu")


@pytest.mark.skipif(not KERNELS, reason="needs Triton")
def test_gated_norms_ask_their_own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """They used to ask those of the plain norm, which never saw the gate."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    weight, wide = torch.ones(32), torch.empty(20, 1 << 16)
    op = OPS["gated_rms_norm"]
    assert op.why_no_kernels({"x": X, "gate": X, "weight": weight}, groups=1) is None
    assert "not int64" in str(op.why_no_kernels({"x": X, "gate": X.long(), "weight": weight}, groups=1))
    assert "too wide" in str(op.why_no_kernels({"x": wide, "gate": wide, "weight": wide[0]}, groups=1))


def test_every_kernel_module_says_why_not() -> None:
    for name, module in KERNELS.items():
        asked = getattr(module, OPS[name].asks)
        assert inspect.getdoc(asked), name


def test_a_choice_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    found = OPS["gated_linear_attention"].explain({"q": HEADS, "k": HEADS, "v": HEADS, "log_decay": None})
    assert found.chosen == "chunked" and set(found.why_not) == {"reference", "triton", "fla"}
    assert found.why_not["triton"] == "there is no CUDA device"
    assert found.why_not["reference"] == "chunked serves it faster"
    named = OPS["rms_norm"].explain({"x": X, "weight": X[0, 0]}, "reference")
    assert named.chosen == "reference" and set(named.why_not) == {TRITON}


def test_choices_can_be_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[Any] = []
    with noting_choices(notes):
        CALLS["rms_norm"]()
        CALLS["rms_norm"](backend="reference")
        CALLS["gated_linear_attention"]()
    CALLS["rms_norm"]()
    assert [(note.op, note.chosen) for note in notes] == [
        ("rms_norm", "reference"),
        ("gated_linear_attention", "chunked"),
    ]


def test_an_op_joins_by_its_declaration_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "OPS", dict(OPS))
    op = declare(Op("doubled", kernels="norms.triton.gated"))
    assert "doubled" in BACKENDS[TRITON].ops and op.backends() == ["reference", "triton"]
    assert op.chosen({"x": X}) == "reference"
    with pytest.raises(ValueError, match='there is an op "doubled" already'):
        declare(Op("doubled"))

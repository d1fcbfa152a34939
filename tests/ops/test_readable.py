"""What a kernel would read past is refused before the launch: stand-ins for weights, freed ones, smaller ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

launch = pytest.importorskip("longrecall.ops.kernels.launch")
tl = pytest.importorskip("triton.language")

from longrecall.errors import UserError  # noqa: E402
from longrecall.ops.backends import BACKENDS  # noqa: E402
from longrecall.ops.convolution.short import gated_short_convolution, short_convolution  # noqa: E402
from longrecall.ops.decoding.triton.elementwise import Sum, add_norm, convolve, gated_norm  # noqa: E402
from longrecall.ops.decoding.triton.products import add_product, norm_and_gate_up, norm_and_project  # noqa: E402
from longrecall.ops.decoding.triton.recurrence import Gate, recurrence  # noqa: E402
from longrecall.ops.delta_rule.gates import delta_gates  # noqa: E402
from longrecall.ops.linear_attention.bonus import add_bonus  # noqa: E402
from longrecall.ops.linear_attention.stepped_values import stepped_values  # noqa: E402
from longrecall.ops.norms.op import add_rms_norm, gated_rms_norm, rms_norm, silu_product  # noqa: E402
from longrecall.ops.readable import check_arguments  # noqa: E402
from longrecall.ops.time_mixing.op import gated_group_norm, mix_with_previous  # noqa: E402

DEVICE = "cpu" if launch.interpreting() else "cuda"
pytestmark = (
    []
    if launch.interpreting()
    else [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
)


class StandIn(Tensor):
    """Some package's tensor, of which nobody knows what lies at its address."""


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, device=DEVICE)


def freed(size: int, first: int = 0) -> Tensor:
    """Numbers of a weight as FSDP leaves it after a forward pass, from the `first` one on."""
    whole = zeros(size + first)
    made = whole[first:]
    whole.untyped_storage().resize_(0)
    return made


@launch.kernel
def copied(x, out, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.arange(0, BLOCK)
    tl.store(out + place, tl.load(x + place, mask=place < size), mask=place < size)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: StandIn(zeros(16)), "copied: x is a StandIn, not a tensor that is whole"),
        (lambda: freed(16), "copied: x has 16 numbers, but its memory was freed"),
        (lambda: freed(16, first=8), "copied: x has 16 numbers, but its memory was freed"),
    ],
)
def test_a_launch_refuses_what_is_not_there(made: Callable[[], Tensor], said: str) -> None:
    x, out = torch.ones(16, device=DEVICE), zeros(16)
    # Twice: remembered launches must not let pass what they were not remembered for.
    for _ in range(2):
        copied[(1,)](x, out, 16, BLOCK=16)
        with pytest.raises(UserError, match=said):
            copied[(1,)](made(), out, 16, BLOCK=16)
    assert bool((out == 1).all())
    # What has no numbers needs no memory.
    check_arguments("any", [("x", zeros(0)), ("size", 3)])


def refusals() -> dict[str, tuple[Callable[[], Any], str]]:
    """Calls with a weight that is smaller than the kernel presumes, and what is said."""
    x, heads, few = zeros(1, 64, 64), zeros(1, 64, 4, 16), zeros(2, 64)
    kernels: dict[str, Any] = {"backend": "triton"}
    step = {"scale": 1.0, "key_heads": 4, "value_heads": 4}
    four, sixteen, state = zeros(2, 4), zeros(2, 64), zeros(2, 4, 16, 16)
    return {
        "rms_norm": (lambda: rms_norm(x, zeros(32), 1e-5, **kernels), "weight must have 64 numbers; got [32]"),
        "add_rms_norm": (lambda: add_rms_norm(x, x, zeros(32), 1e-5, **kernels), "weight must have 64"),
        "gated_rms_norm": (lambda: gated_rms_norm(x, x, zeros(32), 1e-5, **kernels), "weight must have 64"),
        "silu_product": (lambda: silu_product(x, x[:, 1:], **kernels), "up must have 4096"),
        "short": (lambda: short_convolution(x, zeros(32, 4), **kernels), "weight must have 256"),
        "bias": (lambda: short_convolution(x, zeros(64, 4), zeros(32), **kernels), "bias must have 64"),
        "gated": (lambda: gated_short_convolution(zeros(1, 64, 96), zeros(48, 3), zeros(96), **kernels), "weight must"),
        "mix": (lambda: mix_with_previous(x, zeros(4, 32), **kernels), "shares must have 256"),
        "group": (lambda: gated_group_norm(heads, x, zeros(64), zeros(32), 1e-5, x.dtype, **kernels), "bias must have"),
        "skip": (
            lambda: stepped_values(heads, zeros(1, 64, 4), zeros(2), lambda y: (y, y), **kernels),
            "skip must have 4",
        ),
        "bonus": (lambda: add_bonus(heads, heads[:, :1], heads, heads, heads, zeros(2, 16), **kernels), "bonus must"),
        "delta_gates": (
            lambda: delta_gates(zeros(1, 64, 4), zeros(1, 64, 4), zeros(4), zeros(2), 1.0, **kernels),
            "bias must have 4",
        ),
        "add_norm": (lambda: add_norm(few, None, zeros(32), 1e-5, zeros(2, 64)), "weight must have 64"),
        "convolve": (lambda: convolve([(few, zeros(2, 3, 64), zeros(32, 4), None)]), "weight must have 256"),
        "gated_norm": (lambda: gated_norm(zeros(2, 4, 16), 4, Sum(column_step=16), zeros(8), 1e-5, x.dtype), "norm"),
        "project": (lambda: norm_and_project(few, zeros(64), 1e-5, [zeros(8, 32)]), "weight must have 512"),
        "gate_up": (lambda: norm_and_gate_up(few, zeros(64), 1e-5, zeros(8, 64), zeros(4, 64)), "up must have 512"),
        "add_product": (lambda: add_product(zeros(2, 8), zeros(32, 8), few), "stream must have 64"),
        "recurrence": (
            lambda: recurrence(sixteen, sixteen, sixteen, state, Gate("delta", four, zeros(2), zeros(4)), **step),
            "bias must have 4",
        ),
    }


def test_kernels_refuse_weights_of_another_size() -> None:
    assert "triton" in BACKENDS
    for name, (call, said) in refusals().items():
        with pytest.raises(UserError) as error:
            call()
        assert said in str(error.value), (name, str(error.value))

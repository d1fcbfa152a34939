"""Layers whose kernels are those in Gluon, run on the CPU, against the plain path in float64: launches and all."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("triton")

from longrecall.ops.delta_rule.triton import expanded
from longrecall.ops.kernels import hopper, launch
from tests.ops.delta_rule.test_triton_delta import TOLERANCE, errors, layer_errors, make
from tests.ops.gluon_emulation import install

pytestmark = pytest.mark.skipif(not launch.interpreting(), reason="needs TRITON_INTERPRET=1 for the plain kernels")

DELTA = {"invert_kernel": 1, "walk_kernel": 2, "walk_back_kernel": 1, "keys_kernel": 1}
"""Launches of the delta rule: the chunks are walked once to read and once more to keep what the backward needs."""


@pytest.mark.parametrize("length", [1, 130])
def test_the_delta_rule(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = install(monkeypatch)
    found = errors(make({"B": 1, "H": 1, "E": 2, "R": 2, "K": 128, "V": 128}, length, torch.bfloat16))
    assert Counter(ran) == DELTA
    assert all(error < TOLERANCE[torch.bfloat16] for error in found.values()), found


@pytest.mark.parametrize(
    "change",
    [
        {"expansion": {"kind": "headwise", "factor": 2, "grafted": True}},
        {"value_heads": 2, "expansion": {"kind": "headwise", "factor": 2}},
    ],
    ids=["grafted", "shared_keys"],
)
def test_a_layer(change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    ran = install(monkeypatch)
    config = {"num_heads": 1, "key_dim": 128, "value_dim": 128} | change
    found = layer_errors(config, 65, torch.bfloat16, monkeypatch)
    # Queries and keys are expanded in the forward, and may be once more in the backward.
    counts = Counter(ran)
    assert counts.pop("forward_kernel") >= 2 == counts.pop("backward_kernel")
    assert counts == DELTA
    # A layer rounds its heads and outputs besides, and a few gradients are small beside the terms they are sums of.
    assert all(error < 2 * TOLERANCE[torch.bfloat16] for error in found.values()), found


def at_offset(x: Tensor, numbers: int) -> Tensor:
    """The same numbers in memory, so many after its beginning."""
    room = x.new_empty(x.numel() + numbers)
    room[numbers:] = x.flatten()
    return room[numbers:].view(x.shape)


def test_heads_at_odd_addresses_leave_room_for_what_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their activations are elsewhere, so that kernels serve those: as many parts of gradients as these leave."""
    install(monkeypatch)

    def why_not(x: Tensor, *others: Tensor) -> str | None:
        odd = any(one.data_ptr() % hopper.ALIGNED for one in (x, *others))
        return "odd" if odd or x.dtype != torch.bfloat16 else None

    monkeypatch.setattr(hopper, "why_not", why_not)

    def gradients(numbers: int) -> list[Tensor]:
        g = torch.Generator().manual_seed(0)

        def leaf(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g).bfloat16().requires_grad_()

        heads, leaves = [], []
        for part in range(3):
            subheads = 1 if part == 2 else 2
            projected = at_offset(leaf(2, 40, 1, 64).detach(), numbers).requires_grad_()
            weight = leaf(1, 64, 128) if part < 2 else None
            heads.append(expanded.Heads(projected, weight, leaf(subheads * 64, 4), leaf(2, subheads * 64, 3)))
            leaves += [x for x in (projected, weight, heads[-1].taps, heads[-1].state) if x is not None]
        beta = torch.rand(2, 40, 2, generator=g)
        rest = {"activation": functional.silu, "grafted": False, "scale": 0.1, "state": None, "weights": None}
        out, final = expanded.expanded_delta_rule(*heads, None, beta, **rest)
        return list(torch.autograd.grad((out, final), leaves, (torch.ones_like(out), torch.ones_like(final))))

    assert all(torch.equal(x, y) for x, y in zip(gradients(1), gradients(0), strict=True))

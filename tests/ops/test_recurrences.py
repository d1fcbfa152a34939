"""Every backend against the step-by-step reference: outputs, final state, every gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from longrecall.ops import (
    BACKENDS,
    gated_delta_rule,
    gated_linear_attention,
    generalised_delta_rule,
    merged_linear_attention,
)
from longrecall.ops.delta_rule import chunked as chunked_delta
from longrecall.ops.linear_attention import chunked as chunked_linear
from longrecall.ops.packing import pack, unpack

# Kernels do not know float64; test_triton_linear.py and test_gpu.py are theirs.
FAST = [name for name, backend in BACKENDS.items() if name != "reference" and not backend.kernels]
CASES = [
    "no_decay",
    "head_decay",
    "channel_decay",
    "grouped",
    "delta",
    "gated_delta",
    "channel_delta",
    "generalised_delta",
    "merged",
    "merged_head_decay",
    "merged_channel_decay",
]
B, H, K, V = 2, 4, 5, 7


def make(
    case: str,
    length: int,
    dtype: torch.dtype,
    seed: int = 0,
    strength: float = 1.0,
    sizes: tuple[int, int, int, int] = (B, H, K, V),
) -> tuple[Callable, list]:
    """The op of a case and its inputs, the initial state last."""
    B, H, K, V = sizes
    g = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    def decay(*shape: int) -> Tensor:
        return -strength * torch.rand(*shape, generator=g, dtype=torch.float64).to(dtype)

    heads = 2 if case == "grouped" else H
    q, k, v = randn(B, length, heads, K), randn(B, length, heads, K), randn(B, length, H, V)
    gates = {
        "head_decay": decay(B, length, H),
        "grouped": decay(B, length, H),
        "gated_delta": decay(B, length, H),
        "channel_delta": decay(B, length, H, K),
        "generalised_delta": decay(B, length, H, K),
        "channel_decay": decay(B, length, H, K),
        "merged_head_decay": decay(B, length, H),
        "merged_channel_decay": decay(B, length, H, K),
    }
    if case == "generalised_delta":
        # Removal at a unit key, a part of it put back elsewhere: the state stays bounded.
        removal = torch.nn.functional.normalize(randn(B, length, H, K), dim=-1)
        rate = torch.rand(B, length, H, K, generator=g, dtype=torch.float64).to(dtype)
        return generalised_delta_rule, [q, k, v, gates[case], removal, removal * rate, randn(B, H, K, V)]
    if "delta" in case:
        beta = torch.rand(B, length, H, generator=g, dtype=torch.float64).to(dtype)
        keys = torch.nn.functional.normalize(k, dim=-1)
        return gated_delta_rule, [q, keys, v, gates.get(case), beta, randn(B, H, K, V)]
    if case.startswith("merged"):
        return merged_linear_attention, [q, k, v, gates.get(case), randn(H, H), randn(B, H, K, H * V)]
    return gated_linear_attention, [q, k, v, gates.get(case), randn(B, H, K, V)]


def outputs_and_gradients(op: Callable, inputs: list, backend: str) -> list[Tensor]:
    """o, final state and the gradient of a fixed scalar with respect to every input."""
    leaves = [None if x is None else x.clone().requires_grad_() for x in inputs]
    o, final = op(*leaves[:-1], initial_state=leaves[-1], backend=backend)
    weights = [torch.linspace(-1, 1, x.numel(), dtype=x.dtype, device=x.device).view_as(x).sin() for x in (o, final)]
    ((o * weights[0]).sum() + (final * weights[1]).sum()).backward()
    return [o.detach(), final.detach(), *(x.grad for x in leaves if x is not None)]


def relative_error(found: list[Tensor], expected: list[Tensor], floor: float = 1e-12) -> float:
    """Largest error over all tensors, each relative to its own largest entry (at least `floor`)."""
    return max(
        float((a - b).abs().max() / max(float(b.abs().max()), floor)) for a, b in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("case", CASES)
def test_backend_over_several_segments(case: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chunks, two, and one that is not whole."""
    monkeypatch.setattr(chunked_linear, "SEGMENT_CHUNKS_CPU", 2)
    # Of the batch and the heads of `make`, with the wider of keys and values.
    monkeypatch.setattr(chunked_delta, "SEGMENT_NUMBERS_CPU", 2 * B * H * chunked_linear.CHUNK * max(K, V))
    op, inputs = make(case, 4 * chunked_linear.CHUNK + 3, torch.float64)
    expected = outputs_and_gradients(op, inputs, "reference")
    assert relative_error(outputs_and_gradients(op, inputs, backend), expected) < 1e-12


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("strength", [1e-4, 20.0, 1e4])
def test_extreme_decays_stay_finite_and_right(case: str, backend: str, strength: float) -> None:
    op, inputs = make(case, 130, torch.float32, strength=strength)
    wide = [None if x is None else x.double() for x in inputs]
    expected = outputs_and_gradients(op, wide, "reference")
    found = [x.double() for x in outputs_and_gradients(op, inputs, backend)]
    assert all(bool(torch.isfinite(x).all()) for x in found)
    # float32 sums of a few hundred terms (1e-5), and cumulative decays of up to 64 * 30 whose low bits are 1e-4. The
    # floor: where everything is forgotten at once the true gradient of the decay is below 1e-4, and 0 is as good.
    assert relative_error(found, expected, floor=1.0) < (1e-3 if strength > 1 else 1e-5)


def test_pack_inverts_unpack() -> None:
    x, cuts = torch.randn(1, 9, 3), torch.tensor([0, 4, 5, 9])
    assert torch.equal(pack(unpack(x, cuts), cuts), x)


def test_poisoned_future_does_not_reach_the_past() -> None:
    for case in CASES:
        op, inputs = make(case, 80, torch.float64)
        clean, _ = op(*inputs[:-1], initial_state=inputs[-1])
        inputs[2] = inputs[2].clone()
        inputs[2][:, 41:] = float("nan")
        dirty, _ = op(*inputs[:-1], initial_state=inputs[-1], backend="reference")
        assert torch.allclose(dirty[:, :41], clean[:, :41], atol=1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": (2, 8, 3, 5), "k": (2, 8, 3, 5)}, "3 key heads must divide the 4 value heads"),
        ({"k": (2, 8, 4, 6)}, "q and k must agree"),
        ({"log_decay": (2, 8, 5)}, "log_decay must be"),
        ({"initial_state": (2, 4, 7, 5)}, r"initial_state must be \[2, 4, 5, 7\]"),
    ],
)
def test_shapes_that_do_not_fit_are_named(change: dict, message: str) -> None:
    shapes = {"q": (2, 8, 4, 5), "k": (2, 8, 4, 5), "v": (2, 8, 4, 7), "log_decay": (2, 8, 4)} | change
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    with pytest.raises(ValueError, match=message):
        gated_linear_attention(**tensors)


def test_unknown_backend_and_bad_boundaries() -> None:
    q = torch.zeros(1, 8, 2, 4)
    with pytest.raises(ValueError, match='Did you mean "chunked"'):
        gated_linear_attention(q, q, q, None, backend="chunk")
    with pytest.raises(ValueError, match="increase from 0 to 8"):
        gated_linear_attention(q, q, q, None, cu_seqlens=torch.tensor([0, 5, 4, 8]))
    with pytest.raises(ValueError, match="B must be 1"):
        gated_linear_attention(
            q.repeat(2, 1, 1, 1), q.repeat(2, 1, 1, 1), q.repeat(2, 1, 1, 1), None, cu_seqlens=torch.tensor([0, 8])
        )

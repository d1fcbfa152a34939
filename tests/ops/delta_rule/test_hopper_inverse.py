"""The inverse in Gluon against float64: its mathematics, on the CPU; test_gpu_inverse_hopper.py runs the kernel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from longrecall.ops.linear_attention.chunked import STRONGEST_DECAY
from tests.ops.gluon_emulation import load

LEAST = STRONGEST_DECAY[torch.float32]


def draw(B: int, T: int, key_heads: int, heads: int, K: int, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Keys of norm 1, log decays, and beta up to 2.

    Keys are "random", all "equal" with beta 2, or "close" to each other; "strong" decays are past the strongest.
    """
    g = torch.Generator().manual_seed(0)
    k = torch.randn(B, T, key_heads, K, generator=g)
    if kind == "equal":
        k = torch.ones_like(k)
    elif kind == "close":
        k = k[:, :1] + 0.3 * k
    beta = torch.full((B, T, heads), 2.0) if kind == "equal" else 2 * torch.rand(B, T, heads, generator=g)
    strength = {"random": 0.2, "equal": 0.0, "close": 0.01, "strong": 2 * abs(LEAST)}[kind]
    return F.normalize(k, dim=-1).bfloat16(), -strength * torch.rand(B, T, heads, generator=g), beta


def expected(k: Tensor, log_decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """(I + L)^-1 ``[B, H, chunks, C, C]`` and the cumulative log decays ``[B, H, chunks, C]`` in float64."""
    more = -k.shape[1] % 64

    def chunks(x: Tensor) -> Tensor:
        padded = F.pad(x.double(), (0, 0) * (x.dim() - 2) + (0, more))
        return padded.unflatten(1, (-1, 64)).movedim(3, 1)

    keys = chunks(k.repeat_interleave(beta.shape[2] // k.shape[2], 2))
    G, strength = chunks(log_decay.clamp(min=LEAST)).cumsum(-1), chunks(beta)
    decay = torch.exp((G[..., None] - G[..., None, :]).tril())
    lower = (strength[..., None] * (keys @ keys.mT) * decay).tril(-1)
    return torch.linalg.inv(torch.eye(64, dtype=torch.float64, device=k.device) + lower), G


def check(found: tuple[Tensor, Tensor], inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    """The inverse is the true one rounded to bfloat16, but for sums near the middle between two."""
    P, G = expected(*inputs)
    rounding, error = (P.bfloat16() - P).square().mean().sqrt(), (found[0].double() - P).square().mean().sqrt()
    # Products of pairs of bfloat16 leave 2^-16 of numbers up to 2, a fiftieth of what the last rounding does.
    assert float(error) <= 1.02 * float(rounding), (error, rounding)
    # The last bit of the largest of these sums in float32, a few times.
    assert torch.allclose(found[1].double(), G, rtol=4e-7, atol=1e-6)


CASES = [
    (2, 64, 2, 2, 128, "random"), (1, 100, 1, 2, 64, "random"), (1, 70, 1, 1, 256, "random"),
    (1, 64, 1, 1, 128, "equal"), (1, 128, 2, 2, 128, "close"), (1, 64, 2, 2, 128, "strong"), (1, 1, 1, 1, 64, "random"),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_emulated(case: tuple[int, int, int, int, int, str]) -> None:
    k, log_decay, beta = inputs = draw(*case)
    (B, T, key_heads, K), heads, chunks = k.shape, beta.shape[2], -(-k.shape[1] // 64)
    inverse = torch.full((B, heads, chunks, 64, 64), float("nan"), dtype=torch.bfloat16)
    cumulative = torch.full((B, heads, chunks, 64), float("nan"))
    load("delta_rule.hopper.inverse").invert_kernel[(chunks * heads, B)](
        k, log_decay, beta, inverse, cumulative, T, LEAST, KEY_HEADS=key_heads, HEADS=heads, K=K,
    )  # fmt: skip
    check((inverse, cumulative), inputs)

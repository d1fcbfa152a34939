"""What gives the gradients of queries, keys and gates, with no order in time, against its formulas in float64.

Case and formulas serve tests/ops/delta_rule/test_gpu_delta_hopper.py as well.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from longrecall.ops.delta_rule.triton import backward as delta_backward
from longrecall.ops.kernels import launch

CHUNK, SCALE = 64, 0.125

RESULTS = ("queries", "keys", "beta", "log decay", "weights")

interpreted = pytest.mark.skipif(not launch.interpreting(), reason="needs TRITON_INTERPRET=1")


@dataclass(frozen=True)
class Case:
    """Sizes of a call. Value heads = key heads / subheads x repeats, state heads = key heads x repeats."""

    rows: int
    length: int
    key_heads: int
    subheads: int = 1
    repeats: int = 1
    width: int = 128

    @property
    def heads(self) -> int:
        return self.key_heads * self.repeats

    @property
    def value_heads(self) -> int:
        return self.key_heads // self.subheads * self.repeats

    @property
    def chunks(self) -> int:
        return -(-self.length // CHUNK)

    def inputs(self, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
        """What both kernels take, in their order; as the walks leave it past the end: no gradient, no decay."""
        generator = torch.Generator().manual_seed(self.length)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        B, T, n = self.rows, self.length, self.chunks
        past = torch.arange(n * CHUNK) >= T
        steps = (-0.3 * normal(B, self.heads, n * CHUNK).abs()).masked_fill(past, 0.0)
        written = (B, self.heads, n * CHUNK, self.width)
        states = (B, self.heads, n, self.width, self.width)
        narrow = {
            "q": torch.nn.functional.normalize(normal(B, T, self.key_heads, self.width), dim=-1),
            "k": torch.nn.functional.normalize(normal(B, T, self.key_heads, self.width), dim=-1),
            "beta": torch.rand(B, T, self.heads, generator=generator),
            "weights": normal(self.value_heads, self.subheads).exp(),
            "cumulative": steps.unflatten(2, (n, CHUNK)).cumsum(-1).flatten(2),
            "d_out": normal(B, T, self.value_heads, self.width),
            "states": normal(*states),
            "corrections": normal(*written).masked_fill(past[:, None], 0.0),
            "d_states": normal(*states),
            "d_targets": normal(*written).masked_fill(past[:, None], 0.0),
        }
        gates = ("beta", "weights", "cumulative")
        return {name: x.to(device, torch.float32 if name in gates else dtype) for name, x in narrow.items()}

    def outputs(self, dtype: torch.dtype, device: str, blocks: int = 1) -> list[Tensor]:
        """Room for the results, full of NaN: every number must be written."""

        def room(*shape: int) -> Tensor:
            return torch.full(shape, float("nan"), device=device)

        B, T = self.rows, self.length
        wide = [room(B, T, self.heads, self.width).to(dtype) for _ in range(2)]
        gates = [room(blocks, B, T, self.heads) for _ in range(2)]
        return [*wide, *gates, room(blocks, B, self.heads, self.chunks)]


def formulas(case: Case, inputs: dict[str, Tensor]) -> list[Tensor]:
    """Gradients of queries and keys, of beta but for the values' part, of log decays and weights, in float64."""
    head = torch.arange(case.heads)
    group = head // case.repeats
    value_head = group // case.subheads * case.repeats + head % case.repeats
    x = {name: tensor.double().cpu() for name, tensor in inputs.items()}

    def chunks_of(tensor: Tensor, heads: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(tensor, (0, 0, 0, 0, 0, case.chunks * CHUNK - case.length))
        return padded[:, :, heads].unflatten(1, (case.chunks, CHUNK)).permute(0, 3, 1, 2, 4)

    Q, K, d_O = chunks_of(x["q"], group), chunks_of(x["k"], group), chunks_of(x["d_out"], value_head)
    strength = chunks_of(x["beta"][..., None], head)
    weight = x["weights"][value_head, group % case.subheads][:, None, None, None]
    G, U, d_X = (x[name].unflatten(2, (case.chunks, CHUNK)) for name in ("cumulative", "corrections", "d_targets"))
    G = G[..., None]
    last, S, d_S = G[..., -1:, :], x["states"], x["d_states"]
    decay = (G - G.mT).tril().exp().tril()
    reads, writes = d_O @ U.mT * decay * SCALE, -(d_X @ U.mT * decay).tril(-1)
    d_Q = reads @ K + d_O @ S.mT * G.exp() * SCALE
    d_written = writes @ K - d_X @ S.mT * G.exp()
    kept = U @ d_S.mT * (last - G).exp()
    d_K = reads.mT @ Q * weight + kept + (writes * strength).mT @ K
    by_read, by_written = (d_Q * Q).sum(-1), (d_written * K).sum(-1)
    d_G = strength[..., 0] * by_written + weight[..., 0] * by_read - (d_K * K).sum(-1)
    d_G[..., -1] += last[..., 0, 0].exp() * (S * d_S).sum((-1, -2)) + (kept * K).sum((-1, -2))
    d_g = d_G.flip(-1).cumsum(-1).flip(-1)

    def in_time(tensor: Tensor) -> Tensor:
        return tensor.movedim(1, 3).flatten(1, 2)[:, : case.length]

    return [*map(in_time, (d_Q * weight, d_K + strength * d_written, by_written, d_g)), by_read.sum(-1)]


def plain(case: Case, inputs: dict[str, Tensor], mode: str, block: int) -> list[Tensor]:
    """The results of the plain kernel, whose programs have `block` channels each."""
    blocks = case.width // block
    tensors = inputs["q"]
    out = case.outputs(tensors.dtype, tensors.device.type, blocks)
    delta_backward.keys_kernel[(blocks * case.chunks, case.rows * case.heads)](
        *inputs.values(), *out, SCALE, case.length, case.chunks,
        KEY_HEADS=case.key_heads, HEADS=case.heads, SUBHEADS=case.subheads, VALUE_HEADS=case.value_heads,
        K=case.width, V=case.width, BK=block, BV=block, MODE=mode, num_warps=4, num_stages=2,
    )  # fmt: skip
    return [*out[:2], *(x.sum(0) for x in out[2:])]


def errors(found: list[Tensor], wanted: list[Tensor]) -> dict[str, float]:
    """‖found - wanted‖ / ‖wanted‖ of each result."""
    pairs = zip(RESULTS, found, wanted, strict=True)
    return {name: ((x.double().cpu() - y).norm() / y.norm()).item() for name, x, y in pairs}


@interpreted
@pytest.mark.parametrize(
    "case",
    [Case(2, 100, 1, width=32), Case(1, 70, 4, subheads=2, repeats=2, width=16)],
    ids=str,
)
def test_the_plain_kernel_equals_the_formulas(case: Case) -> None:
    inputs = case.inputs(torch.float32, "cpu")
    found = errors(plain(case, inputs, "ieee", 16), formulas(case, inputs))
    # Sums of some hundred products, each rounded to float32, which has an error of 6e-8.
    assert all(error < 5e-6 for error in found.values()), found

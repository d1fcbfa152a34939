"""Kernels launched while the one before is at work, in chains where each needs what the one before has written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from longrecall.ops.decoding.triton.products import add_product, norm_and_gate_up
from longrecall.ops.decoding.triton.recurrence import Gate, recurrence
from longrecall.ops.execution import prefetching
from longrecall.ops.kernels import dependent_launch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not dependent_launch.serves(torch.cuda.current_device()),
        reason="needs a GPU with dependent launches",
    ),
]

LINKS = 60


def alike(start: list[Tensor], work: Callable[[], None]) -> None:
    """The tensors of `start` after LINKS times `work`: with a wait for the GPU after each, at once, and as a graph."""
    kept = [x.clone() for x in start]

    def reset() -> None:
        for x, before in zip(start, kept, strict=True):
            x.copy_(before)

    for _ in range(LINKS):
        work()
        torch.cuda.synchronize()
    expected = [x.clone() for x in start]
    reset()
    for _ in range(LINKS):
        work()
    assert all(torch.equal(*pair) for pair in zip(start, expected, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LINKS):
            work()
    for _ in range(5):
        reset()
        graph.replay()
        assert all(torch.equal(*pair) for pair in zip(start, expected, strict=True))


@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "K", "V"), [("delta", 128, 128), ("channel", 256, 512)])
def test_steps_on_one_state(kind: str, K: int, V: int, dtype: torch.dtype, rows: int) -> None:
    """A step reads what the one right before it has written: nothing is promised here."""
    g = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, device="cuda").bfloat16()

    heads = 4
    q, k, v = draw(rows, heads * K), draw(rows, heads * K), draw(rows, heads * V)
    gate = Gate("delta", draw(rows, heads), draw(heads), draw(heads)) if kind == "delta" else None
    gate = gate or Gate("channel", draw(rows, heads * K), divisor=16.0)
    beta = draw(rows, heads) if kind == "delta" else None
    state = draw(rows, heads, K, V).to(dtype)
    normed = {"beta": beta, "normalise": True} if kind == "delta" else {}

    def work() -> None:
        recurrence(q, k, v, state, gate, scale=0.1, key_heads=heads, value_heads=heads, **normed)

    alike([state], work)


@pytest.mark.parametrize("ahead", [False, True])
def test_products_of_one_stream(ahead: bool) -> None:
    """Weights are written by nobody, so they may be read ahead; the stream is written by every second kernel."""
    g = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=g, device="cuda") * shape[-1] ** -0.5).bfloat16()

    norm, gate, up, down = (
        torch.ones(1024, device="cuda").bfloat16(),
        draw(2816, 1024),
        draw(2816, 1024),
        draw(1024, 2816),
    )
    stream = torch.randn(1, 1024, generator=g, device="cuda").bfloat16()
    torch.cuda.synchronize()

    def work() -> None:
        add_product(norm_and_gate_up(stream, norm, 1e-6, gate, up), down, stream)

    if ahead:
        with prefetching():
            alike([stream], work)
    else:
        alike([stream], work)

"""The kernels of the linear recurrence on a GPU against float64 on the CPU; and an RG-LRU layer in a CUDA graph."""

from __future__ import annotations

import pytest
import torch

from longrecall.layers.mixers.registry import mixer_config
from tests.ops.linear_recurrence.test_linear_recurrence import EVERY, OPS, largest_error, outputs_and_gradients

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@EVERY
@pytest.mark.parametrize(("length", "channels"), [(1, 64), (64, 128), (65, 37), (333, 200), (1000, 1)])
@pytest.mark.parametrize("strength", [1e-4, 1.0, 20.0])
def test_kernels_equal_float64(name: str, length: int, channels: int, strength: float) -> None:
    op, make = OPS[name]
    tensors = make(length, strength, batch=3, channels=channels)
    found = outputs_and_gradients(op, [tensor.float().cuda() for tensor in tensors], "triton")
    expected = outputs_and_gradients(op, tensors, "reference")
    # float32 sums of up to a thousand terms. The floor: where all is forgotten at once the gradient of a decay is next
    # to nothing, and 0 is as good.
    assert largest_error([tensor.cpu() for tensor in found], expected, floor=1.0) < 2e-5


def test_a_layer_is_captured_in_a_cuda_graph() -> None:
    torch.manual_seed(0)
    layer = mixer_config({"type": "rg_lru", "inner_dim": 96, "num_heads": 3}).build(64).cuda()
    x, position = torch.randn(2, 200, 64, device="cuda"), torch.zeros(2, dtype=torch.long, device="cuda")
    with torch.no_grad():
        expected, state = layer(x, None, mask=None, position=position)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found, after = layer(x, None, mask=None, position=position)
        graph.replay()
    assert torch.equal(found, expected) and torch.equal(after["recurrent"], state["recurrent"])

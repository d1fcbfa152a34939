"""Softmax attention without padding in one piece: the same as block by block, on a GPU too."""

from __future__ import annotations

import pytest
import torch

from longrecall.layers import softmax_attention
from longrecall.layers.mixers.attention import AttentionConfig
from longrecall.layers.softmax_attention import Scoring, attend, attend_causally

CONFIG = AttentionConfig(num_heads=4, head_dim=16, kv_heads=2)


@pytest.mark.parametrize("length", [1, 7, 40])
def test_in_one_piece_as_in_blocks(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(softmax_attention, "QUERY_BLOCK", 16)
    generator = torch.Generator().manual_seed(length)
    q = torch.randn(2, length, 4, 16, generator=generator, dtype=torch.float64)
    k, v = (torch.randn(2, length, 2, 16, generator=generator, dtype=torch.float64) for _ in range(2))
    positions = torch.arange(length).expand(2, -1)
    expected = attend(q, k, v, positions, positions, Scoring(0.25))
    torch.testing.assert_close(attend_causally(q, k, v), expected, rtol=1e-12, atol=1e-12)
    # The last queries alone, as in a piece of a sequence.
    last = slice(length // 3, None)
    torch.testing.assert_close(attend_causally(q[:, last], k, v), expected[:, last], rtol=1e-12, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("keys", "values", "groups"), [(64, 64, 2), (192, 128, 4), (64, 128, 2)])
def test_last_queries_on_a_gpu(keys: int, values: int, groups: int) -> None:
    """A piece of a sequence, and its gradients, in the memory of its keys and not of its scores."""
    generator = torch.Generator().manual_seed(keys)
    shapes = ((2, 8192, 4, keys), (2, 16384, groups, keys), (2, 16384, groups, values))
    inputs = [torch.randn(shape, generator=generator).cuda().bfloat16().requires_grad_() for shape in shapes]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = attend_causally(*inputs)
    found.sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 2 * 4 * 8192 * 16384 / 2
    own = [x.detach().float().requires_grad_() for x in inputs]
    places = torch.arange(16384, device="cuda").expand(2, -1)
    expected = attend(*own, places[:, 8192:], places, Scoring(keys**-0.5), in_order=True)
    expected.sum().backward()
    pairs = [(found, expected), *((x.grad, y.grad) for x, y in zip(inputs, own, strict=True))]
    for one, other in pairs:
        assert one is not None and other is not None
        # bfloat16 inputs and products: a few roundings of 2^-9 each.
        assert float((one.detach().float() - other.detach()).norm() / other.detach().norm()) < 2e-2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@torch.no_grad()
def test_a_text_on_a_gpu_reads_as_on_the_cpu() -> None:
    torch.manual_seed(0)
    layer, x = CONFIG.build(32).double(), torch.randn(2, 300, 32, dtype=torch.float64)
    position = torch.zeros(2, dtype=torch.long)
    expected, cache = layer(x, None, mask=None, position=position)
    found, own = layer.cuda().bfloat16()(x.cuda().bfloat16(), None, mask=None, position=position.cuda())
    # bfloat16 weights, inputs and products: a few roundings of 2^-9 each.
    assert float((found.cpu().double() - expected).norm() / expected.norm()) < 2e-2
    assert torch.equal(own["position"].cpu(), cache["position"])

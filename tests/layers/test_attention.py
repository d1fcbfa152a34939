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

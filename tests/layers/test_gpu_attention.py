"""Attention with options on a GPU: flash, masks with groups, and the captured steps of both kinds, as on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from longrecall.layers.mixers.registry import mixer_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

QWEN = {"type": "attention", "num_heads": 8, "kv_heads": 2, "head_dim": 256, "rotary_share": 0.25, "qk_norm": "head"}
CASES: dict[str, dict[str, Any]] = {
    "qwen": QWEN | {"qk_norm_offset": 1.0, "output_gate": True},
    "window": QWEN | {"window": 100, "scale": 0.02},
    "capped": QWEN | {"soft_cap": 3.0, "head_dim": 64},
    "wide_values": QWEN | {"value_dim": 128, "head_dim": 64},
    "latent": {"type": "mla", "num_heads": 8, "kv_rank": 512, "nope_dim": 128, "rope_dim": 64, "value_dim": 128},
}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_a_text_reads_as_on_the_cpu(name: str, padded: bool) -> None:
    torch.manual_seed(0)
    config = mixer_config(CASES[name])
    layer, x = config.build(128).double(), torch.randn(2, 300, 128, dtype=torch.float64)
    position, mask = torch.zeros(2, dtype=torch.long), torch.arange(300) >= torch.tensor([[0], [70]])
    given = mask if padded else None
    expected, state = layer(x[:, :298], None, mask=None if given is None else given[:, :298], position=position)
    read = mask[:, :298].sum(1) if padded else position + 298
    more, _ = layer(x[:, 298:], state, mask=None, position=read)
    layer, x, position, read = layer.cuda().bfloat16(), x.cuda().bfloat16(), position.cuda(), read.cuda()
    found, own = layer(x[:, :298], None, mask=None if given is None else given[:, :298].cuda(), position=position)
    rest, _ = layer(x[:, 298:], own, mask=None, position=read)
    assert torch.equal(own["position"].cpu(), state["position"])
    for one, other in ((found[mask[:, :298].cuda()], expected[mask[:, :298]]), (rest, more)):
        # bfloat16 weights, inputs and products: a few roundings of 2^-9 each.
        assert float((one.cpu().double() - other).norm() / other.norm()) < 2e-2

"""A text read from its first token on in few launches: the same as the layer in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from longrecall.layers.mixers.registry import mixer_config
from longrecall.layers.retrieval import fused
from longrecall.layers.retrieval.module import Retrieval
from longrecall.layers.tokens import TokenContext
from longrecall.models.config import RecurrentConfig
from longrecall.models.recurrent_lm import RecurrentLM
from tests.conftest import MIXERS

launch = pytest.importorskip("longrecall.ops.kernels.launch")

WIDTH = 32
SIZES = {"chunk": 5, "top_k": 2, "encoder_dim": 12, "num_heads": 4, "head_dim": 6, "kv_heads": 2, "alpha": 0.3}


def layer_of(**changes: Any) -> Retrieval:
    torch.manual_seed(0)
    layer = mixer_config({"type": "retrieval", "base": MIXERS["gla"], **SIZES, **changes}).build(WIDTH)
    assert isinstance(layer, Retrieval)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return layer


def text(rows: int, length: int) -> tuple[Tensor, Tensor, TokenContext]:
    g = torch.Generator().manual_seed(rows)
    table = nn.Embedding(40, WIDTH)
    table.weight.data = torch.randn(40, WIDTH, generator=g)
    ids = torch.randint(0, 40, (rows, length), generator=g)
    x, y = (torch.randn(rows, length, WIDTH, generator=g) for _ in range(2))
    return x, y, TokenContext.read(None, ids, None, table)


@pytest.mark.skipif(not launch.interpreting(), reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize(
    ("rows", "length", "changes"),
    [
        (2, 37, {"blend": "input"}),
        (1, 37, {"blend": "learned", "top_k": 4}),
        (2, 12, {"blend": "fixed", "top_k": 3}),
        (1, 34, {"blend": "input", "chunk": 16, "top_k": 1}),
    ],
)
@torch.no_grad()
def test_as_in_plain_torch(rows: int, length: int, changes: dict[str, Any]) -> None:
    """More chunks than are read, as many, fewer than candidates; tokens before the first chunk's end."""
    layer, (x, y, context) = layer_of(**changes), text(rows, length)
    expected, vectors = layer.retrieve(x, y, None, context, None)
    found = fused.read(layer, x, y, vectors, context)
    # float32 sums of a few dozen terms in another order.
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    first = layer.config.chunk
    assert torch.equal(found[:, :first], y[:, :first]) and not torch.equal(found[:, first], y[:, first])


@torch.no_grad()
def test_what_is_left_to_plain_torch() -> None:
    layer, (x, _, context) = layer_of(), text(1, 12)
    assert fused.why_not(layer, x, context, None) == "not on a GPU, or mixed dtypes"
    mask = torch.ones(1, 12, dtype=torch.bool)
    assert "padding" in str(fused.why_not(layer, x, context, mask))
    assert "selector" in str(fused.why_not(layer_of(selector="hard"), x, context, None))
    with torch.enable_grad():
        assert "gradients" in str(fused.why_not(layer, x, context, None))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changes", [{}, {"blend": "learned", "top_k": 4}, {"chunk": 16, "blend": "fixed"}])
def test_a_model_reads_the_same_with_and_without_gradients(
    changes: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    mixer = {"type": "retrieval", "base": MIXERS["mamba2"], **SIZES, "blend": "input", **changes}
    config = RecurrentConfig(vocab_size=40, hidden_size=WIDTH, layers=[{"mixer": mixer}], initializer_range=0.3)
    model = RecurrentLM(config).cuda().to(dtype).eval()
    ids = torch.randint(0, 40, (2, 300), device="cuda")
    expected = model(ids).logits.detach()
    seen: list[int] = []
    whole = fused.read
    monkeypatch.setattr(fused, "read", lambda *a: (seen.append(1), whole(*a))[1])
    with torch.no_grad():
        found = model(ids).logits
    assert seen == [1]
    wrong = (found - expected).float().norm(dim=-1) > (1e-3 if dtype == torch.float32 else 0.1) * expected.float().norm(
        dim=-1
    )
    # Products within a rounding of each other may choose other chunks: few tokens differ, the others hardly.
    assert float(wrong.float().mean()) < (0.01 if dtype == torch.float32 else 0.2)

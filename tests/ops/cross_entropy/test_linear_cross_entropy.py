"""The loss of a linear head against float64, in torch and by the kernel (Triton's interpreter, or a GPU)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from longrecall.models.losses import next_token_loss, next_token_loss_of_hidden
from longrecall.ops.cross_entropy import op
from longrecall.ops.cross_entropy.op import linear_cross_entropy, piece_tokens

pytest.importorskip("triton")
pytest.importorskip("longrecall.ops.cross_entropy.triton.pieces")
launch = pytest.importorskip("longrecall.ops.kernels.launch")

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
interpreted = pytest.mark.skipif(not (GPU or launch.interpreting()), reason="needs TRITON_INTERPRET=1 or a GPU")

# Norm of the error over the norm: logits and their gradients are rounded to the products' type, 8 or 11 bits. float32:
# sums of a few hundred terms.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
# Tokens, vocabulary, width: one row and a part of a block; blocks that end inside; a vocabulary of more than a block.
SHAPES = [(1, 7, 16), (37, 300, 24), (20, 4100, 8)]


def draw(tokens: int, vocabulary: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(tokens)
    # Logits of a few units: softmax is neither flat nor one-hot.
    states = torch.randn(tokens, width, generator=g).to(dtype)
    weight = (2 * torch.randn(vocabulary, width, generator=g) / width**0.5).to(dtype)
    labels = torch.randint(0, vocabulary, (tokens,), generator=g)
    labels[1::5] = -100
    labels[-1] = vocabulary - 1
    return states, weight, labels


def outcome(states: Tensor, weight: Tensor, labels: Tensor, **options: Any) -> dict[str, Tensor]:
    """The loss and the gradients, scaled as a mean over many tokens would be, in float64."""
    states, weight = states.detach().requires_grad_(), weight.detach().requires_grad_()
    total = linear_cross_entropy(states, weight, labels, **options)
    (total * 0.037).backward()
    assert states.grad is not None and weight.grad is not None
    assert states.grad.dtype == states.dtype and weight.grad.dtype == weight.dtype
    found = {"loss": total, "states": states.grad, "weight": weight.grad}
    return {name: x.detach().double().cpu() for name, x in found.items()}


@interpreted
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel_equals_float64(
    shape: tuple[int, int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Pieces of 16 tokens, the last one shorter.
    monkeypatch.setattr(op, "FEWEST_TOKENS", 16)
    monkeypatch.setattr(op, "PIECE_BYTES", 0)
    states, weight, labels = draw(*shape, dtype)
    expected = outcome(states.double(), weight.double(), labels, backend="reference")
    inputs = [x.to(DEVICE) for x in (states, weight, labels)]
    found = outcome(*inputs, backend="triton")
    # As in training: weights of float32, products in the narrow type.
    mixed = outcome(inputs[0], inputs[1].float(), inputs[2], dtype=dtype, backend="triton")
    for name, y in expected.items():
        assert (found[name] - y).norm() <= TOLERANCE[dtype] * y.norm(), name
        assert (mixed[name] - y).norm() <= TOLERANCE[dtype] * y.norm(), name


def test_reference_is_the_cross_entropy_of_logits() -> None:
    states, weight, labels = draw(37, 300, 24, torch.float64)
    total = linear_cross_entropy(states, weight, labels)
    expected = F.cross_entropy(states @ weight.t(), labels, ignore_index=-100, reduction="sum")
    torch.testing.assert_close(total, expected)


@interpreted
def test_labels_that_are_none() -> None:
    states, weight, labels = (x.to(DEVICE) for x in draw(20, 50, 8, torch.float32))
    found = outcome(states, weight, torch.full_like(labels, -100), backend="triton")
    assert not any(x.any() for x in found.values())
    labels[3] = 50
    assert linear_cross_entropy(states, weight, labels, backend="triton").isnan()
    none = outcome(states[:0], weight, labels[:0], backend="triton")
    assert not any(x.any() for x in none.values()) and none["weight"].shape == weight.shape


@interpreted
def test_gradients_only_where_they_are_asked_for() -> None:
    states, weight, labels = (x.to(DEVICE) for x in draw(20, 50, 8, torch.float32))
    frozen = linear_cross_entropy(states.requires_grad_(), weight, labels, backend="triton")
    frozen.backward()
    assert states.grad is not None and weight.grad is None
    with torch.no_grad():
        assert linear_cross_entropy(states, weight, labels, backend="triton") == frozen


@interpreted
def test_unlikely_tokens_have_gradients_in_float16() -> None:
    """Of tokens less likely than 6e-8, the smallest number of float16: training pushes them down all the same."""
    states, weight = torch.ones(4, 1), torch.linspace(0, -19, 20)[:, None]
    labels = torch.zeros(4, dtype=torch.long)
    expected = outcome(states.double(), weight.double(), labels, backend="reference")
    inputs = [x.to(DEVICE) for x in (states.half(), weight, labels)]
    found = outcome(*inputs, dtype=torch.float16, backend="triton")
    # float16 has steps of 6e-8 there; 6e-9 times 256 is 24 of them.
    torch.testing.assert_close(found["weight"], expected["weight"], rtol=0.03, atol=0)


def test_pieces_fill_their_bytes() -> None:
    assert piece_tokens(32768, 32000, 2) == 4096
    assert piece_tokens(100, 32000, 2) == 100
    # However large the vocabulary.
    assert piece_tokens(32768, 4_000_000, 4) == 128


def test_each_state_has_a_label() -> None:
    """Kernels read as many labels as there are states, whatever lies behind them."""
    states, weight, labels = draw(20, 50, 8, torch.float64)
    with pytest.raises(ValueError, match="20 labels for 10 states"):
        linear_cross_entropy(states[:10], weight, labels)
    # Of hidden states and of logits alike: with the next piece's first label, or without.
    rows, ids = states.view(2, 10, 8), labels.view(2, 10)
    for given in (ids, torch.cat([ids, ids[:, :1]], 1)):
        # float64 sums in another order.
        expected = next_token_loss(rows @ weight.t(), given)
        torch.testing.assert_close(next_token_loss_of_hidden(rows, weight, given), expected)
    with pytest.raises(ValueError, match="22 labels for 20 states"):
        next_token_loss_of_hidden(rows, weight, torch.cat([ids, ids[:, :2]], 1))

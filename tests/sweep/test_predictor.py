from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from longrecall.models.config import RecurrentConfig
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.sweep.examples import epoch_order, label_places
from longrecall.sweep.predictor import IGNORE, LastStateDecoder, Predictor, decoder_parameters, label_loss, sinusoids

MIXER = {"type": "gla", "num_heads": 2, "key_dim": 4, "value_dim": 4}


def model(tied: bool = True) -> RecurrentLM:
    torch.manual_seed(0)
    layers = [{"mixer": MIXER, "mlp_size": 8}]
    config = RecurrentConfig(vocab_size=13, hidden_size=8, layers=layers, tie_word_embeddings=tied)
    return RecurrentLM(config).double()


def labels(rows: int = 3, length: int = 9) -> torch.Tensor:
    """Rows with two labels, one and none."""
    made = torch.full((rows, length), IGNORE)
    made[0, 2], made[0, 7], made[1, length - 1] = 5, 12, 0
    return made


@pytest.mark.parametrize("tied", [True, False])
def test_the_loss_at_labelled_positions_is_the_full_loss(tied: bool) -> None:
    lm, asked = model(tied), labels()
    ids = torch.randint(13, asked.shape)
    full = F.cross_entropy(lm(ids).logits.flatten(0, 1), asked.flatten(), ignore_index=IGNORE)
    expected = torch.autograd.grad(full, list(lm.parameters()))
    positions, targets = label_places(asked)
    logits, added = Predictor(lm, "positions")(ids, positions)
    assert logits.shape == (3, 2, 13) and added is None
    loss = label_loss(logits, targets)
    # float64: the same sums in another order.
    torch.testing.assert_close(loss, full, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(torch.autograd.grad(loss, list(lm.parameters())), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_no_label_is_no_loss() -> None:
    logits = torch.randn(2, 3, 5, requires_grad=True)
    loss = label_loss(logits, torch.full((2, 3), IGNORE))
    loss.backward()
    assert loss.item() == 0.0 and logits.grad is not None and not logits.grad.any()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(-1, 4), min_size=6, max_size=6), min_size=1, max_size=5))
def test_label_places_finds_every_label_in_order(rows: list[list[int]]) -> None:
    asked = torch.tensor([[IGNORE if label < 0 else label for label in row] for row in rows])
    positions, targets = label_places(asked)
    assert positions.shape == targets.shape
    assert positions.shape[1] == max(1, max(sum(label >= 0 for label in row) for row in rows))
    for row, at, found in zip(rows, positions.tolist(), targets.tolist(), strict=True):
        expected = [(index, label) for index, label in enumerate(row) if label >= 0]
        assert list(zip(at, found, strict=True))[: len(expected)] == expected
        assert set(found[len(expected) :]) <= {IGNORE} and set(at[len(expected) :]) <= {0}


def test_an_epoch_has_every_row_once_and_blanks_at_the_end() -> None:
    for shuffle in (False, True):
        order = epoch_order(10, 4, shuffle, seed=3, epoch=1)
        assert order.shape == (3, 4) and order.flatten()[10:].tolist() == [10, 10]
        assert sorted(order.flatten()[:10].tolist()) == list(range(10))
    orders = [epoch_order(30, 30, True, seed, epoch).flatten().tolist() for seed in (0, 1) for epoch in (0, 1, 2)]
    assert len({tuple(order) for order in orders}) == 6
    assert epoch_order(30, 30, True, 1, 2).flatten().tolist() == orders[-1]


def test_the_decoder_sees_the_last_state_and_the_position_alone() -> None:
    lm = model()
    predictor = Predictor(lm, "last_state").double()
    assert predictor.decoder is not None
    ids = torch.randint(13, (2, 6))
    positions = torch.arange(6).expand(2, 6)
    logits, _ = predictor(ids, positions)
    state = lm(ids, output_hidden_states=True).hidden_states[-1][:, -1]
    for at in range(6):
        one = predictor.decoder(state, positions[:, at : at + 1])
        torch.testing.assert_close(logits[:, at : at + 1], one, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(logits[:, 0], logits[:, 1])
    logits.sum().backward()
    assert all(p.grad is not None and p.grad.any() for name, p in predictor.named_parameters() if "decoder" in name)


def test_positions_are_sines_and_cosines_of_one_angle() -> None:
    found = sinusoids(torch.tensor([0, 7]), 8)
    assert found[0].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    # sin^2 + cos^2, in float32.
    torch.testing.assert_close(found[:, :4] ** 2 + found[:, 4:] ** 2, torch.ones(2, 4), rtol=1e-6, atol=1e-6)
    assert found[1, 0].item() == pytest.approx(np.sin(7), abs=1e-6)
    assert sinusoids(torch.tensor([3]), 5).shape == (1, 5)


def test_parameters_of_the_decoder() -> None:
    assert decoder_parameters(8, 13) == sum(p.numel() for p in LastStateDecoder(8, 13).parameters())


def test_dropout_of_embeddings() -> None:
    ids, positions = torch.randint(13, (2, 6)), torch.zeros(2, 1, dtype=torch.long)
    lm = model()
    plain, _ = Predictor(lm, "positions")(ids, positions)
    generator = torch.Generator().manual_seed(1)
    predictor = Predictor(lm, "positions", 0.5, generator)
    first, second = predictor(ids, positions)[0], predictor(ids, positions)[0]
    assert not torch.equal(first, second)
    generator.manual_seed(1)
    assert torch.equal(predictor(ids, positions)[0], first)
    predictor.eval()
    assert torch.equal(predictor(ids, positions)[0], plain)
    # 20000 numbers of 1: kept with probability 1/2 as 2, so the mean is 1 within 5 deviations of 1 / sqrt(20000).
    kept = predictor.dropout.train()(torch.ones(20000))
    assert set(kept.tolist()) == {0.0, 2.0} and abs(kept.mean().item() - 1) < 5 / 20000**0.5

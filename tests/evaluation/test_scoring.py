"""Teacher-forced scoring equals greedy generation, and reading in segments equals reading at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import longrecall
from longrecall import RecurrentLM, load
from longrecall.evaluation.reading import Predictions, pad_right, read_predictions
from longrecall.evaluation.scoring import score
from longrecall.tasks import IGNORE

ASSETS = Path(longrecall.__file__).parent / "assets"


def prompts_and_answers(model: RecurrentLM, count: int, size: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Random prompts; the answers are greedy text of the model, spoilt at a random place in half of the cases."""
    rng = np.random.default_rng(0)
    cases = []
    for case in range(count):
        prompt = rng.integers(0, 258, size=int(rng.integers(3, 40)))
        answer = greedy(model, prompt, size)
        if case % 2:
            place = int(rng.integers(size))
            answer[place] = (answer[place] + 1 + rng.integers(257)) % 258
        cases.append((prompt, answer))
    return cases


def greedy(model: RecurrentLM, prompt: np.ndarray, size: int) -> np.ndarray:
    out = model.generate(
        torch.from_numpy(prompt)[None], max_new_tokens=size, do_sample=False, eos_token_id=None, pad_token_id=257
    )
    return out[0, len(prompt) :].numpy().copy()


def test_teacher_forcing_equals_exact_match_of_generate(model: RecurrentLM) -> None:
    cases = prompts_and_answers(model, 24, 4)
    ids = [np.concatenate(case) for case in cases]
    labels = [np.concatenate([np.full(len(prompt), IGNORE), answer]) for prompt, answer in cases]
    read = read_predictions(model, pad_right(ids, 0), pad_right(labels, IGNORE), segment_tokens=1000)
    scores = score(labels, read)
    generated = [bool((greedy(model, prompt, 4) == answer).all()) for prompt, answer in cases]
    assert scores.right.astype(bool).tolist() == generated
    # Neither always right nor always wrong, or the equality would say little.
    assert sum(generated) == 12
    assert len({tuple(answer) for _, answer in cases}) > 12
    assert (scores.asked == 1).all() and not scores.diverged.any()


@pytest.mark.parametrize("segment", [1, 3, 7, 29, 30, 64])
def test_segments_equal_one_pass(model: RecurrentLM, segment: int) -> None:
    rng = np.random.default_rng(1)
    ids = rng.integers(0, 258, size=(3, 30))
    labels = np.where(rng.random((3, 30)) < 0.3, ids, IGNORE)
    labels[1, :20] = IGNORE
    labels[0, 0] = ids[0, 0]  # nothing predicts the first token: it must not be scored
    whole = read_predictions(model, ids, labels, 1000)
    parts = read_predictions(model, ids, labels, segment)
    np.testing.assert_array_equal(parts.row, whole.row)
    np.testing.assert_array_equal(parts.column, whole.column)
    # float32 sums in another order; losses are of size 10.
    np.testing.assert_allclose(parts.loss, whole.loss, atol=1e-3)
    assert len(whole.loss) == int((labels[:, 1:] != IGNORE).sum())


def test_losses_equal_the_models_own(model: RecurrentLM) -> None:
    ids = np.random.default_rng(2).integers(0, 258, size=(2, 20))
    tensor = torch.from_numpy(ids)
    with torch.no_grad():
        expected = float(model(tensor, labels=tensor).loss)
    # The same float32 losses averaged in float64 instead of float32.
    assert read_predictions(model, ids, ids, 100).loss.mean() == pytest.approx(expected, rel=1e-5)


def test_a_model_without_logits_to_keep(model: RecurrentLM) -> None:
    class Plain:
        device = model.device

        def forward(self, ids: torch.Tensor, past_key_values: Any, use_cache: bool) -> Any:
            return model(ids, past_key_values=past_key_values, use_cache=use_cache)

        __call__ = forward

    ids = np.random.default_rng(3).integers(0, 258, size=(2, 25))
    labels = np.full_like(ids, IGNORE)
    labels[:, [5, 17]] = ids[:, [5, 17]]
    # The head's matrix product over fewer rows may round differently.
    np.testing.assert_allclose(
        read_predictions(Plain(), ids, labels, 10).loss, read_predictions(model, ids, labels, 10).loss, atol=1e-4
    )


def test_no_labels_at_all(model: RecurrentLM) -> None:
    ids = np.zeros((2, 5), dtype=np.int64)
    read = read_predictions(model, ids, np.full_like(ids, IGNORE), 3)
    assert len(read.loss) == 0


def predictions(row: list[int], column: list[int], margin: list[float], finite: list[bool]) -> Predictions:
    """Positions whose label leads by `margin`, where rounding moves margins by 1."""
    return Predictions(
        row=np.array(row),
        column=np.array(column),
        right=np.array(margin) > 0,
        loss=np.zeros(len(row)),
        finite=np.array(finite),
        margin=np.array(margin),
        doubt=np.ones(len(row)),
    )


def test_only_a_whole_answer_counts() -> None:
    labels = [np.array([IGNORE, 1, 2, IGNORE, 3]), np.array([IGNORE, 4, IGNORE])]
    scores = score(labels, predictions([0, 0, 0, 1], [1, 2, 4, 1], [9.0, -9.0, 9.0, -9.0], [True, True, True, False]))
    assert (scores.right.tolist(), scores.asked.tolist()) == ([1, 0], [2, 1])
    assert (scores.right_tokens.tolist(), scores.tokens.tolist()) == ([2, 0], [3, 1])
    assert scores.diverged.tolist() == [False, True]
    assert not scores.close.any() and not scores.close_tokens.any()


@pytest.mark.parametrize(
    ("margins", "close", "close_tokens"),
    [
        ([9.0, 9.0, 0.5], True, True),
        ([9.0, 9.0, -0.5], True, True),
        ([0.5, -0.5, 9.0], True, True),
        ([9.0, 9.0, 0.0], True, True),
        # A token that is clearly wrong settles the answer, not the count of tokens.
        ([-9.0, 0.5, 9.0], False, True),
        ([-9.0, 9.0, -9.0], False, False),
    ],
)
def test_what_rounding_could_change(margins: list[float], close: bool, close_tokens: bool) -> None:
    labels = [np.array([IGNORE, 1, 2, IGNORE, 3])]
    scores = score(labels, predictions([0, 0, 0], [1, 2, 4], margins, [True] * 3))
    assert (scores.close.tolist(), scores.close_tokens.tolist()) == ([close], [close_tokens])


@pytest.mark.parametrize("name", ["gla-base", "mamba2-base"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_doubts_cover_what_rounding_does(name: str, dtype: str) -> None:
    """Other segments, padding and batches on real text: no margin moves by as much as its doubt."""
    model = load(ASSETS / name, dtype=dtype)
    text = (ASSETS / "text" / "held_out.txt").read_bytes()[5000:8600]
    ids = np.frombuffer(text, dtype=np.uint8).astype(np.int64).reshape(12, 300)
    one = read_predictions(model, ids, ids, 1024)
    others = [read_predictions(model, ids, ids, 77)]
    rows = [read_predictions(model, row[None], row[None], 50) for row in ids[:4]]
    for other in others:
        assert (np.abs(other.margin - one.margin) < one.doubt).all()
        # Were the doubts never near what happens, they would cost much for nothing.
        assert np.abs((other.margin - one.margin) / one.doubt).max() > 1e-3
    for row, other in enumerate(rows):
        mine = one.row == row
        assert (np.abs(other.margin - one.margin[mine]) < one.doubt[mine]).all()
    undecided = one.right != others[0].right
    assert one.close[undecided].all()
    if dtype == "bfloat16" and name == "gla-base":
        assert undecided.any()  # so the doubts are needed

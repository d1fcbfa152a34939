"""Answers do not depend on batches: every size, unequal lengths, shared beginnings, every mixer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from longrecall import RecurrentConfig, RecurrentLM
from longrecall.evaluation import evaluate
from longrecall.evaluation.memory import Room
from longrecall.evaluation.reading import read_continuations, read_predictions, read_prompts
from longrecall.evaluation.recall import CellJob
from longrecall.tasks.encoding import IGNORE, Cell, ChoiceSample, PieceEncoder, QuestionSample, Sample
from tests.conftest import MIXERS
from tests.evaluation.conftest import tiny_model

SIZES = (1, 130, 10**5)
"""Tokens of a batch: one row, some, all."""


def one_layer(mixer: dict[str, Any], dtype: torch.dtype = torch.float32) -> RecurrentLM:
    torch.manual_seed(1)
    layer = {"mixer": mixer, "mlp_size": 24}
    config = RecurrentConfig(vocab_size=258, hidden_size=32, layers=[layer], initializer_range=0.5)
    return RecurrentLM(config).eval().to(dtype)


def tokens(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(97, 123, length)


@dataclass(frozen=True)
class Quiz:
    """Documents with several questions of unequal lengths; the model goes on from a question as it likes."""

    documents: int = 3
    document_tokens: int = 90
    answer_tokens: int = 4
    shared: bool = True
    text_metrics: tuple[str, ...] = ()

    name: ClassVar[str] = "quiz"

    def cells(self, lengths: Sequence[int]) -> list[Cell]:
        return [{"length": length} for length in lengths]

    def answers_per_sample(self, cell: Cell) -> int:
        return 1

    def sample(self, encode: PieceEncoder, cell: Cell, index: int, seed: int) -> QuestionSample:
        which = index % self.documents
        ids = np.concatenate((tokens(which, self.document_tokens + which), tokens(100 + index, 3 + 5 * (index % 7))))
        labels = np.concatenate((np.full(len(ids), IGNORE), [98]))
        group = f"document {which}" if self.shared else None
        size = (self.document_tokens + which) * self.shared
        return QuestionSample(np.append(ids, 98), labels, "?", "b", group=group, shared=size)

    def ended(self, said: str) -> bool:
        return bool(said) and ord(said[-1]) % 3 == 0

    def answer_of(self, said: str) -> str:
        return said

    def judge(self, cell: Cell, sample: QuestionSample, said: str) -> bool:
        return any(letter in said for letter in "bcdfgh")


@dataclass(frozen=True)
class Choices(Quiz):
    """The same documents and questions, with options of unequal lengths."""

    choices: ClassVar[bool] = True
    name: ClassVar[str] = "choices"

    def sample(self, encode: PieceEncoder, cell: Cell, index: int, seed: int) -> Any:  # type: ignore[override]
        asked = super().sample(encode, cell, index, seed)
        options = tuple(tokens(1000 + 10 * index + place, 1 + (index + place) % 4) for place in range(2 + index % 3))
        return ChoiceSample(asked.input_ids[:-1], options, index % 2, asked.group, asked.shared)


def records(model: Any, tokenizer: Any, task: Any, batch_tokens: int, count: int = 23) -> dict[int, Any]:
    room = Room(model, batch_tokens, 40)
    job = CellJob(model, tokenizer, PieceEncoder(tokenizer), task, {"length": 1}, count, 0, room)
    found: dict[int, Any] = {}
    for part in job.run(range(job.count), lambda tokens: None):
        found |= part
    return dict(sorted(found.items()))


CHOOSING = ("gla_conv", "mom", "handover", "attention", "mla", "base_conv_implicit", "hyena", "hymba", "retrieval")
"""A mixer for each kind of state: questions show that those of all others go on from a shared beginning."""


@pytest.mark.parametrize(
    ("kind", "name"),
    [(Quiz, name) for name in MIXERS]
    + [pytest.param(Choices, name, marks=() if name in CHOOSING else pytest.mark.slow) for name in MIXERS],
)
def test_answers_are_the_same_for_every_batch_size(kind: type[Quiz], name: str, tokenizer: Any) -> None:
    # As many as it takes for answers of several lengths, and for options in both places.
    model, task, count = one_layer(MIXERS[name]), kind(), 10 if kind is Quiz else 14
    # Some at once are put together as all are: that is one way for each kind of state.
    sizes = SIZES if name in CHOOSING else (SIZES[0], SIZES[-1])
    all_sizes = [records(model, tokenizer, task, size, count) for size in sizes]
    assert all(found == all_sizes[0] for found in all_sizes)
    alone = records(model, tokenizer, replace(task, shared=False), 1, count)
    ungrouped = {index: record | {"group": None} for index, record in all_sizes[0].items()}
    assert alone == ungrouped
    if kind is Quiz:
        assert len({record["said"] for record in alone.values()}) > 5
        assert len({len(record["said"]) for record in alone.values()}) > 1
    else:
        assert {record["choice"] for record in alone.values()} >= {0, 1}


class OwnWords:
    """Labels are what the model would have said, were the tokens before them its own: some right, much of it close."""

    name, token_metric = "own words", "tokens_right"

    def __init__(self, model: RecurrentLM) -> None:
        self._model = model

    def answers_per_sample(self, cell: Cell) -> int:
        return 1

    def sample(self, encode: PieceEncoder, cell: Cell, index: int, seed: int) -> Sample:
        ids = tokens(index, 20 + 3 * (index % 9))
        labels = np.full(len(ids), IGNORE)
        for place in range(10, len(ids) - 1, 5):
            for column in (place, place + 1):
                ids[column] = last_logits(self._model, ids[:column]).argmax()
            if index % 2:
                # Clearly wrong: it settles the answer, however close the token before it is.
                ids[place + 1] = last_logits(self._model, ids[: place + 1]).argmin()
            labels[place : place + 2] = ids[place : place + 2]
        return Sample(ids, labels)


def last_logits(model: RecurrentLM, ids: np.ndarray) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.from_numpy(ids)[None]).logits[0, -1].float()


def hard_choice(model: RecurrentLM, sample: ChoiceSample) -> ChoiceSample:
    """The same prompt with two tokens to choose from that are about as likely."""
    first, second = last_logits(model, sample.prompt).sort().indices[100:102].numpy()
    return replace(sample, options=(first[None], second[None]))


def add_noise(model: RecurrentLM, share: float) -> None:
    """Move every logit by up to `share` of the largest one, in a way that depends on the shape of the batch."""

    def disturb(_: Any, args: Any, output: Any) -> None:
        rows, columns = args[0].shape
        logits = output.logits
        place = torch.arange(logits.numel()).reshape(logits.shape)
        noise = torch.sin(place * 12.9898 + rows * 78.233 + columns * 37.719)
        output.logits = logits + (share * logits.abs().amax(-1, keepdim=True) * noise).to(logits.dtype)

    model.register_forward_hook(disturb)


@pytest.mark.parametrize("kind", ["questions", "choices", "labels"])
def test_rounding_that_depends_on_batches_decides_nothing(kind: str, tokenizer: Any) -> None:
    """In bfloat16, with errors a little below the doubt: without the second reading, batches would decide."""
    model = one_layer(MIXERS["gla"], torch.bfloat16)
    task = {"questions": Quiz(), "choices": Choices(), "labels": OwnWords(model)}[kind]
    samples = [task.sample(PieceEncoder(tokenizer), {"length": 1}, index, 0) for index in range(60)]
    if kind == "choices":
        samples = [hard_choice(model, sample) for sample in samples]
    # A choice compares two losses, each moved by its label and by all others: a quarter of what a margin stands.
    add_noise(model, 2.0**-9 if kind == "choices" else 2.0**-7)
    drawn = type("Drawn", (type(task),), {"sample": lambda self, encode, cell, index, seed: samples[index]})
    task = drawn(model) if kind == "labels" else drawn()
    all_sizes = [records(model, tokenizer, task, size, 60) for size in SIZES]
    assert all(found == all_sizes[0] for found in all_sizes)
    if kind == "labels":
        shares = [record["right_tokens"] / record["tokens"] for record in all_sizes[0].values()]
        assert 0.2 < np.mean(shares) < 1


def test_a_document_is_read_once(tokenizer: Any) -> None:
    model, read = tiny_model(), []
    model.register_forward_pre_hook(lambda _, args: read.append(args[0].shape))
    records(model, tokenizer, Quiz(documents=1), 10**5)
    columns = sum(rows * length for rows, length in read)
    read.clear()
    records(model, tokenizer, Quiz(documents=1, shared=False), 10**5)
    # 23 times 90 tokens against once; questions and answers (at most 39 tokens each) are read either way.
    assert sum(rows * length for rows, length in read) - columns > 21 * 90


def test_a_wrong_claim_of_a_shared_beginning_does_no_harm(tokenizer: Any) -> None:
    """Samples are put together by the tokens they begin with, not by what they call their group."""

    class Liar(Quiz):
        def sample(self, encode: PieceEncoder, cell: Cell, index: int, seed: int) -> QuestionSample:
            return replace(super().sample(encode, cell, index, seed), group="the same", shared=10**6)

    model = tiny_model()
    honest = records(model, tokenizer, Quiz(shared=False), 10**5)
    lying = records(model, tokenizer, Liar(), 10**5)
    assert [record["said"] for record in lying.values()] == [record["said"] for record in honest.values()]


def test_questions_about_one_document_are_one_unit(tokenizer: Any) -> None:
    for task in (Quiz(), Choices()):
        result = evaluate(tiny_model(), tokenizer, [task], [1], 23, progress=False)
        for entry in result["results"]:
            assert (entry["count"], entry["sequences"], entry["outcomes"]["units"]) == (23, 3, 3)


@pytest.mark.parametrize("name", MIXERS)
def test_padding_on_the_left_changes_nothing(name: str) -> None:
    model = one_layer(MIXERS[name], torch.float64)
    prompts = [tokens(row, length) for row, length in enumerate((3, 17, 30, 17))]
    before = [tokens(9, 11)] * 4
    start = read_prompts(model, before, 100)[1]
    rows = [torch.from_numpy(np.concatenate((before[0], prompt)))[None] for prompt in prompts]
    with torch.inference_mode():
        expected = torch.stack([model(ids).logits[0, -1] for ids in rows])
    for segment in (1, 7, 100):
        logits, state = read_prompts(model, prompts, segment, start)
        # float64, sums in another order.
        torch.testing.assert_close(logits[:, 0], expected, atol=1e-10, rtol=1e-10, msg=f"segments of {segment}")
        assert state.position.tolist() == [11 + len(prompt) for prompt in prompts]


@pytest.mark.parametrize("segment", [1, 7, 12, 100])
def test_continuations_are_greedy_generation(model: RecurrentLM, segment: int) -> None:
    prompts = [np.random.default_rng(row).integers(0, 258, size=5 + row) for row in range(5)]
    found = read_continuations(model, prompts, 6, segment, lambda row, said: False)
    for prompt, row in zip(prompts, found, strict=True):
        expected = model.generate(
            torch.from_numpy(prompt)[None], max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=257
        )
        assert row.tokens == expected[0, len(prompt) :].tolist()
        assert row.finite and not row.close
    assert len({tuple(row.tokens) for row in found}) > 1


def test_every_row_stops_when_it_has_ended(model: RecurrentLM) -> None:
    prompts = [tokens(row, 8) for row in range(4)]
    whole = [row.tokens for row in read_continuations(model, prompts, 9, 100, lambda row, said: False)]
    widths: list[int] = []
    model.register_forward_pre_hook(lambda _, args: widths.append(len(args[0])))
    found = read_continuations(model, prompts, 9, 100, lambda row, said: len(said) == 2 * row + 1)
    assert [row.tokens for row in found] == [tokens[: 2 * row + 1] for row, tokens in enumerate(whole)]
    # The prompts, then a step for each token but the last: rows leave after 1, 3, 5 and 7 tokens.
    assert widths == [4, 3, 3, 2, 2, 1, 1]
    end = whole[2][3]
    ended = read_continuations(model, prompts, 9, 100, lambda row, said: False, end_token=end)
    assert [row.tokens for row in ended] == [t[: t.index(end)] if end in t else t for t in whole]


def test_choices_go_by_the_mean_loss_of_an_option(tokenizer: Any) -> None:
    model, task = tiny_model(), Choices()
    found = records(model, tokenizer, task, 10**5)
    for index in range(23):
        sample = task.sample(PieceEncoder(tokenizer), {"length": 1}, index, 0)
        losses = []
        for option in sample.options:
            ids = np.concatenate((sample.prompt, option))[None]
            labels = np.full_like(ids, IGNORE)
            labels[:, len(sample.prompt) :] = option
            losses.append(read_predictions(model, ids, labels, 1000).loss.mean())
        assert found[index]["choice"] == int(np.argmin(losses))
        assert found[index]["right"] == int(np.argmin(losses) == sample.answer)


def test_a_prompt_of_one_token_is_enough_for_a_choice(tokenizer: Any) -> None:
    class Short(Choices):
        def sample(self, encode: PieceEncoder, cell: Cell, index: int, seed: int) -> Any:
            return ChoiceSample(tokens(index, 1), (tokens(1, 2), tokens(2, 3)), 0)

    assert set(records(tiny_model(), tokenizer, Short(), 10**5)) == set(range(23))


def test_a_diverged_choice_is_wrong(tokenizer: Any) -> None:
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    result = evaluate(model, tokenizer, [Choices(), Quiz()], [1], 6, progress=False)
    for entry in result["results"]:
        assert (entry["value"], entry["diverged"], entry["sequences"]) == (0.0, 3, 3)

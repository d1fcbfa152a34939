"""Truncated backpropagation: rows that read on, states that follow them, resets where documents end."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import longrecall
from longrecall.errors import UserError
from longrecall.models.byte_tokenizer import END_ID, byte_tokenizer
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.training.data import BatchStream
from longrecall.training.encoding import DocumentEncoder
from longrecall.training.recipe import DataRecipe, Recipe
from longrecall.training.segments import Segments, read_batch
from longrecall.training.sources import CorpusSource
from longrecall.training.strict_yaml import build
from tests.conftest import MIXERS, RECURRENT
from tests.training.interventions import intervene
from tests.training.runs import train

ModelMaker = Callable[..., RecurrentLM]
ENCODE = DocumentEncoder(byte_tokenizer())
PHONEBOOK = {"kind": "phonebook", "pairs": [2, 3]}


def rows_of(*sources: dict[str, Any], batch: int = 3, context: int = 48, **place: int) -> BatchStream:
    recipe: DataRecipe = build(DataRecipe, {"context_length": context, "sources": list(sources)}, "data")
    return BatchStream(recipe, byte_tokenizer(), batch, continued=True, **place)


class Listed:
    """A corpus with one chunk a document."""

    def __init__(self, documents: list[str]) -> None:
        self._documents = documents

    def __len__(self) -> int:
        return len(self._documents)

    streamed = False

    def size(self, chunk: int) -> int:
        return 1

    def read(self, chunk: int, start: Any = None, part: int = 0, parts: int = 1) -> Iterator[tuple[int, str]]:
        if not start:
            yield 0, self._documents[chunk]

    def describe(self, chunk: int) -> str:
        return f"document {chunk}"

    def amount(self) -> list[int]:
        return [len(self._documents)]


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6), context=st.integers(2, 17), rows=st.integers(1, 4))
def test_starts_are_where_documents_start(lengths: list[int], context: int, rows: int) -> None:
    """Any documents: what a row reads is whole documents one after the other, and each start is reported, no other."""
    documents = [chr(97 + number) * length for number, length in enumerate(lengths)]
    if sum(lengths) + len(lengths) < context:
        return
    source = CorpusSource(Listed(documents), ENCODE, context, 0, 0, rows, lanes=(rows, 1))
    for row in range(rows):
        sequences = [source.next_of(row) for _ in range(12)]
        tokens = np.concatenate([sequence.input_ids for sequence in sequences])
        starts = [n * context + start for n, sequence in enumerate(sequences) for start in sequence.starts]
        after_end = [0, *(np.flatnonzero(tokens == END_ID) + 1)]
        # A row may begin inside a document; from the first end token on, starts are what follows an end token.
        assert [place for place in starts if place] == [place for place in after_end if 0 < place < len(tokens)]
        for begin, end in itertools.pairwise(after_end[1:]):
            assert bytes(tokens[begin : end - 1].tolist()).decode() in documents


def test_rows_read_on_and_wait_while_a_task_has_their_place(text: Path) -> None:
    stream = rows_of({"kind": "text", "path": str(text)}, {**PHONEBOOK, "weight": 0.5}, batch=2)
    alone = rows_of({"kind": "text", "path": str(text)}, batch=2)
    read: list[list[int]] = [[], []]
    tasks = 0
    for _ in range(20):
        batch = stream.next_batch()
        for row in range(2):
            if batch["text"][row]:
                read[row] += batch["input_ids"][row].tolist()
            else:
                tasks += 1
                assert batch["starts"][row] == (0,)
    expected = torch.cat([alone.next_batch()["input_ids"] for _ in range(20)], dim=1)
    for row in range(2):
        assert read[row] == expected[row, : len(read[row])].tolist()
    # 40 draws at a third: 13 expected, standard deviation 3.
    assert 3 <= tasks <= 25


def test_rows_are_shared_out_by_weight_and_processes_read_different_texts(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text("\f".join(f"{name}{n:03d} " * 40 for n in range(400)))
    sources = [{"kind": "text", "path": str(tmp_path / f"{n}.txt"), "weight": w} for n, w in (("a", 3.0), ("b", 1.0))]
    batch = rows_of(*sources, batch=8).next_batch()
    assert ["a" if ord("a") in row.tolist() else "b" for row in batch["input_ids"]] == ["a"] * 6 + ["b"] * 2
    firsts = [
        tuple(row.tolist())
        for rank in range(2)
        for row in rows_of(*sources, batch=4, data_rank=rank, data_world=2).next_batch()["input_ids"]
    ]
    # Together the rows of one process with twice as many.
    assert firsts == [tuple(row.tolist()) for row in batch["input_ids"]] and len(set(firsts)) == 8


def test_the_stream_continues_exactly_from_its_position(text: Path) -> None:
    sources = [{"kind": "text", "path": str(text)}, {**PHONEBOOK, "weight": 0.5}]
    stream, other = rows_of(*sources), rows_of(*sources)
    for _ in range(7):
        stream.next_batch()
    other.restore(stream.position())
    for _ in range(7):
        a, b = stream.next_batch(), other.next_batch()
        assert torch.equal(a["input_ids"], b["input_ids"]) and a["starts"] == b["starts"]


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([PHONEBOOK], r"data\.sources: phonebook cannot continue from batch to batch.*Add a source of text"),
        (
            [{"kind": "text", "path": "t"}, {"kind": "jsonl", "path": "j", "weight": 0.01}],
            r"data\.sources\.1 \(jsonl\): its weight gives it none of the 3 rows",
        ),
    ],
)
def test_sources_that_cannot_continue(sources: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        rows_of(*sources)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("mixer", RECURRENT)
def test_batches_are_one_long_forward(make_model: ModelMaker, mixer: str) -> None:
    """Two rows over batches of a prime length: the very function of the whole text, positions included."""
    model = make_model(MIXERS[mixer]).double().eval()
    initial = intervene("truncated_bptt", model, probability=1.0)
    text, length, batches = torch.ones(2, dtype=torch.bool), 11, 5
    tokens = torch.randint(0, 256, (2, length * batches), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = model(tokens)
        for number, part in enumerate(tokens.split(length, dim=1)):
            starts = [(0,), (0,)] if number == 0 else [(), ()]
            loss = read_batch(model, part, part, text, initial, Segments.of(starts, length))
            logits = whole.logits[:, number * length : (number + 1) * length - 1]
            expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten())
            # float64, sums in another order.
            assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    carried = initial.state_dict()
    assert carried["position"].tolist() == [length * batches] * 2
    for name, tensor in whole.past_key_values.layers[0].items():
        torch.testing.assert_close(carried[f"carried.0.{name}"], tensor, rtol=1e-10, atol=1e-12)


def test_a_task_starts_from_zero_and_leaves_the_text_of_its_row_alone(make_model: ModelMaker) -> None:
    model = make_model().eval()
    initial = intervene("truncated_bptt", model, probability=1.0)
    both, first = torch.tensor([True, True]), torch.tensor([True, False])
    tokens = torch.randint(0, 256, (3, 2, 7), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        initial.before_batch(both)
        initial.after_batch(model(tokens[0]).past_key_values)
        during = initial.before_batch(first)
        assert during is not None
        assert during.position.tolist() == [7, 0]
        assert all(not bool(tensor[1].any()) for layer in during.layers for tensor in layer.values())
        initial.after_batch(model(tokens[1], past_key_values=during).past_key_values)
        state = initial.before_batch(both)
        assert state is not None and state.position.tolist() == [14, 7]
        logits = model(tokens[2], past_key_values=state).logits
        row_0 = model(tokens[:, 0].reshape(1, -1)).logits[0, -7:]
        row_1 = model(tokens[::2, 1].reshape(1, -1)).logits[0, -7:]
    # float32 sums in another order; logits are of order 0.1.
    torch.testing.assert_close(logits, torch.stack([row_0, row_1]), rtol=0, atol=1e-5)


def test_a_run_reads_a_book_as_one_text(make_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    """With a learning rate too small to move a float32 weight, the losses are those of one forward over the book."""
    book = "".join(f"Line {n} of the only story.\n" for n in range(40))
    (tmp_path / "book.txt").write_text(book)
    recipe = make_recipe(
        f"data.sources=[{{kind: text, path: {tmp_path / 'book.txt'}}}]",
        "initial_state={kind: truncated_bptt}",
        "optimizer={learning_rate: 1e-30}",
        "run.batch_size=1",
        "run.gradient_accumulation=1",
        "run.steps=30",
    )
    rows = train(recipe)
    model = longrecall.load(recipe.model.checkpoint, dtype="float32")
    document = torch.from_numpy(ENCODE([book])[0])
    # The run goes once through the book and begins it again from the zero state, in the middle of a row.
    assert len(document) < 30 * 48
    stream = torch.cat([document, document])[: 30 * 48]
    with torch.no_grad():
        once = model(document[None]).logits[0]
    logits = torch.cat([once, once])[: 30 * 48]
    for step, row in enumerate(rows):
        part = slice(48 * step, 48 * (step + 1))
        expected = torch.nn.functional.cross_entropy(logits[part][:-1], stream[part][1:])
        # float32 losses of 5.5 from another order of sums.
        assert row["loss"] == pytest.approx(expected.item(), rel=2e-6)


def test_another_number_of_rows_is_a_mistake_of_the_caller(make_model: ModelMaker) -> None:
    model = make_model()
    initial = intervene("truncated_bptt", model)
    with pytest.raises(RuntimeError, match="after before_batch"):
        initial.after_batch(model.zero_state(2))
    initial.before_batch(torch.ones(2, dtype=torch.bool))
    initial.after_batch(model(torch.zeros(2, 3, dtype=torch.long)).past_key_values)
    with pytest.raises(ValueError, match="the batch has 3 rows, but the states of 2"):
        initial.before_batch(torch.ones(3, dtype=torch.bool))

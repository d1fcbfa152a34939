"""Generated sources in a recipe: every kind gives its task's sequences, and bad options are refused by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from longrecall.errors import UserError
from longrecall.models.byte_tokenizer import END_ID, byte_tokenizer
from longrecall.training.data import BatchStream
from longrecall.training.recipe import DataRecipe
from longrecall.training.strict_yaml import build
from tests.tasks.story_solver import solve

TOKENIZER = byte_tokenizer()


def stream_of(*sources: dict[str, Any], context: int = 400) -> BatchStream:
    recipe = build(DataRecipe, {"context_length": context, "seed": 1, "sources": list(sources)}, "data")
    return BatchStream(recipe, TOKENIZER, 4)


def texts_of(stream: BatchStream) -> list[str]:
    batch = stream.next_batch()
    assert batch["input_ids"].shape == batch["labels"].shape and not batch["text"].any()
    assert (batch["input_ids"][:, 0] == END_ID).all()
    labelled = batch["labels"] != -100
    assert (batch["labels"][labelled] == batch["input_ids"][labelled]).all() and labelled.any(dim=1).all()
    return [bytes(row[1:]).decode("ascii") for row in batch["input_ids"].tolist()]


def test_copying() -> None:
    for text in texts_of(stream_of({"kind": "copying", "lengths": [3, 9]}, context=100)):
        strings = re.findall(r"\$([a-z]*)\|\1\.", text)
        assert strings and all(3 <= len(string) <= 9 for string in strings)


def test_babilong(tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text("Only this sentence fills the book.")
    source = {"kind": "babilong", "tasks": ["qa1", "qa4"], "questions": 2, "path": str(book)}
    for text in texts_of(stream_of(source)):
        asked = re.findall(r"Question: (.*)\nAnswer: (\w+)\.\n", text)
        assert len(asked) == 2 and all(solve(text, question) == answer for question, answer in asked)
        assert "Only this sentence fills the book.\n" in text
    assert any("Question: " in text for text in texts_of(stream_of({"kind": "babilong"})))


def test_a_stream_continues_where_it_stood() -> None:
    sources = ({"kind": "babilong"}, {"kind": "copying"}, {"kind": "passkey"}, {"kind": "phonebook"})
    first, second = stream_of(*sources), stream_of(*sources)
    first.next_batch()
    second.restore(first.position())
    assert first.next_batch()["input_ids"].equal(second.next_batch()["input_ids"])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"kind": "copyin"}, 'Did you mean "copying"'),
        ({"kind": "copying", "lengths": [0, 4]}, "1 <= fewest <= most"),
        ({"kind": "copying", "lengths": [5, 300]}, "data.sources.0 (copying): copying: a string of 300 letters"),
        ({"kind": "babilong", "tasks": ["qa9"]}, 'tasks "qa9" is none of qa1, qa2'),
        ({"kind": "babilong", "tasks": []}, "tasks is empty"),
        ({"kind": "babilong", "questions": 0}, "questions must be above 0"),
        ({"kind": "babilong", "path": "/nowhere/book.txt"}, "cannot read the text file /nowhere/book.txt"),
        ({"kind": "babilong", "questions": 9}, "too short for"),
        ({"kind": "babilong", "weight": 0}, "weight must be above 0"),
    ],
)
def test_bad_sources(source: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        stream_of(source)

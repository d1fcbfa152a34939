"""Passages beside the document: cutting, BM25 against another implementation, prompts token by token, refusals."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longrecall.errors import UserError
from longrecall.models.byte_tokenizer import byte_tokenizer
from longrecall.tasks import ByteEncoder, PieceEncoder, QuestionAnswering, answer_spans
from longrecall.tasks.question_answering.passages import best_passages, bm25, split_passages, words_of

PASSAGES = [
    "the mill by the river grinds oats and the miller sleeps",
    "a bridge of nine arches, built by Ida Holm",
    "oats, oats and oats",
    "the bridge the bridge over the river was closed",
    "nothing",
]
# Of bm25s 0.3.16: BM25(method="lucene", k1=1.2, b=0.75, dtype="float64"), over the words of `words_of`.
RECORDED = {
    "Who built the bridge over the river? the": [1.974403945497892, 0.9079096263058899, 0.0, 3.163819273609426, 0.0],
    "oats oats": [0.635345508431859, 0.0, 1.3717021691259261, 0.0, 0.0],
}
# 64 letters a passage: the answer is in the third of four.
FILLER = "It rains on the hill, and the sheep stand in a row by the wall. "
FACT = "Ida Holm built the bridge; it has nine arches and two towers.   "
DOCUMENT = FILLER * 2 + FACT + FILLER
ROW = {"context": DOCUMENT, "question": "Who built the bridge?", "answers": ["Ida Holm"]}


def task_of(tmp_path: Path, form: str, row: dict[str, Any] = ROW, **options: Any) -> QuestionAnswering:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n", encoding="utf-8")
    return QuestionAnswering(("own",), str(path), prompts=(form,), opening=False, **options)


def sample_of(task: QuestionAnswering, encode: PieceEncoder | None = None) -> tuple[str, Any]:
    (cell,) = task.cells([])
    encode = encode or PieceEncoder(byte_tokenizer())
    sample = task.sample(encode, cell, 0, 0)
    assert answer_spans(sample.labels)[-1][1] == len(sample.input_ids)
    return bytes(sample.input_ids.tolist()).decode(), sample


@pytest.mark.parametrize("question", RECORDED)
def test_bm25_is_what_another_implementation_gives(question: str) -> None:
    # The same float64 formula, its sum in another order.
    assert bm25(PASSAGES, question) == pytest.approx(RECORDED[question], rel=1e-12, abs=1e-12)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text("ab c.", max_size=20), max_size=6), st.text("abcd ", max_size=12))
def test_bm25_is_finite_and_zero_without_a_shared_word(passages: list[str], question: str) -> None:
    for passage, score in zip(passages, bm25(passages, question), strict=True):
        shared = set(words_of(passage)) & set(words_of(question))
        assert math.isfinite(score) and (score > 0) == bool(shared)


@given(st.lists(st.integers(0, 9), max_size=30), st.integers(1, 9))
def test_passages_are_the_document_in_order(document: list[int], size: int) -> None:
    passages = split_passages(tuple(document), size)
    assert [token for passage in passages for token in passage] == document
    assert all(len(passage) == size for passage in passages[:-1]) and all(passages)


def test_the_best_come_in_their_order_and_of_equals_the_first() -> None:
    assert best_passages([0.1, 3.0, 0.5, 2.0], 2) == [1, 3]
    assert best_passages([1.0, 1.0, 1.0], 2) == [0, 1]
    assert best_passages([0.0, 1.0], 5) == [0, 1] and best_passages([], 3) == []


def test_retrieval_puts_the_passage_with_the_answer_beside_the_document(tmp_path: Path) -> None:
    end = "\n\nQuestion: Who built the bridge?\nAnswer: Ida Holm"
    first, sample = sample_of(task_of(tmp_path, "retrieval", passages=1))
    assert first == f"{FACT}\n{DOCUMENT.strip()}{end}" and sample.shared == 0
    last, sample = sample_of(task_of(tmp_path, "retrieval", passages=1, passages_first=False))
    assert last == f"{DOCUMENT.strip()}\n{FACT}{end}" and sample.shared == len(DOCUMENT.strip())
    once, plain = sample_of(task_of(tmp_path, "once"))
    assert once == f"{DOCUMENT.strip()}{end}" and plain.group == sample.group


def test_the_ending_asks_too_and_several_passages_keep_their_order(tmp_path: Path) -> None:
    row = {**ROW, "question": "Who?", "ending": "The bridge was built", "context": FACT + FILLER + FACT.upper()}
    text, _ = sample_of(task_of(tmp_path, "retrieval", row, passages=2))
    assert text.startswith(f"{FACT}\n{FACT.upper().strip()}\n{FACT}")
    few, _ = sample_of(task_of(tmp_path, "retrieval", row, passages=9))
    assert few.startswith(f"{FACT}\n{FILLER}\n{FACT.upper().strip()}\n{FACT}")


def test_passages_come_out_of_what_a_cut_leaves(tmp_path: Path) -> None:
    text, _ = sample_of(task_of(tmp_path, "retrieval", passages=1, document_tokens=128))
    # Neither of the two passages left has a word of the question but "the", as often in both: the first stands there.
    assert text.startswith(f"{FILLER}\n{FILLER}{FILLER}\n\nQuestion") and "Ida" not in text[:-8]


def test_rag_takes_what_the_model_finds_alike(tmp_path: Path) -> None:
    asked: list[tuple[list[str], str]] = []

    def similarity(passages: Sequence[Sequence[int]], question: Sequence[int]) -> list[float]:
        asked.append(([bytes(passage).decode() for passage in passages], bytes(question).decode()))
        return [0.1, 0.9, 0.2, 0.8]

    encode = PieceEncoder(byte_tokenizer(), similarity=similarity)
    text, _ = sample_of(task_of(tmp_path, "rag", passages=2), encode)
    assert text.startswith(f"{FILLER}\n{FILLER.strip()}\n{FILLER}{FILLER}{FACT}")
    assert asked == [([FILLER, FILLER, FACT, FILLER.strip()], ROW["question"])]


def test_what_cannot_work_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="rag needs a model"):
        sample_of(task_of(tmp_path, "rag"))
    with pytest.raises(UserError, match="retrieval needs a tokenizer that can decode"):
        sample_of(task_of(tmp_path, "retrieval"), PieceEncoder(ByteEncoder()))
    for option in ("passages", "passage_tokens"):
        with pytest.raises(UserError, match=f"{option} must be at least 1, got 0"):
            QuestionAnswering(**{option: 0})
    with pytest.raises(UserError, match=r'unknown "retreival" in prompts.*Did you mean "retrieval"'):
        QuestionAnswering(prompts=("retreival",))

"""Sources of questions and needles: the loss is on the answers, whatever file they come from and however it is cut."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longrecall.errors import UserError
from longrecall.models.byte_tokenizer import END_ID, byte_tokenizer
from longrecall.tasks.encoding import PieceEncoder, answer_spans
from longrecall.tasks.question_answering.training import QuestionSource
from longrecall.training.data import BatchStream
from longrecall.training.recipe import DataRecipe
from longrecall.training.strict_yaml import build

TOKENIZER = byte_tokenizer()
FACTS = [("Ida Holm", "Who built the bridge?"), ("1902", "When was it built?"), ("iron", "What is it made of?")]
TEXT = "The bridge of Lund was built by Ida Holm in 1902. It is made of iron, and stands to this day."


def rows(filler: int = 0) -> list[dict[str, Any]]:
    context = "x" * filler + TEXT + "y" * filler
    return [{"context": context, "question": question, "answers": [answer, "no"]} for answer, question in FACTS]


def squad(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The same rows as SQuAD has them, and a question that the document does not answer."""
    asked = [
        {
            "question": r["question"],
            "answers": [{"text": r["answers"][0], "answer_start": r["context"].find(r["answers"][0])}],
        }
        for r in found
    ]
    asked.append({"question": "Who painted it?", "answers": [], "is_impossible": True})
    return {
        "version": "2.0",
        "data": [{"title": "Lund", "paragraphs": [{"context": found[0]["context"], "qas": asked}]}],
    }


def write(tmp_path: Path, name: str, found: list[dict[str, Any]]) -> Path:
    path = tmp_path / name
    if name.endswith(".jsonl"):
        path.write_text("".join(json.dumps(row) + "\n" for row in found), "utf-8")
    elif name.endswith(".json"):
        path.write_text(json.dumps(squad(found) if name == "squad.json" else found), "utf-8")
    else:
        import pyarrow
        import pyarrow.parquet

        as_on_the_hub = [r | {"answers": {"text": r["answers"], "answer_start": [-1]}} for r in found]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(as_on_the_hub), path)
    return path


def sequences(path: Path, length: int, count: int = 8, **options: Any) -> list[tuple[bytes, list[bytes]]]:
    """Return texts (the end token as a line of its own) and the texts of their labelled spans."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make = QuestionSource(str(path), **options).sequences(PieceEncoder(TOKENIZER))
    found = []
    for index in range(count):
        ids, labels = make(np.random.Generator(np.random.PCG64(index)), length)
        assert ids.shape == labels.shape == (length,) and ids.dtype == labels.dtype == np.int64
        assert (labels[labels != -100] == ids[labels != -100]).all()
        text = bytes(np.where(ids == END_ID, ord("|"), ids).astype(np.uint8))
        found.append((text, [text[a:b] for a, b in answer_spans(labels)]))
    return found


@pytest.mark.parametrize("name", ["own.jsonl", "rows.json", "squad.json", "hub.parquet"])
def test_every_file_gives_the_same_questions(tmp_path: Path, name: str) -> None:
    """A document with a question and its answer; only the answer and its line feed are labelled."""
    expected = {f"|{TEXT}\n\nQuestion: {question}\nAnswer: {answer}\n": answer for answer, question in FACTS}
    length = max(map(len, expected))
    seen = set()
    for text, spans in sequences(write(tmp_path, name, rows()), length, 12):
        whole = next(sample for sample in expected if text.startswith(sample.encode()))
        seen.add(whole)
        # What is left is the beginning of another sample, which has no label.
        assert (
            spans == [f"{expected[whole]}\n".encode()]
            and text[len(whole) :] == f"|{TEXT}"[: length - len(whole)].encode()
        )
    assert seen == expected.keys()


def test_several_questions_of_a_document_and_several_documents(tmp_path: Path) -> None:
    path = write(tmp_path, "own.jsonl", rows())
    for text, spans in sequences(path, 500, questions=2):
        samples = text.split(b"|")[1:]
        answers = [re.findall(rb"Question: (.*)\nAnswer: (.*)\n", sample) for sample in samples]
        assert len(answers[0]) == len(answers[1]) == 2 and answers[0][0] != answers[0][1]
        # A sample that the end of the sequence cuts has no label; one that just ends there has.
        told = [(a + b"\n") for sample in answers[:2] for _, a in sample]
        assert spans[:4] == told and all((a.decode(), q.decode()) in FACTS for s in answers[:2] for q, a in s)
    everything = sequences(path, 300, 1, loss_on="all")[0]
    assert everything[1] == [everything[0]]


@pytest.mark.parametrize(
    ("style", "between"), [("ask", b"\nAnswer: "), ("chat", b"\n\nA: "), ("cloze", b" "), ("key", b": ")]
)
def test_prompts_are_those_of_the_evaluation(tmp_path: Path, style: str, between: bytes) -> None:
    for text, spans in sequences(write(tmp_path, "own.jsonl", rows()), 260, style=style):
        assert spans and all(between + span in text for span in spans) and text.startswith(f"|{TEXT}".encode())
    text, spans = sequences(write(tmp_path, "own.jsonl", rows()), 400, 1, style=style, form="twice")[0]
    assert text.count(f"{TEXT[:-1]}".encode()) >= 2 and spans


def test_a_long_document_is_cut_around_the_answer_or_skipped(tmp_path: Path) -> None:
    path = write(tmp_path, "own.jsonl", rows(filler=3000))
    places = set()
    for text, spans in sequences(path, 200, 20, questions=2):
        # The document holds the answers of its questions, wherever it was cut.
        document = text.split(b"\n\n")[0]
        assert spans and all(span.strip() in document for span in spans) and len(document) > 90
        places.add(document.find(spans[0].strip()))
    assert len(places) > 10
    made = QuestionSource(str(path), too_long="skip").sequences(PieceEncoder(TOKENIZER))
    with pytest.raises(UserError, match=r"none of the 3 questions of .* fits into 200 tokens"):
        made(np.random.Generator(np.random.PCG64(0)), 200)
    # An answer in words of its own cannot be cut around: that question alone is left out, and counted.
    path.write_text(
        "".join(json.dumps(r) + "\n" for r in [*rows(3000), rows(3000)[0] | {"answers": "a bridge builder"}])
    )
    with pytest.warns(UserWarning, match="left out 1 of 4 questions that do not fit into 200 tokens"):
        QuestionSource(str(path)).sequences(PieceEncoder(TOKENIZER))(np.random.Generator(np.random.PCG64(0)), 200)


def test_the_place_that_a_file_tells_is_the_one_that_is_cut_around(tmp_path: Path) -> None:
    context = "iron " * 200 + "The gate is of iron, too."
    asked = {"text": ["iron"], "answer_start": [context.index("iron, too")]}
    path = write(tmp_path, "own.jsonl", [{"context": context, "question": "Of what is the gate?", "answers": asked}])
    assert all(b"of iron, too" in text for text, _ in sequences(path, 120))


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ('{"context": "a", "question": "b"}', {}, 'line 1: "answers" is missing'),
        ('{"context": "a", "answers": "c"}', {}, 'line 1: "question" is missing; mend the row'),
        ('{"context": "a", "question": "b", "answers": 3}', {}, '"answers" must be a text'),
        ("[1]", {}, "line 1: it is not a JSON object"),
        ("", {}, "holds no usable row"),
        ('{"context": "a", "question": "b", "answers": []}', {}, "has no question with an answer"),
        ('{"context": "a", "question": "b", "answers": "c"}', {"path": "nowhere"}, "there is no file nowhere"),
        ("", {"questions": 0}, "questions must be above 0"),
        ("", {"style": "asks"}, 'style "asks" is none of'),
        ("", {"loss_on": "answer"}, 'loss_on "answer" is none of answers, all'),
        ("", {"form": "twice", "questions": 2}, "set questions to 1"),
    ],
)
def test_bad_questions(tmp_path: Path, content: str, options: dict[str, Any], message: str) -> None:
    (tmp_path / "bad.jsonl").write_text(content)
    source = {"kind": "question_answering", "path": str(tmp_path / "bad.jsonl")} | options
    with pytest.raises(UserError, match=message) as caught:
        stream_of(source, length=100)
    assert "\n" not in str(caught.value)


def test_bad_files(tmp_path: Path) -> None:
    for name, message in {
        "a.json": "is not JSON",
        "b.json": "is neither a list of rows",
        "c.parquet": "no whole|not a whole",
    }.items():
        (tmp_path / name).write_text("{" if name[0] == "a" else "{}")
        with pytest.raises(UserError, match=message):
            stream_of({"kind": "question_answering", "path": str(tmp_path / name)}, length=100)


def stream_of(source: dict[str, Any], length: int) -> BatchStream:
    recipe = build(DataRecipe, {"context_length": length, "seed": 1, "sources": [source]}, "data")
    return BatchStream(recipe, TOKENIZER, 2)


def test_needles(tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text("Only this sentence fills the book. " * 3)
    every = {
        f"niah_{kind}": 1 for kind in ("single_1", "single_2", "single_3", "multikey_1", "multikey_2", "multikey_3")
    }
    for task, answers in {**every, "niah_multivalue": 4, "niah_multiquery": 4}.items():
        batch = stream_of({"kind": "needles", "tasks": [task], "path": str(book)}, length=1100).next_batch()
        for ids, labels in zip(batch["input_ids"].numpy(), batch["labels"].numpy(), strict=True):
            ((begin, end),) = answer_spans(labels)
            text = bytes(np.where(ids == END_ID, ord("|"), ids).astype(np.uint8)).decode()
            values = text[begin:end].split(", ")
            assert len(values) == answers and all(text[:begin].count(value) == 1 for value in values)
            # The end is the beginning of a prompt, and short: the sequence is used.
            assert text.startswith("|") and text[end:] == text[: 1100 - end] and 1100 - end < 300
    streams = [stream_of({"kind": "needles", "path": str(book), "loss_on": "all"}, length=900) for _ in range(2)]
    streams[0].next_batch()
    streams[1].restore(streams[0].position())
    first, second = (stream.next_batch() for stream in streams)
    assert first["input_ids"].equal(second["input_ids"]) and first["labels"].equal(first["input_ids"])
    for source, message in {
        "tasks: []": "tasks is empty",
        "tasks: [niah]": 'tasks "niah" is none of',
        "path: /no": "cannot read",
    }.items():
        key, _, value = source.partition(": ")
        with pytest.raises(UserError, match=message):
            stream_of(
                {"kind": "needles", key: [] if value == "[]" else [value[1:-1]] if key == "tasks" else value},
                length=900,
            )
    with pytest.raises(UserError, match="is too short: needles, question"):
        stream_of({"kind": "needles"}, length=200)

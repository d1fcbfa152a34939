r"""How a document and a question become a prompt.

A document D, a question Q, and E, the words that the answer continues (Q itself where a row gives none); ``|`` is a
line feed and every document ends in a full stop:

style      data sets                   once                   twice
---------  --------------------------  ---------------------  ------------------------------------
`cloze`    nq, drop, triviaqa, squad   ``D E``                ``Q D|D E``
`key`      fda, swde                   ``D Q:``               ``Information about Q. D|D Q:``
`chat`     coqa                        ``D||Q: Q||A:``        ``Q D|D||Q: Q||A:``
`ask`      narrativeqa, own            ``D||Question: Q|Answer:``  ``Q D|D||Question: Q|Answer:``

"Twice" is Just Read Twice (Arora et al. 2024), of which StateX (appendix C.2) uses the first two rows; the question
comes first, so a recurrent model knows what to keep. In `chat` the earlier turns, ``Q: ...||A: ...||``, stand before
the question, as in the evaluation harness. "Twice" for `chat` and `ask` is ours, in the same spirit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from longrecall.tasks.rows import text_field, text_list

STYLES = {
    "triviaqa": "cloze",
    "coqa": "chat",
    "narrativeqa": "ask",
    "squad": "cloze",
    "swde": "key",
    "fda": "key",
    "nq": "cloze",
    "drop": "cloze",
    "own": "ask",
}
"""Data set -> style of its prompts; ``own`` is the user's."""

PROMPTS = ("once", "twice", "retrieval", "rag")
"""The last two read the document once, with passages of it beside (`passages.py`)."""


@dataclass(frozen=True)
class Row:
    """A question over a document, the answers that count, and the turns (question, answer) before it."""

    context: str
    question: str
    answers: tuple[str, ...]
    ending: str = ""
    history: tuple[tuple[str, str], ...] = ()


def parse_row(row: Mapping[str, Any]) -> Row:
    """Return the row of a JSON object (schema: `longrecall.tasks.question_answering.task`); `ValueError` if broken."""
    turns = row.get("history") or []
    if not isinstance(turns, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in turns):
        raise ValueError('"history" must be a list of pairs [question, answer]')
    pairs = [text_list({"history": turn}, "history") for turn in turns]
    return Row(
        context=text_field(row, "context"),
        question=text_field(row, "question"),
        answers=text_list(row, "answers"),
        ending=text_field(row, "ending", optional=True),
        history=tuple((question, answer) for question, answer in pairs),
    )


class Prompt(NamedTuple):
    """A prompt in pieces: what stands before the document, the document, and what follows its last reading.

    Where it is read twice, one line feed stands between.
    """

    lead: str
    document: str
    tail: str


def build_prompt(style: str, form: str, row: Row) -> Prompt:
    """Return the prompt of `row`; `style` of `STYLES`' values, `form` of `PROMPTS`."""
    tail = _tail(style, row)
    document = document_of(style, row.context, row)
    if form != "twice":
        return Prompt("", document, tail)
    question = row.question.strip().strip(":")
    lead = f"Information about {_capital(question)}. " if style == "key" else f"{question} "
    return Prompt(lead, document, tail)


def document_of(style: str, text: str, row: Row) -> str:
    """Return a document as prompts hold it: with a full stop, without the question that some files repeat."""
    text = text.strip()
    asked = {"cloze": row.ending or row.question, "key": row.question.rstrip(":") + ":"}.get(style, "").strip().lower()
    while asked and text.lower().endswith(asked):
        text = text[: -len(asked)].strip()
    return text.rstrip(".").rstrip() + "." if style in ("cloze", "key") else text


def _tail(style: str, row: Row) -> str:
    if style == "key":
        return f" {_capital(row.question.strip().strip(':'))}:"
    if style == "cloze":
        return f" {(row.ending or row.question).strip()}"
    if style == "chat":
        turns = "".join(f"Q: {question}\n\nA: {answer}\n\n" for question, answer in row.history)
        return f"\n\n{turns}Q: {row.question}\n\nA:"
    turns = "".join(f"Question: {question}\nAnswer: {answer}\n" for question, answer in row.history)
    return f"\n\n{turns}Question: {row.question.strip()}\nAnswer:"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]

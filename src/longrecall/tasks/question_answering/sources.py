"""Where the hub has the eight data sets of the papers, and how their rows become rows of the jsonl schema."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

HubRow = Mapping[str, Any]


class HubSource(NamedTuple):
    """A data set of the hub and the split that is asked."""

    path: str
    config: str | None
    split: str
    convert: Callable[[HubRow], Iterable[HubRow]]


_MARKS = re.compile(r"\[(?:PAR|DOC|TLE)\]")
"""Marks of TriviaQA's web pages."""

_SUMMARY = "Summary of information above..."
"""What SWDE's texts say before their questions."""


def _cloze(row: HubRow) -> Iterable[HubRow]:
    yield {
        "context": _MARKS.sub("", row["context"]),
        "question": row["orig_question"],
        "ending": row["question"],
        "answers": list(row["answers"]),
    }


def _squad(row: HubRow) -> Iterable[HubRow]:
    # `text` is the document and then the beginning of a sentence that the answer completes.
    context = row["context"].split("Question:")[0].strip()
    text = row["text"].strip()
    yield {
        "context": context,
        "question": row["question"],
        "ending": text[len(context) :].strip() if text.startswith(context) else row["question"],
        "answers": [row["value"]],
    }


def _fields(row: HubRow) -> Iterable[HubRow]:
    yield {"context": row["text"].split(_SUMMARY)[0], "question": row["key"], "answers": [row["value"]]}


def _coqa(row: HubRow) -> Iterable[HubRow]:
    turns: list[list[str]] = []
    for question, answer in zip(row["questions"], row["answers"]["input_text"], strict=True):
        yield {"context": row["story"], "question": question, "answers": [answer], "history": list(turns)}
        turns.append([question, answer])


def _narrativeqa(row: HubRow) -> Iterable[HubRow]:
    yield {
        "context": row["document"]["summary"]["text"],
        "question": row["question"]["text"],
        "answers": [answer["text"] for answer in row["answers"]],
    }


SOURCES: dict[str, HubSource] = {
    "triviaqa": HubSource("hazyresearch/based_triviaqa", None, "validation", _cloze),
    "coqa": HubSource("stanfordnlp/coqa", None, "validation", _coqa),
    "narrativeqa": HubSource("deepmind/narrativeqa", None, "test", _narrativeqa),
    "squad": HubSource("hazyresearch/based-squad", None, "validation", _squad),
    "swde": HubSource("hazyresearch/based-swde-v2", None, "validation", _fields),
    "fda": HubSource("hazyresearch/based-fda", None, "validation", _fields),
    "nq": HubSource("hazyresearch/based_nq_1024", None, "validation", _cloze),
    "drop": HubSource("hazyresearch/based_drop", None, "validation", _cloze),
}
"""Data set -> where it is. Those with documents for a single reading are the ones that Just Read Twice was run on."""

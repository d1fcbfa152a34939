"""Questions over documents, answered in the model's own words: the eight data sets of the papers, or the user's own.

Local files: one JSON object per line, one question each:

    {"context": "The bridge was built by Ida Holm.", "question": "Who built the bridge?", "answers": ["Ida Holm"]}

``answers``: all that count, the first is the target. Optional: ``ending``, the words that the answer continues where
they differ from the question ("The bridge was built by"), and ``history``, the turns before the question as pairs
[question, answer]. Other fields are ignored. Questions over equal documents are one group; they share the document's
tokens, which are read once, except in the form ``twice``, which begins with the question, and behind passages.

``retrieval`` and ``rag`` are ``once`` with passages of the document beside it, P and P' for two of them:

    passages first   ``P|P'|D Q``          passages last   ``D|P|P' Q``
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from longrecall.errors import UserError, did_you_mean
from longrecall.tasks.declaration import Declaration
from longrecall.tasks.encoding import IGNORE, Cell, PieceEncoder, QuestionSample
from longrecall.tasks.in_context.published import shuffled_rows
from longrecall.tasks.question_answering.passages import best_passages, bm25, split_passages
from longrecall.tasks.question_answering.prompts import PROMPTS, STYLES, Row, build_prompt, parse_row
from longrecall.tasks.question_answering.sources import SOURCES
from longrecall.tasks.question_answering.training import QuestionSource
from longrecall.tasks.rows import Rows, local_file, read_hub, read_jsonl
from longrecall.tasks.wording import Wording

TEXT_METRICS = ("f1", "exact", "contains", "bleu", "rouge_l", "meteor")
"""What `longrecall.evaluation.text_metrics` can compute; a test holds the two lists together."""

_KEPT_DOCUMENTS = 8
"""Tokenised documents that are kept: those of neighbouring questions, not a whole data set."""


def _choose(kind: str, given: Sequence[str], known: Sequence[str]) -> None:
    if not given and kind != "metrics":
        raise UserError(f"question_answering: name at least one of {kind}: {', '.join(known)}")
    for name in given:
        if name not in known:
            raise UserError(
                f'question_answering: unknown "{name}" in {kind}; known: {", ".join(known)}.{did_you_mean(name, known)}'
            )


@dataclass(frozen=True)
class QuestionAnswering:
    """The evaluation task: cells ``{"dataset", "prompt"}``, one question per sample.

    `datasets`: triviaqa, coqa, narrativeqa, squad, swde, fda, nq, drop, or ``own``, the user's. `data`: a jsonl file
    (for one data set) or a folder with ``<dataset>.jsonl``; "" takes the hub. `prompts`: ``once``, ``twice``,
    ``retrieval`` (BM25 chooses passages), ``rag`` (the model does: `PieceEncoder.similarity`). `passages`: how many are
    chosen; `passage_tokens`: of each; `passages_first`: they stand before the document, not behind it.
    `metrics`: of `TEXT_METRICS`, beside ``accuracy``, which is ``contains`` as published. `answer_tokens`: what the
    model may say; a line feed ends it. `document_tokens`: a document is cut to its first tokens (0: never).
    `skip_broken`: leave out broken rows and count them instead of stopping. `opening`: begin with the tokenizer's
    beginning-of-text token. Which rows are asked, and in which order, depends on (seed, data set) alone.
    """

    datasets: tuple[str, ...] = ("squad",)
    data: str = ""
    prompts: tuple[str, ...] = ("once",)
    metrics: tuple[str, ...] = ("f1", "exact")
    answer_tokens: int = 48
    document_tokens: int = 0
    skip_broken: bool = False
    opening: bool = True
    passages: int = 4
    passage_tokens: int = 64
    passages_first: bool = True

    name: ClassVar[str] = "question_answering"
    wording: ClassVar[Wording] = Wording(
        "questions about documents",
        "The model reads a document and answers a question about it in its own words.",
    )
    declared: ClassVar[Declaration] = Declaration(source=QuestionSource)
    version: ClassVar[int] = 1

    def __post_init__(self) -> None:
        """Check the options; the data are read by `cells`."""
        _choose("datasets", self.datasets, tuple(STYLES))
        _choose("prompts", self.prompts, PROMPTS)
        _choose("metrics", self.metrics, TEXT_METRICS)
        if "own" in self.datasets and not self.data:
            raise UserError("question_answering: the dataset own needs data=FILE, a jsonl file")
        for option in ("answer_tokens", "passages", "passage_tokens"):
            if getattr(self, option) < 1:
                raise UserError(f"question_answering: {option} must be at least 1, got {getattr(self, option)}")
        if self.document_tokens < 0:
            raise UserError(
                f"question_answering: document_tokens must not be negative (0: no cut), got {self.document_tokens}"
            )

    @property
    def text_metrics(self) -> tuple[str, ...]:
        """The metrics beside accuracy."""
        return self.metrics

    @cached_property
    def _rows(self) -> dict[str, Rows[Row]]:
        return {dataset: self._read(dataset) for dataset in self.datasets}

    def _read(self, dataset: str) -> Rows[Row]:
        if not self.data:
            path, config, split, convert = SOURCES[dataset]
            return read_hub(path, config, split, convert, parse_row, self.skip_broken)
        if Path(self.data).is_dir():
            return read_jsonl(local_file(self.data, f"{dataset}.jsonl"), parse_row, self.skip_broken)
        if len(self.datasets) > 1:
            raise UserError(
                f"question_answering: {self.data} is not a folder, but there are {len(self.datasets)} datasets; give a "
                "folder with <dataset>.jsonl, or one dataset"
            )
        return read_jsonl(self.data, parse_row, self.skip_broken)

    def data_facts(self) -> dict[str, dict[str, Any]]:
        """Return per data set how many rows it has, how many were left out, and the sha256 of the rows used."""
        return {
            dataset: {"rows": len(rows.rows), "skipped": rows.skipped, "sha256": rows.sha256}
            for dataset, rows in self._rows.items()
        }

    def cells(self, lengths: Sequence[int]) -> list[Cell]:
        """Return the cells to run; reads the data. Lengths are not used: prompts are as long as their documents."""
        return [{"dataset": dataset, "prompt": prompt} for dataset in self._rows for prompt in self.prompts]

    def answers_per_sample(self, cell: Cell) -> int:
        """Return 1: one question per sample."""
        return 1

    def available(self, cell: Cell) -> int:
        """Return how many samples the cell has."""
        return len(self._rows[str(cell["dataset"])].rows)

    def sample(self, encode: PieceEncoder, cell: Cell, index: int, seed: int) -> QuestionSample:
        """Return sample `index` of `cell`, the same for the same arguments and data."""
        dataset, form = str(cell["dataset"]), str(cell["prompt"])
        rows = self._rows[dataset].rows
        order = encode.derived(
            ("question order", dataset, len(rows), seed), lambda: shuffled_rows(self.name, dataset, len(rows), seed)
        )
        row = rows[order[index]]
        prompt = build_prompt(STYLES[dataset], form, row)
        ids = list(encode.opening if self.opening else ())
        ids += encode(prompt.lead) if prompt.lead else ()
        document = self._document(encode, prompt.document)
        passages = self._passages(encode, form, document, row)
        if passages and self.passages_first:
            ids += [token for passage in passages for token in (*passage, *encode("\n"))]
        ids += document
        shared = len(ids)
        if form == "twice":
            ids += [*encode("\n"), *document]
        if not self.passages_first:
            ids += [token for passage in passages for token in (*encode("\n"), *passage)]
        space, answer = encode.answer(row.answers[0])
        ids += [*encode(prompt.tail), *space]
        labels = np.full(len(ids) + len(answer), IGNORE, dtype=np.int64)
        labels[len(ids) :] = answer
        return QuestionSample(
            np.array([*ids, *answer], dtype=np.int64),
            labels,
            row.question,
            row.answers[0],
            row.answers,
            group=_group(dataset, prompt.document),
            shared=shared if form == "once" or (passages and not self.passages_first) else 0,
        )

    def _document(self, encode: PieceEncoder, text: str) -> tuple[int, ...]:
        kept: OrderedDict[str, tuple[int, ...]] = encode.derived("question answering documents", OrderedDict)
        if text not in kept:
            # `many` does not remember: the encoder's own memory would hold thousands of documents.
            kept[text] = encode.many([text])[0]
            if len(kept) > _KEPT_DOCUMENTS:
                kept.popitem(last=False)
        kept.move_to_end(text)
        return kept[text][: self.document_tokens or None]

    def _passages(self, encode: PieceEncoder, form: str, document: tuple[int, ...], row: Row) -> list[tuple[int, ...]]:
        """Return the passages of the document that stand beside it, in its order; none for other forms."""
        if form not in ("retrieval", "rag"):
            return []
        passages = split_passages(document, self.passage_tokens)
        question = f"{row.question} {row.ending}".strip()
        if form == "retrieval":
            texts = [encode.spelled(passage) for passage in passages]
            if None in texts:
                raise UserError("question_answering: the prompt retrieval needs a tokenizer that can decode")
            scores: Sequence[float] = bm25([text or "" for text in texts], question)
        elif encode.similarity is None:
            raise UserError("question_answering: the prompt rag needs a model that compares passages; use retrieval")
        else:
            scores = encode.similarity(passages, encode(question))
        return [passages[index] for index in best_passages(scores, self.passages)]

    def ended(self, said: str) -> bool:
        """Return whether nothing said after this can count: a line feed ends the answer."""
        return "\n" in said

    def answer_of(self, said: str) -> str:
        """Return the part of what the model said that counts."""
        return said.split("\n", 1)[0].strip()

    def judge(self, cell: Cell, sample: QuestionSample, said: str) -> bool:
        """Return whether the answer contains an accepted one, upper and lower case alike (the papers' "contains")."""
        answer = self.answer_of(said).lower()
        return any(accepted.strip().lower() in answer for accepted in sample.accepted)


def _group(dataset: str, document: str) -> str:
    return f"{dataset} {hashlib.sha256(document.encode()).hexdigest()[:16]}"

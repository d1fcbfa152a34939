r"""Questions over documents as training sequences, with the loss on the answers.

A document with two questions, ``|`` for a line feed (``.`` a label of -100):

    input   ...by Ida Holm.||Question: Who built it?|Answer: Ida Holm|Question: When?|Answer: 1902|
    label   ................................................ Ida Holm|........................1902|

Prompts are those of the evaluation task (`prompts.py`); a line feed ends an answer there, so it is labelled here. A
sequence holds as many documents as fit. The one that no longer fits fills its end without labels.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from longrecall.errors import UserError
from longrecall.files import expand_home
from longrecall.installing import install_command
from longrecall.tasks.declaration import Make, TrainingSource
from longrecall.tasks.encoding import IGNORE, PieceEncoder
from longrecall.tasks.question_answering.prompts import PROMPTS, STYLES, Row, build_prompt
from longrecall.tasks.rows import collect_rows, parse_object, text_field
from longrecall.value_rules import check_weight, one_of, positive

Ints = NDArray[np.int64]
Found = Iterator[tuple[str, Callable[[], Mapping[str, Any]]]]
"""Places in a file and what reads the JSON object that is there."""

FORMS = PROMPTS[:2]
"""The prompts that a document alone makes: it is read once, or twice."""
SUFFIXES = (".jsonl", ".json", ".parquet")
_MARGIN = 8
"""Tokens beside an answer that a cut document keeps: an answer is found by its letters, which tokens may join."""
_PIECES = 64
"""Tokens that the parts of a sample may take beyond their bytes: spaces that a tokenizer adds, the opening."""


@dataclass(frozen=True)
class Asked:
    """A question of a file: its document, the answer, and where that stands in the document (-1 = not told)."""

    context: str
    question: str
    answer: str
    ending: str
    start: int


@dataclass(frozen=True)
class QuestionSource(TrainingSource):
    """Questions over the documents of files; only the answers are labelled."""

    kind: ClassVar[str] = "question_answering"

    path: str
    """A file, a folder or a glob: .jsonl, .parquet (a question a row), .json (as SQuAD has it, or a list of rows)."""
    context: str = "context"
    """The key of the document in a row."""
    question: str = "question"
    """The key of the question."""
    answers: str = "answers"
    """The key of the answer: a text, a list of them (the first is trained on), or SQuAD's text and answer_start."""
    style: str = "ask"
    """Wording of the prompts, as in the evaluation task: ask, cloze, key or chat."""
    form: str = "once"
    """once, or twice: the question, the document, and the document again."""
    questions: int = 1
    """Most questions about one document in a sequence."""
    loss_on: str = "answers"
    """answers, or all: every token."""
    too_long: str = "cut"
    """What happens to a document that does not fit: cut (around the first answer) or skip (its question)."""
    skip_broken: bool = False
    """Leave out broken rows and count them instead of stopping."""
    weight: float = 1.0
    """Sequences from here, relative to the other sources."""

    def __post_init__(self) -> None:
        """Check the fields before anything runs."""
        check_weight(self.weight)
        positive(self, "questions")
        one_of("style", self.style, tuple(dict.fromkeys(STYLES.values())))
        one_of("form", self.form, FORMS)
        one_of("loss_on", self.loss_on, ("answers", "all"))
        one_of("too_long", self.too_long, ("cut", "skip"))
        if self.form == "twice" and self.questions > 1:
            raise UserError("form twice begins with the question, so a document has one; set questions to 1")

    def sequences(self, pieces: PieceEncoder) -> Make:
        """Return the function that makes a training sequence; the files are read here."""
        asked = read_questions(self)
        made: dict[int, _Builder] = {}

        def make(generator: np.random.Generator, length: int) -> tuple[Ints, Ints]:
            if length not in made:
                made[length] = _Builder(self, pieces, asked, length)
            return made[length].sequence(generator)

        return make


def read_questions(source: QuestionSource) -> list[Asked]:
    """Return the questions of all files that have an answer, in order.

    Raises:
        UserError: a file that cannot be read, a broken row (unless `skip_broken`), no question with an answer.
    """
    rows: list[Asked | None] = []
    for path in _files(source.path):
        read = {".parquet": _parquet_rows, ".json": _json_rows}.get(path.suffix, _jsonl_rows)
        parsed = collect_rows(str(path), read(path), lambda found: _parse(found(), source), source.skip_broken)
        rows += [row if row.answer else None for row in parsed.rows]
    # Equal documents are one text in memory.
    known: dict[str, str] = {}
    kept = [row for row in rows if row is not None]
    if not kept:
        raise UserError(f"{source.path} has no question with an answer")
    if len(kept) < len(rows):
        warnings.warn(f"{source.path}: left out {len(rows) - len(kept)} questions without an answer", stacklevel=2)
    return [
        Asked(known.setdefault(row.context, row.context), row.question, row.answer, row.ending, row.start)
        for row in kept
    ]


def _files(path: str) -> list[Path]:
    place = expand_home(path)
    if place.is_file():
        found = [place]
    elif place.is_dir():
        found = sorted(file for file in place.iterdir() if file.is_file() and file.suffix in SUFFIXES)
    else:
        root = Path(place.anchor) if place.is_absolute() else Path()
        pattern = str(place.relative_to(root)) if any(mark in path for mark in "*?[") else ""
        found = sorted(file for file in root.glob(pattern) if file.is_file()) if pattern else []
    if not found:
        raise UserError(f"path: there is no file {place} ({', '.join(SUFFIXES)}); give a file, a folder or a pattern")
    return found


def _jsonl_rows(path: Path) -> Found:
    for number, line in enumerate(_bytes(path).removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if line.strip():
            yield f"line {number}", partial(parse_object, line)


def _json_rows(path: Path) -> Found:
    try:
        data = json.loads(_bytes(path).decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON ({' '.join(str(error).split())})") from None
    data = data.get("data") if isinstance(data, dict) else data
    if not isinstance(data, list):
        raise UserError(
            f'{path} is neither a list of rows nor of the form of SQuAD ({{"data": [{{"paragraphs": ...}}]}})'
        )
    for number, entry in enumerate(data, start=1):
        if isinstance(entry, dict) and "paragraphs" in entry:
            try:
                rows = [
                    {"context": paragraph["context"], "question": asked["question"], "answers": asked["answers"]}
                    for paragraph in entry["paragraphs"]
                    for asked in paragraph["qas"]
                ]
            except (KeyError, TypeError) as error:
                raise UserError(
                    f"{path}, article {number}: it has not the form of SQuAD ({error} is missing)"
                ) from None
            for row in rows:
                yield f"article {number}", partial(_mapping, row)
        else:
            yield f"row {number}", partial(_mapping, entry)


def _parquet_rows(path: Path) -> Found:
    try:
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"parquet needs pyarrow; install it with: {install_command('pyarrow')}") from None
    try:
        opened = pyarrow.parquet.ParquetFile(path)
        number = 0
        for group in range(opened.num_row_groups):
            for row in opened.read_row_group(group).to_pylist():
                number += 1
                yield f"row {number}", partial(_mapping, row)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path} is not a whole parquet file: {str(error).splitlines()[0]}") from None


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None


def _mapping(entry: Any) -> Mapping[str, Any]:
    if not isinstance(entry, dict):
        raise ValueError("it is not a JSON object")
    return entry


def _parse(row: Mapping[str, Any], source: QuestionSource) -> Asked:
    """Return the question of a row; `ValueError` if broken. A question without an answer has the answer ""."""
    if source.answers not in row:
        raise ValueError(f'"{source.answers}" is missing; name the key of the answers with answers: KEY')
    answer, start = _answer(row[source.answers], source.answers)
    return Asked(
        text_field(row, source.context),
        text_field(row, source.question),
        text_field({"answer": answer}, "answer").strip() if answer.strip() else "",
        text_field(row, "ending", optional=True),
        start,
    )


def _answer(value: Any, key: str) -> tuple[str, int]:
    """Return the first answer of a field and where it begins in the document (-1 = not told); "" for none."""
    if isinstance(value, Mapping):
        starts, value = value.get("answer_start"), value.get("text")
        found = _answer(value, key)[0]
        first = starts[0] if isinstance(starts, list) and starts else starts
        return found, first if isinstance(first, int) else -1
    if isinstance(value, list):
        return _answer(value[0], key) if value else ("", -1)
    if value is None:
        return "", -1
    if not isinstance(value, str):
        raise ValueError(f'"{key}" must be a text, a list of texts, or text and answer_start')
    return value, -1


@dataclass(frozen=True)
class _Part:
    """A question and its answer as tokens."""

    asked: tuple[int, ...]
    answer: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.asked) + len(self.answer)


class _Builder:
    """Makes sequences of one length from questions, those that can never fit left out.

    Raises:
        UserError: no question fits.
    """

    def __init__(self, source: QuestionSource, encode: PieceEncoder, asked: Sequence[Asked], length: int) -> None:
        self._source, self._encode, self._length = source, encode, length
        self._end = encode("\n")
        # Without a token that opens a text, an empty line parts documents.
        self._opening = encode.opening or encode("\n\n")
        self._asked = [one for one in asked if self._can_fit(one)]
        if not self._asked:
            raise UserError(
                f"question_answering: none of the {len(asked)} questions of {source.path} fits into {length} tokens "
                "with its answer; raise the context_length"
            )
        left_out = len(asked) - len(self._asked)
        if left_out:
            why = "with their documents" if source.too_long == "skip" else "with what answers them"
            lost = f"left out {left_out} of {len(asked)} questions that do not fit into {length} tokens {why}"
            warnings.warn(f"{source.path}: {lost}", stacklevel=2)
        self._of: dict[str, list[int]] = {}
        for index, one in enumerate(self._asked):
            self._of.setdefault(one.context, []).append(index)

    def sequence(self, generator: np.random.Generator) -> tuple[Ints, Ints]:
        """Return ids and labels, int64 ``[length]`` each."""
        ids: list[int] = []
        labels: list[int] = []
        while len(ids) < self._length:
            tokens, answers = self._draw(generator)
            whole = len(ids) + len(tokens) <= self._length
            ids += tokens
            labels += answers if whole else [IGNORE] * len(tokens)
        cut = slice(0, self._length)
        made = np.array(ids[cut], dtype=np.int64)
        return made, made if self._source.loss_on == "all" else np.array(labels[cut], dtype=np.int64)

    def _draw(self, generator: np.random.Generator) -> tuple[list[int], list[int]]:
        """Return a document with its questions, no longer than a sequence: ids, and labels of the answers."""
        first = int(generator.random() * len(self._asked))
        others = self._of[self._asked[first].context]
        order = np.argsort(generator.random(len(others)), kind="stable")
        chosen = [first, *(others[int(place)] for place in order if others[int(place)] != first)]
        return self._sample([self._asked[index] for index in chosen[: self._source.questions]], generator.random())

    def _sample(self, asked: Sequence[Asked], where: float) -> tuple[list[int], list[int]]:
        lead, document, _ = self._prompt(asked[0])
        parts = [self._part(one, first=place == 0) for place, one in enumerate(asked)]
        before = [*self._opening, *(self._encode.many([lead])[0] if lead else ())]
        text = self._encode.many([document])[0]
        times = 2 if self._source.form == "twice" else 1
        # Questions beyond the first make way for the document: half of the sequence is its, or what it needs whole.
        least = min(len(text), self._length // 2) if self._may_cut(asked[0], document) else len(text)
        while len(parts) > 1 and self._room(before, parts, times) < least:
            parts.pop()
        room = self._room(before, parts, times)
        if len(text) > room:
            spans = [self._span(one, document, len(text)) for one in asked[: len(parts)]]
            begin, end = _window(spans[0], len(text), room, where)
            parts = [part for part, (a, b) in zip(parts, spans, strict=True) if begin <= a and b <= end] or parts[:1]
            text = text[begin:end]
        ids = [*before, *text, *((*self._end, *text) if times == 2 else ())]
        labels = [IGNORE] * len(ids)
        for part in parts:
            ids += [*part.asked, *part.answer]
            labels += [IGNORE] * len(part.asked) + list(part.answer)
        return ids, labels

    def _room(self, before: Sequence[int], parts: Sequence[_Part], times: int) -> int:
        """Return the tokens that are left for one of the `times` readings of a document."""
        return (self._length - len(before) - sum(map(len, parts)) - (times - 1)) // times

    def _may_cut(self, one: Asked, document: str) -> bool:
        return self._source.too_long == "cut" and self._place(one, document) >= 0

    def _prompt(self, one: Asked) -> tuple[str, str, str]:
        row = Row(one.context, one.question, (one.answer,), one.ending)
        return build_prompt(self._source.style, self._source.form, row)

    def _part(self, one: Asked, first: bool) -> _Part:
        tail = self._prompt(one)[2]
        if not first:
            tail = ("\n" if self._source.style == "chat" else "") + tail.lstrip()
        space, answer = self._encode.answer(one.answer)
        return _Part((*self._encode.many([tail])[0], *space), (*answer, *self._end))

    def _place(self, one: Asked, document: str) -> int:
        """Return where the answer begins in the document as the prompt holds it, -1 where it does not stand there."""
        stripped = len(one.context) - len(one.context.lstrip())
        start = one.start - stripped
        if start >= 0 and document[start : start + len(one.answer)] == one.answer:
            return start
        found = document.find(one.answer)
        return found if found >= 0 else document.casefold().find(one.answer.casefold())

    def _span(self, one: Asked, document: str, tokens: int) -> tuple[int, int]:
        """Return the tokens of the document that hold the answer, with a margin; the first where it is not there."""
        place = self._place(one, document)
        if place < 0:
            return 0, 0
        before, until = self._encode.many([document[:place], document[: place + len(one.answer)]])
        return max(0, len(before) - _MARGIN), min(tokens, len(until) + _MARGIN)

    def _can_fit(self, one: Asked) -> bool:
        """Return whether a sample with this question alone fits; counted in bytes where these suffice."""
        lead, document, tail = self._prompt(one)
        times = 2 if self._source.form == "twice" else 1
        around = len(f"{lead}{tail}{one.answer}".encode()) + _PIECES
        if times * len(document.encode()) + around <= self._length:
            return True
        part = self._part(one, first=True)
        fixed = len(self._opening) + len(part) + (len(self._encode.many([lead])[0]) if lead else 0) + times - 1
        if self._may_cut(one, document):
            least = len(self._encode.many([one.answer])[0]) + 2 * _MARGIN + 2
            return fixed + times * least <= self._length
        return fixed + times * len(self._encode.many([document])[0]) <= self._length


def _window(span: tuple[int, int], tokens: int, room: int, where: float) -> tuple[int, int]:
    """Return a window of `room` of `tokens` that holds `span`, at a place that `where` in [0, 1) chooses."""
    earliest, latest = max(0, span[1] - room), min(span[0], tokens - room)
    begin = max(0, min(earliest, latest) + int(where * (abs(latest - earliest) + 1)))
    return begin, min(begin + room, tokens)

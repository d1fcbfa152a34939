r"""BABILong-style questions: a story told among the sentences of a book, and a question about it at the end.

The end of a qa1 sample, bytes as tokens (``_`` is a space, ``|`` a line feed, ``.`` a label of -100); the prompt is
everything up to and including the space before the answer:

    input   ? | A n s w e r : _ k i t c h e n
    label   . . . . . . . . . . k i t c h e n

One sentence stands on a line. The sentences of the story keep their order and stand at random places among those of
the book; the book's are consecutive, from a random place on, and fill the sample to an exact number of tokens (its
first line is cut). How many facts a story has is drawn uniformly between the bounds of its task, lowered to what fits.
Unless `opening` is false, the tokenizer's beginning-of-text token, where it has one, stands before everything.

Source: BABILong (Kuratov et al. 2024) over the first five bAbI tasks (Weston et al. 2015). Stories, names and words are
this package's own; so is the form of the prompt, which has no instruction and no examples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from longrecall.errors import UserError, did_you_mean
from longrecall.tasks.babilong.haystack import Haystack, shipped_text, tokenise
from longrecall.tasks.babilong.wording import (
    FACTS,
    FEWEST_FACTS,
    LABELS,
    MOST_RELATIONS,
    Question,
    judge,
    longest_story,
    tell,
)
from longrecall.tasks.babilong.world import Draws
from longrecall.tasks.charts import ShareMap, TaskSection
from longrecall.tasks.declaration import (
    Declaration,
    Flag,
    HarnessForm,
    Headline,
    Make,
    ReportPart,
    TrainingSource,
)
from longrecall.tasks.encoding import (
    IGNORE,
    ByteEncoder,
    Cell,
    PieceEncoder,
    QuestionSample,
    TextEncoder,
    sample_generator,
)
from longrecall.tasks.text import read_text
from longrecall.tasks.wording import Wording, length_place
from longrecall.units import format_length
from longrecall.value_rules import check_weight, one_of, positive

Ints = NDArray[np.int64]
Bounds = tuple[int, int]

TASKS = tuple(FACTS)


def check_tasks(tasks: Sequence[str], facts: Bounds | None) -> None:
    """Raise `UserError` unless `tasks` are known and `facts` (fewest, most) suit every one of them."""
    if not tasks:
        raise UserError(f"babilong: name at least one of {', '.join(TASKS)}")
    for task in tasks:
        if task not in TASKS:
            raise UserError(
                f'babilong: unknown task "{task}"; known tasks: {", ".join(TASKS)}.{did_you_mean(task, TASKS)}'
            )
        low, high = FACTS[task] if facts is None else facts
        if not FEWEST_FACTS[task] <= low <= high:
            raise UserError(
                f"babilong: {task} needs facts (fewest, most) with {FEWEST_FACTS[task]} <= fewest <= most, "
                f"got {(low, high)}"
            )
        if task == "qa4" and high > MOST_RELATIONS:
            raise UserError(f"babilong: qa4 has at most {MOST_RELATIONS} facts, one per direction, got {(low, high)}")


class _Sizes(NamedTuple):
    """Most tokens of a fact, and of a question with its answer."""

    fact: int
    question: int


def _sizes(encode: PieceEncoder, task: str) -> _Sizes:
    def measure() -> _Sizes:
        told, asked = longest_story(task)
        answers = [sum(map(len, encode.answer(label))) for label in LABELS[task]]
        return _Sizes(
            max(len(encode(sentence + "\n")) for sentence in told),
            max(len(encode(_asking(text))) for text in asked) + max(answers) + len(encode(".")) + len(encode("\n")),
        )

    return encode.derived(("babilong sizes", task), measure)


def _asking(question: str) -> str:
    return f"Question: {question}\nAnswer:"


class _Builder:
    """Makes samples of one kind: `length` tokens with `questions` questions."""

    def __init__(
        self, encode: PieceEncoder, haystack: Haystack, length: int, facts: Bounds | None, questions: int, opening: bool
    ) -> None:
        self._encode, self._haystack = encode, haystack
        self._length, self._facts, self._questions = length, facts, questions
        self._opening = np.array(encode.opening if opening else (), dtype=np.int64)

    def _count(self, draws: Draws, task: str) -> int:
        """Draw the number of facts, among those that fit whatever their words."""
        low, high = self._facts or FACTS[task]
        sizes = _sizes(self._encode, task)
        room = self._length - len(self._opening) - self._questions * sizes.question
        if room < low * sizes.fact:
            raise UserError(
                f"babilong: length {self._length} is too short for {task}: {low} facts and {self._questions} "
                f"question(s) can take {self._length - room + low * sizes.fact} tokens"
            )
        return low + draws.below(min(high, room // sizes.fact) - low + 1)

    def _tail(self, questions: Sequence[Question]) -> tuple[Ints, Ints]:
        """Return tokens and labels of the questions; the words of each answer and its full stop are labelled."""
        ids: list[int] = []
        labels: list[int] = []
        for question in questions:
            lead, word = self._encode.answer(question.answer)
            before, answer = self._encode(_asking(question.text)) + lead, word + self._encode(".")
            newline = self._encode("\n")
            ids += [*before, *answer, *newline]
            labels += [*[IGNORE] * len(before), *answer, *[IGNORE] * len(newline)]
        return np.array(ids, dtype=np.int64), np.array(labels, dtype=np.int64)

    def build(self, draws: Draws, task: str) -> tuple[Ints, Ints]:
        """Return ids and labels, int64 [length] each."""
        story, questions = tell(draws, task, self._count(draws, task), self._questions)
        tail, tail_labels = self._tail(questions)
        body = self._body(draws, story, self._length - len(tail))
        labels = np.full(self._length, IGNORE, dtype=np.int64)
        labels[len(body) :] = tail_labels
        return np.concatenate((body, tail)), labels

    def prompt(self, draws: Draws, task: str) -> QuestionSample:
        """Return a prompt of `length` tokens and its answer, the words of which are labelled."""
        story, (question,) = tell(draws, task, self._count(draws, task), 1)
        lead, word = self._encode.answer(question.answer)
        tail = np.array(self._encode(_asking(question.text)) + lead, dtype=np.int64)
        answer = np.array(word, dtype=np.int64)
        ids = np.concatenate((self._body(draws, story, self._length - len(tail)), tail, answer))
        labels = np.full(len(ids), IGNORE, dtype=np.int64)
        labels[self._length :] = answer
        return QuestionSample(ids, labels, question.text, question.answer)

    def _body(self, draws: Draws, story: Sequence[str], length: int) -> Ints:
        """Return `length` tokens: the opening, and the story scattered in order through the book."""
        facts = [np.array(self._encode(sentence + "\n"), dtype=np.int64) for sentence in story]
        room = length - len(self._opening) - sum(map(len, facts))
        book, lines = self._haystack.passage(draws.below(len(self._haystack.starts)), room)
        places = sorted(int(lines[draws.below(len(lines))]) for _ in facts)
        parts, done = [self._opening], 0
        for place, fact in zip(places, facts, strict=True):
            parts += [book[done:place], fact]
            done = place
        return np.concatenate([*parts, book[done:]])


def _builder(
    encode: PieceEncoder, text: str, length: int, facts: Bounds | None, questions: int, opening: bool
) -> _Builder:
    if questions < 1:
        raise UserError(f"babilong: questions must be at least 1, got {questions}")
    return _Builder(encode, tokenise(encode, text), length, facts, questions, opening)


def babilong_sequence(
    generator: np.random.Generator,
    tokenizer: TextEncoder | PieceEncoder,
    length: int,
    tasks: Sequence[str] = TASKS,
    text: str | None = None,
    facts: Bounds | None = None,
    questions: int = 1,
    opening: bool = True,
) -> tuple[Ints, Ints]:
    """Return (input_ids, labels), int64 [length] each: one training sequence, its answers included.

    `tasks`: one of them is drawn. `text`: the book (None: the shipped training text). `facts`: fewest and most
    sentences of a story (None: the task's own). `questions`: independent ones at the end, each with its answer, ``.``
    and a line feed; the answer and its full stop are labelled. `opening`: begin with the tokenizer's beginning-of-text
    token, which counts in `length`. Pass a `PieceEncoder`, which keeps the tokenised book between calls. Raises
    `UserError` when the fewest facts and the questions may not fit.
    """
    check_tasks(tasks, facts)
    encode = tokenizer if isinstance(tokenizer, PieceEncoder) else PieceEncoder(tokenizer)
    book = shipped_text("train") if text is None else text
    draws = Draws(generator)
    return _builder(encode, book, length, facts, questions, opening).build(draws, draws.choice(tasks))


def babilong_byte_batch(
    generator: np.random.Generator,
    rows: int,
    length: int,
    tasks: Sequence[str] = TASKS,
    text: str | None = None,
    facts: Bounds | None = None,
    questions: int = 1,
    encode: PieceEncoder | None = None,
) -> tuple[Ints, Ints]:
    """Return (input_ids, labels), both int64 [rows, length]: `babilong_sequence` over bytes, a task drawn for each row.

    There is no beginning-of-text token: that is for the caller to put in front. `encode`: one
    ``PieceEncoder(ByteEncoder())`` for all calls, so that the book is read once.
    """
    check_tasks(tasks, facts)
    if rows < 1:
        raise UserError(f"babilong: rows must be at least 1, got {rows}")
    book = shipped_text("train") if text is None else text
    builder = _builder(encode or PieceEncoder(ByteEncoder()), book, length, facts, questions, opening=False)
    draws = Draws(generator)
    built = [builder.build(draws, draws.choice(tasks)) for _ in range(rows)]
    return np.stack([ids for ids, _ in built]), np.stack([labels for _, labels in built])


@dataclass(frozen=True)
class BabilongSource(TrainingSource):
    """Stories told among the sentences of a book, then questions; only the answers are labelled."""

    kind: ClassVar[str] = "babilong"

    tasks: tuple[str, ...] = TASKS
    """Types of story, equally likely."""
    questions: int = 1
    """Questions about a story."""
    path: str | None = None
    """A UTF-8 text file, the book; none = the one that ships."""
    weight: float = 1.0
    """Sequences from here, relative to the other sources."""

    def __post_init__(self) -> None:
        """Check the fields before anything runs."""
        check_weight(self.weight)
        positive(self, "questions")
        if not self.tasks:
            raise UserError("tasks is empty; name at least one")
        for task in self.tasks:
            one_of("tasks", task, TASKS)

    def sequences(self, pieces: PieceEncoder) -> Make:
        """Return the function that makes a training sequence; the book of `path` is read here."""
        text = None if self.path is None else read_text(self.path)
        return lambda generator, length: babilong_sequence(
            generator, pieces, length, self.tasks, text, questions=self.questions
        )


def _headlines(cells: Sequence[Mapping[str, Any]]) -> list[Headline]:
    longest = max(cell["length"] for cell in cells)
    hardest = f"stories: accuracy at {format_length(int(longest))} tokens"
    return [Headline("stories: accuracy, all cells"), Headline(hardest, part={"length": longest})]


_CHART = ShareMap(
    name="babilong-map",
    along="length",
    rows="task",
    axes=("length in tokens", ""),
    keys=("task", "length"),
    trained=True,
    title="Stories: share of questions answered by type of story and length of the text",
    caption="Share of questions, in percent, answered rightly about stories that are scattered through a book. A "
    "question needs one fact (qa1), two (qa2) or three (qa3), neighbouring places (qa4), or who gave what to "
    "whom (qa5).",
    reading="How to read it: the stronger the colour, the more is answered. A map that does not fade to the right "
    "shows a model that reasons over longer texts. The dashed line, if there is one, marks the training length.",
)
_SECTION = TaskSection("Stories in a long text", (_CHART,), tables={"exact_match": ("task", "length")})


@dataclass(frozen=True)
class Babilong:
    """The evaluation task: cells ``{"task", "length"}``, one story and one question per sample.

    A prompt has exactly `length` tokens, story and question included, the answer excluded. `tasks`: of qa1 to qa5.
    `haystack`: the book, by default the shipped held-out text; a book that is too short is gone through again. `facts`:
    fewest and most sentences of a story (None: the task's own). `opening`: begin the prompt with the tokenizer's
    beginning-of-text token, where it has one; it counts in `length`. The model answers in its own words, up to
    `answer_tokens` tokens.
    """

    tasks: tuple[str, ...] = TASKS
    haystack: str = field(default_factory=lambda: shipped_text("held_out"), repr=False)
    facts: Bounds | None = None
    opening: bool = True
    answer_tokens: int = 32

    name: ClassVar[str] = "babilong"
    wording: ClassVar[Wording] = Wording(
        "stories",
        "The sentences of a small story are scattered through a book; the question at the end needs one of them, or "
        "several put together.",
        length_place,
    )
    declared: ClassVar[Declaration] = Declaration(
        flags=(Flag("--qa", "tasks", "Q,...", "types of question", str),),
        text_option="haystack",
        source=BabilongSource,
        harness=HarnessForm(32),
        report=ReportPart(("accuracy", "exact_match"), ("length",), ("task",), _headlines, _SECTION),
    )

    def __post_init__(self) -> None:
        """Check the options before anything runs."""
        check_tasks(self.tasks, self.facts)
        if self.answer_tokens < 1:
            raise UserError(f"babilong: answer_tokens must be at least 1, got {self.answer_tokens}")

    def cells(self, lengths: Sequence[int]) -> list[Cell]:
        """Return the cells to run: every task at every length."""
        return [{"task": task, "length": length} for task in self.tasks for length in lengths]

    def answers_per_sample(self, cell: Cell) -> int:
        """Return how many answers a sequence of `cell` holds."""
        return 1

    def sample(self, encode: PieceEncoder, cell: Cell, index: int, seed: int) -> QuestionSample:
        """Return sample `index` of `cell`; the same bytes for the same arguments on every platform."""
        draws = Draws(sample_generator(seed, self.name, cell, index))
        builder = _builder(encode, self.haystack, int(cell["length"]), self.facts, 1, self.opening)
        return builder.prompt(draws, str(cell["task"]))

    def ended(self, said: str) -> bool:
        """Return whether nothing said after this can count."""
        return "." in said or "\n" in said.lstrip()

    def judge(self, cell: Cell, sample: QuestionSample, said: str) -> bool:
        """Return whether `said`, the model's text after the prompt, answers the question of `sample`."""
        return judge(str(cell["task"]), sample.question, sample.target, said)

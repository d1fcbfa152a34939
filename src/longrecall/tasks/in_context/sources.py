"""The twelve published in-context data sets: where the hub has them, and how a row becomes an example.

Inputs are worded as by Min et al. (2022), whose suite StateX (appendix C.3) uses: marks before the parts of an input,
``[SEP]`` between them, the classes by name; multiple-choice inputs do not list the options. Demonstrations come from
the training split, questions from the validation split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

Row = Mapping[str, Any]
Convert = Callable[[Row], Iterable[Row]]


class HubSource(NamedTuple):
    """A data set of the hub; `convert` makes rows of the jsonl schema (``input``, ``output``, ``options``)."""

    path: str
    config: str | None
    convert: Convert


def _classes(parts: tuple[tuple[str, str], ...], labels: tuple[str, ...]) -> Convert:
    """Return a conversion of classification rows: `parts` are (mark, field), `labels` the classes by number."""

    def convert(row: Row) -> Iterable[Row]:
        # Rows of hidden test splits have the label -1; as an index it would silently mean the last class.
        if not 0 <= row["label"] < len(labels):
            raise ValueError(f"label {row['label']} is none of 0 to {len(labels) - 1}")
        text = " [SEP] ".join((f"{mark}: " if mark else "") + row[field] for mark, field in parts)
        yield {"input": _line(text), "output": labels[row["label"]], "options": list(labels)}

    return convert


def _line(text: str) -> str:
    return text.strip().replace("\n", " ")


def _choice(text: str, options: list[str], answer: int) -> Row:
    if not 0 <= answer < len(options):
        raise ValueError(f"answer {answer} is none of the {len(options)} options")
    options = [_line(option) for option in options]
    return {"input": _line(text), "output": options[answer], "options": options}


def _lettered(row: Row) -> Iterable[Row]:
    choices = row["choices"]
    yield _choice(row["question"], choices["text"], choices["label"].index(row["answerKey"]))


def _copa(row: Row) -> Iterable[Row]:
    yield _choice(row["premise"], [row["choice1"], row["choice2"]], row["label"])


def _codah(row: Row) -> Iterable[Row]:
    # "propmt" is how the field is spelled there.
    yield _choice(row["question_propmt"], row["candidate_answers"], row["correct_answer_idx"])


def _dream(row: Row) -> Iterable[Row]:
    text = f"{row['question']} [SEP] {' '.join(row['dialogue'])} [SEP]"
    yield _choice(text, row["choice"], row["choice"].index(row["answer"]))


_PAIR = (("sentence 1", "sentence1"), ("sentence 2", "sentence2"))
_ENTAILED = (("premise", "premise"), ("hypothesis", "hypothesis"))
_SENTENCE = (("sentence", "sentence"),)
_QUESTIONS = (("question 1", "question1"), ("question 2", "question2"))

SOURCES: dict[str, HubSource] = {
    "commonsense_qa": HubSource("tau/commonsense_qa", None, _lettered),
    "ai2_arc": HubSource("allenai/ai2_arc", "ARC-Challenge", _lettered),
    "superglue-copa": HubSource("aps/super_glue", "copa", _copa),
    "superglue-cb": HubSource("aps/super_glue", "cb", _classes(_ENTAILED, ("entailment", "contradiction", "neutral"))),
    "glue-mrpc": HubSource("nyu-mll/glue", "mrpc", _classes(_PAIR, ("not_equivalent", "equivalent"))),
    "glue-sst2": HubSource("nyu-mll/glue", "sst2", _classes(_SENTENCE, ("negative", "positive"))),
    "glue-qqp": HubSource("nyu-mll/glue", "qqp", _classes(_QUESTIONS, ("not_duplicate", "duplicate"))),
    "glue-cola": HubSource("nyu-mll/glue", "cola", _classes((("", "sentence"),), ("unacceptable", "acceptable"))),
    "superglue-rte": HubSource("aps/super_glue", "rte", _classes(_ENTAILED, ("entailment", "not_entailment"))),
    "superglue-wic": HubSource("aps/super_glue", "wic", _classes((("word", "word"), *_PAIR), ("false", "true"))),
    "codah": HubSource("jaredfern/codah", "fold_0", _codah),
    "dream": HubSource("dataset-org/dream", None, _dream),
}
"""Name in StateX's appendix C.3 -> where it is."""

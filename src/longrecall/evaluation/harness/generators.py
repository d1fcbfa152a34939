"""Our tasks as documents of lm-evaluation-harness, for the YAML files of `longrecall.evaluation.harness.files`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from longrecall.tasks.encoding import GradedSample, PieceEncoder, QuestionSample, answer_spans
from longrecall.tasks.registry import GradedTask, QuestionTask, create_task
from longrecall.units import parse_length

_NO_TOKENS = np.zeros(0, dtype=np.int64)


def make_documents(
    *,
    longrecall_task: str,
    lengths: Sequence[int | str] = (512,),
    samples: int = 256,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    tokenizer: str | None = None,
    pretrained: str | None = None,
    **others: Any,
) -> dict[str, Any]:
    """Return ``{"test": Dataset}`` with one document for each answer: what ``custom_dataset`` of a YAML file asks for.

    A document: ``prompt``, ``target`` (texts), ``cell``, ``task`` and its ``options`` (JSON), ``question``,
    ``references``, ``fill``. `lengths`, `samples` (answers of each cell), `seed` and `options` (fields of the task's
    class) come from ``lm_eval --metadata``; `tokenizer`, or else the `pretrained` checkpoint's, decides how long texts
    are; the byte tokenizer where there is neither. Other arguments of the model are ignored. Prompts go without the
    opening token: that is the harness's to add. Raises `UserError` as the task itself does.
    """
    from datasets import Dataset

    task: Any = create_task(longrecall_task, **_as_fields(options or {}))
    words = _tokenizer(tokenizer or pretrained)
    encode = PieceEncoder(words)
    told = json.dumps(dict(options or {}), sort_keys=True)
    rows: list[dict[str, Any]] = []
    for cell in task.cells(sorted({parse_length(length) for length in lengths})):
        made = 0
        for index in range(samples):
            sample = task.sample(encode, cell, index, seed)
            for row in _rows(sample, encode, words):
                rows.append(row | {"cell": json.dumps(dict(cell)), "task": longrecall_task, "options": told})
                made += 1
            if made >= samples:
                break
    return {"test": Dataset.from_list(rows)}


def _rows(sample: Any, encode: PieceEncoder, tokenizer: Any) -> Iterator[dict[str, Any]]:
    """Yield the texts of each answer of a sample, with all that comes before it as the prompt."""
    ids = sample.input_ids
    begin = len(encode.opening) if tuple(ids[: len(encode.opening)].tolist()) == encode.opening else 0
    for start, end in answer_spans(sample.labels):
        yield {
            "prompt": tokenizer.decode(ids[begin:start].tolist()),
            "target": tokenizer.decode(ids[start:end].tolist()),
            "question": getattr(sample, "question", ""),
            "said": getattr(sample, "target", ""),
            "references": list(getattr(sample, "references", ())),
            "fill": float(getattr(sample, "fill", 1.0)),
        }


def score_document(document: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Return ``{"accuracy", ...}`` of what the model said after a document's prompt, by our own rule.

    A labelled answer must be the next thing said; a question is judged by its task, with the task's grades.
    """
    said = str(results[0])
    task: Any = create_task(str(document["task"]), **_as_fields(json.loads(document["options"])))
    if not isinstance(task, QuestionTask):
        return {"accuracy": float(said.startswith(str(document["target"])))}
    cell, sample = json.loads(document["cell"]), _sample(task, document)
    scores = {"accuracy": float(task.judge(cell, sample, said))}
    if isinstance(task, GradedTask):
        scores |= {name: float(grade) for name, grade in task.grades(cell, sample, said).items()}
    return scores


def _sample(task: QuestionTask, document: Mapping[str, Any]) -> QuestionSample:
    words = {
        "question": str(document["question"]),
        "target": str(document["said"]),
        "references": tuple(document["references"]),
    }
    if isinstance(task, GradedTask):
        return GradedSample(_NO_TOKENS, _NO_TOKENS, fill=float(document["fill"]), **words)  # type: ignore[arg-type]
    return QuestionSample(_NO_TOKENS, _NO_TOKENS, **words)  # type: ignore[arg-type]


def _as_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options from JSON, whose lists are tuples in a task."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}


def _tokenizer(place: str | None) -> Any:
    from longrecall.models.byte_tokenizer import VOCABULARY, byte_tokenizer
    from longrecall.models.checkpoint_tokenizer import load_tokenizer, read_tokenizer
    from longrecall.models.formats.hub import locate_tokenizer

    if place is None:
        return byte_tokenizer()
    if Path(place).is_dir():
        config = Path(place) / "config.json"
        size = json.loads(config.read_text(encoding="utf-8")).get("vocab_size") if config.exists() else VOCABULARY
        return load_tokenizer(place, int(size or VOCABULARY))
    return read_tokenizer(locate_tokenizer(place))

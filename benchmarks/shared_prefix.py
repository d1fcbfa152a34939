"""Many questions about one long document: its state read once for all of them, against reading it for each.

    python benchmarks/shared_prefix.py --threads 1 --out benchmarks/results/shared_prefix.json

The shipped base models, float32, on the CPU: `--questions` questions after a document of `--tokens` tokens of the
held-out book, each answered greedily. Both ways go through the engine of `longrecall eval`, which batches questions
either way. A ratio is seconds of reading the document for each question over seconds of reading it once; the answers
must be the same, word for word. Absolute times of a shared CPU mean nothing and are not kept.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

# See cpu_timing.py: a spinning thread holds up the one it waits for on a shared machine.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import torch
from cpu_timing import OtherPrograms, cpu_parser, recorded

import longrecall
from longrecall.evaluation.memory import Room
from longrecall.evaluation.recall import CellJob
from longrecall.models.checkpoint_tokenizer import load_tokenizer
from longrecall.tasks.encoding import IGNORE, Cell, PieceEncoder, QuestionSample, draw_integers, sample_generator
from longrecall.units import parse_length

ASSETS = Path(longrecall.__file__).parent / "assets"
MODELS = ("mamba2-base", "gla-base")


@dataclass(frozen=True)
class Passages:
    """Questions about a book: a few words of it are quoted, and the model goes on from there."""

    text: str
    shared: bool
    answer_tokens: int = 24

    name: ClassVar[str] = "passages"

    def cells(self, lengths: Sequence[int]) -> list[Cell]:
        return [{"length": length} for length in lengths]

    def answers_per_sample(self, cell: Cell) -> int:
        return 1

    def sample(self, encode: PieceEncoder, cell: Cell, index: int, seed: int) -> QuestionSample:
        length = int(cell["length"])
        book = encode.derived("book", lambda: np.array(encode(self.text), dtype=np.int64))
        document = np.concatenate((np.array(encode.opening, dtype=np.int64), book))[:length]
        generator = sample_generator(seed, self.name, cell, index)
        words = 12 + int(draw_integers(generator, 24, ())[()])
        start = len(encode.opening) + int(draw_integers(generator, length - 200, ())[()])
        quoted, answer = document[start : start + words], document[start + words : start + words + 8]
        question = np.concatenate((np.array(encode("\n\nIt says: "), dtype=np.int64), quoted))
        ids = np.concatenate((document, question, answer))
        labels = np.full(len(ids), IGNORE, dtype=np.int64)
        labels[len(ids) - len(answer) :] = answer
        return QuestionSample(
            ids, labels, "what comes next?", "", group="book" if self.shared else None, shared=length * self.shared
        )

    def ended(self, said: str) -> bool:
        return False

    def judge(self, cell: Cell, sample: QuestionSample, said: str) -> bool:
        return False


def answer(
    model: object, tokenizer: object, task: Passages, length: int, questions: int
) -> tuple[list[str], float, float]:
    """Return what was said after each question, the seconds it took and the processor seconds."""
    cell = task.cells([length])[0]
    job = CellJob(model, tokenizer, PieceEncoder(tokenizer), task, cell, questions, 0, Room(model, 16384, 2048))
    wall, own = time.perf_counter(), time.process_time()
    records: dict[int, dict[str, object]] = {}
    for part in job.run(range(job.count), lambda tokens: None):
        records |= part
    seconds = time.perf_counter() - wall, time.process_time() - own
    return [str(records[index]["said"]) for index in range(questions)], *seconds


def measure(name: str, text: str, length: int, questions: int) -> dict[str, object]:
    """Ratios of both ways for one model; stops with an error when the answers differ."""
    model = longrecall.load(ASSETS / name, dtype="float32").eval()
    tokenizer = load_tokenizer(ASSETS / name, model.config.vocab_size)
    once = Passages(text, shared=True)
    answer(model, tokenizer, once, min(length, 2048), 2)  # warms up
    said_once, *seconds_once = answer(model, tokenizer, once, length, questions)
    said_each, *seconds_each = answer(model, tokenizer, replace(once, shared=False), length, questions)
    if said_once != said_each:
        different = sum(a != b for a, b in zip(said_once, said_each, strict=True))
        raise SystemExit(f"{name}: {different} of {questions} answers differ between the two ways")
    return {
        "model": name,
        "questions": questions,
        "document_tokens": length,
        "different_answers": len(set(said_once)),
        "ratio": seconds_each[0] / seconds_once[0],
        "processor_ratio": seconds_each[1] / seconds_once[1],
    }


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = cpu_parser(__doc__, threads=1)
    parser.add_argument("--tokens", type=parse_length, default=16384, help="of the document [16k]")
    parser.add_argument("--questions", type=int, default=50)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    text = (ASSETS / "text" / "held_out.txt").read_text(encoding="utf-8")
    others = OtherPrograms()
    rows = [measure(name, text, options.tokens, options.questions) for name in options.models]
    for row in rows:
        print(f"{row['model']:13}{row['ratio']:7.1f}x faster ({row['processor_ratio']:.1f}x in processor seconds)")
    print("the same answers")
    settings = {"seed": 0, "answer_tokens": Passages.answer_tokens}
    return recorded(options, settings, rows, cores_busy_elsewhere=others.cores())


if __name__ == "__main__":
    main()

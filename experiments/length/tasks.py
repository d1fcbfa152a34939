"""What experiment.py trains on and asks: batches by (seed, step), running text, the questions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from experiments.common.mixture import Books, Recall, opened
from longrecall.tasks.babilong.task import TASKS, babilong_byte_batch
from longrecall.tasks.copying import copying_byte_batch
from longrecall.tasks.encoding import ByteEncoder, PieceEncoder

LENGTH = 512
BATCH = 32
ROWS = (10, 14, 4, 2, 2)
"""Rows of a batch: books, phone books, pass keys, strings to copy, stories."""
COPY_LENGTHS = (8, 20, 40, 64, 96, 128)
STORY_LENGTHS = (512, 1024, 2048, 4096, 8192)
KEY_LENGTHS = (512, 1024, 2048, 4096)
FORM_FEED = 12
BYTES = PieceEncoder(ByteEncoder())
"""One for all stories: it keeps the tokens of their book, which take a hundred times as long to make as a batch."""


class Tasks:
    """The rows that are no books: phone books and pass keys (`Recall`), copying, stories; by (seed, step) alone."""

    def __init__(self, seed: int, steps: int, rows: tuple[int, ...], ramp: float, early: int) -> None:
        books, phonebooks, keys, self.copies, self.stories = rows
        self.seed, self.steps = seed, steps
        easy = phonebooks + books // 2
        self.recall = Recall(seed, steps, LENGTH, phonebooks, keys, ramp=ramp, early=early, early_phonebooks=easy)

    def batch(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """ids and labels ``[rows, 512]`` of one step."""
        g = np.random.Generator(np.random.PCG64([17, self.seed, step]))
        parts = [
            self.recall.batch(step),
            opened(*copying_byte_batch(g, self.copies, LENGTH - 1)),
            opened(*babilong_byte_batch(g, self.stories, LENGTH - 1, questions=3, encode=BYTES)),
        ]
        return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])


class Text:
    """Rows of books: excerpts from anywhere, or rows that go on where they stopped, each inside one document."""

    def __init__(self, books: Books, rows: int, seed: int, steps: int, continued: bool) -> None:
        self.books, self.continued = books, continued
        self.generator = torch.Generator(device=books.data.device).manual_seed(seed)
        if continued:
            need = steps * LENGTH + 1
            ends = [*(books.data == FORM_FEED).nonzero()[:, 0].tolist(), len(books.data)]
            spans = [(a + 1, b) for a, b in zip([-1, *ends[:-1]], ends, strict=True) if b - a > need]
            draw = np.random.Generator(np.random.PCG64([19, seed]))
            chosen = [spans[i] for i in draw.integers(len(spans), size=rows)]
            self.starts = torch.tensor([int(draw.integers(a, b - need)) for a, b in chosen], device=books.data.device)

    def take(self, step: int, rows: int) -> Tensor:
        """int64 ``[rows, 512]``."""
        if not self.continued:
            return self.books.crops(self.generator, rows, LENGTH)
        at = self.starts[:, None] + step * LENGTH + torch.arange(LENGTH, device=self.starts.device)
        return self.books.data[at].long()


@dataclass
class Questions:
    """Everything that is asked, made once for all models."""

    text: np.ndarray
    copies: dict[int, tuple[np.ndarray, np.ndarray]]
    stories: dict[tuple[str, int], tuple[np.ndarray, np.ndarray]]


def make_questions(validation: Books, longest: int, count: int) -> Questions:
    """Windows of unseen books, strings to copy and stories, by length."""
    generator = torch.Generator(device=validation.data.device).manual_seed(0)
    text = validation.crops(generator, 16, longest + 1).cpu().numpy()
    g = np.random.Generator(np.random.PCG64(23))
    copies = {n: opened(*copying_byte_batch(g, count, 2 * n + 3, (n, n))) for n in COPY_LENGTHS}
    stories = {
        (task, n): opened(*babilong_byte_batch(g, max(8, count // 4), n - 1, (task,), encode=BYTES))
        for task in TASKS
        for n in STORY_LENGTHS
        if n <= longest
    }
    return Questions(text, copies, stories)

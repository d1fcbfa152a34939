"""The text the small base models read: book excerpts, phone books and pass keys, in byte tokens."""

from __future__ import annotations

import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from longrecall.tasks.passkey import passkey_byte_batch
from longrecall.tasks.phonebook import phonebook_byte_batch

END = 256
FORM_FEED = 12
IGNORE = -100
SHAPES = ((2, 2), (2, 2), (2, 2), (1, 1))
"""Letters and digits of the phone books, a quarter of the rows each."""
EARLY_SHAPES = ((1, 1), (1, 2), (2, 1), (2, 2))
"""Those of the opening stage of pretraining, where short names come first."""


class Batches(Protocol):
    """Batches of so many `steps`, each a pure function of its step."""

    steps: int

    def batch(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """ids and labels of one step."""
        ...


class _InSteps(IterableDataset):
    """The batches in the order of their steps; the workers of a loader take them in turn."""

    def __init__(self, batches: Batches) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        worker = get_worker_info()
        first, stride = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for step in range(first, self.batches.steps, stride):
            yield self.batches.batch(step)


class Recall:
    """Rows of dense recall text: `phonebooks` rows, then `passkeys` rows; every sequence opens with the end token.

    The number of pairs is log-uniform (or uniform) from 1 to a ceiling that rises to `most_pairs` over the first `ramp`
    of the steps; pass-key sequences grow from an eighth of the context to the whole of it. `shapes` are the letters and
    digits of the phone books, an equal share of the rows each. During the first `early` steps there are
    `early_phonebooks` rows of `EARLY_SHAPES` instead, with at most 8 pairs: dense, easy recall, which is what gets a
    small model off the plateau of guessing.
    """

    def __init__(
        self,
        seed: int,
        steps: int,
        length: int,
        phonebooks: int,
        passkeys: int,
        most_pairs: int = 48,
        ramp: float = 0.4,
        shapes: tuple[tuple[int, int], ...] = SHAPES,
        uniform: bool = False,
        early: int = 0,
        early_phonebooks: int = 0,
    ) -> None:
        self.seed, self.steps, self.length = seed, steps, length
        self.phonebooks, self.passkeys = phonebooks, passkeys
        self.most_pairs, self.ramp = most_pairs, ramp
        self.shapes, self.uniform = shapes, uniform
        self.early, self.early_phonebooks = early, early_phonebooks

    def batch(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """ids and labels of one step; a pure function of (seed, step)."""
        g = np.random.Generator(np.random.PCG64([self.seed, step]))
        early = step < self.early
        share = 1.0 if self.ramp <= 0 else min(1.0, step / (self.ramp * self.steps))
        ceiling = 8.0 if early else 4 + (self.most_pairs - 4) * share
        draw = g.random(self.early_phonebooks if early else self.phonebooks)
        counts = 1 + draw * ceiling if self.uniform else np.exp(draw * np.log(ceiling + 1))
        counts = np.floor(counts).astype(np.int64)
        shapes = EARLY_SHAPES if early else self.shapes
        shares = np.array_split(counts, len(shapes))
        parts = [self._books(g, part, *shape) for part, shape in zip(shares, shapes, strict=True) if len(part)]
        widest = 3 if share < 0.5 else 2
        parts += [self._keys(g, 2 ** int(g.random() * (widest + 1))) for _ in range(self.passkeys)]
        return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])

    def _books(
        self, g: np.random.Generator, counts: np.ndarray, letters: int, digits: int
    ) -> tuple[np.ndarray, np.ndarray]:
        counts = np.minimum(counts, 26**letters)
        return opened(*phonebook_byte_batch(g, len(counts), self.length - 1, counts, letters, digits))

    def _keys(self, g: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        """One row of `count` pass-key sequences side by side; too short for the form, they are doubled in length."""
        while self.length // count < 128:
            count //= 2
        ids, labels = opened(*passkey_byte_batch(g, count, self.length // count - 1))
        return ids.reshape(1, -1), labels.reshape(1, -1)


def opened(ids: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Put the end token before every row."""
    column = np.ones((len(ids), 1), dtype=np.int64)
    return np.concatenate([column * END, ids], axis=1), np.concatenate([column * IGNORE, labels], axis=1)


def batch_loader(batches: Batches, workers: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Batches in the order of the steps, made by `workers` processes."""
    options = {"num_workers": workers, "prefetch_factor": 8} if workers else {}
    return iter(DataLoader(_InSteps(batches), batch_size=None, **options))


class Books:
    """A corpus of documents joined by form feeds, held as bytes on one device."""

    def __init__(self, path: Path, device: str) -> None:
        packed = path.read_bytes()
        raw = lzma.decompress(packed) if path.suffix == ".xz" else packed
        self.data = torch.from_numpy(np.frombuffer(raw, np.uint8).copy()).to(device)

    def crops(self, generator: torch.Generator, rows: int, length: int) -> Tensor:
        """Random excerpts ``[rows, length]`` as int64, form feeds as the end token."""
        at = torch.randint(0, len(self.data) - length, (rows, 1), generator=generator, device=self.data.device)
        text = self.data[at + torch.arange(length, device=at.device)].long()
        return torch.where(text == FORM_FEED, END, text)

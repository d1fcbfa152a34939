"""Recall and perplexity of byte models on a GPU in seconds: as `longrecall eval` measures, over vectorised samples."""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from experiments.common.mixture import Books, opened
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.tasks.passkey import passkey_byte_batch
from longrecall.tasks.phonebook import phonebook_byte_batch

SEGMENT = 2048


def logits_in_segments(model: RecurrentLM, ids: Tensor):
    """Yield (start, logits) of pieces of `ids` ``[B, T]`` read with a carried state."""
    state = None
    for start in range(0, ids.shape[1], SEGMENT):
        with torch.autocast(ids.device.type, dtype=torch.bfloat16, enabled=ids.is_cuda):
            out = model(ids[:, start : start + SEGMENT], past_key_values=state)
        state = out.past_key_values
        yield start, out.logits


@torch.no_grad()
def answers_right(model: RecurrentLM, ids: np.ndarray, labels: np.ndarray) -> Tensor:
    """For every scored position, row by row: is the most likely token the label? (bool)"""
    device = next(model.parameters()).device
    inputs, targets = torch.from_numpy(ids).to(device), torch.from_numpy(labels).to(device)
    guesses = torch.cat([logits.argmax(-1) for _, logits in logits_in_segments(model, inputs)], 1)
    targets = targets[:, 1:]
    return (guesses[:, :-1] == targets)[targets != -100]


def phonebook_counts(
    model: RecurrentLM, pairs: int, queries: int, seed: int, letters: int = 2, digits: int = 2
) -> np.ndarray:
    """int64 ``[books, 2]``: queries right and asked in each book; one query in two pairs' time, at most 8 a book."""
    g = np.random.Generator(np.random.PCG64([7, seed, pairs]))
    asked = max(1, min(8, pairs // 2))
    books, rows = -(-queries // asked), max(16, min(512, 2**19 // (pairs * (letters + digits + 2))))
    found = []
    while (done := sum(map(len, found))) < books:
        count = min(rows, books - done)
        length = pairs * (2 + letters + digits) + asked * (3 + letters + digits)
        ids, labels = opened(*phonebook_byte_batch(g, count, length, np.full(count, pairs), letters, digits))
        right = answers_right(model, ids, labels).view(count, asked, digits).all(-1).sum(1)
        found.append(right.cpu().numpy())
    right = np.concatenate(found)
    return np.stack([right, np.full(len(right), asked)], 1)


def passkey_counts(model: RecurrentLM, length: int, samples: int, seed: int, digits: int = 5) -> tuple[int, int]:
    """(right, asked) at random depths: a key is right when every digit is."""
    g = np.random.Generator(np.random.PCG64([11, seed, length]))
    right, rows = 0, max(16, min(512, 2**20 // length))
    for start in range(0, samples, rows):
        count = min(rows, samples - start)
        ids, labels = opened(*passkey_byte_batch(g, count, length - 1, digits))
        right += int(answers_right(model, ids, labels).view(count, digits).all(1).sum())
    return right, samples


@torch.no_grad()
def bits_per_byte(
    model: RecurrentLM, books: Books, edges: list[int], rows: int, seed: int
) -> list[tuple[float, float]]:
    """Mean bits per byte over positions [edges[i], edges[i+1]) and its standard error over `rows` excerpts."""
    generator = torch.Generator(device=books.data.device).manual_seed(seed)
    text = books.crops(generator, rows, edges[-1] + 1)
    losses = []
    for start, logits in logits_in_segments(model, text[:, :-1]):
        target = text[:, start + 1 : start + 1 + logits.shape[1]]
        losses.append(F.cross_entropy(logits.float().flatten(0, 1), target.flatten(), reduction="none").view(rows, -1))
    bits = torch.cat(losses, 1) / math.log(2)
    spans = [bits[:, a:b].mean(1) for a, b in itertools.pairwise(edges)]
    return [(float(s.mean()), float(s.std() / math.sqrt(rows))) for s in spans]

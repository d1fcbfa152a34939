"""Recall with states in bfloat16, and with weights of one byte a number: the same questions to every form of a model.

A form of a checkpoint is asked phone books, pass keys and strings to copy; every form gets the same texts, so answers
are paired. The worst case of states in bfloat16 is measured: all of a text is read token by token by a decoding step
that rounds the state after each. `generate()` reads a prompt with states in float32 and rounds them from the first new
token on. Weights are those of the checkpoint (the shipped bases are stored in bfloat16, with which they multiply too),
or quantised from them. On a GPU the step's kernels are measured. Minutes; half an hour on a CPU that others use:

    python -m experiments.number_formats.experiment --out experiments/results/number_formats.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import longrecall
from experiments.common.command import provenance
from experiments.common.mixture import opened
from longrecall.inference.step import DecodingStep
from longrecall.models.loading import preferred_device
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.tasks.copying import copying_byte_batch
from longrecall.tasks.passkey import passkey_byte_batch
from longrecall.tasks.phonebook import phonebook_byte_batch

LETTERS = 8
"""Of the strings to copy."""
ASSETS = Path(longrecall.__file__).parent / "assets"


@dataclass(frozen=True)
class Form:
    """How a model is read.

    Attributes:
        states: dtype of its states after every token, by a decoding step; None = forward passes over whole texts.
        quantize: how its weights are quantised.
    """

    states: torch.dtype | None = None
    quantize: str | None = None


FORMS = {
    "as stored": Form(),
    "token by token": Form(states=torch.float32),
    "bf16 states": Form(states=torch.bfloat16),
    "int8 weights": Form(quantize="int8"),
    "fp8 weights": Form(quantize="fp8"),
    "int8 weights, bf16 states": Form(states=torch.bfloat16, quantize="int8"),
}
"""In bfloat16 other sums are rounded when a text is read token by token; the second form shows what that changes."""


@dataclass(frozen=True)
class Cell:
    """Texts of one kind. `draw` gives ids and labels ``[rows, T]``; an answer is so many scored tokens, all right."""

    task: str
    cell: str
    rows: int
    answer: int
    draw: Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray]]


def cells(scale: float) -> Iterator[Cell]:
    """All that is asked; `scale` times as many rows."""

    def rows(count: int) -> int:
        return max(2, round(scale * count))

    for pairs in (4, 8, 16, 32):
        asked = max(1, min(8, pairs // 2))

        def book(
            g: np.random.Generator, n: int, pairs: int = pairs, asked: int = asked
        ) -> tuple[np.ndarray, np.ndarray]:
            return phonebook_byte_batch(g, n, pairs * 6 + asked * 7, np.full(n, pairs), 2, 2)

        yield Cell("pairs", str(pairs), rows(1024 // asked), 2, book)
    for length in (512, 2048):

        def key(g: np.random.Generator, n: int, length: int = length) -> tuple[np.ndarray, np.ndarray]:
            return passkey_byte_batch(g, n, length - 1, 5)

        yield Cell("pass key", str(length), rows(256 if length < 2048 else 128), 5, key)

    def copy(g: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
        return copying_byte_batch(g, n, 2 * LETTERS + 3, (LETTERS, LETTERS))

    # Letter by letter: few strings of this length are copied as a whole.
    yield Cell("copying", str(LETTERS), rows(256), 1, copy)


@torch.no_grad()
def guesses(model: RecurrentLM, ids: Tensor, states: torch.dtype | None) -> Tensor:
    """The likeliest next token after each of ids ``[rows, T]``; `states` as in `Form`."""
    if states is None:
        return model(ids).logits.argmax(-1)
    step = DecodingStep(model, len(ids), states)
    if ids.is_cuda:
        step.capture()
    found = torch.empty_like(ids)
    for column in range(ids.shape[1]):
        step.ids.copy_(ids[:, column])
        found[:, column] = step().argmax(-1)
    return found


def right_answers(model: RecurrentLM, cell: Cell, states: torch.dtype | None, seed: int) -> tuple[list[int], int]:
    """Right answers of each row, and how many a row is asked for."""
    generator = np.random.Generator(np.random.PCG64([41, seed, *(cell.task + cell.cell).encode()]))
    ids, labels = (torch.from_numpy(x) for x in opened(*cell.draw(generator, cell.rows)))
    found = guesses(model, ids.to(model.device), states).cpu()
    scored = labels[:, 1:] != -100
    right = (found[:, :-1] == labels[:, 1:])[scored]
    answers = right.view(cell.rows, -1, cell.answer).all(-1)
    return answers.sum(1).tolist(), answers.shape[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", type=Path, nargs="+", default=[ASSETS / "gla-base", ASSETS / "mamba2-base"])
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=list(FORMS))
    parser.add_argument("--scale", type=float, default=1.0, help="times as many texts [%(default)s]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    settings = {"scale": args.scale, "seed": args.seed}
    record = {"about": provenance(settings), "results": []}
    for path in args.checkpoints:
        for name in args.forms:
            form, began = FORMS[name], time.perf_counter()
            model = longrecall.load(path, device=preferred_device(), quantize=form.quantize)
            for cell in cells(args.scale):
                right, asked = right_answers(model, cell, form.states, args.seed)
                row = {"checkpoint": path.name, "form": name, "task": cell.task, "cell": cell.cell, "asked": asked}
                record["results"].append(row | {"right": right})
                print(
                    f"{path.name}, {name}, {cell.task} {cell.cell}: {sum(right) / asked / len(right):.4f}", flush=True
                )
            print(f"{time.perf_counter() - began:.0f} s", flush=True)
            args.out.write_text(json.dumps(record) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Sources whose sequences a task makes on the fly: what a recipe says, as a stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longrecall.tasks.babilong import babilong_sequence
from longrecall.tasks.copying import copying_sequence
from longrecall.tasks.encoding import PieceEncoder
from longrecall.tasks.passkey import passkey_sequence
from longrecall.tasks.phonebook import phonebook_sequence
from longrecall.tasks.text import read_text
from longrecall.training import recipe_sources as recipes
from longrecall.training.sources import Shard, TaskSource

Ints = NDArray[np.int64]
Make = Callable[[np.random.Generator, int], tuple[Ints, Ints]]


def open_task_source(source: recipes.TaskRecipe, tokenizer: Any, length: int, shard: Shard) -> TaskSource:
    """Return the stream of a generated source; raise `UserError` when its sequences do not fit into `length` tokens."""
    return TaskSource(source.kind, _maker(source, PieceEncoder(tokenizer)), length, shard)


def _maker(source: recipes.TaskRecipe, pieces: PieceEncoder) -> Make:
    if isinstance(source, recipes.PhonebookSource):
        book = source
        return lambda generator, length: phonebook_sequence(
            generator, pieces, length, book.pairs, book.letters, book.digits
        )
    if isinstance(source, recipes.PasskeySource):
        key = source
        return lambda generator, length: passkey_sequence(
            generator, pieces, length, key.digits, key.form, key.label_needle
        )
    if isinstance(source, recipes.CopyingSource):
        lengths = source.lengths
        return lambda generator, length: copying_sequence(generator, pieces, length, lengths)
    story = source
    text = None if story.path is None else read_text(story.path)
    return lambda generator, length: babilong_sequence(
        generator, pieces, length, story.tasks, text, questions=story.questions
    )

"""Loading harness tasks: their data, the requests of their first documents, always the same for the same seed."""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from longrecall.errors import UserError, first_line
from longrecall.evaluation.harness.task import HarnessTask, definition_file
from longrecall.models.checkpoint_tokenizer import without_checkpoint_code

_LOGGER = logging.getLogger("lm_eval")
_PYTHON_SEED, _OTHER_SEED = 0, 1234
"""The harness's own defaults: of Python's generator, and of numpy's, torch's and the demonstrations'."""


@contextlib.contextmanager
def quiet_and_seeded(seed: int) -> Iterator[None]:
    """Seed the global generators that harness tasks draw from, and keep its log to warnings; put all back after.

    With seed 0 the seeds are the harness's own defaults. No code of a checkpoint runs inside: tasks that ask for the
    tokenizer of the model under test would let it (RULER's do).
    """
    before = random.getstate(), np.random.get_state(), torch.get_rng_state(), _LOGGER.level
    random.seed(_PYTHON_SEED + seed)
    np.random.seed((_OTHER_SEED + seed) % 2**32)
    torch.manual_seed(_OTHER_SEED + seed)
    _LOGGER.setLevel(logging.ERROR)
    try:
        with without_checkpoint_code():
            yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
        _LOGGER.setLevel(before[3])


def load_tasks(
    task: HarnessTask, lengths: Sequence[int], documents: int, seed: int, tokenizer: Any
) -> Mapping[str, Mapping[str, Any]]:
    """Return ``{"tasks": name -> task, "groups": ..., ...}`` of the harness, with the requests of the first documents.

    `lengths` and the tokenizer's place go to tasks that make their own texts (RULER's). Raises `UserError` that names
    the data set when it cannot be had, or the package when one is missing.
    """
    place = str(getattr(tokenizer, "name_or_path", ""))
    metadata = {"max_seq_lengths": list(lengths), "lengths": list(lengths), "seed": seed, "samples": documents}
    metadata |= {"pretrained": place, "tokenizer": place} if place else {}
    try:
        loaded: Mapping[str, Mapping[str, Any]] = _manager(task, metadata).load([task.harness_name])
        for leaf in loaded["tasks"].values():
            if task.shots is not None and leaf.get_config("num_fewshot") != 0:
                leaf.set_config(key="num_fewshot", value=task.shots)
            elif leaf.get_config("num_fewshot") is None:
                leaf.set_config(key="num_fewshot", value=0)
            leaf.set_fewshot_seed(seed=_OTHER_SEED + seed)
            leaf.build_all_requests(limit=documents, rank=0, world_size=1)
    except UserError:
        raise
    except ImportError as error:
        raise UserError(f"{task.name}: it needs a package that is not installed ({first_line(error)})") from error
    except Exception as error:  # data sets and other people's task code raise anything
        raise UserError(f"{task.name}: {_cannot_load(task)}: {first_line(error)}") from error
    if not loaded["tasks"]:
        raise UserError(f"{task.name} names no task that lm-evaluation-harness can load")
    return loaded


def _manager(task: HarnessTask, metadata: dict[str, Any]) -> Any:
    """Return a manager that knows the task; the harness's own index takes seconds, so only what it needs is read."""
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._yaml_loader import load_yaml

    path = definition_file(task.harness_name, task.data)
    own = Path(task.data) if task.data else None
    if path is not None and load_yaml(path, resolve_func=False).get("task") == task.harness_name:
        folders = [path.parent, *([] if own is None else [own])]
        return TaskManager(include_path=folders, include_defaults=False, metadata=metadata)
    return TaskManager(include_path=[] if own is None else [own], metadata=metadata)


def _cannot_load(task: HarnessTask) -> str:
    path = definition_file(task.harness_name, task.data)
    data_set = None if path is None else _data_set(path)
    if not data_set:
        return "its data cannot be loaded"
    return (
        f'its data set "{data_set}" cannot be loaded (it comes from the Hugging Face hub, over a network or from the '
        "local cache)"
    )


def _data_set(path: Path) -> str | None:
    from lm_eval.tasks._yaml_loader import load_yaml

    try:
        config = load_yaml(path, resolve_func=True)
    except Exception:  # what is wrong with the definition is being reported already
        return None
    name = config.get("dataset_path") or getattr(config.get("class"), "DATASET_PATH", None)
    return None if name is None else str(name)

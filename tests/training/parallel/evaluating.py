"""Runs recipes as `worker`, and tells by how much memory each process grows while it writes the best checkpoint."""

from __future__ import annotations

import json
from typing import Any

from longrecall.training import evaluation_steps
from longrecall.training.checkpoints import consolidating
from tests.training.checkpoints.test_consolidating import most_memory
from tests.training.parallel import worker


def main(*names: str) -> None:
    original, fewest = evaluation_steps._write_best, consolidating.FEWEST_BYTES

    def measured(run: Any, folder: Any) -> None:
        grown: list[int] = []
        with most_memory(grown):
            original(run, folder)
        (folder.parent / f"grown-{run.processes.rank}.json").write_text(json.dumps(grown))

    evaluation_steps._write_best, consolidating.FEWEST_BYTES = measured, 0
    try:
        worker.main(*names)
    finally:
        evaluation_steps._write_best, consolidating.FEWEST_BYTES = original, fewest

"""Child processes of the demo: one core each, watched from here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from longrecall.errors import UserError
from longrecall.progress import drawing_interval

POLL_SECONDS = 0.3
LAST_LINES = 3


class Process:
    """A child with one thread whose output goes to ``folder/label.log``; the log's end is shown when it fails."""

    def __init__(self, label: str, command: Sequence[str], folder: Path) -> None:
        self.label = label
        self._log = folder / f"{label}.log"
        folder.mkdir(parents=True, exist_ok=True)
        with self._log.open("wb") as log:
            self._child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"}
            )

    @property
    def alive(self) -> bool:
        """Whether the child has not ended yet."""
        return self._child.poll() is None

    def running(self) -> bool:
        """Whether it still runs; UserError with the last words of its log when it failed."""
        code = self._child.poll()
        if code:
            words = self._log.read_text(errors="replace").replace("\r", "\n").strip().splitlines()
            raise UserError(f"the step {self.label} ended with code {code}: {' | '.join(words[-LAST_LINES:])}")
        return code is None

    def stop(self) -> None:
        """End it if it still runs."""
        if self.alive:
            self._child.terminate()
            self._child.wait()

    def advance(self) -> None:
        """Nothing to show."""

    def close(self) -> None:
        """Nothing to close."""


class TrainingProcess(Process):
    """`longrecall train` in a child, with a progress bar here that follows its log file."""

    def __init__(self, label: str, recipe: Path, settings: Sequence[str], output: Path, steps: int) -> None:
        self.output = output
        arguments = [part for setting in [*settings, f"run.output={output}"] for part in ("--set", setting)]
        command = [sys.executable, "-m", "longrecall.cli.main", "train", str(recipe), *arguments]
        super().__init__(label, command, output.parent)
        # One bar below the other; the first stands where the cursor is.
        self._bar = tqdm(
            total=steps,
            desc=f"    {label}",
            unit="step",
            position=0 if label == "enlarged" else 1,
            mininterval=drawing_interval(),
        )

    def advance(self) -> None:
        """Move the bar to the last logged step."""
        log = self.output / "log.jsonl"
        if not log.exists():
            return
        lines = log.read_bytes().splitlines()
        if lines:
            try:
                entry = json.loads(lines[-1])
            except ValueError:
                return  # half a line: the child is writing it
            self._bar.set_postfix(loss=f"{entry['loss']:.3f}", refresh=False)
            self._bar.update(entry["step"] - self._bar.n)

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()


def wait_for(processes: Sequence[Process]) -> None:
    """Watch children until all have ended; if one fails, or this process is interrupted, none is left running."""
    try:
        while any([process.running() for process in processes]):
            for process in processes:
                process.advance()
            time.sleep(POLL_SECONDS)
        for process in processes:
            process.advance()
    finally:
        for process in processes:
            process.stop()
            process.close()

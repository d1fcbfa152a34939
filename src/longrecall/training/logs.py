"""What a run leaves to read: log.jsonl line by line, the progress bar, training.json at the end."""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from longrecall.errors import UserError
from longrecall.files import write_json, write_text
from longrecall.progress import drawing_interval
from longrecall.version import __version__

LOG_FILE = "log.jsonl"
RESULT_FILE = "training.json"
_ELSEWHERE = "choose another run.output"


class RunLog:
    """The lines of log.jsonl, on disk and in memory; resuming at a step forgets what came after it.

    Only one process of a run `writes`.
    """

    def __init__(self, path: Path, resume_step: int, writes: bool) -> None:
        self._path = path
        self.rows: list[dict[str, Any]] = []
        if resume_step and path.is_file():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    row = json.loads(line)
                except json.JSONDecodeError:
                    break  # a kill in the middle of a write leaves half a line at the end
                if row["step"] <= resume_step:
                    self.rows.append(row)
        if writes:
            write_text(path, "".join(json.dumps(row) + "\n" for row in self.rows), _ELSEWHERE)

    def add(self, row: dict[str, Any]) -> None:
        """Append one line."""
        self.rows.append(row)
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            reason = error.strerror or error
            raise UserError(f"cannot write {self._path}: {reason}; free some space and --resume") from None


class Bar:
    """A progress bar on stderr with the time left and the last loss."""

    def __init__(self, steps: int, done: int, tokens_per_step: int, enabled: bool) -> None:
        self._bar = tqdm(
            total=steps,
            initial=done,
            desc="train",
            unit="step",
            disable=not enabled,
            file=sys.stderr,
            mininterval=drawing_interval(),
        )
        self._tokens = tokens_per_step

    def step(self) -> None:
        """Advance by one step."""
        self._bar.update(1)

    def show(self, loss: float, tokens_per_second: float) -> None:
        """Show the last log line."""
        self._bar.set_postfix_str(f"loss {loss:.3f}, {tokens_per_second / 1000:.1f}k tokens/s", refresh=False)

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()


class Stopwatch:
    """Tokens per second since the last reading."""

    def __init__(self) -> None:
        self.begun = self._last = time.perf_counter()
        self._tokens = 0

    def count(self, tokens: int) -> None:
        """Add tokens."""
        self._tokens += tokens

    def rate(self) -> float:
        """Return tokens per second since the last call, and start anew."""
        now = time.perf_counter()
        rate = self._tokens / max(1e-9, now - self._last)
        self._last, self._tokens = now, 0
        return rate

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time inside the block out of the rate."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._last += time.perf_counter() - begun

    def seconds(self) -> float:
        """Return the seconds since the start."""
        return time.perf_counter() - self.begun


def environment() -> dict[str, str]:
    """Return what the numbers of a run depend on besides its recipe."""
    import transformers

    hardware = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": str(transformers.__version__),
        "hardware": f"{hardware}, {torch.get_num_threads()} CPU threads",
    }


def write_result(path: Path, body: Mapping[str, Any]) -> None:
    """Write the result file of a training run (docs/reference/files.md, "Result files")."""
    head = {
        "schema": 1,
        "kind": "training",
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "longrecall": __version__,
        "environment": environment(),
    }
    write_json(path, {**head, **body}, _ELSEWHERE)

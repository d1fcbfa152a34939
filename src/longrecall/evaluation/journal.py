"""What a run of eval or diagnose has finished so far, on disk after every batch, so that a kill loses nothing else.

A journal lies beside the result file, as ``<out>.partial`` (``<out>.partial.<rank>`` of further processes): a first
line that says what the run is, then a line for each example. It is deleted when the result is written.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longrecall.errors import UserError
from longrecall.evaluation.parallel import Ranks
from longrecall.evaluation.results import SCHEMA, read_result
from longrecall.files import ELSEWHERE, check_writable, write_json
from longrecall.json_lines import JsonLines, read_json_lines
from longrecall.outputs import unfinished_work

Timed = tuple[dict[str, Any], float]
"""The record of an example and the seconds it took."""

Done = dict[str, dict[int, Timed]]


@dataclass(frozen=True)
class Kind:
    """Whose journal it is: the verb, what the first line calls itself, and what reads the finished result."""

    verb: str
    partial: str
    read: Callable[[Path], dict[str, Any]]


EVALUATION = Kind("eval", "partial evaluation", read_result)


class Journal:
    """The finished examples of one run, by key of the job and index.

    `settings` and `fingerprint` decide the numbers; a journal, or a result, of others is refused. `done`: what earlier
    runs finished; `complete`: the result, where nothing is left to do. Nothing is written before `start`.

    Raises:
        UserError: an unwritable `out`, a journal that is damaged or of another run, resuming without `out`.
    """

    def __init__(
        self,
        out: str | Path | None,
        settings: Mapping[str, Any],
        fingerprint: str | None,
        resume: bool,
        ranks: Ranks,
        kind: Kind = EVALUATION,
    ) -> None:
        self.done: Done = {}
        self.complete: dict[str, Any] | None = None
        self._out = None if out is None else Path(out)
        head = {"schema": SCHEMA, "kind": kind.partial, "fingerprint": fingerprint, "settings": settings}
        # As it comes back from the file: no tuples.
        self._head: dict[str, Any] = json.loads(json.dumps(head))
        self._ranks, self._resume, self._kind = ranks, resume, kind
        if self._out is None:
            if resume:
                raise UserError("resume needs an output file (--out): that is where finished examples are kept")
            return
        check_writable(self._out)
        self._path = self._out.with_name(f"{self._out.name}.partial" + (f".{ranks.rank}" if ranks.rank else ""))
        self._lines = JsonLines(self._path, ELSEWHERE)
        if resume:
            self._look_back(self._out)

    def _look_back(self, out: Path) -> None:
        journals = unfinished_work(out)
        for path in journals:
            head, done, _ = _read(path, self._kind)
            if head is not None:
                self._refuse_other(path, head.get("settings"), head.get("fingerprint"))
            for key, examples in done.items():
                self.done.setdefault(key, {}).update(examples)
        for done in self._ranks.gather(self.done):
            for key, examples in done.items():
                self.done[key] = examples | self.done.get(key, {})
        if not any(self._ranks.gather(bool(journals))) and out.exists():
            result = self._kind.read(out)
            self._refuse_other(out, result["settings"], result["checkpoint"].get("fingerprint"))
            self.complete = result

    def _refuse_other(self, path: Path, settings: Any, fingerprint: Any) -> None:
        old = {"fingerprint": fingerprint, **(settings if isinstance(settings, dict) else {})}
        new = {"fingerprint": self._head["fingerprint"], **self._head["settings"]}
        different = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
        if different:
            raise UserError(
                f"cannot resume {path}: it was made with other settings ({', '.join(different)}); "
                "repeat the same call, or start over with --force"
            )

    def start(self) -> None:
        """Begin to write; what is not to be resumed is deleted."""
        if self._out is None:
            return
        self._ranks.wait()  # all have read what there is
        if self._ranks.first and not self._resume:
            unfinished_work(self._out, remove=True)
        self._ranks.wait()
        whole = _read(self._path, self._kind)[2] if self._path.exists() else 0
        self._lines.open(whole)
        if not whole:
            self._lines.write([self._head])

    def add(self, key: str, records: Mapping[int, dict[str, Any]], seconds: float) -> Done:
        """Keep the records of a batch that took `seconds`; they are on the disk when this returns."""
        each = round(seconds / max(1, len(records)), 6)
        if self._out is not None:
            self._lines.write(
                {"job": key, "index": index, "seconds": each, "record": record} for index, record in records.items()
            )
        return {key: {index: (record, each) for index, record in records.items()}}

    def keep(self, key: str, batches: Iterable[Mapping[int, dict[str, Any]]]) -> Done:
        """Go through `batches`, which do the work as they are asked for; keep and time the records of each."""
        done: Done = {key: {}}
        started = time.perf_counter()
        for records in batches:
            ended = time.perf_counter()
            done[key] |= self.add(key, records, ended - started)[key]
            started = ended
        return done

    def gather(self, done: Done) -> Done:
        """Return what all processes have done; all must call it, with the same keys."""
        whole = {key: dict(examples) for key, examples in done.items()}
        for part in self._ranks.gather(done):
            for key, examples in part.items():
                whole[key] = examples | whole[key]
        return whole

    def close(self) -> None:
        """Stop writing; the journal stays."""
        if self._out is not None:
            self._lines.close()

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write the result and delete the journal; all processes call it, the first one writes."""
        self.close()
        if self._out is None:
            return
        if self._ranks.first:
            write_json(self._out, result)
            unfinished_work(self._out, remove=True)
        self._ranks.wait()
        # Of a process on another machine, whose disk the first one does not see.
        self._path.unlink(missing_ok=True)


def _read(path: Path, kind: Kind) -> tuple[dict[str, Any] | None, Done, int]:
    """Return (the first line, what is done, bytes of whole lines)."""
    heads: list[dict[str, Any]] = []
    done: Done = {}

    def take(number: int, data: Any) -> None:
        if number > 1:
            done.setdefault(data["job"], {})[int(data["index"])] = (dict(data["record"]), float(data["seconds"]))
            return
        if data["kind"] != kind.partial:
            raise ValueError(f"it is not a journal of {kind.verb}")
        heads.append(data)

    whole = read_json_lines(path, take)
    return heads[0] if heads else None, done, whole

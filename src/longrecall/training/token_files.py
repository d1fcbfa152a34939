"""`longrecall tokenize`: documents of files -> token files, by several processes, whole or not at all.

The work lies in a hidden folder beside its place, shard by shard; after a kill the same command goes on with the shards
that are there. Which documents a shard holds does not depend on the number of processes.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from longrecall.errors import UserError
from longrecall.files import cannot_write, check_replaceable, expand_home, write_json
from longrecall.outputs import claim_new_folder, is_checkpoint, refuse_busy
from longrecall.training.corpora.base import Corpus
from longrecall.training.corpora.tokens import INDEX_FILE, STARTS, STARTS_TYPE, TOKENS, TYPES, token_type
from longrecall.training.encoding import DocumentEncoder, tokenizer_fingerprint
from longrecall.training.prefetch import single_threads, usable_cores
from longrecall.version import __version__

SHARD_BYTES = 64 << 20
"""Bytes of text that make a shard, about; the unit of work, and of what a kill loses."""
_ELSEWHERE = "choose another --out"
_PLAN_FILE, _DONE = "plan.json", ".json"
_GROUP_CHARACTERS = 1 << 20
_GROUP_DOCUMENTS = 1024
"""At most so many documents are tokenised at once."""


@dataclass(frozen=True)
class TokenSummary:
    """What was written."""

    output: str
    shards: int
    documents: int
    tokens: int
    dtype: str
    reused: int
    """Shards that an interrupted run had finished."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


@dataclass(frozen=True)
class _Work:
    """What every shard is made with."""

    corpus: Corpus
    encode: DocumentEncoder
    folder: Path
    dtype: str


def shard_spans(corpus: Corpus, size: int) -> list[tuple[int, int]]:
    """Return the chunks [first, last) of every shard, for documents of `size` bytes in all."""
    count = len(corpus) if corpus.streamed else min(len(corpus), max(1, -(-size // SHARD_BYTES)))
    ends = [len(corpus) * number // count for number in range(count + 1)]
    return list(itertools.pairwise(ends))


def write_token_files(
    corpus: Corpus,
    size: int,
    tokenizer: Any,
    out: str | Path,
    *,
    source: Mapping[str, Any],
    workers: int | None = None,
    force: bool = False,
    show: Callable[[int, int], None] | None = None,
) -> TokenSummary:
    """Write the documents of a corpus, in its order, as token files into the folder `out`.

    Args:
        corpus: where the documents come from; its chunks are as large as a process may hold.
        size: its bytes.
        tokenizer: with an end token, which ends every document.
        out: the folder; it appears when it is whole.
        source: what the corpus was made of, as JSON data: an interrupted run goes on only with the same.
        workers: processes; None = one for each core, 0 = this one alone.
        force: replace what `out` holds.
        show: called with the numbers of finished and of all shards.

    Raises:
        UserError: the documents cannot be read; `out` is in the way, cannot be written, or another process writes it.
    """
    encode, dtype = DocumentEncoder(tokenizer), token_type(len(tokenizer))
    spans = shard_spans(corpus, size)
    made_with = {"fingerprint": tokenizer_fingerprint(tokenizer), "size": len(tokenizer), "end": tokenizer.eos_token_id}
    plan = {"dtype": dtype, "tokenizer": made_with, "source": dict(source), "shards": spans, "amount": corpus.amount()}
    with _claimed(expand_home(out), force) as (place, folder):
        reused = _begin(folder, plan)
        work = _Work(corpus, encode, folder, dtype)
        for done in _write_shards(work, spans, usable_cores() if workers is None else workers):
            if show is not None:
                show(done, len(spans))
        shards = [
            json.loads((folder / (name + _DONE)).read_text(encoding="utf-8")) for name in map(_name, range(len(spans)))
        ]
        shards = [shard for shard in shards if shard["documents"]]
        if not shards:
            raise UserError("the files have no documents, so there is nothing to write")
        index = {
            "schema": 1,
            "kind": "tokens",
            "longrecall": __version__,
            **{name: plan[name] for name in ("dtype", "tokenizer", "source")},
            "documents": sum(shard["documents"] for shard in shards),
            "tokens": sum(shard["tokens"] for shard in shards),
            "shards": shards,
        }
        write_json(folder / INDEX_FILE, index)
        _tidy(folder, {shard["name"] for shard in shards})
        _put(folder, place)
    return TokenSummary(str(out), len(shards), index["documents"], index["tokens"], dtype, reused)


@contextmanager
def _claimed(out: Path, force: bool) -> Iterator[tuple[Path, Path]]:
    """Be the only writer of `out`; give its place, and the hidden folder of the work."""
    try:
        with claim_new_folder(out, _ELSEWHERE) as place:
            if place.is_dir():
                refuse_busy(place, _ELSEWHERE)
                if any(place.iterdir()):
                    if not force:
                        raise UserError(f"{out} is not empty; {_ELSEWHERE} or use --force to replace it")
                    check_replaceable(place)
                    if is_checkpoint(place):
                        raise UserError(f"{out} is a checkpoint, and token files never replace one; {_ELSEWHERE}")
            elif place.exists():
                raise UserError(f"{out} is a file; token files are written as a folder")
            _restore_replaced(place)
            yield place, place.with_name(f".{place.name}.unfinished")
    except OSError as error:
        raise cannot_write(out, error, _ELSEWHERE) from error


def _replaced(place: Path) -> Path:
    return place.with_name(f".{place.name}.replaced")


def _restore_replaced(place: Path) -> None:
    """Clear what a kill in `_put` has left: the old folder has its hidden name, the new one may be missing."""
    old = _replaced(place)
    if old.exists():
        if place.exists():
            shutil.rmtree(old)
        else:
            old.rename(place)


def _put(folder: Path, place: Path) -> None:
    old = _replaced(place)
    if place.exists():
        place.rename(old)
    folder.rename(place)
    shutil.rmtree(old, ignore_errors=True)


def _begin(folder: Path, plan: Mapping[str, Any]) -> int:
    """Make the folder of the work, or keep one of the same plan; return how many shards are there already."""
    text = json.dumps(plan, sort_keys=True)
    try:
        if (folder / _PLAN_FILE).read_text(encoding="utf-8") == text:
            (folder / INDEX_FILE).unlink(missing_ok=True)
            return sum(1 for path in folder.glob(f"*{_DONE}") if path.stem.isdigit())
    except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / _PLAN_FILE).write_text(text, encoding="utf-8")
    return 0


def _tidy(folder: Path, kept: set[str]) -> None:
    """Leave the index and the shards; empty shards go."""
    for path in list(folder.iterdir()):
        if path.name != INDEX_FILE and not (path.stem in kept and path.suffix in (TOKENS, STARTS)):
            path.unlink()


def _name(number: int) -> str:
    return f"{number:05d}"


def _write_shards(work: _Work, spans: list[tuple[int, int]], workers: int) -> Iterator[int]:
    """Write the shards that are missing; give how many are there after each."""
    missing = [number for number in range(len(spans)) if not (work.folder / (_name(number) + _DONE)).exists()]
    done = len(spans) - len(missing)
    workers = min(workers, len(missing))
    if workers <= 1:
        for number in missing:
            _write_shard(work, number, *spans[number])
            done += 1
            yield done
        return
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    with single_threads(), ProcessPoolExecutor(workers, mp_context=context) as pool:
        futures = [pool.submit(_write_shard, work, number, *spans[number]) for number in missing]
        try:
            for future in as_completed(futures):
                future.result()
                done += 1
                yield done
        except BrokenProcessPool:
            raise UserError(
                "a tokenising process was killed, most often because memory ran out. Finished work is kept: give the "
                "same command again, with fewer --workers"
            ) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _write_shard(work: _Work, number: int, first: int, last: int) -> None:
    """Write one shard; the file that says so comes last."""
    kind, name = TYPES[work.dtype], _name(number)
    starts, place = [0], 0
    with (work.folder / (name + TOKENS)).open("wb") as file:
        for group in _groups(work.corpus, first, last):
            for ids in work.encode(group):
                place += len(ids)
                starts.append(place)
                file.write(ids.astype(kind).tobytes())
        file.flush()
        os.fsync(file.fileno())
    with (work.folder / (name + STARTS)).open("wb") as file:
        file.write(np.array(starts, dtype=STARTS_TYPE).tobytes())
        file.flush()
        os.fsync(file.fileno())
    told = {"name": name, "documents": len(starts) - 1, "tokens": place, "from": work.corpus.describe(first)}
    write_json(work.folder / (name + _DONE), told)


def _groups(corpus: Corpus, first: int, last: int) -> Iterator[list[str]]:
    group: list[str] = []
    characters = 0
    for chunk in range(first, last):
        for _, document in corpus.read(chunk):
            group.append(str(document))
            characters += len(group[-1])
            if characters >= _GROUP_CHARACTERS or len(group) >= _GROUP_DOCUMENTS:
                yield group
                group, characters = [], 0
    if group:
        yield group

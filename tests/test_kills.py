"""Every verb that writes, killed between two of its operations on files, in the middle of a write, and at any time.

After a kill, what stands under a result's name is whole, and what was finished is still there. The same command again,
with ``--resume`` where the verb has it, ends as if there had been no kill: bit for bit, but for the clock.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from longrecall.cli.main import VERBS
from tests.kills import End, Kill, Server

TEXT = "It was the best of times, it was the worst of times. " * 60
DESCRIPTION = {
    "vocab_size": 258,
    "hidden_size": 16,
    "tie_word_embeddings": False,
    "context_length": 32,
    "layers": 2 * [{"mixer": {"type": "gla", "num_heads": 2, "key_dim": 4, "value_dim": 8}, "mlp_size": 16}],
}
TRAINING = {
    "model": {"checkpoint": "base"},
    "data": {
        "context_length": 48,
        "sources": [{"kind": "text", "path": "text.txt"}, {"kind": "phonebook", "pairs": [2, 4], "weight": 0.5}],
    },
    "optimizer": {"learning_rate": 0.01, "warmup": 2},
    "initial_state": {"kind": "state_passing", "probability": 0.7},
    "run": {"output": "run", "steps": 3, "batch_size": 2, "gradient_accumulation": 2, "log_every": 1}
    | {"save_every": 1, "keep": 9, "report_to": "none"},
}
SWEEP = {
    "tasks": [{"name": "mqar", "settings": {"vocab_size": 16, "length": 8, "pairs": 2}}],
    "models": {"mixers": ["gla"], "hidden_sizes": [8], "layers": 1},
    "training": {"epochs": 1, "learning_rates": [0.003, 0.01, 0.02], "batch_size": 8},
    "data": {"train": 16, "test": 8},
    "run": {"output": "sweep.json", "device": "cpu"},
}
CLOCK = {"created", "seconds", "cpu_seconds", "timing", "tokens_per_second", "data_wait", "resumed_from"}
"""Keys of JSON files that two equal runs do not share: times, and whether a run was resumed."""
GROWING = {"log.jsonl"}
"""Files that grow line by line while work goes on and stay; what is there must be how the whole one begins."""


@dataclass(frozen=True)
class Case:
    """A command, what it leaves, and whether it can go on."""

    words: str
    out: str
    resumes: bool = False
    patch: str = ""
    kills: int = 2
    """Operations before which it is killed at most, drawn at random where there are more; `-m slow` takes all."""

    @property
    def verb(self) -> str:
        return self.words.split()[0]


EVAL = "eval base --device cpu --tasks passkey,bits_per_byte --text text.txt --lengths 128 --depths 0.5"
CASES = {
    "init": Case("init model.json base --tokenizer bytes", "base"),
    "expand": Case("expand base bigger --method merge_heads --layers all --init perturb", "bigger"),
    "export": Case("export base stock --to auto_map", "stock"),
    "tokenize": Case("tokenize text.txt --tokenizer base --out tokens", "tokens"),
    "train": Case("train train.yaml", "run", resumes=True, kills=4),
    "consolidate": Case("consolidate run --to one", "one"),
    "sweep": Case("sweep sweep.yaml", "sweep.json", resumes=True),
    "eval": Case(f"{EVAL} --samples 4 --batch-tokens 300 --out a.json", "a.json", resumes=True),
    "search": Case(
        "eval base --device cpu --tasks passkey --search 256 --step 128 --samples 2 --depths 0.5 --out search.json",
        "search.json",
        resumes=True,
    ),
    "diagnose": Case(
        "diagnose base --device cpu --text text.txt --multiple 4 --sequences 2 --recall-samples 5 --out d.json",
        "d.json",
        resumes=True,
        kills=3,
    ),
    "compare": Case("compare a.json a.json --out compared.json", "compared.json"),
    "report": Case("report sweep.json -o page.html", "page.html"),
    "generate": Case("generate base --device cpu --prompt hello --save-state kept.safetensors", "kept.safetensors"),
    "demo": Case("demo --out demo --steps 1 --samples 1", "demo", patch="quick_demo", kills=1),
}
WRITE_NOTHING = {"info", "bench", "serve", "doctor"}


def test_every_verb_is_killed() -> None:
    assert {case.verb for case in CASES.values()} | WRITE_NOTHING == set(VERBS)


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"))
    try:
        yield server
    finally:
        server.close()


@pytest.mark.long
# One test of many commands: on a busy machine they take longer together than a test may.
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("most", [None, pytest.param(100, marks=pytest.mark.slow)], ids=["drawn", "everywhere"])
def test_kills_lose_nothing(server: Server, tmp_path: Path, subtests: pytest.Subtests, most: int | None) -> None:
    """One test for all: the server, and what the commands leave when nothing kills them, are made once."""
    whole = tmp_path / "whole"
    whole.mkdir()
    (whole / "text.txt").write_text(TEXT)
    (whole / "model.json").write_text(json.dumps(DESCRIPTION))
    (whole / "train.yaml").write_text(yaml.safe_dump(TRAINING))
    (whole / "sweep.yaml").write_text(yaml.safe_dump(SWEEP))
    random = np.random.Generator(np.random.PCG64(0))
    for name, drawn in CASES.items():
        # The demo trains and measures for longer than all others together.
        case = drawn if most is None else replace(drawn, kills=2 if name == "demo" else most)
        end = server.run(case.words.split(), whole, patch=case.patch)
        assert end.code == 0, end.said
        with subtests.test(name):
            folder = tmp_path / name
            folder.mkdir()
            inputs(whole, folder, case)
            killed_again_and_again(server, case, end, folder, whole / case.out, random)


def killed_again_and_again(
    server: Server, case: Case, end: End, folder: Path, whole: Path, random: np.random.Generator
) -> None:
    expected, fresh = contents(whole), True
    waiting = kills_of(case, end, whole, random)
    while waiting:
        kill = waiting.pop(0)
        before, there = finished(folder, case), (folder / case.out).exists()
        last = run(server, case, folder, kill)
        refused = last.code == 2 and (kill.size is not None or (there and not case.resumes))
        assert last.code in (None, 0) or refused, last.said
        whole_so_far(folder / case.out, whole)
        lost = before - finished(folder, case)
        assert not [what for name, what in lost if not (folder / name).exists() and not (folder / case.out).exists()]
        if last.code is not None and kill.operation is not None:
            # Less was left to do than the kill was meant for: it comes when all is.
            assert not fresh
            waiting.insert(0, kill)
        # Some go on at once, some are killed again and again first.
        fresh = last.code is not None or random.random() < 0.4
        if fresh:
            ends_as_if_never_killed(server, case, folder, expected)
    if not fresh:
        ends_as_if_never_killed(server, case, folder, expected)


def kills_of(case: Case, end: End, whole: Path, random: np.random.Generator) -> list[Kill]:
    """Return when a command is killed, in any order."""
    places = [Kill(operation=place) for place in range(len(end.operations))]
    places += [Kill(operation=n, after=True) for n, what in enumerate(end.operations) if what.startswith("open ")]
    kills = [places[number] for number in random.permutation(len(places))[: case.kills]]
    if case.verb != "demo":
        # In the middle of a write, of small files and of large ones.
        sizes = [path.stat().st_size for path in files_of(whole).values()]
        kills += [Kill(size=int(random.integers(1, size))) for size in sorted({min(sizes), max(sizes)})]
        # What is done within a moment has few other places than its operations on files.
        if case.resumes or case.kills > 2:
            kills.append(Kill(seconds=float(random.uniform(0, end.seconds))))
    return [kills[number] for number in random.permutation(len(kills))]


def run(server: Server, case: Case, folder: Path, kill: Kill | None = None) -> End:
    """Run a command, or go on with it where it has begun."""
    resume = ["--resume"] if case.resumes and any(folder.glob(f"{case.out}*")) else []
    return server.run([*case.words.split(), *resume], folder, kill, case.patch)


def ends_as_if_never_killed(server: Server, case: Case, folder: Path, expected: dict[str, Any]) -> None:
    there = (folder / case.out).exists()
    last = run(server, case, folder)
    # Without --resume, what is there already is whole, and is not replaced without a word.
    assert last.code == 0 or (there and not case.resumes and last.code == 2), last.said
    assert contents(folder / case.out) == expected
    left = [path.name for path in folder.iterdir() if path.name.startswith(f"{case.out}.")]
    assert left == []
    assert list(folder.rglob(".*")) == []  # nor half-written files and folders, nor locks
    for path in folder.glob(f"{case.out}*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def inputs(whole: Path, folder: Path, case: Case) -> None:
    """Give `folder` what the commands read: all that is there already when this one begins."""
    for path in whole.iterdir():
        if path.name == case.out or not (path.name in case.words or path.suffix in (".txt", ".json", ".yaml")):
            continue
        if path.is_dir():
            shutil.copytree(path, folder / path.name)
        elif not path.name.startswith(case.out):
            shutil.copy(path, folder / path.name)
    if "train.yaml" in case.words:
        shutil.copytree(whole / "base", folder / "base")


def contents(place: Path) -> dict[str, Any]:
    """Return what a result holds, file by file, without what the clock decides; hidden files are none of it."""
    return {name: content(path) for name, path in files_of(place).items()}


def files_of(place: Path) -> dict[str, Path]:
    """Return the files of a result by their names inside of it, "" for a file alone; no hidden ones."""
    if place.is_file():
        return {"": place}
    files = {path.relative_to(place): path for path in sorted(place.rglob("*")) if path.is_file()}
    return {str(name): path for name, path in files.items() if not any(part[0] == "." for part in name.parts)}


def content(path: Path) -> Any:
    if path.suffix == ".json":
        return timeless(json.loads(path.read_text()))
    if path.suffix == ".jsonl":
        return [timeless(json.loads(line)) for line in path.read_text().splitlines()]
    return path.read_bytes()


def timeless(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: timeless(value) for key, value in data.items() if key not in CLOCK}
    return [timeless(value) for value in data] if isinstance(data, list) else data


def whole_so_far(place: Path, whole: Path) -> None:
    """What has the name of a finished file is that file; what grows is how the whole one begins."""
    expected = contents(whole) if place.exists() else {}
    for name, path in files_of(place).items():
        # The demo's own folder for what is under way, and its mark, which says that it is.
        if name not in expected or path.name == "demo.json":
            continue
        if path.name in GROWING:
            rows = [timeless(json.loads(line)) for line in path.read_text().split("\n")[:-1]]
            assert rows == expected[name][: len(rows)]
        else:
            assert content(path) == expected[name], name


def finished(folder: Path, case: Case) -> set[tuple[str, str]]:
    """Return what is there for good, as (file or folder, line): saved steps, and lines of the journals of results.

    A line may go when the file that it is named by is there, or all that the command makes.
    """
    if not case.resumes:
        return set()
    found = {(str(path.relative_to(folder)), "") for path in folder.glob(f"{case.out}/steps/step-*")}
    for path in folder.glob(f"{case.out}*.partial*"):
        result = path.name.partition(".partial")[0]
        found |= {(result, line) for line in path.read_text().split("\n")[:-1]}
    return found

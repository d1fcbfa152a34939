"""Several processes share the work: real ones, forked with torchrun's variables; `-m slow` starts them by torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import longrecall
from longrecall import RecurrentLM
from longrecall.cli.main import main
from longrecall.errors import UserError
from longrecall.evaluation import evaluate_checkpoint
from longrecall.evaluation.parallel import Ranks, torchrun_ranks
from tests import warm
from tests.processes import on_processes

SOURCE = str(Path(longrecall.__file__).parents[1])
TEXT = "It was the best of times, it was the worst of times. " * 60


@given(
    indexes=st.lists(st.integers(0, 300), unique=True).map(sorted),
    count=st.integers(1, 9),
    align=st.integers(1, 40),
)
def test_shares_are_the_whole_work_in_equal_parts(indexes: list[int], count: int, align: int) -> None:
    shares = [Ranks(rank, count).share(indexes, align) for rank in range(count)]
    assert [index for share in shares for index in share] == indexes
    blocks = [{index // align for index in share} for share in shares]
    assert sum(map(len, blocks)) == len(set().union(*blocks))
    assert max(map(len, blocks)) - min(map(len, blocks)) <= 1


def without_times(result: dict[str, Any]) -> dict[str, Any]:
    entries = [entry | {"seconds": 0} for entry in result["results"]]
    return result | {"created": "", "results": entries}


def run(checkpoint: Path, out: Path, **settings: Any) -> dict[str, Any]:
    tasks, options = ["phonebook", "babilong", "bits_per_byte"], {"phonebook": {"pairs": (3,)}}
    more = {"options": options | {"babilong": {"tasks": ("qa1",), "answer_tokens": 8}}, "text": TEXT, "out": out}
    return evaluate_checkpoint(
        checkpoint, tasks, [300], 9, batch_tokens=700, device="cpu", progress=False, **(more | settings)
    )


@pytest.fixture
def checkpoint(model: RecurrentLM, tokenizer: Any, tmp_path: Path) -> Path:
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def as_two_processes(words: list[str]) -> None:
    """``torchrun --nproc-per-node 2 longrecall WORDS`` without its imports; to be run."""
    on_processes(2, partial(verb, words))


def verb(words: list[str]) -> None:
    code = main(words)
    assert code == 0, code


@pytest.mark.parametrize("torchrun", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["forked", "torchrun"])
def test_two_processes_give_the_result_of_one(checkpoint: Path, tmp_path: Path, torchrun: bool) -> None:
    text, one, two = tmp_path / "text.txt", tmp_path / "one.json", tmp_path / "two.json"
    text.write_text(TEXT)
    run(checkpoint, one, options={"phonebook": {"pairs": (3,)}, "babilong": {"tasks": ("qa1",), "answer_tokens": 8}})
    tasks = ["--tasks", "phonebook,babilong,bits_per_byte", "--lengths", "300", "--samples", "9", "--pairs", "3"]
    more = ["--qa", "qa1", "--option", "babilong.answer_tokens=8", "--text", str(text), "--out", str(two), "--json"]
    machine = ["--batch-tokens", "700", "--device", "cpu"]
    words = ["eval", str(checkpoint), *tasks, *more, *machine]
    if torchrun:
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        environment = os.environ | {"PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"}
        command = [*start, "-m", "longrecall.cli.main", *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    else:
        done = warm.run(as_two_processes, words)
    assert done.returncode == 0, done.stderr
    result = json.loads(two.read_text())
    assert without_times(result) == without_times(json.loads(one.read_text()))
    # One of them prints, and no journal is left.
    assert json.loads(done.stdout) == result
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "one.json", "text.txt", "two.json"]


def test_all_processes_are_refused_together(tmp_path: Path) -> None:
    """None is left to wait for the first one, which alone looks at the place."""
    (tmp_path / "r.json").touch()

    class Two(Ranks):
        def gather(self, data: Any) -> list[Any]:
            return [data, None] if self.first else [refusal, data]

    refusal = "r.json exists already"
    for rank in (0, 1):
        with pytest.raises(UserError, match=refusal):
            Two(rank, 2).claim(tmp_path / "r.json", force=False, resume=False).__enter__()
    refusal = None
    with Two(0, 2).claim(tmp_path / "new.json", force=False, resume=False):
        assert len(list(tmp_path.iterdir())) == 2
        with Two(1, 2).claim(tmp_path / "new.json", force=False, resume=False):
            pass  # under the first one's claim, without another
    assert len(list(tmp_path.iterdir())) == 1


def test_what_several_processes_left_behind_is_finished_by_one(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    result = run(checkpoint, out)
    out.unlink()
    head = {"schema": 1, "kind": "partial evaluation", "fingerprint": result["checkpoint"]["fingerprint"]}
    # Better answers than the model's own, to tell where they come from.
    record = {"right": 2, "asked": 2, "right_tokens": 4, "tokens": 4, "finite": True}
    job = 'phonebook {"distance":0,"pairs":3}'
    for suffix, index in (("", 1), (".1", 4), (".12", 5)):
        line = {"job": job, "index": index, "seconds": 100.0, "record": record}
        lines = [head | {"settings": result["settings"]}, line]
        text = "".join(json.dumps(part) + "\n" for part in lines)
        (tmp_path / f"r.json.partial{suffix}").write_text(text)
    entry = run(checkpoint, out, resume=True)["results"][0]
    assert result["results"][0]["value"] == 0 and entry["seconds"] >= 300
    assert entry["value"] * entry["count"] == 6
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "r.json"]


def test_half_an_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    words = "WORLD_SIZE is set, but LOCAL_RANK, MASTER_ADDR, MASTER_PORT is not"
    with pytest.raises(UserError, match=words), torchrun_ranks():
        pass


def test_alone_without_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with torchrun_ranks() as ranks:
        assert ranks == Ranks() and ranks.first and ranks.gather(3) == [3]
        assert ranks.device(None) is None and ranks.device("cpu") == "cpu"

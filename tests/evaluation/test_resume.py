"""Runs that are killed and go on: nothing is read twice, and the file is the one of a run that was never killed."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from longrecall import RecurrentLM
from longrecall.errors import UserError
from longrecall.evaluation import engine, evaluate, evaluate_checkpoint, journal, read_result
from longrecall.evaluation.recall import CellJob
from tests import warm
from tests.interrupter import Interrupter

TEXT = "It was the best of times, it was the wörst of times. " * 60
TASKS = ["phonebook", "passkey", "babilong", "bits_per_byte"]
OPTIONS: dict[str, dict[str, Any]] = {
    "phonebook": {"pairs": (2,)},
    "passkey": {"depths": (0.5,)},
    "babilong": {"tasks": ("qa1",), "answer_tokens": 4},
}


def run(model: Any, tokenizer: Any, **changes: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "tasks": TASKS,
        "lengths": [256],
        "samples": 7,
        "text": TEXT,
        "options": OPTIONS,
        "progress": False,
        "batch_tokens": 600,
    }
    return evaluate(model, tokenizer, **(arguments | changes))


@pytest.fixture
def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only things in a result that two equal runs do not share are times."""
    monkeypatch.setattr(engine, "now", lambda: "2026-01-01T00:00:00+00:00")
    monkeypatch.setattr(journal.time, "perf_counter", lambda: 0.0)


def journal_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.usefixtures("stopped_clock")
@pytest.mark.parametrize("after", [0, 1, 3, 7, 12, 19])
def test_an_interrupted_run_goes_on_where_it_was(
    model: RecurrentLM, tokenizer: Any, tmp_path: Path, after: int
) -> None:
    whole, out, partial = tmp_path / "whole.json", tmp_path / "r.json", tmp_path / "r.json.partial"
    with Interrupter(model, 10**9) as counter:
        run(model, tokenizer, out=whole)
        passes = counter.passes
    assert passes > 19
    with Interrupter(model, after), pytest.raises(KeyboardInterrupt):
        run(model, tokenizer, out=out)
    assert not out.exists()
    done = journal_lines(partial)[1:]
    assert len({(line["job"], line["index"]) for line in done}) == len(done)
    assert bool(done) == (after > 0)
    with Interrupter(model, 10**9) as counter:
        resumed = run(model, tokenizer, out=out, resume=True)
        # At most the passes of the batch that was lost are made again.
        assert counter.passes <= passes - after + 8
    assert out.read_bytes() == whole.read_bytes() and read_result(out) == resumed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.json", "whole.json"]
    with Interrupter(model, 0):
        assert run(model, tokenizer, out=out, resume=True) == resumed


@pytest.mark.usefixtures("stopped_clock")
def test_a_run_that_is_interrupted_again_and_again_ends(model: RecurrentLM, tokenizer: Any, tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    attempts = 0
    while not out.exists() and attempts < 20:
        attempts += 1
        with Interrupter(model, 9), contextlib.suppress(KeyboardInterrupt):
            run(model, tokenizer, out=out, resume=True)
    assert 2 < attempts < 20
    run(model, tokenizer, out=tmp_path / "whole.json")
    assert out.read_bytes() == (tmp_path / "whole.json").read_bytes()


@pytest.mark.usefixtures("stopped_clock")
def test_a_line_that_was_cut_off_is_read_again(model: RecurrentLM, tokenizer: Any, tmp_path: Path) -> None:
    out, partial = tmp_path / "r.json", tmp_path / "r.json.partial"
    run(model, tokenizer, out=tmp_path / "whole.json")
    with Interrupter(model, 8), pytest.raises(KeyboardInterrupt):
        run(model, tokenizer, out=out)
    data = partial.read_bytes()
    # Cut in the first line, in the middle of another, before the last line feed.
    for cut in (10, data.index(b"\n") + 30, len(data) - 1):
        partial.write_bytes(data[:cut])
        run(model, tokenizer, out=out, resume=True)
        assert out.read_bytes() == (tmp_path / "whole.json").read_bytes()


def test_a_damaged_journal_is_refused_with_its_line(model: RecurrentLM, tokenizer: Any, tmp_path: Path) -> None:
    out, partial = tmp_path / "r.json", tmp_path / "r.json.partial"
    with Interrupter(model, 8), pytest.raises(KeyboardInterrupt):
        run(model, tokenizer, out=out)
    lines = partial.read_text().splitlines()
    for number, bad in ((1, '{"kind": "poem"}'), (3, "{"), (2, '{"job": "x", "index": 1, "seconds": 0}')):
        partial.write_text("\n".join([*lines[: number - 1], bad, *lines[number:]]) + "\n")
        with pytest.raises(UserError, match=rf"cannot resume .*: line {number} is damaged .*start over with --force"):
            run(model, tokenizer, out=out, resume=True)
    run(model, tokenizer, out=out, force=True)
    assert out.exists() and not partial.exists() and not list(tmp_path.glob(".*"))


def test_a_new_run_forgets_the_old_one_only_when_it_begins(model: RecurrentLM, tokenizer: Any, tmp_path: Path) -> None:
    out, partial = tmp_path / "r.json", tmp_path / "r.json.partial"
    with Interrupter(model, 8), pytest.raises(KeyboardInterrupt):
        run(model, tokenizer, out=out)
    old = partial.read_bytes()
    with pytest.raises(UserError, match=r"partial holds an interrupted run; --resume continues it, --force starts"):
        run(model, tokenizer, out=out)
    with pytest.raises(UserError, match="too short"):
        run(model, tokenizer, out=out, lengths=[60], force=True)
    assert partial.read_bytes() == old
    with Interrupter(model, 0), pytest.raises(KeyboardInterrupt):
        run(model, tokenizer, out=out, force=True)
    assert len(journal_lines(partial)) == 1


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"samples": 8}, "samples"),
        ({"seed": 1}, "seed"),
        ({"lengths": [300]}, "lengths"),
        ({"text": TEXT + "."}, "options"),
    ],
)
@pytest.mark.parametrize("finished", [True, False])
def test_resume_refuses_other_settings(
    model: RecurrentLM, tokenizer: Any, tmp_path: Path, change: dict[str, Any], named: str, finished: bool
) -> None:
    out = tmp_path / "r.json"
    small = {"tasks": ["passkey", "bits_per_byte"], "options": {"passkey": OPTIONS["passkey"]}}
    with Interrupter(model, 10**9 if finished else 4) as counter:
        try:
            run(model, tokenizer, out=out, **small)
        except KeyboardInterrupt:
            assert counter.passes == 4 and not finished
    with pytest.raises(UserError, match=rf"cannot resume .*other settings \({named}\)"):
        run(model, tokenizer, out=out, resume=True, **(small | change))


@pytest.mark.usefixtures("stopped_clock")
def test_a_finished_result_is_replaced_with_force_only(model: RecurrentLM, tokenizer: Any, tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    small = {"tasks": ["passkey"], "options": {"passkey": OPTIONS["passkey"]}, "out": out}
    run(model, tokenizer, **small)
    before = out.read_bytes()
    for change in ({}, {"seed": 1}):
        with Interrupter(model, 0), pytest.raises(UserError, match=r"r.json exists already; --resume keeps it"):
            run(model, tokenizer, **small, **change)
        assert out.read_bytes() == before
    with Interrupter(model, 1), pytest.raises(KeyboardInterrupt):
        run(model, tokenizer, **small, seed=1, force=True)
    assert out.read_bytes() == before  # until the new one is there
    run(model, tokenizer, **small, seed=1, resume=True)
    assert json.loads(out.read_text())["settings"]["seed"] == 1
    with pytest.raises(UserError, match="give one of them"):
        run(model, tokenizer, **small, resume=True, force=True)


def test_resume_refuses_another_model(model: RecurrentLM, tokenizer: Any, tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    with Interrupter(model, 3), pytest.raises(KeyboardInterrupt):
        run(model, tokenizer, out=out)
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    with pytest.raises(UserError, match="fingerprint"):
        run(model, tokenizer, out=out, resume=True)


@pytest.fixture
def checkpoint(model: RecurrentLM, tokenizer: Any, tmp_path: Path) -> Path:
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_killed_process_goes_on(checkpoint: Path, tmp_path: Path) -> None:
    """SIGKILL gives no chance to tidy up: what counts is what was on the disk."""
    out, partial = tmp_path / "r.json", tmp_path / "r.json.partial"
    words = [str(checkpoint), "--tasks", "copying", "--lengths", "900", "--samples", "40", "--out", str(out)]
    with warm.start(warm.longrecall, ["eval", *words, "--batch-tokens", "2k", "--device", "cpu"]) as process:
        while process.poll() is None and not (partial.exists() and partial.read_bytes().count(b"\n") > 3):
            time.sleep(0.002)
        process.send_signal(signal.SIGSTOP)  # it is at work however long this takes
        for flags in ({}, {"resume": True}, {"force": True}):
            with pytest.raises(
                UserError, match=rf"r.json is being written by process {process.pid} .*longrecall eval "
            ):
                evaluate_checkpoint(checkpoint, ["copying"], [900], 40, seed=1, out=out, **flags)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert process.returncode == -signal.SIGKILL and not out.exists()
    before = partial.read_bytes().count(b"\n") - 1
    assert 3 <= before < 40
    samples: list[int] = []
    original = CellJob.run

    def counting(self: CellJob, indexes: list[int], advance: Any) -> Iterator[Any]:
        samples.extend(indexes)
        return original(self, indexes, advance)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CellJob, "run", counting)
        result = evaluate_checkpoint(
            checkpoint,
            ["copying"],
            [900],
            40,
            options={"copying": {"trained": None}},
            out=out,
            resume=True,
            device="cpu",
            progress=False,
        )
    assert len(samples) == 40 - before
    assert [entry["count"] for entry in result["results"]] == [40, 40 * 900]
    assert out.exists() and not partial.exists() and not list(tmp_path.glob(".*"))

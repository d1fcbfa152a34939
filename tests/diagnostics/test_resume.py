"""Diagnoses that are killed and go on: nothing is read twice, and the file is that of a run that was never killed."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from longrecall import RecurrentLM
from longrecall.diagnostics import diagnose, diagnosis, streaming, work
from longrecall.errors import UserError
from longrecall.evaluation import journal
from longrecall.evaluation.parallel import Ranks
from tests.conftest import MIXERS
from tests.diagnostics.conftest import tiny_model
from tests.interrupter import Interrupter

TEXT = "It was the best of times, it was the wörst of times. " * 40


@pytest.fixture(autouse=True)
def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only things in a result that two equal runs do not share are times."""
    monkeypatch.setattr(diagnosis, "now", lambda: "2026-01-01T00:00:00+00:00")
    for module in (journal, work):
        monkeypatch.setattr(module.time, "perf_counter", lambda: 0.0)
    monkeypatch.setattr(work.time, "process_time", lambda: 0.0)


@pytest.fixture(autouse=True)
def windows_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a model so large that a window takes long; keys two by two."""
    monkeypatch.setattr(streaming, "_WORK_BUDGET", 1)
    monkeypatch.setattr(streaming, "rows_at_once", lambda model, copies=1: 2)


@pytest.fixture(scope="module")
def model() -> RecurrentLM:
    return tiny_model(MIXERS["gla"], MIXERS["mamba2"])


def run(model: Any, tokenizer: Any, **changes: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = {"training_length": 40, "multiple": 4, "sequences": 3, "segment_tokens": 32}
    arguments |= {"recall_samples": 10, "recall_doublings": 1, "progress": False}
    return diagnose(model, tokenizer, **(arguments | {"text": TEXT} | changes))


def unlucky(patch: pytest.MonkeyPatch) -> None:
    """Keys of which every other one is recalled, so that more are asked; they are read all the same."""
    original = diagnosis.recalled_keys
    patch.setattr(diagnosis, "recalled_keys", lambda *a: [i % 2 == 0 for i, _ in enumerate(original(*a))])


def test_an_interrupted_diagnosis_goes_on_where_it_was(
    model: RecurrentLM, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlucky(monkeypatch)
    whole, out, partial = tmp_path / "whole.json", tmp_path / "r.json", tmp_path / "r.json.partial"
    with Interrupter(model, 10**9) as counter:
        result = run(model, tokenizer, out=whole)
        passes = counter.passes
    assert [point["count"] for point in result["recall"]["points"]] == [20] and passes > 60
    lines, rest = 0, passes
    for after in (0, 9, passes - 5):
        with Interrupter(model, after), pytest.raises(KeyboardInterrupt):
            run(model, tokenizer, out=out)
        assert not out.exists()
        done = [json.loads(line) for line in partial.read_text().splitlines()][1:]
        assert len({(line["job"], line["index"]) for line in done}) == len(done) >= lines
        lines = len(done)
        with Interrupter(model, 10**9) as counter:
            resumed = run(model, tokenizer, out=out, resume=True)
            # At most the group that was lost is read again.
            assert passes - after <= counter.passes <= passes - after + 60 and counter.passes <= rest
            rest = counter.passes
        assert out.read_bytes() == whole.read_bytes() and json.loads(out.read_text()) == resumed == result
        assert sorted(path.name for path in tmp_path.iterdir()) == ["r.json", "whole.json"]
        with Interrupter(model, 0):
            assert run(model, tokenizer, out=out, resume=True) == resumed
        out.unlink()
    assert lines > 12


def test_a_diagnosis_that_is_interrupted_again_and_again_ends(
    model: RecurrentLM, tokenizer: Any, tmp_path: Path
) -> None:
    out = tmp_path / "r.json"
    attempts = 0
    while not out.exists() and attempts < 30:
        attempts += 1
        with Interrupter(model, 25), contextlib.suppress(KeyboardInterrupt):
            run(model, tokenizer, out=out, resume=True)
    assert 2 < attempts < 30
    run(model, tokenizer, out=tmp_path / "whole.json")
    assert out.read_bytes() == (tmp_path / "whole.json").read_bytes()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 1}, "seed"),
        ({"text": TEXT + "."}, "text_sha256"),
        ({"multiple": 5}, "multiple"),
        ({"parts": ["perplexity"]}, "parts"),
        ({"starts": [0, 9]}, "starts"),
        ({"recall_doublings": 2}, "recall_doublings"),
    ],
)
def test_a_journal_of_another_diagnosis_is_not_mixed_in(
    model: RecurrentLM, tokenizer: Any, tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    out, partial = tmp_path / "r.json", tmp_path / "r.json.partial"
    with Interrupter(model, 12), pytest.raises(KeyboardInterrupt):
        run(model, tokenizer, out=out)
    old = partial.read_bytes()
    with pytest.raises(UserError, match=rf"cannot resume .*other settings \({named}\)"):
        run(model, tokenizer, out=out, resume=True, **change)
    assert partial.read_bytes() == old
    with pytest.raises(UserError, match="partial holds an interrupted run"):
        run(model, tokenizer, out=out, **change)
    assert partial.read_bytes() == old
    with Interrupter(model, 0), pytest.raises(KeyboardInterrupt):
        run(model, tokenizer, out=out, force=True, **change)
    assert len(partial.read_text().splitlines()) == 1


def test_a_journal_of_another_model_or_verb_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    out, partial = tmp_path / "r.json", tmp_path / "r.json.partial"
    model = tiny_model(MIXERS["gla"])
    with Interrupter(model, 12), pytest.raises(KeyboardInterrupt):
        run(model, tokenizer, out=out)
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    with pytest.raises(UserError, match="fingerprint"):
        run(model, tokenizer, out=out, resume=True)
    partial.write_text(partial.read_text().replace("partial diagnosis", "partial evaluation"))
    with pytest.raises(UserError, match=r"line 1 is damaged .it is not a journal of diagnose"):
        run(model, tokenizer, out=out, resume=True)
    with pytest.raises(UserError, match="resume needs an output file"):
        run(model, tokenizer, resume=True)


def test_what_diverges_is_kept_too(tokenizer: Any, tmp_path: Path) -> None:
    """Numbers that are no numbers, and where they began, come back from the journal."""
    model = tiny_model(MIXERS["gla"])
    with torch.no_grad():
        model.model.embeddings.weight[ord("b")] = torch.nan
    whole, out = tmp_path / "whole.json", tmp_path / "r.json"
    with Interrupter(model, 10**9) as counter:
        run(model, tokenizer, out=whole)
    for after in (6, counter.passes // 2, counter.passes - 2):
        with Interrupter(model, after), pytest.raises(KeyboardInterrupt):
            run(model, tokenizer, out=out, force=True)
        result = run(model, tokenizer, out=out, resume=True)
        assert out.read_bytes() == whole.read_bytes()
    assert {entry["part"] for entry in result["divergence"]} == {"perplexity", "remembrance", "recall"}
    assert result["verdict"][0]["numbers"]["position"] == 11


class Alone(Ranks):
    """One of several processes without the others: what they would tell lies in their journals."""

    def gather(self, data: Any) -> list[Any]:
        return [data]

    def wait(self) -> None:
        pass


def test_several_processes_share_the_work_and_one_can_finish_it(
    model: RecurrentLM, tokenizer: Any, tmp_path: Path
) -> None:
    whole, out = tmp_path / "whole.json", tmp_path / "r.json"
    with Interrupter(model, 10**9) as counter:
        run(model, tokenizer, out=whole)
        passes = counter.passes
    for rank in range(2):
        # Without the other's share a process cannot end; its own lies in its journal by then.
        with pytest.raises(KeyError):
            run(model, tokenizer, out=out, ranks=Alone(rank, 2), resume=rank > 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.json.partial", "r.json.partial.1", "whole.json"]
    jobs = [
        [(line["job"], line["index"]) for line in map(json.loads, path.read_text().splitlines()[1:])]
        for path in sorted(tmp_path.glob("r.json.partial*"))
    ]
    assert all(jobs) and not set(jobs[0]) & set(jobs[1])
    with Interrupter(model, 10**9) as counter:
        run(model, tokenizer, out=out, resume=True)
        assert counter.passes < passes
    assert out.read_bytes() == whole.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.json", "whole.json"]

"""Two processes and one output folder: the second is refused, and takes over when the first has been killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from longrecall.cli.main import main
from longrecall.models.checkpoint import open_checkpoint
from longrecall.training.recipe import Recipe
from tests import warm


def test_a_second_run_is_refused_until_the_first_one_is_dead(
    make_recipe: Callable[..., Recipe], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "recipe.yaml", tmp_path / "out"
    path.write_text(yaml.safe_dump(make_recipe("run.steps=8", "run.save_every=1", "run.batch_size=1").to_dict()))
    with warm.start(warm.longrecall, ["train", str(path)]) as first:
        try:
            while first.poll() is None and not (out / "steps" / "step-00000002").exists():
                time.sleep(0.01)
            first.send_signal(signal.SIGSTOP)  # it holds the folder however long this takes
            surgery = ["--method", "grow_state", "--layers", "0"]
            for words in (
                ["train", str(path), "--resume"],
                ["train", str(path), "--force"],
                ["expand", str(tmp_path / "base"), str(out), "--force", *surgery],
            ):
                assert main(words) == 2
                told = capsys.readouterr().err
                assert f"is being written by process {first.pid} on " in told and told.count("\n") == 1
                assert f"(longrecall train {path}); wait until it ends, or choose another" in told
        finally:
            first.kill()
            first.wait()
    assert first.returncode == -9 and not (out / "final").exists()
    words = ["train", str(path), "--set", f"run.output={tmp_path / 'whole'}"]
    assert main(["train", str(path), "--resume"]) == main(words) == 0
    assert len((out / "log.jsonl").read_text().splitlines()) == 8
    assert open_checkpoint(out / "final").sha256() == open_checkpoint(tmp_path / "whole" / "final").sha256()
    assert sorted(os.listdir(out)) == ["final", "log.jsonl", "steps", "training.json"]
    assert sorted(os.listdir(out / "steps")) == ["step-00000007", "step-00000008"]
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]

"""A checkpoint is written whole or not at all."""

from __future__ import annotations

import errno
import resource
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from longrecall.errors import UserError
from longrecall.models.checkpoint import CheckpointWriter, open_checkpoint, save
from longrecall.models.config import RecurrentConfig
from longrecall.outputs import claim_folder
from tests import warm
from tests.models.checkpoints import (
    GLA,
    MAMBA2,
    config_of,
    filled,
    left_behind,
    model_of,
    write,
)


def test_exception_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyError), CheckpointWriter(tmp_path / "out", max_shard_bytes=1) as writer:
        writer.set_config(config_of())
        for name, tensor in filled(config_of()):
            writer.add(name, tensor)
        raise KeyError("surgery went wrong")
    assert left_behind(tmp_path) == []


def write_and_wait(out: Path, ready: Path) -> None:
    """Write all files of a checkpoint, but do not publish it."""
    config = config_of()
    with CheckpointWriter(out, max_shard_bytes=1) as writer:
        writer.set_config(config)
        for name, tensor in filled(config):
            writer.add(name, tensor)
        ready.touch()
        time.sleep(60)


def test_one_writer_at_a_time_and_a_killed_one_leaves_no_checkpoint(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    with warm.start(write_and_wait, tmp_path / "out", ready) as other:
        try:
            while other.poll() is None and not ready.exists():
                time.sleep(0.01)
            ready.unlink()
            with pytest.raises(
                UserError, match=rf"out is being written by process {other.pid} on .* choose another fol"
            ):
                write(tmp_path / "out", config_of(), force=True)
        finally:
            other.kill()
    assert not (tmp_path / "out").exists()
    assert list(tmp_path.rglob("*.safetensors"))  # what the other one had written was no remains yet
    assert list(tmp_path.rglob("config.json")) == []
    write(tmp_path / "out", config_of())
    assert left_behind(tmp_path) == ["out"]


def test_a_folder_that_a_kill_took_away_comes_back(tmp_path: Path) -> None:
    """Killed between two renames: the old folder has its hidden name, and the new one still has too."""
    out = tmp_path / "out"
    write(out, config_of(GLA))
    before = open_checkpoint(out).sha256()
    out.rename(tmp_path / ".out.replaced-01234567")
    (tmp_path / ".out.partial-01234567").mkdir()
    with pytest.raises(UserError, match="out is not empty"):
        write(out, config_of(MAMBA2))
    assert left_behind(tmp_path) == ["out"] and open_checkpoint(out).sha256() == before


def test_no_checkpoint_goes_through_a_link_or_into_another_one(tmp_path: Path) -> None:
    write(tmp_path / "other", config_of())
    before = left_behind(tmp_path / "other")
    (tmp_path / "lost").symlink_to(tmp_path / "nowhere" / "deep")
    (tmp_path / "found").symlink_to(tmp_path / "other")
    for name, cause in {
        "lost": r"lost cannot be written: .*lost is a link to .*nowhere/deep, which is not there",
        "lost/out": r"out cannot be written: .*lost is a link to .*nowhere/deep, which is not there",
        "found": r"found cannot be written: it is a link",
        "found/out": r"out lies inside the checkpoint folder .*other",
        "other/a/out": r"out lies inside the checkpoint folder .*other",
    }.items():
        with pytest.raises(UserError, match=cause):
            write(tmp_path / name, config_of(), force=True)
    assert left_behind(tmp_path / "other") == before
    assert left_behind(tmp_path) == ["found", "lost", "other"]


def test_a_folder_that_a_run_writes_in_is_not_replaced(tmp_path: Path) -> None:
    run = tmp_path / "run"
    told: list[str] = []

    def other() -> None:
        with pytest.raises(UserError) as caught:
            write(run, config_of(), force=True)
        told.append(str(caught.value))

    with claim_folder(run, "advice"):
        (run / "log.jsonl").touch()
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert "run is being written by another thread" in told[0] and left_behind(run) == ["log.jsonl"]


def test_non_empty_folder_is_kept_without_force(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="--force"):
        write(tmp_path / "out", config_of())
    assert left_behind(tmp_path / "out") == ["thesis.txt"]
    assert left_behind(tmp_path) == ["out"]


def test_empty_folder_and_missing_parents_are_fine(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty", config_of())
    write(tmp_path / "a" / "b" / "out", config_of())
    assert open_checkpoint(tmp_path / "empty").sha256() == open_checkpoint(tmp_path / "a" / "b" / "out").sha256()


def test_force_replaces_only_when_the_new_one_is_complete(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(out, config_of(GLA))
    before = open_checkpoint(out).sha256()
    with pytest.raises(UserError, match="never given"), CheckpointWriter(out, force=True) as writer:
        writer.set_config(config_of(MAMBA2))
    assert open_checkpoint(out).sha256() == before
    write(out, config_of(MAMBA2), force=True)
    assert open_checkpoint(out).config.layers[0]["mixer"]["type"] == "mamba2"
    assert left_behind(tmp_path) == ["out"]


def test_failed_replacement_puts_the_old_one_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    write(out, config_of(GLA))
    before, rename = open_checkpoint(out).sha256(), Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if ".partial-" in self.name:
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(UserError, match="cannot be written"):
        write(out, config_of(MAMBA2), force=True, max_shard_bytes=1 << 30)
    assert open_checkpoint(out).sha256() == before
    assert left_behind(tmp_path) == ["out"]


def test_source_can_be_replaced_by_what_is_read_from_it(tmp_path: Path) -> None:
    save(model_of(), tmp_path / "out")
    source = open_checkpoint(tmp_path / "out")
    with CheckpointWriter(tmp_path / "out", force=True) as writer:
        writer.set_config(source.config)
        for name in source.names():
            writer.add(name, source.read(name) * 2)
    assert torch.equal(open_checkpoint(tmp_path / "out").read("model.norm.weight"), torch.full((8,), 2.0))


def test_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(UserError, match="is a file"):
        write(tmp_path / "out", config_of(), force=True)
    assert (tmp_path / "out").read_text() == "a file"


def test_working_folder_is_never_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    with pytest.raises(UserError, match="--force does not replace"):
        write(tmp_path, config_of(), force=True)


def test_unwritable_output(tmp_path: Path) -> None:
    # A parent that is a file cannot be written into, whoever runs the tests.
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"out cannot be written"):
        write(tmp_path / "file" / "out", config_of())


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_full_disk_while_saving(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(UserError, match="cannot be written: No space left on device"):
        save(model_of(), tmp_path / "out")
    assert left_behind(tmp_path) == []


def write_on_a_full_disk(out: Path) -> None:
    """A limit on the file size makes the real write fail midway, as a full disk does."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    config = RecurrentConfig(vocab_size=5000, hidden_size=8, layers=[{"mixer": GLA, "mlp_size": 0}])
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
    try:
        with CheckpointWriter(out) as writer:
            writer.set_config(config)
            for name, shape in config.tensor_shapes().items():
                writer.add(name, torch.zeros(shape))
    except UserError as error:
        print(error)


def test_system_that_refuses_to_write_more(tmp_path: Path) -> None:
    done = warm.run(write_on_a_full_disk, tmp_path / "out")
    assert "out cannot be written: File too large" in done.stdout, done.stderr
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.norms.weight", torch.ones(8), r'no place.*Did you mean "model\.norm\.weight"'),
        ("model.norm.weight", torch.ones(9), r'"model\.norm\.weight" has shape \[9\].*\[8\]'),
        ("model.embeddings.weight", torch.ones(17, 8), "given twice"),
    ],
)
def test_writer_refuses_what_the_config_has_no_place_for(
    name: str, tensor: torch.Tensor, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message), CheckpointWriter(tmp_path / "out") as writer:
        writer.set_config(config_of())
        writer.add("model.embeddings.weight", torch.ones(17, 8))
        writer.add(name, tensor)
    assert left_behind(tmp_path) == []


def test_writer_names_a_tensor_that_never_came(tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match=r'never given: "lm_head\.weight"'),
        CheckpointWriter(tmp_path / "out") as writer,
    ):
        writer.set_config(config_of())
        for name, tensor in filled(config_of()):
            if name != "lm_head.weight":
                writer.add(name, tensor)
    assert left_behind(tmp_path) == []


def test_shard_size_must_be_positive(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="max_shard_bytes"):
        CheckpointWriter(tmp_path / "out", max_shard_bytes=0)

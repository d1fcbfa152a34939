"""A published model of 30 billion parameters: planned in seconds, enlarged in a few gigabytes of memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from longrecall.models.checkpoint import open_checkpoint
from longrecall.models.formats.shards import ShardWriter
from longrecall.models.formats.weights import open_weights
from longrecall.surgery.expansion import expand
from tests.models.sparse import write_sparse

ROOT = Path(__file__).parents[2]
GIB = 1 << 30


def published(name: str, folder: Path) -> Path:
    """A checkpoint of the published config.json, of zeros, which take no place on the disk."""
    raw = json.loads((ROOT / "tests" / "models" / "published" / f"{name}.json").read_text())
    assert write_sparse(folder, raw) > 50 * GIB
    return folder


def test_a_model_of_30_billion_parameters_is_planned_in_seconds(tmp_path: Path) -> None:
    source = published("nemotron_3_nano_30b_a3b", tmp_path / "model")
    started = time.process_time()
    summary = expand(source, tmp_path / "out", method="grow_state", layers="all", dry_run=True, factor=2)
    # Less than one is usual: every name and shape of 6,000 tensors is looked at.
    assert time.process_time() - started < 6
    assert summary.parameters_before > 31e9 and summary.state_after == 2 * summary.state_before
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.timeout(3600)  # 60 GB are read twice and written once.
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is measured as Linux tells it")
@pytest.mark.parametrize("name", ["nemotron_3_nano_30b_a3b"])
def test_a_model_of_30_billion_parameters_is_enlarged_in_a_few_gigabytes(name: str, tmp_path: Path) -> None:
    source, target = published(name, tmp_path / "model"), tmp_path / "larger"
    command = [sys.executable, "-m", "tests.surgery.measured", str(source), str(target), "grow_state"]
    there = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    done = subprocess.run(command, env=there, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    print(f"{name}: {int(done.stdout) / GIB:.2f} GiB")
    assert int(done.stdout) < 8 * GIB
    old, new = open_checkpoint(source), open_checkpoint(target)
    assert new.plain.state_size() > old.plain.state_size()
    assert len(list(target.glob("model-*.safetensors"))) > 40


def test_a_tensor_that_fills_a_file_is_written_at_once(tmp_path: Path) -> None:
    """Its memory can go before the next one is read: the experts of a layer may take gigabytes."""
    writer = ShardWriter(tmp_path, 4096, tmp_path)
    generator = torch.Generator().manual_seed(0)
    large, small = torch.randn(2, 4096, generator=generator), torch.randn(8, generator=generator)
    writer.add("first", small)
    writer.add("view", large[1])
    writer.add("turned", large.view(64, 128).T)
    # The first one's file was closed for the second, which then waited for nobody.
    assert len(list(tmp_path.glob("part-*"))) == 3
    large.zero_()
    writer.add("last", small)
    writer.finish()
    weights = open_weights(tmp_path)
    generator.manual_seed(0)
    kept = torch.randn(2, 4096, generator=generator)
    names = ["view", "turned", "first", "last"]
    for found, expected in zip(weights.read(names), (kept[1], kept.view(64, 128).T, small, small), strict=True):
        assert torch.equal(found, expected)

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import longrecall.ops
from longrecall.cli.main import main
from longrecall.ops import BACKENDS

QUICK = ["--length", "16", "--repeats", "1", "--threads", "1", "--decode-tokens", "2"]


def test_ops_are_timed_on_every_backend(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    assert main(["bench", "ops", *QUICK, "--heads", "1", "--dim", "8", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["settings"] == {
        "length": 16,
        "batch": 1,
        "repeats": 1,
        "device": "cpu",
        "threads": 1,
        "heads": 1,
        "dim": 8,
    }
    rows = facts["results"]
    without_gpu = [backend for backend in BACKENDS.values() if not backend.kernels]
    assert len(rows) == len({(row["op"], row["what"], row["backend"]) for row in rows}) == 3 * 2 * len(without_gpu)
    for row in rows:
        assert 0 < row["fastest"] <= row["milliseconds"]
        assert row["tokens_per_second"] == pytest.approx(16_000 / row["milliseconds"])
        if row["backend"] == "reference":
            assert row["times_reference"] == 1.0
    assert torch.get_num_threads() == threads


def test_a_checkpoint_is_timed_whole(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(checkpoint), *QUICK, "--batch", "2", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [row["what"] for row in facts["results"]] == ["forward", "forward+backward", "decode"]
    decode = facts["results"][2]
    assert decode["tokens_per_second"] == pytest.approx(4_000 / decode["milliseconds"])
    assert {"python", "torch", "transformers", "hardware"} <= facts["environment"].keys()


def test_the_table_has_a_row_per_time(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(checkpoint), *QUICK]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["what", "forward", "forward+backward", "decode"]


def test_a_row_that_does_not_fit_says_so_and_the_others_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = longrecall.ops.gated_linear_attention

    def full(*tensors: torch.Tensor, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
        if backend == "reference" and tensors[0].requires_grad and torch.is_grad_enabled():
            # The words of the CPU's allocator.
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
        if backend == "chunked" and not torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(*tensors, backend=backend)

    full.__name__ = original.__name__
    monkeypatch.setattr(longrecall.ops, "gated_linear_attention", full)
    assert main(["bench", "ops", *QUICK, "--heads", "1", "--dim", "8", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["results"]
    failed = {(row["op"], row["what"], row["backend"]) for row in rows if row.get("error") == "out of memory"}
    assert len(failed) == 4 and all(op.startswith("gated_linear_attention") for op, _, _ in failed)
    assert {row[1:] for row in failed} == {("forward+backward", "reference"), ("forward", "chunked")}
    for row in rows:
        assert (row["milliseconds"] is None) == ("error" in row)
        # A ratio needs both times.
        compared = row["op"] == "gated_delta_rule" or row["backend"] == "reference"
        assert (row["times_reference"] is not None) == (compared and "error" not in row)
    assert main(["bench", "ops", *QUICK, "--heads", "1", "--dim", "8"]) == 0
    assert capsys.readouterr().out.count("out of memory") == 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ops", "--length", "0"], "length"),
        (["ops", "--batch", "0"], "--batch"),
        (["ops", "--decode-tokens", "0"], "--decode-tokens"),
        (["ops", "--dtype", "int7"], "int7"),
        (["ops", "--device", "abacus"], "abacus"),
        (["no/such/checkpoint"], "no/such/checkpoint"),
    ],
)
def test_bad_input(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1

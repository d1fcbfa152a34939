"""`longrecall info --backends`, and what the verb says when it has nothing to show."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from longrecall.cli.info import backends_as_text
from longrecall.cli.main import main
from longrecall.ops import BACKENDS, backends, machine
from tests.hybrids import HYBRIDS, WIDTH


def test_backends_are_listed_with_their_reasons(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(backends, "_INSTALLED", True)
    assert main(["info", "--backends", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == list(BACKENDS)
    assert rows["chunked"]["usable"] and rows["chunked"]["reason"] is None
    assert not rows["triton"]["usable"] and rows["triton"]["reason"] == "there is no CUDA device"
    # Every op that has a module of kernels, once.
    assert rows["triton"]["ops"] == sorted(name for name, op in backends.OPS.items() if op.kernels)
    assert {"gated_delta_rule", "silu_product", "look_up", "stepped_values"} < set(rows["triton"]["ops"])
    monkeypatch.setattr(backends, "_INSTALLED", False)
    assert main(["info", "--backends"]) == 0
    assert 'not usable: Triton is not installed; pip install "triton>=' in capsys.readouterr().out


def test_plain_kernels_say_why_those_for_hopper_do_not_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(backends, "why_no_kernels", lambda: None)
    monkeypatch.setattr(machine, "why_no_gluon", lambda: "LONGRECALL_GLUON is 0")
    found = machine.describe_backends()
    monkeypatch.undo()
    assert [row["name"] for row in found if "without_gluon" in row] == ["triton"]
    (row,) = (row for row in found if row["name"] == "triton")
    said = backends_as_text([row | {"usable": True}])
    assert said.endswith("triton runs without its kernels for Hopper: LONGRECALL_GLUON is 0")
    for other in ({"without_gluon": None, "usable": True}, {"usable": False}):
        assert "for Hopper" not in backends_as_text([row | other])


def test_why_gluon_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order in which a user can do something about it; the last word is that of the package itself."""
    monkeypatch.setattr(backends, "why_no_kernels", lambda: "there is no CUDA device")
    assert backends.why_no_gluon() == "there is no CUDA device"
    monkeypatch.setattr(backends, "why_no_kernels", lambda: None)
    pytest.importorskip("triton")
    from longrecall.ops.kernels import hopper

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    monkeypatch.setattr(hopper, "interpreting", lambda: False)
    monkeypatch.setattr(hopper, "other_triton", lambda: None)
    monkeypatch.delenv(hopper.SWITCH, raising=False)
    assert backends.why_no_gluon() == "the kernels in Gluon are for compute capability 9.0, not 8.0"
    monkeypatch.setenv(hopper.SWITCH, "0")
    assert backends.why_no_gluon() == "LONGRECALL_GLUON is 0"


def test_old_gpus_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(backends, "_INSTALLED", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert backends.why_no_kernels() == "the GPU has compute capability 7.5; 8.0 or later is needed"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert backends.why_no_kernels() is None


def test_a_hybrid_of_many_layers_is_readable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Layers that are alike are one row, wherever they stand; blocks and branches have their names."""
    file = tmp_path / "model.json"
    for name, rows in (
        ("nemotron", [["0-19", "mamba2"], ["20-39", "moe"], ["40-59", "attention"]]),
        ("falcon", [["0-49", "parallel", "attention"]]),
        ("kimi", [["0", "kda"], ["1", "kda"], ["2", "mla"]]),
    ):
        layers = HYBRIDS[name]["layers"]
        if name == "nemotron":
            layers = [layers[index] for index in (0, 1, 4) for _ in range(20)]
        elif name == "falcon":
            layers = [{**layers[0], "repeat": 50}]
        file.write_text(json.dumps({"vocab_size": 64, "hidden_size": WIDTH, "layers": layers}))
        assert main(["info", str(file)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[: len(row)] for line, row in zip(lines[1:], rows, strict=False)] == rows
        assert lines[len(rows) + 1].startswith("total")
        assert ("num_experts=4 top_k=2" in "".join(lines)) is (name != "falcon")


@pytest.mark.parametrize(
    ("words", "message"),
    [([], "name a checkpoint (CKPT), or ask for --backends"), (["--backends", "here/"], "here/")],
)
def test_bad_input(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", *words]) == 2
    assert message in capsys.readouterr().err

"""`longrecall info --backends CKPT`: what every layer would take, without weights and without computing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from longrecall.cli.main import main
from longrecall.inference import backend_report
from longrecall.models.config import RecurrentConfig
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.ops import backends
from tests.conftest import MIXERS

ASSET = Path(__file__).parents[2] / "src" / "longrecall" / "assets" / "mamba2-base"


@pytest.fixture(autouse=True)
def _short_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain torch runs in the place of what is chosen: a loop over chunks."""
    monkeypatch.setattr(backend_report, "TOKENS", 40)
    monkeypatch.setattr(backend_report, "ROWS", 2)


def config_of(*mixers: str) -> RecurrentConfig:
    layers = [{"mixer": MIXERS[name], "mlp_size": 24} for name in mixers]
    return RecurrentConfig(vocab_size=32, hidden_size=16, layers=layers)


def choices(config: RecurrentConfig, device: str = "cpu") -> dict[tuple[int, str], dict[str, str]]:
    """(layer, phase) -> op -> backend."""
    found, _ = backend_report.choices_of(config, torch.device(device), torch.float32)
    return {
        (layer, one.phase): {choice.op: choice.chosen for choice in one.choices}
        for one in found
        for layer in one.layers
    }


def test_every_layer_answers_for_every_phase() -> None:
    """A window reads numbers back, retrieval looks up tokens, a layer inside another answers too."""
    found = choices(config_of("hymba", "retrieval", "hymba", "attention_window"))
    phases = set(backend_report.PHASES) - {"captured decoding"}
    assert set(found) == {(layer, phase) for layer in range(4) for phase in phases}
    assert found[0, "prefill"] == found[2, "prefill"]
    assert found[1, "training"]["selected_attention"] == "reference"
    assert found[1, "prefill"]["gated_linear_attention"] == "chunked"
    assert found[1, "decoding"]["gated_linear_attention"] == "reference"
    assert "rms_norm" in found[3, "decoding"]


def test_on_a_gpu_kernels_stand_for_the_ops_inside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: of a delta layer the kernels make everything between its products."""
    monkeypatch.delenv("LONGRECALL_BACKEND", raising=False)
    monkeypatch.setattr(backends, "why_no_kernels", lambda: None)
    monkeypatch.setattr(backends.Op, "_ask", lambda *_: None)
    monkeypatch.setattr(backends.Op, "why_unasked", lambda *_: None)
    monkeypatch.setattr(backends.Op, "_choose", lambda op, *_: ("triton", None) if op.kernels else ("chunked", None))
    found = choices(config_of("gated_delta_net"))[0, "training"]
    assert found["expanded_delta_rule"] == "triton"
    assert not {"gated_delta_rule", "short_convolution"} & set(found)
    assert {"rms_norm", "delta_gates", "gated_rms_norm"} <= set(found)


def test_kernels_for_hopper_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of them replace Triton's, inside which op, and why the others do not; those of a captured step as well."""
    pytest.importorskip("triton")
    from longrecall.ops.kernels import hopper

    monkeypatch.delenv("LONGRECALL_BACKEND", raising=False)
    monkeypatch.setattr(backends, "why_no_kernels", lambda: None)
    monkeypatch.setattr(backends.Op, "_ask", lambda *_: None)
    monkeypatch.setattr(backends.Op, "why_unasked", lambda *_: None)
    monkeypatch.setattr(backends.Op, "_choose", lambda op, *_: ("triton", None) if op.kernels else ("chunked", None))
    monkeypatch.setattr(hopper, "why_not", lambda _, **__: None)
    monkeypatch.setattr(backend_report, "why_no_graph_by_design", lambda _: None)
    found, graph = backend_report.choices_of(config_of("gated_delta_net", "kda"), torch.device("cpu"), torch.bfloat16)
    lines = backend_report.as_lines(found, graph)
    inside = "expanded_delta_rule"
    assert f"    {inside} for Hopper: inverse of a chunk" in lines
    first = next(line for line in lines if line.startswith(f"    {inside} not for Hopper: walk forward, walk back"))
    assert first.endswith("(states must have 128 keys and 128 values, not 16 x 16)")
    captured = lines.index("layer 0, gated_delta_net, captured decoding")
    assert lines[captured + 1] == "  triton: recurrent_step"
    assert "step on many states (states must have 64, 128" in lines[captured + 2]
    assert not any("layer 1" in line and "captured" in line for line in lines)


def test_the_verb_shows_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert main(["info", "--backends", str(ASSET)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("on cpu, bfloat16; 40 tokens")
    assert any(line.startswith("layer 0") and line.endswith("mamba2, prefill") for line in lines)
    assert any(line.startswith("  chunked: gated_linear_attention (not triton: there is no CUDA") for line in lines)
    assert lines[-1] == "decoding is not captured: the model is on cpu; CUDA graphs need a GPU"


def test_as_json_with_every_reason(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    description = tmp_path / "model.json"
    facts = {"vocab_size": 32, "hidden_size": 16, "layers": [{"mixer": MIXERS["mamba"], "mlp_size": 0}]}
    description.write_text(json.dumps(facts), encoding="utf-8")
    assert main(["info", "--backends", "--json", str(description)]) == 0
    data = json.loads(capsys.readouterr().out)
    scan = {choice["op"]: choice for choice in data["layers"][0]["choices"]}["selective_scan"]
    assert data["device"] in ("cpu", "cuda") and set(scan["why_not"]) | {scan["chosen"]} == {
        "reference",
        "chunked",
        "triton",
    }


def test_a_step_on_a_gpu_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors without memory that stand for the weights here are no reason against it."""
    monkeypatch.setattr(backend_report, "_choices", lambda *_: [])
    monkeypatch.setattr(backend_report, "_step_choices", lambda *_: [])
    monkeypatch.setattr(RecurrentLM, "device", torch.device("cuda"))
    _, reason = backend_report.choices_of(config_of("gla"), torch.device("cpu"), torch.bfloat16)
    assert reason is None
    _, reason = backend_report.choices_of(config_of("hyena"), torch.device("cpu"), torch.bfloat16)
    assert "hyena keeps a cache" in str(reason)

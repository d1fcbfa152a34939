"""A new method of surgery is one file and one registry line: tried with one that nobody ships."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from longrecall.cli.main import main
from longrecall.errors import UserError
from longrecall.models.config import RecurrentConfig
from longrecall.models.loading import load
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.surgery.registry import METHODS, register

SOURCE = '''
"""more_heads: new heads beside the old ones of RetNet, whose outputs nobody reads at the start."""

import torch

from longrecall.surgery.method import Method, Option, Plan


def plan(mixer, init, options):
    heads = mixer["num_heads"] + options["extra"]
    return Plan({**mixer, "num_heads": heads}, ("mixer.q_proj.weight",))


def transform(mixer, tensors, init, options, generator):
    result = dict(tensors)
    for side, width in (("q", "key_dim"), ("k", "key_dim"), ("v", "value_dim"), ("g", "value_dim")):
        old = tensors[f"mixer.{side}_proj.weight"]
        fresh = torch.randn(options["extra"] * mixer[width], old.shape[1], generator=generator)
        result[f"mixer.{side}_proj.weight"] = torch.cat([old, fresh])
    old = tensors["mixer.o_proj.weight"]
    result["mixer.o_proj.weight"] = torch.cat([old, old.new_zeros(len(old), options["extra"] * mixer["value_dim"])], 1)
    return result


METHOD = Method(
    name="more_heads",
    summary="new heads beside the old ones",
    mixers=("retnet",),
    mixer_names="RetNet",
    inits=("preserve",),
    options=(
        Option("extra", int, 1, ("preserve",), "number of new heads", least=1, flag="--extra-heads", letter="H"),
    ),
    plan=plan,
    transform=transform,
)
'''


@pytest.fixture
def more_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module, with its line in the registry."""
    package = tmp_path / "somebodys_methods"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "more_heads.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("somebodys_methods.more_heads")
    register(module.METHOD)
    yield module
    del METHODS["more_heads"]


def test_the_help_shows_it_with_its_options_and_flags(
    more_heads: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["expand", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "or more_heads (RetNet)" in text
    assert "--set options of more_heads; its --init: preserve" in text
    assert "extra: number of new heads" in text
    assert "--extra-heads H more_heads: number of new heads; the same as --set extra=H" in text


@torch.no_grad()
def test_the_command_does_it_and_the_checkpoint_says_so(
    more_heads: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    layers = [{"mixer": {"type": "retnet", "num_heads": 2, "key_dim": 4, "value_dim": 4}}]
    model = RecurrentLM(RecurrentConfig(vocab_size=40, hidden_size=16, layers=layers)).eval()
    model.save_pretrained(tmp_path / "base")
    words = ["expand", str(tmp_path / "base"), str(tmp_path / "larger"), "--method", "more_heads", "--layers", "all"]
    # RetNet's decay depends on how many heads there are, so the function is not asked for here.
    assert main([*words, "--extra-heads", "2"]) == 0
    larger = load(tmp_path / "larger")
    assert larger.config.layers[0]["mixer"]["num_heads"] == 4
    (record,) = json.loads((tmp_path / "larger" / "surgery.json").read_text())
    assert record["method"] == "more_heads" and record["options"] == {"extra": 2}
    assert main(["info", str(tmp_path / "larger")]) == 0
    assert "more_heads (preserve)" in capsys.readouterr().out


def test_the_errors_name_it_and_the_registry_guards_its_flag(more_heads: ModuleType) -> None:
    words = ["expand", "base/", "larger/", "--method"]
    assert main([*words, "more_hats"]) == 2
    with pytest.raises(UserError, match='Did you mean "extra"'):
        METHODS["more_heads"].check_options("preserve", {"exta": 1})
    other = more_heads.Method(
        **{name: getattr(more_heads.METHOD, name) for name in ("summary", "mixers", "inits", "plan", "transform")},
        name="other",
        options=(more_heads.Option("more", int, 1, ("preserve",), "help", flag="--extra-heads"),),
    )
    with pytest.raises(ValueError, match="stands for another option"):
        register(other)

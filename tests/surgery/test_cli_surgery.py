"""The verbs `expand` and `info`: what they print, what they refuse, and that their modules are light."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from longrecall.cli import expand as expand_verb
from longrecall.cli import info as info_verb
from longrecall.cli.main import build_parser
from longrecall.errors import UserError
from longrecall.models.checkpoint import open_checkpoint, save
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.surgery import INITS, METHODS


def command(*words: str) -> int:
    args = build_parser(("expand", "info")).parse_args(words)
    code: int = args.run(args)
    return code


@pytest.fixture
def base(build: Callable[..., RecurrentLM], tmp_path: Path) -> str:
    save(build("mamba2", "attention", "gla"), tmp_path / "base")
    return str(tmp_path / "base")


def test_expand_writes_and_prints_the_table(base: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out")
    words = ["expand", base, out, "--method", "grow_state", "--layers", "0", "--set", "factor=2"]
    assert command(*words, "--dry-run") == 0
    dry = capsys.readouterr().out
    assert "dry run: nothing was written" in dry and not Path(out).exists()
    assert command(*words) == 0
    real = capsys.readouterr().out
    assert real.splitlines()[:-1] == dry.splitlines()[:-1] and real.splitlines()[-1] == f"wrote {out}"
    assert open_checkpoint(out).config.layers[0]["mixer"]["state_dim"] == 8


def test_expand_json_is_the_summary(base: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["expand", base, str(tmp_path / "out"), "--method", "merge_heads", "--layers", "2", "--init", "perturb"]
    assert command(*words, "--set", "mixing_noise=0.05", "--set", "shrink=1", "--seed", "4", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["options"] == {
        "fresh": "usual",
        "mixing_noise": 0.05,
        "noise_scale": 1.0,
        "perturb_conv": False,
        "shrink": 1.0,
    }
    assert data["seed"] == 4 and data["layers"][2]["state_after"] == 4 * data["layers"][2]["state_before"]


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        (["factor"], "write key=value"),
        (["=4"], "write key=value"),
        (["factor="], "write key=value"),
        (["factor=2", "factor=4"], "given twice"),
        (["factor={"], "not a number, a word, true or false"),
        (["factor=two"], "'two' is not a whole number"),
        (["statex=1"], 'belongs to reinit, handover|"statex" does nothing'),
        (["src=elsewhere"], 'no option "src"'),
        (["layers=1"], 'no option "layers"'),
    ],
)
def test_bad_options_are_one_line(base: str, tmp_path: Path, options: list[str], cause: str) -> None:
    words = ["expand", base, str(tmp_path / "out"), "--method", "grow_state", "--layers", "0"]
    with pytest.raises(UserError, match=cause) as caught:
        command(*words, *(word for option in options for word in ("--set", option)))
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


def test_info_shows_layers_totals_and_surgery(base: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out")
    command("expand", base, out, "--method", "grow_state", "--layers", "0")
    capsys.readouterr()
    assert command("info", out, "--context", "2k") == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    sizes = ["inner_dim=32", "head_dim=8", "state_dim=16", "groups=1", "conv_width=4"]
    # in_proj 100 x 16, conv 64 x 4 + 64, three per-head vectors of 4, norm 32, out_proj 16 x 32, mixer_norm 16.
    assert lines[1].split() == ["0", "mamba2", *sizes, "512", "2,492"]
    assert lines[2].split()[:2] == ["1", "attention"]
    assert "training context   64 tokens" in text
    assert "grow_state (preserve) in layers 0: state 256 -> 640" in text
    # One attention layer: 2 * 2 heads * 8 numbers of 2 bytes a token.
    assert "key-value cache    128.0 KiB at 2,048 tokens" in text
    assert not any(line != line.rstrip() for line in lines)


def test_info_json(base: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("info", base, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["state_size"] == sum(layer["state_size"] for layer in facts["layers"]) == 256
    assert facts["state_bytes"] == 1024 and facts["training_context"] == 64 and facts["surgery"] == []
    assert facts["key_value_cache"]["context"] == 64
    # 256 float32 numbers against 2 * 16 numbers of 2 bytes in each of 3 layers.
    assert facts["key_value_cache"]["state_equals_tokens"] == pytest.approx(1024 / 192)
    # One attention layer of 2 x 8; a Transformer of width 16 in 3 layers. 64 tokens, each with keys and values.
    assert facts["key_value_cache"]["numbers"] == 64 * 2 * 16
    assert facts["key_value_cache"]["average_numbers"] == 64 * 16
    assert facts["key_value_cache"]["transformer_numbers"] == 64 * 2 * 16 * 3
    assert facts["key_value_cache"]["transformer_average_numbers"] == 64 * 16 * 3
    assert facts["key_value_cache"]["transformer_to_state"] == 64 * 16 * 3 / 256


def test_info_of_a_model_without_recurrent_state(
    build: Callable[..., RecurrentLM], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(build("attention"), tmp_path / "base")
    assert command("info", str(tmp_path / "base")) == 0
    text = capsys.readouterr().out
    assert "at any length: 0 numbers" in text and "times as many" not in text


def test_info_survives_a_record_that_somebody_cut(base: str, capsys: pytest.CaptureFixture[str]) -> None:
    (Path(base) / "surgery.json").write_text('[{"method": "grow_state"}]')
    assert command("info", base) == 0
    assert "grow_state (?) in layers ?: state ? -> ?" in capsys.readouterr().out


@pytest.mark.parametrize("context", ["0", "4q", "-1", "1.5k"])
def test_info_refuses_a_context_that_is_none(base: str, context: str) -> None:
    with pytest.raises(UserError, match="length"):
        command("info", base, f"--context={context}")


def test_help_names_every_method_and_init() -> None:
    parser = argparse.ArgumentParser()
    expand_verb.configure(parser)
    text = parser.format_help()
    assert [name for name in (*METHODS, *INITS) if name not in text] == []


@pytest.mark.parametrize("verb", [expand_verb, info_verb])
def test_the_example_is_a_command_that_parses(verb: ModuleType) -> None:
    program, name, *words = verb.EXAMPLE.split()
    parser = argparse.ArgumentParser()
    verb.configure(parser)
    assert (program, f"longrecall.cli.{name}") == ("longrecall", verb.__name__)
    assert parser.parse_args(words)


def test_verbs_import_nothing_heavy() -> None:
    code = (
        "import sys; import longrecall.cli.expand, longrecall.cli.info; "
        "print([name for name in ('torch', 'transformers', 'numpy', 'yaml') if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={"PYTHONPATH": ":".join(path for path in sys.path if path)},
    )
    assert result.stdout.strip() == "[]"

"""Folders that bring Python files: no verb ever runs them, even when standard input says yes to every question."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from transformers import AutoProcessor, AutoTokenizer

from longrecall.cli.main import main
from longrecall.errors import UserError
from longrecall.models.checkpoint_tokenizer import load_tokenizer, read_tokenizer, without_checkpoint_code

CODE = """
from pathlib import Path
Path({mark!r}).write_text("ran")
from transformers import PreTrainedConfig, PreTrainedTokenizerFast
class Evil(PreTrainedTokenizerFast): pass
class EvilConfig(PreTrainedConfig): pass
def generate(model, *args, **kwargs): pass
"""
AUTO_MAP = {
    "AutoConfig": "evil.EvilConfig",
    "AutoModelForCausalLM": "evil.Evil",
    "AutoProcessor": "evil.Evil",
    "AutoTokenizer": [None, "evil.Evil"],
}
READ_TOKENS = ("init", "train", "eval", "harness", "diagnose", "generate")
"""The verbs that need the checkpoint's tokenizer."""

TEXT = "It was the best of times, it was the worst of times. " * 40

TASK = """task: tokenizer_task
custom_dataset: !function generator.make
test_split: test
output_type: loglikelihood
doc_to_text: "{{words}}"
doc_to_target: " x"
metric_list: [{metric: acc}]
metadata: {version: 1.0}
"""
GENERATOR = """
import datasets
from transformers import AutoProcessor, AutoTokenizer


def make(*, pretrained, **settings):
    tokenizer = AutoTokenizer.from_pretrained(pretrained, trust_remote_code=True)
    return {"test": datasets.Dataset.from_list([{"words": tokenizer.decode(tokenizer.encode("a b"))}] * 2)}
"""


def rewrite(path: Path, **change: object) -> None:
    raw = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(raw | change))


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """What the code of a hostile folder writes, when it runs."""
    return tmp_path / "ran"


@pytest.fixture(autouse=True)
def yes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Somebody who says yes to everything, and no traces in the cache of transformers."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 100))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))


@pytest.fixture
def stray(checkpoint: Path, tmp_path: Path, mark: Path) -> Path:
    """Every file names code, but transformers' own tokenizer class serves."""
    folder = tmp_path / "hostile"
    shutil.copytree(checkpoint, folder)
    (folder / "custom_generate").mkdir()
    for place in (folder, folder / "custom_generate"):
        for name in ("evil.py", "generate.py", "hostile.py"):
            (place / name).write_text(CODE.format(mark=str(mark)))
    for name in ("config", "tokenizer_config", "generation_config", "processor_config", "preprocessor_config"):
        rewrite(folder / f"{name}.json", auto_map=AUTO_MAP, custom_generate=str(folder), trust_remote_code=True)
    return folder


@pytest.fixture
def hostile(stray: Path) -> Path:
    """The tokenizer is a class that only the folder's code defines."""
    rewrite(stray / "tokenizer_config.json", tokenizer_class="Evil")
    return stray


@pytest.fixture
def command(tmp_path: Path) -> Callable[[str, Path], list[str]]:
    """A command of a verb that takes the checkpoint in a folder."""

    def make(verb: str, folder: Path) -> list[str]:
        text, recipe, tasks = tmp_path / "text.txt", tmp_path / "recipe.yaml", tmp_path / "tasks"
        description, where, out = tmp_path / "description.json", str(folder), str(tmp_path / "out")
        tasks.mkdir()
        (tasks / "task.yaml").write_text(TASK)
        (tasks / "generator.py").write_text(GENERATOR)
        text.write_text(TEXT)
        layer = {"mixer": {"type": "gla", "num_heads": 1, "key_dim": 2, "value_dim": 2}}
        description.write_text(json.dumps({"vocab_size": 258, "hidden_size": 4, "layers": [layer]}))
        run = {"output": out, "steps": 1, "batch_size": 1, "report_to": "none"}
        data = {"context_length": 16, "sources": [{"kind": "text", "path": str(text)}]}
        recipe.write_text(yaml.safe_dump({"model": {"checkpoint": where}, "data": data, "run": run}))
        sizes = ["--training-length", "64", "--multiple", "4", "--sequences", "2", "--recall-samples", "3"]
        task = ["--tasks", "lm_eval:tokenizer_task", "--option", f"lm_eval:tokenizer_task.data={tasks}"]
        return {
            "info": ["info", where],
            "expand": ["expand", where, out, "--method", "add_retrieval", "--layers", "0"],
            "bench": ["bench", where, "--length", "8", "--repeats", "1", "--decode-tokens", "1"],
            "init": ["init", str(description), out, "--tokenizer", where],
            "train": ["train", str(recipe)],
            "eval": ["eval", where, "--tasks", "copying", "--lengths", "32", "--samples", "1"],
            "harness": ["eval", where, *task, "--lengths", "32", "--samples", "1"],
            "diagnose": ["diagnose", where, "--text", str(text), *sizes],
            "generate": ["generate", where, "--prompt", "x", "--max-new-tokens", "1"],
        }[verb]

    return make


@pytest.mark.parametrize("verb", ["info", "expand", "bench", *READ_TOKENS])
def test_code_of_a_checkpoint_never_runs(
    verb: str,
    hostile: Path,
    mark: Path,
    tmp_path: Path,
    command: Callable[[str, Path], list[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = main(command(verb, hostile))
    answer = capsys.readouterr()
    assert not mark.exists() and "custom code" not in answer.out + answer.err
    if verb not in READ_TOKENS:
        assert code == 0
        return
    (line,) = answer.err.splitlines()
    assert code == 2 and not (tmp_path / "out").exists()
    assert f"{hostile / 'tokenizer_config.json'}: the tokenizer needs its own Python code" in line
    assert "evil.Evil" in line and '"PreTrainedTokenizerFast"' in line


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("verb", READ_TOKENS)
def test_code_that_is_not_needed_is_left_alone(
    verb: str, stray: Path, mark: Path, command: Callable[[str, Path], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    if verb == "harness":
        pytest.importorskip("lm_eval")
    assert main(command(verb, stray)) == 0, capsys.readouterr().err
    assert not mark.exists()


def test_the_way_out_that_the_line_names(hostile: Path, mark: Path) -> None:
    settings = json.loads((hostile / "tokenizer_config.json").read_text())
    del settings["auto_map"]
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (hostile / "tokenizer_config.json").write_text(json.dumps(settings))
    assert read_tokenizer(hostile).encode("ab") == [97, 98] and not mark.exists()


@pytest.mark.parametrize(
    ("tokenizer_config", "config"),
    [
        ({"tokenizer_class": None, "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}, {}),
        ({"tokenizer_class": 3, "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}, {}),
        ({"tokenizer_class": "Evil", "auto_map": ["evil.Evil", None]}, {}),
        ({"tokenizer_class": "Evil", "auto_map": "evil.Evil"}, {}),
        ({"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": "somebody/else--evil.Evil"}}, {}),
        # transformers has a tokenizer for this kind of model, which is not the one that the files mean.
        ({"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}, {"model_type": "mamba"}),
        ({"tokenizer_class": None, "auto_map": None}, {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}}),
    ],
)
def test_every_spelling_of_needed_code_is_refused(
    tokenizer_config: dict[str, object], config: dict[str, object], stray: Path, mark: Path
) -> None:
    rewrite(stray / "tokenizer_config.json", **tokenizer_config)
    rewrite(stray / "config.json", **config)
    with pytest.raises(UserError, match=r"config\.json: the tokenizer needs its own Python code \(.*evil\.Evil"):
        read_tokenizer(stray)
    assert not mark.exists()


def test_a_kind_of_model_that_only_code_knows(stray: Path, mark: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewrite(stray / "config.json", model_type="evil")
    assert main(["info", str(stray)]) == 2
    assert 'config.json: model_type "evil" is not a kind' in capsys.readouterr().err and not mark.exists()
    # fla's kinds are unknown to transformers, and known to us.
    rewrite(stray / "config.json", model_type="gla")
    assert load_tokenizer(stray, 258).encode("ab") == [97, 98] and not mark.exists()


def test_tokenizers_of_the_hub_come_without_code(
    hostile: Path, stray: Path, mark: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def download(repository: str, allow_patterns: list[str]) -> str:
        asked.extend(allow_patterns)
        return str(hostile)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(UserError, match="needs its own Python code"):
        load_tokenizer("somebody/some-model", 258)
    assert not mark.exists() and not any(".py" in name or "safetensors" in name for name in asked)


def test_others_cannot_run_it_either(hostile: Path, mark: Path) -> None:
    before = vars(AutoTokenizer)["from_pretrained"]
    with without_checkpoint_code():
        with pytest.raises(ValueError, match="custom code"):
            AutoTokenizer.from_pretrained(hostile, trust_remote_code=True)
        with pytest.raises(UserError, match='the class "Evil" is code of a checkpoint'):
            AutoProcessor.from_pretrained(hostile, trust_remote_code=True)
    assert not mark.exists() and vars(AutoTokenizer)["from_pretrained"] is before


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning")
def test_the_harness_as_a_command_runs_none_unless_told(
    stray: Path, mark: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    from longrecall.evaluation.harness.__main__ import main as harness

    monkeypatch.setattr(
        "lm_eval.__main__.cli_evaluate", lambda: AutoTokenizer.from_pretrained(stray, trust_remote_code=True)
    )
    monkeypatch.setattr(sys, "argv", ["harness", "--tasks", "x"])
    assert harness() == 0 and not mark.exists()
    monkeypatch.setattr(sys, "argv", ["harness", "--tasks", "x", "--trust_remote_code"])
    assert harness() == 0 and mark.exists()

"""The commands of the how-to pages run as they stand, one after the other, in an empty folder."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

import longrecall
from longrecall.cli.main import main

ROOT = Path(__file__).parents[2]
ASSETS = Path(longrecall.__path__[0]) / "assets"
SMALL = {
    "train": ["--set", "run.steps=1", "--set", "run.batch_size=1", "--set", "data.context_length=256"],
    "eval": ["--samples", "2", "--lengths", "256", "--pairs", "2", "--depths", "0.5"],
    "diagnose": ["--multiple", "2", "--parts", "perplexity", "--sequences", "2"],
    "generate": ["--max-new-tokens", "2"],
}
"""What a command is given besides, so that it runs in a second: the same work, less of it."""
ELSEWHERE = {
    "serve": "it waits for requests; tests/serving asks them",
    "consolidate": "the run that it names is one on 8 GPUs; tests/training/checkpoints makes some",
}


def lines(page: str, language: str = "sh") -> list[str]:
    text = (ROOT / "docs" / "how-to" / page).read_text(encoding="utf-8")
    blocks = re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)
    if language == "python":
        return blocks
    return [line for block in blocks for line in re.sub(r" \\\n\s*", " ", block).splitlines()]


def run(line: str) -> None:
    """One line of a shell block, in this process."""
    match shlex.split(line.replace("$BASE", str(ASSETS)), comments=True):
        case ["cp", source, target]:
            shutil.copyfile(source, target)
        case ["longrecall", verb, *rest] if verb not in ELSEWHERE:
            given = SMALL.get(verb, [])
            # A length of the page's own is replaced, not contradicted.
            assert main([verb, *rest, *(given if "--plan" not in rest else [])]) == 0, line
        case _:
            assert re.match(r"BASE=|longrecall |torchrun |curl |pip install |make ", line), f"{line}: teach this test"


@pytest.mark.parametrize("page", ["enlarge-mamba2.md", "forgets-past-2k.md"])
def test_the_commands_of_a_page_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for line in lines(page):
        run(line)
    reports = list(tmp_path.glob("*.html"))
    assert reports and all("<h2" in report.read_text(encoding="utf-8") for report in reports)


def test_a_qwen_is_enlarged_trained_and_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = lines("enlarge-qwen3.5.md", "python")
    exec(compile(code, "docs/how-to/enlarge-qwen3.5.md", "exec"), {})
    for line in lines("enlarge-qwen3.5.md"):
        run(line)
    assert (tmp_path / "for-transformers" / "modeling_longrecall.py").is_file()


def test_the_plan_for_eight_gpus_needs_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for line in lines("train-on-8-gpus.md"):
        run(line)


def test_python_of_the_other_pages_runs() -> None:
    (mixer,) = lines("add-a-mixer.md", "python")
    exec(compile(mixer, "docs/how-to/add-a-mixer.md", "exec"), {})
    (serve,) = lines("serve.md", "python")
    exec(compile(serve.replace("trained/final", str(ASSETS / "mamba2-base")), "docs/how-to/serve.md", "exec"), {})

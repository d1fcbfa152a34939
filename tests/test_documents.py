"""What the pages tell a reader to type works: every command parses, every recipe loads, every link has its heading."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import shlex
from pathlib import Path

import pytest

from longrecall.cli.main import VERBS, build_parser, main
from longrecall.cli.task_options import parse_task_options
from longrecall.evaluation.results import read_result
from longrecall.models.formats import FORMATS
from longrecall.surgery.layer_selection import select_layers
from longrecall.sweep.recipe import SweepRecipe
from longrecall.tasks.registry import task_names
from longrecall.tasks.suites import SUITES
from longrecall.training.recipe import Recipe

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("*/README.md"))]
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def commands(text: str) -> list[list[str]]:
    """The words after `longrecall` of each command, lines ended by a backslash joined and comments dropped."""
    joined = re.sub(r"\\\n\s*", " ", text)
    lines = re.findall(r"^(?:#? ?)(?:torchrun \S+ \S+ --no-python )?longrecall (.+)$", joined, flags=re.MULTILINE)
    return [shlex.split(line, comments=True) for line in lines]


def parser_of(verb: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    importlib.import_module(f"longrecall.cli.{verb}").configure(parser)
    return parser


def check(words: list[str]) -> None:
    args = build_parser((words[0],)).parse_args(words)
    if words[0] == "train":
        assert Recipe.load(ROOT / args.recipe, args.overrides).steps() > 0
    elif words[0] == "sweep":
        assert SweepRecipe.load(ROOT / args.recipe, args.overrides).tasks
    elif words[0] == "eval":
        tasks = (args.tasks or "phonebook").split(",")
        assert {task for task in tasks if not task.startswith("lm_eval:")} <= set(task_names())
        parse_task_options(args.option)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_of_a_page_is_taken(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    blocks = re.findall(r"```\w*\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for words in commands("\n".join(blocks)):
        check(words)


@pytest.mark.parametrize("recipe", RECIPES, ids=name_of)
def test_the_command_in_a_recipe_is_taken(recipe: Path) -> None:
    for words in commands(recipe.read_text(encoding="utf-8")):
        check(words)


@pytest.mark.parametrize("verb", VERBS)
def test_the_examples_of_a_verb_are_taken(verb: str) -> None:
    module = importlib.import_module(f"longrecall.cli.{verb}")
    found = commands("\n".join(line.strip() for line in module.EXAMPLE.splitlines()))
    assert found and {words[0] for words in found} == {verb}
    for words in found:
        check(words)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_prints_json_when_asked(verb: str) -> None:
    assert "--json" in parser_of(verb).format_help()


SCRIPTS = [*sorted((ROOT / "experiments").rglob("*.py")), *sorted((ROOT / "benchmarks").glob("*.py"))]
CARDS = sorted((ROOT / "src" / "longrecall" / "assets").glob("*/README.md"))


@pytest.mark.parametrize("page", [p for p in PAGES if p.name != "CHANGELOG.md"] + CARDS + SCRIPTS, ids=name_of)
def test_scripts_that_a_page_names_are_there(page: Path) -> None:
    """As a command they also do something when they are run; CHANGELOG.md speaks of what was there then."""
    text = page.read_text(encoding="utf-8")
    names = re.findall(r"python -m (experiments[.\w]+)", text)
    commands = [f"{name.replace('.', '/')}.py" for name in names] + re.findall(r"python (\w+/[\w/]+\.py)", text)
    for path in commands:
        assert 'if __name__ == "__main__":' in (ROOT / path).read_text(encoding="utf-8"), path
    # A benchmark names the file that it will write, which nobody may have recorded yet.
    endings = "py" if page in SCRIPTS else "py|json"
    for path in re.findall(rf"(?:experiments|benchmarks)/[\w/]+\.(?:{endings})\b", text):
        assert (ROOT / path).exists(), path


def headings(page: Path) -> set[str]:
    """The anchors of a page as GitHub makes them."""
    lines = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL).splitlines()
    titles = [line.lstrip("#").strip().lower() for line in lines if re.match(r"#{1,6} ", line)]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_a_heading(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            there = (page.parent / target).resolve() if target else page
            assert anchor in headings(there), f"{target}#{anchor}"


def test_the_help_of_eval_names_every_task() -> None:
    assert ", ".join(task_names()) in " ".join(
        build_parser(("eval",)).parse_args(["eval", "x"]).parser.format_help().split()
    )


def test_the_evaluation_page_names_every_suite() -> None:
    text = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
    line = re.search(r"^Suites: (.*?)\n\n", text + "\n\n", flags=re.MULTILINE | re.DOTALL)
    assert line is not None
    told, first = set(), ""
    for name in re.findall(r"`([\w-]+)`", line[1]):
        first = name.split("-")[0] if not name.startswith("-") else first
        told.add(first + name if name.startswith("-") else name)
    assert told == set(SUITES)


# ---- the README: its commands run, and its numbers are those of the records

README = ROOT / "README.md"
ASSETS = ROOT / "src" / "longrecall" / "assets"
SMALL = {
    "train": ["--set", "run.tokens=512", "--set", "run.batch_size=1", "--set", "run.save_every=9"],
    "eval": ["--samples", "1", "--lengths", "256", "--pairs", "2", "--depths", "0.5"],
    "sweep": ["--dry-run"],
}
"""What a command of the README is given besides, so that it runs in a second: the same work, less of it."""


def readme_text() -> str:
    return " ".join(README.read_text(encoding="utf-8").split())


def readme_commands() -> list[list[str]]:
    return commands("\n".join(re.findall(r"```sh\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)))


def test_every_command_of_the_readme_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other in an empty folder, CKPT the shipped model and TEXT a shipped book."""
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text((ASSETS / "text" / "train.txt").read_text(encoding="utf-8")[:20000])
    found = readme_commands()
    assert len(found) == 6
    for words in found:
        real = [w.replace("CKPT", str(ASSETS / "mamba2-base")).replace("TEXT", "text.txt") for w in words]
        assert main([*real, *SMALL.get(words[0], [])]) == 0, shlex.join(words)
    made = {"before.json", "after.json", "report.html", "bigger", "trained", "stock"}
    assert made <= {path.name for path in tmp_path.iterdir()}
    assert "<h2" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_the_python_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    names: dict[str, object] = {}
    exec(code.replace('"CKPT"', repr(str(ASSETS / "mamba2-base"))), names)
    assert "model" in names and (tmp_path / "bigger" / "config.json").exists()


def test_the_readme_is_short_and_says_the_price_before_the_demo() -> None:
    lines = README.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 120
    text = "\n".join(lines)
    before = text[: text.index("make demo")]
    assert "GB of disk" in before and "about five minutes on two cores" in " ".join(before.split())
    # Where a name of the program stands first, its words have been said.
    assert text.index('("phone book")') < text.index("phonebook")


def test_the_readme_says_what_the_demo_recorded() -> None:
    results = {n: read_result(ROOT / "experiments" / "results" / "demo" / f"{n}.json") for n in DEMO}
    at_24 = {
        name: entry["value"]
        for name, result in results.items()
        for entry in result["results"]
        if entry["task"] == "phonebook" and entry["cell"]["pairs"] == 24
    }
    bits = {name: result["summary"]["bits_per_byte"] for name, result in results.items()}
    text = readme_text()
    words = (
        "recalls {before:.0%} of the numbers among 24 pairs before, {after:.0%} after, and the control {control:.0%}"
    )
    assert words.format(**at_24) in text
    words = "ordinary text takes {after:.2f} bits per byte instead of {before:.2f} (control {control:.2f})"
    assert words.format(**bits) in text
    sizes = {name: result["checkpoint"]["state_size"] for name, result in results.items()}
    assert sizes["after"] == 4 * sizes["before"] and "enlarges its state four times" in text


DEMO = ("before", "after", "control")


def test_the_readme_says_what_its_picture_shows() -> None:
    rows = json.loads((ROOT / "experiments" / "results" / "post_training_mamba2.json").read_text())["results"]

    def share(arm: str) -> float:
        found = [row["phonebook"]["32"] for row in rows if row["arm"] == arm and not row.get("state_passing")]
        return sum(right for right, *_ in found) / sum(asked for _, asked, *_ in found)

    text = readme_text()
    assert f"Among 32 pairs it gives {share('base'):.0%} of the numbers" in text
    assert f"a state four times as large and 9.8M more tokens it gives {share('perturb'):.0%}" in text
    assert f'without a larger state ("not enlarged") {share("plain"):.0%}' in text
    assert f"({share('perturb'):.0%} and {share('preserve'):.0%} among 32 pairs)" in text


def test_the_readme_says_which_layers_and_which_init() -> None:
    text = readme_text()
    assert "takes layers 0, 6, 12 and so on. A model of up to six layers gets layer 0 alone" in text
    assert select_layers("every:6", 13) == (0, 6, 12)
    assert [select_layers("every:6", layers) for layers in (3, 6, 7)] == [(0,), (0,), (0, 6)]
    assert parser_of("expand").get_default("init") == "preserve" and "Keep `preserve`, the default" in text
    others = [entry for entry in FORMATS.values() if entry.name != "native"]
    assert f"[{len(others)} formats of others]" in text

"""What the pages tell a reader to type works: every command parses, every recipe loads, every link has its heading."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
from pathlib import Path

import pytest

from longrecall.cli import eval as eval_verb
from longrecall.cli.main import VERBS, build_parser
from longrecall.cli.task_options import parse_task_options
from longrecall.evaluation.suites import SUITES
from longrecall.sweep.recipe import SweepRecipe
from longrecall.tasks.registry import task_names
from longrecall.training.recipe import Recipe

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("*/README.md"))]
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
    assert task_names() == eval_verb.TASK_NAMES


def test_the_evaluation_page_names_every_suite() -> None:
    text = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
    line = re.search(r"^Suites: (.*?)\n\n", text + "\n\n", flags=re.MULTILINE | re.DOTALL)
    assert line is not None
    told, first = set(), ""
    for name in re.findall(r"`([\w-]+)`", line[1]):
        first = name.split("-")[0] if not name.startswith("-") else first
        told.add(first + name if name.startswith("-") else name)
    assert told == set(SUITES)

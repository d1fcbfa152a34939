"""The pages of the papers: up to date, every table and figure once, no number of ours typed, every command real."""

from __future__ import annotations

import importlib
import itertools
import re
import shlex
from pathlib import Path

import pytest

from experiments.common import pages
from experiments.papers import prices, records, report
from longrecall.surgery.layer_selection import select_layers
from longrecall.training.recipe import Recipe

ITEMS = {"statex": (12, 6), "headwise": (12, 3), "resona": (11, 5)}
"""Tables and figures of each paper; the fourth one, a public text, has figures without numbers."""


def test_committed_pages_are_what_the_report_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["report.py", "--check"])
    with pytest.raises(SystemExit) as stopped:
        report.main()
    assert stopped.value.code == 0, "run python -m experiments.papers.report"
    # A number that changed is seen.
    monkeypatch.setattr(report, "made", lambda: {report.INDEX: "another page"})
    with pytest.raises(SystemExit) as stopped:
        report.main()
    assert stopped.value.code == 1


@pytest.mark.parametrize("name", report.PAPERS)
def test_every_table_and_figure_is_there_once_with_all_that_a_claim_needs(name: str) -> None:
    entries = report.paper(name)["entries"]
    items = [entry["item"] for entry in entries]
    if name in ITEMS:
        tables, figures = ITEMS[name]
        every = {f"table {n + 1}" for n in range(tables)} | {f"figure {n + 1}" for n in range(figures)}
        assert set(items) == every
    assert len(set(items)) == len(items)
    for entry in entries:
        assert entry["verdict"] in report.paper("index")["verdicts"]
        # What is not shown as a whole says what was tried, what it would cost and whether real weights are needed.
        whole = entry["verdict"] in ("shown", "no claim")
        assert whole != ("open" in entry and "weights" in entry), entry["item"]
        # Of our numbers none is typed: decimals come from the records.
        words = [entry["here"], entry.get("open", "")]
        typed = [re.findall(r"± ?[.]|[+-]\.\d|\.\d{3}", records.CALL.sub("", text)) for text in words]
        assert typed == [[], []], entry["item"]
    said = {command for entry in entries for command in entry["command"]}
    assert said == set(report.paper(name)["commands"])


@pytest.mark.parametrize("name", report.PAPERS)
def test_scripts_know_the_options_that_they_are_given(name: str) -> None:
    """Commands of `longrecall` are parsed by tests/test_documents.py."""
    text = re.sub(r"\\\n\s*", " ", "\n".join(report.paper(name)["commands"].values()))
    for line in re.findall(r"^python .*$", text, flags=re.MULTILINE):
        words = shlex.split(line, comments=True)
        if words[1] == "-m":
            module = importlib.import_module(words[2])
            sources = [Path(str(module.__file__)), pages.ROOT / "experiments" / "common" / "command.py"]
        else:
            sources = [pages.ROOT / words[1]]
        source = "\n".join(path.read_text(encoding="utf-8") for path in sources)
        for option in (word for word in words if word.startswith("--")):
            assert f'"{option}"' in source, line


@pytest.mark.parametrize("name", report.PAPERS)
def test_the_first_ten_lines_say_what_is_shown_with_an_interval(name: str) -> None:
    evidence = list(report.paper("pages"))
    for page in (report.INDEX, f"papers/{report.paper(name)['page']}", *evidence):
        lines = (pages.DOCS / page).read_text(encoding="utf-8").splitlines()
        assert "shown" in " ".join(lines[:10]).lower() and " ± " in " ".join(lines[:10]), page


def test_an_unknown_number_and_a_long_cell_are_errors() -> None:
    with pytest.raises(KeyError, match="nonsense"):
        records.filled("{nonsense: a}")
    with pytest.raises(ValueError, match="201 characters, at most 200"):
        report.checked(f"| {'x' * 201} |\n")


def test_prices_come_from_the_recorded_speed() -> None:
    """15B tokens of the 400M model at the recorded tokens a second: the price is that time."""
    speed = records.bench("gpu_training")["gated_delta_net_400m: step, loss alone"]["tokens_per_second"]
    hours = prices.hours_of("scaling_400m gated_delta_net_400m")
    # The run has whole steps of 524,288 tokens: at most one more than 15B.
    assert hours == pytest.approx(15e9 / speed / 3600, rel=1e-4)
    assert prices.hours_of("scaling_400m gated_delta_net_400m x3") == pytest.approx(3 * hours)
    # 500 steps of 8 GPUs: the plan of one GPU counts an eighth of the tokens.
    of_token, whole = prices.training_flops("length_generalization", "mamba2_1.3b")
    assert whole / of_token == 500 * 524_288
    assert prices.price({"runs": ["about 1e6 1e6"]}) == prices.price({"hours": 1}) == prices.SMALL
    assert prices.price({}) == ""


def comment(recipe: str) -> str:
    """The first lines of a recipe, joined."""
    lines = (pages.ROOT / "recipes" / recipe).read_text(encoding="utf-8").splitlines()
    return " ".join(line.lstrip("# ") for line in itertools.takewhile(lambda line: line.startswith("#"), lines))


def test_other_pages_say_of_the_papers_what_the_papers_say() -> None:
    """Five sentences had said more: on settings, on what starts anew, layers, the protocol and frozen encoders."""
    own = comment("gpu_bf16.yaml")
    assert "StateX's settings" not in own and "recipes/papers" in own
    ours, theirs = (
        Recipe.load(pages.ROOT / "recipes" / path) for path in ("gpu_bf16.yaml", "papers/statex_gla_1.3b.yaml")
    )
    assert ours.data.context_length != theirs.data.context_length and ours.initial_state != theirs.initial_state
    pages_of = {name: (pages.ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/surgery.md")}
    # Section 4.4 of StateX: exactly four layers.
    assert [len(select_layers(f"every:{step}", 48)) for step in (6, 12)] == [8, 4]
    readme = " ".join(pages_of["README.md"].split())
    assert "Of 48 layers it takes 8, where StateX takes 4 (`every:12`)" in readme
    # Appendix A.4: A and dt_bias of Mamba-2 too.
    assert "--set statex=true" in pages_of["docs/surgery.md"] and "the papers' own" not in pages_of["docs/surgery.md"]
    assert "--layers every:12 --init reinit --set statex=true" in comment("papers/statex_mamba2_1.3b.yaml")
    sweep = comment("sweeps/mqar_table11.yaml")
    assert not sweep.split(". ")[2].startswith("Protocol of") and "RWKV-5" in sweep and "RMSNorm" in sweep
    # Nothing in RESONA says that its encoders are random and frozen.
    hard = next(line for line in (pages.DOCS / "retrieval.md").read_text().splitlines() if "| `hard` |" in line)
    assert "algorithm 2" in hard and "does not say" in hard

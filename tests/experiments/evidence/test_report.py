"""docs/evidence.md and its folder say what the recorded results say."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from experiments.common import pages
from experiments.common.intervals import t_interval
from experiments.evidence import records, report

ROOT = Path(__file__).resolve().parents[3]
DECIMAL = re.compile(r"\d*\.\d+(?: ± \.\d+)?")


def page_text() -> str:
    """The pages of the study without their tables, as one line."""
    texts = [path.read_text(encoding="utf-8") for path in pages.pages_of(report.PAGE)]
    return " ".join(pages.MARKED.sub("", "\n".join(texts)).split())


def row(right: list[int], asked: int, error: float = 0.0) -> dict[str, Any]:
    return {"phonebook": {str(i): [r, asked, error] for i, r in enumerate(right)}}


def test_share_pools_counts_and_spans_the_seeds() -> None:
    value, low, high, asked = records.share([row([r], 1000) for r in (400, 500, 600)], "phonebook", "0")
    assert (value, asked) == (0.5, 3000)
    # Standard deviation of the shares .1, t of 2 degrees of freedom 4.3027: half width .2484, wider than Wilson's .018.
    assert low == pytest.approx(0.5 - 4.30265 * 0.1 / math.sqrt(3), abs=1e-4)
    assert high == pytest.approx(0.5 + 4.30265 * 0.1 / math.sqrt(3), abs=1e-4)


def test_equal_seeds_keep_the_wilson_interval() -> None:
    value, low, high, _ = records.share([row([500], 1000)] * 3, "phonebook", "0")
    # 1.96 * sqrt(.25 / 3000) = .0179; Wilson shrinks it by less than .1%.
    assert value == 0.5 and high - value == pytest.approx(value - low)
    assert high - value == pytest.approx(0.0179, abs=1e-4)


def test_books_that_hang_together_widen_the_interval() -> None:
    independent = math.sqrt(0.25 / 1000)
    _, narrow, _, _ = records.share([row([500], 1000, independent)], "phonebook", "0")
    _, wide, _, _ = records.share([row([500], 1000, 2 * independent)], "phonebook", "0")
    # Twice the standard error: a quarter of the answers, nearly twice the width.
    assert (0.5 - wide) / (0.5 - narrow) == pytest.approx(2, rel=0.01)


def test_a_difference_pairs_the_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(report.COLUMNS, "tiny", (("phonebook", "0"), ("bits_per_byte", "512–1k")))

    def model(arm: str, seed: int, right: int, bits: float) -> dict[str, Any]:
        found = row([right], 1000) | {"bits_per_byte": [[9.0, 0.1], [bits, 0.1]]}
        return found | {"arm": arm, "seed": seed, "state_passing": False}

    # The seeds lie far apart and come in any order; seed by seed the arm is .05 above, give or take .01.
    results = [model("reinit", s, r, 2.0 + s) for s, r in ((2, 360), (0, 150), (1, 240))]
    results += [model("plain", s, r, 1.5 + s) for s, r in ((1, 200), (2, 300), (0, 100))]
    study = {"settings": {"edges": [0, 512, 1024]}, "results": results}
    rows, others = (records.rows_of(study, arm, False) for arm in ("reinit", "plain"))
    # Half width 4.30265 * .01 / sqrt(3) = .025; the bits differ by .5 in every seed.
    assert report.differences("tiny", study, rows, others) == ["**+.050 ± .025**", "**+.500 ± .000**"]


def test_rates_say_how_they_were_chosen() -> None:
    rates = report.tables()["rates of mamba2"].splitlines()[2:]
    assert [line.split(" | ")[1] for line in rates] == ["off"] * 6 + ["on"] * 6
    # One choice a line, and it is the one that the study went on with.
    study = pages.read(records.STUDIES["mamba2"])
    tried = sorted({r["rate"] for r in study["selection"]})
    for line in rates:
        arm, passing, *scores = line.strip("| ").split(" | ")
        chosen = [rate for rate, score in zip(tried, scores, strict=True) if score.startswith("**")]
        assert chosen == list({r["rate"] for r in records.rows_of(study, arm, passing == "on")})


def test_state_sizes_are_those_of_the_candidates() -> None:
    from experiments.pretraining import pretrain
    from longrecall.models.config import RecurrentConfig
    from longrecall.models.recurrent_lm import RecurrentLM

    for name, (groups, state) in report.SIZES.items():
        config = RecurrentConfig(vocab_size=8, **pretrain.CANDIDATES[name])
        assert config.layers[0]["mixer"].get("groups", 1) == groups
        assert RecurrentLM(config).state_size() == state


def test_the_shipped_base_is_the_trial_that_is_named() -> None:
    from longrecall.models.loading import load

    base = load(ROOT / "src" / "longrecall" / "assets" / "mamba2-base")
    assert base.state_size() == report.SIZES[report.SHIPPED.split(":")[0]][1]
    assert f"**{report.SHIPPED}** | {base.state_size():,} |" in report.tables()["states"]
    assert base.state_size() == pages.read(records.STUDIES["mamba2"])["state_size"]["before"]


def test_the_card_of_the_base_says_what_was_measured() -> None:
    card = (ROOT / "src" / "longrecall" / "assets" / "mamba2-base" / "README.md").read_text(encoding="utf-8")
    base = records.rows_of(pages.read(records.STUDIES["mamba2"]), "base", None)[0]
    for task, head in (
        ("phonebook", "names of two letters, numbers of two digits"),
        ("one_letter", "one letter, one digit"),
        ("passkey", "pass keys found"),
    ):
        (line,) = [line for line in card.splitlines() if line.startswith(f"| {head} |")]
        cells = [cell.strip() for cell in line.strip("|").split("|")[1:]]
        assert [c for c in cells if c] == [pages.number(right / asked) for right, asked, *_ in base[task].values()]
    assert " | ".join(f"{bits:.3f}" for bits, _ in base["bits_per_byte"]) in card


def test_every_decimal_of_the_prose_stands_in_a_table_or_is_asserted_here() -> None:
    tables = " ".join(report.tables().values())
    known = set(DECIMAL.findall(tables)) | set(re.findall(r"\d*\.\d+", tables))
    # Asserted below.
    known |= {".080 ± .079", ".160 ± .061", ".244 ± .102", ".285", ".537", ".367"}
    known |= {".018", ".66", ".70", ".34", ".37", ".17", ".19", ".01", ".03"}
    # Millions of tokens and of parameters, versions, the setting of passing, a share of rows, guessing, the plateau.
    known |= {"9.8", "4.6", "1.2", "0.5", "0.6", "2.11", ".0", "5.17", "3.6", ".25", "12.5", ".5", ".6"}
    assert sorted(set(DECIMAL.findall(page_text())) - known) == []


def test_numbers_that_stand_in_no_table_are_those_of_the_records() -> None:
    text, study = page_text(), pages.read(records.STUDIES["mamba2"])

    def values(arm: str, passing: bool, task: str, cell: str) -> list[float]:
        return [records.value(study, row, task, cell) for row in records.rows_of(study, arm, passing)]

    def mean(*cell: Any) -> float:
        return sum(values(*cell)) / 3

    def difference(one: tuple[str, bool], other: tuple[str, bool], *cell: str) -> str:
        pairs = zip(values(*one, *cell), values(*other, *cell), strict=True)
        return "{} ± {}".format(*map(pages.number, t_interval([a - b for a, b in pairs])))

    seeds = values("handover", False, "phonebook", "16")
    assert f"lie between {pages.number(min(seeds))} and {pages.number(max(seeds))}" in text
    books = ("phonebook", "32"), ("one_letter", "24")
    above = [difference(("perturb", True), ("plain", False), *book) for book in books]
    assert "with passing is still {} and {} above plain".format(*above) in text
    preserve = difference(("preserve", False), ("reinit", False), "phonebook", "32")
    assert f"by +.104 ± .069 and +{preserve}" in text
    lost = {
        arm: [pages.number(mean(arm, False, *book) - mean(arm, True, *book)) for book in books]
        for arm in ("perturb", "preserve", "plain")
    }
    assert "`perturb` {} of 32 two-letter pairs (.471 → .397) and {} of 24".format(*lost["perturb"]) in text
    assert "`preserve` {} and {}, plain training {} and {}".format(*lost["preserve"], *lost["plain"]) in text
    for length, words in (
        ("1024", "{} to {} of the keys at"),
        ("2048", "{} to {} at 2048"),
        ("4096", "{} to {} at 4096"),
    ):
        found = [mean(arm, True, "passkey", length) for arm in records.ARMS]
        assert words.format(*(pages.number(f(found), digits=2) for f in (min, max))) in text
    near = [
        mean(arm, True, "bits_per_byte", span) - mean(arm, False, "bits_per_byte", span)
        for arm in records.ARMS
        for span in ("0–256", "256–512")
    ]
    assert f"worse, by {pages.number(min(near))} to {pages.number(max(near))}" in text
    looks = [
        row["phonebook"]["32"]
        for name in ("pretraining_mamba2_larger.json", "pretraining_mamba2.json")
        for row in pages.read(name)["log"]
        if row["step"] == 14000
    ]
    shown = [pages.number(value) for part in (looks[:3], looks[3:]) for value in sorted(part)]
    assert "after 14,000 steps, they recalled {}, {} and {}, the small ones {}, {} and {}".format(*shown) in text


def test_passing_changes_little_of_gla() -> None:
    text, study = page_text(), pages.read(records.STUDIES["gla"])
    assert "changes no recall of more than one pair by more than .03" in text and "no arm rises by .01" in text
    for arm in records.ARMS:
        off, on = (records.rows_of(study, arm, passing) for passing in (False, True))
        for cell in list(study["results"][0]["phonebook"])[1:]:
            of = [sum(records.value(study, row, "phonebook", cell) for row in rows) / 3 for rows in (off, on)]
            assert abs(of[1] - of[0]) < 0.03
        for rows in (off, on):
            first, last = (
                sum(records.value(study, row, "bits_per_byte", s) for row in rows) for s in ("512–1k", "8k–16k")
            )
            assert (last - first) / 3 < 0.01


def test_figures_name_every_arm(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from experiments.evidence import figures

    figures.draw(tmp_path)
    drawn = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    # Every one of them stands on a page, and no page shows another.
    assert sorted(drawn) == sorted(re.findall(r"\((?:\.\./)?figures/(.*?)\)", page_text()))
    for text in drawn.values():
        assert all(f">{name}<" in text for name in ("before", "not enlarged", *records.ARMS[1:]))
    assert "state passing off" in drawn["bits_per_byte.svg"]
    assert "state passing on" in drawn["passkey.svg"]

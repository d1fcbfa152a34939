"""Recall by state size: rows with needles, the models, the recall lengths, and the tables made from a small run."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.common import intervals, pages
from experiments.state_recall import experiment, needle_rows, records, report

ROOT = Path(__file__).resolve().parents[3]
NEEDLE = re.compile(rb"@([a-z]{2}):([0-9a-f-]+)\n")
QUESTION = re.compile(rb"\?([a-z]{2}):([0-9a-f-]+)\n")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    text = (ROOT / "src" / "longrecall" / "assets" / "text" / "held_out.txt").read_bytes()[:40_000]
    path = tmp_path_factory.mktemp("corpus") / "books.txt"
    path.write_bytes(text)
    return path


def text_of(ids: np.ndarray) -> bytes:
    return bytes(int(token) for token in ids if token < 256)


def check_answers(ids: np.ndarray, labels: np.ndarray) -> int:
    """What is labelled are the answers, and each is what its needle says; returns the whole questions."""
    text = text_of(ids)
    known = dict(NEEDLE.findall(text))
    assert len(known) == len(NEEDLE.findall(text))
    found = QUESTION.findall(text)
    assert all(known[key] == value for key, value in found)
    labelled = bytes(int(label) for label in labels if label >= 0)
    assert labelled.startswith(b"".join(value for _, value in found))
    at = np.flatnonzero(labels >= 0)
    assert (labels[at] == ids[at]).all()
    return len(found)


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(["number", "uuid"]), st.integers(1, 36), st.lists(st.integers(1, 20), min_size=1), st.integers(0, 9)
)
def test_rows_of_needles_answer_themselves(kind: str, width: int, counts: list[int], seed: int) -> None:
    width = min(width, needle_rows.WIDTHS[kind])
    length = 21 * (width + needle_rows.LINE) + seed
    ids, labels = needle_rows.needle_rows(np.random.default_rng(seed), np.array(counts), kind, width, length)
    assert ids.shape == labels.shape == (len(counts), length)
    for count, one, scored in zip(counts, ids, labels, strict=True):
        assert len(NEEDLE.findall(text_of(one))) == count
        assert check_answers(one, scored) >= 1


def test_uuids_are_uuids() -> None:
    lines = needle_rows.draw_lines(np.random.default_rng(0), 2, 3, "uuid", 36)
    form = re.compile(r"@[a-z]{2}:[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\n")
    assert all(form.fullmatch(text_of(line).decode()) for line in lines.reshape(6, -1))


@pytest.mark.parametrize("kind", ["number", "uuid"])
def test_exams_ask_each_needle_once(kind: str) -> None:
    ids, labels = needle_rows.needle_exam(np.random.default_rng(1), 4, 6, 3, kind)
    for one, scored in zip(ids, labels, strict=True):
        assert one[0] == 256 and check_answers(one, scored) == 3
        assert len({key for key, _ in QUESTION.findall(text_of(one))}) == 3
        assert int((scored >= 0).sum()) == 3 * needle_rows.WIDTHS[kind]


@pytest.mark.parametrize("kind", ["number", "uuid"])
def test_needles_in_prose_can_be_anywhere(corpus: Path, kind: str) -> None:
    tokens = np.frombuffer(corpus.read_bytes(), np.uint8).astype(np.int16)
    ids, labels = needle_rows.prose_exam(np.random.default_rng(2), tokens, 40, 300, kind)
    places = []
    for one, scored in zip(ids, labels, strict=True):
        assert len(one) == 301 and check_answers(one, scored) == 1
        assert int((scored >= 0).sum()) == needle_rows.WIDTHS[kind]
        places.append(text_of(one).index(b"@"))
    # 40 uniform places: a chance below 1e-5 that the first or the last quarter has none.
    room = 300 - 2 * (needle_rows.LINE + needle_rows.WIDTHS[kind])
    assert min(places) < room / 4 and max(places) > room * 3 / 4


def test_batches_follow_from_seed_and_step(corpus: Path) -> None:
    tokens = np.frombuffer(corpus.read_bytes(), np.uint8).astype(np.int16)
    mixture = needle_rows.Mixture(3, 100, 256, 2, 5, 2, tokens)
    for step in (0, 7, 40, 99):
        ids, labels = mixture.batch(step)
        again = mixture.batch(step)
        assert ids.shape == labels.shape == (9, 256) and (ids[:, 0] == 256).all() and (labels[:, 0] == -100).all()
        assert (ids == again[0]).all() and (labels == again[1]).all()
        assert (ids[:2, 1:] == labels[:2, 1:]).all()
        assert all(check_answers(*row) >= 1 for row in zip(ids[2:7], labels[2:7], strict=True))
    assert (mixture.batch(7)[0] != mixture.batch(8)[0]).any()
    # Short values and few needles come first.
    early = [NEEDLE.findall(text_of(row)) for row in mixture.batch(0)[0][2:7]]
    assert max(len(found) for found in early) <= 8 and max(len(v) for f in early for _, v in f) <= 2


def test_cut_rows_are_shorter_and_as_many_tokens(corpus: Path) -> None:
    tokens = np.frombuffer(corpus.read_bytes(), np.uint8).astype(np.int16)
    mixture = needle_rows.Mixture(3, 100, 512, 1, 4, 1, tokens, 0.1, 0.5, cuts=((0.4, 4), (0.6, 2)))
    for step, pieces in ((0, 4), (39, 4), (40, 2), (59, 2), (60, 1), (99, 1)):
        ids, labels = mixture.batch(step)
        assert mixture.pieces(step) == pieces and ids.shape == labels.shape == (6 * pieces, 512 // pieces)
        assert (ids[:, 0] == 256).all()
        needles = slice(pieces, 5 * pieces)
        assert all(check_answers(*row) >= 1 for row in zip(ids[needles], labels[needles], strict=True))


def test_recall_length_ends_at_the_first_failure() -> None:
    shares = {64: 1.0, 128: 0.75, 192: 0.5, 256: 0.9}
    points = [{"length": length, "right": 100 * share, "asked": 100} for length, share in shares.items()]
    assert experiment.recall_length(points) == {"0.5": 128, "0.6": 128, "0.7": 128, "0.8": 64}
    assert experiment.recall_length([{"length": 64, "right": 1, "asked": 2}])["0.5"] == 0
    points = [{"length": 64, "right": 0, "asked": 2, "characters_right": 9, "characters": 10}]
    assert experiment.recall_length(points, "characters_right", "characters")["0.8"] == 64


def test_a_model_that_knows_is_right_and_one_that_guesses_is_not() -> None:
    class Oracle(torch.nn.Module):
        """Says the next token of what it reads, which it gets to see; or always a zero."""

        def __init__(self, knows: bool) -> None:
            super().__init__()
            self.anchor, self.knows = torch.nn.Parameter(torch.zeros(1)), knows

        def forward(self, ids: torch.Tensor, past_key_values: Any = None) -> Any:
            said = ids.roll(-1, 1) if self.knows else torch.full_like(ids, ord("0"))
            logits = torch.nn.functional.one_hot(said, 258).float()
            return type("Out", (), {"logits": logits, "past_key_values": None})()

    args = experiment.arguments(
        ["--study", "trend", "--corpus", "a", "--validation", "b", "--out", "c", "--queries", "64"]
    )
    for knows, right in ((True, 64), (False, 0)):
        point = experiment.exam_of_needles("number", 128, args, 0).taken(Oracle(knows))
        assert (point["needles"], point["asked"], point["right"]) == (12, 64, right)
        assert (point["characters_right"] == 5 * 64) == knows


def test_an_exam_in_parts_has_every_row_once(monkeypatch: pytest.MonkeyPatch) -> None:
    args = experiment.arguments(
        ["--study", "trend", "--corpus", "a", "--validation", "b", "--out", "c", "--queries", "50"]
    )
    # 7 rows of 8 questions are 50 of them or a few more; a row has (12 + 8) lines of 10 bytes.
    monkeypatch.setattr(experiment, "AT_ONCE", 600)
    exam = experiment.exam_of_needles("number", 128, args, 0)
    assert [part[0].shape for part in exam.parts] == [(3, 201), (3, 201), (1, 201)]
    rows = np.concatenate([part[0] for part in exam.parts])
    assert len(np.unique(rows, axis=0)) == 7
    again = experiment.exam_of_needles("number", 128, args, 0)
    assert all((one[0] == other[0]).all() for one, other in zip(exam.parts, again.parts, strict=True))


def test_every_mixer_has_its_own_learning_rate() -> None:
    given = ["--tiny", "--study", "trend", "--corpus", "a", "--validation", "b", "--out", "c", "--first-seed", "3"]
    args = experiment.arguments([*given, "--learning-rate", "0.5", "--rates", "gla:0.25", "transformer:0.125"])
    found = {run.plan.name: (run.plan.learning_rate, run.plan.seed) for run in experiment.begun(args, "cpu")}
    rates = {"gated_delta_net:1": 0.5, "gated_delta_net:2": 0.5, "gla:1": 0.25, "gla:2": 0.25, "transformer": 0.125}
    assert found == {f"{name}/{seed}": (rate, seed) for seed in (3, 4) for name, rate in rates.items()}
    # The rates of the optimizer itself.
    run = next(run for run in experiment.begun(args, "cpu") if run.plan.name == "gla:2/4")
    assert {float(group["lr"]) for group in run.optimizer.param_groups} == {0.25}


@pytest.mark.parametrize("name", ["trend", "ablation"])
def test_state_sizes_are_those_of_the_factors(name: str) -> None:
    from longrecall.models.config import RecurrentConfig

    given = ["--study", name, "--corpus", "a", "--validation", "b", "--out", "c", "--ablation-factor", "8"]
    args = experiment.arguments(given)
    sizes = {key: RecurrentConfig(**how).state_size() for key, how in experiment.described_models(args).items()}
    base = args.layers * args.heads * args.head_dim**2
    if name == "trend":
        assert sizes == {f"{m}:{e}": e * base for m in ("gated_delta_net", "gla") for e in experiment.FACTORS} | {
            "transformer": 0
        }
    else:
        assert sizes == {form: base * (1 if form == "none" else 8) for form in experiment.FORMS}


def test_lines_are_least_squares() -> None:
    g = np.random.default_rng(5)
    x, noise = np.repeat([1.0, 2.0, 4.0, 8.0], 2), g.normal(size=8)
    y = 3.0 + 2.0 * x + noise
    found = intervals.line(list(x), list(y))
    (slope, intercept), covariance = np.polyfit(x, y, 1, cov=True)
    # float64 sums of eight numbers.
    assert found.slope == pytest.approx(slope, rel=1e-10) and found.intercept == pytest.approx(intercept, rel=1e-10)
    assert found.half == pytest.approx(2.4469 * math.sqrt(covariance[0, 0]), rel=1e-4)
    assert found.explained == pytest.approx(np.corrcoef(x, y)[0, 1] ** 2, rel=1e-10)
    assert intervals.line([1.0, 1.0], [1.0, 2.0]) is None


def test_models_beyond_the_longest_text_are_left_out_of_the_lines() -> None:
    def row(factor: int, length: int) -> dict[str, Any]:
        points = {"needles:number": [{"length": 64}, {"length": 1024}]}
        lengths = {"needles:number": {"0.5": length}}
        sizes = {"state_size": 1000 * factor, "parameters": 1, "seed": 0}
        return {"model": f"gla:{factor}", "points": points, "recall_length": lengths, **sizes}

    record = {"results": [row(1, 0), row(2, 128), row(4, 256), row(8, 1024)]}
    straight, power, out = records.fitted(record, "gla", "number", 0.5)
    assert (straight.points, power.points, out) == (3, 2, 1)
    assert power.slope == pytest.approx(1.0) and power.half is None
    assert report.shown(record["results"], "needles:number", 0.5) == "0, 128, 256, ≥ 1024"
    means = [report.mean_length(record["results"][a : a + 2], "needles:number", 0.5, records.WHOLE) for a in (1, 2)]
    assert means == ["192", "≥ 640"]


def test_a_small_run_gives_tables_and_a_figure(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    paths = ["--corpus", str(corpus), "--validation", str(corpus)]
    for name, seed, file in (("trend", 0, "trend_0"), ("trend", 1, "trend_1"), ("ablation", 0, "ablation")):
        out = str(tmp_path / f"state_recall_{file}.json")
        words = ["--tiny", "--study", name, "--seeds", "1", "--first-seed", str(seed), "--equal"]
        experiment.main([*words, *paths, "--out", out])
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    monkeypatch.setattr(intervals, "DRAWS", 20)
    trend, ablation = records.joined(records.TREND), records.joined(records.ABLATION)
    assert len(trend["results"]) == 2 * (2 * 2 + 2 + 1) and len(ablation["results"]) == len(experiment.FORMS)
    assert sorted(row["seed"] for row in records.models(trend, "transformer")) == [0, 1]
    # With equal parameters: the largest factor belongs to both arms.
    plain, equal = (records.by_factor(trend, mixer) for mixer in ("gla", "gla="))
    assert plain[2] == equal[2] and plain[1] != equal[1]
    parameters = [equal[factor][0]["parameters"] for factor in (1, 2)]
    assert abs(parameters[0] - parameters[1]) <= 3 * 16 < abs(plain[1][0]["parameters"] - parameters[1])
    assert trend["runs"][1]["training"]["steps"] == 3 and trend["results"][0]["bytes"] == 3 * 4 * 96
    assert str(corpus) not in json.dumps(trend)
    assert all(math.isfinite(loss) for row in trend["results"] for _, loss in row["losses"])
    made = report.tables()
    assert "| trend | 1 | 7 | 3 |" in made["runs"] and "| ablation | 0 | 11 | 3 |" in made["runs"]
    assert made["runs"].count("| 0.002, GLA 0.003, Transformer 0.001 |") == 2 and made["runs"].count("| 0.002 |") == 1
    assert "| GLA, equal parameters | 1 |" in made["over seeds"]
    assert made["exponents over seeds"].count("| 0 |  |  |") == 8  # nothing was learned: all on the plateau
    assert "| Gated DeltaNet | 2 | 256 |" in made["recall of numbers"] and "more heads" in made["ablation"]
    assert "ablation at 8" not in made
    (tmp_path / "state_recall_ablation.json").replace(tmp_path / "state_recall_e8_ablation_seed0.json")
    assert records.recorded(records.ABLATION_8) and not records.recorded(records.ABLATION)
    (tmp_path / "state_recall_ablation.json").write_text(json.dumps(ablation))
    assert report.tables()["ablation at 8"] == made["ablation"]
    report.draw(tmp_path)
    assert "Gated DeltaNet, UUIDs" in (tmp_path / "state_recall.svg").read_text()

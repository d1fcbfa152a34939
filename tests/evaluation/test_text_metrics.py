"""Text metrics against values worked out by hand and against the libraries' own corpus scores."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longrecall.errors import UserError
from longrecall.evaluation.outcomes import unpack
from longrecall.evaluation.statistics import clustered_wilson_interval, wilson_interval
from longrecall.evaluation.text_metrics import METRICS, TextMetrics, normalise, text_entries, token_f1
from longrecall.tasks import ByteEncoder, PieceEncoder, QuestionAnswering

SAID = ["the Eiffel tower in Paris is very big", "x", "a red boat sails", ""]
ACCEPTED = [["Eiffel Tower is the big one in Paris", "the tower"], ["y x"], ["a red boat sails home"], ["nine"]]
WORDS = st.lists(st.sampled_from(["The", "cat", "sat", "an", "a", "mat!", "on", "1,000"]), max_size=6).map(" ".join)


@pytest.mark.parametrize(
    ("text", "plain"),
    [("The Eiffel Tower!", "eiffel tower"), ("an  apple, a\tday", "apple day"), ("theatre", "theatre"), ("A.", "")],
)
def test_normalisation(text: str, plain: str) -> None:
    assert normalise(text) == plain


@pytest.mark.parametrize(
    ("said", "accepted", "f1"),
    [
        ("the cat sat", "A cat sat.", 1.0),
        ("cat cat cat", "cat", 0.5),  # one of three words right, all of one found: 2 * (1/3) / (1/3 + 1)
        ("black cat", "cat sat down", 0.4),  # precision 1/2, recall 1/3
        ("dog", "cat", 0.0),
        ("the", "a", 1.0),
        ("", "cat", 0.0),
    ],
)
def test_f1(said: str, accepted: str, f1: float) -> None:
    # One division: exact to the last bits of a double.
    assert token_f1(said, accepted) == pytest.approx(f1, abs=1e-15)


@given(said=WORDS, accepted=WORDS)
def test_f1_is_symmetric_and_one_only_for_the_same_words(said: str, accepted: str) -> None:
    value = token_f1(said, accepted)
    assert value == token_f1(accepted, said) and 0.0 <= value <= 1.0
    assert (value == 1.0) == (sorted(normalise(said).split()) == sorted(normalise(accepted).split()))


def test_the_best_accepted_text_counts() -> None:
    metrics = TextMetrics(["f1", "exact", "contains"])
    assert metrics.score("It is THE nine!", ["ten", "nine"]) == {"f1": 0.5, "exact": 0.0, "contains": 1.0}
    assert metrics.score("the Nine.", ["ten", "nine"]) == {"f1": 1.0, "exact": 1.0, "contains": 1.0}
    with pytest.raises(ValueError, match="at least one accepted text"):
        metrics.score("nine", [])


def test_means_intervals_and_answers_that_do_not_count() -> None:
    metrics = TextMetrics(["exact", "f1"])
    said, accepted = ["one", "two", "three"], [["one"], ["two"], ["four"]]
    scores = metrics.measure(said, accepted)
    assert scores["exact"].examples == (1.0, 1.0, 0.0) and scores["exact"].interval == wilson_interval(2, 3)
    assert scores["f1"].value == pytest.approx(2 / 3) and scores["f1"].interval == (0.0, 1.0)
    lost = metrics.measure(said, accepted, valid=[False, True, True])
    assert lost["exact"].examples == (0.0, 1.0, 0.0)
    # Two texts without words agree; an answer that does not count is wrong even then.
    assert metrics.measure(["the"], [["a"]], valid=[False])["f1"].value == 0.0
    assert metrics.measure(["one"], [["one"]])["f1"].interval is None
    with pytest.raises(ValueError, match="nothing to measure"):
        metrics.measure([], [])


def test_bleu_of_a_corpus_is_sacrebleus() -> None:
    sacrebleu = pytest.importorskip("sacrebleu")
    score = TextMetrics(["bleu"]).measure(SAID, ACCEPTED)["bleu"]
    streams = [[accepted[0] for accepted in ACCEPTED], ["the tower", None, None, None]]
    # The same integers go through the same formula: equal up to the division by 100.
    assert score.value == pytest.approx(sacrebleu.BLEU().corpus_score(SAID, streams).score / 100, rel=1e-12)
    assert 0.2 < score.value < 0.9 and abs(score.value - np.mean(score.examples)) > 0.01
    single = sacrebleu.sentence_bleu(SAID[2], ACCEPTED[2], use_effective_order=True).score / 100
    assert score.examples[2] == pytest.approx(single, rel=1e-12)
    low, high = score.interval or (1.0, 0.0)
    assert 0.0 <= low < score.value < high <= 1.0
    again = TextMetrics(["bleu"]).measure(SAID, ACCEPTED)["bleu"]
    assert (again.value, again.interval, again.examples) == (score.value, score.interval, score.examples)
    assert TextMetrics(["bleu"]).measure(["a b c d"], [["a b c d"]])["bleu"].value == pytest.approx(1.0)


def test_bleu_without_long_matches_is_smoothed_as_sacrebleu_does() -> None:
    sacrebleu = pytest.importorskip("sacrebleu")
    said, accepted = ["the Eiffel tower in Paris is big", "x"], [["Eiffel Tower is the big in paris"], ["y x"]]
    expected = sacrebleu.BLEU().corpus_score(said, [[texts[0] for texts in accepted]]).score / 100
    assert TextMetrics(["bleu"]).measure(said, accepted)["bleu"].value == pytest.approx(expected, rel=1e-12)
    assert expected > 0


def test_questions_about_one_document_count_as_one_unit() -> None:
    metrics = TextMetrics(["f1", "exact"])
    said, accepted = ["one", "one", "two", "three"], [["one"], ["one"], ["no"], ["no"]]
    alone = metrics.measure(said, accepted)
    grouped = metrics.measure(said, accepted, groups=["a", "a", None, None])
    for name in ("f1", "exact"):
        assert grouped[name].value == alone[name].value == 0.5
        assert grouped[name].scores.tolist() == [2, 0, 0] and grouped[name].weights.tolist() == [2, 1, 1]
    assert grouped["exact"].interval == clustered_wilson_interval([2, 0, 0], [2, 1, 1])
    assert alone["exact"].interval == wilson_interval(2, 4)
    one = metrics.measure(said, accepted, groups=["a"] * 4)
    assert one["f1"].interval is None


def test_bleu_of_groups_is_the_same_with_another_interval() -> None:
    pytest.importorskip("sacrebleu")
    metrics = TextMetrics(["bleu"])
    alone, grouped = (metrics.measure(SAID, ACCEPTED, groups=groups)["bleu"] for groups in (None, ["a", "b", "a", "b"]))
    assert alone.value == grouped.value and alone.interval != grouped.interval


def test_bleu_leaves_numpys_global_generator_alone() -> None:
    pytest.importorskip("sacrebleu")
    before = np.random.get_state()[1].tolist()  # type: ignore[index, union-attr]
    TextMetrics(["bleu"]).measure(SAID, ACCEPTED)
    assert np.random.get_state()[1].tolist() == before  # type: ignore[index, union-attr]


def test_rouge_l_is_the_f_of_the_longest_common_subsequence() -> None:
    pytest.importorskip("rouge_score")
    # "police the gunman" lies in "police killed the gunman" in order: precision 3/4 of 4 words, recall 3/3.
    metrics = TextMetrics(["rouge_l"])
    assert metrics.score("police killed the gunman", ["police the gunman"])["rouge_l"] == pytest.approx(6 / 7)
    assert metrics.score("the gunman police", ["x", "police the gunman"])["rouge_l"] == pytest.approx(2 / 3)
    assert metrics.score("", ["police"])["rouge_l"] == 0.0


class NoSynonyms:
    """A WordNet in which no word has a synonym."""

    def ensure_loaded(self) -> None: ...

    def synsets(self, word: str) -> list[Any]:
        return []


def test_meteor_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nltk")
    import nltk.corpus

    monkeypatch.setattr(nltk.corpus, "wordnet", NoSynonyms())
    score = TextMetrics(["meteor"]).score("The cat", ["dog", "the cat sat"])["meteor"]
    # Banerjee and Lavie with nltk's weights: precision 1, recall 2/3, mean P R / (0.9 P + 0.1 R); both words in one
    # chunk, penalty 0.5 (1/2)^3.
    mean = (2 / 3) / (0.9 + 0.1 * 2 / 3)
    assert score == pytest.approx(mean * (1 - 0.5 / 8), rel=1e-12)


def test_meteor_without_wordnet_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nltk")
    import nltk.corpus

    class Missing(NoSynonyms):
        def ensure_loaded(self) -> None:
            raise LookupError("Resource wordnet not found")

    monkeypatch.setattr(nltk.corpus, "wordnet", Missing())
    with pytest.raises(UserError, match=r"WordNet.*nltk\.downloader wordnet.*leave meteor out") as caught:
        TextMetrics(["f1", "meteor"])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("metric", "package"), [("bleu", "sacrebleu"), ("rouge_l", "rouge_score"), ("meteor", "nltk")])
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, metric: str, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    name = package.replace("_", "-")
    with pytest.raises(UserError, match=rf'metric {metric} needs {name}; .*pip install "{name}>='):
        TextMetrics([metric])


def test_unknown_metrics() -> None:
    assert METRICS == ("f1", "exact", "contains", "bleu", "rouge_l", "meteor")
    with pytest.raises(UserError, match='Did you mean "rouge_l"'):
        TextMetrics(["rougel"])


def test_entries_of_a_cell(tmp_path: Path) -> None:
    pytest.importorskip("sacrebleu")
    rows = [
        {"context": "Box one.", "question": "Which?", "answers": ["box one", "one"]},
        {"context": "Box one.", "question": "What?", "answers": ["a box"]},
        {"context": "Box two.", "question": "Which?", "answers": ["two"]},
        {"context": "Box ten.", "question": "Which?", "answers": ["ten"]},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    task = QuestionAnswering(("own",), str(path), metrics=("f1", "exact", "bleu"))
    (cell,) = task.cells([])
    samples = [task.sample(PieceEncoder(ByteEncoder()), cell, index, 0) for index in range(4)]
    said = {"box one": " One!\nQuestion: Which?", "a box": " the big box", "two": " two", "ten": " ten"}
    finite = np.array([sample.target != "ten" for sample in samples])
    found = text_entries(task, cell, samples, [said[sample.target] for sample in samples], finite)
    f1, exact, bleu = (dict(entry) for entry in found)
    # f1: 1, 2/3 (one of "big box", all of "box"), 1, and 0 where the logits were not finite.
    assert f1["value"] == pytest.approx((1 + 2 / 3 + 1) / 4) and exact["value"] == 0.5
    for entry in (f1, exact, bleu):
        assert (entry["count"], entry["sequences"], entry["diverged"]) == (4, 3, 1)
        assert entry["low"] <= entry["value"] <= entry["high"] and entry["cell"] == dict(cell)
    assert "outcomes" not in bleu
    # Two questions share a document: three units.
    assert unpack(exact["outcomes"], "here").value == exact["value"]
    assert sorted(unpack(exact["outcomes"], "here").weights) == [1, 1, 2]
    # Outcomes keep six decimals.
    assert unpack(f1["outcomes"], "here").value == pytest.approx(f1["value"], abs=1e-6)
    assert text_entries(QuestionAnswering(("own",), str(path), metrics=()), cell, samples, [""] * 4, finite) == []

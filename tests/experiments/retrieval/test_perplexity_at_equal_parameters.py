"""Bits per byte at equal parameters: the arms are what they say, and a small run records paired differences."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from experiments.common import models
from experiments.retrieval import perplexity_at_equal_parameters

ROOT = Path(__file__).resolve().parents[3]


def arguments(*more: str) -> Any:
    return perplexity_at_equal_parameters.arguments(["--corpus", "a", "--validation", "b", "--out", "c", *more])


@pytest.mark.parametrize("mixer", ["gla", "gated_delta_net", "mamba2"])
def test_arms_have_equal_parameters(mixer: str) -> None:
    args = arguments()
    sizes = {
        arm: perplexity_at_equal_parameters.parameters(perplexity_at_equal_parameters.description(mixer, arm, args))
        for arm in perplexity_at_equal_parameters.ARMS
    }
    # A temperature more where the selector is trained.
    assert sizes["weighted"] == sizes["hard"] + 1 and sizes["weighted"] > 1.05 * sizes["plain"]
    # One channel of one MLP is the finest step there is.
    assert abs(sizes["wide"] - sizes["weighted"]) <= 3 * args.width / 2
    kinds = [
        layer["mixer"]["type"] for layer in perplexity_at_equal_parameters.description(mixer, "hard", args)["layers"]
    ]
    assert kinds.count("retrieval") == 1 and len(kinds) == args.layers


def test_counted_parameters_are_those_of_the_model() -> None:
    args = arguments("--tiny")
    for mixer in perplexity_at_equal_parameters.MIXERS:
        for arm in perplexity_at_equal_parameters.ARMS:
            described = perplexity_at_equal_parameters.description(mixer, arm, args)
            assert (
                perplexity_at_equal_parameters.parameters(described)
                == models.build(described, 64, 0, "cpu").num_parameters()
            )


def test_bits_are_the_loss_in_base_two() -> None:
    args = arguments("--tiny")
    model = models.build(perplexity_at_equal_parameters.description("gla", "weighted", args), 64, 0, "cpu").eval()
    text = torch.randint(0, 256, (3, 65), generator=torch.Generator().manual_seed(0))
    found = perplexity_at_equal_parameters.bits(model, text, [0, 16, 64])
    with torch.no_grad():
        expected = [float(model(row[None], labels=row[None]).loss) / math.log(2) for row in text]
    # float32 sums of 64 losses of about 8 bits.
    assert found @ perplexity_at_equal_parameters.weights_of([0, 16, 64]) == pytest.approx(expected, rel=1e-5)


def test_differences_are_paired_by_excerpt() -> None:
    g = np.random.default_rng(0)
    hard = g.normal(2.0, 0.5, size=(50, 2))
    arms = {"plain": hard + 0.01, "weighted": hard, "wide": hard + g.normal(0, 0.01, size=(50, 2))}
    found = perplexity_at_equal_parameters.compared(arms, [0, 8, 64])
    assert set(found) == {
        "weighted - plain", "wide - plain", "plain - wide", "weighted - wide"
    }  # fmt: skip
    mean, error = found["weighted - plain"]["all"]
    # The excerpts differ by .5, the pairs not at all.
    assert mean == pytest.approx(-0.01) and error == pytest.approx(0.0, abs=1e-12)
    both = arms["plain"] - arms["wide"]
    expected = both @ np.array([1 / 8, 7 / 8])
    assert found["plain - wide"]["all"] == pytest.approx([expected.mean(), expected.std(ddof=1) / math.sqrt(50)])
    assert found["plain - wide"]["ranges"][1][0] == pytest.approx(both[:, 1].mean())


def test_a_small_run_records_every_arm(tmp_path: Path) -> None:
    text = (ROOT / "src" / "longrecall" / "assets" / "text" / "held_out.txt").read_bytes()[:40_000]
    corpus, out = tmp_path / "books.txt", tmp_path / "out.json"
    corpus.write_bytes(text)
    perplexity_at_equal_parameters.main(
        ["--tiny", "--seeds", "1", "--corpus", str(corpus), "--validation", str(corpus), "--out", str(out)]
    )
    record = json.loads(out.read_text())
    assert [(row["mixer"], row["arm"]) for row in record["results"]] == [
        (mixer, arm) for mixer in perplexity_at_equal_parameters.MIXERS for arm in perplexity_at_equal_parameters.ARMS
    ]
    assert record["training"]["bytes"] == 2 * 2 * 64 and record["edges"] == [0, 8, 16, 32, 64]
    frozen = {row["arm"]: row["parameters"] - row["trained_parameters"] for row in record["results"][:4]}
    assert frozen["hard"] == 2 * 32 * 8 and frozen["weighted"] == frozen["plain"] == 0
    for row in record["differences"]:
        assert len(row["pairs"]) == 6 and all(math.isfinite(pair["all"][0]) for pair in row["pairs"].values())


def test_the_tables_say_what_the_record_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from experiments.retrieval import report_perplexity as report

    def summary(mean: float) -> dict[str, Any]:
        return {"all": [mean, 0.001], "ranges": [[mean + 0.1, 0.01], [mean - 0.1, 0.01]]}

    levels = {"plain": 2.0, "wide": 1.99, "weighted": 1.9, "hard": 1.95}
    record: dict[str, Any] = {"edges": [0, 8, 64], "results": [], "differences": []}
    for seed, mixer in ((1, m) for m in report.MIXERS):
        for arm, level in levels.items():
            numbers = {"parameters": 1000, "bits_per_byte": summary(level)}
            record["results"].append({"mixer": mixer, "arm": arm, "seed": seed, **numbers})
        pairs = {pair: summary(levels[pair.split()[0]] - levels[pair.split()[2]]) for pair in report.PAIRS}
        record["differences"].append({"mixer": mixer, "seed": seed, "pairs": pairs})
    (tmp_path / report.RECORD).write_text(json.dumps(record))
    from experiments.common import pages

    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    made = report.tables()
    assert "| GLA | retrieval, weighted | 1,000 | 1.9000 | 2.0000 | 1.8000 |" in made["bits per byte"]
    # 1.96 standard errors of .001.
    assert "| Mamba-2 | weighted − wide | -.0900 | **-.0900 ± .0020** | .0100 ± .0196 |" in made[
        "differences in bits per byte"
    ].replace("+.0100", ".0100")
    # Intervals over excerpts know nothing of seeds: those that disagree are no finding.
    assert [report.cell([[-0.9, 0.1], [mean, 0.1]]) for mean in (-0.1, 0.1)] == ["**-.5000 ± .1960**", "-.4000 ± .1960"]
    assert report.over_seeds([[1.0, 0.1], [2.0, 0.3]]) == pytest.approx((1.5, 0.392), abs=1e-4)

"""docs/retrieval_evidence/bits_per_byte.md says what the recorded models say."""

from __future__ import annotations

import pytest

from experiments.common import pages
from experiments.retrieval import report_perplexity


def by_seed(mixer: str, pair: str) -> list[float]:
    return [mean for mean, _ in report_perplexity.difference(pages.read(report_perplexity.RECORD), mixer, pair)[0]]


def told(values: list[float]) -> list[str]:
    """Sizes of differences, seed by seed, smallest first."""
    return [pages.number(value, digits=3) for value in sorted(map(abs, values))]


def test_differences_follow_from_the_levels() -> None:
    """A paired difference over the same excerpts is the difference of the means."""
    record = pages.read(report_perplexity.RECORD)
    bits = {(row["mixer"], row["arm"], row["seed"]): row["bits_per_byte"]["all"][0] for row in record["results"]}
    assert len(bits) == len(report_perplexity.MIXERS) * len(report_perplexity.ARMS) * record["settings"]["seeds"]
    for found in record["differences"]:
        for pair in report_perplexity.PAIRS:
            first, second = (bits[found["mixer"], arm, found["seed"]] for arm in pair.split(" - "))
            # Sums of 256 excerpts in float64, in another order.
            assert found["pairs"][pair]["all"][0] == pytest.approx(first - second, abs=1e-9)


def test_the_differences_of_the_prose(prose: str) -> None:
    record = pages.read(report_perplexity.RECORD)
    gla = {
        arm: [row["bits_per_byte"]["all"][0] for row in record["results"] if (row["mixer"], row["arm"]) == ("gla", arm)]
        for arm in report_perplexity.ARMS
    }
    assert max(gla["weighted"] + gla["hard"]) < min(gla["plain"] + gla["wide"])
    plain, wide = (told(by_seed("gla", f"weighted - {arm}")) for arm in ("plain", "wide"))
    assert "by {} and {} bits against the plain model and by {} and {} against wider".format(*plain, *wide) in prose
    assert "GLA with retrieval is {} and {} better than with wider MLPs (two seeds)".format(*wide) in prose
    assert all(value < 0 for arm in ("plain", "wide") for value in by_seed("gla", f"weighted - {arm}"))
    plain, wide = (told(by_seed("gated_delta_net", f"weighted - {arm}")) for arm in ("plain", "wide"))
    assert all(value < 0 for arm in ("plain", "wide") for value in by_seed("gated_delta_net", f"weighted - {arm}"))
    assert "better by {} and {} against the plain model, and by {} in both seeds".format(*plain, wide[0]) in prose
    assert wide[0] == wide[1] and f"Gated DeltaNet is better by {wide[0]} in both, Mamba-2" in prose
    assert "**" not in report_perplexity.cell(report_perplexity.difference(record, "gated_delta_net", "hard - wide")[0])
    mamba = [value for arm in ("weighted", "hard") for value in by_seed("mamba2", f"{arm} - wide")]
    assert min(mamba) > 0 and "are {} to {} worse than wider MLPs".format(*(told(mamba)[i] for i in (0, -1))) in prose
    assert "Mamba-2 {} and {} worse".format(*told(by_seed("mamba2", "weighted - wide"))) in prose
    for arm in ("weighted", "hard"):
        assert min(by_seed("mamba2", f"{arm} - plain")) < 0 < max(by_seed("mamba2", f"{arm} - plain"))


def test_what_is_chance_and_where_retrieval_helps(prose: str) -> None:
    record, shown, begin, end = pages.read(report_perplexity.RECORD), [], [], []
    for mixer in report_perplexity.MIXERS:
        wide = by_seed(mixer, "wide - plain")
        assert min(wide) < 0 < max(wide)
        shown += [pages.number(value, signed=True, digits=3) for value in wide]
        columns = list(zip(*report_perplexity.difference(record, mixer, "weighted - plain")[1], strict=True))
        means = [report_perplexity.over_seeds(list(column))[0] for column in columns]
        assert means[0] == max(means)
        begin.append(means[0])
        end.append(means[-1])
    assert "{} and {} for GLA, {} and {} for Gated DeltaNet, {} and {} for Mamba-2.".format(*shown) in prose
    assert [value > 0 for value in (*begin, *end)] == [False, True, True, False, False, True]
    first, last = ([pages.number(abs(value), digits=3) for value in values] for values in (begin, end))
    assert "is {} better than plain for GLA, and {} and {} worse for the two others".format(*first) in prose
    assert "From 1,024 bytes on it is {} and {} better and {} worse".format(*last) in prose
    plain = [
        [row["bits_per_byte"]["all"][0] for row in record["results"] if (row["mixer"], row["arm"]) == (m, "plain")]
        for m in report_perplexity.MIXERS
    ]
    gla, *others = (sum(values) / len(values) for values in plain)
    assert {pages.number(gla - other, digits=2) for other in others} == {".17"} and "are .17 above those of" in prose
    assert (
        f"{record['training']['steps']} steps, two seeds" in prose
        and f"after {record['training']['steps']} steps" in prose
    )

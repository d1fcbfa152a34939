"""How near a text comes to the accepted ones: F1, exact match, contains, BLEU, ROUGE-L, METEOR. All lie in [0, 1].

* ``f1``, ``exact``: of words, after SQuAD's normalisation (Rajpurkar et al. 2016): lower case, without punctuation and
  without the articles a, an, the. The best accepted text counts.
* ``contains``: an accepted text stands in the answer, upper and lower case alike.
* ``bleu``: sacrebleu's, over 100. Per example it is the sentence score; of several examples it is the corpus score,
  which is no mean of theirs.
* ``rouge_l``: F of rouge-score, without stemming; the best accepted text counts.
* ``meteor``: nltk's, the best accepted text counts. It needs nltk's WordNet files.

The last three need packages of the ``eval`` extra.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longrecall.errors import UserError, did_you_mean
from longrecall.evaluation.outcomes import pack_answers, pack_scores
from longrecall.evaluation.statistics import Interval, bootstrap_ratio_interval, clustered_wilson_interval
from longrecall.installing import install_command
from longrecall.tasks.encoding import Cell, QuestionSample
from longrecall.tasks.registry import TextMetricTask

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_RESAMPLES = 1000
"""Of the corpus BLEU, whose every resample is a score of its own."""


def normalise(text: str) -> str:
    """Return `text` in lower case, without ASCII punctuation, articles and surplus white space (SQuAD's rule)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def token_f1(said: str, accepted: str) -> float:
    """Return the harmonic mean of precision and recall of the words; two texts without words are equal (1)."""
    ours, theirs = normalise(said).split(), normalise(accepted).split()
    if not ours or not theirs:
        return float(ours == theirs)
    shared = sum((Counter(ours) & Counter(theirs)).values())
    return 2 * shared / (len(ours) + len(theirs))


def _exact(said: str, accepted: str) -> float:
    return float(normalise(said) == normalise(accepted))


def _contains(said: str, accepted: str) -> float:
    return float(accepted.strip().lower() in said.lower())


def _best(score: Callable[[str, str], float]) -> Callable[[str, Sequence[str]], float]:
    return lambda said, references: max(score(said, accepted) for accepted in references)


def _make_bleu() -> Callable[[str, Sequence[str]], float]:
    bleu = _import("sacrebleu", "bleu").BLEU(effective_order=True)
    return lambda said, references: float(bleu.sentence_score(said, list(references)).score) / 100


def _make_rouge_l() -> Callable[[str, Sequence[str]], float]:
    _import("rouge_score", "rouge_l")
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rougeL"])
    return lambda said, references: float(scorer.score_multi(list(references), said)["rougeL"].fmeasure)


def _make_meteor() -> Callable[[str, Sequence[str]], float]:
    nltk = _import("nltk", "meteor")
    from nltk.corpus import wordnet
    from nltk.translate.meteor_score import meteor_score

    try:
        wordnet.ensure_loaded()
    except LookupError:
        places = ", ".join(nltk.data.path[:3])
        raise UserError(
            "the metric meteor needs nltk's WordNet files, which are not installed. Fetch them once with: python "
            f"-m nltk.downloader wordnet (or put corpora/wordnet.zip into one of: {places}), or leave meteor out of "
            "the metrics"
        ) from None
    return lambda said, references: float(
        meteor_score([_words(text) for text in references], _words(said), wordnet=wordnet)
    )


def _words(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text.lower())


def _import(package: str, metric: str) -> Any:
    import importlib

    try:
        return importlib.import_module(package)
    except ImportError:
        name = package.replace("_", "-")
        raise UserError(
            f"the metric {metric} needs {name}; install it with: {install_command(name)}, or leave {metric} out of "
            "the metrics"
        ) from None


_MAKERS: dict[str, Callable[[], Callable[[str, Sequence[str]], float]]] = {
    "f1": lambda: _best(token_f1),
    "exact": lambda: _best(_exact),
    "contains": lambda: _best(_contains),
    "bleu": _make_bleu,
    "rouge_l": _make_rouge_l,
    "meteor": _make_meteor,
}
SHARES = ("exact", "contains")
"""Metrics of examples that are right or wrong."""

METRICS = tuple(_MAKERS)


@dataclass(frozen=True)
class TextScore:
    """A metric over some answers: its value and its 95% interval (None where one unit is all there is).

    `examples`: the metric of each answer alone. `scores`, `weights` float64 [units]: their sums and their numbers in
    each unit, which is all answers of one group; the value is sum(scores) / sum(weights), except for ``bleu``.
    """

    value: float
    interval: Interval | None
    examples: tuple[float, ...]
    scores: NDArray[np.float64]
    weights: NDArray[np.float64]


class TextMetrics:
    """Some metrics, ready to use; a missing package or missing data raises `UserError` here, before the work."""

    def __init__(self, names: Sequence[str]) -> None:
        for name in names:
            if name not in _MAKERS:
                raise UserError(f'unknown metric "{name}"; known: {", ".join(METRICS)}.{did_you_mean(name, METRICS)}')
        self.names = tuple(names)
        self._score = {name: _MAKERS[name]() for name in names}

    def score(self, said: str, references: Sequence[str]) -> dict[str, float]:
        """Return the metrics of one answer; `references`, at least one, are the accepted texts."""
        if not references:
            raise ValueError("an answer needs at least one accepted text")
        return {name: score(said, references) for name, score in self._score.items()}

    def measure(
        self,
        said: Sequence[str],
        references: Sequence[Sequence[str]],
        valid: Sequence[bool] | None = None,
        groups: Sequence[str | None] | None = None,
    ) -> dict[str, TextScore]:
        """Return the metrics of several answers, at least one.

        `references`: the accepted texts of each. An answer that is not `valid` (its logits were not finite) counts as
        one that says nothing, and 0. Answers of one of the `groups` (questions about one document) are not independent:
        intervals, Wilson's for ``exact`` and ``contains``, otherwise percentile bootstraps, take a group as a whole.
        """
        if not said:
            raise ValueError("there is nothing to measure")
        usable = [True] * len(said) if valid is None else list(valid)
        texts = [text if good else "" for text, good in zip(said, usable, strict=True)]
        scores = [self.score(text, accepted) for text, accepted in zip(texts, references, strict=True)]
        unit = _units([None] * len(said) if groups is None else groups)
        return {
            name: _summary(
                name,
                tuple(row[name] if good else 0.0 for row, good in zip(scores, usable, strict=True)),
                unit,
                lambda: _bleu_counts(texts, references),
            )
            for name in self.names
        }


def _units(groups: Sequence[str | None]) -> NDArray[np.int64]:
    """Return the unit of each answer, int64, numbered by first appearance; an answer without a group is its own."""
    known: dict[Any, int] = {}
    keys = ((place,) if group is None else group for place, group in enumerate(groups))
    return np.array([known.setdefault(key, len(known)) for key in keys], dtype=np.int64)


def _summary(
    name: str, examples: tuple[float, ...], unit: NDArray[np.int64], count: Callable[[], NDArray[np.int64]]
) -> TextScore:
    scores = np.bincount(unit, weights=examples).astype(np.float64)
    weights = np.bincount(unit).astype(np.float64)
    value = float(scores.sum() / weights.sum())
    interval: Interval | None
    if name == "bleu":
        value, interval = _corpus_bleu(count(), unit)
    elif name in SHARES:
        interval = clustered_wilson_interval(scores, weights)
    else:
        interval = bootstrap_ratio_interval(scores, weights)
    return TextScore(value, interval, examples, scores, weights)


def _bleu_counts(said: Sequence[str], references: Sequence[Sequence[str]]) -> NDArray[np.int64]:
    """Return int64 [answers, 2 orders + 2]: matches and totals of each n-gram order, and the two lengths."""
    single = _import("sacrebleu", "bleu").BLEU(effective_order=True)
    found = [single.sentence_score(text, list(accepted)) for text, accepted in zip(said, references, strict=True)]
    return np.array([[*score.counts, *score.totals, score.sys_len, score.ref_len] for score in found], dtype=np.int64)


def _corpus_bleu(counts: NDArray[np.int64], unit: NDArray[np.int64]) -> tuple[float, Interval | None]:
    """Return the score of a corpus, which is a function of summed counts, and its interval."""
    bleu = _import("sacrebleu", "bleu").BLEU
    units = np.zeros((int(unit.max()) + 1, counts.shape[1]), dtype=np.int64)
    np.add.at(units, unit, counts)

    def corpus(sums: NDArray[np.int64]) -> float:
        order = (len(sums) - 2) // 2
        matches, totals, lengths = sums[:order].tolist(), sums[order:-2].tolist(), sums[-2:].tolist()
        return float(bleu.compute_bleu(matches, totals, *lengths, smooth_method="exp").score) / 100

    value = corpus(units.sum(axis=0))
    if len(units) < 2:
        return value, None
    # sacrebleu's own bootstrap draws from numpy's global state; this one has its own generator.
    generator = np.random.Generator(np.random.PCG64(0))
    scores = np.empty(_RESAMPLES)
    for place in range(_RESAMPLES):
        chosen = np.floor(generator.random(len(units)) * len(units)).astype(np.int64)
        scores[place] = corpus(units[chosen].sum(axis=0))
    low, high = np.quantile(scores, [0.025, 0.975])
    return value, (float(low), float(high))


def text_entries(
    task: TextMetricTask,
    cell: Cell,
    samples: Sequence[QuestionSample],
    said: Sequence[str],
    finite: Sequence[bool] | NDArray[np.bool_],
) -> list[dict[str, Any]]:
    """Return one result entry per text metric of a cell, from all its samples and what the model said after each.

    `finite` [samples]: false where a logit was NaN or infinite, which scores 0. ``bleu`` has no "outcomes": it is no
    mean over answers, so two files cannot be compared by it answer by answer.
    """
    if not task.text_metrics:
        return []
    valid = [bool(good) for good in finite]
    answers = [task.answer_of(text) for text in said]
    groups = [sample.group for sample in samples]
    found = TextMetrics(task.text_metrics).measure(answers, [sample.accepted for sample in samples], valid, groups)
    entries = []
    for metric, score in found.items():
        low, high = score.interval or (None, None)
        entry: dict[str, Any] = {
            "task": task.name,
            "cell": dict(cell),
            "metric": metric,
            "value": score.value,
            "count": len(samples),
            "low": low,
            "high": high,
            "sequences": len(score.weights),
            "diverged": valid.count(False),
        }
        if metric != "bleu":
            pack = pack_answers if metric in SHARES else pack_scores
            entry["outcomes"] = pack(score.scores, score.weights)
        entries.append(entry)
    return entries

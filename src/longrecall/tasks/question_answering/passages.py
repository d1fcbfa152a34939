"""Passages of the document itself, put beside it as text: what retrieval without a retrieval layer can do.

The baselines of RESONA (section 5, "RESONA vs. RAG-like methods"): the document is cut into passages, some of them are
chosen for the question and stand a second time in the prompt. In its RETRIEVAL a retriever of its own chooses, here
BM25, and in its RAG the chunk-and-search of the model itself.

BM25 is written out below, since a sample must stay what its seed says: another version of a library would change
prompts. `tests/tasks/test_passages.py` holds it against scores of the bm25s package.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

SATURATION, LENGTH_SHARE = 1.2, 0.75
"""k1 and b of BM25, as Robertson and Zaragoza (2009) and Lucene have them."""

Tokens = tuple[int, ...]


def split_passages(document: Tokens, size: int) -> list[Tokens]:
    """Return the document's tokens in passages of `size`, the last one perhaps shorter; none of an empty document."""
    return [document[start : start + size] for start in range(0, len(document), size)]


def best_passages(scores: Sequence[float], count: int) -> list[int]:
    """Return the indices of the `count` highest scores (all, if fewer) in ascending order; of equals the first."""
    return sorted(sorted(range(len(scores)), key=lambda index: -scores[index])[:count])


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case: runs of letters, digits and underscores."""
    return re.findall(r"\w+", text.lower())


def bm25(passages: Sequence[str], question: str) -> list[float]:
    """Return how well each passage answers to the words of the question; 0 where it has none of them.

    The sum over the words w of the question, repeated ones counted again, of
    ``idf(w) * f / (f + k1 * (1 - b + b * length / mean length))``, with f how often w stands in the passage, lengths in
    words, and ``idf(w) = ln(1 + (N - n + 1/2) / (n + 1/2))`` for n of the N passages with w. Source: S. Robertson and
    H. Zaragoza 2009, "The Probabilistic Relevance Framework: BM25 and Beyond"; from Lucene are the 1 in the logarithm,
    which keeps idf positive, and that there is no factor k1 + 1.
    """
    counts = [Counter(words_of(passage)) for passage in passages]
    lengths = [sum(count.values()) for count in counts]
    mean = sum(lengths) / len(lengths) if any(lengths) else 1.0
    scores = [0.0] * len(passages)
    for word in words_of(question):
        having = sum(word in count for count in counts)
        idf = math.log(1 + (len(passages) - having + 0.5) / (having + 0.5))
        for index, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            limit = SATURATION * (1 - LENGTH_SHARE + LENGTH_SHARE * length / mean)
            scores[index] += idf * count[word] / (count[word] + limit)
    return scores

"""The papers' evaluation suites by name: tasks, lengths and options, and what needs a network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from longrecall.errors import UserError, did_you_mean

OFFLINE = ":offline"
"""After the name of a suite: only the pieces that need no network."""


@dataclass(frozen=True)
class Piece:
    """A task of a suite with its options; `network`: what it takes from the Hugging Face hub, "" for nothing."""

    task: str
    options: Mapping[str, Any] = field(default_factory=dict)
    network: str = ""


@dataclass(frozen=True)
class Suite:
    """Tasks that a paper reports together.

    `source`: the paper and the place in it; `lengths`, `samples`: as there, or None for the command's own; `note`:
    where this differs from the paper.
    """

    name: str
    source: str
    pieces: tuple[Piece, ...]
    lengths: tuple[str, ...] | None = None
    samples: int | None = None
    note: str = ""

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks, in the paper's order."""
        return [piece.task for piece in self.pieces]

    @property
    def options(self) -> dict[str, dict[str, Any]]:
        """Task -> option -> value."""
        return {piece.task: dict(piece.options) for piece in self.pieces if piece.options}

    def offline(self) -> Suite:
        """Return the part that needs no network; raises `UserError` when nothing is left."""
        pieces = tuple(piece for piece in self.pieces if not piece.network)
        if not pieces:
            raise UserError(
                f"suite {self.name}: every task of it needs data from the Hugging Face hub; see --list-suites"
            )
        return Suite(self.name + OFFLINE, self.source, pieces, self.lengths, self.samples, self.note)

    def describe(self) -> list[str]:
        """Return lines that say what the suite runs and what of it needs a network."""
        asks = [f"lengths {', '.join(self.lengths)}"] if self.lengths else []
        asks += [f"{self.samples} samples"] if self.samples else []
        lines = [f"{self.name}: {self.source}" + (f"; {', '.join(asks)}" if asks else "")]
        for piece in self.pieces:
            set_to = ", ".join(f"{key}={_shown(value)}" for key, value in piece.options.items())
            where = f"network: {piece.network}" if piece.network else "offline"
            lines.append(f"  {piece.task}" + (f" ({set_to})" if set_to else "") + f" - {where}")
        return lines + ([f"  note: {self.note}"] if self.note else [])


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _harness(*names: str) -> tuple[Piece, ...]:
    return tuple(Piece(f"lm_eval:{name}", network="data set from the hub") for name in names)


def _questions(datasets: tuple[str, ...], prompt: str, metrics: tuple[str, ...] = ()) -> Piece:
    options = {"datasets": datasets, "prompts": (prompt,), "metrics": metrics}
    return Piece("question_answering", options, f"{', '.join(datasets)} from the hub, unless data=FOLDER is given")


_LONGBENCH = (
    *("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "gov_report", "qmsum"),
    *("multi_news", "trec", "triviaqa", "samsum", "lcc", "repobench-p"),
)
_STATEX, _HEADWISE = "StateX", "Scaling up the State Size of RNN LLMs"
_STEPS = "the paper's numbers are the harness's `acc`"

_SUITES = (
    Suite(
        "statex-recall",
        f"{_STATEX}, table 6 and appendix C.2",
        (_questions(("swde", "squad", "triviaqa", "nq", "drop"), "twice"),),
        note="accuracy is the paper's `contains`; the prompts are those of Just Read Twice; the paper cuts "
        "sequences to 2K tokens: --option question_answering.document_tokens=N",
    ),
    Suite(
        "statex-common-sense",
        f"{_STATEX}, table 8",
        _harness("piqa", "hellaswag", "winogrande", "arc_easy", "arc_challenge", "social_iqa"),
        note=_STEPS,
    ),
    Suite(
        "statex-in-context",
        f"{_STATEX}, table 7 and appendix C.3",
        (Piece("metaicl", {"shots": (8, 16, 24)}, "twelve data sets from the hub, unless data=FOLDER is given"),),
    ),
    Suite(
        "statex-needles",
        f"{_STATEX}, table 9 and appendix C.4",
        (Piece("passkey_spoken"), Piece("niah_single_2")),
        ("4k", "8k", "16k", "32k"),
        256,
        "the haystack is a public-domain book; the essays of the original may not be redistributed",
    ),
    Suite(
        "headwise-common-sense",
        f"{_HEADWISE}, table 3 and appendix A.3.3",
        _harness(
            *("wikitext", "lambada_openai", "piqa", "hellaswag", "winogrande", "arc_easy", "arc_challenge"),
            *("social_iqa", "boolq"),
        ),
    ),
    Suite(
        "headwise-recall",
        f"{_HEADWISE}, table 4",
        _harness("fda", "swde", "squad_completion"),
        note="for table 11, which cuts the context: --option lm_eval:fda.max_length=2048, and so on",
    ),
    Suite(
        "headwise-needles",
        f"{_HEADWISE}, table 6",
        (Piece("niah_multikey_1"),),
        ("512", "1k", "2k"),
        note="the paper says several keys and numbers, which niah_multikey_2 has too; for the recall length of "
        "section 5.5: --tasks niah_single_3 --search 16k",
    ),
    Suite(
        "longbench-en",
        f"{_HEADWISE}, table 5: 14 English tasks of LongBench",
        _harness(*(f"longbench_{name}" for name in _LONGBENCH)),
    ),
    Suite(
        "resona-qa",
        "RESONA, table 3",
        (_questions(("triviaqa", "coqa", "narrativeqa"), "once", ("bleu", "rouge_l", "meteor", "f1")),),
        note="the paper fine-tunes on each data set first",
    ),
    Suite(
        "resona-common-sense",
        "RESONA, tables 8 and 10",
        _harness("wikitext", "arc_challenge", "arc_easy", "hellaswag", "openbookqa", "piqa", "pubmedqa", "race")
        + _harness("winogrande"),
    ),
    Suite(
        "resona-needles",
        "RESONA, table 9 and appendix A.5",
        tuple(Piece(f"niah_{kind}") for kind in ("single_1", "single_2", "single_3", "multivalue")),
        ("4k", "8k", "16k"),
        100,
        "prefix_score is the paper's, 0 to 5",
    ),
    Suite(
        "state-passing",
        "Understanding and improving length generalization in recurrent models, the long-context tasks",
        (Piece("babilong"), Piece("passkey")),
        note="copying counts letters, not tokens: run it with --tasks copying",
    ),
)
SUITES: dict[str, Suite] = {suite.name: suite for suite in _SUITES}


def suite(name: str) -> Suite:
    """Return the suite `name`, ``NAME:offline`` for what of it needs no network; raises `UserError` for others."""
    plain = name.removesuffix(OFFLINE)
    if plain not in SUITES:
        raise UserError(f'unknown suite "{plain}"; known suites: {", ".join(SUITES)}.{did_you_mean(plain, SUITES)}')
    return SUITES[plain].offline() if name.endswith(OFFLINE) else SUITES[plain]


def list_suites() -> str:
    """Return all suites as text."""
    return "\n\n".join("\n".join(suite.describe()) for suite in SUITES.values())

"""Questions over documents: the prompt forms word by word, groups, files and the hub, broken rows, judging."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longrecall.errors import UserError
from longrecall.evaluation.text_metrics import METRICS
from longrecall.models.byte_tokenizer import byte_tokenizer
from longrecall.tasks import ByteEncoder, PieceEncoder, QuestionAnswering, TextMetricTask, answer_spans
from longrecall.tasks.question_answering import STYLES, TEXT_METRICS, Row, build_prompt, parse_row
from longrecall.tasks.question_answering.sources import SOURCES

BYTES = PieceEncoder(ByteEncoder())
BRIDGE = "Ida Holm built the bridge in 1884. It has nine arches."
MILL = "The mill belongs to Tom. It grinds oats"
ROWS = [
    {"context": BRIDGE, "question": "Who built the bridge?", "answers": ["Ida Holm", "Holm"]},
    {"context": MILL, "question": "Whose is the mill?", "answers": ["Tom's", "Tom"], "ending": "The mill is that of"},
    {"context": BRIDGE, "question": "How many arches has it?", "answers": ["nine", "9"], "note": "ignored"},
    {"context": BRIDGE, "question": "When?", "answers": ["1884"], "history": [["Who built it?", "Ida Holm"]]},
]


def text_of(ids: Any) -> str:
    return bytes(int(token) for token in ids).decode()


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def samples_of(task: QuestionAnswering, encode: PieceEncoder = BYTES, seed: int = 0) -> list[Any]:
    (cell,) = task.cells([])
    return [task.sample(encode, cell, index, seed) for index in range(task.available(cell))]


def prompts(tmp_path: Path, dataset: str, form: str, row: dict[str, Any]) -> str:
    """The prompt of one row, up to where the model goes on (the byte tokenizer's own space included)."""
    path = write(tmp_path / "one.jsonl", [row])
    (sample,) = samples_of(QuestionAnswering((dataset,), str(path), prompts=(form,)))
    start, end = answer_spans(sample.labels)[-1]
    assert end == len(sample.input_ids) and text_of(sample.input_ids[start:]) == row["answers"][0] == sample.target
    return text_of(sample.input_ids[:start])


MILL_DOT = MILL + "."
FORMS = {
    ("fda", "once"): (0, f"{BRIDGE} Who built the bridge?: "),
    ("swde", "twice"): (0, f"Information about Who built the bridge?. {BRIDGE}\n{BRIDGE} Who built the bridge?: "),
    ("drop", "once"): (1, f"{MILL_DOT} The mill is that of "),
    ("nq", "twice"): (1, f"Whose is the mill? {MILL_DOT}\n{MILL_DOT} The mill is that of "),
    ("triviaqa", "twice"): (0, f"Who built the bridge? {BRIDGE}\n{BRIDGE} Who built the bridge? "),
    ("squad", "once"): (2, f"{BRIDGE} How many arches has it? "),
    ("coqa", "once"): (3, f"{BRIDGE}\n\nQ: Who built it?\n\nA: Ida Holm\n\nQ: When?\n\nA: "),
    ("narrativeqa", "once"): (1, f"{MILL}\n\nQuestion: Whose is the mill?\nAnswer: "),
    ("own", "twice"): (2, "How many arches has it? {0}\n{0}\n\nQuestion: How many arches has it?\nAnswer: "),
}


@pytest.mark.parametrize(("dataset", "form"), FORMS)
def test_prompt_forms(tmp_path: Path, dataset: str, form: str) -> None:
    place, expected = FORMS[dataset, form]
    assert prompts(tmp_path, dataset, form, ROWS[place]) == expected.replace("{0}", BRIDGE)


def test_a_key_is_asked_with_a_capital_and_what_a_file_repeats_is_removed(tmp_path: Path) -> None:
    row = {"context": f"{BRIDGE} builder: Builder:", "question": "builder", "answers": ["Ida Holm"]}
    assert prompts(tmp_path, "fda", "once", row) == f"{BRIDGE} Builder: "
    assert prompts(tmp_path, "fda", "twice", row) == f"Information about Builder. {BRIDGE}\n{BRIDGE} Builder: "


def test_questions_over_one_document_share_it(tmp_path: Path) -> None:
    encode = PieceEncoder(byte_tokenizer())
    path = write(tmp_path / "rows.jsonl", ROWS)
    samples = samples_of(QuestionAnswering(("own",), str(path)), encode)
    groups = {sample.group for sample in samples}
    assert len(groups) == 2
    for group in groups:
        members = [sample for sample in samples if sample.group == group]
        assert len({sample.input_ids[: sample.shared].tobytes() for sample in members}) == 1
        assert members[0].input_ids[0] == 256
        assert text_of(members[0].input_ids[1 : members[0].shared]) in (BRIDGE, MILL)
        assert len(members) == (3 if "bridge" in text_of(members[0].input_ids[1:]) else 1)
    twice = samples_of(QuestionAnswering(("own",), str(path), prompts=("twice",)), encode)
    assert {sample.group for sample in twice} == groups and not any(sample.shared for sample in twice)
    closed = samples_of(QuestionAnswering(("own",), str(path), opening=False), encode)
    assert [sample.input_ids.tolist() for sample in closed] == [sample.input_ids[1:].tolist() for sample in samples]


def test_long_documents_are_cut_at_their_end(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", ROWS[:1])
    (once,) = samples_of(QuestionAnswering(("nq",), str(path), document_tokens=8))
    (twice,) = samples_of(QuestionAnswering(("nq",), str(path), prompts=("twice",), document_tokens=8))
    assert text_of(once.input_ids) == "Ida Holm Who built the bridge? Ida Holm" and once.shared == 8
    assert text_of(twice.input_ids).startswith("Who built the bridge? Ida Holm\nIda Holm Who")


def test_many_documents_do_not_change_the_samples(tmp_path: Path) -> None:
    rows = [{"context": f"Box {n % 30} is red.", "question": f"Which {n}?", "answers": ["it"]} for n in range(90)]
    task = QuestionAnswering(("own",), str(write(tmp_path / "rows.jsonl", rows)))
    encode = PieceEncoder(ByteEncoder())
    first = [sample.input_ids.tolist() for sample in samples_of(task, encode)]
    assert first == [sample.input_ids.tolist() for sample in samples_of(task, encode)]
    assert sorted(map(text_of, first)) == sorted(
        f"Box {n % 30} is red.\n\nQuestion: Which {n}?\nAnswer: it" for n in range(90)
    )
    assert len(encode.derived("question answering documents", dict)) <= 8


def test_same_seed_same_bytes_on_every_platform(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [{**ROWS[0], "question": f"Who was number {n}?"} for n in range(50)])
    task = QuestionAnswering(("triviaqa",), str(path), prompts=("twice",))
    texts = [text_of(sample.input_ids) for sample in samples_of(task, seed=17)]
    # Recorded once. A change here changes every published number: it needs a new version of the task.
    assert hashlib.sha256("\f".join(texts).encode()).hexdigest()[:16] == "d3179acb7d403885"
    assert texts != [text_of(sample.input_ids) for sample in samples_of(task, seed=18)]


@pytest.mark.parametrize(
    ("said", "right"),
    [(" Ida Holm.", True), (" it was HOLM in 1884", True), (" Ida\nHolm", False), ("\nIda Holm", False), ("", False)],
)
def test_an_answer_contains_an_accepted_one_before_its_line_ends(tmp_path: Path, said: str, right: bool) -> None:
    task = QuestionAnswering(("own",), str(write(tmp_path / "rows.jsonl", ROWS[:1])), metrics=())
    (sample,) = samples_of(task)
    assert task.judge(task.cells([])[0], sample, said) is right
    assert task.ended(said) == ("\n" in said)


def test_the_protocol_and_the_metrics() -> None:
    task = QuestionAnswering(metrics=("bleu", "f1"))
    assert isinstance(task, TextMetricTask) and task.text_metrics == ("bleu", "f1")
    assert task.answer_of(" two words \nQuestion: more") == "two words"
    assert set(TEXT_METRICS) == set(METRICS)


BROKEN = [
    (b"{", "line 3: it is not JSON"),
    (b'{"question": "Q", "answers": ["A"]}', 'line 3: "context" is missing'),
    (b'{"context": "C", "question": "", "answers": ["A"]}', 'line 3: "question" is empty'),
    (b'{"context": "C", "question": "Q", "answers": []}', 'line 3: "answers" must be a list'),
    (b'{"context": "C", "question": "Q", "answers": "A"}', 'line 3: "answers" must be a list'),
    (b'{"context": "C", "question": "Q", "answers": [1]}', 'line 3: "answers" must be text, got int'),
    (b'{"context": "C", "question": "Q", "answers": ["A"], "history": ["x"]}', 'line 3: "history" must be a list'),
    (b'{"context": "C", "question": "Q", "answers": ["A"], "ending": 1}', 'line 3: "ending" must be text'),
    (b'{"context": "C\\ud800", "question": "Q", "answers": ["A"]}', 'line 3: "context" holds half of a surrogate'),
    (b'{"context": "\xff", "question": "Q", "answers": ["A"]}', "line 3: byte 0xff is not UTF-8"),
    (b"[" * 100_000, "line 3: it is"),
]


@pytest.mark.parametrize(("line", "words"), BROKEN, ids=range(len(BROKEN)))
def test_a_broken_row_is_named_and_the_rest_unharmed(tmp_path: Path, line: bytes, words: str) -> None:
    whole = write(tmp_path / "whole.jsonl", ROWS)
    lines = whole.read_bytes().splitlines()
    path = tmp_path / "rows.jsonl"
    # A mark at the beginning, Windows line ends and an empty line are no damage.
    path.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join([lines[0], b"", line, *lines[1:]]))
    with pytest.raises(UserError, match=re.escape(words)) as caught:
        QuestionAnswering(("own",), str(path)).cells([])
    assert str(caught.value).startswith(f"{path}, line 3: ") and "skip_broken" in str(caught.value)
    task = QuestionAnswering(("own",), str(path), skip_broken=True)
    with pytest.warns(UserWarning, match="left out 1 broken rows"):
        facts = task.data_facts()["own"]
    good = QuestionAnswering(("own",), str(whole))
    assert facts == good.data_facts()["own"] | {"skipped": 1} and facts["rows"] == 4
    for one, other in zip(samples_of(task), samples_of(good), strict=True):
        assert one.input_ids.tolist() == other.input_ids.tolist()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "holds no usable row"),
        (b"\n \n", "holds no usable row"),
        (b"{}\n", "the first of 1 broken ones is line 1"),
    ],
)
def test_a_file_without_a_good_row(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=words):
        QuestionAnswering(("own",), str(path), skip_broken=True).cells([])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"datasets": ("squat",)}, 'Did you mean "squad"'),
        ({"datasets": ()}, "name at least one of datasets"),
        ({"prompts": ("thrice",)}, 'unknown "thrice" in prompts'),
        ({"metrics": ("rougel",)}, 'Did you mean "rouge_l"'),
        ({"datasets": ("own",)}, "needs data=FILE"),
        ({"answer_tokens": 0}, "answer_tokens must be at least 1"),
        ({"document_tokens": -1}, "document_tokens must not be negative"),
    ],
)
def test_bad_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        QuestionAnswering(**options)


def test_files_and_folders(tmp_path: Path) -> None:
    write(tmp_path / "nq.jsonl", ROWS[:2])
    write(tmp_path / "drop.jsonl", ROWS)
    task = QuestionAnswering(("nq", "drop"), str(tmp_path), prompts=("once", "twice"))
    counts = [(cell["dataset"], cell["prompt"], task.available(cell)) for cell in task.cells([])]
    assert counts == [("nq", "once", 2), ("nq", "twice", 2), ("drop", "once", 4), ("drop", "twice", 4)]
    with pytest.raises(UserError, match=r"no file .*fda\.jsonl"):
        QuestionAnswering(("fda",), str(tmp_path)).cells([])
    with pytest.raises(UserError, match="is not a folder, but there are 2 datasets"):
        QuestionAnswering(("nq", "drop"), str(tmp_path / "nq.jsonl")).cells([])
    with pytest.raises(UserError, match=r"cannot read the jsonl file .*none\.jsonl"):
        QuestionAnswering(("nq",), str(tmp_path / "none.jsonl")).cells([])


_CLOZE = {"context": "[DOC] [TLE] A man. He ran. It was", "orig_question": "Who ran?", "question": "It was"}
HUB: dict[str, tuple[dict[str, Any], list[Row]]] = {
    name: (
        _CLOZE | {"answers": ["he"]},
        [Row(_CLOZE["context"].replace("[DOC] [TLE]", " "), "Who ran?", ("he",), "It was")],
    )
    for name in ("triviaqa", "nq", "drop")
}
HUB["squad"] = (
    {"context": "A man ran.", "question": "Who ran?", "text": "A man ran. It was", "value": "A man"},
    [Row("A man ran.", "Who ran?", ("A man",), "It was")],
)
HUB["swde"] = (
    {"text": "Film. 1984. Summary of information above... Year:", "key": "year", "value": "1984"},
    [Row("Film. 1984. ", "year", ("1984",))],
)
HUB["fda"] = ({"text": "Device. 510k", "key": "device", "value": "510k"}, [Row("Device. 510k", "device", ("510k",))])
HUB["coqa"] = (
    {"story": "He ran.", "questions": ["Who?", "How?"], "answers": {"input_text": ["he", "fast"]}},
    [Row("He ran.", "Who?", ("he",)), Row("He ran.", "How?", ("fast",), "", (("Who?", "he"),))],
)
HUB["narrativeqa"] = (
    {
        "document": {"summary": {"text": "He ran."}},
        "question": {"text": "Who?"},
        "answers": [{"text": "he"}, {"text": "him"}],
    },
    [Row("He ran.", "Who?", ("he", "him"))],
)


@pytest.mark.parametrize("dataset", SOURCES)
def test_rows_of_the_hub(monkeypatch: pytest.MonkeyPatch, dataset: str) -> None:
    raw, rows = HUB[dataset]
    source = SOURCES[dataset]

    def load_dataset(path: str, config: str | None, *, split: str, trust_remote_code: bool) -> list[Any]:
        assert (path, config, split, trust_remote_code) == (*source[:3], False)
        return [raw, {"unknown": 1}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert [parse_row(made) for made in list(source.convert(raw))] == rows
    with pytest.raises(UserError, match=rf"^{source.path} \({source.split}\), row 2: it has not the expected fields"):
        QuestionAnswering((dataset,)).cells([])
    task = QuestionAnswering((dataset,), skip_broken=True)
    with pytest.warns(UserWarning, match="left out 1 broken rows"):
        (cell,) = task.cells([])
    assert task.available(cell) == len(rows) and set(STYLES) == {*SOURCES, "own"}


WORD = st.text("abc .:\n", min_size=1, max_size=12).filter(str.strip)


@given(context=WORD, question=WORD, style=st.sampled_from(sorted(set(STYLES.values()))))
def test_reading_twice_says_nothing_but_the_question_and_the_document_again(
    context: str, question: str, style: str
) -> None:
    row = Row(context, question, ("x",))
    once, twice = (build_prompt(style, form, row) for form in ("once", "twice"))
    assert (once.document, once.tail) == (twice.document, twice.tail)
    assert once.lead == "" and twice.lead.lower().endswith((question.strip().strip(":") + " ", ". "))

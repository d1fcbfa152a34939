"""The registry, text files, text windows, lengths, and what the package may import."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import longrecall
from longrecall.errors import UserError
from longrecall.tasks import (
    BitsPerByte,
    Phonebook,
    answer_spans,
    create_task,
    read_text,
    register,
    sequence_task_names,
    task_names,
    wording_of,
)
from longrecall.units import format_length, parse_length

SOURCE = str(Path(longrecall.__file__).parents[1])


def test_names() -> None:
    assert task_names()[:3] == ("phonebook", "passkey", "bits_per_byte")
    assert create_task("phonebook", pairs=(2,)) == Phonebook(pairs=(2,))


def test_unknown_names_suggest_the_nearest() -> None:
    with pytest.raises(UserError, match=r'unknown task "phonbook".*Did you mean "phonebook"'):
        create_task("phonbook")
    with pytest.raises(UserError, match=r'no option "pair".*Did you mean "pairs"'):
        create_task("phonebook", pair=(2,))


def test_a_taken_name_is_refused() -> None:
    with pytest.raises(ValueError, match="'phonebook' is registered twice"):
        register(Phonebook)


def test_tasks_import_neither_models_nor_evaluation_nor_torch() -> None:
    code = (
        "import sys, longrecall.tasks\n"
        "heavy = [m for m in sys.modules if m.split('.')[0] in ('torch', 'transformers')\n"
        "         or m.startswith(('longrecall.models', 'longrecall.evaluation'))]\n"
        "sys.exit(repr(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": SOURCE})
    assert done.returncode == 0, done.stderr


def test_read_text(tmp_path: Path) -> None:
    good, empty, bad = (tmp_path / name for name in ("good.txt", "empty.txt", "bad.txt"))
    good.write_bytes("Grüße\r\n".encode())
    empty.write_bytes(b"")
    bad.write_bytes(b"abc\xff")
    assert read_text(good) == "Grüße\r\n"
    with pytest.raises(UserError, match=r"empty\.txt is empty"):
        read_text(empty)
    with pytest.raises(UserError, match=r"bad\.txt is not UTF-8: byte 0xff at offset 3"):
        read_text(bad)
    with pytest.raises(UserError, match=r"cannot read the text file .*none\.txt"):
        read_text(tmp_path / "none.txt")


def test_ranges_double_and_end_at_the_longest_length() -> None:
    ranges = [(cell["start"], cell["end"]) for cell in BitsPerByte("x").cells([512, 1500])]
    assert ranges == [(0, 256), (256, 512), (512, 1024), (1024, 1500)]
    assert BitsPerByte("x").cells([100]) == [{"start": 0, "end": 100}]


@given(tokens=st.integers(1, 10_000), length=st.integers(1, 500), samples=st.integers(1, 200))
def test_windows_never_overlap_nor_pass_the_end(tokens: int, length: int, samples: int) -> None:
    task = BitsPerByte("x", windows=100)
    if tokens < length:
        with pytest.raises(UserError, match="fewer than the length"):
            task.window_starts(tokens, length, samples)
        return
    starts = task.window_starts(tokens, length, samples)
    assert len(starts) == min(samples, 100, tokens // length)
    assert (np.diff(starts) >= length).all()
    assert starts[0] == 0 and starts[-1] + length <= tokens


@pytest.mark.parametrize(
    ("options", "words"),
    [({}, "needs text"), ({"text": "x", "first": 1}, "position 2"), ({"text": "x", "windows": 0}, "at least 1")],
)
def test_bad_text_options(options: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        create_task("bits_per_byte", **options)


def test_answer_spans() -> None:
    labels = np.array([7, -100, 3, 4, -100, -100, 9])
    assert answer_spans(labels).tolist() == [[0, 1], [2, 4], [6, 7]]
    assert answer_spans(np.full(3, -100)).shape == (0, 2)


def test_lengths() -> None:
    assert [parse_length(text) for text in (512, "512", "4k", "4K", "1m", " 2k ")] == [
        512,
        512,
        4096,
        4096,
        2**20,
        2048,
    ]
    for length in (1, 500, 1024, 1536, 4096, 2**20, 3 * 2**19):
        assert parse_length(format_length(length)) == length
    assert format_length(4096) == "4k"


@pytest.mark.parametrize("text", ["", "k", "4.5k", "-1", "4g", "1e3", "four", "4 k k", 0, "0", -3, None, 2.5, True])
def test_lengths_that_are_nonsense(text: object) -> None:
    with pytest.raises(UserError, match=re.escape(repr(text))):
        parse_length(text)  # type: ignore[arg-type]


def test_every_task_says_what_it_is_in_words() -> None:
    names = (*task_names(), *sequence_task_names())
    for name in names:
        words = wording_of(name)
        assert words.title and "_" not in words.title, name
        # Whole sentences, plain enough for a page.
        assert words.explanation.endswith(".") and words.explanation[0].isupper() and "_" not in words.explanation, name
    assert len({wording_of(name).title for name in names}) == len(names)


def test_a_task_of_others_keeps_its_name_and_places_are_read_aloud() -> None:
    assert (wording_of("lm_eval:lambada").title, wording_of("lm_eval:lambada").explanation) == ("lm_eval:lambada", "")
    assert wording_of("phonebook").place({"pairs": 1, "distance": 0}) == "among 1 pair"
    assert wording_of("phonebook").place({"pairs": 8, "distance": 512}) == "among 8 pairs, 512 tokens away"
    assert wording_of("niah_single_1").place({"length": 512, "depth": 0.5}) == "in 512 tokens, depth 0.5"
    assert wording_of("babilong").place({"task": "qa1", "length": 512}) == "task qa1, in 512 tokens"
    assert wording_of("mine").place({"shots": 8, "share": 0.25}) == "shots 8, share 0.25"

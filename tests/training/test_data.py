from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longrecall.errors import UserError
from longrecall.models.byte_tokenizer import END_ID, byte_tokenizer
from longrecall.training.corpora.base import Corpus, find_files
from longrecall.training.corpora.jsonl import JsonlCorpus
from longrecall.training.corpora.parquet import ParquetCorpus
from longrecall.training.corpora.text import TextCorpus
from longrecall.training.data import BatchStream, join_positions
from longrecall.training.encoding import DocumentEncoder
from longrecall.training.recipe import DataRecipe
from longrecall.training.sources import CorpusSource
from longrecall.training.strict_yaml import build

TOKENIZER = byte_tokenizer()
ENCODE = DocumentEncoder(TOKENIZER)
# tmp_path is shared by the examples of one test; every example writes its own content first.
SHARED_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)


def stream_of(*sources: dict[str, Any], context: int = 32, batch: int = 4, seed: int = 0, **place: int) -> BatchStream:
    recipe: DataRecipe = build(DataRecipe, {"context_length": context, "seed": seed, "sources": list(sources)}, "data")
    return BatchStream(recipe, TOKENIZER, batch, **place)


def documents_of(corpus: Corpus) -> list[str]:
    return [document for chunk in range(len(corpus)) for document in texts_of(corpus, chunk)]


def texts_of(corpus: Corpus, chunk: int) -> list[str]:
    return [str(document) for _, document in corpus.read(chunk)]


class Listed:
    """A corpus of given chunks."""

    def __init__(self, *chunks: list[str]) -> None:
        self._chunks = chunks

    def __len__(self) -> int:
        return len(self._chunks)

    streamed = False

    def size(self, chunk: int) -> int:
        return len(self._chunks[chunk])

    def read(self, chunk: int, start: Any = None, part: int = 0, parts: int = 1) -> Iterator[tuple[int, str]]:
        documents = list(enumerate(self._chunks[chunk]))
        yield from (item for item in documents[start or 0 :] if item[0] % parts == part)

    def describe(self, chunk: int) -> str:
        return f"chunk {chunk}"

    def amount(self) -> list[int]:
        return [len(self._chunks)]


@SHARED_FOLDER
@given(
    documents=st.lists(
        st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\f"), max_size=80), min_size=1
    ),
    chunk=st.integers(4, 64),
)
def test_text_chunks_lose_nothing(tmp_path: Path, documents: list[str], chunk: int) -> None:
    """Any text, any chunk size: the pieces put together are the text, and no piece spans two documents."""
    path = tmp_path / "t.txt"
    path.write_bytes("\f".join(documents).encode())
    if not "".join(documents).encode().strip(b" \t\r\n\x0c"):
        return
    corpus = TextCorpus([path], chunk)
    pieces = documents_of(corpus)
    joined, whole = "".join(pieces), "".join(documents).removeprefix("\ufeff")
    # Pieces of white space alone may be dropped.
    assert "".join(joined.split()) == "".join(whole.split())
    assert all("\f" not in piece for piece in pieces)
    assert all(any(piece in document for document in documents) for piece in pieces)


def test_small_documents_share_a_chunk_and_long_ones_are_cut_at_paragraphs(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text(
        "one\ftwo\fthree\f" + "first paragraph.\n\na second and longer paragraph.\n\n" + "third." * 6, encoding="utf-8"
    )
    corpus = TextCorpus([path], 40)
    assert texts_of(corpus, 0) == ["one", "two", "three"]
    assert texts_of(corpus, 1) == ["first paragraph.\n\na second and longer paragraph.\n\n"]
    assert texts_of(corpus, 2) == ["third." * 6]
    assert corpus.describe(1) == f"{path} bytes 40-80"


@pytest.mark.parametrize("content", [b"", b" \n\f\n "])
def test_empty_text_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "empty.txt"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"empty\.txt is empty"):
        stream_of({"kind": "text", "path": str(path)})


@pytest.mark.parametrize("before", [0, 5, 20_000])
def test_not_utf8_names_file_and_byte(tmp_path: Path, before: int) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes(b"a" * before + b"\xe9t\xe9 and more text")
    with pytest.raises(UserError, match=rf"latin\.txt is not UTF-8: byte 0xe9 at offset {before}"):
        stream_of({"kind": "text", "path": str(path)})


def test_missing_file_and_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.sources\.0 \(text\): path: there is no file or folder"):
        stream_of({"kind": "text", "path": str(tmp_path / "none.txt")})
    with pytest.raises(UserError, match=r"has no \*\.txt files"):
        stream_of({"kind": "text", "path": str(tmp_path)})
    with pytest.raises(UserError, match="no file matches"):
        stream_of({"kind": "text", "path": str(tmp_path / "*.txt")})


def test_files_from_a_file_a_folder_and_a_pattern(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "c.md"):
        (tmp_path / name).write_text("x")
    both = [tmp_path / "a.txt", tmp_path / "b.txt"]
    assert find_files(str(tmp_path), ".txt", "path") == both
    assert find_files(str(tmp_path / "*.txt"), ".txt", "path") == both
    assert find_files(str(tmp_path / "c.md"), ".txt", "path") == [tmp_path / "c.md"]


def test_context_longer_than_the_data(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("only a few words", encoding="utf-8")
    with pytest.raises(UserError, match="only 17 tokens, fewer than the context_length 64"):
        stream_of({"kind": "text", "path": str(path)}, context=64)
    assert stream_of({"kind": "text", "path": str(path)}, context=17).next_batch()["input_ids"].shape == (4, 17)


def test_task_that_does_not_fit_the_context() -> None:
    with pytest.raises(UserError, match=r"data\.sources\.0 \(phonebook\)"):
        stream_of({"kind": "phonebook", "pairs": [8, 9]}, context=24)


@SHARED_FOLDER
@given(
    texts=st.lists(st.text(max_size=40), min_size=1, max_size=30), end=st.sampled_from(["\n", "\n\n", "\r\n", " \n"])
)
def test_jsonl_documents_round_trip(tmp_path: Path, texts: list[str], end: str) -> None:
    path = tmp_path / "d.jsonl"
    lines = [json.dumps({"text": text, "other": 1}) for text in texts]
    path.write_bytes((end.join(lines) + "\n").encode())
    assert documents_of(JsonlCorpus([path], 50, "text")) == [text for text in texts if text]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', "line 3 is not valid JSON"),
        (b'{"txt": "a"}', 'line 3 is not a JSON object with text under "text"'),
        (b'["a"]', "line 3 is not a JSON object"),
        (b'{"text": 5}', "line 3 is not a JSON object with text"),
        (b'{"text": "\xff"}', "not UTF-8: byte 0xff at offset 39"),
    ],
)
def test_broken_jsonl_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "d.jsonl"
    # Two good lines, 24 and 5 bytes long, come first; the second is blank.
    path.write_bytes(b'{"text": "hello world"}\n' + b"    \n" + line)
    with pytest.raises(UserError, match=message):
        stream_of({"kind": "jsonl", "path": str(path)}, context=4)


def test_jsonl_lines_of_a_large_file_are_checked_when_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'{"text": "hello"}\n' * 3 + b"{broken\n")
    monkeypatch.setattr("longrecall.training.corpora.base.CHECK_AHEAD", 10)
    corpus = JsonlCorpus([path], 18, "text")
    assert [texts_of(corpus, chunk) for chunk in range(3)] == [["hello"]] * 3
    with pytest.raises(UserError, match="line 4 is not valid JSON"):
        documents_of(corpus)


def test_parquet_documents(tmp_path: Path) -> None:
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    path = tmp_path / "d.parquet"
    texts = [f"document {i}" for i in range(10)]
    parquet.write_table(arrow.table({"text": [*texts, None, ""], "n": list(range(12))}), path, row_group_size=5)
    assert documents_of(ParquetCorpus([path], "text")) == texts
    with pytest.raises(UserError, match='no column "body"; it has text, n'):
        ParquetCorpus([path], "body")
    with pytest.raises(UserError, match='column "n" holds int64'):
        ParquetCorpus([path], "n")
    (tmp_path / "broken.parquet").write_bytes(path.read_bytes()[:40])
    with pytest.raises(UserError, match="is not a whole parquet file"):
        ParquetCorpus([tmp_path / "broken.parquet"], "text")
    assert stream_of({"kind": "parquet", "path": str(path)}).next_batch()["labels"].shape == (4, 32)


def test_one_lane_reads_every_document_once_an_epoch_joined_by_the_end_token() -> None:
    chunks = [[f"a{i}", f"b{i}"] for i in range(5)]
    total = sum(len(document) + 1 for chunk in chunks for document in chunk)
    source = CorpusSource(Listed(*chunks), ENCODE, total, seed=3, number=0, rows=1, lanes=(1, 1))
    orders = []
    for _ in range(3):
        ids = source.next_of(0).input_ids
        words = bytes(0 if token == END_ID else int(token) for token in ids).decode().split("\0")
        assert words[-1] == ""
        assert sorted(words[:-1]) == sorted(document for chunk in chunks for document in chunk)
        assert all(words.index(f"b{i}") == words.index(f"a{i}") + 1 for i in range(5))
        orders.append(words)
    assert orders[0] != orders[1] and orders[1] != orders[2]


@pytest.mark.parametrize("rows", [2, 3])
def test_rows_read_disjoint_chunks(rows: int) -> None:
    source = CorpusSource(Listed(*[[f"{i:04d}"] for i in range(40)]), ENCODE, 5, 0, 0, rows=rows, lanes=(1, 1))
    seen = []
    for lane in range(rows):
        found = [bytes(source.next_of(lane).input_ids[:4].astype(np.uint8)) for _ in range(40 // rows)]
        seen.append(set(found))
        assert len(seen[-1]) == 40 // rows
    assert not set.intersection(*seen)


def test_more_rows_than_chunks_still_read() -> None:
    """All of them read everything, each from another place, so that no two give the same sequences."""
    source = CorpusSource(Listed(["abcdefg"]), ENCODE, 8, 0, 0, rows=4, lanes=(4, 1))
    lanes = [source.next_of(lane).input_ids for lane in range(4)]
    first = ["".join("|" if token == END_ID else chr(token) for token in ids) for ids in lanes]
    assert sorted(first) == ["abcdefg|", "cdefg|ab", "efg|abcd", "g|abcdef"]


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return bool(torch.equal(a["input_ids"], b["input_ids"]) and torch.equal(a["labels"], b["labels"])) and (
        (a["origin"], a["first"]) == (b["origin"], b["first"])
    )


@pytest.fixture
def sources(tmp_path: Path, text: Path) -> list[dict[str, Any]]:
    path = tmp_path / "d.jsonl"
    path.write_text("\n".join(json.dumps({"text": f"row {i} " * 9}) for i in range(30)), encoding="utf-8")
    return [
        {"kind": "text", "path": str(text)},
        {"kind": "jsonl", "path": str(path), "weight": 0.5},
        {"kind": "phonebook", "pairs": [2, 3], "weight": 0.25},
        {"kind": "passkey", "weight": 0.25},
    ]


@pytest.mark.parametrize("done", [0, 1, 7, 60])
def test_stream_continues_exactly_from_its_position(sources: list[dict[str, Any]], done: int) -> None:
    stream = stream_of(*sources, context=160, seed=5)
    for _ in range(done):
        stream.next_batch()
    position = json.loads(json.dumps(stream.position()))
    expected = [stream.next_batch() for _ in range(4)]
    assert len(json.dumps(position)) < 4000
    again = stream_of(*sources, context=160, seed=5)
    again.restore(position)
    assert all(same(again.next_batch(), batch) for batch in expected)


def test_stream_depends_on_seed_and_process(sources: list[dict[str, Any]]) -> None:
    first = stream_of(*sources, context=160).next_batch()
    assert same(first, stream_of(*sources, context=160).next_batch())
    assert not same(first, stream_of(*sources, context=160, seed=1).next_batch())
    assert not same(first, stream_of(*sources, context=160, data_rank=1, data_world=2).next_batch())


def test_weights_decide_the_mixture(sources: list[dict[str, Any]]) -> None:
    stream = stream_of(*sources, context=160, batch=400)
    origins = stream.next_batch()["origin"]
    phone = sum(origin.startswith("phonebook") for origin in origins)
    # 400 draws at probability 1/8: mean 50, standard deviation 6.6; the bounds are four of them.
    assert 24 <= phone <= 76


def test_labels_of_text_and_of_tasks(sources: list[dict[str, Any]]) -> None:
    text = stream_of(sources[0]).next_batch()
    assert torch.equal(text["input_ids"], text["labels"])
    book = stream_of(sources[2], context=64).next_batch()
    scored = book["labels"] != -100
    assert torch.equal(book["labels"][scored], book["input_ids"][scored])
    assert bool((book["input_ids"][scored] >= ord("0")).all()) and bool((book["input_ids"][scored] <= ord("9")).all())
    assert 0 < int(scored.sum()) < scored.numel() / 2


def test_neighbouring_sequences_come_from_different_texts(tmp_path: Path) -> None:
    path = tmp_path / "books.txt"
    path.write_text("\f".join(f"{i:02d}" * 12_000 for i in range(50)), encoding="utf-8")
    origins = stream_of({"kind": "text", "path": str(path)}, batch=32).next_batch()["origin"]
    # 32 draws from 50 and more lanes hit 23.6 different ones on average; one lane after another would give 1.
    assert len(set(origins)) > 15


def test_restore_refuses_other_data(text: Path, sources: list[dict[str, Any]], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="other data sources"):
        stream_of(sources[0]).restore(stream_of(*sources, context=160).position())
    other = tmp_path / "longer.txt"
    other.write_text("many words " * 20_000, encoding="utf-8")
    with pytest.raises(UserError, match="training data has changed"):
        stream_of(sources[0]).restore(stream_of({"kind": "text", "path": str(other)}).position())


def test_tokenizer_without_end_token() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="no end token"):
        DocumentEncoder(tokenizer)


@pytest.fixture
def hub_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], str]:
    """A local folder that `datasets` reads like a hub dataset, without a network."""
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))

    def make(texts: list[str]) -> str:
        (tmp_path / "hub").mkdir()
        lines = "\n".join(json.dumps({"text": text}) for text in texts)
        (tmp_path / "hub" / "train.jsonl").write_text(lines, encoding="utf-8")
        return str(tmp_path / "hub")

    return make


def test_hub_dataset_streams_repeats_and_resumes(hub_folder: Callable[[list[str]], str]) -> None:
    texts = [f"document number {i}" for i in range(7)]
    source = {"kind": "hub", "name": hub_folder(texts)}
    stream = stream_of(source, context=20, batch=1)
    batches, positions = [], []
    for _ in range(18):
        positions.append(json.loads(json.dumps(stream.position())))
        batches.append(stream.next_batch())
    ids = torch.cat([batch["input_ids"][0] for batch in batches]).tolist()
    joined = "".join("|" if token == END_ID else chr(token) for token in ids)
    assert joined == ("|".join(texts) + "|") * 2 + joined[2 * len("|".join(texts) + "|") :]
    starts = [20 * number + start for number, batch in enumerate(batches) for start in batch["starts"][0]]
    assert starts == [0, *(place + 1 for place, token in enumerate(ids[:-1]) if token == END_ID)]
    for at in (0, 3, 9, 16):  # within the first and the second pass
        again = stream_of(source, context=20, batch=1)
        again.restore(positions[at])
        assert all(same(again.next_batch(), batch) for batch in batches[at:])


def test_hub_errors(hub_folder: Callable[[list[str]], str], tmp_path: Path) -> None:
    name = hub_folder(["short"])
    with pytest.raises(UserError, match="only 6 tokens, fewer than the context_length 32"):
        stream_of({"kind": "hub", "name": name}).next_batch()
    with pytest.raises(UserError, match='no text column "body"; it has text'):
        stream_of({"kind": "hub", "name": name, "column": "body"}, context=4).next_batch()
    with pytest.raises(UserError, match="cannot be opened"):
        stream_of({"kind": "hub", "name": str(tmp_path / "nothing")})


def test_hub_dataset_is_the_same_on_any_number_of_processes(hub_folder: Callable[[list[str]], str]) -> None:
    """Three shards, four rows, also read on row by row; a resume of two processes as one."""
    name = Path(hub_folder([f"first {i}" for i in range(9)]))
    for number in range(2):
        lines = "\n".join(json.dumps({"text": f"shard {number} text {i}"}) for i in range(30))
        (name / f"train-{number}.jsonl").write_text(lines, encoding="utf-8")
    source = {"kind": "hub", "name": str(name)}
    one, two = stream_of(source), [stream_of(source, batch=2, data_rank=rank, data_world=2) for rank in range(2)]
    assert len({tuple(row.tolist()) for row in one.next_batch()["input_ids"]}) == 4
    one = stream_of(source)
    for _ in range(7):
        halves = [stream.next_batch()["input_ids"] for stream in two]
        assert torch.equal(one.next_batch()["input_ids"], torch.cat(halves))
    again = stream_of(source)
    again.restore(json.loads(json.dumps(join_positions([stream.position() for stream in two]))))
    assert same(again.next_batch(), one.next_batch())

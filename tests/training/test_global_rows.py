"""The order of the data belongs to the global batch: any number of processes, any number of workers, any resume."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longrecall.cli.main import _system_failure
from longrecall.errors import UserError
from longrecall.models.byte_tokenizer import byte_tokenizer
from longrecall.training.corpora.text import TextCorpus
from longrecall.training.data import BatchStream, join_positions
from longrecall.training.recipe import DataRecipe
from longrecall.training.sources import LANES, Order, lanes_for
from longrecall.training.strict_yaml import build
from longrecall.training.token_files import write_token_files
from longrecall.training.tokenizing import CHUNK_BYTES

TOKENIZER = byte_tokenizer()
ROWS = 16


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """A source of every kind; the small ones have fewer chunks than rows, and the last text is one long document."""
    folder = tmp_path_factory.mktemp("data")
    documents = [f"Story {i}. " + f"The {i}th fox met a dog. " * (i % 17) for i in range(500)]
    lines = [json.dumps({"text": document}) for document in documents]
    (folder / "many.txt").write_text("\f".join(documents))
    (folder / "book.txt").write_text(" ".join(str(number) for number in range(3000)))
    (folder / "d.jsonl").write_text("\n".join(lines))
    for number in range(3):
        with gzip.open(folder / f"{number}.jsonl.gz", "wt") as file:
            file.write("\n".join(lines[number::3]))
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"text": documents}), folder / "d.parquet", row_group_size=8)
    corpus = TextCorpus([folder / "many.txt"], CHUNK_BYTES)
    write_token_files(corpus, 1, TOKENIZER, folder / "tokens", source={}, workers=0)
    return [
        {"kind": "text", "path": str(folder / "many.txt")},
        {"kind": "text", "path": str(folder / "book.txt"), "weight": 0.5},
        {"kind": "jsonl", "path": str(folder / "d.jsonl")},
        {"kind": "jsonl", "path": str(folder / "*.gz")},
        {"kind": "parquet", "path": str(folder / "d.parquet")},
        {"kind": "tokens", "path": str(folder / "tokens")},
        {"kind": "phonebook", "pairs": [2, 3], "weight": 0.5},
    ]


def streams_of(
    sources: Sequence[dict[str, Any]], world: int, rows: int = ROWS, *, continued: bool = False, **more: Any
) -> list[BatchStream]:
    """The streams of all processes."""
    data = {"context_length": 64, "seed": 3, "sources": list(sources), **more}
    recipe: DataRecipe = build(DataRecipe, data, "data")
    return [BatchStream(recipe, TOKENIZER, rows // world, rank, world, continued=continued) for rank in range(world)]


def rows_of(streams: Sequence[BatchStream]) -> list[tuple[Any, ...]]:
    """The rows of the next global batch, whole, one after the other."""
    return [row for stream in streams for row in rows_in(stream.next_batch())]


def rows_in(batch: dict[str, Any]) -> list[tuple[Any, ...]]:
    columns = (batch["input_ids"].tolist(), batch["labels"].tolist(), batch["text"].tolist())
    numbers = range(batch["first"], batch["first"] + len(batch["starts"]))
    return list(zip(numbers, *columns, batch["starts"], batch["origin"], strict=True))


@pytest.mark.parametrize("continued", [False, True])
def test_the_order_is_the_same_on_1_2_and_16_processes(sources: list[dict[str, Any]], continued: bool) -> None:
    worlds = [streams_of(sources, world, continued=continued) for world in (1, 2, 16)]
    seen = []
    for _ in range(12):
        one, two, sixteen = (rows_of(streams) for streams in worlds)
        assert one == two == sixteen
        seen += one
    assert [row[0] for row in seen] == list(range(12 * ROWS))
    kinds = {row[-1].split()[0].rpartition("/")[2] for row in seen}
    assert len(kinds) >= 7, kinds


@settings(max_examples=4, deadline=None)
@given(steps=st.lists(st.tuples(st.integers(0, 5), st.sampled_from([1, 2, 4, 8])), min_size=1, max_size=2))
@pytest.mark.parametrize("continued", [False, True])
def test_a_resume_on_other_numbers_of_processes_goes_on(
    sources: list[dict[str, Any]], continued: bool, steps: list[tuple[int, int]]
) -> None:
    """Anywhere, any number of times: the batches are those of one process that was never stopped."""
    whole = streams_of(sources, 1, continued=continued)
    position = None
    for batches, world in [*steps, (2, 2)]:
        streams = streams_of(sources, world, continued=continued)
        for stream in streams if position is not None else ():
            stream.restore(position)
        for _ in range(batches):
            assert rows_of(streams) == rows_of(whole)
        position = json.loads(json.dumps(join_positions([stream.position() for stream in streams])))
        assert position == json.loads(json.dumps(whole[0].position()))


def test_positions_that_do_not_belong_are_refused(sources: list[dict[str, Any]]) -> None:
    first, second = streams_of(sources[:1], 2)
    before = first.position()
    with pytest.raises(UserError, match="lacks some of the rows 8 to 15"):
        second.restore(before)
    first.next_batch()
    with pytest.raises(UserError, match="do not belong together"):
        join_positions([first.position(), second.position()])
    with pytest.raises(
        UserError, match=r"batches of 16 rows over all processes, and now there are 8. Choose run\.batch_"
    ):
        streams_of(sources[:1], 1, rows=8)[0].restore(before)
    with pytest.raises(UserError, match="saved by an older version"):
        first.restore({"sequence": 4, "sources": [{"index": 4, "lanes": [[0, 0, 0, 9]]}]})
    # Processes of one context group have the same rows.
    assert join_positions([before, before, second.position()])["covers"] == [[0, 16]]


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_change_nothing_and_the_position_is_that_of_the_last_batch(
    sources: list[dict[str, Any]], workers: int
) -> None:
    (alone,), (helped,) = streams_of(sources, 1, rows=4), streams_of(sources, 1, rows=4, workers=workers)
    for stream in (alone, helped):
        stream.next_batch()
    batches = iter(helped)
    for _ in range(9):
        assert rows_in(next(batches)) == rows_of([alone])
        assert helped.position() == alone.position()
    batches.close()  # type: ignore[attr-defined]
    assert 0.0 < helped.waited_share() <= 1.0
    # What the workers had read ahead is forgotten.
    assert rows_of([helped]) == rows_of([alone])
    # Where processes are not forked they get a copy.
    copied = pickle.loads(pickle.dumps(helped))
    assert rows_of([copied]) == rows_of([alone])


def test_a_worker_that_fails_or_is_killed_ends_the_run_with_a_line(
    sources: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (stream,) = streams_of(sources[:1], 1, rows=2, workers=2)
    batches = iter(stream)
    next(batches)
    children = torch.multiprocessing.active_children()
    assert len(children) == 2
    os.kill(children[0].pid, signal.SIGKILL)  # type: ignore[arg-type]
    # torch may also say it while the process does something else; then the command line makes a line of it.
    with pytest.raises((UserError, RuntimeError), match="DataLoader worker") as caught:
        for _ in range(100):
            next(batches)
    line = str(caught.value) if isinstance(caught.value, UserError) else _system_failure(caught.value)
    assert line is not None and "a data worker has ended" in line and "data.workers" in line
    (stream,) = streams_of(sources[:1], 1, rows=2, workers=2)

    def fail(*_: Any) -> Any:
        raise RuntimeError("no such kernel")

    with monkeypatch.context() as patch:
        patch.setattr(type(stream), "read_rows", fail)
        with pytest.raises(RuntimeError, match="no such kernel") as failure:
            next(iter(stream))
    # Its own error, and no lack of memory.
    assert not isinstance(failure.value, UserError) and _system_failure(failure.value) is None
    monkeypatch.setattr("longrecall.training.corpora.base.CHECK_AHEAD", 1)
    path = tmp_path / "d.jsonl"
    path.write_text(
        '{"text": "enough of a text for a sequence, and more than enough, much more"}\n' * 400 + "{broken\n"
    )
    (stream,) = streams_of([{"kind": "jsonl", "path": str(path)}], 1, rows=2, workers=2)
    with pytest.raises(UserError, match=r"data\.sources\.0: .*d\.jsonl line 401 is not valid JSON") as caught:
        for _ in stream:
            pass
    assert "\n" not in str(caught.value)


@settings(max_examples=15, deadline=None)
@given(n=st.integers(1, 200_000), places=st.lists(st.integers(0, 1 << 40), max_size=20), seed=st.integers(0, 9))
def test_an_order_is_a_permutation(n: int, places: list[int], seed: int) -> None:
    order = Order(n, seed)
    asked = {place % n for place in places}
    found = {order[place] for place in asked}
    assert len(found) == len(asked) and all(0 <= value < n for value in found)


def test_a_long_order_is_whole_and_looks_random() -> None:
    n = 70_000  # one that is computed place by place
    computed = Order(n, 5)
    order = torch.tensor([computed[place] for place in range(n)])
    assert torch.equal(order.sort().values, torch.arange(n))
    # Correlation of neighbours: standard deviation 1/sqrt(n) = 0.004, five of them.
    pairs = torch.stack([order[:-1], order[1:]]).double()
    assert abs(float(torch.corrcoef(pairs)[0, 1])) < 0.02
    # A place of a corpus of 10^12 chunks.
    assert 0 <= Order(10**12, 5)[10**12 - 1] < 10**12


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 5000))
def test_lanes_suit_the_rows(rows: int) -> None:
    lanes = lanes_for(rows, LANES, 3)
    assert lanes % rows == 0 and lanes >= 3 * rows and lanes >= LANES and lanes <= max(2 * LANES, 8 * 3 * rows)
    if rows in (1, 2, 3, 4, 6, 8, 12, 16):
        assert lanes == LANES

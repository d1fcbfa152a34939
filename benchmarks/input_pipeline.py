"""How many tokens a second the training data come at, beside what a GPU takes: every kind of files, 0 to N workers.

    taskset -c 0-7 python benchmarks/input_pipeline.py books.txt.xz --workers 0 1 2 4 8

A byte-level BPE tokenizer of 32,768 tokens is trained on the text first. The text is cut into documents of about 4,000
characters and written as plain text, jsonl.zst, parquet and token files, in 16 files each. Then a stream of batches of
8 x 4,096 tokens is read as fast as it comes, for `--seconds`, once the workers have nothing read ahead. What counts is
the largest number of workers: it must give 3 times what a GPU takes (`--gpu`, tokens/s; 180 thousand are those of a
400M Gated DeltaNet on one H200). On a machine whose cores are busy `per_cpu_second` means more: the tokens that one
core reads in a second of its own time, measured with 0 workers and one thread. `of_one` is beside one worker.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from longrecall.training.corpora.jsonl import CompressedJsonlCorpus
from longrecall.training.data import BatchStream
from longrecall.training.prefetch import AHEAD, usable_cores
from longrecall.training.recipe import DataRecipe
from longrecall.training.strict_yaml import build
from longrecall.training.token_files import write_token_files

VOCABULARY = 32_768
CHARACTERS = 4_000
FILES = 16
ROWS, LENGTH = 8, 4_096
KINDS = ("text", "jsonl.zst", "parquet", "tokens")
WANTED = 3.0


def read_text(path: Path, megabytes: int) -> str:
    with lzma.open(path) if path.suffix == ".xz" else path.open("rb") as file:
        return file.read(megabytes << 20).decode("utf-8", errors="ignore").replace("\x0c", "\n\n")


def documents_of(text: str) -> Iterator[str]:
    """Paragraphs put together to about `CHARACTERS`."""
    held: list[str] = []
    size = 0
    for paragraph in text.split("\n\n"):
        held.append(paragraph)
        size += len(paragraph)
        if size >= CHARACTERS:
            yield "\n\n".join(held)
            held, size = [], 0


def trained_tokenizer(documents: Iterable[str]) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>")


def write_files(documents: list[str], tokenizer: Any, folder: Path) -> dict[str, dict[str, str]]:
    """Write every kind of files; return the source of a recipe for each."""
    for number in range(FILES):
        part = documents[number::FILES]
        (folder / f"{number:02d}.txt").write_text("\f".join(part), encoding="utf-8")
        lines = "".join(json.dumps({"text": document}) + "\n" for document in part).encode()
        (folder / f"{number:02d}.jsonl.zst").write_bytes(pa.compress(lines, codec="zstd", asbytes=True))
        pq.write_table(
            pa.table({"text": part}), folder / f"{number:02d}.parquet", row_group_size=256, compression="zstd"
        )
    corpus = CompressedJsonlCorpus(sorted(folder.glob("*.zst")), "text")
    write_token_files(corpus, 0, tokenizer, folder / "tokens", source={})
    return {
        "text": {"kind": "text", "path": str(folder)},
        "jsonl.zst": {"kind": "jsonl", "path": str(folder)},
        "parquet": {"kind": "parquet", "path": str(folder)},
        "tokens": {"kind": "tokens", "path": str(folder / "tokens")},
    }


def speed(source: dict[str, str], tokenizer: Any, workers: int, seconds: float) -> tuple[float, float]:
    """Return tokens a second, and a second of this process, once what was read ahead is used up."""
    data = {"context_length": LENGTH, "sources": [source], "workers": workers}
    batches = iter(BatchStream(build(DataRecipe, data, "data"), tokenizer, ROWS))
    for _ in range(2 * AHEAD):
        next(batches)
    begun, own, count = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - begun < seconds:
        next(batches)
        count += 1
    passed, used = time.perf_counter() - begun, time.process_time() - own
    batches.close()  # type: ignore[attr-defined]
    return count * ROWS * LENGTH / passed, count * ROWS * LENGTH / used


def main() -> int:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread for every process, this one too
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="UTF-8 text, plain or .xz")
    parser.add_argument("--megabytes", type=int, default=64, help="how much of it is used")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--seconds", type=float, default=5.0, help="of every measurement")
    parser.add_argument("--gpu", type=float, default=180_000, help="tokens a second that a GPU takes")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    documents = list(documents_of(read_text(args.text, args.megabytes)))
    tokenizer = trained_tokenizer(documents[: max(1, (8 << 20) // CHARACTERS)])
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        sources = write_files(documents, tokenizer, Path(folder))
        for kind in args.kinds:
            one = None
            for workers in args.workers:
                found, own = speed(sources[kind], tokenizer, workers, args.seconds)
                one = found if workers == 1 else one
                row = {"kind": kind, "workers": workers, "tokens_per_second": round(found)}
                row |= {"of_a_gpu": round(found / args.gpu, 2), "of_one": round(found / one, 2) if one else None}
                row |= {"per_cpu_second": None if workers else round(own)}
                rows.append(row)
                print(json.dumps(row), flush=True)
    enough = {kind: max(row["of_a_gpu"] for row in rows if row["kind"] == kind) >= WANTED for kind in args.kinds}
    told = {
        "schema": 1,
        "benchmark": "input_pipeline",
        "hardware": f"{platform.processor() or platform.machine()}, {usable_cores()} cores usable",
        "settings": {
            "vocabulary": VOCABULARY,
            "rows": ROWS,
            "length": LENGTH,
            "megabytes": args.megabytes,
            "gpu": args.gpu,
        },
        "three_times_a_gpu": enough,
        "results": rows,
    }
    print(json.dumps(enough))
    if args.out:
        args.out.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

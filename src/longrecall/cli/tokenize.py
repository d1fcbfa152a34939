"""`longrecall tokenize`: texts -> token files, which training reads at any place at once."""

from __future__ import annotations

import argparse
import json

HELP = "turn texts into files of token ids, once, so that training on a large corpus reads them quickly"
EXAMPLE = "longrecall tokenize shards/*.jsonl.zst --tokenizer base/ --out tokens/ --workers 8"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this verb."""
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help="files, folders or patterns of one kind: .txt, .jsonl, .jsonl.zst, .jsonl.gz or .parquet. Or one recipe "
        "(.yaml): each of its text sources is tokenised, into OUT/0, OUT/1 and so on",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="CKPT",
        help="folder or hub id of the checkpoint that will be trained [with a recipe: its model.checkpoint]",
    )
    parser.add_argument("--out", required=True, help="the folder to write; it appears only when it is complete")
    parser.add_argument("--kind", choices=("text", "jsonl", "parquet"), help="file format [judged by the file names]")
    parser.add_argument("--field", default="text", help="JSON key or Parquet column with the text of a document [text]")
    parser.add_argument(
        "--workers", type=int, metavar="N", help="worker processes; 0 = none, work in this one [one per core]"
    )
    parser.add_argument("--force", action="store_true", help="replace OUT when it exists")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")


def run(args: argparse.Namespace) -> int:
    """Tokenise, print what was written (or JSON), return the exit code."""
    from tqdm import tqdm

    from longrecall.training.tokenizing import tokenize_inputs

    with tqdm(desc="tokenize", unit="shard", disable=args.json or None) as bar:

        def show(done: int, of: int) -> None:
            bar.total, bar.n = of, done
            bar.refresh()

        summaries = tokenize_inputs(
            args.inputs,
            args.out,
            args.tokenizer,
            kind=args.kind,
            field=args.field,
            workers=args.workers,
            force=args.force,
            show=show,
        )
    if args.json:
        print(json.dumps([summary.to_dict() for summary in summaries], indent=2))
        return 0
    for summary in summaries:
        reused = f", {summary.reused} of them by an interrupted run" if summary.reused else ""
        amount = f"{summary.tokens:,} tokens ({summary.dtype}) of {summary.documents:,} documents"
        print(f"wrote {summary.output}: {amount} in {summary.shards:,} shards{reused}")
    sources = ", ".join(f"{{kind: tokens, path: {summary.output}}}" for summary in summaries)
    print(f"in a recipe: data.sources: [{sources}]")
    return 0

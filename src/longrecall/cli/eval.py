"""`longrecall eval`: measure recall and bits per byte of a checkpoint."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from longrecall.errors import UserError
from longrecall.tables import aligned
from longrecall.units import format_length, parse_length

_T = TypeVar("_T")

HELP = "measure what a checkpoint recalls, and how well it predicts text by position"
EXAMPLE = "longrecall eval bigger/ --tasks phonebook,passkey --lengths 512,1k,4k --pairs 4,16,64 --out after.json"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this verb."""
    add = parser.add_argument
    add("checkpoint", metavar="CKPT", help="a checkpoint folder or hub id")
    add(
        "--tasks",
        default="phonebook,passkey",
        metavar="T,...",
        help="any of those below, comma-separated [%(default)s]",
    )
    add(
        "--lengths",
        default="512,1k,4k",
        metavar="N,...",
        help="tokens: passkey, babilong, windows; letters: copying [%(default)s]",
    )
    add("--samples", type=int, default=256, metavar="N", help="answers per cell, text windows at most [%(default)s]")
    add("--seed", type=int, default=0, metavar="N", help="seed of the samples [%(default)s]")
    add("--text", metavar="FILE", help="UTF-8 text: bits_per_byte, phonebook's distractor, babilong's book")
    add("--out", metavar="FILE", help="write the result as JSON; finished cells are kept in FILE.partial meanwhile")
    add("--resume", action="store_true", help="skip the cells that an interrupted run with the same settings finished")
    add("--json", action="store_true", help="print the result as JSON instead of a table")
    book = parser.add_argument_group("phonebook")
    book.add_argument("--pairs", default="2,4,8,16,32,64", metavar="N,...", help="associations [%(default)s]")
    book.add_argument(
        "--distances", default="0", metavar="N,...", help="tokens of text before the queries [%(default)s]"
    )
    book.add_argument("--letters", type=int, default=2, metavar="N", help="letters of a name [%(default)s]")
    book.add_argument("--digits", type=int, default=2, metavar="N", help="digits of a number [%(default)s]")
    key = parser.add_argument_group("passkey")
    key.add_argument("--depths", default="0,0.25,0.5,0.75,1", metavar="X,...", help="places of the key [%(default)s]")
    key.add_argument("--form", default="statex", metavar="F", help="statex or infinitebench [%(default)s]")
    key.add_argument("--key-digits", type=int, default=5, metavar="N", help="digits of a key [%(default)s]")
    text = parser.add_argument_group("bits_per_byte")
    text.add_argument("--windows", type=int, default=64, metavar="N", help="windows of text at most [%(default)s]")
    copying = parser.add_argument_group("copying")
    copying.add_argument(
        "--copy-trained", type=int, metavar="N", help="longest string of training in letters, which the report marks"
    )
    story = parser.add_argument_group("babilong")
    story.add_argument("--qa", default="qa1,qa2,qa3,qa4,qa5", metavar="Q,...", help="types of question [%(default)s]")
    machine = parser.add_argument_group("machine")
    machine.add_argument("--device", metavar="D", help="cpu, cuda, cuda:1 [cuda if there is one, else cpu]")
    machine.add_argument("--dtype", metavar="D", help="float32, bfloat16, float16 [as stored]")
    machine.add_argument(
        "--batch-tokens", default="16k", metavar="N", help="tokens per forward pass at most [%(default)s]"
    )
    machine.add_argument("--segment-tokens", default="2k", metavar="N", help="columns read at once [%(default)s]")


def run(args: argparse.Namespace) -> int:
    """Evaluate, print a table or JSON, return the exit code."""
    tasks = _split(args.tasks, "--tasks", str)
    lengths = _split(args.lengths, "--lengths", parse_length)
    options = {name: fields for name, fields in _options(args).items() if name in tasks}
    batch_tokens = _length(args.batch_tokens, "--batch-tokens")
    segment_tokens = _length(args.segment_tokens, "--segment-tokens")

    from longrecall.evaluation.checkpoint import evaluate_checkpoint
    from longrecall.tasks.text import read_text

    text = None if args.text is None else read_text(args.text)
    result = evaluate_checkpoint(
        args.checkpoint,
        tasks,
        lengths,
        args.samples,
        args.seed,
        dtype=args.dtype,
        device=args.device,
        text=text,
        options=options,
        batch_tokens=batch_tokens,
        segment_tokens=segment_tokens,
        out=args.out,
        resume=args.resume,
    )
    print(json.dumps(result, indent=1) if args.json else as_table(result))
    if args.out is not None:
        print(f"written to {args.out}", file=sys.stderr)
    return 0


def _options(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    return {
        "phonebook": {
            "pairs": tuple(_split(args.pairs, "--pairs", int)),
            "distances": tuple(_split(args.distances, "--distances", _length_or_zero)),
            "letters": args.letters,
            "digits": args.digits,
        },
        "passkey": {
            "depths": tuple(_split(args.depths, "--depths", float)),
            "form": args.form,
            "digits": args.key_digits,
        },
        "bits_per_byte": {"windows": args.windows},
        "copying": {"trained": args.copy_trained},
        "babilong": {"tasks": tuple(_split(args.qa, "--qa", str))},
    }


def _length(text: str, option: str) -> int:
    try:
        return parse_length(text)
    except UserError as error:
        raise UserError(f"{option}: {error}") from None


def _length_or_zero(text: str) -> int:
    return 0 if text == "0" else parse_length(text)


def _split(text: str, option: str, convert: Callable[[str], _T]) -> list[_T]:
    """Return the comma-separated values of an option."""
    values: list[_T] = []
    for part in (piece.strip() for piece in text.split(",")):
        try:
            values.append(convert(part))
        except UserError as error:
            raise UserError(f"{option}: {error}") from None
        except ValueError:
            raise UserError(f'{option}: "{part}" is not a number; separate several with commas') from None
        if part == "":
            raise UserError(f"{option}: there is an empty entry in {text!r}")
    return values


def as_table(result: dict[str, Any]) -> str:
    """Return the cells of a result with sample counts and 95% intervals, and the summary, as aligned lines."""
    rows = [("task", "cell", "metric", "value", "95% interval", "count")]
    rows += [
        (
            entry["task"],
            ", ".join(f"{key} {_cell_value(key, value)}" for key, value in entry["cell"].items()),
            entry["metric"],
            _number(entry["value"]) + (f" ({entry['diverged']} diverged)" if entry.get("diverged") else ""),
            "" if entry["low"] is None else f"{_number(entry['low'])} .. {_number(entry['high'])}",
            str(entry["count"]),
        )
        for entry in result["results"]
    ]
    rule = tuple("-" * max(map(len, column)) for column in zip(*rows, strict=True))
    lines = aligned([rows[0], rule, *rows[1:]], left=3)
    return "\n".join([*lines, "", *(f"{name}: {_number(value)}" for name, value in result["summary"].items())])


def _cell_value(key: str, value: float | str) -> str:
    if isinstance(value, str):
        return value
    return format_length(int(value)) if key in ("length", "start", "end", "distance") else f"{value:g}"


def _number(value: float | None) -> str:
    if value is None:
        return "diverged"
    return str(value) if isinstance(value, int) else f"{value:.3f}" if abs(value) < 1e5 else f"{value:.3g}"

"""`longrecall eval`: measure recall and bits per byte of a checkpoint."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from longrecall.cli.suite_options import add_suite_options, expand_suite
from longrecall.cli.task_options import parse_task_options
from longrecall.errors import UserError
from longrecall.tables import aligned
from longrecall.units import format_length, parse_length

_T = TypeVar("_T")
TASK_NAMES = (
    "phonebook",
    "passkey",
    "bits_per_byte",
    "copying",
    "babilong",
    "in_context",
    "metaicl",
    "question_answering",
    "passkey_spoken",
    "niah_single_1",
    "niah_single_2",
    "niah_single_3",
    "niah_multikey_1",
    "niah_multikey_2",
    "niah_multikey_3",
    "niah_multivalue",
    "niah_multiquery",
)
"""What `longrecall.tasks` registers, written out here so that --help needs not import it."""

_TASKS, _LENGTHS, _SAMPLES = "phonebook,passkey", "512,1k,4k", 256

HELP = "measure what a checkpoint recalls, and how well it predicts text by position"
EXAMPLE = "longrecall eval bigger/ --tasks phonebook,passkey --lengths 512,1k,4k --pairs 4,16,64 --out after.json"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this verb."""
    add = parser.add_argument
    add("checkpoint", metavar="CKPT", help="a checkpoint folder or hub id")
    add(
        "--tasks",
        metavar="T,...",
        help=f"comma-separated, of {', '.join(TASK_NAMES)} and lm_eval:NAME [{_TASKS}]",
    )
    add(
        "--lengths",
        metavar="N,...",
        help=f"tokens: passkey, babilong, windows; letters: copying [{_LENGTHS}]",
    )
    add("--samples", type=int, metavar="N", help=f"answers per cell, text windows at most [{_SAMPLES}]")
    add("--seed", type=int, default=0, metavar="N", help="seed of the samples [%(default)s]")
    add("--text", metavar="FILE", help="UTF-8 text: bits_per_byte, phonebook's distractor, babilong's book")
    add("--out", metavar="FILE", help="write the result as JSON; finished examples are kept in FILE.partial meanwhile")
    add("--resume", action="store_true", help="skip what a run with the same settings has finished already")
    add("--force", action="store_true", help="start over and replace FILE, and what an interrupted run has left")
    add("--json", action="store_true", help="print the result as JSON instead of a table")
    add(
        "--option",
        action="append",
        default=[],
        metavar="T.K=V",
        help="any option of a task, such as passkey.digits=7; several values with commas; repeat for several options",
    )
    add_suite_options(parser)
    book = parser.add_argument_group("phonebook")
    book.add_argument("--pairs", default="2,4,8,16,32,64", metavar="N,...", help="associations [%(default)s]")
    book.add_argument(
        "--distances", default="0", metavar="N,...", help="tokens of text before the queries [%(default)s]"
    )
    book.add_argument("--letters", type=int, default=2, metavar="N", help="letters of a name [%(default)s]")
    book.add_argument("--digits", type=int, default=2, metavar="N", help="digits of a number [%(default)s]")
    key = parser.add_argument_group("passkey, passkey_spoken")
    key.add_argument("--depths", default="0,0.25,0.5,0.75,1", metavar="X,...", help="places of the key [%(default)s]")
    key.add_argument("--form", default="statex", metavar="F", help="statex or infinitebench [%(default)s]")
    key.add_argument("--key-digits", type=int, default=5, metavar="N", help="digits of a key [%(default)s]")
    search = parser.add_argument_group("maximum recall length")
    search.add_argument("--search", metavar="N", help="grow one task's length up to N, until it is recalled no more")
    search.add_argument("--step", default="512", metavar="N", help="tokens from one length to the next [%(default)s]")
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
    machine.add_argument(
        "--compile", action="store_true", help="torch.compile the layers: pays for many samples of few lengths"
    )


def run(args: argparse.Namespace) -> int:
    """Evaluate, print a table or JSON, return the exit code."""
    of_suite = expand_suite(args)
    tasks = _split(_TASKS if args.tasks is None else args.tasks, "--tasks", str)
    lengths = _split(_LENGTHS if args.lengths is None else args.lengths, "--lengths", parse_length)
    samples = _SAMPLES if args.samples is None else args.samples
    given = parse_task_options(args.option)
    options = {name: fields for name, fields in _options(args).items() if name in tasks}
    for more in (of_suite, given):
        options |= {name: options.get(name, {}) | fields for name, fields in more.items()}
    batch_tokens = _length(args.batch_tokens, "--batch-tokens")
    segment_tokens = _length(args.segment_tokens, "--segment-tokens")

    longest, step = _search(args, tasks), _length(args.step, "--step")

    from longrecall.evaluation.checkpoint import evaluate_checkpoint
    from longrecall.evaluation.parallel import torchrun_ranks
    from longrecall.evaluation.recall_search import search_checkpoint
    from longrecall.files import check_no_input
    from longrecall.models.checkpoint import check_no_part
    from longrecall.tasks.text import read_text

    check_no_input(args.out, [args.text])
    check_no_part(args.out, args.checkpoint)
    settings: dict[str, Any] = {
        "dtype": args.dtype,
        "device": args.device,
        "text": None if args.text is None else read_text(args.text),
        "options": options,
        "batch_tokens": batch_tokens,
        "segment_tokens": segment_tokens,
        "out": args.out,
        "resume": args.resume,
        "force": args.force,
    }
    with torchrun_ranks() as ranks:
        if longest is None:
            result = evaluate_checkpoint(
                args.checkpoint,
                tasks,
                lengths,
                samples,
                args.seed,
                ranks=ranks,
                compile_layers=args.compile,
                **settings,
            )
        elif ranks.count > 1:
            raise UserError("--search decides after every length what comes next; run it without torchrun")
        else:
            result = search_checkpoint(args.checkpoint, tasks[0], longest, samples, args.seed, step=step, **settings)
    if not ranks.first:
        return 0
    print(json.dumps(result, indent=1) if args.json else as_table(result))
    if result["settings"].get("search", {}).get("at_least"):
        print("recalled up to the last length that was tried: a greater --search may find more", file=sys.stderr)
    if args.out is not None:
        print(f"written to {args.out}", file=sys.stderr)
    return 0


def _search(args: argparse.Namespace, tasks: list[str]) -> int | None:
    """Return the greatest length of --search, None without it; raise UserError for options that do not go with it."""
    if args.search is None:
        return None
    if len(tasks) > 1:
        raise UserError(f"--search takes one task, for example --tasks niah_single_3; got {len(tasks)}")
    if args.compile:
        raise UserError(
            "--compile makes code for every length anew, and --search meets a new one at each step: use one"
        )
    return _length(args.search, "--search")


def _options(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    key = {
        "depths": tuple(_split(args.depths, "--depths", float)),
        "form": args.form,
        "digits": args.key_digits,
    }
    return {
        "phonebook": {
            "pairs": tuple(_split(args.pairs, "--pairs", int)),
            "distances": tuple(_split(args.distances, "--distances", _length_or_zero)),
            "letters": args.letters,
            "digits": args.digits,
        },
        "passkey": key,
        "passkey_spoken": key,
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
            _number(entry["value"]) + _remarks(entry),
            "" if entry["low"] is None else f"{_number(entry['low'])} .. {_number(entry['high'])}",
            str(entry["count"]),
        )
        for entry in result["results"]
    ]
    rule = tuple("-" * max(map(len, column)) for column in zip(*rows, strict=True))
    lines = aligned([rows[0], rule, *rows[1:]], left=3)
    return "\n".join([*lines, "", *(f"{name}: {_number(value)}" for name, value in result["summary"].items())])


def _remarks(entry: dict[str, Any]) -> str:
    """Return what else to know about a number: sequences that diverged, and prompts that are not full."""
    remarks = [f"{entry['diverged']} diverged"] if entry.get("diverged") else []
    if "fill" in entry and entry["metric"] == "accuracy":
        remarks.append(f"fill {entry['fill']:.0%}")
    return f" ({', '.join(remarks)})" if remarks else ""


def _cell_value(key: str, value: float | str) -> str:
    if isinstance(value, str):
        return value
    return format_length(int(value)) if key in ("length", "start", "end", "distance") else f"{value:g}"


def _number(value: float | None) -> str:
    if value is None:
        return "diverged"
    return str(value) if isinstance(value, int) else f"{value:.3f}" if abs(value) < 1e5 else f"{value:.3g}"

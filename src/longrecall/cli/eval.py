"""`longrecall eval`: measure recall and bits per byte of a checkpoint."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from longrecall.checkpoint_place import local_folder
from longrecall.cli.completion import completed
from longrecall.cli.quantize_option import add_quantize
from longrecall.cli.suite_options import add_suite_options, expand_suite
from longrecall.cli.task_options import add_task_flags, parse_task_options, split_values, task_flags
from longrecall.errors import UserError
from longrecall.tables import aligned
from longrecall.units import format_length, parse_length

_TASKS, _LENGTHS, _SAMPLES = "phonebook,passkey", "512,1k,4k", 256

HELP = "measure what a checkpoint recalls, and how well it predicts text by position"
EXAMPLE = "longrecall eval bigger/ --tasks phonebook,passkey --lengths 512,1k,4k --pairs 4,16,64 --out after.json"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this verb, those of the tasks as they declare them."""
    from longrecall.tasks.registry import declaration_of, task_names

    add = parser.add_argument
    add("checkpoint", metavar="CKPT", help="a checkpoint folder or hub id")
    names = f"tasks, with commas: {', '.join(task_names())} and lm_eval:NAME [{_TASKS}]"
    completed(add("--tasks", metavar="T,...", help=names), (*task_names(), "lm_eval:"), several=True)
    others = [(name, unit) for name in task_names() if (unit := declaration_of(name).length_unit) != "tokens"]
    units = "".join(f"; for {name} in {unit}" for name, unit in others)
    add("--lengths", metavar="N,...", help=f"text lengths in tokens{units} [{_LENGTHS}]")
    add(
        "--samples",
        type=int,
        metavar="N",
        help=f"answers per task, length and setting; bits_per_byte: most windows of text [{_SAMPLES}]",
    )
    add("--seed", type=int, default=0, metavar="N", help="seed of the samples [%(default)s]")
    texts = [f"{name}.{option}" for name in task_names() if (option := declaration_of(name).text_option)]
    add("--text", metavar="FILE", help=f"a UTF-8 text; it becomes these options: {', '.join(texts)}")
    add("--out", metavar="FILE", help="write the result as JSON; until the end, finished examples are in FILE.partial")
    add(
        "--resume",
        action="store_true",
        help="skip the examples that an interrupted run with the same settings has finished",
    )
    add("--force", action="store_true", help="start again; replace FILE and what an interrupted run has left")
    add("--json", action="store_true", help="print the result as JSON instead of a table")
    add(
        "--option",
        action="append",
        default=[],
        metavar="T.K=V",
        help="set an option of a task, such as passkey.digits=7 (several values with commas); may be repeated",
    )
    add_suite_options(parser)
    add_task_flags(parser)
    search = parser.add_argument_group("maximum recall length")
    search.add_argument(
        "--search", metavar="N", help="find the longest text at which one task is still recalled, up to N tokens"
    )
    search.add_argument(
        "--step", default="512", metavar="N", help="step between the lengths tried, in tokens [%(default)s]"
    )
    machine = parser.add_argument_group("machine")
    machine.add_argument("--device", metavar="D", help="cpu, cuda, cuda:1 [cuda if there is one, else cpu]")
    machine.add_argument(
        "--dtype", metavar="D", help="number format of the weights: float32, bfloat16, float16 [as stored]"
    )
    add_quantize(machine)
    machine.add_argument(
        "--batch-tokens", default="16k", metavar="N", help="most tokens in one forward pass [%(default)s]"
    )
    machine.add_argument(
        "--segment-tokens", default="2k", metavar="N", help="tokens of each row read at once [%(default)s]"
    )
    machine.add_argument(
        "--compile",
        action="store_true",
        help="run the layers through torch.compile: faster for many samples of few lengths",
    )


def run(args: argparse.Namespace) -> int:
    """Evaluate, print a table or JSON, return the exit code."""
    of_suite = expand_suite(args)
    tasks = split_values(_TASKS if args.tasks is None else args.tasks, "--tasks", str)
    lengths = split_values(_LENGTHS if args.lengths is None else args.lengths, "--lengths", parse_length)
    samples = _SAMPLES if args.samples is None else args.samples
    given = parse_task_options(args.option)
    options = task_flags(args, tasks)
    for more in (of_suite, given):
        options |= {name: options.get(name, {}) | fields for name, fields in more.items()}
    batch_tokens = _length(args.batch_tokens, "--batch-tokens")
    segment_tokens = _length(args.segment_tokens, "--segment-tokens")

    longest, step = _search(args, tasks), _length(args.step, "--step")
    local_folder(args.checkpoint)  # a wrong name is said at once, not after torch was imported

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
        "quantize": args.quantize,
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
        print("recalled up to the last length that was tried; a larger --search may find a longer one", file=sys.stderr)
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
            "--compile makes new code for every length, and --search tries many lengths; use only one of them"
        )
    return _length(args.search, "--search")


def _length(text: str, option: str) -> int:
    try:
        return parse_length(text)
    except UserError as error:
        raise UserError(f"{option}: {error}") from None


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

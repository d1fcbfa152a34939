"""`longrecall diagnose`: what a checkpoint's memory does past its training length, and which remedy it needs."""

from __future__ import annotations

import argparse
import json
import math
import sys
from typing import Any

from longrecall.checkpoint_place import local_folder
from longrecall.cli.completion import completed
from longrecall.errors import UserError
from longrecall.tables import aligned, in_runs
from longrecall.units import format_length, parse_length

HELP = "test a checkpoint on texts far longer than it was trained on, and say which remedy it needs"
EXAMPLE = "longrecall diagnose CKPT --text book.txt --multiple 16 --out diagnosis.json"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this verb."""
    add = parser.add_argument
    add("checkpoint", metavar="CKPT", help="a checkpoint folder or hub id")
    add("--text", required=True, metavar="FILE", help="a UTF-8 text, such as a book, that the model was not trained on")
    add(
        "--multiple",
        type=int,
        default=16,
        metavar="N",
        help="longest text to test, as a multiple of the training length [%(default)s]",
    )
    add(
        "--training-length",
        metavar="N",
        help="length in tokens that the model was trained at: 512, 4k [the checkpoint's context_length]",
    )
    add("--sequences", type=int, default=8, metavar="S", help="most windows of the text to read [%(default)s]")
    parts = add(
        "--parts", metavar="P,...", help="measurements: perplexity, state, remembrance, recall [all that fit the model]"
    )
    completed(parts, ("perplexity", "state", "remembrance", "recall"), several=True)
    add(
        "--starts",
        metavar="T,...",
        help="remembrance: how many first tokens to leave out, such as 0,128,1k [about 15 values]",
    )
    add(
        "--recall-samples",
        type=int,
        default=40,
        metavar="N",
        help="recall: pass keys per length in the first round [%(default)s]",
    )
    add(
        "--recall-doublings",
        type=int,
        default=3,
        metavar="N",
        help="recall: double the pass keys up to N times while it is unclear whether half are recalled [%(default)s]",
    )
    add("--seed", type=int, default=0, metavar="N", help="seed of the pass keys and of the intervals [%(default)s]")
    add("--out", metavar="FILE", help="write the result as JSON; until the end, finished parts are in FILE.partial")
    add("--resume", action="store_true", help="skip what an interrupted run with the same settings has finished")
    add("--force", action="store_true", help="start again; replace FILE and what an interrupted run has left")
    add("--json", action="store_true", help="print the result as JSON instead of tables")
    machine = parser.add_argument_group("machine")
    machine.add_argument("--device", metavar="D", help="cpu, cuda, cuda:1 [cuda if there is one, else cpu]")
    machine.add_argument(
        "--dtype", metavar="D", help="number format of the weights: float32, bfloat16, float16 [as stored]"
    )
    machine.add_argument(
        "--batch-tokens", default="2k", metavar="N", help="most tokens in one forward pass [%(default)s]"
    )
    machine.add_argument(
        "--segment-tokens", default="256", metavar="N", help="tokens of each row read at once [%(default)s]"
    )


def run(args: argparse.Namespace) -> int:
    """Diagnose, print tables or JSON, return the exit code (0 whatever the verdict)."""
    settings: dict[str, Any] = {
        "multiple": args.multiple,
        "sequences": args.sequences,
        "recall_samples": args.recall_samples,
        "recall_doublings": args.recall_doublings,
        "seed": args.seed,
        "batch_tokens": _length(args.batch_tokens, "--batch-tokens"),
        "segment_tokens": _length(args.segment_tokens, "--segment-tokens"),
        "starts": None if args.starts is None else tuple(_starts(args.starts)),
        "resume": args.resume,
    }
    training_length = None if args.training_length is None else _length(args.training_length, "--training-length")
    parts = None if args.parts is None else [part.strip() for part in args.parts.split(",")]
    local_folder(args.checkpoint)  # a wrong name is said at once, not after torch was imported

    from longrecall.diagnostics.diagnosis import diagnose_checkpoint
    from longrecall.evaluation.parallel import torchrun_ranks
    from longrecall.files import check_no_input
    from longrecall.models.checkpoint import check_no_part

    check_no_input(args.out, [args.text])
    check_no_part(args.out, args.checkpoint)
    with torchrun_ranks() as ranks:
        result = diagnose_checkpoint(
            args.checkpoint,
            args.text,
            training_length=training_length,
            parts=parts,
            dtype=args.dtype,
            device=args.device,
            out=args.out,
            force=args.force,
            ranks=ranks,
            **settings,
        )
    if not ranks.first:
        return 0
    print(json.dumps(result, indent=1) if args.json else as_text(result))
    if args.out is not None:
        print(f"written to {args.out}", file=sys.stderr)
    return 0


def _length(text: str, option: str) -> int:
    try:
        return parse_length(text)
    except UserError as error:
        raise UserError(f"{option}: {error}") from None


def _starts(text: str) -> list[int]:
    return [0 if piece.strip() == "0" else _length(piece, "--starts") for piece in text.split(",")]


def as_text(result: dict[str, Any]) -> str:
    """Return the tables of every part, the time each took, and the verdict, as lines for the terminal."""
    blocks = [
        _perplexity_table(result["perplexity"]),
        _state_table(result),
        _kinds_table(result),
        _points_table("left out", "t", result["remembrance"]["points"], "effective remembrance"),
        _points_table("length", "length", result["recall"]["points"], "pass keys recalled"),
        _recall_line(result["recall"]),
        _times(result["timing"]),
        _verdict_lines(result["verdict"]),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _table(rows: list[tuple[str, ...]], left: int) -> list[str]:
    rule = tuple("-" * max(map(len, column)) for column in zip(*rows, strict=True))
    return aligned([rows[0], rule, *rows[1:]], left=left)


def _perplexity_table(entries: list[dict[str, Any]]) -> list[str]:
    """Every octave's last range: the file has all of them."""
    if not entries:
        return []
    octave = [math.ceil(math.log2(entry["end"])) for entry in entries]
    shown = [i for i in range(len(entries)) if i + 1 == len(entries) or octave[i + 1] > octave[i]]
    rows: list[tuple[str, ...]] = [("positions", "loss", "95% interval", "perplexity", "bits/byte")]
    for entry in (entries[index] for index in shown):
        place = f"{format_length(entry['start'])} .. {format_length(entry['end'])}"
        numbers = (_number(entry["loss"]), _interval(entry), _number(entry["perplexity"]))
        rows.append((place, *numbers, _number(entry["bits_per_byte"], "unknown" if entry["loss"] else "diverged")))
    return _table(rows, left=1)


def _state_table(result: dict[str, Any]) -> list[str]:
    """Norm and effective rank of every layer (means over heads) at the training length and at the end."""
    state = result["state"]
    if not state["layers"]:
        parts = result["settings"]["parts"]
        return [] if "state" in parts else ["state: not looked at (left out, or no recurrent layers)"]
    training = result["settings"]["training_length"]
    last = len(state["positions"]) - 1
    first = next(index for index, position in enumerate(state["positions"]) if position >= training)
    places = [format_length(state["positions"][index]) for index in (first, last)]
    rows: list[tuple[str, ...]] = [
        ("state", "mixer", *(f"{what} at {place}" for what in ("norm", "rank") for place in places), "of")
    ]
    for layer in state["layers"]:
        cells = [
            _number(_mean([head[name][index] for head in layer["heads"]]))
            for name in ("norm", "effective_rank")
            for index in (first, last)
        ]
        rows.append((f"layer {layer['layer']}", layer["mixer"], *cells, str(min(layer["key_dim"], layer["value_dim"]))))
    return _table(rows, left=2)


def _kinds_table(result: dict[str, Any]) -> list[str]:
    """How full the states are, of each kind of mixer by itself; nothing where all layers are of one kind."""
    state, training = result["state"], result["settings"]["training_length"]
    kinds = state.get("kinds", [])
    if len(kinds) < 2:
        return []
    shown = [next(p for p in state["positions"] if p >= training), state["positions"][-1]]
    rows: list[tuple[str, ...]] = [("kind", "layers", *(f"filled at {format_length(place)}" for place in shown))]
    for kind in kinds:
        fill = {entry["position"]: entry["value"] for entry in kind["fill"]}
        cells = [_number(fill[place]) if place in fill else "no matrix" for place in shown]
        rows.append((kind["mixer"], in_runs(kind["layers"]), *cells))
    return _table(rows, left=2)


def _points_table(name: str, key: str, points: list[dict[str, Any]], title: str) -> list[str]:
    if not points:
        return []
    rows: list[tuple[str, ...]] = [(name, title, "95% interval", "count")]
    rows += [
        (
            format_length(point[key]) if point[key] else "0",
            _number(point["value"]),
            _interval(point),
            str(point["count"]),
        )
        for point in points
    ]
    return _table(rows, left=1)


def _recall_line(recall: dict[str, Any]) -> list[str]:
    if not recall["maximum"]:
        return []

    def words(length: int | None) -> str:
        return "none" if length is None else format_length(length)

    parts = []
    for name, length in recall["maximum"].items():
        low, high = recall["maximum_intervals"][name]
        parts.append(f"{name}: {words(length)}" + ("" if low == high else f" ({words(low)} to {words(high)})"))
    return ["maximum recall length above " + ", ".join(parts)]


def _times(timing: dict[str, dict[str, float]]) -> list[str]:
    total = sum(part["seconds"] for part in timing.values())
    shares = (
        f"{name} {part['seconds']:.1f} s ({100 * part['seconds'] / max(total, 1e-9):.0f}%)"
        for name, part in timing.items()
    )
    cpu = sum(part["cpu_seconds"] for part in timing.values())
    return [f"time: {', '.join(shares)}; {total:.1f} s in all, {cpu:.1f} CPU seconds"]


def _verdict_lines(findings: list[dict[str, Any]]) -> list[str]:
    lines = ["verdict"]
    for finding in findings:
        lines += [f"  {finding['finding']}: {finding['text']}", f"    {finding['advice']}"]
    return lines


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def _interval(entry: dict[str, Any]) -> str:
    return "" if entry["low"] is None else f"{_number(entry['low'])} .. {_number(entry['high'])}"


def _number(value: float | None, missing: str = "diverged") -> str:
    if value is None:
        return missing
    return f"{value:.3f}" if abs(value) < 1e5 else f"{value:.3g}"

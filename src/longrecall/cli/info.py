"""`longrecall info`: what a checkpoint, or the description of a model, is: layers, parameters, state, surgery.

With --backends: which implementations of the ops can run here, and with a checkpoint which of them each layer takes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from longrecall.errors import UserError
from longrecall.units import format_bytes, parse_length

if TYPE_CHECKING:
    from longrecall.models.formats.origin import Origin
    from longrecall.models.sizes import ModelSizes

HELP = "show a checkpoint's layers, parameters, state size and surgery history"
EXAMPLE = "longrecall info bigger/ --context 64k"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this verb."""
    parser.add_argument(
        "checkpoint",
        metavar="CKPT",
        nargs="?",
        help="a checkpoint folder (its config.json is enough), a hub id, or FILE.json (a config or a model "
        "description)",
    )
    parser.add_argument(
        "--context",
        default=None,
        metavar="N",
        help="text length in tokens for the size of key-value caches: 512, 4k, 1m [the training length]",
    )
    parser.add_argument(
        "--backends",
        action="store_true",
        help="list the implementations of all ops and whether they run here; with CKPT, which one each layer would use",
    )
    parser.add_argument("--json", action="store_true", help="print the facts as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the account of a checkpoint, return the exit code. Reads no weights."""
    if args.backends:
        if args.checkpoint is not None:
            from longrecall.inference import backend_report

            print(backend_report.shown(args.checkpoint, as_json=args.json))
            return 0
        from longrecall.ops.machine import describe_backends

        backends = describe_backends()
        print(json.dumps(backends, indent=2) if args.json else backends_as_text(backends))
        return 0
    if args.checkpoint is None:
        raise UserError("nothing to show: name a checkpoint (CKPT), or ask for --backends; see longrecall info --help")
    context = None if args.context is None else parse_length(args.context)
    from longrecall.models.outline import open_outline

    found = open_outline(args.checkpoint)
    facts = describe(found.plain, found.surgery, args.checkpoint, context, found.origin)
    print(json.dumps(facts, indent=2) if args.json else as_text(facts))
    return 0


def describe(
    config: ModelSizes,
    surgery: Sequence[dict[str, Any]],
    path: str,
    context: int | None,
    origin: Origin | None = None,
) -> dict[str, Any]:
    """Return everything that `info` shows as plain data.

    Args:
        config, surgery: of the model.
        path: what the user called it.
        context: tokens at which caches are counted; None = the training context, or 4096.
        origin: the foreign checkpoint that it comes from, where its files are there.
    """
    from longrecall.models import accounting

    total = accounting.account(config)
    tokens = context or config.context_length or 4096
    cache, transformer = (
        accounting.key_value_cache_size(config, tokens),
        accounting.transformer_cache_size(config, tokens),
    )
    return {
        "path": path,
        "parameters": total.parameters,
        "active_parameters": total.active_parameters,
        "state_size": total.state_size,
        "state_bytes": total.state_bytes,
        "training_context": config.context_length,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "tied_embeddings": config.tie_word_embeddings,
        "layers": [
            {
                "index": layer.index,
                "mixer": layer.mixer,
                "sizes": layer.sizes,
                "state_size": layer.state_size,
                "parameters": layer.parameters,
            }
            for layer in total.layers
        ],
        "key_value_cache": {
            "context": tokens,
            "numbers": cache,
            "average_numbers": accounting.average_key_value_cache_size(config, tokens),
            "bytes": accounting.CACHE_BYTES * cache,
            "transformer_numbers": transformer,
            "transformer_average_numbers": transformer / 2,
            "transformer_bytes": accounting.CACHE_BYTES * transformer,
            "transformer_to_state": accounting.state_ratio(config, tokens),
            "state_equals_tokens": accounting.equivalent_context(config, total.state_size),
        },
        "retrieval": {"context": tokens, "bytes": accounting.retrieval_bytes(config, tokens)},
        "surgery": list(surgery),
        "travelling": {
            "tensors": 0 if origin is None else len(origin.travelling),
            "parameters": 0 if origin is None else origin.travelling_numbers,
        },
    }


def backends_as_text(backends: Sequence[dict[str, Any]]) -> str:
    """Return the data of `describe_backends` as the lines that a person reads."""
    from longrecall.tables import aligned

    rows = [("backend", "here", "good for")]
    for backend in backends:
        state = "usable" if backend["usable"] else f"not usable: {backend['reason']}"
        rows.append((backend["name"], state, backend["purpose"]))
    lines = [line.rstrip() for line in aligned(rows, left=3)]
    lines += [f"{backend['name']} serves {', '.join(backend['ops'])}" for backend in backends]
    for backend in backends:
        if backend["usable"] and backend.get("without_gluon"):
            lines.append(f"{backend['name']} runs without its kernels for Hopper: {backend['without_gluon']}")
    return "\n".join(lines)


def as_text(facts: dict[str, Any]) -> str:
    """Return the data of `describe` as the lines that a person reads."""
    from longrecall.tables import aligned, grouped

    layers = [
        (layer["mixer"], layer["sizes"], f"{layer['state_size']:,}", f"{layer['parameters']:,}")
        for layer in facts["layers"]
    ]
    rows = [("layers", "mixer", "sizes", "state of each", "parameters of each"), *grouped(layers)]
    rows.append(("total", "", "(embeddings and head included)", f"{facts['state_size']:,}", f"{facts['parameters']:,}"))
    cache, context = facts["key_value_cache"], facts["training_context"]
    lines = [
        *aligned(rows, left=3),
        "",
        *_active_lines(facts),
        *_travelling_lines(facts["travelling"]),
        f"training context   {f'{context:,} tokens' if context else 'not recorded'}",
        f"recurrent state    {format_bytes(facts['state_bytes'])} per sequence in float32, at any length:"
        f" {facts['state_size']:,} numbers",
        f"key-value cache    {format_bytes(cache['bytes'])} at {cache['context']:,} tokens (layers that keep one,"
        f" 16 bit): {cache['numbers']:,} numbers",
        *_retrieval_lines(facts["retrieval"]),
        "for comparison     a Transformer of this width and depth caches "
        f"{format_bytes(cache['transformer_bytes'])} there: {cache['transformer_numbers']:,} numbers",
        f"  in bytes         the state equals {cache['state_equals_tokens']:,.1f} of its tokens",
        *_average_lines(cache),
        "surgery            " + ("none" if not facts["surgery"] else ""),
    ]
    return "\n".join(line.rstrip() for line in [*lines, *map(_surgery_line, facts["surgery"])])


def _active_lines(facts: dict[str, Any]) -> list[str]:
    active, every = facts["active_parameters"], facts["parameters"]
    return (
        []
        if active == every
        else [f"active parameters  {active:,} of them are used for one token ({active / every:.1%})"]
    )


def _travelling_lines(kept: dict[str, Any]) -> list[str]:
    if not kept["tensors"]:
        return []
    return [
        f"not counted        {kept['parameters']:,} parameters in {kept['tensors']:,} tensors of parts that longrecall"
        " does not run, such as vision; they are kept unchanged"
    ]


def _retrieval_lines(kept: dict[str, Any]) -> list[str]:
    if not kept["bytes"]:
        return []
    return [
        f"retrieval          {format_bytes(kept['bytes'])} at {kept['context']:,} tokens: their ids, and one vector per"
        " chunk and layer"
    ]


def _average_lines(cache: dict[str, Any]) -> list[str]:
    ratio = cache["transformer_to_state"]
    if ratio is None:
        return []
    return [f"  in numbers       averaged over that context, its cache is {ratio:,.2f} times as large as the state"]


def _surgery_line(record: dict[str, Any]) -> str:
    # surgery.json is a file that people can edit: a field that is not there shows as "?".
    layers = ",".join(map(str, record.get("layers", ["?"])))
    counted = "state"
    state, parameters = record.get("state_size", {}), record.get("parameters", {})
    # Retrieval leaves the state alone: what it added are parameters.
    if "before" in state and state["before"] == state.get("after") and parameters:
        counted, state = "parameters", parameters
    before, after = (format(state[key], ",") if key in state else "?" for key in ("before", "after"))
    method, init, created = (str(record.get(key, "?")) for key in ("method", "init", "created"))
    return f"  {created[:10]}  {method} ({init}) in layers {layers}: {counted} {before} -> {after}"

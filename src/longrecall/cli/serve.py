"""`longrecall serve`: answer requests over HTTP, many at once, in OpenAI's completions and chat protocol."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from longrecall.checkpoint_place import local_folder
from longrecall.cli.quantize_option import add_quantize
from longrecall.errors import UserError
from longrecall.files import expand_home

HELP = "answer many requests at once over HTTP, with OpenAI's protocol for completions and chat"
EXAMPLE = (
    "longrecall serve bigger/ --port 8000 --bank texts/\n"
    "  curl localhost:8000/v1/completions -H 'Content-Type: application/json' "
    '-d \'{"prompt": "Who was she?", "after": "book"}\''
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this verb."""
    parser.add_argument("checkpoint", metavar="CKPT", help="a checkpoint folder or hub id")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on [%(default)s: reached from this machine only]"
    )
    parser.add_argument("--port", type=int, default=8000, help="port to listen on; 0 = any free one [%(default)s]")
    parser.add_argument("--name", help="name of the model in requests [the folder's name]")
    parser.add_argument(
        "--slots", type=int, metavar="N", help="requests that are answered at the same time [64 on a GPU, 8 on a CPU]"
    )
    parser.add_argument(
        "--queue",
        type=int,
        default=256,
        metavar="N",
        help="requests that may wait for a slot; further ones are refused [%(default)s]",
    )
    parser.add_argument(
        "--room",
        type=int,
        default=8192,
        metavar="N",
        help="models with attention: most tokens of a request, answer included [%(default)s]",
    )
    parser.add_argument(
        "--segment", type=int, metavar="N", help="prompt tokens read in one pass [8192 on a GPU, else 1024]"
    )
    parser.add_argument(
        "--bank", metavar="FOLDER", help='folder of saved states; a request names the one that it continues in "after"'
    )
    parser.add_argument(
        "--prefix-memory",
        type=int,
        default=256,
        metavar="MIB",
        help="memory for the states of prompt beginnings that requests share [%(default)s]",
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds that running requests get to finish after a stop signal [%(default)s]",
    )
    parser.add_argument("--json", action="store_true", help="print the address it listens on as a line of JSON")
    parser.add_argument("--dtype", help="number format of the weights: float32, bfloat16, float16 [as stored]")
    add_quantize(parser)
    parser.add_argument("--device", metavar="D", help="cpu, cuda, cuda:1 [cuda if there is one, else cpu]")


def run(args: argparse.Namespace) -> int:
    """Serve until a signal comes; return the exit code."""
    if not 0 <= args.port < 65536:
        raise UserError(f"--port must be from 0 to 65535, got {args.port}")
    if not 0 <= args.grace < float("inf"):
        raise UserError(f"--grace must be at least 0 seconds, got {args.grace}")
    if args.prefix_memory < 0:
        raise UserError(f"--prefix-memory must be at least 0, got {args.prefix_memory}")
    if args.bank and not expand_home(args.bank).is_dir():
        raise UserError(
            f"--bank {args.bank} is not a folder; make it, and put a state into it with "
            f"longrecall generate CKPT --prompt-file TEXT --save-state {Path(args.bank) / 'NAME.safetensors'}"
        )
    from longrecall.installing import check_installed

    check_installed("aiohttp", "serving")
    local_folder(args.checkpoint)  # a wrong name is said at once, not after torch was imported
    import asyncio

    from longrecall.serving.engine import Engine
    from longrecall.serving.server import Server, serve

    name = args.name or Path(args.checkpoint).resolve().name
    with Engine(
        args.checkpoint,
        slots=args.slots,
        queue=args.queue,
        room=args.room,
        segment=args.segment,
        bank=args.bank,
        prefix_bytes=args.prefix_memory << 20,
        dtype=args.dtype,
        device=args.device,
        quantize=args.quantize,
    ) as engine:

        def ready(host: str, port: int) -> None:
            url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
            if args.json:
                print(json.dumps({"model": name, "url": url, "slots": engine.slots}), flush=True)
            else:
                print(f'the model "{name}" answers on {url} ({engine.slots} slots)', file=sys.stderr, flush=True)

        asyncio.run(serve(Server(engine, name), args.host, args.port, grace=args.grace, ready=ready))
    return 0

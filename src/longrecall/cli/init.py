"""`longrecall init`: a fresh, untrained checkpoint from a model description."""

from __future__ import annotations

import argparse
import json

from longrecall.errors import UserError

HELP = "write an untrained checkpoint from a model description"
EXAMPLE = "longrecall init recipes/configs/gated_delta_net_400m_e8.json fresh/ --tokenizer bytes"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this verb."""
    parser.add_argument("description", metavar="FILE.json", help="the model description; recipes/configs/ has examples")
    parser.add_argument("output", metavar="OUT", help="the folder to write; it appears only when it is complete")
    parser.add_argument(
        "--tokenizer", default=None, help="a checkpoint folder whose tokenizer is copied, or bytes: one token per byte"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random weights [%(default)s]")
    parser.add_argument("--dtype", default="float32", help="number format of the stored weights [%(default)s]")
    parser.add_argument("--force", action="store_true", help="replace OUT when it exists")
    parser.add_argument("--json", action="store_true", help="print the model's size as JSON")


def run(args: argparse.Namespace) -> int:
    """Write the checkpoint, print its size, return the exit code."""
    if not 0 <= args.seed < 2**63:
        raise UserError(f"--seed {args.seed} is out of range; use a whole number from 0")
    from longrecall.models.accounting import account
    from longrecall.models.description import read_description
    from longrecall.models.initialising import initialise
    from longrecall.models.loading import parse_dtype

    config = read_description(args.description)
    dtype = parse_dtype(args.dtype)
    if dtype is None:
        raise UserError("--dtype auto means as stored, but nothing is stored yet; use float32 or bfloat16")
    initialise(config, args.output, seed=args.seed, dtype=dtype, tokenizer=args.tokenizer, force=args.force)
    total = account(config)
    if args.json:
        facts = {"path": args.output, "parameters": total.parameters, "state_size": total.state_size}
        print(json.dumps(facts, indent=2))
    else:
        print(f"wrote {args.output}: {total.parameters:,} parameters, state of {total.state_size:,} numbers, untrained")
    return 0

"""`longrecall generate`: continue a prompt; read a long text once, keep its state, ask many times."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from longrecall.checkpoint_place import local_folder
from longrecall.cli.quantize_option import add_quantize
from longrecall.errors import UserError
from longrecall.progress import drawing_interval

if TYPE_CHECKING:
    import torch

    from longrecall.models.recurrent_lm import RecurrentLM
    from longrecall.models.state import RecurrentState

HELP = "continue a prompt, or read a text once and ask about it many times"
EXAMPLE = (
    "longrecall generate bigger/ --prompt-file book.txt --save-state book.safetensors\n"
    '  longrecall generate bigger/ --load-state book.safetensors --prompt "Who was she?" --max-new-tokens 40'
)
SEGMENT = 2048
"""Tokens read at once: longer prompts carry the state over, so memory does not grow with them."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this verb."""
    parser.add_argument("checkpoint", metavar="CKPT", help="a checkpoint folder or hub id")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="the text to continue")
    prompt.add_argument(
        "--prompt-file", metavar="FILE", help="a UTF-8 file with the text to continue; - is standard input"
    )
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        metavar="N",
        help="most tokens to write [64; with --save-state 0, that is, only read]",
    )
    parser.add_argument(
        "--temperature", type=float, metavar="T", help="sample at this temperature [always take the likeliest token]"
    )
    parser.add_argument(
        "--top-p", type=float, metavar="P", help="sample only from the likeliest tokens, whose probabilities sum to P"
    )
    parser.add_argument(
        "--beams",
        type=int,
        default=1,
        metavar="N",
        help="number of beams of the beam search; 1 = no beam search [%(default)s]",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling [%(default)s]")
    parser.add_argument("--save-state", metavar="FILE", help="write the state after the prompt to FILE")
    parser.add_argument("--force", action="store_true", help="with --save-state: replace FILE when it exists")
    parser.add_argument(
        "--load-state",
        metavar="FILE",
        help="start from the state in FILE: the prompt continues the text that was read there",
    )
    parser.add_argument("--dtype", help="number format of the weights: float32, bfloat16, float16 [as stored]")
    add_quantize(parser)
    parser.add_argument("--device", metavar="D", help="cpu, cuda, cuda:1 [cuda if there is one, else cpu]")
    parser.add_argument("--json", action="store_true", help="print the new text and the token counts as JSON")


def run(args: argparse.Namespace) -> int:
    """Read, keep, write; return the exit code."""
    _check(args)
    local_folder(args.checkpoint)  # a wrong name is said at once, not after torch was imported
    text = _prompt(args)
    from longrecall.files import check_no_input
    from longrecall.models.checkpoint import check_no_part
    from longrecall.outputs import claim_file

    elsewhere = "choose another --save-state"
    check_no_input(args.save_state, [args.prompt_file], elsewhere)
    check_no_part(args.save_state, args.checkpoint, elsewhere)
    with claim_file(args.save_state, force=args.force, advice=elsewhere):  # before hours of reading, not after
        return _generate(args, text)


def _generate(args: argparse.Namespace, text: str) -> int:
    import longrecall
    from longrecall.models.checkpoint import open_checkpoint
    from longrecall.models.checkpoint_tokenizer import load_tokenizer
    from longrecall.models.loading import preferred_device

    checkpoint = open_checkpoint(args.checkpoint)
    tokenizer = load_tokenizer(checkpoint.path, checkpoint.config.vocab_size)
    device = preferred_device(args.device)
    model = longrecall.load(args.checkpoint, dtype=args.dtype, device=device, quantize=args.quantize)
    start = None if args.load_state is None else longrecall.RecurrentState.load(args.load_state, model)
    # What follows a kept state is no beginning: it gets no token that marks one. A learned state has read nothing.
    tokens = list(tokenizer.encode(text, add_special_tokens=start is None or start.length == 0))
    if not tokens:
        raise UserError("the prompt is empty; give at least one character to continue")
    if max(tokens) >= model.config.vocab_size:
        raise UserError(
            f'the prompt has "{tokenizer.decode([max(tokens)])}", token {max(tokens)}, but the model in '
            f"{checkpoint.path} has only the tokens 0 to {model.config.vocab_size - 1}; leave it out"
        )
    state = read(model, tokens[:-1], start, progress=not args.json)
    after = read_last(model, tokens[-1], state)
    if args.save_state is not None:
        after.save(args.save_state, model.fingerprint())
    wanted = args.max_new_tokens if args.max_new_tokens is not None else 0 if args.save_state else 64
    written = continue_from(model, tokens[-1], state, wanted, tokenizer, args) if wanted else []
    answer = tokenizer.decode(written, skip_special_tokens=True)
    if args.json:
        facts = {
            "text": answer,
            "prompt_tokens": len(tokens),
            "new_tokens": len(written),
            "tokens_before": 0 if start is None else int(start.position[0]),
            "state": args.save_state,
        }
        print(json.dumps(facts, indent=2))
    else:
        if wanted:
            print(answer)
        if args.save_state is not None:
            print(f"read {len(tokens):,} tokens, kept their state in {args.save_state}", file=sys.stderr)
    return 0


def read(
    model: RecurrentLM, tokens: list[int], state: RecurrentState | None, *, progress: bool = True
) -> RecurrentState:
    """Return the state after `tokens`, read in segments from `state` (None = the zero state)."""
    import torch
    from tqdm import tqdm

    current = model.zero_state(1) if state is None else state
    long = progress and len(tokens) > SEGMENT
    with (
        torch.inference_mode(),
        tqdm(
            total=len(tokens),
            unit="tok",
            unit_scale=True,
            desc="read",
            disable=not long,
            mininterval=drawing_interval(),
        ) as bar,
    ):
        for first in range(0, len(tokens), SEGMENT):
            part = torch.tensor([tokens[first : first + SEGMENT]], device=model.device)
            current = model(part, past_key_values=current, use_cache=True, logits_to_keep=1).past_key_values
            bar.update(part.shape[1])
    return current


def read_last(model: RecurrentLM, token: int, state: RecurrentState) -> RecurrentState:
    """Return the state after one more token; raise UserError when no next token can be told from it."""
    import torch

    with torch.inference_mode():
        out = model(torch.tensor([[token]], device=model.device), past_key_values=state, use_cache=True)
    if not bool(torch.isfinite(out.logits).all()):
        raise UserError(
            "after the prompt the model's logits are NaN or infinite, so it cannot go on. Nothing was saved. "
            "longrecall diagnose CKPT --text FILE says which layer breaks, and where"
        )
    after: RecurrentState = out.past_key_values
    return after


def continue_from(
    model: RecurrentLM, last: int, state: RecurrentState, count: int, tokenizer: Any, args: argparse.Namespace
) -> list[int]:
    """Return at most `count` new tokens after the token `last`, which `state` has not read yet."""
    import torch

    sampling = args.temperature is not None or args.top_p is not None
    options: dict[str, Any] = {"do_sample": sampling, "num_beams": args.beams, "max_new_tokens": count}
    if sampling:
        options |= {"temperature": args.temperature or 1.0, "top_p": args.top_p or 1.0, "top_k": 0}
    end = (
        tokenizer.eos_token_id if model.generation_config.eos_token_id is None else model.generation_config.eos_token_id
    )
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else end if isinstance(end, int) else 0
    last_token = torch.tensor([[last]], device=model.device)
    # The mask covers what the state has read too: that is how generate tells a continuation from a whole prompt.
    mask = torch.ones(1, state.length + 1, dtype=torch.long, device=model.device)
    with torch.random.fork_rng(devices=_random_devices(model.device)):
        torch.manual_seed(args.seed)
        try:
            # transformers types generate for its own model classes only.
            out = cast(Any, model).generate(
                last_token,
                attention_mask=mask,
                past_key_values=state,
                eos_token_id=end,
                pad_token_id=pad,
                **options,
            )
        except RuntimeError as error:
            if "probability tensor contains" not in str(error):
                raise
            raise UserError(
                "the probabilities of the next token became NaN or infinite while sampling. Use a --temperature "
                "nearer to 1 or --dtype float32, or test the model with longrecall diagnose"
            ) from error
    return [int(token) for token in out[0, 1:]]


def _random_devices(device: torch.device) -> list[torch.device]:
    return [device] if device.type == "cuda" else []


def _check(args: argparse.Namespace) -> None:
    if args.max_new_tokens is not None and args.max_new_tokens < 0:
        raise UserError(f"--max-new-tokens must be at least 0, got {args.max_new_tokens}")
    if args.max_new_tokens == 0 and args.save_state is None:
        raise UserError("--max-new-tokens 0 would write nothing; to only read the prompt, give --save-state as well")
    if args.temperature is not None and not 0 < args.temperature < float("inf"):
        raise UserError(
            f"--temperature must be above 0, got {args.temperature}; without the option the likeliest token is taken"
        )
    if args.top_p is not None and not 0 < args.top_p <= 1:
        raise UserError(f"--top-p must be above 0 and at most 1, got {args.top_p}")
    if args.beams < 1:
        raise UserError(f"--beams must be at least 1, got {args.beams}")
    if not 0 <= args.seed < 2**63:
        raise UserError(f"--seed must be a whole number from 0 to 2**63 - 1, got {args.seed}")


def _prompt(args: argparse.Namespace) -> str:
    if args.prompt is not None:
        if any("\ud800" <= letter <= "\udfff" for letter in args.prompt):  # how Python keeps bytes that are no text
            raise UserError("--prompt is not UTF-8; write it in UTF-8, or give --prompt-file")
        return str(args.prompt)
    where = "standard input" if args.prompt_file == "-" else args.prompt_file
    try:
        data = sys.stdin.buffer.read() if args.prompt_file == "-" else Path(args.prompt_file).read_bytes()
        return data.decode("utf-8")
    except OSError as error:
        raise UserError(f"cannot read the prompt file {where}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{where} is not UTF-8 (byte {error.start}); save it as UTF-8") from error

"""`longrecall expand`: enlarge the memory of a checkpoint."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from longrecall.checkpoint_place import local_folder
from longrecall.cli.completion import completed
from longrecall.errors import UserError

if TYPE_CHECKING:
    from longrecall.surgery.method import Option

HELP = "give chosen layers of a checkpoint a larger recurrent state, or retrieval from the text read so far"
EXAMPLE = "longrecall expand base/ bigger/ --method grow_state --layers every:12 --init preserve --set state_dim=512"
_INIT = (
    "how the enlarged layers start [%(default)s]. preserve: the model answers as before. perturb: as preserve, with "
    "noise on old weights. handover: fresh weights take over during training. reinit: fresh weights, as in the papers. "
    "inherit: the papers' comparison"
)
_PLACE = "option_"
"""Before the names of options in the parsed arguments, where another argument may have the same name."""
_EXPONENT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this verb, those of the methods as they declare them."""
    from longrecall.surgery.method import INITS
    from longrecall.surgery.registry import METHODS

    methods = [f"{method.name} ({method.fitting})" for method in METHODS.values()]
    parser.add_argument("checkpoint", metavar="CKPT", help="the checkpoint to start from; it is not changed")
    parser.add_argument("output", metavar="OUT", help="the folder to write; it appears only when it is complete")
    completed(parser.add_argument("--method", required=True, help=_either(methods)), METHODS)
    layers = "layers to enlarge: every:M (0, M, 2M, ...), first:N, all, or numbers such as 0,6,12 [%(default)s]"
    completed(parser.add_argument("--layers", default="every:6", help=layers), ("all", "every:", "first:"))
    completed(parser.add_argument("--init", default="preserve", help=_INIT), INITS)
    for flag, owners in _shorthands().items():
        option = next(iter(owners.values()))
        what = "; ".join(f"{method}: {declared.help}" for method, declared in owners.items())
        parser.add_argument(
            flag,
            dest=_PLACE + option.name,
            type=option.kind,
            metavar=option.letter,
            help=f"{what}; the same as --set {option.name}={option.letter}",
        )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random new weights [%(default)s]")
    parser.add_argument(
        "--set",
        dest="options",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option of the method, e.g. factor=4 or statex=true (all are listed below); may be repeated",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print what would change and write nothing; reads no weights"
    )
    parser.add_argument("--force", action="store_true", help="replace OUT when it exists")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    for method in METHODS.values():
        lines = (f"  {option.name}: {option.help}" for option in method.options)
        title = f"--set options of {method.name}; its --init: {_either(method.inits)}"
        parser.add_argument_group(title, "\n".join(lines))


def _either(words: Sequence[str]) -> str:
    """Return the words as a choice: ``a, b or c``."""
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _shorthands() -> dict[str, dict[str, Option]]:
    """Return flag -> name of a method -> the option for which it stands there."""
    from longrecall.surgery.registry import METHODS

    found: dict[str, dict[str, Option]] = {}
    for method in METHODS.values():
        for option in method.options:
            if option.flag:
                found.setdefault(option.flag, {})[method.name] = option
    return found


def run(args: argparse.Namespace) -> int:
    """Expand, print the table (or JSON), return the exit code."""
    short = {name.removeprefix(_PLACE): value for name, value in vars(args).items() if name.startswith(_PLACE)}
    given = [f"{option}={value}" for option, value in short.items() if value is not None]
    options = parse_options([*args.options, *given])
    local_folder(args.checkpoint)  # a wrong name is said at once, not after torch was imported
    from longrecall.surgery.expansion import expand_with

    summary = expand_with(
        args.checkpoint,
        args.output,
        method=args.method,
        layers=args.layers,
        init=args.init,
        seed=args.seed,
        dry_run=args.dry_run,
        force=args.force,
        options=options,
    )
    if args.json:
        print(json.dumps(summary.to_dict(), indent=2))
        return 0
    print(summary.table())
    print("dry run: nothing was written" if args.dry_run else f"wrote {args.output}")
    return 0


def parse_options(pairs: list[str]) -> dict[str, Any]:
    """Return `["factor=4", "statex=true"]` as `{"factor": 4, "statex": True}`; raise UserError on anything else."""
    import yaml

    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key.strip() or not text.strip():
            raise UserError(f'--set "{pair}": write key=value, e.g. --set factor=4')
        if key.strip() in options:
            raise UserError(f"option {key.strip()} is given twice; give it once")
        try:
            options[key.strip()] = _number(yaml.safe_load(text))
        except (yaml.YAMLError, ValueError, RecursionError):
            raise UserError(f'--set "{pair}": the value is not a number, a word, true or false') from None
    return options


def _number(value: Any) -> Any:
    """Return words such as ``1e-3``, which YAML takes for text for want of a point, as numbers; the rest as it is."""
    return float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value

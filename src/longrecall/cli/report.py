"""`longrecall report`: one HTML page from result files."""

from __future__ import annotations

import argparse
import json

from longrecall.errors import UserError

HELP = "make one HTML page from result files, with all its plots inside"
EXAMPLE = (
    "longrecall report before.json after.json plain.json run/training.json -o report.html --label control=plain.json"
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this verb."""
    parser.add_argument("results", nargs="+", metavar="RESULT", help="result files of eval, diagnose, train and sweep")
    parser.add_argument("-o", "--out", required=True, metavar="FILE.html", help="the page to write")
    parser.add_argument("--force", action="store_true", help="replace FILE.html when it exists")
    parser.add_argument(
        "--label",
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="name of a file on the page. before and after are compared; control is the same training without a "
        "larger memory. May be repeated",
    )
    parser.add_argument("--title", help="heading of the page")
    parser.add_argument("--json", action="store_true", help="print the path and size of the page as JSON")


def run(args: argparse.Namespace) -> int:
    """Write the page, return the exit code."""
    labels = parse_labels(args.label)
    from longrecall.report.page import build_report

    path = build_report(args.results, args.out, labels=labels, title=args.title, force=args.force)
    size = path.stat().st_size
    print(json.dumps({"report": str(path), "bytes": size}) if args.json else f"wrote {path} ({size / 1024:,.0f} KiB)")
    return 0


def parse_labels(pairs: list[str]) -> dict[str, str]:
    """Return `["before=a.json"]` as `{"before": "a.json"}`; raise UserError on anything else."""
    labels: dict[str, str] = {}
    for pair in pairs:
        name, equals, file = pair.partition("=")
        if not equals or not name.strip() or not file.strip():
            raise UserError(f'--label "{pair}": write NAME=FILE, e.g. --label before=runs/before.json')
        if name.strip() in labels:
            raise UserError(f"--label {name.strip()} is given twice; give each label to one file")
        labels[name.strip()] = file.strip()
    return labels

"""Write the pages of docs/reference/ that are generated from the code, or compare them: `--check`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from website import api, commands, recipes

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"
PAGES = {"cli.md": commands.page, "recipes.md": recipes.page, "api.md": api.page}


def stale(write: bool) -> list[str]:
    """Names of the pages that are not what the code says; `write` makes them so."""
    found = []
    for name, page in PAGES.items():
        path, text = REFERENCE / name, page()
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            found.append(name)
            if write:
                path.write_text(text, encoding="utf-8")
    return found


def main() -> int:
    """Write, or compare; 1 when a page differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a page is not up to date")
    args = parser.parse_args()
    found = stale(write=not args.check)
    if args.check and found:
        print(f"not up to date: {', '.join(found)}; run python -m website.reference", file=sys.stderr)
        return 1
    print(f"{'wrote ' + ', '.join(found) if found else 'up to date'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

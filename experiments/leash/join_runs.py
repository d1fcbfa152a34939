"""Add the runs of other calls of `experiment.py` to a record; each call keeps its own head (machine, day, versions).

A run that the record has already, by its arm and seed, is left out. A file that has grown since it was joined adds its
new runs to the call that it was.
Usage: python -m experiments.leash.join_runs RECORD FILE [FILE ...]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.leash.records import all_rows, calls
from longrecall.files import write_json


def head(call: dict[str, Any], *without: str) -> dict[str, Any]:
    """All of a call but its runs, and but what else is named."""
    return {key: value for key, value in call.items() if key not in ("results", *without)}


def of_one_call(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether both are one call; a record may say more `about` it."""
    return head(one, "about") == head(other, "about")


def joined(record: dict[str, Any], later: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The record with the runs of the later files that it lacks; nothing that is given is changed."""
    found = [{**head(call), "results": list(call["results"])} for call in calls(record)]
    known = {(row["arm"], row["seed"]) for row in all_rows(record)}
    for call in (call for file in later for call in calls(file)):
        fresh = []
        for row in call["results"]:
            if (row["arm"], row["seed"]) not in known:
                known.add((row["arm"], row["seed"]))
                fresh.append(row)
        same = next((one for one in found if of_one_call(one, call)), None)
        if same is not None:
            same["results"] += fresh
        elif fresh:
            found.append({**head(call), "results": fresh})
    return {"calls": found}


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the record anew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("files", type=Path, nargs="+", metavar="file")
    args = parser.parse_args(arguments)
    record, *later = (json.loads(path.read_text(encoding="utf-8")) for path in (args.record, *args.files))
    result = joined(record, later)
    write_json(args.record, result)
    print(f"{len(all_rows(result)) - len(all_rows(record))} runs added, {len(all_rows(result))} in all")


if __name__ == "__main__":
    main()

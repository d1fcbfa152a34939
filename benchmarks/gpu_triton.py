"""The same speeds with two releases of Triton, in one run on one GPU.

    python benchmarks/gpu_triton.py --other SITE --out benchmarks/results/gpu_triton.json

SITE is a folder with another Triton in it (``pip install --no-deps --target SITE triton==3.9.0``). The rows are those
of before_after.py: bfloat16, medians of CUDA events, each release in processes of its own and in turns. A row has the
median of every process, the median of those, and the ratio of the other release to the installed one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from before_after import ROOT, Runs, in_turns, run
from gpu_timing import Rows


def release(site: str) -> str:
    """The version of Triton that a process with `site` in its path imports."""
    code = "import triton; print(triton.__version__)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (site, os.environ.get("PYTHONPATH"))))}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.split()[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", type=Path, required=True, help="folder with another Triton")
    parser.add_argument("--rounds", type=int, default=2, help="processes of each release [%(default)s]")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not (args.other / "triton").is_dir():
        parser.error(f"--other: there is no triton in {args.other}")
    sites = {"installed": "", "other": str(args.other.resolve())}
    releases = {name: release(site) for name, site in sites.items()}
    if releases["installed"] == releases["other"]:
        parser.error(f"both are Triton {releases['other']}")
    rows = Rows("gpu_triton", args.out)
    rows.result["releases"] = releases
    runs: Runs = {name: [] for name in sites}
    for name in in_turns(list(sites), args.rounds):
        runs[name].append(run(ROOT, sites[name]))
        print(releases[name], runs[name][-1], flush=True)
    for row in runs["installed"][0]:
        times = {name: [one[row] for one in found] for name, found in runs.items()}
        middle = {name: statistics.median(values) for name, values in times.items()}
        both = {f"{name}_ms": value for name, value in middle.items()}
        rows.add(row, **both, ratio=middle["other"] / middle["installed"], **{f"{k}_all": v for k, v in times.items()})


if __name__ == "__main__":
    main()

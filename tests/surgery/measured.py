"""``python -m tests.surgery.measured SRC DST METHOD``: expand, and print the most memory that it took, in bytes.

Memory is what is not backed by a file: pages of a mapped checkpoint can be dropped at any time. What is written is all
zeros here; it is turned into holes, file by file, so that the disk need not hold it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from pathlib import Path

from longrecall.models.formats import shards
from longrecall.surgery.expansion import expand

EVERY = 0.005
"""Seconds between two looks at the memory: writing a gigabyte takes a hundred times as long."""


def anonymous_bytes() -> int:
    """Memory of this process that no file backs."""
    lines = Path("/proc/self/status").read_text().splitlines()
    kept = (line.split() for line in lines if line.startswith(("RssAnon", "RssShmem")))
    return sum(1024 * int(line[1]) for line in kept)


def with_holes(path: Path) -> None:
    """Finish a file as the writer does, then give its zeros back to the disk."""
    make_readable(path)
    if shutil.which("fallocate"):
        subprocess.run(["fallocate", "--dig-holes", str(path)], check=False)


make_readable = shards.make_readable


def main(source: str, target: str, method: str) -> None:
    """Expand every layer that the method fits."""
    shards.make_readable = with_holes
    most, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(EVERY):
            most[0] = max(most[0], anonymous_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        expand(source, target, method=method, layers="all")
    finally:
        done.set()
        thread.join()
    print(most[0])


if __name__ == "__main__":
    main(*sys.argv[1:])

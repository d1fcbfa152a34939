"""Build the site of docs/ into build/website/site, or serve it while pages are edited: `make docs-build`, `make docs`.

A link that leads nowhere ends the build: files are looked for here, pages and headings by Zensical.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from website.pages import ROOT, BrokenLinks, stage

FOLDER = ROOT / "build" / "website"
CONFIG = ROOT / "website" / "zensical.toml"
STYLE = ROOT / "website" / "site.css"


def prepare(folder: Path) -> None:
    """Lay out what Zensical reads: its config, and the pages with the style sheet."""
    pages = folder / "pages"
    shutil.rmtree(pages, ignore_errors=True)
    stage(pages)
    shutil.copyfile(CONFIG, folder / CONFIG.name)
    shutil.copyfile(STYLE, pages / STYLE.name)


def command(verb: str, *options: str) -> list[str]:
    """The words that start Zensical in this environment."""
    return [sys.executable, "-m", "zensical", verb, *options]


def build(folder: Path) -> int:
    """Build strictly; print what is wrong and return the exit code."""
    shutil.rmtree(folder / "site", ignore_errors=True)
    done = subprocess.run(
        command("build", "--strict", "--clean"), cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode:
        # Zensical ends in a traceback of its own after its list of what is wrong.
        told = done.stdout.split("Traceback")[0] + done.stderr.split("Traceback")[0]
        print(re.sub(r"\x1b\[[0-9;]*m", "", told), file=sys.stderr)
        return done.returncode
    count = len(list((folder / "site").rglob("*.html")))
    print(f"{count} pages in {folder / 'site'}: open index.html, or copy the folder to any web server")
    return 0


def serve(folder: Path) -> int:
    """Serve the pages until Ctrl-C; a page that is saved meanwhile is staged again."""
    with subprocess.Popen(command("serve"), cwd=folder) as server:
        seen = times()
        try:
            while server.poll() is None:
                time.sleep(1)
                if (now := times()) != seen:
                    seen = now
                    try:
                        stage(folder / "pages")
                    except BrokenLinks as error:
                        print(error, file=sys.stderr)
        except KeyboardInterrupt:
            server.terminate()
        return server.wait()


def times() -> dict[Path, float]:
    """When each page was last saved."""
    return {path: path.stat().st_mtime for path in (ROOT / "docs").rglob("*") if path.is_file()}


def main() -> int:
    """Build or serve; 1 when a link leads nowhere."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", action="store_true", help="serve the pages at localhost:8000 instead")
    args = parser.parse_args()
    try:
        prepare(FOLDER)
    except BrokenLinks as error:
        print(re.sub("^", "broken link: ", str(error), flags=re.MULTILINE), file=sys.stderr)
        return 1
    return serve(FOLDER) if args.serve else build(FOLDER)


if __name__ == "__main__":
    sys.exit(main())

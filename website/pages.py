"""The pages of docs/ as the site needs them: one tree, in which no link leaves it.

Pages link to files beside docs/: recorded results, recipes, sources. The repository has no address that a site could
link to, so such a file travels with the pages, into the folder `repository`. Markdown among them becomes a page.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path, PurePosixPath

from website.formulas import with_mathml

ROOT = Path(__file__).parents[1]
HOME = "start.md"
"""The page that the site opens with: its index.md."""
OUTSIDE = "repository"
FOLDED = ("What was done", "What was run", "Commands", "Every cell")
"""Sections of the pages of evidence that say how it was measured: results come first, and these open with a click."""
EVIDENCE = ("papers", "evidence", "state_recall", "length_generalization", "retrieval_evidence")
"""Pages of evidence: a page `{name}.md`, and those of the folder `{name}`."""
LINK = re.compile(r"(\]\()([^)#\s]+)(#[^)\s]*)?(\))")
CODE = re.compile(r"(```.*?```|`[^`\n]*`)", re.DOTALL)


class BrokenLinks(Exception):
    """Links that lead nowhere, a line each."""


def stage(target: Path, root: Path = ROOT) -> list[str]:
    """Write the tree that the site is built from to `target`; return the pages' places in it.

    Raises:
        BrokenLinks: a page links to a file that is not there.
    """
    docs = root / "docs"
    waiting = [path for path in sorted(docs.rglob("*")) if path.is_file()]
    seen, pages, broken = set(waiting), [], []
    while waiting:
        source = waiting.pop(0)
        place = target / place_of(source, root)
        place.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix != ".md":
            shutil.copyfile(source, place)
            continue
        text = source.read_text(encoding="utf-8")
        for linked in targets(text, source):
            if not linked.exists():
                broken.append(f"{source.relative_to(root)}: {linked.relative_to(root)} is not there")
            for path in files_of(linked):
                if path not in seen:
                    seen.add(path)
                    waiting.append(path)
        text = with_links_inside(text, source, root)
        if PurePosixPath(place.relative_to(target).parts[0]).stem in EVIDENCE:
            text = with_method_folded(text)
        place.write_text(text, encoding="utf-8")
        pages.append(place.relative_to(target).as_posix())
    if broken:
        raise BrokenLinks("\n".join(broken))
    return sorted([*pages, *write_listings(target)])


def place_of(path: Path, root: Path) -> PurePosixPath:
    """Where a file or folder of the repository stands in the tree of the site."""
    inside = PurePosixPath(path.relative_to(root).as_posix())
    inside = inside.with_name("index.md") if inside.name == "README.md" else inside
    if inside.parts[:1] != ("docs",):
        return PurePosixPath(OUTSIDE) / inside
    place = inside.relative_to("docs")
    return PurePosixPath("index.md") if place == PurePosixPath(HOME) else place


def targets(text: str, source: Path) -> list[Path]:
    """What a page links to within the repository, code left out."""
    prose = CODE.sub("", text)
    return [(source.parent / found[2]).resolve() for found in LINK.finditer(prose) if "://" not in found[2]]


def files_of(path: Path) -> list[Path]:
    """The file itself, or the files that a folder holds, but for what its subfolders hold."""
    return sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path] * path.exists()


def with_links_inside(text: str, source: Path, root: Path) -> str:
    """The page with its links as they have to be in the tree of the site, and its formulas drawn; code stays."""
    here = place_of(source, root).parent

    def moved(found: re.Match[str]) -> str:
        if "://" in found[2]:
            return found[0]
        linked = (source.parent / found[2]).resolve()
        place = place_of(linked, root)
        if linked.is_dir():
            place = place / "index.md"
        return f"{found[1]}{relative(place, here)}{found[3] or ''}{found[4]}"

    parts = CODE.split(text)
    return "".join(part if index % 2 else with_mathml(LINK.sub(moved, part)) for index, part in enumerate(parts))


def with_method_folded(text: str) -> str:
    """A page of evidence whose sections on how it was measured are closed at first; their headings stay."""
    parts = re.split(r"^(## .+)$", text, flags=re.MULTILINE)
    for index in range(1, len(parts), 2):
        if parts[index].removeprefix("## ") in FOLDED:
            closed = '\n\n<details class="method" markdown="1"><summary>Show</summary>\n\n'
            parts[index + 1] = f"{closed}{parts[index + 1].strip()}\n\n</details>\n\n"
    return "".join(parts)


def relative(place: PurePosixPath, here: PurePosixPath) -> str:
    """The way from the folder `here` to `place`."""
    return PurePosixPath(os.path.relpath(place, here)).as_posix()


def write_listings(target: Path) -> list[str]:
    """Write an index.md into every copied folder that has none: the names of its files. Return the places."""
    found = []
    for folder in sorted(path for path in (target / OUTSIDE).rglob("*") if path.is_dir()):
        page = folder / "index.md"
        names = sorted(path.name for path in folder.iterdir() if path.is_file())
        if names and not page.exists():
            lines = [f"# {folder.relative_to(target / OUTSIDE).as_posix()}", "", *(f"- [{n}]({n})" for n in names)]
            page.write_text("\n".join(lines) + "\n", encoding="utf-8")
            found.append(page.relative_to(target).as_posix())
    return found

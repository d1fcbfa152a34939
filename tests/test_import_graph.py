"""The checker of circles: it sees every kind of import, and only real circles."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.import_graph import ImportGraph, circle, circular_edges

LAZY = "def f():\n    from pkg.a import x\n"
FOR_TYPES = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pkg.a import x\n"
BY_NAME = "import importlib\nimportlib.import_module('pkg.a')\n"
HANDED_ON = "def f():\n    from pkg import x\n"


def graph_of(folder: Path, files: dict[str, str], scripts: bool = False) -> ImportGraph:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return ImportGraph(scripts=(folder,)) if scripts else ImportGraph(folder)


@pytest.mark.parametrize("back", ["import pkg.a", "from pkg import a", LAZY, FOR_TYPES, BY_NAME, HANDED_ON])
def test_a_circle_is_found_however_it_is_closed(tmp_path: Path, back: str) -> None:
    files = {"__init__.py": "from pkg.a import x", "a.py": "from pkg.sub.b import y", "sub/c.py": back}
    edges = graph_of(tmp_path / "pkg", files | {"sub/b.py": "from pkg.sub import c"}).edges
    assert circular_edges(edges) == {("pkg.a", "pkg.sub.b"), ("pkg.sub.b", "pkg.sub.c"), ("pkg.sub.c", "pkg.a")}
    circles = {circle(edges, edge) for edge in circular_edges(edges)}
    assert circles == {"pkg.a -> pkg.sub.b -> pkg.sub.c -> pkg.a"}


def test_a_name_that_a_package_hands_on_leads_to_its_module_and_makes_no_circle(tmp_path: Path) -> None:
    """`b` imports `y` of the package, whose `__init__` imports `b`; all it needs is `a`, two packages further down."""
    inner = {"sub/__init__.py": "from pkg.sub.a import x as z", "sub/a.py": "import os"}
    files = {"__init__.py": "from pkg.sub import z as y\nfrom pkg.b import w", "b.py": "from pkg import y"}
    graph = graph_of(tmp_path / "pkg", files | inner)
    assert graph.edges["pkg.b"] == {"pkg.sub.a"}
    assert not circular_edges(graph.edges)


def test_what_a_package_defines_itself_is_the_package(tmp_path: Path) -> None:
    files = {"__init__.py": "from pkg.a import x\nVERSION = 1", "a.py": "from pkg import VERSION"}
    assert circular_edges(graph_of(tmp_path / "pkg", files).edges) == {("pkg", "pkg.a"), ("pkg.a", "pkg")}


def test_a_package_of_a_library_is_not_the_file_of_its_name(tmp_path: Path) -> None:
    """In a package `import b` is another package's; in a folder of scripts it is the script beside this one."""
    files = {"a.py": "from b import x", "b.py": "import a"}
    assert not circular_edges(graph_of(tmp_path / "pkg", files).edges)
    assert circular_edges(graph_of(tmp_path / "folder", files, scripts=True).edges)


def test_relative_imports_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="line 2: imports in this project are absolute"):
        graph_of(tmp_path / "pkg", {"a.py": "import os\nfrom . import b"})

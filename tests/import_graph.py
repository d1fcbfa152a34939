"""Which file of the project imports which, and which of these imports go round in a circle.

Every import counts, also those inside functions, those under `TYPE_CHECKING` and `import_module("...")`: two files that
need each other are one idea in two places, however late the import is made. A name that a package only hands on
(`from package import name`) leads to the module that the package has it from.
"""

from __future__ import annotations

import ast
import functools
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

Graph = Mapping[str, set[str]]
Edge = tuple[str, str]


class _Import(NamedTuple):
    """`from source import name as bound`; without a name `import source`."""

    source: str
    name: str | None
    bound: str


class ImportGraph:
    """The modules of some folders by their names, and which of these modules each of them imports.

    Args:
        folders: packages, or folders that hold packages; `ops/gla.py` of a folder `longrecall` is `longrecall.ops.gla`.
        scripts: folders of scripts, which find the files beside them by their bare names.
    """

    def __init__(self, *folders: Path, scripts: tuple[Path, ...] = ()) -> None:
        self.files: dict[str, Path] = {}
        for folder in (*folders, *scripts):
            for path in sorted(folder.rglob("*.py")):
                parts = [folder.name, *path.relative_to(folder).with_suffix("").parts]
                self.files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
        self._script_folders = {folder.name for folder in scripts}
        self._imports = {module: list(_imports(path)) for module, path in self.files.items()}
        self.edges: Graph = {module: set(self._targets(module)) - {module} for module in self.files}

    def _targets(self, module: str) -> Iterator[str]:
        for source, name, _ in self._imports[module]:
            known = self._find(source, module)
            if known is not None:
                yield known if name is None else self._home(known, name, frozenset())
            elif f"{source}.{name}" in self.files:  # a file of a folder without __init__.py
                yield f"{source}.{name}"

    def _find(self, name: str, importer: str) -> str | None:
        """The module that `importer` means by `name`; None outside the project."""
        folder = importer.rpartition(".")[0]
        if folder in self._script_folders and f"{folder}.{name}" in self.files:
            return f"{folder}.{name}"
        return name if name in self.files else None

    def _home(self, module: str, name: str, asked: frozenset[Edge]) -> str:
        """Where `from module import name` leads: a submodule, or the module that a package has the name from."""
        if f"{module}.{name}" in self.files:
            return f"{module}.{name}"
        if self.files[module].name == "__init__.py" and (module, name) not in asked:
            for source, original, bound in self._imports[module]:
                known = self._find(source, module)
                if bound == name and original is not None and known is not None:
                    return self._home(known, original, asked | {(module, name)})
        return module


@functools.cache
def parsed(path: Path) -> ast.Module:
    """A file, read once for all tests: hundreds of them take seconds."""
    return ast.parse(path.read_text(encoding="utf-8"))


def statements(path: Path) -> Iterator[ast.AST]:
    """All nodes of a file but its expressions, which are most of them."""
    waiting: list[ast.AST] = [parsed(path)]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += (inner for inner in ast.iter_child_nodes(node) if not isinstance(inner, ast.expr))


def _imports(path: Path) -> Iterator[_Import]:
    calls = "import_module" in path.read_text(encoding="utf-8")
    for node in ast.walk(parsed(path)) if calls else statements(path):
        if isinstance(node, ast.Import):
            yield from (_Import(alias.name, None, alias.asname or alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level or node.module is None:
                raise ValueError(f"{path}, line {node.lineno}: imports in this project are absolute")
            yield from (_Import(node.module, alias.name, alias.asname or alias.name) for alias in node.names)
        elif isinstance(node, ast.Call) and _named_by_a_constant(node):
            yield _Import(str(ast.literal_eval(node.args[0])), None, "")


def _named_by_a_constant(call: ast.Call) -> bool:
    """Whether this is `import_module("...")`; a name that is put together while the program runs cannot be seen."""
    called = getattr(call.func, "attr", None) or getattr(call.func, "id", None)
    return called == "import_module" and isinstance(call.args[0], ast.Constant)


def circular_edges(edges: Graph) -> set[Edge]:
    """The imports (importing module, imported module) that lie on a circle."""
    left = dict(edges)
    # What imports nothing that is left lies on no circle; of a project without circles nothing stays.
    while ends := {module for module, targets in left.items() if not targets & left.keys()}:
        left = {module: targets for module, targets in left.items() if module not in ends}
    return {(a, b) for a, targets in left.items() for b in targets & left.keys() if _way(edges, b, a)}


def circle(edges: Graph, edge: Edge) -> str:
    """A shortest circle through an edge, for people: `a -> b -> a`, the first name in the alphabet first."""
    modules = _way(edges, edge[1], edge[0]) or [*edge]
    start = modules.index(min(modules))
    return " -> ".join([*modules[start:], *modules[:start], modules[start]])


def _way(edges: Graph, start: str, end: str) -> list[str] | None:
    """The modules on a shortest way from `start` to `end`, both included; None where there is no way."""
    before: dict[str, str | None] = {start: None}
    line = deque([start])
    while line:
        module = line.popleft()
        if module == end:
            found: list[str] = []
            step: str | None = module
            while step is not None:
                found.append(step)
                step = before[step]
            return found[::-1]
        for following in edges[module]:
            if following not in before:
                before[following] = module
                line.append(following)
    return None

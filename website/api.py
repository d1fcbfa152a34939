"""docs/reference/api.md: the public names of longrecall, with their docstrings and the examples in them."""

from __future__ import annotations

import ast
import dataclasses
import doctest
import importlib
import inspect
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import longrecall
from website.escaping import escaped
from website.recipes import field_docs

MODULES = {
    "longrecall": "Loads models, enlarges their memory, and answers requests with them.",
    "longrecall.ops": "The recurrences themselves: tensors in, tensors out.",
    "longrecall.context": "One long sequence over several ranks: [context parallelism](../context_parallelism.md).",
}
HEAD = """# Python

Generated from docstrings by `python -m website.reference`. Every example is run by the tests. In an example `torch`
and the public names of the module are imported. `BASE` is the folder of a small Mamba-2 that ships with longrecall:
`longrecall.__path__[0] + "/assets/mamba2-base"`.

B is the number of sequences, T tokens, H heads, K channels of a key, V of a value.
"""
SECTION = re.compile(r"^(Args|Returns|Raises|Attributes|Example):$")


@dataclass(frozen=True)
class Public:
    """A public name: where it is, what it is, what is said of it."""

    module: str
    name: str
    value: Any
    doc: str

    def examples(self) -> doctest.DocTest:
        """The example in the docstring, ready to run."""
        base = Path(longrecall.__path__[0]) / "assets" / "mamba2-base"
        module = importlib.import_module(self.module)
        names = {name: getattr(module, name) for name in module.__all__}
        names |= {"BASE": str(base), "torch": importlib.import_module("torch")}
        where = f"{self.module}.{self.name}"
        return doctest.DocTestParser().get_doctest(self.doc, names, where, None, 0)


def public_names() -> list[Public]:
    """All names of `__all__` of the public modules, in their order."""
    found = []
    for module in MODULES:
        package = importlib.import_module(module)
        for name in package.__all__:
            value = getattr(package, name)
            found.append(Public(module, name, value, doc_of(value, name)))
    return found


def doc_of(value: Any, name: str) -> str:
    """The docstring of a class or function; of any other value the string below its assignment."""
    if inspect.isclass(value) or inspect.isfunction(value):
        return inspect.getdoc(value) or ""
    home = "longrecall.version" if name == "__version__" else "longrecall.ops.backends"
    tree = ast.parse(inspect.getsource(importlib.import_module(home)))
    for statement, text in zip(tree.body, tree.body[1:], strict=False):
        match statement, text:
            case ast.Assign(targets=[ast.Name(id=found)]), ast.Expr(value=ast.Constant(value=str(words))):
                if found == name:
                    return inspect.cleandoc(words)
    return ""


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for module, what in MODULES.items():
        parts.append(f"## {module}\n\n{what}\n")
        parts += [section(public) for public in public_names() if public.module == module]
    return "\n".join(parts)


def section(public: Public) -> str:
    """One name: how it is called, what its docstring says, its methods."""
    lines = [f"### {escaped(public.name)}", ""]
    if callable(public.value):
        lines += ["```text", signature(public.name, public.value), "```", ""]
    lines += body(public.doc)
    if inspect.isclass(public.value):
        lines += attributes(public.value) + building(public.value) + methods(public.value)
    return "\n".join(lines).rstrip() + "\n"


def signature(name: str, value: Any) -> str:
    """The call, a line for each argument where it is long."""
    found = inspect.signature(value)
    parts, star = [], False
    for parameter in found.parameters.values():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not star:
            parts.append("*")
        star = star or parameter.kind is inspect.Parameter.KEYWORD_ONLY
        given = "" if parameter.default is inspect.Parameter.empty else f" = {parameter.default!r}"
        sign = "**" if parameter.kind is inspect.Parameter.VAR_KEYWORD else ""
        parts.append(f"{sign}{parameter.name}: {parameter.annotation}{given}")
    empty = found.return_annotation in (inspect.Signature.empty, None) or inspect.isclass(value)
    result = "" if empty else f" -> {found.return_annotation}"
    line = f"{name}({', '.join(parts)}){result}"
    return line if len(line) <= 110 else f"{name}(\n    " + ",\n    ".join(parts) + f",\n){result}"


def attributes(cls: type) -> list[str]:
    """The fields of a dataclass that have a string below them."""
    lines = [f"- `{name}`: {marked(text)}" for name, text in field_docs(cls).items() if not name.startswith("_")]
    return ["**Attributes**", "", *lines, ""] if lines and dataclasses.is_dataclass(cls) else []


def building(cls: type) -> list[str]:
    """What the class's own `__init__` says of its arguments."""
    doc = vars(cls).get("__init__", None).__doc__ if inspect.isfunction(vars(cls).get("__init__")) else None
    return body(inspect.cleandoc(doc).partition("\n\n")[2]) if doc and not dataclasses.is_dataclass(cls) else []


def methods(cls: type) -> list[str]:
    """A line for each public method and property that the class itself defines."""
    lines = []
    for name, member in vars(cls).items():
        function = getattr(member, "__func__", getattr(member, "fget", member))
        doc = inspect.cleandoc(getattr(function, "__doc__", None) or "")
        if name.startswith("_") or not inspect.isfunction(function) or not doc:
            continue
        call = f"`{name}`" if isinstance(member, property) else f"`{name}{short_signature(function)}`"
        lines.append(f"- {call}: {escaped(' '.join(doc.split(chr(10) + chr(10))[0].split()))}")
    return ["**Methods**", "", *lines, ""] if lines else []


def short_signature(function: Any) -> str:
    """Names of the arguments with their defaults, without types."""
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name not in ("self", "cls")]
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
    return str(inspect.Signature(bare))


def body(doc: str) -> list[str]:
    """A docstring as Markdown: its sections as lists, formulas and examples as blocks."""
    lines: list[str] = []
    for block in blocks(doc):
        first = block[0].strip()
        if SECTION.match(first):
            title = first[:-1]
            lines += [f"**{title}**", "", *(section_body(title, block[1:])), ""]
        elif first.startswith(".. math::"):
            formula = " ".join([first.removeprefix(".. math::"), *(line.strip() for line in block[1:])])
            lines += ["$$", formula.strip(), "$$", ""]
        elif first.startswith(">>>"):
            lines += ["```python", *block, "```", ""]
        else:
            lines += [marked(" ".join(line.strip() for line in block)), ""]
    return lines


def section_body(title: str, lines: list[str]) -> list[str]:
    """The entries below Args, Returns and so on: a list, or prose where there is one."""
    text = textwrap.dedent("\n".join(lines)).strip().splitlines()
    if title == "Returns":
        return [marked(" ".join(text))]
    entries: list[str] = []
    for line in text:
        if line.startswith(" ") and entries:
            entries[-1] += " " + line.strip()
        else:
            entries.append(line)
    return [f"- `{name}`: {marked(rest)}" for name, _, rest in (entry.partition(": ") for entry in entries)]


def blocks(doc: str) -> list[list[str]]:
    """The paragraphs of a docstring, a list of lines each; an example is one, whatever it prints."""
    return [part.splitlines() for part in re.split(r"\n\s*\n", doc.strip()) if part.strip()]


def marked(text: str) -> str:
    """A paragraph with its formulas as the site draws them."""
    parts = re.split(r":math:`([^`]*)`", " ".join(text.split()))
    return "".join(f"${part}$" if index % 2 else escaped(part) for index, part in enumerate(parts))

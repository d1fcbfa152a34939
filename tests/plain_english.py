"""Text as sentences: what a page, a docstring or a message of the program says, and how many words a sentence has."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

# After these a full stop ends no sentence.
_ABBREVIATIONS = {"e.g.", "i.e.", "cf.", "vs."}
_FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2[^\n]*$", flags=re.DOTALL | re.MULTILINE)
_HEADER = re.compile(r"\A---\n.*?^---\n", flags=re.DOTALL | re.MULTILINE)
_FORMULA = re.compile(r"^\$\$.*?^\$\$", flags=re.DOTALL | re.MULTILINE)
_NO_PROSE = re.compile(r"\s*(?:\||</?[a-z])")
_STARTS_A_BLOCK = re.compile(r"\s*(?:#{1,6} |[-*+] |\d+[.)] |> ?|\||!\[|</?[a-z])")
_FEW = 4
"""Blanks in a text that is worth a look: most strings of a program are single words."""
# How Python, assembly and YAML of the harness begin.
_CODE = re.compile(r"import |from [\w.]+ import|try:|\{|task: |\"\"\"")


def sentences(text: str) -> Iterator[str]:
    """The sentences of one paragraph. A full stop, question or exclamation mark before a blank ends one."""
    text = " ".join(text.split())
    # What stands in backticks ends no sentence.
    masked = re.sub(r"`[^`]*`", lambda code: "c" * len(code[0]), text)
    start = 0
    for end in re.finditer(r"[.!?][)\"'*_]*(?=\s|$)", masked):
        if masked[start : end.end()].split()[-1].lstrip("(") not in _ABBREVIATIONS:
            yield text[start : end.end()].strip()
            start = end.end()
    if text[start:].strip():
        yield text[start:].strip()


def words(sentence: str) -> int:
    """How many words: what stands between blanks and has a letter or digit.

    Code in backticks is one word, and so is a list of four names or more, which is not read but looked up.
    """
    sentence = re.sub(r"`[^`]*`", "code", sentence)
    sentence = re.sub(r"(?:[\w.:*\\-]+, ){3,}[\w.:*\\-]+", "names", sentence)
    return sum("{}" in word or any(map(str.isalnum, word)) for word in sentence.split())


def paragraphs(page: str) -> Iterator[str]:
    """The prose of a Markdown page: each paragraph, heading and list entry; no code, tables, formulas and HTML."""
    page = re.sub(r"<!--.*?-->", "", _HEADER.sub("", page), flags=re.DOTALL)
    page = _FORMULA.sub("\n", _FENCE.sub("\n", page))
    block: list[str] = []
    for line in [*page.splitlines(), ""]:
        if not line.strip() or _STARTS_A_BLOCK.match(line):
            if block:
                yield _without_marks("\n".join(block))
            block = []
        if line.strip() and not _NO_PROSE.match(line):
            block.append(re.sub(r"^\s*(?:#{1,6} |[-*+] |\d+[.)] |> ?)", "", line))
        if line.startswith("#"):
            yield _without_marks(block.pop())


def _without_marks(text: str) -> str:
    """A link or picture becomes its words, a formula one word."""
    text = re.sub(r"!?\[((?:`[^`]*`|[^\]`])*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"\$[^$\s][^$]*\$", "formula", text)


def messages(source: Path) -> Iterator[tuple[int, str]]:
    """Line and text of every paragraph of a source file's strings that is prose for a reader; docstrings are not.

    Whatever a string is for is checked, since an error may be written anywhere: help, errors, reports, model cards.
    What an f-string puts in is one word: `{}`.
    """
    # Not kept for other tests: hundreds of trees in memory make Python's garbage collector slow.
    waiting: list[ast.AST] = [ast.parse(source.read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        text = _text(node) if isinstance(node, ast.expr) else None
        if text is None:
            waiting += ast.iter_child_nodes(node)
            continue
        assert isinstance(node, ast.expr)
        if text.count(" ") >= _FEW:
            yield from ((node.lineno, part) for part in paragraphs(text) if _is_prose(part))
        # What is put in may hold texts of its own.
        waiting += [part.value for part in ast.walk(node) if isinstance(part, ast.FormattedValue)]


def _is_prose(text: str) -> bool:
    """Not code, and not a list of words alone."""
    return not _CODE.match(text.lstrip()) and re.search(r"[A-Z.,;:{]", text) is not None


def _text(node: ast.expr) -> str | None:
    """The text of a string, of an f-string, or of a sum with one; None for any other expression."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join("{}" if isinstance(part, ast.FormattedValue) else _text(part) or "" for part in parts)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            both = _text(left), _text(right)
            return None if both == (None, None) else "".join("{}" if part is None else part for part in both)
    return None

"""docs/reference/recipes.md: every key of a training recipe and of a sweep, from the dataclasses that read them."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
import types
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from longrecall.sweep.recipe import SweepRecipe
from longrecall.training.recipe import Recipe
from longrecall.training.strict_yaml import Tagged
from website.escaping import escaped

HEAD = """# Recipes

Generated from the dataclasses that read recipes by `python -m website.reference`. They are explained in
[training/recipe.md](../training/recipe.md) and [sweep.md](../sweep.md).

A recipe is one YAML file. Unknown keys are refused with the nearest known one. `--set a.b=value` overrides a key;
entries of lists go by number: `--set data.sources.0.weight=2`. Lengths may be written 512, 4k or 1m (k = 1024). `none`
is no value.
"""


def page() -> str:
    """The whole page."""
    training = section("Training recipes", "`longrecall train RECIPE`.", Recipe)
    return HEAD + training + section("Sweeps", "`longrecall sweep RECIPE`.", SweepRecipe)


def section(title: str, first: str, recipe: type) -> str:
    """All sections of a kind of recipe, each under the name that it has in the file."""
    lines = ["", f"## {title}", "", first, ""]
    told: set[type] = set()
    plain = [field for field in dataclasses.fields(recipe) if not inner(hints(recipe)[field.name])]
    lines += [*keys(recipe, plain), ""] if plain else []
    for field in dataclasses.fields(recipe):
        if field not in plain:
            lines += described(field.name, hints(recipe)[field.name], told)
    return "\n".join(lines).rstrip() + "\n"


def described(name: str, hint: Any, told: set[type]) -> list[str]:
    """A section of the file: what its dataclass says, its keys, and below it the sections inside that were not told."""
    lines = []
    for kind, cls in inner(hint):
        if cls in told:
            continue
        told.add(cls)
        fields = list(dataclasses.fields(cls))
        lines += [f"### {name}: kind {kind}" if kind else f"### {name}", "", escaped(inspect.getdoc(cls) or ""), ""]
        lines += [*keys(cls, fields), ""] if fields else ["It has no keys.", ""]
        for field in fields:
            lines += described(f"{name}.{field.name}", hints(cls)[field.name], told)
    return lines


def keys(cls: type, fields: list[Any]) -> list[str]:
    """A line for each key: its name, its default, what it means."""
    docs = field_docs(cls)
    lines = []
    for field in fields:
        known = docs.get(field.name, "")
        text = escaped(" ".join(known.split()))
        default = shown_default(field)
        lines.append(f"- `{field.name}`{f' [{default}]' if default else ''}{f': {text}' if text else ''}")
    return lines


def shown_default(field: Any) -> str:
    """The default as a recipe would write it; nothing for a key that has to be given, or for a section."""
    value = field.default
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    if value is dataclasses.MISSING or dataclasses.is_dataclass(value):
        return "" if value is not dataclasses.MISSING else "required"
    plain = list(value) if isinstance(value, tuple) else value
    words = {None: "none", True: "true", False: "false"}
    text = words[plain] if plain is None or isinstance(plain, bool) else str(plain)
    return f"`{text}`"


def inner(hint: Any) -> list[tuple[str, type]]:
    """The dataclasses that a key holds, each with its `kind` where there are several."""
    if get_origin(hint) is Annotated:
        marks = [mark for mark in hint.__metadata__ if isinstance(mark, Tagged)]
        return [(name, marks[0].choices[name]) for name in marks[0].choices] if marks else inner(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType, tuple):
        return [found for part in get_args(hint) for found in inner(part)]
    return [("", hint)] if dataclasses.is_dataclass(hint) and isinstance(hint, type) else []


def hints(cls: type) -> dict[str, Any]:
    """The types of a dataclass's fields with their annotations."""
    return get_type_hints(cls, include_extras=True)


def field_docs(cls: type) -> dict[str, str]:
    """What stands in the string below each field, those of base classes included."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(body, ast.ClassDef)
        for field, text in zip(body.body, body.body[1:], strict=False):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                    found[name] = inspect.cleandoc(words)
    return found

"""Plain data to frozen dataclasses, strictly: unknown keys, missing keys and wrong types are named by their path."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import yaml

from longrecall.errors import UserError, did_you_mean
from longrecall.shipped import find_recipe, shipped_recipes


@dataclasses.dataclass(frozen=True)
class Tagged:
    """Marks a field whose dataclass is chosen by its `kind` key, e.g. ``Annotated[Source, Tagged(SOURCES)]``."""

    choices: Mapping[str, type]


def build(kind: Any, value: Any, where: str = "") -> Any:
    """Return `value` (what YAML gave) as `kind`: a dataclass, str, int, float, bool, a union, a tuple or an Annotated.

    ``Annotated[int, function]`` is read by that function, ``Annotated[T, Tagged(...)]`` by its `kind` key. A float may
    be written ``1e-3``, which YAML itself reads as text. Raises UserError naming the dotted path `where`.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _build_annotated(arguments[0], arguments[1], value, where)
    if origin in (Union, types.UnionType):
        return _build_union(arguments, value, where)
    if origin is tuple:
        return _build_tuple(arguments, value, where)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _build_dataclass(kind, value, where)
    return _build_scalar(kind, value, where)


def _build_annotated(kind: Any, mark: Tagged | Callable[[Any], Any], value: Any, where: str) -> Any:
    if not isinstance(mark, Tagged):
        try:
            return mark(value)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
    if not isinstance(value, Mapping) or "kind" not in value:
        raise UserError(f"{where} needs a mapping with a kind: {', '.join(mark.choices)}; got {value!r}")
    name = value["kind"]
    if not isinstance(name, str) or name not in mark.choices:
        hint = did_you_mean(str(name), mark.choices)
        raise UserError(f'{where}.kind "{name}" is unknown; it is one of {", ".join(mark.choices)}.{hint}')
    rest = {key: item for key, item in value.items() if key != "kind"}
    return _build_dataclass(mark.choices[name], rest, where)


def _build_union(choices: tuple[Any, ...], value: Any, where: str) -> Any:
    # "none" is what the docs and `longrecall eval --option` call no value; YAML itself reads it as text.
    if type(None) in choices and (value is None or (value == "none" and str not in choices)):
        return None
    errors = []
    for choice in choices:
        if choice is not type(None):
            try:
                return build(choice, value, where)
            except UserError as error:
                errors.append(error)
    raise errors[0]


def _build_tuple(kinds: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise UserError(f"{where} must be a list, got {value!r}")
    if kinds[-1] is Ellipsis:
        kinds = (kinds[0],) * len(value)
    if len(kinds) != len(value):
        raise UserError(f"{where} must have {len(kinds)} entries, got {len(value)}")
    pairs = enumerate(zip(kinds, value, strict=True))
    return tuple(build(kind, item, f"{where}.{index}") for index, (kind, item) in pairs)


def _build_dataclass(kind: type, value: Any, where: str) -> Any:
    name, prefix = (where or "the recipe"), (f"{where}." if where else "")
    if not isinstance(value, Mapping):
        raise UserError(f"{name} must be a mapping of keys to values, got {value!r}")
    hints = get_type_hints(kind, include_extras=True)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for key in value:
        if key not in fields:
            hint = did_you_mean(str(key), fields)
            raise UserError(f'unknown key "{prefix}{key}"; {name} has {", ".join(fields) or "no keys"}.{hint}')
    for key, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and key not in value:
            raise UserError(f'"{prefix}{key}" is missing')
    arguments = {key: build(hints[key], item, f"{prefix}{key}") for key, item in value.items()}
    try:
        return kind(**arguments)
    except UserError as error:
        raise UserError(f"{name}: {error}" if where else str(error)) from None


def _build_scalar(kind: Any, value: Any, where: str) -> Any:
    if kind is float:
        try:
            if isinstance(value, (int, float, str)) and not isinstance(value, bool):
                return float(value)
        except ValueError:
            pass
        raise UserError(f"{where} must be a number, got {value!r}")
    if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    names = {str: "text", int: "a whole number", bool: "true or false"}
    raise UserError(f"{where} must be {names.get(kind, kind)}, got {value!r}")


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Return the mapping in a YAML file, which ``recipes/...`` may name anywhere (`find_recipe`).

    Raises UserError when it is missing, not UTF-8, no YAML or no mapping.
    """
    path = find_recipe(path)
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        known = shipped_recipes(".yaml")
        hint = did_you_mean(path.as_posix(), known) or f" longrecall ships with {', '.join(known)}"
        raise UserError(f"there is no recipe {path}.{hint}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    except (RecursionError, ValueError) as error:  # brackets without end; numbers of thousands of digits, odd dates
        raise UserError(f"{path} is not a recipe: {error}") from None
    if not isinstance(data, dict):
        raise UserError(f"{path} must hold a mapping of sections (model, data, optimizer, run, ...), not {data!r}")
    return data


def apply_override(data: dict[str, Any], override: str) -> None:
    """Set one ``a.b=value`` in `data` in place; the value is read as YAML, list entries are chosen by number.

    Sections that are not there yet are made; whether their names exist is for `build` to say.
    """
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise UserError(f'--set "{override}": write key.subkey=value, e.g. --set optimizer.learning_rate=1e-3')
    try:
        # A value that begins with * is a pattern of file names; YAML would look for an anchor of that name.
        value = text.strip() if text.strip().startswith("*") else yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise UserError(f'--set "{override}": the value is not valid YAML') from None
    place: Any = data
    for depth, key in enumerate(keys):
        last = depth == len(keys) - 1
        where = ".".join(keys[: depth + 1])
        if isinstance(place, list):
            if not key.isdigit() or int(key) >= len(place):
                raise UserError(f'--set "{override}": {where} is not an entry of a list of {len(place)} (from 0)')
            index: Any = int(key)
        elif isinstance(place, dict):
            index = key
            if not last and place.get(key) is None:
                place[key] = {}
        else:
            raise UserError(f'--set "{override}": {".".join(keys[:depth])} is a single value and has no keys')
        if last:
            place[index] = value
        else:
            place = place[index]

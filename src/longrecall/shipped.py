"""Recipes and model descriptions that ship with longrecall: ``recipes/...`` in a clone, and by that name anywhere."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).parent
_PLACES = (_PACKAGE / "assets" / "recipes", _PACKAGE.parents[1] / "recipes")
"""Where they are: inside of an installed package, or beside the sources in a clone."""
_NAME = "recipes"


def find_recipe(path: str | Path) -> Path:
    """Return `path` where there is such a file, else the shipped file that ``recipes/...`` names, else `path`."""
    asked = Path(path)
    parts = asked.parts
    if asked.exists() or len(parts) < 2 or parts[0] != _NAME or ".." in parts:
        return asked
    found = (place.joinpath(*parts[1:]) for place in _PLACES)
    return next((place for place in found if place.is_file()), asked)


def shipped_recipes(suffix: str) -> list[str]:
    """Return the names of all shipped files with this suffix, as `find_recipe` takes them: ``recipes/noise.yaml``."""
    place = next((place for place in _PLACES if place.is_dir()), None)
    if place is None:
        return []
    return sorted(f"{_NAME}/{file.relative_to(place).as_posix()}" for file in place.rglob(f"*{suffix}"))

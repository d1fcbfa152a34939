"""Model descriptions: a config.json for people, in which equal layers are written once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from longrecall.errors import UserError, did_you_mean
from longrecall.files import expand_home
from longrecall.models.formats import native
from longrecall.models.formats.descriptions import read_json
from longrecall.models.formats.layout import Layout
from longrecall.models.limits import LAYERS
from longrecall.models.sizes import PlainConfig
from longrecall.shipped import find_recipe, shipped_recipes

if TYPE_CHECKING:
    from longrecall.models.config import RecurrentConfig

_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_OF_CHECKPOINTS = ("architectures", "dtype", "transformers_version")
"""What the config.json of a written checkpoint says beside the model: a description may, and it changes nothing."""


def is_description(path: str | Path) -> bool:
    """Whether `path` means a description (a .json file) and not a checkpoint."""
    return str(path).endswith(".json") and not Path(path).is_dir()


def read_description(path: str | Path) -> RecurrentConfig:
    """Return the config that a description file means; raises as `read_sizes`."""
    return _read(path).config


def read_sizes(path: str | Path) -> PlainConfig:
    """Return the sizes that a description file means.

    It is a native config.json (docs/reference/mixers.md) whose layers may carry
    ``"repeat": N``: N equal layers in a row.

    Raises:
        UserError: a file that is missing or no JSON, an unknown or missing key, or a value that cannot be.
    """
    return _read(path).plain


def _read(path: str | Path) -> Layout:
    path = find_recipe(expand_home(path))
    if not path.is_file():
        hint = did_you_mean(path.as_posix(), shipped_recipes(".json"))
        raise UserError(f"there is no file {path}; a model description is a .json file, see recipes/configs/.{hint}")
    raw, where = read_json(path), str(path)
    known = {*PlainConfig.names(), "model_type", *_TOKENS, *_OF_CHECKPOINTS}
    for key in raw:
        if key not in known:
            raise UserError(f'{where}: a model description has no key "{key}".{did_you_mean(key, known)} Leave it out')
    if raw.get("model_type", native.MODEL_TYPE) != native.MODEL_TYPE:
        raise UserError(f'{where}: "model_type" is {raw["model_type"]!r}; a model description is "{native.MODEL_TYPE}"')
    return native.layout({**raw, "layers": _repeated(raw.get("layers"), where)}, where)


def _repeated(layers: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(layers, list) or not layers or not all(isinstance(layer, dict) for layer in layers):
        raise UserError(f'{where}: "layers" must be a list of layer descriptions')
    found: list[dict[str, Any]] = []
    for layer in layers:
        count = layer.get("repeat", 1)
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= LAYERS:
            raise UserError(f'{where}: "repeat" must be a whole number from 1 to {LAYERS}, got {count!r}')
        if len(found) + count > LAYERS:
            raise UserError(f'{where}: "layers" are more than {LAYERS} with their "repeat"')
        found += [{key: value for key, value in layer.items() if key != "repeat"}] * count
    return found

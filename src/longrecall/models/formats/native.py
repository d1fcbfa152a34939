"""longrecall's own format (``model_type: longrecall``) and the model card that goes with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from longrecall.errors import UserError
from longrecall.layers.descriptions.base import MixerConfig
from longrecall.layers.descriptions.mlp import MLPConfig
from longrecall.models.formats.layout import Layout
from longrecall.models.formats.sources import same
from longrecall.models.sizes import LayerConfig, ModelSizes, PlainConfig
from longrecall.tables import groups, in_runs

NAME = "native"
MODEL_TYPE = "longrecall"

_NOT_OF_THE_MODEL = ("output_attentions", "output_hidden_states", "return_dict", "auto_map")
"""What a forward pass returns, which is for its callers to say, and the code that an exported folder brings along."""
_DTYPES = frozenset({"bfloat16", "float16", "float32", "float64", "half", "float", "double"})
"""What torch calls floating-point types that weights may be stored in."""


def layout(raw: dict[str, Any], where: str) -> Layout:
    """Read a native config.json (parsed; `where` names it in errors). UserError names what is wrong with it."""
    missing = [key for key in ("vocab_size", "hidden_size", "layers") if key not in raw]
    if missing:
        raise UserError(f'{where}: "{missing[0]}" is missing; a native config.json needs it')
    if not isinstance(raw["layers"], list) or not all(isinstance(layer, dict) for layer in raw["layers"]):
        raise UserError(f'{where}: "layers" must be a list of layer descriptions')
    for key in ("dtype", "torch_dtype"):
        name = raw.get(key)
        if name is not None and not (isinstance(name, str) and name in _DTYPES):
            raise UserError(f'{where}: "{key}" is {name!r}; it must be a floating-point type, such as "float32"')
    try:
        plain = PlainConfig.from_dict({key: value for key, value in raw.items() if key not in _NOT_OF_THE_MODEL})
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    # transformers' save_pretrained keeps a copy of a tied head under some settings.
    copies = {"lm_head.weight": "model.embeddings.weight"} if plain.tie_word_embeddings else {}
    return Layout(plain, {name: same(name) for name in plain.tensor_shapes()}, copies)


def model_card(
    config: ModelSizes, parameters: int, dtype: str, surgery: Sequence[dict[str, Any]], *, with_code: bool = False
) -> str:
    """Return the README.md of a native checkpoint: a YAML header, the layers, what surgery did, and how to load it.

    Args:
        config: the model's.
        parameters: how many it has, as `accounting.account` counts.
        dtype: storage type for the reader, such as "bfloat16".
        surgery: the records of surgery.json.
        with_code: the checkpoint brings code along by which transformers finds longrecall.
    """
    layers = config.layer_configs()
    types = sorted({part.type.replace("_", "-") for layer in layers for part in _modules(layer)})
    tags = "\n".join(f"- {tag}" for tag in ("longrecall", "linear-attention", "recurrent", *types))
    rows = "\n".join(_row(numbers, layers[numbers[0]]) for numbers in groups(layers))
    done = "\n".join(surgery_line(record) for record in surgery)
    context = "unknown" if config.context_length is None else f"{config.context_length:,} tokens"
    return f"""---
library_name: longrecall
pipeline_tag: text-generation
tags:
{tags}
---

# A recurrent language model in longrecall's format

| | |
|---|---|
| parameters | {parameters:,} ({dtype}) |
| recurrent state of one sequence | {config.state_size():,} numbers |
| vocabulary | {config.vocab_size:,} |
| width | {config.hidden_size:,} |
| training context | {context} |

| layers | blocks | state | MLP width |
|---|---|---|---|
{rows}

## Surgery

{done or "None: no layer of this model was changed after it was made."}

The full record is in `surgery.json` when there is one.

## Use

```python
import longrecall

model = longrecall.load("path/to/this/folder")
```

{_WITH_CODE if with_code else _WITHOUT_CODE}
"""


_WITHOUT_CODE = "Once `longrecall` is imported, `transformers.AutoModelForCausalLM.from_pretrained` loads it too."
_WITH_CODE = """Where the package longrecall is installed, transformers loads it without another import:

```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("path/to/this/folder", trust_remote_code=True)
```

The code that it runs then is `modeling_longrecall.py`, which imports longrecall and does nothing else."""


def _row(numbers: Sequence[int], layer: LayerConfig) -> str:
    blocks = [layer.mixer, *(block.module for block in layer.blocks[1:] if not isinstance(block.module, MLPConfig))]
    shown = " + ".join(_named(block) for block in blocks)
    return f"| {in_runs(numbers)} | {shown} | {layer.state_size():,} | {layer.mlp_size or '-'} |"


def _named(module: MixerConfig) -> str:
    """What a module is, and what is inside it."""
    inner = [_named(part) for _, part in module.parts()]
    return f"{module.type} ({', '.join(inner)})" if inner else module.type


def _modules(layer: LayerConfig) -> Iterator[MixerConfig]:
    """Every token mixer of a layer, and what else it has beside an MLP, with what is inside."""
    for block in layer.blocks:
        if not isinstance(block.module, MLPConfig):
            yield from _inside(block.module)


def _inside(module: MixerConfig) -> Iterator[MixerConfig]:
    yield module
    for _, part in module.parts():
        yield from _inside(part)


def surgery_line(record: dict[str, Any]) -> str:
    """Return one surgery record as a line of a model card."""
    method, init, seed, version = (record.get(key, "?") for key in ("method", "init", "seed", "longrecall_version"))
    layers, state = _shown(record.get("layers")), _shown(record.get("state_size"))
    return f"- `{method}` (init `{init}`, seed {seed}) in layers {layers}; state {state}; longrecall {version}"


def _shown(value: Any) -> str:
    """Return a record's value in one readable piece: ``12, 18`` or ``64 -> 256``."""
    if isinstance(value, dict) and {"before", "after"} <= set(value):
        return f"{value['before']} -> {value['after']}"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)

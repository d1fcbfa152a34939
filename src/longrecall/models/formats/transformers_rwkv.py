"""transformers' RWKV-4 (``model_type: rwkv``): ``models/rwkv`` of transformers 5.23.

Outside of training the stock model halves its residual stream after every `rescale_every` layers, and divides the
output projections after it by the same power of two; its files hold the undivided ones. The norms undo that, all but
their epsilon: a norm of x / 2**n with eps is one of x with 4**n * eps. So every layer has an epsilon of its own here.
"""

from __future__ import annotations

from typing import Any

from longrecall.models.formats.expressions import Source
from longrecall.models.formats.fields import Fields
from longrecall.models.formats.layout import Layout
from longrecall.models.formats.sources import reshaped, same
from longrecall.models.formats.stock import common_fields, first_module, merged
from longrecall.models.sizes import PlainConfig

RESCALE_EVERY = 6
FINAL_EPS = 1e-5
"""Of the last norm, whatever `layer_norm_epsilon` is."""
_NAMES = {"k": "key", "v": "value", "r": "receptance", "o": "output"}


def layout(raw: dict[str, Any], where: str) -> Layout:
    """Read an RwkvConfig (parsed; `where` names the file in errors). UserError for what cannot be reproduced."""
    fields = Fields(raw, where)
    hidden, count = fields.integer("hidden_size", 4096), fields.integer("num_hidden_layers", 32)
    eps, every = fields.number("layer_norm_epsilon", 1e-5), rescale_every(fields)
    mixer = {
        "type": "rwkv4",
        "input_dim": hidden,
        "inner_dim": fields.optional_integer("attention_hidden_size", hidden),
    }
    channel = {
        "type": "rwkv4_channel",
        "input_dim": hidden,
        "inner_dim": fields.optional_integer("intermediate_size", 4 * hidden),
    }
    tied = fields.flag("tie_word_embeddings", False)
    config = {
        "vocab_size": fields.integer("vocab_size", 50277),
        "hidden_size": hidden,
        "norm_eps": eps,
        "tie_word_embeddings": tied,
        "residual_in_fp32": False,
        "context_length": fields.integer("context_length", 1024),
        "embedding_norm": _norm(eps, 0, 0),
        "final_norm": _norm(FINAL_EPS, count, every),
        **fields.token_ids(),
    }
    fields.finish()
    if _norm(max(eps, FINAL_EPS), count, every)["eps"] >= 1:
        raise fields.fail("rescale_every", f"{count} layers are too many to halve the stream so often")
    layers = [
        {
            "blocks": [
                {"name": name, "module": module, "norm": _norm(eps, index, every)}
                for name, module in (("mixer", mixer), ("mlp", channel))
            ]
        }
        for index in range(count)
    ]
    return Layout(
        plain=PlainConfig.from_dict({**config, "layers": layers}),
        sources=_sources(hidden, count, tied),
        copies={"head.weight": "model.embeddings.weight"} if tied else {},
    )


def stock_config(plain: PlainConfig, kept: dict[str, Any]) -> dict[str, Any]:
    """Return the RwkvConfig of a native model as plain data; `kept` is the one that it was read from, or {}."""
    mixer, channel = first_module(plain, "rwkv4"), first_module(plain, "rwkv4_channel")
    found = [(layer["blocks"][0].get("norm") or {}).get("eps") for layer in plain.layers if "blocks" in layer]
    eps = [plain.norm_eps if value is None else value for value in found]
    # The first layer after the stream was halved; none in a model that never does it.
    every = next((index for index, value in enumerate(eps) if value != eps[0]), 0)
    if not every and (plain.final_norm or {}).get("eps", plain.norm_eps) != FINAL_EPS:
        every = len(eps)
    if kept and _scales(rescale_every(Fields(kept, "")), len(eps)) == _scales(every, len(eps)):
        every = kept.get("rescale_every", RESCALE_EVERY)
    sizes = {
        "attention_hidden_size": (mixer["inner_dim"], plain.hidden_size),
        "intermediate_size": (channel["inner_dim"], 4 * plain.hidden_size),
    }
    return merged(
        kept,
        {
            "model_type": "rwkv",
            "architectures": ["RwkvForCausalLM"],
            **common_fields(plain, context="context_length"),
            "layer_norm_epsilon": eps[0],
            "rescale_every": every,
            # null is the usual width
            **{
                name: kept[name] if name in kept and (kept[name] or usual) == width else width
                for name, (width, usual) in sizes.items()
            },
        },
    )


def rescale_every(fields: Fields) -> int:
    """Return after how many layers the stock model halves its stream; 0 = never."""
    value = fields.get("rescale_every", RESCALE_EVERY)
    if isinstance(value, bool) or not isinstance(value, int):
        raise fields.fail("rescale_every", "it must be a whole number")
    return max(value, 0)


def _scales(every: int, count: int) -> list[int]:
    """How often the stream was halved before each layer, and at the end."""
    return [index // every if every else 0 for index in range(count + 1)]


def _norm(eps: float, index: int, every: int) -> dict[str, Any]:
    halved = index // every if every else 0
    # 4**512 is the largest power that a float holds.
    return {"kind": "layer", "bias": True, "eps": eps * 4.0 ** min(halved, 500)}


def _sources(hidden: int, count: int, tied: bool) -> dict[str, Source]:
    found: dict[str, Source] = {"model.embeddings.weight": same("rwkv.embeddings.weight")}
    norms = {"model.embedding_norm": "rwkv.blocks.0.pre_ln", "model.norm": "rwkv.ln_out"}
    if not tied:
        found["lm_head.weight"] = same("head.weight")
    for index in range(count):
        ours, theirs = f"model.layers.{index}.", f"rwkv.blocks.{index}."
        norms |= {f"{ours}mixer_norm": f"{theirs}ln1", f"{ours}mlp_norm": f"{theirs}ln2"}
        for block, foreign, mixes, projections in (
            ("mixer", "attention", "kvr", "kvro"),
            ("mlp", "feed_forward", "kr", "kvr"),
        ):
            for name in mixes:
                source = same(f"{theirs}{foreign}.time_mix_{_NAMES[name]}")
                found[f"{ours}{block}.mix_{name}"] = reshaped(source, (1, 1, hidden))
            for name in projections:
                found[f"{ours}{block}.{name}_proj.weight"] = same(f"{theirs}{foreign}.{_NAMES[name]}.weight")
        for name, foreign in (("decay", "time_decay"), ("bonus", "time_first")):
            found[f"{ours}mixer.{name}"] = same(f"{theirs}attention.{foreign}")
    for ours, theirs in norms.items():
        for part in ("weight", "bias"):
            found[f"{ours}.{part}"] = same(f"{theirs}.{part}")
    return found

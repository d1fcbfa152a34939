"""add_retrieval: a retrieval layer around the mixer of a trained layer, of any type (RESONA, section 3).

The mixer and its recurrent state stay as they are; what is added is attention to chosen chunks of the context and a
blend of the two (layers/retrieval.py, docs/retrieval.md):

    y = alpha * mixer(x) + (1 - alpha) * attention(x)

    init       blend                        alpha at the start    at step 0
    preserve   `input` [or `learned`]       1                     the old function exactly, bit for bit
    perturb    `input` [or `learned`]       `alpha` [0.9]         nearly the old function
    reinit     `fixed` [or the other two]   `alpha` [0.5]         the paper's: half of the layer is untrained attention

The encoders start as one isometry for chunks and queries, so that scores begin as cosines of embeddings; projections
have a new layer's size. Why preserve learns: alpha's gradient is the difference of the two outputs, which is not zero,
so it moves at the first step, and everything behind the attention from the second.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from longrecall.errors import UserError
from longrecall.layers.descriptions.retrieval import BLENDS, SELECTORS, RetrievalConfig
from longrecall.layers.mixers.registry import mixer_config
from longrecall.surgery.fresh import uniform, usual_bound
from longrecall.surgery.method import ANY_MIXER, Method, MixerDescription, Option, Plan, Tensors

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from longrecall.models.config import RecurrentConfig

SUPPORTED = ("preserve", "perturb", "reinit")
SIZES = ("chunk", "top_k", "selector", "encoder_dim", "num_heads", "head_dim", "kv_heads")
"""Options that are fields of the layer's description too."""

OPTIONS = (
    Option(
        "chunk",
        int,
        RetrievalConfig.chunk,
        SUPPORTED,
        "number of tokens in a chunk",
        least=1,
        flag="--chunk",
        letter="U",
    ),
    Option(
        "top_k",
        int,
        RetrievalConfig.top_k,
        SUPPORTED,
        "number of chunks that a token reads",
        least=1,
        flag="--top-k",
        letter="K",
    ),
    Option(
        "selector",
        str,
        RetrievalConfig.selector,
        SUPPORTED,
        "way to choose chunks: weighted trains the encoders; hard (the paper's algorithm 2) does not",
        choices=SELECTORS,
        flag="--selector",
        letter="S",
    ),
    Option(
        "encoder_dim",
        int,
        RetrievalConfig.encoder_dim,
        SUPPORTED,
        "width of chunk vectors",
        least=1,
        flag="--encoder-dim",
        letter="N",
    ),
    Option(
        "num_heads",
        int,
        RetrievalConfig.num_heads,
        SUPPORTED,
        "number of attention heads",
        least=1,
        flag="--heads",
        letter="H",
    ),
    Option("head_dim", int, RetrievalConfig.head_dim, SUPPORTED, "width of an attention head", least=1),
    Option("kv_heads", int, RetrievalConfig.kv_heads, SUPPORTED, "number of key-value heads", least=1),
    Option(
        "blend",
        str,
        "input",
        SUPPORTED,
        "kind of alpha: input (computed from the layer's input), learned (one number per channel) or fixed",
        choices=BLENDS,
        default_by_init=(("reinit", "fixed"),),
    ),
    # Below 1: a mixer that has the whole output is preserve's start, which must not hang on a rounded number.
    Option(
        "alpha",
        float,
        0.5,
        ("perturb", "reinit"),
        "share of the output that comes from the mixer at the start",
        least=0.0,
        most=0.99,
        default_by_init=(("perturb", 0.9),),
    ),
    Option("noise_scale", float, 1.0, SUPPORTED, "factor on the new random projections", above=0.0),
)


def check_model(config: RecurrentConfig, options: Mapping[str, Any]) -> None:
    """Raise UserError when no token of a training sequence would ever have a finished chunk before it."""
    length, chunk = config.context_length, int(options["chunk"])
    if length is not None and chunk >= length:
        raise UserError(
            f"add_retrieval: a chunk of {chunk} tokens never ends within the model's context of {length} tokens. "
            "Nothing would be retrieved or learned in training; use a smaller chunk"
        )


def plan(mixer: MixerDescription, init: str, options: Mapping[str, Any]) -> Plan:
    """Return the description of the retrieval layer; raise UserError when the layer has one or sizes do not fit."""
    if mixer["type"] == RetrievalConfig.type:
        raise UserError("it already has a retrieval layer, and a layer can have only one; choose other layers")
    if options["blend"] == "fixed" and init != "reinit":
        raise UserError(
            f"with blend=fixed the layer cannot both start unchanged and learn; {init} takes input or learned"
        )
    alpha = 1.0 if init == "preserve" else float(options["alpha"])
    sizes = {name: options[name] for name in SIZES}
    wrapped = {"type": RetrievalConfig.type, "base": dict(mixer), **sizes, "alpha": alpha, "blend": options["blend"]}
    return Plan(mixer_config(wrapped).to_dict(), tuple(sorted(f"mixer.{name}" for name in _trained(options))))


def transform(
    mixer: MixerDescription, tensors: Tensors, init: str, options: Mapping[str, Any], generator: torch.Generator
) -> Tensors:
    """Return the old mixer's tensors under `mixer.base.`, as they are, and the new ones in the dtype of its matrices.

    `tensors` holds `mixer_norm.weight` and everything under `mixer.`. Fresh numbers are drawn in float32.
    """
    result: Tensors = {}
    for name, tensor in tensors.items():
        inner = name.startswith("mixer.")
        result[f"mixer.base.{name.removeprefix('mixer.')}" if inner else name] = tensor
    hidden = _width(mixer, tensors)
    # Norms and time constants may be kept in float32 beside half-precision matrices, which hold most of the numbers.
    dtype = max(tensors.values(), key=lambda tensor: tensor.numel()).dtype
    alpha = 1.0 if init == "preserve" else float(options["alpha"])
    fresh = _fresh(hidden, alpha, options, generator)
    return result | {f"mixer.{name}": tensor.to(dtype) for name, tensor in fresh.items()}


def _width(mixer: MixerDescription, tensors: Tensors) -> int:
    """Return the width of the residual stream: the one for which the mixer has tensors of these shapes.

    A norm in front of the mixer would say it, but in some models it stands behind.
    """
    there = {name.removeprefix("mixer."): tuple(t.shape) for name, t in tensors.items() if name.startswith("mixer.")}
    described = mixer_config(dict(mixer))
    for width in sorted({size for shape in there.values() for size in shape}):
        with contextlib.suppress(UserError):
            if described.tensor_shapes(width) == there:
                return width
    raise ValueError(f"the tensors are not those of the mixer {described}")


def _fresh(hidden: int, alpha: float, options: Mapping[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
    """Return every tensor of the retrieval layer beside its base, in float32."""
    import torch

    from longrecall.layers.retrieval.weights import START_TEMPERATURE

    scale, width = float(options["noise_scale"]), int(options["head_dim"])
    queries, keys = int(options["num_heads"]) * width, int(options["kv_heads"]) * width
    isometry = torch.nn.init.orthogonal_(torch.empty(int(options["encoder_dim"]), hidden), generator=generator)
    shapes = {"q_proj": (queries, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden)}
    shapes["o_proj"] = (hidden, queries)
    result = {"chunk_encoder.weight": isometry, "query_encoder.weight": isometry.clone()}
    for name, shape in shapes.items():
        result[f"{name}.weight"] = uniform(shape, scale * usual_bound(shape[1]), generator)
    if options["selector"] == "weighted":
        result["temperature"] = torch.full((1,), math.log(START_TEMPERATURE))
    if options["blend"] != "fixed":
        result["blend.bias"] = torch.full((hidden,), alpha)
    if options["blend"] == "input":
        result["blend.weight"] = torch.zeros(hidden, hidden)
    return result


def _trained(options: Mapping[str, Any]) -> list[str]:
    """Return the new tensors that training moves: with `hard` the encoders only choose, and have no gradient."""
    names = [f"{name}_proj.weight" for name in "qkvo"]
    if options["selector"] == "weighted":
        names += ["chunk_encoder.weight", "query_encoder.weight", "temperature"]
    names += [] if options["blend"] == "fixed" else ["blend.bias"]
    return names + (["blend.weight"] if options["blend"] == "input" else [])


METHOD = Method(
    name="add_retrieval",
    summary="retrieval beside the mixer",
    mixers=ANY_MIXER,
    inits=SUPPORTED,
    options=OPTIONS,
    plan=plan,
    transform=transform,
    senseless=(
        ("handover", "the learned blend already moves from the old mixer to the new layer, starting at preserve"),
        ("inherit", "the old layer has no retrieval whose weights could be taken over"),
    ),
    check_model=check_model,
)

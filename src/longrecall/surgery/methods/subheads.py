"""subheads: every head of a trained GLA, KDA or DeltaNet layer (gated or not) gets E - 1 more subheads with states.

The layer becomes one of "Scaling up the State Size of RNN LLMs for Long-Context Scenarios", sections 4.1 to 4.3
(layers/expansion.py has the formulas): E subheads read and write with queries and keys of their own, the values are
shared, the outputs added up; the state is E times as large. The paper trains such layers from scratch. A trained head
has no activation and no matrix behind its projection y, so the new subheads are grafted beside it:

    o = o_0 + sum over j of  scale_j * o_j        o_0: the old head;  o_j: queries and keys from SiLU(y) W_j

    init       old head                 new subheads               scale   at step 0
    preserve   kept                     W and conv fresh           0       the old function exactly
    perturb    shrink * q, k + noise    W and conv fresh           entry   nearly the old function
    reinit     none                     q, k, W and conv fresh     none    forgets what it recalled (the paper's layer)
    handover   the old layer beside a `reinit` one                         the old function exactly

With every init values, output gate, norm and projection stay, and decay and beta of a new subhead begin as copies of
its head's. Why preserve learns: o_j is not zero, so scale_j moves at the first step, what makes o_j from the second.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from longrecall.errors import UserError
from longrecall.layers.descriptions.expansion import MOST, ExpansionConfig
from longrecall.surgery.fresh import MEASURED, SIZES, USUAL, measured_bound, uniform, usual_bound
from longrecall.surgery.handover import handover_mixer, handover_tensors
from longrecall.surgery.method import Method, MixerDescription, Option, Plan, Tensors

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SUPPORTED = ("preserve", "perturb", "handover", "reinit")
GATES = {
    "delta_net": ("b_proj.weight",),
    "gated_delta_net": ("a_proj.weight", "b_proj.weight", "A_log", "dt_bias"),
    "gla": ("gk_proj.1.weight", "gk_proj.1.bias"),
    "kda": ("f_proj.1.weight", "b_proj.weight", "A_log", "dt_bias"),
}
"""Tensors of each mixer type with rows for every state head (or its channels): decay and beta."""
KEPT_GATES = {
    "gla": ("gk_proj.0.weight",),
    "kda": ("f_proj.0.weight", "g_proj.0.weight", "g_proj.1.weight"),
}
"""Tensors of the same projections that stay as they are."""

OPTIONS = (
    Option(
        "factor",
        int,
        4,
        SUPPORTED,
        "number of subheads per head",
        least=2,
        most=MOST,
        flag="--factor",
        letter="E",
    ),
    Option(
        "fresh",
        str,
        MEASURED,
        SUPPORTED,
        "size of the new random weights: measured (like the layer's own rows) or usual (like a new layer's)",
        choices=SIZES,
    ),
    Option("noise_scale", float, 1.0, SUPPORTED, "factor on all new random weights", above=0.0),
    # Not below 1: behind these projections stand SiLU and a norm, which smaller numbers go through in another way.
    Option("shrink", float, 1.0, ("perturb",), "factor on the old q and k projections", least=0.0),
    Option(
        "noise", float, 0.25, ("perturb",), "noise on the old q and k projections, as a share of their size", least=0.0
    ),
    Option("entry", float, 0.1, ("perturb",), "scale of the new subheads' output at the start", above=0.0),
)


def plan(mixer: MixerDescription, init: str, options: Mapping[str, Any]) -> Plan:
    """Return the description with more subheads; raise UserError when the layer cannot have them."""
    if mixer.get("merged"):
        raise UserError(
            "its heads are merged and share one state, which cannot be split into subheads; choose other layers"
        )
    old = _present(mixer, init)
    count = old * int(options["factor"])
    if count > MOST:
        most = f"at most factor {MOST // old}" if 2 * old <= MOST else "other layers"
        raise UserError(f"its heads have {old} subheads and would get {count}, more than {MOST}; use {most}")
    grafted = init in ("preserve", "perturb")
    expansion = ExpansionConfig(kind="headwise", factor=count, grafted=grafted)
    grown = {**mixer, "expansion": expansion.to_dict()}
    kind = str(mixer["type"])
    names = [*GATES[kind], "q_expand.weight", "k_expand.weight"]
    names += ["q_conv.weight", "k_conv.weight"] if mixer["conv_width"] else []
    names += ["subhead_scale"] if grafted else []
    names += [] if init == "preserve" else ["q_proj.weight", "k_proj.weight"]
    if init == "handover":
        names += ["v_proj.weight", "o_norm.weight", "o_proj.weight"]
        names += ["g_proj.weight"] if mixer.get("output_gate") else []
        names += ["v_conv.weight"] if mixer["conv_width"] else []
        names += KEPT_GATES.get(kind, ())
        names += ["g_proj.1.bias"] if kind == "kda" and mixer.get("gate_bias", True) else []
        return Plan(handover_mixer(mixer, grown), tuple(sorted(f"mixer.new.{name}" for name in names)))
    return Plan(grown, tuple(sorted(f"mixer.{name}" for name in names)))


def transform(
    mixer: MixerDescription, tensors: Tensors, init: str, options: Mapping[str, Any], generator: torch.Generator
) -> Tensors:
    """Return the tensors of the layer with more subheads; dtypes are kept, arithmetic is float32.

    `tensors` holds `mixer_norm.weight` and everything under `mixer.` with the shapes of docs/reference/tensors.md.
    """
    import torch

    if init == "handover":
        return handover_tensors(tensors, transform(mixer, tensors, "reinit", options, generator))
    heads, old = int(mixer["num_heads"]), _present(mixer, init)
    new = old * int(options["factor"])
    result = dict(tensors)
    for name in GATES[str(mixer["type"])]:
        rows = tensors[f"mixer.{name}"].unflatten(0, (heads, old, -1))
        copies = rows[:, :1].expand(-1, new - old, *rows.shape[2:])
        result[f"mixer.{name}"] = torch.cat([rows, copies], 1).flatten(0, 2)
    for side in ("q", "k"):
        result |= _queries_or_keys(side, mixer, tensors, init, options, generator)
    if init == "reinit":
        result.pop("mixer.subhead_scale", None)
        return result
    value_heads = int(mixer.get("value_heads") or heads)
    dtype = tensors["mixer.q_proj.weight"].dtype
    entering = torch.full((value_heads, new - old), options["entry"] if init == "perturb" else 0.0, dtype=dtype)
    present = [tensors["mixer.subhead_scale"]] if old > 1 else []
    result["mixer.subhead_scale"] = torch.cat([*present, entering], 1)
    return result


def _queries_or_keys(
    side: str,
    mixer: MixerDescription,
    tensors: Tensors,
    init: str,
    options: Mapping[str, Any],
    generator: torch.Generator,
) -> Tensors:
    """Return projection, expansion and convolution of q or k."""
    import torch

    heads, width, old = int(mixer["num_heads"]), int(mixer["key_dim"]), _present(mixer, init)
    new = old * int(options["factor"])
    names = {part: f"mixer.{side}_{part}.weight" for part in ("proj", "expand", "conv")}
    projection = tensors[names["proj"]]
    result: Tensors = {}
    if init != "preserve":
        result[names["proj"]] = _projection(projection, init, options, generator)
    made = new if init == "reinit" else new - old
    bound = float(options["noise_scale"]) * usual_bound(width)
    matrix = uniform((heads, width, made * width), bound, generator).to(projection.dtype)
    present = [tensors[names["expand"]]] if old > 1 and init != "reinit" else []
    result[names["expand"]] = torch.cat([*present, matrix], 2)
    if names["conv"] in tensors:
        taps = tensors[names["conv"]]
        fresh = uniform((heads, made * width, taps.shape[1]), _bound(taps, options), generator).to(taps.dtype)
        kept = [taps.unflatten(0, (heads, -1))] if init != "reinit" else []
        result[names["conv"]] = torch.cat([*kept, fresh], 1).flatten(0, 1)
    return result


def _projection(weight: Tensor, init: str, options: Mapping[str, Any], generator: torch.Generator) -> Tensor:
    shape = tuple(weight.shape)
    if init == "reinit":
        return uniform(shape, _bound(weight, options), generator).to(weight.dtype)
    loudness = float(options["noise"]) * float(options["noise_scale"])
    noise = uniform(shape, loudness * _size(weight, options), generator)
    return (float(options["shrink"]) * weight.float() + noise).to(weight.dtype)


def _bound(weight: Tensor, options: Mapping[str, Any]) -> float:
    return float(options["noise_scale"]) * _size(weight, options)


def _size(weight: Tensor, options: Mapping[str, Any]) -> float:
    # [outputs, inputs] or, for a depthwise convolution, [channels, width]: either way dim 1 is the fan-in.
    measured = 0.0 if options["fresh"] == USUAL else measured_bound(weight)
    # Rows of zeros say nothing about a size, and fresh channels of that size would be dead.
    return measured or usual_bound(weight.shape[1])


def _present(mixer: MixerDescription, init: str) -> int:
    """Return how many subheads the layer has: 1 without expansion; UserError when more cannot be added."""
    expansion = mixer.get("expansion")
    if expansion is None:
        return 1
    if expansion["kind"] != "headwise" or not expansion["subheads"]:
        kind = expansion["kind"] + ("" if expansion["subheads"] else " without subheads")
        raise UserError(
            f"its heads are already expanded ({kind}), and only head-wise subheads can grow; choose other layers"
        )
    if not expansion["grafted"] and init in ("preserve", "perturb"):
        raise UserError(
            f"its {expansion['factor']} subheads were trained from scratch, so none of them is the old head; "
            "use init reinit or handover, or choose other layers"
        )
    return int(expansion["factor"])


METHOD = Method(
    name="subheads",
    summary="more subheads per head",
    mixers=("gated_delta_net", "delta_net", "gla", "kda"),
    mixer_names="Gated DeltaNet, DeltaNet, GLA, KDA",
    inits=SUPPORTED,
    options=OPTIONS,
    plan=plan,
    transform=transform,
    senseless=(("inherit", "subheads that copy their head get equal gradients and would stay copies for ever"),),
)

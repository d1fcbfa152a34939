"""merge_heads: the heads of a GLA or RetNet layer share one state (StateX, section 4.1, equation 4).

H heads of widths (K, V) hold H blocks S[h] of K x V numbers. Merged, all H*K key channels write all H*V value channels:
H*H blocks S[h, h'] (keys of head h, values of group h'), a state H times as large. The layer reads

    o[h'] = sum over h of  mixing[h, h'] * q_h S[h, h']

    init       mixing                  weights                                  at step 0
    preserve   identity                kept                                     the old function exactly
    inherit    ones                    kept                                     StateX's merged head, old norm per head
    perturb    identity + small noise  q, k: shrink*old + noise; rest kept      nearly the old function
    reinit     none: one head, H*K x H*V, every projection fresh, norms 1       StateX's re-initialised block
    handover   the old block beside a `reinit` one                              the old function exactly

The parameters recorded as touched are `mixing` and whatever addresses the keys of the larger state (q, k, their
convolutions, the decay): with `preserve` they keep their values, but it is they who must learn to use the new blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from longrecall.errors import UserError
from longrecall.surgery.fresh import MEASURED, SIZES, USUAL, measured_bound, uniform, usual_bound, xavier_bound
from longrecall.surgery.handover import handover_mixer, handover_tensors
from longrecall.surgery.method import INITS, Method, MixerDescription, Option, Plan, Tensors

if TYPE_CHECKING:
    import torch
    from torch import Tensor

XAVIER_GAIN = 2.0**-2.5
"""The gain at which GLA's authors, and StateX's code, initialise the projections of a block."""

OPTIONS = (
    Option("shrink", float, 0.5, ("perturb",), "factor on the old q and k projections", least=0.0),
    Option("perturb_conv", bool, False, ("perturb",), "switch that also perturbs the convolutions of q and k"),
    Option("noise_scale", float, 1.0, ("perturb",), "factor on the random noise on q and k", above=0.0),
    Option("fresh", str, USUAL, ("perturb",), "size of that noise", choices=SIZES),
    Option("mixing_noise", float, 0.1, ("perturb",), "largest noise off the diagonal of the mixing matrix", least=0.0),
)


def plan(mixer: MixerDescription, init: str, options: Mapping[str, Any]) -> Plan:
    """Return the merged description of a `gla` or `retnet` mixer; raise UserError when there is nothing to merge."""
    heads = int(mixer["num_heads"])
    if mixer.get("expansion"):
        raise UserError("its heads are expanded, and expanded heads cannot be merged; choose other layers")
    if mixer["merged"]:
        raise UserError(f"its {heads} heads are already merged and share one state; choose other layers")
    if heads == 1:
        raise UserError("it has one head, so there is nothing to merge; choose other layers")
    if init in ("reinit", "handover"):
        one = {
            **mixer,
            "num_heads": 1,
            "key_dim": heads * int(mixer["key_dim"]),
            "value_dim": heads * int(mixer["value_dim"]),
        }
        names = _block_names(mixer)
        if init == "handover":
            return Plan(handover_mixer(mixer, one), tuple(sorted(f"mixer.new.{name}" for name in names)))
        return Plan(one, tuple(sorted([*(f"mixer.{name}" for name in names), "mixer_norm.weight"])))
    touched = sorted(f"mixer.{name}" for name in ["mixing", *_key_names(mixer)])
    return Plan({**mixer, "merged": True}, tuple(touched))


def transform(
    mixer: MixerDescription, tensors: Tensors, init: str, options: Mapping[str, Any], generator: torch.Generator
) -> Tensors:
    """Return the tensors of the merged layer; dtypes are kept, arithmetic is float32.

    `tensors` holds `mixer_norm.weight` and everything under `mixer.` with the shapes of docs/reference/tensors.md.
    """
    import torch

    heads = int(mixer["num_heads"])
    if init == "reinit":
        return _one_head(heads, tensors, generator)
    if init == "handover":
        return handover_tensors(tensors, _one_head(heads, tensors, generator))
    result = dict(tensors)
    mixing = torch.ones(heads, heads) if init == "inherit" else torch.eye(heads)
    if init == "perturb":
        noise = uniform((heads, heads), float(options["mixing_noise"]), generator)
        mixing = mixing + noise * (1.0 - torch.eye(heads))
        for name in ("q_proj.weight", "k_proj.weight", "q_conv.weight", "k_conv.weight"):
            full = f"mixer.{name}"
            if full in tensors and (options["perturb_conv"] or "conv" not in name):
                result[full] = _perturbed(tensors[full], options, generator)
    result["mixer.mixing"] = mixing.to(tensors["mixer.q_proj.weight"].dtype)
    return result


def _perturbed(weight: Tensor, options: Mapping[str, Any], generator: torch.Generator) -> Tensor:
    # weight is [outputs, inputs] or, for a depthwise convolution, [channels, width]: either way dim 1 is the fan-in.
    bound = measured_bound(weight) if options["fresh"] == MEASURED else usual_bound(weight.shape[1])
    noise = uniform(tuple(weight.shape), float(options["noise_scale"]) * bound, generator)
    return (float(options["shrink"]) * weight.float() + noise).to(weight.dtype)


def _one_head(heads: int, tensors: Tensors, generator: torch.Generator) -> Tensors:
    """Return StateX's re-initialised block: one head, every linear xavier-uniform, biases 0, norms 1."""
    import torch

    fresh: Tensors = {}
    # Sorted, so that the numbers do not depend on how the checkpoint orders or shards its tensors.
    for name, old in sorted(tensors.items()):
        shape = tuple(old.shape)
        if name.endswith("norm.weight"):
            # The per-head norm [V] becomes the norm of the one head's whole output [H*V]; the pre-norm keeps its width.
            width = shape[0] * heads if name == "mixer.o_norm.weight" else shape[0]
            value = torch.ones(width)
        elif name.endswith("_conv.weight"):
            value = uniform(shape, usual_bound(shape[1]), generator)
        elif name.endswith(".bias"):
            value = torch.zeros(shape)
        else:
            value = uniform(shape, xavier_bound(shape, XAVIER_GAIN), generator)
        fresh[name] = value.to(old.dtype)
    return fresh


def _key_names(mixer: MixerDescription) -> list[str]:
    """Return the tensors that make queries, keys and their decay, relative to the mixer."""
    names = ["q_proj.weight", "k_proj.weight"]
    if mixer["type"] == "gla":
        names += ["gk_proj.0.weight", "gk_proj.1.weight", "gk_proj.1.bias"]
    if mixer["conv_width"]:
        names += ["q_conv.weight", "k_conv.weight"]
    return names


def _block_names(mixer: MixerDescription) -> list[str]:
    """Return every tensor of an unmerged block, relative to the mixer."""
    names = [*_key_names(mixer), "v_proj.weight", "o_norm.weight", "o_proj.weight"]
    names += ["g_proj.weight"] if mixer["output_gate"] else []
    names += ["v_conv.weight"] if mixer["conv_width"] else []
    return names


METHOD = Method(
    name="merge_heads",
    summary="all heads share one state",
    mixers=("gla", "retnet"),
    mixer_names="GLA, RetNet",
    inits=INITS,
    options=OPTIONS,
    plan=plan,
    transform=transform,
)

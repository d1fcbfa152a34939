"""grow_state: more key channels for Mamba-2 (StateX, section 4.2: a larger state dimension N).

A Mamba-2 layer reads and writes its state through C and B, N channels per group, cut out of two tensors:

    in_proj  rows      [ z (I) | x (I) | B (G*N) | C (G*N) | dt (H) ]
    conv     channels  [ x (I) | B (G*N) | C (G*N) ]

B and C are group-major, so each group grows separately. Everything else (z, x, dt, D, A_log, the norm wherever it
stands, out_proj) stays. Factors of the projected parts hold for the new channels of B and C too. With N' channels the
state of a layer is N'/N times as large.

    init       old B, C          new B            new C                          at step 0
    preserve   kept              fresh            rows 0, conv bias 0, conv fresh  the old function exactly
    inherit    kept              0                0                              the old function; can never learn
    perturb    shrink*rows+noise fresh            fresh                          nearly the old function
    reinit     fresh             fresh            fresh                          forgets what it recalled (StateX)
    handover   the old layer beside a `reinit` one                               the old function exactly

perturb leaves the convolution of the old channels alone unless `perturb_conv` is set: four taps carry a whole channel,
and noise on them costs far more of the old function than noise on the rows of in_proj before them.

Why preserve learns: a C channel with zero rows and zero bias is SiLU(0) = 0 (as GELU(0) is), so the new part of the
state is written but not read. Its gradient is not zero (SiLU'(0) = 1/2, and the state it would read holds random B), so
C moves at the first step and B, which C then multiplies, from the second. With B and C both zero each waits for the
other for ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from longrecall.errors import UserError
from longrecall.surgery.fresh import MEASURED, SIZES, USUAL, measured_bound, uniform, usual_bound
from longrecall.surgery.handover import handover_mixer, handover_tensors
from longrecall.surgery.method import INITS, Method, MixerDescription, Option, Plan, Tensors

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_WITH_NOISE = ("preserve", "perturb", "handover", "reinit")

OPTIONS = (
    Option("state_dim", int, None, INITS, "new state_dim, channels per group (instead of factor)", least=2),
    Option(
        "factor",
        int,
        4,
        INITS,
        "new state_dim as a multiple of the old one",
        least=2,
        excludes="state_dim",
        flag="--factor",
        letter="E",
    ),
    Option(
        "fresh",
        str,
        MEASURED,
        _WITH_NOISE,
        "size of the new random weights: measured (like the layer's own rows) or usual (like a new layer's)",
        choices=SIZES,
        # On top of old rows, noise as loud as they are would drown them; the recorded study used a new layer's size.
        default_by_init=(("perturb", USUAL),),
    ),
    Option("noise_scale", float, 1.0, _WITH_NOISE, "factor on all new random weights", above=0.0),
    Option("shrink", float, 0.5, ("perturb",), "factor on the old B and C rows", least=0.0),
    Option("perturb_conv", bool, False, ("perturb",), "switch that also perturbs the convolution of the old B and C"),
    Option(
        "statex",
        bool,
        False,
        ("reinit", "handover"),
        "switch that also resets A_log, dt_bias and norm, as StateX's code does",
    ),
)


def plan(mixer: MixerDescription, init: str, options: Mapping[str, Any]) -> Plan:
    """Return the enlarged description of a `mamba2` mixer; raise UserError when N would not grow."""
    old = int(mixer["state_dim"])
    new = _target(old, options)
    grown = {**mixer, "state_dim": new}
    touched = ["in_proj.weight", "conv.weight"]
    touched += ["in_proj.bias"] if mixer["proj_bias"] else []
    touched += ["conv.bias"] if mixer["conv_bias"] else []
    # Descriptions leave out what is as it mostly is: a gated norm, an output bias as in_proj has one.
    norm = [] if mixer.get("gated_norm") == "none" else ["norm.weight"]
    if options.get("statex"):
        touched += ["A_log", "dt_bias", *norm]
    if init == "handover":
        everything = [*touched, "A_log", "dt_bias", *norm, "D", "out_proj.weight"]
        everything += ["out_proj.bias"] if mixer.get("out_bias", mixer["proj_bias"]) else []
        names = sorted({f"mixer.new.{name}" for name in everything})
        return Plan(handover_mixer(mixer, grown), tuple(names))
    warnings: tuple[str, ...] = ()
    if init == "inherit":
        warnings = (
            "inherit sets the new B and C channels to zero. Their gradient stays zero, so training will never use "
            "the larger state. It is kept for comparison; preserve also keeps the function, and learns",
        )
    return Plan(grown, tuple(sorted(f"mixer.{name}" for name in touched)), warnings)


def transform(
    mixer: MixerDescription, tensors: Tensors, init: str, options: Mapping[str, Any], generator: torch.Generator
) -> Tensors:
    """Return the tensors of the enlarged layer; dtypes are kept, arithmetic is float32.

    `tensors` holds `mixer_norm.weight` and everything under `mixer.` with the shapes of docs/reference/tensors.md.
    """
    if init == "handover":
        new = transform(mixer, tensors, "reinit", options, generator)
        return handover_tensors(tensors, new)
    result = dict(tensors)
    for name in ("in_proj.weight", "in_proj.bias", "conv.weight", "conv.bias"):
        full = f"mixer.{name}"
        if full in tensors:
            result[full] = _grow(name, tensors, mixer, init, options, generator)
    if options.get("statex"):
        result.update(_statex_scalars(tensors))
    return result


def _target(old: int, options: Mapping[str, Any]) -> int:
    new = int(options["state_dim"]) if "state_dim" in options else old * int(options["factor"])
    if new <= old:
        raise UserError(f"state_dim {new} is not larger than its {old}; give a larger state_dim, or a factor")
    return new


def _grow(
    name: str,
    tensors: Tensors,
    mixer: MixerDescription,
    init: str,
    options: Mapping[str, Any],
    generator: torch.Generator,
) -> Tensor:
    import torch

    tensor = tensors[f"mixer.{name}"]
    groups, old = int(mixer["groups"]), int(mixer["state_dim"])
    extra = _target(old, options) - old
    lead = int(mixer["inner_dim"]) * (2 if name.startswith("in_proj") else 1)
    tail = tensor.shape[0] - lead - 2 * groups * old
    head, keys, queries, rest = torch.split(tensor, [lead, groups * old, groups * old, tail])
    grown = []
    for part, rows in (("B", keys), ("C", queries)):
        rows = rows.reshape(groups, old, *tensor.shape[1:]).float()
        bound = _bound(name, rows, tensors, init, options)
        if init == "perturb":
            gentle = name.startswith("conv") and not options["perturb_conv"]
            shrink, loudness = (1.0, 0.0) if gentle else (float(options["shrink"]), 1.0)
            wide = _perturbed(rows, extra, shrink, loudness, bound, generator)
        else:
            wide = _fill(part, name, rows, extra, init, bound, generator)
        grown.append(wide.flatten(0, 1).to(tensor.dtype))
    return torch.cat([head, grown[0], grown[1], rest])


def _perturbed(
    rows: Tensor, extra: int, shrink: float, loudness: float, bound: float, generator: torch.Generator
) -> Tensor:
    """Return rows [G, N, ...] shrunk, with `loudness` times fresh numbers on them, and `extra` fresh channels."""
    import torch

    groups, old, *shape = rows.shape
    noise = uniform((groups, old + extra, *shape), bound, generator)
    return torch.cat([shrink * rows + loudness * noise[:, :old], noise[:, old:]], 1)


def _fill(
    part: str, name: str, rows: Tensor, extra: int, init: str, bound: float, generator: torch.Generator
) -> Tensor:
    """Return rows [G, N, ...] with `extra` channels more per group, filled as the table of this module says."""
    import torch

    groups, old, *shape = rows.shape
    if init == "reinit":
        return uniform((groups, old + extra, *shape), bound, generator)
    silent = init == "inherit" or (part == "C" and name != "conv.weight")
    added = rows.new_zeros(groups, extra, *shape) if silent else uniform((groups, extra, *shape), bound, generator)
    return torch.cat([rows, added], 1)


def _bound(name: str, rows: Tensor, tensors: Tensors, init: str, options: Mapping[str, Any]) -> float:
    if init == "inherit":
        return 0.0
    scale = float(options["noise_scale"])
    # fan_in: hidden_size for in_proj (weight [rows, d]), the width for the convolution (weight [channels, W]).
    fan_in = tensors[f"mixer.{name.split('.')[0]}.weight"].shape[1]
    if options["fresh"] == USUAL:
        return scale * usual_bound(fan_in)
    bound = measured_bound(rows)
    # A bias of zeros is a choice of the checkpoint and stays; a weight of zeros would make fresh channels dead.
    return scale * (bound if bound > 0.0 or name.endswith("bias") else usual_bound(fan_in))


def _statex_scalars(tensors: Tensors) -> Tensors:
    """Return what StateX's published code resets beside B and C: A_log = log(1..H), dt_bias = 1, gated norm = 1."""
    import torch

    a_log = tensors["mixer.A_log"]
    ones = [name for name in ("mixer.dt_bias", "mixer.norm.weight") if name in tensors]
    return {
        "mixer.A_log": torch.arange(1, a_log.numel() + 1, dtype=torch.float32).log().to(a_log.dtype),
        **{name: torch.ones_like(tensors[name]) for name in ones},
    }


METHOD = Method(
    name="grow_state",
    summary="a larger state_dim",
    mixers=("mamba2",),
    mixer_names="Mamba-2",
    inits=INITS,
    options=OPTIONS,
    plan=plan,
    transform=transform,
)

"""The methods of surgery by name. A new method joins with one `register` line at the end of this file."""

from __future__ import annotations

from longrecall.errors import UserError, did_you_mean
from longrecall.surgery.method import ANY_MIXER, INITS, Method, MixerDescription
from longrecall.surgery.methods import add_retrieval, grow_state, merge_heads, subheads

METHODS: dict[str, Method] = {}
"""Every method by name, in the order in which help texts list them."""


def register(method: Method) -> Method:
    """Add a method; raise ValueError (a programming error) on a taken name or flag, an unknown init, a bad option."""
    if method.name in METHODS:
        raise ValueError(f"surgery method {method.name!r} is registered twice")
    names = [option.name for option in method.options]
    if len(set(names)) != len(names):
        raise ValueError(f"surgery method {method.name!r} names an option twice: {names}")
    for owner, inits in [(method.name, method.inits), *((option.name, option.inits) for option in method.options)]:
        strangers = set(inits) - set(INITS)
        if strangers or not inits:
            raise ValueError(
                f"{owner!r} of surgery method {method.name!r} has unknown or no inits: {sorted(strangers)}"
            )
    for option in method.options:
        for init in option.inits:
            if option.default_for(init) is not None:
                option.check(option.default_for(init))
    for option in method.options:
        for other in (each for known in METHODS.values() for each in known.options):
            if option.flag and option.flag == other.flag and (option.name, option.kind) != (other.name, other.kind):
                raise ValueError(f"{option.flag} of surgery method {method.name!r} stands for another option already")
    METHODS[method.name] = method
    return method


def find_method(name: str) -> Method:
    """Return the method called `name`; raise UserError with the nearest name when there is none."""
    if name not in METHODS:
        known = " or ".join(f"{method.name} ({method.summary}: {method.fitting})" for method in METHODS.values())
        raise UserError(f'method "{name}" is unknown; use {known}.{did_you_mean(name, METHODS)}')
    return METHODS[name]


def check_mixer(method: Method, layer: int, mixer: MixerDescription) -> None:
    """Raise UserError, naming the layer, its mixer and what fits it, when `method` does not."""
    kind = str(mixer.get("type"))
    if kind == "handover":
        raise UserError(f"layer {layer} is in the middle of a handover; finish its training before new surgery")
    if method.fits(kind):
        return
    # Those made for this mixer before those that fit any.
    methods = sorted(METHODS.values(), key=lambda each: each.mixers == ANY_MIXER)
    others = [each.name for each in methods if each.fits(kind)]
    advice = f"for {kind} use {' or '.join(others)}" if others else f"no method fits {kind}"
    raise UserError(
        f"layer {layer} is {kind}, but {method.name} fits {', '.join(method.mixers)}; {advice}, or choose other layers"
    )


register(merge_heads.METHOD)
register(grow_state.METHOD)
register(subheads.METHOD)
register(add_retrieval.METHOD)

"""Every mixer type by name. A new family is one file and one line here."""

from __future__ import annotations

from typing import Any

from longrecall.errors import UserError, did_you_mean
from longrecall.layers.handover import HandoverConfig
from longrecall.layers.mixers.attention import AttentionConfig
from longrecall.layers.mixers.base import MixerConfig
from longrecall.layers.mixers.base_conv import BaseConvConfig
from longrecall.layers.mixers.delta_net import DeltaNetConfig, GatedDeltaNetConfig
from longrecall.layers.mixers.gla import GLAConfig
from longrecall.layers.mixers.h3 import H3Config
from longrecall.layers.mixers.hgrn2 import HGRN2Config
from longrecall.layers.mixers.hyena import HyenaConfig
from longrecall.layers.mixers.hymba import HymbaConfig
from longrecall.layers.mixers.kda import KDAConfig
from longrecall.layers.mixers.mamba import MambaConfig
from longrecall.layers.mixers.mamba2 import Mamba2Config
from longrecall.layers.mixers.mom import MoMConfig
from longrecall.layers.mixers.retnet import RetNetConfig
from longrecall.layers.mixers.rwkv import RWKV5Config, RWKV6Config
from longrecall.layers.mixers.rwkv7 import RWKV7Config
from longrecall.layers.retrieval.config import RetrievalConfig

MIXERS: dict[str, type[MixerConfig]] = {
    config.type: config
    for config in (
        GLAConfig,
        RetNetConfig,
        DeltaNetConfig,
        GatedDeltaNetConfig,
        Mamba2Config,
        MambaConfig,
        RWKV5Config,
        RWKV6Config,
        HGRN2Config,
        KDAConfig,
        RWKV7Config,
        MoMConfig,
        BaseConvConfig,
        H3Config,
        HyenaConfig,
        AttentionConfig,
        HymbaConfig,
        HandoverConfig,
        RetrievalConfig,
    )
}


def mixer_config(description: dict[str, Any]) -> MixerConfig:
    """The checked config of a plain description; raises UserError on an unknown type, key or value."""
    if not isinstance(description, dict) or "type" not in description:
        raise UserError(f'a mixer is a mapping with a "type" (one of {", ".join(MIXERS)}), got {description!r}')
    kind = description["type"]
    if kind not in MIXERS:
        raise UserError(f'unknown mixer type "{kind}"; there are {", ".join(MIXERS)}.{did_you_mean(str(kind), MIXERS)}')
    config = MIXERS[kind]
    inner = {key: mixer_config(description[key]) for key in config.nested if key in description}
    return config.from_dict(description | inner)

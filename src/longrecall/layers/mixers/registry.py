"""Every mixer type by name. A new family is one file and one line here."""

from __future__ import annotations

from typing import Any

from longrecall.errors import UserError, did_you_mean
from longrecall.layers.descriptions.attention import AttentionConfig
from longrecall.layers.descriptions.base import MixerConfig
from longrecall.layers.descriptions.base_conv import BaseConvConfig
from longrecall.layers.descriptions.delta_net import DeltaNetConfig, GatedDeltaNetConfig
from longrecall.layers.descriptions.gated_delta_product import GatedDeltaProductConfig
from longrecall.layers.descriptions.gla import GLAConfig
from longrecall.layers.descriptions.h3 import H3Config
from longrecall.layers.descriptions.handover import HandoverConfig
from longrecall.layers.descriptions.hgrn2 import HGRN2Config
from longrecall.layers.descriptions.hyena import HyenaConfig
from longrecall.layers.descriptions.hymba import HymbaConfig
from longrecall.layers.descriptions.identity import IdentityConfig
from longrecall.layers.descriptions.kda import KDAConfig
from longrecall.layers.descriptions.mamba import MambaConfig
from longrecall.layers.descriptions.mamba2 import Mamba2Config
from longrecall.layers.descriptions.mla import MLAConfig
from longrecall.layers.descriptions.mlp import MLPConfig
from longrecall.layers.descriptions.moe import MoEConfig
from longrecall.layers.descriptions.mom import MoMConfig
from longrecall.layers.descriptions.parallel import ParallelConfig
from longrecall.layers.descriptions.retnet import RetNetConfig
from longrecall.layers.descriptions.retrieval import RetrievalConfig
from longrecall.layers.descriptions.rg_lru import RGLRUConfig
from longrecall.layers.descriptions.rwkv import RWKV5Config, RWKV6Config
from longrecall.layers.descriptions.rwkv4 import (
    RWKV4ChannelConfig,
    RWKV4Config,
    RWKV6ChannelConfig,
    RWKV7ChannelConfig,
)
from longrecall.layers.descriptions.rwkv7 import RWKV7Config
from longrecall.layers.descriptions.shared_block import SharedBlockConfig

MIXERS: dict[str, type[MixerConfig]] = {
    config.type: config
    for config in (
        GLAConfig,
        RetNetConfig,
        DeltaNetConfig,
        GatedDeltaNetConfig,
        GatedDeltaProductConfig,
        Mamba2Config,
        MambaConfig,
        RWKV5Config,
        RWKV6Config,
        HGRN2Config,
        KDAConfig,
        RWKV7Config,
        RWKV4Config,
        RWKV4ChannelConfig,
        RWKV6ChannelConfig,
        RWKV7ChannelConfig,
        RGLRUConfig,
        MoMConfig,
        BaseConvConfig,
        H3Config,
        HyenaConfig,
        AttentionConfig,
        MLAConfig,
        HymbaConfig,
        ParallelConfig,
        SharedBlockConfig,
        HandoverConfig,
        RetrievalConfig,
        MLPConfig,
        MoEConfig,
        IdentityConfig,
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

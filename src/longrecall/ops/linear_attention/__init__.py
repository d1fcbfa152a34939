"""Gated linear attention: GLA, RetNet, Mamba-2, merged heads, RWKV-5 and RWKV-6."""

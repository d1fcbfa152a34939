"""Retrieval inside a layer: its description, the module, its weights, its fused paths and its decoding step."""

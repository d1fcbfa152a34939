"""Norms, gated norms and gated products between a layer's large products."""

"""The gated delta rule: DeltaNet, Gated DeltaNet, Kimi Delta Attention, RWKV-7, and layers with subheads."""

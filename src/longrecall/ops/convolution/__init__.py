"""Causal convolutions: short ones with a state, long ones, and the diagonal state space of S4D."""

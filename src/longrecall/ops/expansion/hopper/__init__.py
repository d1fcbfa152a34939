"""Kernels in Gluon for Hopper GPUs, imported when one is first used."""

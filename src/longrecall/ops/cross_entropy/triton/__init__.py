"""Triton kernels, imported when one is first used."""

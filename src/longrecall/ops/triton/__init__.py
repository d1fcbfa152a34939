"""Triton kernels. Importing this package imports none of them: backend.py does, when one is used."""

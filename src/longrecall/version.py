"""The version of this package, for whatever is written into files."""

__version__ = "0.1.0"
"""As ``longrecall --version`` prints it.

>>> __version__.count(".")
2
"""

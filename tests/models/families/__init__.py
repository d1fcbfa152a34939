"""Tiny random models of other libraries' own classes: what every format is checked against.

A family is a file here with a list `CASES` and a line in `ALL`. The checks that all have to pass are in
tests/models/test_families.py.
"""

"""fla's models, whose classes do not run on a CPU, written out token by token in float64.

A family is a file here with a list `CASES`; tests/models/test_families_naive.py has the checks that all have to pass.
"""

"""Grids of small models trained on synthetic tasks, many at once on one GPU (`longrecall sweep`)."""

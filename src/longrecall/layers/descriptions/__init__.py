"""Descriptions of token mixers: plain data, without torch."""

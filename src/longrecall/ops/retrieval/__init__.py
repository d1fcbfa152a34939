"""The choice of chunks, and attention to their tokens."""

"""One token of every sequence: the kernels of a decoding step."""

"""Head-wise expansion of queries and keys, with short convolution, SiLU and norm."""

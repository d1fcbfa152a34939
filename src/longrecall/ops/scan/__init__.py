"""The selective scan of Mamba-1."""

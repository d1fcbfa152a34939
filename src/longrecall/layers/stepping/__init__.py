"""One token of every sequence through a layer: its residual stream, and what the step of a mixer offers."""

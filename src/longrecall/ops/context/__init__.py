"""What the ranks of a context group tell each other (context parallelism); `longrecall.context` is its public side."""

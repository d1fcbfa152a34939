"""What kernels of all families share: launches, early launches, Gluon, sums."""

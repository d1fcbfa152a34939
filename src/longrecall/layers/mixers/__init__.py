"""Token mixers: one file per family, each turning x into (q, k, v, decay, beta) and calling one recurrence."""

"""Where documents come from: one file a kind, each a `Corpus` of numbered chunks that can be read from any place."""

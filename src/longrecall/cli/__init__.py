"""The command line: one file per verb, each light to import; heavy imports happen inside a verb's `run`."""

"""One run, one directory: its records, its history and its checkpoints."""

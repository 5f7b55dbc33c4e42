"""Training tasks, a file or a folder each."""

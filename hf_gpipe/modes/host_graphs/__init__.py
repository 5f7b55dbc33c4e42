"""Graphs that wait on the host: `recompute: host` copies what a graph saves to CPU memory, and back before its
backward (PipeOffload, arXiv 2503.01328)."""

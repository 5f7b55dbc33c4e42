"""What the benchmarks share: fresh processes, a quiet machine, memory, tables."""

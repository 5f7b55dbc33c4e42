"""Shared parts of the benchmarks: fresh processes, a quiet machine, memory, tables."""

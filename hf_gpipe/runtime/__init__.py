"""Runs a schedule: micro-batches, stages, the tensors that cross them, replicas, and the executor."""

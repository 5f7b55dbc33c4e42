"""The layers of a stage divided among the ranks of a worker: tensor parallelism on plain local tensors."""

"""Tensors of which several processes have parts: the parts, and the sums over the processes."""

"""The structure and the shapes of a model, observed on a tiny clone or on tensors without values."""

"""The costs of a model's layers: traced without weights, or measured."""

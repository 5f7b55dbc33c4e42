"""Weights that are in CPU memory and visit their devices, in tables with L and D, and stages that are shared."""

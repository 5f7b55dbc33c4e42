"""Weights that are in CPU memory and visit their devices (`hf_gpipe.runtime.visits`), in tables with L and D."""

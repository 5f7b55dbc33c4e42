"""Predicts whether a training fits and how fast it is, and chooses what a configuration leaves open."""

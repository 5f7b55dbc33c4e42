"""Predicts whether a training fits and how fast it is: costs of layers, memory and time of a plan, and its choice."""

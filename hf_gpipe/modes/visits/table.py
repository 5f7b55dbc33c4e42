"""Weights that visit in tables: the schedule that deals its stages."""

from hf_gpipe.modes.visits import round_robin as round_robin

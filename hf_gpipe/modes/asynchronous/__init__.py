"""Asynchronous schedules at run time: each stage updates by itself, and an action reads the version of the weights that
the table says (`hf_gpipe.modes.asynchronous.table`)."""

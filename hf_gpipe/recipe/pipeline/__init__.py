"""The section `pipeline`. `PipelineConfig` (config.py) has a field for each key, and for each mode, whose class has
the mode's keys and says what it does not go with (mode.py)."""

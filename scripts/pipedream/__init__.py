"""PipeDream's partitioner and the models of its evaluation: the parts of scripts/pipedream_table.py."""

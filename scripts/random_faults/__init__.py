"""Parts of `scripts/chaos.py --minutes`: how runs are started, what is done to them, one case, and the table of all."""

"""Parts of `scripts/fuzz_files.py`: how files are damaged, who reads them, and the process that watches the reading."""

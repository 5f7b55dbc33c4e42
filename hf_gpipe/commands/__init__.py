"""The commands, a module each: `hf-gpipe NAME`, or `python -m hf_gpipe NAME`."""

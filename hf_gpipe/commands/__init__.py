"""The commands, a module each: `hf-gpipe NAME`."""

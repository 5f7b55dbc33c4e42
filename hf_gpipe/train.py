"""The command `hf-gpipe train` as a module, which torchrun and other launchers start."""

import sys

from hf_gpipe.commands.train import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())

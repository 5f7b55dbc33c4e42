"""python -m hf_gpipe.launch."""

import sys

from hf_gpipe.launch import main

if __name__ == "__main__":
    sys.exit(main())

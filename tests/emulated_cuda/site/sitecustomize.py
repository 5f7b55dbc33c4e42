"""Python imports this module when it starts. It loads the emulated CUDA device as soon as torch is imported."""

import os

from tests.emulated_cuda import device

if "COVERAGE_PROCESS_START" in os.environ:  # tests/emulated_cuda/covered.py
    import coverage

    coverage.process_startup()
device.load_with_torch()

"""Python imports this module when it starts. It loads the emulated CUDA device as soon as torch is imported."""

from tests.emulated_cuda import device

device.load_with_torch()

"""Checks hf_gpipe on real GPUs: `bash scripts/gpu_check.sh`. docs/gpu.md says how to read the result."""

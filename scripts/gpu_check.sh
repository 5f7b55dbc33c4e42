#!/usr/bin/env bash
# Checks hf_gpipe on the GPUs of this machine: exactness, faults, waiting, speed. Prints a table and writes gpu_check.json.
#     bash scripts/gpu_check.sh [--quick] [--profile FOLDER]     on the GPUs
#     bash scripts/gpu_check.sh --one-gpu [--nccl FILE]          two processes on one GPU, over NCCL 2.30 or newer
#     bash scripts/gpu_check.sh --half-hour --minutes 9          all of them and more, in calls of nine minutes
#     bash scripts/gpu_check.sh --emulated                       without a GPU, on emulated devices; no figures of speed
# The checks are the tests in tests/gpu, whose conftest.py has the options; those of pytest are taken too.
set -euo pipefail

# The active environment is taken where its torch sees CUDA: .venv may have been made with a torch without it.
if [[ -z ${HF_GPIPE_PYTHON:-} ]]; then
    active=$(command -v python || true)
    if [[ -n $active ]] && "$active" -c 'import sys, torch, transformers; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
        HF_GPIPE_PYTHON=$active
        echo "environment: the active one, whose torch sees CUDA ($active)"
    else
        echo "environment: .venv; there is no active one whose torch sees CUDA"
    fi
else
    echo "environment: that of HF_GPIPE_PYTHON ($HF_GPIPE_PYTHON)"
fi
folder=$PWD
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

export PYTHONPATH=$PWD/scripts:$PWD${PYTHONPATH:+:$PYTHONPATH}
checks=(-m pytest -m gpu tests/gpu -v --tb=line -p no:cacheprovider -o faulthandler_timeout=0 --output "$folder" "$@")
if [[ " $* " == *" --emulated "* ]]; then
    exec "$python" -m tests.emulated_cuda "${checks[@]}"
fi
exec "$python" "${checks[@]}"

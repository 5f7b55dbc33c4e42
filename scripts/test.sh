#!/usr/bin/env bash
# Style, types and tests. Arguments go to pytest; without them it runs the whole suite in four processes.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

# One thread a process: tests start several processes, and tiny models gain nothing from more.
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
# Compiled once: otherwise every process that a test starts compiles the package anew, and pytest all tests.
unset PYTHONDONTWRITEBYTECODE

"$python" -m ruff check .
"$python" -m ruff format --check .
"$python" -m mypy hf_gpipe
if (($# == 0)); then
    # Four keep two cores busy: tests wait for the processes that they start.
    set -- --numprocesses 4
fi
"$python" -m pytest "$@"

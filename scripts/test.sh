#!/usr/bin/env bash
# Style, types and tests; arguments go to pytest, which runs the whole suite without them.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

# One thread a process: tests start several processes, and tiny models gain nothing from more.
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

"$python" -m ruff check .
"$python" -m ruff format --check .
"$python" -m mypy hf_gpipe
"$python" -m pytest "$@"

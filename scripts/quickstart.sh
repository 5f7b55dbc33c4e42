#!/usr/bin/env bash
# Trains, evaluates and saves the quickstart's translation model; arguments are overrides, such as training.max_steps=100.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

"$python" -m hf_gpipe.train recipes/quickstart.yaml "$@"

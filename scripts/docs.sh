#!/usr/bin/env bash
# Builds the site of docs/ into build/site; a broken link or a missing reference is an error. Arguments go to mkdocs.
# Needs the extra "docs": pip install -e ".[docs]". HF_GPIPE_MKDOCS names another mkdocs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# mkdocs-material's banner about other projects is no part of a build.
export NO_MKDOCS_2_WARNING=1
"${HF_GPIPE_MKDOCS:-mkdocs}" build --strict "$@"

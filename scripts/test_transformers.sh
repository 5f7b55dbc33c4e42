#!/usr/bin/env bash
# The exactness tests on another version of transformers: scripts/test_transformers.sh 5.17.0 [pytest arguments]
# The environment .venv-VERSION is made once; it takes torch and all else from the usual one and has its own
# transformers. HF_GPIPE_PYTHON names the usual environment's interpreter where that is not .venv's.
set -euo pipefail
version=${1:?"usage: scripts/test_transformers.sh VERSION [pytest arguments]"}
shift
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

other=.venv-$version
if [[ ! -f $other/installed ]]; then
    "$python" -m venv --clear "$other"
    # The usual environment's packages stand behind the new one's own.
    "$python" -c 'import site; print("\n".join(site.getsitepackages()))' \
        >"$("$other/bin/python" -c 'import site; print(site.getsitepackages()[0])')/usual.pth"
    "$other/bin/python" -m pip install --quiet "transformers==$version"
    touch "$other/installed"
fi

export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
"$other/bin/python" -c "import transformers; assert transformers.__version__ == '$version', transformers.__version__"
if (($# == 0)); then
    set -- tests/adapters tests/test_pipeline.py tests/checkpoint tests/runtime/test_generation.py
fi
"$other/bin/python" -m pytest -q "$@"

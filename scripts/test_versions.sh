#!/usr/bin/env bash
# The whole suite on other versions of the libraries, by default on the newest of torch and transformers:
#
#     bash scripts/test_versions.sh                                          the newest of both
#     bash scripts/test_versions.sh torch==2.11.* transformers==5.17.*       these
#     bash scripts/test_versions.sh transformers==5.20.2 tests/adapters -x   these tests alone
#
# Arguments with == are versions for pip, and the others go to pytest. The environment .venv-VERSIONS is made once, beside
# the usual one; it has all of the suite's packages in versions that go with these. HF_GPIPE_PYTHON names an interpreter
# that has the versions already. A version that passes goes into VERIFIED of hf_gpipe/libraries/verified.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

packages=()
while (($# > 0)) && [[ $1 == *==* ]]; do
    packages+=("$1")
    shift
done
if [[ -z ${HF_GPIPE_PYTHON:-} ]]; then
    name=${packages[*]:-newest}
    other=.venv-${name//[^a-z0-9.]/-}
    if [[ ! -f $other/installed ]]; then
        "${PYTHON:-python3}" -m venv --clear "$other"
        ((${#packages[@]} > 0)) || packages=(torch transformers)
        "$other/bin/python" -m pip install --upgrade "${packages[@]}"
        # The versions stay as they are.
        "$other/bin/python" -m pip freeze | grep -E '^(torch|transformers)==' >"$other/versions"
        "$other/bin/python" -m pip install -e ".[test]" -c "$other/versions"
        touch "$other/installed"
    fi
    export HF_GPIPE_PYTHON=$PWD/$other/bin/python
fi
"$HF_GPIPE_PYTHON" -c 'import torch, transformers; print("torch", torch.__version__, "transformers", transformers.__version__)'

# One thread a process: tests start several processes, and tiny models gain nothing from more.
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
if (($# == 0)); then
    set -- --numprocesses 4
fi
"$HF_GPIPE_PYTHON" -m pytest -q "$@"

# Sourced by the scripts beside it. Goes to the repository's root and sets `python` to an interpreter that has hf_gpipe
# and the tools of its tests: that of .venv, created when it is not there, or the one that HF_GPIPE_PYTHON names
# (a command or an absolute path), which is taken as it is.

cd "$(dirname "${BASH_SOURCE[0]}")/.."

# The first interpreter that is new enough. 3.11 comes first: constraints.txt was made with it.
find_python() {
    local candidate
    for candidate in python3.11 python3.12 python3 python; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            command -v "$candidate"
            return
        fi
    done
    echo "hf_gpipe needs Python 3.11 or newer, and none of python3.11, python3.12, python3 and python is one." >&2
    echo "Install it, or name an interpreter that has hf_gpipe installed in HF_GPIPE_PYTHON." >&2
    return 1
}

# What .venv was installed from: a change of these files, or a moved repository, installs again.
fingerprint() {
    { pwd -P && cat pyproject.toml constraints.txt; } | cksum
}

install_environment() {
    echo "Installing hf_gpipe into $PWD/.venv; this happens once and takes some minutes."
    rm -f "$stamp"
    if ! "$python" -m pip --version >/dev/null 2>&1; then
        local base
        base=$(find_python)
        if ! "$base" -m venv --clear .venv; then
            echo "$base could not create .venv; its venv module may be a package of its own (python3-venv)." >&2
            return 1
        fi
    fi
    "$python" -m pip install -e ".[test]" -c constraints.txt
    fingerprint >"$stamp"
}

if [[ -n ${HF_GPIPE_PYTHON:-} ]]; then
    python=$HF_GPIPE_PYTHON
else
    stamp=.venv/installed
    python=.venv/bin/python
    if [[ ! -x $python || ! -f $stamp || $(<"$stamp") != "$(fingerprint)" ]]; then
        install_environment
    fi
fi

"""The versions of the libraries on which the whole test suite passed; on others tiny clones are compared before use.

On a version that is not listed every model is compared in stages with the plain model: its steps
(`pipeline/exactness.py`), its files (`model/verified_files.py`) and, before the first `generate`, its generation
(`pipeline/generated.py`). What is compared on every version, since it depends on the model, is compared on these too.
`bash scripts/test_versions.sh` runs the suite on another version.
"""

from __future__ import annotations

from importlib.metadata import version

#: The minor versions that passed, by the package's name.
VERIFIED = {"torch": ("2.11", "2.13", "2.15"), "transformers": ("5.17", "5.23", "5.24")}


def unverified() -> tuple[str, ...]:
    """The installed packages of `VERIFIED` in a version that is not listed, such as "transformers 5.25.0"."""
    installed = {name: version(name) for name in VERIFIED}
    return tuple(
        f"{name} {found}" for name, found in installed.items() if ".".join(found.split(".")[:2]) not in VERIFIED[name]
    )


def install_advice() -> str:
    """The end of an error: which versions are installed that were not verified, and which to install; "" if none."""
    if not (found := unverified()):
        return ""
    newest = " ".join(f'"{name}=={versions[-1]}.*"' for name, versions in VERIFIED.items())
    return f"; hf_gpipe was not tested with {' and '.join(found)}: pip install {newest}"

"""Where catalogues come from: Debian packages, which apt-get downloads."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from hf_gpipe.errors import DataError

_CATALOGUE = re.compile(r"(?:^|/)([^/]+)/LC_MESSAGES/([^/]+)\.mo$")
_COPYRIGHT = re.compile(r"(?:^|/)usr/share/doc/([^/]+)/copyright$")


class Found(NamedTuple):
    """A file of a package: a catalogue, or the package's copyright file.

    Attributes:
        package: its name.
        name: of the catalogue, as vlc or gimp20.
        code: the language by the file's place, in gettext's form; None: it is the copyright file.
        content: of the file.
    """

    package: str
    name: str
    code: str | None
    content: bytes


def files_of_deb(path: Path) -> Iterator[Found]:
    """The catalogues and the copyright file of a Debian package. Raises DataError if it cannot be read."""
    if shutil.which("dpkg-deb") is None:
        raise DataError(f"{path}: dpkg-deb, which reads Debian packages, is not installed; install dpkg")
    package = path.name.partition("_")[0].removesuffix(".deb")
    command = ["dpkg-deb", "--fsys-tarfile", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            with tarfile.open(fileobj=process.stdout, mode="r|") as archive:
                for member in archive:
                    notice, catalogue = _COPYRIGHT.search(member.name), _CATALOGUE.search(member.name)
                    file = archive.extractfile(member) if member.isfile() and (notice or catalogue) else None
                    if file is not None and notice:
                        yield Found(notice[1], "copyright", None, file.read())
                    elif file is not None and catalogue:
                        yield Found(package, catalogue[2], catalogue[1], file.read())
        except tarfile.TarError as error:
            reason = process.stderr.read().decode(errors="replace").strip() or str(error)
            raise DataError(f"{path} cannot be read as a Debian package: {reason}; download it again") from error


def downloaded(names: Sequence[str], folder: Path) -> list[Path]:
    """The files of Debian packages, downloaded into a folder unless they are there; of several versions the last name.

    Raises:
        DataError: a package that does not exist, or cannot be downloaded.
    """
    folder.mkdir(parents=True, exist_ok=True)
    missing = [name for name in names if not [*folder.glob(f"{name}_*.deb")]]
    if missing:
        print(f"downloading {', '.join(missing)}", file=sys.stderr)
        if shutil.which("apt-get") is None:
            raise DataError(
                f"apt-get is not installed, so it cannot download packages; put {', '.join(missing)} into {folder}"
            )
        done = subprocess.run(["apt-get", "download", *missing], cwd=folder, capture_output=True, text=True)
        if done.returncode:
            reason = " ".join(line for line in done.stderr.splitlines() if line.startswith("E:")) or done.stderr.strip()
            raise DataError(
                f"apt-get download {' '.join(missing)}: {reason} Run apt-get update, or correct the names in --packages"
            )
    return [max(folder.glob(f"{name}_*.deb")) for name in names]

"""Where catalogues come from: Debian packages, directories, and the programs installed on this machine."""

from __future__ import annotations

import hashlib
import lzma
import re
import shutil
import subprocess
import sys
import tarfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hf_gpipe.errors import DataError

SYSTEM_DIRECTORY = Path("/usr/share/locale")
SUFFIXES = (".mo", ".po")
_IN_LOCALE = re.compile(r"(?:^|/)([^/]+)/LC_MESSAGES/([^/]+)\.[mp]o$")
_COPYRIGHT = re.compile(r"(?:^|/)usr/share/doc/([^/]+)/copyright$")


class Found(NamedTuple):
    """A file of a package: a catalogue, or the package's copyright file.

    Attributes:
        package: its name; of a directory that is no package, the directory's.
        name: of the catalogue, as vlc or gimp20; "copyright" for the copyright file.
        code: the language by the file's place, in gettext's form; None: its place does not tell.
        suffix: ".mo", ".po", or "" for the copyright file.
        content: of the file.
    """

    package: str
    name: str
    code: str | None
    suffix: str
    content: bytes


def files_of_deb(path: Path) -> Iterator[Found]:
    """The catalogues and the copyright file of a Debian package. Raises DataError if it cannot be read."""
    if shutil.which("dpkg-deb") is None:
        raise DataError(
            f"{path}: dpkg-deb, which reads Debian packages, is not installed; install dpkg, or unpack the packages "
            "elsewhere and give their directory by --from"
        )
    package = path.name.partition("_")[0].removesuffix(".deb")
    command = ["dpkg-deb", "--fsys-tarfile", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            with tarfile.open(fileobj=process.stdout, mode="r|") as archive:
                for member in archive:
                    file = archive.extractfile(member) if member.isfile() and _is_wanted(member.name) else None
                    if file is not None:
                        yield _found(package, member.name, file.read())
        except tarfile.TarError as error:
            reason = process.stderr.read().decode(errors="replace").strip() or str(error)
            raise DataError(f"{path} cannot be read as a Debian package: {reason}; download it again") from error


def files_of_directory(directory: Path) -> Iterator[Found]:
    """The catalogues below a directory, with those of the packages (*.deb) in it, in the order of their paths.

    A directory into which a package was unpacked has its copyright file in usr/share/doc/PACKAGE.
    Raises DataError if there is no such directory.
    """
    if not directory.is_dir():
        raise DataError(f"--from: there is no directory {directory} (looked in {Path.cwd()}); correct the path")
    for path in sorted(directory.rglob("*")):
        if path.suffix == ".deb" and path.is_file():
            yield from files_of_deb(path)
        elif _is_wanted(str(path)) and path.is_file():
            relative = path.relative_to(directory)
            # Of several unpacked packages side by side, each has a directory of its own.
            is_below = len(relative.parts) > 1 and relative.parts[0] not in ("usr", "po") and "usr" in relative.parts
            package = relative.parts[0].partition("_")[0] if is_below else directory.resolve().name
            yield _found(package, str(path), path.read_bytes())


def files_of_system(directory: Path = SYSTEM_DIRECTORY) -> Iterator[Found]:
    """The catalogues of installed programs, with the packages that they belong to as far as dpkg knows them."""
    paths = sorted(directory.glob("*/LC_MESSAGES/*.mo"))
    if not paths:
        raise DataError(f"--system: {directory} has no catalogues; give packages by --packages instead")
    owners = _owners(directory)
    for package in sorted({owners[str(path)] for path in paths if str(path) in owners}):
        notice = Path("/usr/share/doc") / package / "copyright"
        if notice.is_file():
            yield Found(package, "copyright", None, "", notice.read_bytes())
    for path in paths:
        yield _found(owners.get(str(path), path.stem), str(path), path.read_bytes())


def _owners(directory: Path) -> Mapping[str, str]:
    """The installed package of each catalogue, by path."""
    if shutil.which("dpkg-query") is None:
        return {}
    command = ["dpkg-query", "--search", f"{directory}/*/LC_MESSAGES/*.mo"]
    lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    # "libc-bin:amd64, locales: /usr/share/locale/..."
    split = [line.split(": ", 1) for line in lines if ": " in line]
    return {path: packages.split(",")[0].partition(":")[0] for packages, path in split}


def _is_wanted(path: str) -> bool:
    return path.endswith(SUFFIXES) or _COPYRIGHT.search(path) is not None


def _found(package: str, path: str, content: bytes) -> Found:
    if notice := _COPYRIGHT.search(path):
        return Found(notice[1], "copyright", None, "", content)
    suffix = path[-3:]
    if match := _IN_LOCALE.search(path):
        return Found(package, match[2], match[1], suffix, content)
    # Sources have po/de.po, or de/program.po.
    return Found(package, package, Path(path).stem, suffix, content)


# ---- packages


def downloaded(names: Sequence[str], folder: Path, mirror: str | None, suite: str) -> list[Path]:
    """The files of Debian packages, downloaded into a folder unless they are there.

    Args:
        names: of the packages.
        folder: is made if it is missing.
        mirror: address of a Debian archive, with `dists` and `pool` below it; None: `apt-get download` gets them.
        suite: of the archive, such as stable.

    Raises:
        DataError: a package that does not exist, or cannot be downloaded.
    """
    folder.mkdir(parents=True, exist_ok=True)
    missing = [name for name in names if _of_package(folder, name) is None]
    if missing:
        print(f"downloading {', '.join(missing)}", file=sys.stderr)
        if mirror is None:
            _apt_get(missing, folder)
        else:
            _from_mirror(missing, folder, mirror.rstrip("/"), suite)
    paths = [_of_package(folder, name) for name in names]
    return [path for path in paths if path is not None]


def _of_package(folder: Path, name: str) -> Path | None:
    """The file of a package; of several versions the one with the last name."""
    return max(folder.glob(f"{name}_*.deb"), default=None)


def _apt_get(names: Sequence[str], folder: Path) -> None:
    if shutil.which("apt-get") is None:
        raise DataError(
            "apt-get is not installed, so it cannot download packages; give the address of a Debian archive by "
            "--mirror, or a directory of packages or catalogues by --from"
        )
    done = subprocess.run(["apt-get", "download", *names], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        reason = " ".join(line for line in done.stderr.splitlines() if line.startswith("E:")) or done.stderr.strip()
        raise DataError(
            f"apt-get download {' '.join(names)}: {reason} Run apt-get update, or correct the names in --packages"
        )


def _from_mirror(names: Sequence[str], folder: Path, mirror: str, suite: str) -> None:
    index = lzma.decompress(_fetched(f"{mirror}/dists/{suite}/main/binary-amd64/Packages.xz")).decode()
    stanzas = {
        fields["Package"]: fields
        for stanza in index.split("\n\n")
        if (fields := dict(re.findall(r"^(Package|Filename|SHA256): (.*)$", stanza, re.MULTILINE)))
    }
    for name in names:
        if name not in stanzas:
            raise DataError(f"--packages: {mirror} has no package {name} in {suite}; correct the name, or give --suite")
        content = _fetched(f"{mirror}/{stanzas[name]['Filename']}")
        if hashlib.sha256(content).hexdigest() != stanzas[name]["SHA256"]:
            raise DataError(f"{name}: what {mirror} sent is damaged, for its SHA-256 is another; try again")
        (folder / stanzas[name]["Filename"].rpartition("/")[2]).write_bytes(content)


def _fetched(address: str) -> bytes:
    try:
        with urllib.request.urlopen(address) as response:
            return bytes(response.read())
    except (urllib.error.URLError, ValueError, OSError) as error:
        raise DataError(f"--mirror: {address} cannot be read ({error}); correct the address or --suite") from error

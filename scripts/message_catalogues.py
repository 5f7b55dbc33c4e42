"""Builds a corpus of English and many languages from message catalogues: messages of free programs, translated.

    python scripts/message_catalogues.py --output data/l10n.jsonl.gz

It reads Debian packages, and downloads those that are not there by `apt-get download`.

Left out are plural forms, missing and identical translations, placeholders, names of files and options, texts
of unusual length or with few letters, and translations with other numbers. Markup and the marks of menu keys are
removed. Of pairs with the same language and English text the first is kept.

It writes
    OUTPUT               one JSON object a line: src_lang ("en"), tgt_lang, src (English), tgt, page (package/catalogue)
                         Lines are in an order that looks random but is always the same, so that the first pairs of a
                         language are a sample of all of them.
    OUTPUT's .json       how many pairs each language and each package has, what was left out and why, and the
                         licences that each package's copyright file names
    OUTPUT's .licences/  the copyright file of each package

The texts have the licences of their programs. docs/data.md has more.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from catalogues.languages import language_of
from catalogues.messages import CatalogueError, pair_of, read_catalogue
from catalogues.sources import Found, downloaded, files_of_deb

from hf_gpipe.commands.base import Parser, run_command
from hf_gpipe.errors import DataError, UserError

PACKAGES = ("vlc-l10n", "krita-l10n", "gimp-data", "kstars-data", "gcc-12-locales", "evolution-common")
SUFFIX = ".jsonl.gz"

_LICENCE = re.compile(r"^License:[ \t]*(\S.*?)[ \t]*$", re.MULTILINE)
_COMMON_LICENCE = re.compile(r"/usr/share/common-licenses/([A-Za-z][\w.-]*\w)")


@dataclass
class Gathered:
    """All pairs of all catalogues: (language, English) -> (translation, package/catalogue).

    Attributes:
        dropped: how many messages were left out, by reason.
        num_catalogues: of each package, those that were read.
        notices: the copyright file of each package.
        bad: catalogues that could not be read, with the reason.
    """

    pairs: dict[tuple[str, str], tuple[str, str]] = field(default_factory=dict)
    dropped: Counter[str] = field(default_factory=Counter)
    num_catalogues: Counter[str] = field(default_factory=Counter)
    notices: dict[str, str] = field(default_factory=dict)
    bad: dict[str, str] = field(default_factory=dict)

    def add(self, file: Found) -> None:
        """Add the pairs of one file."""
        if file.code is None:
            self.notices[file.package] = file.content.decode("utf-8", "replace")
            return
        page = f"{file.package}/{file.name}"
        try:
            messages = read_catalogue(file.content)
        except CatalogueError as error:
            self.bad[f"{page} ({file.code})"] = str(error)
            return
        language = language_of(file.code)
        if language is None:
            self.dropped["English, regional variant or unknown language"] += len(messages)
            return
        self.num_catalogues[file.package] += 1
        for message in messages:
            pair = pair_of(message)
            if isinstance(pair, str):
                self.dropped[pair] += 1
            elif (language, pair[0]) in self.pairs:
                self.dropped["repeated"] += 1
            else:
                self.pairs[language, pair[0]] = pair[1], page

    def drop_small(self, min_pairs: int) -> None:
        """Leave out languages with fewer pairs."""
        sizes = Counter(language for language, _ in self.pairs)
        for key in [key for key in self.pairs if sizes[key[0]] < min_pairs]:
            del self.pairs[key]
            self.dropped["language with few pairs"] += 1

    def rows(self) -> Iterator[dict[str, str]]:
        """The corpus, in an order that depends on the texts alone."""
        order = sorted(self.pairs, key=lambda key: (hashlib.blake2b(key[1].encode(), digest_size=8).digest(), key))
        for language, english in order:
            translation, page = self.pairs[language, english]
            yield {"src_lang": "en", "tgt_lang": language, "src": english, "tgt": translation, "page": page}

    def summary(self) -> dict[str, Any]:
        """Numbers of all kinds, and licences."""
        sizes = Counter(language for language, _ in self.pairs)
        of_package = Counter(page.partition("/")[0] for _, page in self.pairs.values())
        return {
            "num_languages": len(sizes),
            "num_pairs": len(self.pairs),
            "num_english": len({english for _, english in self.pairs}),
            "pairs": _most_first(sizes),
            "packages": {
                package: {"catalogues": count, "pairs": of_package[package]}
                | {"licences": licences_of(self.notices.get(package, ""))}
                for package, count in sorted(self.num_catalogues.items())
            },
            "left_out": _most_first(self.dropped),
            "unreadable": dict(sorted(self.bad.items())),
        }


def _most_first(counts: Counter[str]) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda entry: (-entry[1], entry[0])))


def licences_of(notice: str) -> list[str]:
    """The licences that a copyright file names: in its fields "License:", or else as common licences of Debian."""
    return sorted(set(_LICENCE.findall(notice)) or set(_COMMON_LICENCE.findall(notice)))


def write(gathered: Gathered, output: Path) -> dict[str, Any]:
    """Write the corpus, its summary and the copyright files; returns the summary."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=0) as lines:
        for row in gathered.rows():
            lines.write((json.dumps(row, ensure_ascii=False) + "\n").encode())
    summary = gathered.summary()
    _beside(output, ".json").write_text(json.dumps(summary, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    notices = _beside(output, ".licences")
    notices.mkdir(exist_ok=True)
    for package in summary["packages"]:
        if package in gathered.notices:
            (notices / package).write_text(gathered.notices[package], encoding="utf-8")
    return summary


def _beside(output: Path, suffix: str) -> Path:
    return output.with_name(output.name.removesuffix(SUFFIX) + suffix)


def build(files: Iterable[Found], output: Path, min_pairs: int) -> dict[str, Any]:
    """Build the corpus from files of catalogues; returns its summary. Raises DataError if there is no pair."""
    gathered = Gathered()
    for file in files:
        gathered.add(file)
    gathered.drop_small(min_pairs)
    if not gathered.pairs:
        read = sum(gathered.num_catalogues.values())
        raise DataError(
            f"there is no pair in {read} catalogues that were read and {len(gathered.bad)} that could not be; give "
            "other packages or directories, or a lower --min-pairs"
        )
    return write(gathered, output)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""

    def work() -> int:
        options = _parser().parse_args(argv)
        output = options.output
        if not output.name.endswith(SUFFIX):
            raise UserError(f"--output {output}: the name must end in {SUFFIX}")
        packages = downloaded(sorted(set(options.packages)), options.downloads or output.parent / "packages")
        summary = build(chain(*map(files_of_deb, packages)), output, options.min_pairs)
        sizes = list(summary["pairs"].items())
        (most, first), (fewest, last) = sizes[0], sizes[-1]
        print(
            f"{output}: {summary['num_languages']} languages, {summary['num_pairs']} pairs from {first} ({most}) to "
            f"{last} ({fewest}), {summary['num_english']} English texts"
        )
        for package, about in summary["packages"].items():
            licences = ", ".join(about["licences"]) or "no licence is named"
            print(f"  {package}: {about['pairs']} pairs of {about['catalogues']} catalogues; {licences}")
        for name, reason in summary["unreadable"].items():
            print(f"  not read: {name}: {reason}", file=sys.stderr)
        return 0

    return run_command(work)


def _parser() -> Parser:
    parser = Parser(__doc__)
    add, packages = parser.add_argument, f"Debian packages; default: {', '.join(PACKAGES)}"
    add("--output", type=Path, default=Path("data/l10n.jsonl.gz"), help="default: data/l10n.jsonl.gz")
    add("--packages", nargs="+", default=PACKAGES, metavar="NAME", help=packages)
    add("--downloads", type=Path, help="folder of the packages; default: packages beside the output")
    add("--min-pairs", type=int, default=150, help="languages with fewer pairs are left out; default: 150")
    return parser


if __name__ == "__main__":
    sys.exit(main())

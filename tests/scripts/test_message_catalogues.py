"""scripts/message_catalogues.py: which messages become pairs, of catalogues and packages that the tests make."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import lzma
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import message_catalogues
import pytest
from babel.messages.catalog import Catalog
from babel.messages.mofile import write_mo
from babel.messages.pofile import write_po
from catalogues import sources
from catalogues.languages import language_of
from catalogues.messages import Message, pair_of

OPEN = ("Open the document", "Dokument öffnen")
SAVE = ("Save all changes", "Alle Änderungen sichern")
NOTICE = "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\nFiles: *\nLicense: GPL-2+\n"


def catalogue(language: str, *pairs: tuple[str, str], suffix: str = ".mo", **options: Any) -> bytes:
    made = Catalog(locale=language)
    for english, translation in pairs:
        made.add(english, translation, **options)
    file = io.BytesIO()
    (write_mo if suffix == ".mo" else write_po)(file, made)
    return file.getvalue()


def put(root: Path, language: str, content: bytes, name: str = "program.mo") -> None:
    folder = root / "usr" / "share" / "locale" / language / "LC_MESSAGES"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)


def unpacked(root: Path) -> Path:
    """A package as it lies on the disk."""
    put(root, "de", catalogue("de", OPEN, SAVE))
    put(root, "fr", catalogue("fr", (OPEN[0], "Ouvrir le document")))
    notice = root / "usr" / "share" / "doc" / "program" / "copyright"
    notice.parent.mkdir(parents=True)
    notice.write_text(NOTICE)
    return root


def packed(root: Path, folder: Path) -> Path:
    if shutil.which("dpkg-deb") is None:
        pytest.skip("dpkg-deb is not installed")
    control = root / "DEBIAN" / "control"
    control.parent.mkdir()
    control.write_text("Package: program\nVersion: 1\nArchitecture: all\nMaintainer: x <x@y>\nDescription: x\n")
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["dpkg-deb", "--build", "--root-owner-group", root, folder], check=True, capture_output=True)
    return folder / "program_1_all.deb"


def rows_of(output: Path) -> list[dict[str, str]]:
    with gzip.open(output, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def build(tmp_path: Path, *words: object) -> tuple[list[dict[str, str]], dict[str, Any]]:
    output = tmp_path / "out" / "l10n.jsonl.gz"
    assert message_catalogues.main(["--output", str(output), "--min-pairs", "1", *map(str, words)]) == 0
    return rows_of(output), json.loads((tmp_path / "out" / "l10n.json").read_text())


@pytest.mark.parametrize(
    ("code", "language"),
    [
        *(("de", "de"), ("pt", "pt"), ("pt_PT", "pt"), ("pt_BR", "pt_BR"), ("zh_CN", "zh_Hans"), ("zh_TW", "zh_Hant")),
        *(("sr", "sr"), ("sr@latin", "sr_Latn"), ("sr@Latn", "sr_Latn"), ("uz@cyrillic", "uz_Cyrl"), ("no", "nb")),
        *(("nb_NO", "nb"), ("am_ET", "am"), ("bn_IN", "bn"), ("de_DE.UTF-8", "de"), ("zh_Hant", "zh_Hant")),
        *((code, None) for code in ("en", "en_GB", "en@shaw", "es_MX", "de_CH", "ca@valencia", "C", "", "program")),
    ],
)
def test_languages_have_one_code_each(code: str, language: str | None) -> None:
    assert language_of(code) == language


@pytest.mark.parametrize(
    ("english", "translation", "expected"),
    [
        ("_Open the document", "Dokument ö_ffnen", ("Open the document", "Dokument öffnen")),
        ("&Open the document", "文書を開く(&O)", ("Open the document", "文書を開く")),
        ("Open the <b>whole</b> document", "<b>Ganzes</b> Dokument", ("Open the whole document", "Ganzes Dokument")),
        ("Search &amp; replace text", "Suchen &amp; Ersetzen", ("Search & replace text", "Suchen & Ersetzen")),
        ("Anti-aliasing", "Kantenglättung", ("Anti-aliasing", "Kantenglättung")),
        ("Two\n  lines of text", "Zwei Zeilen", ("Two lines of text", "Zwei Zeilen")),
        ("There are 12 of them", "هناك ١٢ منها", ("There are 12 of them", "هناك ١٢ منها")),
        ("Set gtk_window to large", "gtk_window auf groß setzen", "identifier"),
        ("menu.file.open", "Datei öffnen", "identifier"),
        ("--verbose", "ausführlich", "identifier"),
        ("Open %s at once", "%s sofort öffnen", "placeholder"),
        ("Open {name} at once", "{name} sofort öffnen", "placeholder"),
        ("see https://example.org", "siehe dort", "placeholder"),
        ("a &lt; b is wrong here", "a ist nicht kleiner", "markup"),
        ("Open", "Öffnen", "length"),
        ("Open it all " * 20, "Öffnen", "length"),
        ("Open it now", "ö" * 80, "length"),
        ("Document Viewer", "document viewer", "identical"),
        ("1234567 x 1234567", "1234567 mal", "few letters"),
        ("Wait for 5 seconds", "Warte 50 Sekunden", "other numbers"),
        ("translator-credits", "Jemand", "credits or copyright"),
        ("Copyright of the authors", "Urheberrecht", "credits or copyright"),
        ("Open the \x1b document", "Das Dokument", "control characters"),
        ("Edit settings", "កែ\u200bការ\u200bកំណត់", ("Edit settings", "កែ\u200bការ\u200bកំណត់")),
        ("a prototype for %q+D", "ein Prototyp", "placeholder"),
    ],
)
def test_a_message_is_a_clean_pair_or_has_a_reason(english: str, translation: str, expected: object) -> None:
    assert pair_of(Message(english, translation, None)) == expected


@pytest.mark.parametrize("suffix", [".mo", ".po"])
def test_context_is_left_out_and_plurals_are_no_pairs(tmp_path: Path, suffix: str) -> None:
    made = Catalog(locale="de")
    made.add(OPEN[0], OPEN[1], context="menu")
    made.add(("%(num)s file", "%(num)s files"), ("%(num)s Datei", "%(num)s Dateien"))
    made.add(SAVE[0], SAVE[1], flags=["fuzzy"])
    made.add("Never translated", "")
    file = io.BytesIO()
    write_mo(file, made) if suffix == ".mo" else write_po(file, made)
    put(tmp_path / "in", "de", file.getvalue(), f"program{suffix}")
    rows, summary = build(tmp_path, "--from", tmp_path / "in")
    assert [(row["src"], row["tgt"], row["tgt_lang"]) for row in rows] == [(*OPEN, "de")]
    assert summary["left_out"]["plural forms"] == 1
    if suffix == ".po":  # a compiled catalogue has neither
        assert summary["left_out"] | {"fuzzy": 1, "not translated": 1} == summary["left_out"]


def test_sources_name_their_language_in_the_header_or_by_the_file(tmp_path: Path) -> None:
    folder = tmp_path / "in" / "po"
    folder.mkdir(parents=True)
    (folder / "de.po").write_bytes(catalogue("de", OPEN, suffix=".po"))
    (folder / "manual.po").write_bytes(catalogue("sv", (OPEN[0], "Öppna dokumentet"), suffix=".po"))
    rows, _ = build(tmp_path, "--from", tmp_path / "in")
    assert {row["tgt_lang"] for row in rows} == {"de", "sv"}


def test_damaged_catalogues_are_named_and_do_no_harm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = unpacked(tmp_path / "in")
    good = catalogue("sv", OPEN)
    for name, content in {
        "empty.mo": b"",
        "short.mo": good[: len(good) // 2],
        "text.mo": b"this is no catalogue",
        "charset.mo": catalogue("sv", OPEN).replace(b"charset=utf-8", b"charset=utf-0"),
        "bad.po": b'msgid "one"\nmsgstr "eins"\nno part of an entry\n',
    }.items():
        put(root, "sv", content, name)
    rows, summary = build(tmp_path, "--from", root)
    assert {row["tgt_lang"] for row in rows} == {"de", "fr"}
    assert sorted(name.partition("/")[2] for name in summary["unreadable"]) == [
        *("bad (sv)", "charset (sv)", "empty (sv)", "short (sv)", "text (sv)")
    ]
    assert "not read: in/empty (sv)" in capsys.readouterr().err


def test_a_package_gives_the_same_as_its_files_with_its_licence(tmp_path: Path) -> None:
    folder = tmp_path / "packages"
    root = unpacked(tmp_path / "unpacked" / "program")
    from_files, _ = build(tmp_path, "--from", root.parent)
    packed(root, folder)
    rows, summary = build(tmp_path, "--from", folder)
    assert rows == from_files
    assert summary["packages"] == {"program": {"catalogues": 2, "pairs": 3, "licences": ["GPL-2+"]}}
    assert (summary["num_languages"], summary["num_pairs"], summary["num_english"]) == (2, 3, 2)
    assert (tmp_path / "out" / "l10n.licences" / "program").read_text() == NOTICE
    first = (tmp_path / "out" / "l10n.jsonl.gz").read_bytes()
    build(tmp_path, "--from", folder)
    assert (tmp_path / "out" / "l10n.jsonl.gz").read_bytes() == first


def archive(tmp_path: Path, sha256: str | None = None) -> str:
    """A Debian archive in a directory; returns its address."""
    deb = packed(unpacked(tmp_path / "program"), tmp_path / "archive" / "pool")
    digest = sha256 or hashlib.sha256(deb.read_bytes()).hexdigest()
    index = tmp_path / "archive" / "dists" / "stable" / "main" / "binary-amd64" / "Packages.xz"
    index.parent.mkdir(parents=True)
    stanza = f"Package: program\nVersion: 1\nFilename: pool/{deb.name}\nSHA256: {digest}\n"
    index.write_bytes(lzma.compress(f"Package: other\nFilename: x\nSHA256: y\n\n{stanza}".encode()))
    return (tmp_path / "archive").as_uri()


def test_packages_of_an_archive_are_downloaded_once(tmp_path: Path) -> None:
    address = archive(tmp_path)
    rows, _ = build(tmp_path, "--packages", "program", "--mirror", address)
    assert len(rows) == 3
    shutil.rmtree(tmp_path / "archive")
    assert build(tmp_path, "--packages", "program", "--mirror", address)[0] == rows


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--from", "missing"], "there is no directory missing"),
        (["--packages", "absent"], "has no package absent in stable"),
        (["--packages", "program", "--suite", "old"], "cannot be read"),
        (["--packages", "program"], "its SHA-256 is another"),
        (["--from", "empty"], "there is no pair in 0 catalogues"),
        (["--output", "x.txt"], "must end in .jsonl.gz"),
        (["--unknown"], "--help lists the options"),
    ],
)
def test_errors_are_one_line_with_the_next_step(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    mirror = ["--mirror", archive(tmp_path, sha256="0" * 64)] if "--packages" in words else []
    assert message_catalogues.main([*words, *mirror]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error


def test_programs_that_are_missing_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources.shutil, "which", lambda name: None)
    with pytest.raises(sources.DataError, match=r"apt-get is not installed.*--mirror"):
        sources.downloaded(["program"], tmp_path, None, "stable")
    with pytest.raises(sources.DataError, match=r"dpkg-deb.*is not installed"):
        list(sources.files_of_deb(tmp_path / "program_1_all.deb"))


def test_small_languages_and_repeated_pairs_are_left_out(tmp_path: Path) -> None:
    root = unpacked(tmp_path / "in")
    put(root, "de", catalogue("de", (OPEN[0], "Ein zweites Mal"), SAVE), "second.mo")
    output = tmp_path / "out.jsonl.gz"
    assert message_catalogues.main(["--from", str(root), "--output", str(output), "--min-pairs", "2"]) == 0
    assert sorted((row["src"], row["tgt"], row["page"]) for row in rows_of(output)) == [
        (*OPEN, "in/program"),
        (*SAVE, "in/program"),
    ]
    left_out = json.loads((tmp_path / "out.json").read_text())["left_out"]
    assert left_out == {"repeated": 2, "language with few pairs": 1}


@pytest.mark.skipif(sys.platform != "linux", reason="the directory is Linux's")
def test_installed_catalogues_have_their_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = unpacked(tmp_path / "in")
    directory = root / "usr" / "share" / "locale"
    owned = str(directory / "de" / "LC_MESSAGES" / "program.mo")
    monkeypatch.setattr(sources, "_owners", lambda directory: {owned: "package"})
    found = [(one.package, one.code) for one in sources.files_of_system(directory)]
    assert found == [("package", "de"), ("program", "fr")]

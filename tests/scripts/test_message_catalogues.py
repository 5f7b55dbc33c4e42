"""scripts/message_catalogues.py: which messages become pairs, of catalogues and packages that the tests make."""

from __future__ import annotations

import gzip
import io
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import message_catalogues
import pytest
from babel.messages.catalog import Catalog
from babel.messages.mofile import write_mo
from catalogues import sources
from catalogues.languages import language_of
from catalogues.messages import Message, pair_of

OPEN = ("Open the document", "Dokument öffnen")
SAVE = ("Save all changes", "Alle Änderungen sichern")
NOTICE = "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\nFiles: *\nLicense: GPL-2+\n"


def catalogue(language: str, *pairs: tuple[str, str]) -> bytes:
    made = Catalog(locale=language)
    for english, translation in pairs:
        made.add(english, translation)
    return compiled(made)


def compiled(made: Catalog) -> bytes:
    file = io.BytesIO()
    write_mo(file, made)
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
    control.parent.mkdir(parents=True, exist_ok=True)
    control.write_text("Package: program\nVersion: 1\nArchitecture: all\nMaintainer: x <x@y>\nDescription: x\n")
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["dpkg-deb", "--build", "--root-owner-group", root, folder], check=True, capture_output=True)
    return folder / "program_1_all.deb"


def rows_of(output: Path) -> list[dict[str, str]]:
    with gzip.open(output, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def build(tmp_path: Path, root: Path, *words: object) -> tuple[list[dict[str, str]], dict[str, Any]]:
    """The corpus of a package, and its summary."""
    output = tmp_path / "out" / "l10n.jsonl.gz"
    packed(root, output.parent / "packages")
    options = ["--output", str(output), "--packages", "program", "--min-pairs", "1", *map(str, words)]
    assert message_catalogues.main(options) == 0
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


def test_context_is_left_out_and_plurals_are_no_pairs(tmp_path: Path) -> None:
    made = Catalog(locale="de")
    made.add(OPEN[0], OPEN[1], context="menu")
    made.add(("%(num)s file", "%(num)s files"), ("%(num)s Datei", "%(num)s Dateien"))
    put(tmp_path / "in", "de", compiled(made))
    rows, summary = build(tmp_path, tmp_path / "in")
    assert [(row["src"], row["tgt"], row["tgt_lang"]) for row in rows] == [(*OPEN, "de")]
    assert summary["left_out"]["plural forms"] == 1


def test_damaged_catalogues_are_named_and_do_no_harm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = unpacked(tmp_path / "in")
    good = catalogue("sv", OPEN)
    for name, content in {
        "empty.mo": b"",
        "short.mo": good[: len(good) // 2],
        "text.mo": b"this is no catalogue",
        "charset.mo": catalogue("sv", OPEN).replace(b"charset=utf-8", b"charset=utf-0"),
    }.items():
        put(root, "sv", content, name)
    rows, summary = build(tmp_path, root)
    assert {row["tgt_lang"] for row in rows} == {"de", "fr"}
    assert sorted(name.partition("/")[2] for name in summary["unreadable"]) == [
        *("charset (sv)", "empty (sv)", "short (sv)", "text (sv)")
    ]
    assert "not read: program/empty (sv)" in capsys.readouterr().err


def test_a_package_gives_its_pairs_and_its_licence(tmp_path: Path) -> None:
    root = unpacked(tmp_path / "in")
    rows, summary = build(tmp_path, root)
    assert {(row["src"], row["tgt_lang"]) for row in rows} == {(OPEN[0], "de"), (SAVE[0], "de"), (OPEN[0], "fr")}
    assert summary["packages"] == {"program": {"catalogues": 2, "pairs": 3, "licences": ["GPL-2+"]}}
    assert (summary["num_languages"], summary["num_pairs"], summary["num_english"]) == (2, 3, 2)
    assert (tmp_path / "out" / "l10n.licences" / "program").read_text() == NOTICE
    first = (tmp_path / "out" / "l10n.jsonl.gz").read_bytes()
    build(tmp_path, root)
    assert (tmp_path / "out" / "l10n.jsonl.gz").read_bytes() == first


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--packages", "no-package-of-this-name"], "no-package-of-this-name"),
        (["--packages", "program", "--downloads", "."], "cannot be read as a Debian package"),
        (["--packages", "program", "--downloads", "empty"], "there is no pair in 0 catalogues"),
        (["--output", "x.txt"], "must end in .jsonl.gz"),
        (["--unknown"], "--help lists the options"),
    ],
)
def test_errors_are_one_line_with_the_next_step(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    packed(tmp_path / "in", tmp_path / "empty")
    (tmp_path / "program_1_all.deb").write_bytes(b"no package")
    assert message_catalogues.main(words) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error


def test_programs_that_are_missing_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources.shutil, "which", lambda name: None)
    with pytest.raises(sources.DataError, match=r"apt-get is not installed.*put program into"):
        sources.downloaded(["program"], tmp_path)
    with pytest.raises(sources.DataError, match=r"dpkg-deb.*is not installed"):
        list(sources.files_of_deb(tmp_path / "program_1_all.deb"))


def test_small_languages_and_repeated_pairs_are_left_out(tmp_path: Path) -> None:
    root = unpacked(tmp_path / "in")
    put(root, "de", catalogue("de", (OPEN[0], "Ein zweites Mal"), SAVE), "second.mo")
    rows, summary = build(tmp_path, root, "--min-pairs", "2")
    assert sorted((row["src"], row["tgt"], row["page"]) for row in rows) == [
        (*OPEN, "program/program"),
        (*SAVE, "program/program"),
    ]
    assert summary["left_out"] == {"repeated": 2, "language with few pairs": 1}

"""Pages keep to the form: standard terms, prose of at most 100 columns, fenced code with a language, short cells."""

from __future__ import annotations

import ast
import re
import textwrap

import pytest
import yaml

from tests.docs.pages import PAGES, REPOSITORY, Page

#: Written by scripts.
_GENERATED = re.compile(r"docs/reference/|docs/families\.md|docs/your_model\.md|docs/scaling/|tests/")
WRITTEN = [page for page in PAGES if not _GENERATED.match(page.name)]
COLUMNS, CELL = 100, 120
#: Word -> what this project's pages write.
WORDS = {
    r"\b(?:is|are|was|be) refused": "not supported",
    r"\bhonou?r": "supported, accepted",
    r"\bfullest\b": "with the highest peak memory",
    r"\bmemory of the hosts?\b": "CPU memory",
    r"\bunlike (?:devices|processes|cards)": "heterogeneous",
    r"\blive graphs?\b": "stored activations",
    r"\bwhole checkpoint": "valid checkpoint",
    r"\bchance of the seed": "seed variance",
}
every_page = pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)


def words_of(text: str) -> list[str]:
    """The words of the list that a text has; code does not count."""
    bare = re.sub(r"`[^`]*`", "", text)
    return [f"{found[0]!r}: {instead}" for word, instead in WORDS.items() if (found := re.search(word, bare, re.I))]


@every_page
def test_terms_are_the_standard_ones(page: Page) -> None:
    assert words_of(" ".join(line for _, line in page.prose)) == []


@every_page
def test_lines_and_cells_are_short(page: Page) -> None:
    """A line may be longer where it is one link or one word, and in what a script has written between marks."""
    found, is_written = [], False
    for number, line in page.prose:
        is_written = line.startswith("<!-- validation") or (is_written and not line.startswith("<!-- end"))
        if is_written:
            continue
        if line.startswith("|"):
            found += [f"{page.name}:{number}: {cell.strip()[:40]}" for cell in line.split("|") if len(cell) > CELL + 2]
        elif len(line) > COLUMNS and " " in line.strip()[:COLUMNS].lstrip("*-> "):
            found.append(f"{page.name}:{number}: {len(line)} columns")
    assert found == []


@every_page
def test_code_is_fenced_with_its_language(page: Page) -> None:
    assert [f"{page.name}:{block.line}" for block in page.blocks if not block.language] == []
    indented = [number for number, line in page.prose if re.match(r"^ {4}\S", line) and not page.lines[number - 2]]
    assert indented == []
    for block in page.blocks:
        if block.language == "python":
            ast.parse(textwrap.dedent(block.text))
        elif block.language == "yaml":
            yaml.safe_load(block.text)


def strings(folder: str) -> list[tuple[str, str]]:
    """The strings of the code, docstrings too, each with its place."""
    found = []
    for path in sorted((REPOSITORY / folder).rglob("*.py")):
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        texts = [node for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        found += [(f"{path}:{node.lineno}", node.value) for node in texts]
    return found


def test_docstrings_begin_with_a_noun_or_a_verb() -> None:
    assert [place for place, text in strings("hf_gpipe") + strings("scripts") if re.match(r"What\b[^?]*\.", text)] == []


def test_messages_help_texts_and_docstrings_have_the_standard_terms() -> None:
    """But for "is refused", which docstrings say of the messages of a peer."""
    found = [(place, word) for place, text in strings("hf_gpipe") for word in words_of(text)]
    assert [(place, word) for place, word in found if "refused" not in word] == []


def test_an_old_term_is_found() -> None:
    assert words_of("It is refused; `refused` and `honoured` are names.") == ["'is refused': not supported"]


def test_messages_of_the_troubleshooting_are_the_codes() -> None:
    """Each message is one that the code has, but for what differs from case to case."""
    texts = []
    for path in (REPOSITORY / "hf_gpipe").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
                texts.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    known = "\n".join(texts)
    page = next(page for page in PAGES if page.name == "docs/troubleshooting.md")
    found = []
    for block in page.blocks:
        pieces = [" ".join(piece.split()).strip(" ,;:()") for piece in re.split(r"\.\.\.|error:|[\d]+", block.text)]
        found += [piece for piece in pieces if len(piece) > 12 and piece not in known and piece != "OutOfMemoryError"]
    assert found == []


def test_the_changelog_is_grouped_as_keep_a_changelog_says() -> None:
    """It was one list, in which nobody found what breaks. A version has each group once at most, in this order."""
    changelog = next(page for page in PAGES if page.name == "CHANGELOG.md")
    groups = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
    versions: list[list[str]] = []
    for _, line in changelog.prose:
        if line.startswith("## "):
            versions.append([])
        elif line.startswith("### "):
            versions[-1].append(line.removeprefix("### "))
        elif line.startswith("* "):
            assert versions[-1], f"a line stands in no group: {line}"
    assert versions == [[group for group in groups if group in found] for found in versions]

"""Every link of every page leads to a file that is there, and to a heading of it; every page is in the site."""

from __future__ import annotations

import re

import pytest
import yaml

from tests.docs.pages import PAGES, REPOSITORY, Page, anchor_of

_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
_SPAN = re.compile(r"`[^`]*`")
#: A file of the repository, or of one of the folders in ROOTS.
_NAMED = re.compile(r"(?<![\w/.])[a-z_]+/[\w/-]+\.(?:py|sh|yaml|jinja)(?![\w.])")
ROOTS = [REPOSITORY, REPOSITORY / "hf_gpipe", REPOSITORY / "recipes", REPOSITORY / "tests"]
BY_PATH = {page.path: page for page in PAGES}


def broken(page: Page) -> list[str]:
    """What is wrong with the links of a page."""
    found = []
    text = {number: _SPAN.sub("", line) for number, line in page.prose}
    joined = "\n".join(text[number] for number in sorted(text))
    for link in _LINK.findall(joined):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.path.parent / path).resolve() if path else page.path
        if not target.exists():
            found.append(f"{page.name}: {link}: no such file")
        elif anchor and target in BY_PATH:
            other = page if target == page.path else BY_PATH[target]
            if anchor not in other.anchors:
                found.append(f"{page.name}: {link}: no such heading")
    return found


def missing_files(page: Page) -> list[str]:
    """The files in folders that a page names and that are not there."""
    names = sorted(set(_NAMED.findall("\n".join(page.lines))))
    return [name for name in names if not any((root / name).exists() for root in ROOTS)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_files_that_a_page_names_are_there(page: Page) -> None:
    assert missing_files(page) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Page) -> None:
    assert broken(page) == []


def test_a_broken_link_is_found() -> None:
    page = next(page for page in PAGES if page.name == "docs/index.md")
    copy = Page(page.path)
    copy.__dict__["lines"] = ["# Here", "[a](nowhere.md) [b](start.md#nowhere) [c](#here) [d](start.md#install)"]
    assert broken(copy) == [
        "docs/index.md: nowhere.md: no such file",
        "docs/index.md: start.md#nowhere: no such heading",
    ]


def test_anchors_are_githubs() -> None:
    assert anchor_of("GPipe's Table 2") == "gpipes-table-2"
    assert anchor_of("`T(L, H, A)` in [a](b.md)") == "tl-h-a-in-a"


def test_every_page_is_in_the_navigation() -> None:
    """Reports of the scaling study are reached from their page alone."""
    text = (REPOSITORY / "mkdocs.yml").read_text()
    nav = yaml.safe_load(text[text.index("\nnav:") :])
    named = set(re.findall(r"[\w/]+\.md", str(nav)))
    pages = {page.name.removeprefix("docs/") for page in PAGES if page.name.startswith("docs/")}
    assert named == {name for name in pages if not name.startswith("scaling/")}


def test_no_sentence_of_the_site_begins_a_line_with_a_comment() -> None:
    """Markdown takes such a line for a block of HTML, and the sentence was broken into two paragraphs."""
    broken = [
        f"{page.name}:{number}" for page in PAGES for number, line in page.prose if re.match(r"<!-- .*? -->\S", line)
    ]
    assert broken == []

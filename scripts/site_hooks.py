"""Hooks of mkdocs: a link from a page to a file of the repository outside of docs/ becomes its name.

On the repository's own pages these links work; the site has no such files.
"""

from __future__ import annotations

import re
from typing import Any

#: [text](../path), but not inside docs/: pages of docs/reference link to ../page.md.
_OUTSIDE = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+)[^)]*\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page's text without links that leave docs/."""
    depth = page.file.src_uri.count("/")
    return _OUTSIDE.sub(lambda link: link[1] if link[2].count("../") > depth else link[0], markdown)

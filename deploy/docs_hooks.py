"""Hooks of MkDocs (``mkdocs.yml``): what the documentation's source needs to become a site.

A folder in the navigation stands for all its pages. Links that leave docs/ work in the repository, where users read
the same pages; the site does not contain their targets, so there they become the path as text.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s#:]+)(#[^)\s]*)?\)")


def on_config(config: Any) -> Any:
    """Replace every folder of the navigation by the list of its pages."""
    docs = Path(config["docs_dir"])
    for section in config["nav"]:
        for title, entry in section.items():
            if isinstance(entry, str) and entry.endswith("/"):
                section[title] = [str(page.relative_to(docs)) for page in sorted((docs / entry).glob("*.md"))]
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Replace links that leave docs/ by the path of their target."""
    docs = Path(config["docs_dir"]).resolve()
    here = (docs / page.file.src_path).parent

    def replaced(match: re.Match[str]) -> str:
        target = (here / match[2]).resolve()
        if target.is_relative_to(docs) and target.is_file():
            return match[0]
        text = match[1].strip("`")
        path = target.relative_to(docs.parent)
        return f"`{path}`" if text in {str(path), path.name} else f"{text} (`{path}`)"

    return _LINK.sub(replaced, markdown)

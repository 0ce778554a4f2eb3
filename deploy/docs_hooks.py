"""For MkDocs, which calls it (``mkdocs.yml``).

A folder in the navigation stands for its pages. Links that leave docs/ lead into the repository, where people read the
same pages too; on the site they become the path's name.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s#:]+)(#[^)\s]*)?\)")


def on_config(config: Any) -> Any:
    """Write folders of the navigation out."""
    docs = Path(config["docs_dir"])
    for section in config["nav"]:
        for title, entry in section.items():
            if isinstance(entry, str) and entry.endswith("/"):
                section[title] = [str(page.relative_to(docs)) for page in sorted((docs / entry).glob("*.md"))]
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Replace them."""
    docs = Path(config["docs_dir"]).resolve()
    here = (docs / page.file.src_path).parent

    def replaced(match: re.Match[str]) -> str:
        there = (here / match[2]).resolve()
        if there.is_relative_to(docs) and there.is_file():
            return match[0]
        text = match[1].strip("`")
        path = there.relative_to(docs.parent)
        return f"`{path}`" if text in {str(path), path.name} else f"{text} (`{path}`)"

    return _LINK.sub(replaced, markdown)

"""A hook of mkdocs: the site must not load anything from a network."""

import re
from typing import Any

from mkdocs.exceptions import PluginError

# Scripts, images and frames; style sheets, fonts and icons. Links that a reader may click are no loads.
LOADS = re.compile(
    r"""<(?:script|img|iframe|source|video|audio)\b[^>]*\bsrc=["']?(?:https?:)?//[^"'\s>]+"""
    r"""|<link\b(?![^>]*\brel=["']?(?:canonical|next|prev))[^>]*\bhref=["']?(?:https?:)?//[^"'\s>]+"""
    r"""|url\(["']?(?:https?:)?//[^)]+"""
)


def on_post_page(output: str, *, page: Any, **_: Any) -> str:
    """Called with the HTML of every page."""
    if found := LOADS.search(output):
        raise PluginError(f"{page.file.src_uri} loads from a network: {found[0][:200]}")
    return output

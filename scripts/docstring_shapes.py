"""For mkdocstrings: formulas and shapes in docstrings are shown as they are typed.

Many docstrings of this package have lines such as `queries (u, d), support (s, d)  ->  (u, c)`. Markdown would run
them together and take `*` and `_` for emphasis. This extension puts such paragraphs into a block of plain text.
"""

import re

import griffe

SECTION = re.compile(r"(Args|Returns|Raises|Yields|Attributes|Note|Parameters):?$")
SHAPES = re.compile(r"  ->  |\[Eq\. |\[Appendix|^\w+ \([a-z0-9]")


class DocstringShapes(griffe.Extension):
    """Called by griffe for every object that it has read."""

    def on_instance(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring is not None:
            obj.docstring.value = with_blocks(obj.docstring.value)


def with_blocks(docstring: str) -> str:
    """The same docstring, with the paragraphs that have formulas or shapes in blocks of plain text."""
    summary, _, body = docstring.partition("\n")
    sentence, gap, shapes = summary.partition("   ")
    if gap:  # "Similarity of unit embeddings.   left (n, d), right (m, d)  ->  (n, m)"
        summary = f"{sentence}\n\n```text\n{shapes.strip()}\n```"
    parts = re.split(r"\n\s*\n", body.strip("\n")) if body.strip() else []
    return "\n\n".join([summary, *map(_block, parts)])


def _block(part: str) -> str:
    lines = part.splitlines()
    is_section = SECTION.match(lines[0].strip()) is not None
    has_shapes = any(SHAPES.search(line) for line in lines)
    return f"```text\n{part}\n```" if has_shapes and not is_section else part

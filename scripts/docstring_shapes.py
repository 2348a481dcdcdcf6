"""For mkdocstrings: docstrings and comments of this package as they are meant to be read.

- Many docstrings have lines such as `queries (u, d), support (s, d)  ->  (u, c)`. Markdown would run them
  together and take `*` and `_` for emphasis; here they become blocks of plain text.
- The fields of dataclasses, named tuples and typed dictionaries become one section `Attributes` of their
  class. A field is described by the docstring below it, or by the comment beside it.
- The estimator has docstrings as scikit-learn has them; mkdocstrings would take its methods' for Google's.
"""

import re

import griffe

SECTION = re.compile(r"(Args|Returns|Raises|Yields|Attributes|Parameters|Note|See Also):?$")
SHAPES = re.compile(r"  ->  |\s{2,}\[(Eq\.|Appendix)|\w+ \((?:[a-z]+|\d+), ?(?:[a-z0-9 ,]*)\)")
NUMPY = re.compile(r"^(Parameters|Returns|Attributes)\n-{3,}$", re.MULTILINE)
COMMENT = re.compile(r"\s#\s*(.+)$")


class DocstringShapes(griffe.Extension):
    """Called by griffe for what it has read."""

    def on_function_instance(self, *, func: griffe.Function, **_: object) -> None:
        _rewrite(func)

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: object) -> None:
        _rewrite(attr)

    def on_module_instance(self, *, mod: griffe.Module, **_: object) -> None:
        _rewrite(mod)

    def on_class_members(self, *, cls: griffe.Class, **_: object) -> None:
        _rewrite(cls)
        if cls.docstring is None or re.search(r"^\s*Attributes:?$", cls.docstring.value, re.MULTILINE):
            return
        lines = [f"    {name}: {words}" for name, words in _fields(cls).items()]
        if lines:
            cls.docstring.value += "\n\nAttributes:\n" + "\n".join(lines)


def _rewrite(obj: griffe.Object) -> None:
    if obj.docstring is None:
        return
    if NUMPY.search(obj.docstring.value):
        obj.docstring.parser = griffe.Parser.numpy
    else:
        obj.docstring.value = with_blocks(obj.docstring.value)


def _fields(cls: griffe.Class) -> dict[str, str]:
    """Public annotated fields with a description."""
    found = {}
    for name, attribute in cls.attributes.items():
        is_field = (
            not attribute.is_alias and not name.startswith("_") and not attribute.has_labels("property")
        )
        words = _words(cls, attribute) if is_field else ""
        if words and attribute.annotation is not None and attribute.has_labels("instance-attribute"):
            found[name] = re.sub(r"(?<!`)([*_<\[])(?!`)", r"\\\1", words)
    return found


def _words(cls: griffe.Class, attribute: griffe.Attribute) -> str:
    if attribute.docstring is not None:
        return " ".join(attribute.docstring.value.split())
    line = cls.lines[attribute.lineno - cls.lineno] if attribute.lineno and cls.lineno else ""
    comment = COMMENT.search(line)
    return comment[1].strip() if comment and "noqa" not in comment[1] else ""


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
    if SECTION.match(lines[0].strip()) or lines[0].startswith(" ") or not any(map(SHAPES.search, lines)):
        return part
    narrow = [re.sub(r"\s{2,}\[(?=Eq\.|Appendix)", "   [", line) for line in lines]
    return "```text\n" + "\n".join(narrow) + "\n```"

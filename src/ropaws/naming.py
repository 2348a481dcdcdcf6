"""Names that users type, and the true name nearest to a wrong one."""

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """The most similar of the known names."""
    return difflib.get_close_matches(name, list(known), n=1, cutoff=0)[0]

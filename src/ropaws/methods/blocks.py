"""Rows in parts: what compares them with all labeled points holds one part at a time."""

from collections.abc import Sequence

import torch
from torch import Tensor


def in_blocks(rows: Tensor, size: int) -> Sequence[Tensor]:
    """Parts of at most so many rows.

    All rows in one while a model is exported (prediction/exported.py): how many they are is then a symbol,
    and a graph cannot have a number of parts that depends on it.
    """
    if isinstance(rows.shape[0], torch.SymInt):
        return [rows]
    parts: Sequence[Tensor] = rows.split(size)
    return parts

"""Learning rates as pure functions of the step: nothing to save, nothing to replay."""

import math


def warmup_cosine(step: int, *, peak: float, start: float, end: float, warmup: int, total: int) -> float:
    """Linear from start to peak over the warm-up, then half a cosine down to end at the last step."""
    if step < warmup:
        return start + (peak - start) * step / warmup
    progress = min(1.0, (step - warmup) / max(1, total - 1 - warmup))
    return end + (peak - end) * (1 + math.cos(math.pi * progress)) / 2


def fixmatch_cosine(step: int, *, peak: float, total: int) -> float:
    """peak cos(7/16 pi step / total): no warm-up, ends at about a fifth of the peak."""
    return peak * math.cos(7 / 16 * math.pi * step / total)

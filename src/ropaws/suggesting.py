"""What to label next in a run, with the reason of each suggestion in words."""

from collections.abc import Sequence
from typing import Any

from ropaws.evaluation.propagation import pool_posterior
from ropaws.evaluation.suggestions import suggest
from ropaws.material import Material

SURE = 0.8  # probability above which a suggestion is not about two classes


def suggestions(material: Material, count: int) -> list[dict[str, Any]]:
    """The unlabelled images most worth a label, best first, with the reason of each."""
    embedded = material.embedded
    if len(embedded.pool) == 0:
        return []
    probs = pool_posterior(
        embedded.pool, material.support.embeddings, material.votes, material.kernel()
    ).probs
    scores = material.in_domain(embedded.pool)
    plain = material.probs(embedded.pool)
    picks = suggest(
        embedded.pool,
        probs,
        scores,
        material.support.embeddings,
        count=min(count, len(embedded.pool)),
        threshold=material.border.threshold,
        width=material.border.prior_temperature,
    )
    likely, classes = plain.topk(min(2, material.classes), dim=1)
    found = []
    for rank, pick in enumerate(picks, start=1):
        place = pick.position
        names = [material.facts.class_names[number] for number in classes[place].tolist()]
        found.append(
            {
                "rank": rank,
                "image": int(embedded.pool_index[place]),
                "name": material.pool_name(place),
                "kind": pick.kind,
                "reason": _reason(pick.kind, names, likely[place].tolist(), pick.stands_for),
                "in_domain": float(scores[place]),
                "stands_for": pick.stands_for,
                "gain": pick.gain,
            }
        )
    return found


def _reason(kind: str, names: Sequence[str], probs: Sequence[float], stands_for: int) -> str:
    if kind == "new class":
        return f"a likely new class: the middle of {stands_for:,} out-of-class images that are alike"
    others = f"speaks for {stands_for:,} images" if stands_for > 1 else "speaks for itself alone"
    if len(names) == 1 or probs[0] >= SURE:
        return f"looks like {names[0]} ({probs[0]:.0%}), where labels are few; {others}"
    return f"{names[0]} ({probs[0]:.0%}) or {names[1]} ({probs[1]:.0%})? {others}"

"""What to label next in a run, with the reason of each suggestion in words."""

from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from rich.console import Console

from ropaws.analysis.gallery import add_thumbnails
from ropaws.evaluation.suggestions import suggest as choose
from ropaws.methods.propagation import pool_posterior
from ropaws.runs.atomic import read_json, write_json
from ropaws.runs.facts import model_digest
from ropaws.runs.layout import EVALUATION
from ropaws.runs.run import POOL, Run, open_run

SUGGESTIONS = 50
SURE = 0.8  # probability above which a suggestion is not about two classes


class Suggestion(TypedDict):
    """An unlabeled image that is worth a label."""

    rank: int  # from 1
    image: int  # position among the training images
    name: str  # file, or number
    kind: str  # "doubtful" or "new class"
    reason: str
    in_domain: float
    stands_for: int  # images of the pool that its label would explain
    gain: float


def suggest(
    run: Path | str | Run,
    *,
    n: int = SUGGESTIONS,
    pool: int = POOL,
    device: str | None = None,
    console: Console | None = None,
) -> list[Suggestion]:
    """The unlabeled images most worth a label, best first.

    They replace the suggestions of RUN/evaluation.json, and so those of the report.

    Args:
        run: A run folder.
        n: How many.
        pool: Number of unlabeled images to choose from, at most; 0 for all.
        device: Where to compute; by default as the run was trained.
        console: Where progress goes; standard error by default.

    Returns:
        Suggestions with rank, image, name, kind and reason.
    """
    return suggest_images(open_run(run, pool=pool, device=device, console=console), n)


def suggest_images(run: Run, n: int = SUGGESTIONS) -> list[Suggestion]:
    """As suggest."""
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    model_digest(run.path)  # raises an error for a run that is not finished
    found = find_suggestions(run, n)
    try:
        results = read_json(run.path / EVALUATION)
    except (OSError, ValueError):
        results = {}
    results = results if isinstance(results, dict) else {}
    write_json(run.path / EVALUATION, {**results, "suggestions": found})
    try:
        add_thumbnails(run, [item["image"] for item in found])
    except (OSError, ValueError) as error:
        line = f"The report will lack thumbnails of new suggestions: {error}"
        run.console.print(line, highlight=False, markup=False, soft_wrap=True)
    return found


def find_suggestions(run: Run, count: int) -> list[Suggestion]:
    """The unlabeled images most worth a label, best first, with the reason of each."""
    pool, outputs = run.pool, run.pool.outputs
    if len(pool.positions) == 0:
        return []
    support = run.support
    probs = pool_posterior(outputs.embedding, support.embeddings, support.one_hot, run.kernel).probs
    picks = choose(
        outputs.embedding,
        probs,
        outputs.in_domain,
        support.embeddings,
        count=min(count, len(pool.positions)),
        threshold=run.threshold,
        width=run.method.in_domain_temperature(support),
    )
    likely, classes = outputs.probs.topk(min(2, support.classes), dim=1)
    found: list[Suggestion] = []
    for rank, pick in enumerate(picks, start=1):
        row = pick.position
        names = [run.class_names[number] for number in classes[row].tolist()]
        found.append(
            {
                "rank": rank,
                "image": int(pool.positions[row]),
                "name": pool.name(row),
                "kind": pick.kind,
                "reason": _reason(pick.kind, names, likely[row].tolist(), pick.stands_for),
                "in_domain": float(outputs.in_domain[row]),
                "stands_for": pick.stands_for,
                "gain": pick.gain,
            }
        )
    return found


def _reason(kind: str, names: Sequence[str], probs: Sequence[float], stands_for: int) -> str:
    if kind == "new class":
        return f"a likely new class: the center of {stands_for:,} similar out-of-class images"
    others = f"represents {stands_for:,} images" if stands_for > 1 else "represents itself alone"
    if len(names) == 1 or probs[0] >= SURE:
        return f"looks like {names[0]} ({probs[0]:.0%}), where labels are few; {others}"
    return f"{names[0]} ({probs[0]:.0%}) or {names[1]} ({probs[1]:.0%})? {others}"

"""What the pool of a run looks like."""

from typing import Any

import torch

from ropaws.analysis.results import Evaluation, ShareFigures
from ropaws.evaluation.figures import accuracy_and_confidence
from ropaws.evaluation.histogram import histogram
from ropaws.evaluation.ood import detection
from ropaws.methods.propagation import pool_posterior
from ropaws.runs.outputs import HIDDEN, OUT
from ropaws.runs.run import Run


def pool_figures(run: Run, _: Evaluation) -> dict[str, Any]:
    """What the unlabeled images look like; and, where the truth is known, how right that is."""
    pool, outputs = run.pool, run.pool.outputs
    if len(pool.positions) == 0:
        return {}
    inside = outputs.in_domain >= run.threshold
    confidence, predicted = outputs.probs.max(dim=1)
    counts = torch.bincount(predicted[inside], minlength=len(run.class_names)).tolist()
    found: dict[str, Any] = {
        "size": pool.size,
        "seen": len(pool.positions),
        "threshold": run.threshold,
        "out_of_class": float((~inside).double().mean()),
        "confidence": float(confidence.double().mean()),
        "classes": dict(zip(run.class_names, counts, strict=True)),
        "in_domain": histogram(outputs.in_domain),
    }
    share = in_class_share(run)
    if share is not None:
        found["in_class_share"] = share
    known = pool.truth >= 0
    if known.any():
        propagated = pool_posterior(
            outputs.embedding, run.support.embeddings, run.support.one_hot, run.kernel
        ).probs
        truth = pool.truth[known]
        found["known"] = int(known.sum())
        found["accuracy"] = accuracy_and_confidence(outputs.probs[known], truth)["accuracy"]
        found["accuracy_propagated"] = accuracy_and_confidence(propagated[known], truth)["accuracy"]
    told = pool.truth != HIDDEN
    out = pool.truth == OUT
    if known.any() and out.any():
        found["truly_out_of_class"] = float(out[told].double().mean())
        found["in_domain_auroc"] = detection(outputs.in_domain[told], ~out[told]).auroc
        found.update(detection(outputs.score[told], ~out[told])._asdict())
    return {"pool": found}


def in_class_share(run: Run) -> ShareFigures | None:
    """The share of the pool that belongs to the classes, where the method estimates it."""
    share = run.method.in_class_share(run.model)
    return None if share is None else {"estimate": share.estimate, "low": share.low, "high": share.high}

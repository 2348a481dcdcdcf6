"""A method of your own: FixMatch as one class below `ropaws.Method`.

The network guesses the class of a weak view of each unlabeled image. Where it is confident, the strong view
of the same image must get that class. Everything else is there already: data, training on one or several
processes, checkpoints, evaluation, prediction, reports. Try it in Python or on the command line:

    python own_method.py
    ropaws train --recipe demo --method own_method:OwnMethod --method.confidence 0.9

The first line takes 40 steps on the embedded images, five classes with four labels each. Expect an accuracy
of about 55 percent (chance: 20). The second line takes 400 steps and gets about 67 percent, but FixMatch is
then as confident on out-of-class images as on the others (AUROC below 0.5), which is what RoPAWS is for.
"""

import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

import ropaws
from ropaws.core.distributed import all_mean
from ropaws.core.records import Losses
from ropaws.methods.classifier import EMA
from ropaws.pool.rand_augment import StrongView, WeakView
from ropaws.run.config import with_method, with_steps


@dataclass(frozen=True, kw_only=True)
class OwnMethod(ropaws.Method):
    """FixMatch (Sohn et al., 2020). Each field is a setting: `--method.confidence`, `--method.decay`."""

    confidence: float = 0.95
    """Probability from which a guess becomes a label."""
    decay: float = 0.99
    """Of the averaged weights, which predict; 0.999 for a long training."""

    optim: ClassVar = {"name": "sgd", "schedule": "fixmatch", "peak": 0.03, "weight_decay": 5e-4}

    def views(self, augment):
        return {"weak": WeakView(size=augment.size), "strong": StrongView(size=augment.size)}

    def labeled_view(self, augment):
        return WeakView(size=augment.size)

    def build(self, encoder, *, classes, pool):
        head = nn.Linear(encoder.feature_dims, classes)
        averages = {"slow_encoder": EMA(encoder, decay=self.decay), "slow_head": EMA(head, decay=self.decay)}
        return nn.ModuleDict({"encoder": encoder, "head": head, **averages})

    def step(self, model, batch):
        parts = [batch.labeled.images, batch.views["weak"], batch.views["strong"]]
        # One pass through the network, so that batch norm sees all images together.
        logits = model["head"](model["encoder"].features(torch.cat(parts)))
        labeled, weak, strong = logits.split([len(part) for part in parts])
        rows = all_mean(labeled.new_tensor(len(labeled)))  # of a process: they may have unequal numbers
        supervised = F.cross_entropy(labeled, batch.labeled.classes, reduction="sum") / rows
        probability, guess = weak.detach().softmax(dim=1).max(dim=1)
        confident = (probability >= self.confidence).float()
        # The mean over all rows, not over the confident ones: few guesses have little weight.
        consistency = (confident * F.cross_entropy(strong, guess, reduction="none")).mean()
        shown = {"supervised": supervised, "consistency": consistency, "confident": confident.mean()}
        return Losses(supervised + consistency, {name: value.detach() for name, value in shown.items()})

    def after_step(self, model, batch):
        model["slow_encoder"].update(model["encoder"])
        model["slow_head"].update(model["head"])

    def embed(self, model, images):
        return F.normalize(model["slow_encoder"].module.features(images), dim=1)

    def predict(self, model, images, support):
        features = model["slow_encoder"].module.features(images)
        probs = model["slow_head"](features).softmax(dim=1)
        # In-domain probability by the similarity to labeled images; ranked by the largest probability.
        near = self.classify(F.normalize(features, dim=1), support)
        return near._replace(probs=probs, score=probs.amax(dim=1))


if __name__ == "__main__":
    import own_method  # by its name: the run folder keeps `own_method:OwnMethod`, not `__main__:OwnMethod`

    out = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
    config = with_steps(with_method(ropaws.recipes.demo(), own_method.OwnMethod(decay=0.9)), 40)
    config = replace(config, train=replace(config.train, batch=64))
    run = ropaws.train(config, out / "own-method")
    figures = ropaws.evaluate(run, only=["soft-nn"])
    print(f"{run}: accuracy {figures['accuracy']:.1%}, out-of-class AUROC {figures['auroc']:.3f}")

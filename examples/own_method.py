"""A method of your own: FixMatch, complete, in one small class below `ropaws.Method`.

The network guesses the class of a weak view of each unlabeled image; where it is sure, a strong view of the
same image has to get that class. The package does the rest: data, training, checkpoints, evaluation, reports.

    python own_method.py                                             # 100 steps on the embedded images
    ropaws train --recipe demo --method own_method:OwnMethod         # in this folder; --method.confidence 0.8

Expect about 75 percent accuracy on five classes of clothes, from four labels per class.
"""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ropaws
from ropaws.batch import Batch, Losses, Outputs
from ropaws.config import with_method, with_steps
from ropaws.data.augment import AugmentConfig, View
from ropaws.data.rand_augment import StrongView, WeakView
from ropaws.methods import LabeledEmbeddings
from ropaws.models import Encoder
from ropaws.models.ema import EMA


class Network(nn.Module):
    def __init__(self, encoder: Encoder, classes: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.linear = nn.Linear(encoder.feature_dims, classes)

    def forward(self, images):
        features = self.encoder.features(images)
        return features, self.linear(features)


@dataclass(frozen=True, kw_only=True)
class OwnMethod(ropaws.Method):
    """FixMatch (Sohn et al., 2020)."""

    confidence: float = 0.95
    decay: float = 0.99
    optim = {"name": "sgd", "schedule": "fixmatch", "peak": 0.03, "weight_decay": 5e-4}

    def views(self, augment):
        return {"weak": WeakView(size=augment.size), "strong": StrongView(size=augment.size)}

    def labeled_view(self, augment):
        return WeakView(size=augment.size)

    def build(self, encoder, *, classes, pool):
        network = Network(encoder, classes)
        return Model(network, self.decay)

    def step(self, model, batch):
        images = [batch.labeled.images, batch.views["weak"], batch.views["strong"]]
        _, logits = model.network(torch.cat(images))
        known, weak, strong = logits.split([len(part) for part in images])
        probability, guess = weak.detach().softmax(dim=1).max(dim=1)
        sure = (probability >= self.confidence).float()
        supervised = F.cross_entropy(known, batch.labeled.classes)
        unsupervised = (sure * F.cross_entropy(strong, guess, reduction="none")).mean()
        parts = {"supervised": supervised.detach(), "unsupervised": unsupervised.detach(), "sure": sure.mean()}
        return Losses(supervised + unsupervised, parts)

    def after_step(self, model, batch):
        model.average.update(model.network)

    def embed(self, model, images):
        return F.normalize(model.average(images)[0], dim=1)

    def predict(self, model, images, support):
        features, logits = model.average(images)
        near = self.classify(F.normalize(features, dim=1), support)
        probs = logits.softmax(dim=1)
        return near._replace(probs=probs, score=probs.amax(dim=1))


class Model(nn.Module):
    def __init__(self, network, decay):
        super().__init__()
        self.network, self.average = network, EMA(network, decay=decay)

    @property
    def encoder(self):
        return self.network.encoder


if __name__ == "__main__":
    import own_method
    import time
    for steps, kw in [(60,{"decay":.9}),(100,{"decay":.9}),(100,{"decay":.95}),(100,{"confidence":.8,"decay":.9})]:
        config = with_steps(with_method(ropaws.recipes.demo(), own_method.OwnMethod(**kw)), steps)
        t=time.time()
        run = ropaws.train(config, Path(tempfile.mkdtemp()) / "own-method")
        t=time.time()-t
        figures = ropaws.evaluate(run, only=["soft-nn"])
        print(steps, kw, t, figures["accuracy"], figures["auroc"], open(run/"metrics.jsonl").readlines()[-1])

"""Heads on features trained by any method through the training loop, for the rivals of the benchmarks."""

import torch
from torch import nn

from ropaws.classify import head
from ropaws.classify.head import LabeledRows
from ropaws.core.features import FeatureRows, principal_components
from ropaws.core.optimizers import build_optimizer, learning_rate
from ropaws.embedding.backbones import Encoder
from ropaws.embedding.encoder import ComponentsHead, KnownFeatures, linear_head
from ropaws.methods import Method
from ropaws.pool.augment import AugmentConfig, Normalization
from ropaws.run.own_data import HEAD_OPTIM
from ropaws.run.train_state import in_main_directions
from ropaws.training.loaders import BatchStream, TrainingData
from ropaws.training.loop import fit


def start_encoder(features: FeatureRows) -> Encoder:
    """A head on features that has not been trained: neighbors are those of the features themselves."""
    dims = features.shape[1]
    projection = linear_head(dims, min(head.DIMS, dims))
    first = projection[0]
    assert isinstance(first, ComponentsHead)
    first.start(*principal_components(features, first.out_features))
    return Encoder(KnownFeatures(dims), projection, nn.Identity(), frozen=True)


def train_head(
    encoder: Encoder, features: FeatureRows, labeled: LabeledRows, method: Method, *, steps: int, seed: int
) -> nn.Module:
    """Train the head of an encoder that start_encoder made. Returns the model, in evaluation mode."""
    several = features.random_views is not None
    model = method.build(encoder, classes=labeled.classes, pool=len(features))
    augment = AugmentConfig(small_crops=2 if several else 0)
    counts = torch.bincount(labeled.labels, minlength=labeled.classes).tolist()
    rows = in_main_directions(features, encoder)
    stream = BatchStream(
        TrainingData(rows, labeled.rows, labeled.labels, Normalization((0.0,), (1.0,))),
        method.views(augment),
        method.labeled_view(augment),
        head.head_support(counts, views=head.SUPPORT_VIEWS if several else 1),
        min(head.BATCH, len(features)),
        seed,
        augment.size,
    )
    rate = learning_rate(HEAD_OPTIM, steps)
    optimizer = build_optimizer(model, HEAD_OPTIM)
    for _ in fit(model, method, stream.batches(0, steps), optimizer, rate, pool_pass=stream.pool_pass):
        pass
    return model.eval()

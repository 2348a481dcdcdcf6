"""A small model of a method and a batch of features, so that a step can be followed by hand."""

import torch
import torch.nn.functional as F

from ropaws.core.records import Batch, Support
from ropaws.embedding.backbones import ModelConfig, build_encoder

CLASSES = 3
POOL = 20
CONFIG = ModelConfig(backbone="small-8", projection_hidden=6, projection_dims=5)


def make_model(method, *, scale=1.0):
    """In float64; its heads have larger weights with scale, so that it is surer of what it says."""
    torch.manual_seed(0)
    model = method.build(build_encoder(CONFIG, channels=3), classes=CLASSES, pool=POOL).double().train()
    with torch.no_grad():
        for head in (model.network.heads, model.predictor.heads):
            for weight in head.parameters():
                weight.mul_(scale)
    return model


def make_batch(roles, *, dims, step=5, unlabeled=10, seed=1):
    """Features (n, dims) in the place of images; the rows of a role are the same whatever the others are."""
    random = torch.Generator().manual_seed(seed)
    labeled = torch.randn(6, dims, generator=random, dtype=torch.float64)
    center = torch.randn(unlabeled, dims, generator=random, dtype=torch.float64)
    views = {
        role: center + 0.3 * torch.randn(unlabeled, dims, generator=random, dtype=torch.float64)
        for role in roles
    }
    classes = torch.tensor([0, 1, 2, 2, 1, 0])
    support = Support(labeled, F.one_hot(classes, CLASSES).double(), torch.arange(6), classes)
    return Batch(step, 10, views, torch.arange(unlabeled) + 3, support, seed=step)


def touched(module):
    """Names of the weights with a gradient that is not zero."""
    return {
        name
        for name, weight in module.named_parameters()
        if weight.grad is not None and weight.grad.abs().sum() > 0
    }

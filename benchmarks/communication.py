"""What the processes of a step send and receive, and what the posterior needs: arithmetic, by world size.

python benchmarks/communication.py      a second; writes results/communication.json

Bytes that one process sends in one step of the paper's ImageNet setting (ResNet-50, 4096 unlabeled images of
eight views, 6720 supports, 2048 dimensions), with rings: an all-reduce of n bytes sends 2 n (P - 1) / P, an
all-gather of n bytes in total n (P - 1) / P. Shapes are the recipe's; norm layers are counted.
"""

import torch
from timing import write_results
from torch import nn

from ropaws import recipes
from ropaws.models import build_encoder

FLOAT = 4  # bytes
MEGABYTE = 1e6


def main() -> None:
    config = recipes.get("imagenet-1")
    with torch.device("meta"):
        model = build_encoder(config.model, channels=3)
    parameters = sum(p.numel() for p in model.parameters())
    channels = sum(m.num_features for m in model.modules() if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d))
    batch, dims = config.train.batch, config.model.projection_dims
    classes = config.support.classes or 0
    supports = classes * config.support.images_per_class * config.support.views
    sizes = 2  # of crops: each goes through the network on its own
    reduced = {
        "gradients": parameters,
        "gradient of the gathered supports": supports * dims,
        # sums and squared distances, forward and backward
        "batch norm": sizes * channels * 2 * 2,
        "mean prediction, forward and backward": 2 * classes,
    }
    gathered = {
        "supports, both sides": 2 * supports * dims,
        "labels and identities of supports": supports * (classes + 2),
        "unlabeled targets, two views": 2 * batch * dims,
        "iterative solver, each round of both views": 2 * batch * classes,
    }
    table = {}
    for processes in (1, 2, 8, 16, 64):
        ring = (processes - 1) / processes
        row = {name: 2 * count * FLOAT * ring / MEGABYTE for name, count in reduced.items()}
        row |= {name: count * FLOAT * ring / MEGABYTE for name, count in gathered.items()}
        total = sum(value for name, value in row.items() if not name.startswith("iterative"))
        table[str(processes)] = {**{k: round(v, 1) for k, v in row.items()}, "total": round(total, 1)}
    votes = batch * (batch + supports) * FLOAT / MEGABYTE
    memory = {
        "votes of all rows": round(votes, 1),
        "votes of own rows, 64 processes": round(votes / 64, 1),
        "matrix to solve": round(batch * batch * FLOAT / MEGABYTE, 1),
        "similarities of anchors to supports, 64 processes": round(
            8 * batch / 64 * supports * FLOAT / MEGABYTE, 1
        ),
        "gathered supports, both sides": round(2 * supports * dims * FLOAT / MEGABYTE, 1),
    }
    write_results(
        "communication",
        {"megabytes_sent_a_step": table, "megabytes_held": memory, "parameters": parameters},
    )


if __name__ == "__main__":
    main()

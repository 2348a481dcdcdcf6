"""What analyses ask of the images of a run: what they are, which can be read, whether they have changed."""

import hashlib

import torch
from torch import Tensor

from ropaws.data.corpus import UNKNOWN, Corpus, Images
from ropaws.data.datasets.mixes import MIXES
from ropaws.data.datasets.truth import embedded_truth
from ropaws.data.features import EmbeddedImages
from ropaws.data.files.streaming import ImageStack
from ropaws.data.sources import DataConfig
from ropaws.runs.facts import digest_images
from ropaws.runs.outputs import HIDDEN, OUT

# Datasets without an unlabeled image of their own: what has no label there came with data.extra.
FULLY_LABELED = ("cifar10", "cifar100", "svhn", "tiny-imagenet", "fashion-mnist", "imagenet")


def fingerprint(corpus: Corpus) -> Tensor:
    """Of all that analyses take from the data beside the training images.   ->  (k,) uint8"""
    state = hashlib.blake2b(digest_images(corpus.test_images).encode(), digest_size=16)
    for labels in (corpus.test_labels, corpus.train_labels):
        state.update(labels.numpy().tobytes())
    return torch.tensor(list(state.digest()), dtype=torch.uint8)


def readable_among(images: Images, index: Tensor) -> Tensor:
    """The positions of images that can be read.   (k,)  ->  (at most k,)"""
    if isinstance(images, EmbeddedImages):
        bad = images.reasons
    elif isinstance(images, ImageStack):
        bad = images.unreadable(index)
    else:
        return index
    return index[torch.tensor([position not in bad for position in index.tolist()], dtype=torch.bool)]


def pool_truth(corpus: Corpus, data: DataConfig) -> Tensor:
    """What every training image is, as far as it is known: class, OUT or HIDDEN.   ->  (n,)"""
    truth = corpus.train_labels
    if data.labeled is None and data.source == "fashion-demo" and not data.extra:
        known = embedded_truth().labels  # the classes come first, then what is out-of-class
        return torch.where(known < len(corpus.class_names), known, OUT)
    known_parts = data.source in MIXES or (bool(data.extra) and data.source in FULLY_LABELED)
    return truth if data.labeled is None and known_parts else torch.where(truth == UNKNOWN, HIDDEN, truth)

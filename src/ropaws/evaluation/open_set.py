"""Accuracy where out-of-class images count as a class of their own."""

import torch
from torch import Tensor

OUT = -1


def balanced_accuracy(predicted: Tensor, truth: Tensor, *, classes: int) -> float:
    """Mean share of images that are recognized, over the known classes and the out-of-class images.

    As in IOMatch: C + 1 classes that count alike. A class without a test image does not count.
    both (n,): a class, or -1 for out-of-class
    """
    shares = [
        (predicted[truth == label] == label).double().mean()
        for label in (*range(classes), OUT)
        if bool((truth == label).any())
    ]
    if not shares:
        raise ValueError("no test image to count on")
    return float(torch.stack(shares).mean())

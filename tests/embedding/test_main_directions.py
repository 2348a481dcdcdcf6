"""Cached views in the main directions of a linear head: the same numbers, computed once."""

import torch
from torch import nn

from ropaws.core.features import FeatureRows
from ropaws.embedding.encoder import Encoder, KnownFeatures, linear_head, projection_head
from ropaws.pool.corpus import EmbeddedImages, features_of
from ropaws.run import train_state
from ropaws.run.train_state import DirectedFeatures, in_main_directions


def make(inputs=7, outputs=3):
    random = torch.Generator().manual_seed(0)
    rows = FeatureRows(
        torch.randn(20, inputs, generator=random), torch.randn(20, 4, inputs, generator=random).half()
    )
    encoder = Encoder(KnownFeatures(inputs), linear_head(inputs, outputs), nn.Identity(), frozen=True)
    head = encoder.projection[0]
    head.start(torch.randn(inputs, generator=random), torch.randn(outputs, inputs, generator=random))
    nn.init.normal_(head.weight)
    return rows, encoder


def test_the_network_says_the_same_of_them():
    rows, encoder = make()
    directed = in_main_directions(rows, encoder)
    assert isinstance(directed, DirectedFeatures)
    index, chosen = torch.tensor([3, 11]), torch.tensor([[1, 2], [0, 3]])
    plain, quick = (images.views(index, chosen=chosen) for images in (rows, directed))
    assert quick.shape == (2, 2, 3)
    for view in range(2):
        one, other = encoder([plain[:, view]])[0], encoder([quick[:, view]])[0]
        torch.testing.assert_close(other.h, one.h)
        torch.testing.assert_close(
            encoder.trained_features(quick[:, view]), encoder.trained_features(plain[:, view])
        )
    assert torch.equal(directed[index], rows[index])  # the center view stays as it is
    assert directed.digest() == rows.digest()


def test_they_are_computed_once():
    rows, encoder = make()
    directed = in_main_directions(rows, encoder)
    calls = []
    real = directed.direct
    directed.direct = lambda part: calls.append(len(part)) or real(part)
    for _ in range(3):
        directed.views(torch.arange(5))
    assert calls == [20]


def test_where_it_does_not_apply_the_images_stay(monkeypatch):
    rows, encoder = make()
    mlp = Encoder(KnownFeatures(7), projection_head(7, 5, 3), nn.Identity(), frozen=True)
    assert in_main_directions(rows, mlp) is rows
    square = make(inputs=3)
    assert in_main_directions(*square) is square[0]  # directions could not be told from features
    pixels = torch.zeros(20, 1, 4, 4, dtype=torch.uint8)
    assert in_main_directions(pixels, encoder) is pixels
    embedded = in_main_directions(EmbeddedImages(pixels, rows, {1: 2}, {1: "broken"}), encoder)
    assert isinstance(features_of(embedded), DirectedFeatures)
    assert embedded.replaced == {1: 2}
    monkeypatch.setattr(train_state, "IN_MEMORY", 10)
    assert in_main_directions(rows, encoder) is rows

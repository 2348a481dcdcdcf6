"""Probabilities that mean what they say."""

import math

import pytest
import torch

from ropaws.classify.calibration import calibrated_temperature, expected_accuracy, mixed_probs


def classifiers(count=2000, classes=4, agree=0.8, seed=0):
    """Two classifiers that are sure of themselves, and agree so often."""
    random = torch.Generator().manual_seed(seed)
    first = torch.randint(classes, (count,), generator=random)
    same = torch.rand(count, generator=random) < agree
    second = torch.where(same, first, (first + 1) % classes)
    logits = 6 * torch.nn.functional.one_hot(first, classes).float()
    other = 4 * torch.nn.functional.one_hot(second, classes).float()
    return logits.softmax(dim=1), other.log_softmax(dim=1)


def test_the_mix_is_a_geometric_mean():
    near, regression = torch.tensor([[0.8, 0.2]]), torch.tensor([[0.5, 0.5]]).log()
    weights = torch.tensor([0.8, 0.2]) ** 0.5
    torch.testing.assert_close(mixed_probs(near, regression, 0.5)[0], weights / weights.sum())
    torch.testing.assert_close(mixed_probs(near, regression, 0.0), near)
    torch.testing.assert_close(mixed_probs(near, regression, 1.0), regression.exp())
    assert mixed_probs(near, regression, 0.0, 3.0)[0, 0] < 0.8


@pytest.mark.parametrize("held_out", [0.5, 0.7, math.nan])
def test_the_mean_confidence_becomes_the_expected_accuracy(held_out):
    near, regression = classifiers()
    agreement = float((near.argmax(dim=1) == regression.argmax(dim=1)).float().mean())
    temperature = calibrated_temperature(near, regression, torch.ones(2000), share=0.5, held_out=held_out)
    sure = mixed_probs(near, regression, 0.5, temperature).amax(dim=1).mean()
    assert float(sure) == pytest.approx(expected_accuracy(agreement, held_out, 4), abs=1e-4)


def test_images_that_look_out_of_class_do_not_count():
    near, regression = classifiers(agree=0.9)
    odd, odd_regression = classifiers(agree=0.2, seed=1)
    weights = torch.cat([torch.ones(2000), torch.zeros(2000)])
    both = torch.cat([near, odd]), torch.cat([regression, odd_regression])
    found = calibrated_temperature(*both, weights, share=0.5, held_out=0.8)
    assert found == pytest.approx(
        calibrated_temperature(near, regression, torch.ones(2000), share=0.5, held_out=0.8)
    )


def test_an_expectation_is_never_below_chance_nor_certain():
    assert expected_accuracy(0.1, 0.0, 4) == 0.25
    assert expected_accuracy(1.0, 1.0, 4) == 0.99
    assert expected_accuracy(0.8, math.nan, 4) < expected_accuracy(0.8, 0.75, 4)


def test_without_images_or_with_one_class_the_temperature_is_one():
    near, regression = classifiers(count=5)
    assert calibrated_temperature(near[:0], regression[:0], torch.ones(0), share=0.5, held_out=0.5) == 1
    assert calibrated_temperature(near, regression, torch.zeros(5), share=0.5, held_out=0.5) == 1
    one = torch.ones(5, 1)
    assert calibrated_temperature(one, one.log(), torch.ones(5), share=0.5, held_out=0.5) == 1

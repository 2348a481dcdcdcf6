import pytest
import torch

from ropaws.insight.baselines import fit_sskde, median_gamma
from ropaws.insight.metrics import balanced_accuracy


def test_out_of_class_images_count_as_one_class():
    truth = torch.tensor([0, 0, 0, 0, 1, -2, -2])
    predicted = torch.tensor([0, 0, 0, -2, 0, -2, 1])
    assert balanced_accuracy(predicted, truth) == pytest.approx((3 / 4 + 0 + 1 / 2) / 3)
    assert balanced_accuracy(truth, truth) == 1


def test_a_class_without_tests_does_not_count():
    truth = torch.tensor([0, 0])
    assert balanced_accuracy(truth, truth) == 1
    with pytest.raises(ValueError, match="no test image"):
        balanced_accuracy(truth[:0], truth[:0])


def test_median_bandwidth_of_sskde():
    points = torch.tensor([[0.0], [1.0], [3.0]], dtype=torch.float64)  # squares 1, 4, 9
    assert median_gamma(points) == pytest.approx(1 / 4)
    assert median_gamma(points[:1].repeat(3, 1)) == 1.0


def test_the_median_bandwidth_makes_sskde_follow_clusters():
    """Two clusters in 128 dimensions: with the flat kernel confidence hardly leaves one half."""
    random = torch.Generator().manual_seed(0)
    centers = torch.nn.functional.normalize(torch.randn(2, 128, generator=random), dim=1)
    labels = torch.arange(2).repeat_interleave(30)
    rows = torch.nn.functional.normalize(
        centers[labels] + 0.05 * torch.randn(60, 128, generator=random), dim=1
    )
    chosen = torch.tensor([0, 30])
    flat, median = (
        fit_sskde(rows[chosen], labels[chosen], rows, classes=2, bandwidth=kind)(rows)
        for kind in ("flat", "median")
    )
    assert (median.argmax(dim=1) == labels).all()
    assert median.amax(dim=1).mean() > flat.amax(dim=1).mean()

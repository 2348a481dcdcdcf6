import numpy as np
import pytest
import torch
import torch.nn.functional as F

import ropaws
from ropaws import equations as eq
from ropaws.classify.soft_nn import LabeledEmbeddings, class_probabilities, max_similarity
from ropaws.insight.metrics import detection, evaluation_figures, expected_calibration_error
from ropaws.insight.neighbors import tsne
from ropaws.methods import PAWS
from ropaws.run.run import Run
from tests import tiny


def rows(n, seed):
    return F.normalize(torch.randn(n, 4, generator=torch.Generator().manual_seed(seed)), dim=1)


def test_predictions_do_not_depend_on_the_block_size(monkeypatch):
    support = LabeledEmbeddings(rows(6, 1), torch.tensor([0, 1, 2, 2, 1, 0]), 3)
    whole = class_probabilities(rows(20, 0), support, temperature=0.1)
    monkeypatch.setattr("ropaws.classify.soft_nn.BLOCK", 3)
    blocks = class_probabilities(rows(20, 0), support, temperature=0.1)
    torch.testing.assert_close(whole, blocks)
    torch.testing.assert_close(
        whole, eq.soft_nn(rows(20, 0), rows(6, 1), F.one_hot(support.labels, 3).float())
    )


def test_a_class_is_not_likelier_for_having_more_labels():
    """Bayes' rule on class densities, each the mean over the labels of its class; one has no label."""
    labels = torch.tensor([0, 1, 2, 2, 2])
    queries, support = rows(20, 0), rows(5, 1)
    found = class_probabilities(queries, LabeledEmbeddings(support, labels, 4), temperature=0.1)
    kernel = (queries @ support.T / 0.1).exp()
    densities = torch.stack([kernel[:, labels == c].mean(dim=1) for c in range(3)], dim=1)
    torch.testing.assert_close(found[:, :3], densities / densities.sum(dim=1, keepdim=True))
    assert (found[:, 3] == 0).all()


def classified(queries, support, labels):
    """What the soft nearest-neighbor classifier says of embeddings."""
    return PAWS(temperature=0.1).classify(queries, LabeledEmbeddings(support, labels, 2))


def test_figures_of_a_case_worked_by_hand():
    """Supports on two axes; in-class queries on them (one wrongly labeled), out-of-class ones between."""
    support, labels = torch.eye(3)[:2], torch.tensor([0, 1])
    between = F.normalize(torch.tensor([[1.0, 1.0, 5.0]]), dim=1)
    queries = torch.cat([support, support[:1], between, between])
    truth = torch.tensor([0, 1, 1, -1, -1])
    results = evaluation_figures(classified(queries, support, labels), truth)
    sure = 1 / (1 + np.exp(-10))
    assert results["accuracy"] == pytest.approx(2 / 3)
    assert results["confidence_in"] == pytest.approx(sure)
    assert results["confidence_out"] == pytest.approx(0.5)
    assert results["auroc"] == 1.0
    assert results["ece"] == pytest.approx(abs(sure - 2 / 3), abs=1e-6)


def test_ece_is_the_bin_by_bin_gap():
    random = np.random.default_rng(0)
    probs = random.dirichlet([0.5, 0.5, 0.5], 200)
    truth = random.integers(0, 3, 200)
    confidence, right = probs.max(1), probs.argmax(1) == truth
    expected = 0.0
    for low in range(15):
        inside = (confidence > low / 15) & (confidence <= (low + 1) / 15)
        if inside.any():
            expected += inside.mean() * abs(confidence[inside].mean() - right[inside].mean())
    actual = expected_calibration_error(torch.tensor(probs), torch.tensor(truth))
    assert actual == pytest.approx(expected, abs=1e-6)


def test_ece_keeps_confidences_of_exactly_one_in_a_bin_of_their_own():
    probs = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.95, 0.05], [0.95, 0.05]])
    truth = torch.tensor([0, 1, 0, 0])
    assert expected_calibration_error(probs, truth) == pytest.approx((2 * 0.5 + 2 * 0.05) / 4, abs=1e-6)


def test_infinite_scores_are_the_lowest_and_highest_ones():
    scores, in_class = torch.tensor([torch.inf, 0.0, -torch.inf, 1.0]), torch.tensor([1, 0, 0, 1]) == 1
    assert detection(scores, in_class) == (1.0, 0.0, 1.0, 1.0)


def test_auroc_counts_pairs_and_keeps_close_scores_apart():
    scores = torch.tensor([0.99999, 0.99998, 0.5, -0.3])
    in_class = torch.tensor([True, False, True, False])
    assert detection(scores, in_class).auroc == pytest.approx(3 / 4)
    near = torch.cat([1 + 1e-7 + torch.zeros(1), 1 - 1e-6 * torch.arange(1, 10)])
    assert detection(near, torch.tensor([True] * 5 + [False] * 5)).auroc == 1.0


def test_detection_knows_ranks_only():
    random = np.random.default_rng(0)
    scores = torch.tensor(random.normal(0.5, 0.3, 200))
    in_class = torch.tensor(random.random(200) < 0.5)
    found = detection(scores, in_class)
    assert detection(1e6 * scores - 5, in_class) == found
    assert detection(scores.exp(), in_class) == found
    assert detection(torch.zeros(200), in_class).auroc == 0.5


def test_max_similarity_is_that_of_the_nearest_support(monkeypatch):
    queries, support = rows(7, 0), rows(5, 1)
    expected = torch.stack([(support @ q).max() for q in queries])
    monkeypatch.setattr("ropaws.classify.soft_nn.BLOCK", 2)
    torch.testing.assert_close(max_similarity(queries, support), expected)


def test_embeddings_do_not_depend_on_the_batch(tmp_path, monkeypatch):
    data = tiny.write_data(tmp_path / "data.npz")
    run = Run(ropaws.train(tiny.config(data, steps=2), tmp_path / "run"))
    random = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (9, 1, 20, 16), dtype=torch.uint8, generator=random)
    whole, outputs = run.embed(images), run.outputs(images)
    monkeypatch.setattr("ropaws.run.run.BATCH", 4)
    torch.testing.assert_close(run.embed(images), whole)
    # Temperatures as low as 0.01 multiply rounding errors of the embedding.
    torch.testing.assert_close(run.outputs(images), outputs, atol=1e-4, rtol=0)
    torch.testing.assert_close(outputs.embedding, whole)
    torch.testing.assert_close(whole.norm(dim=1), torch.ones(9))
    assert not run.model.training
    for nothing in (run.embed(images[:0]), *run.outputs(images[:0])):
        assert len(nothing) == 0


def test_tsne_separates_two_far_groups():
    groups = torch.cat([F.normalize(torch.eye(4)[i] + 0.05 * rows(20, i), dim=1) for i in (0, 1)])
    points = tsne(groups)
    assert points.shape == (40, 2)
    between = np.linalg.norm(points[:20].mean(0) - points[20:].mean(0))
    assert between > 2 * points[:20].std()
    with pytest.raises(ValueError, match="at least 4 points"):
        tsne(groups[:3])


def test_without_in_class_test_images_there_is_nothing_to_say():
    outputs = classified(rows(2, 0), rows(2, 1), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="no in-class test image"):
        evaluation_figures(outputs, torch.tensor([-1, -1]))

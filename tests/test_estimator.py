import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.utils.estimator_checks import parametrize_with_checks

import ropaws
from ropaws import RoPAWSClassifier
from ropaws import equations as eq
from tests.evaluation.test_pool import blobs


@parametrize_with_checks(
    [RoPAWSClassifier()],
    expected_failed_checks=lambda _: {
        "check_classifiers_classes": "takes -1 for a class, here it is unlabeled"
    },
)
def test_it_is_a_scikit_learn_estimator(estimator, check):
    check(estimator)


def semi(seed=0, labels_each=2):
    """Four clusters, the last of which has no label."""
    points, truth = blobs(60, 4, seed=seed)
    y = np.full(240, -1)
    for label in range(3):
        y[np.flatnonzero(truth.numpy() == label)[:labels_each]] = label
    return points.numpy(), y, truth.numpy()


def test_it_spreads_labels_and_knows_what_is_of_no_class():
    points, y, truth = semi()
    model = RoPAWSClassifier().fit(points, y)
    known = truth < 3
    assert (model.predict(points[known]) == truth[known]).mean() > 0.98
    assert (model.transduction_[known] == truth[known]).mean() > 0.98
    inside = model.in_domain(points)
    assert inside[known].mean() > 0.5 > 3 * inside[~known].mean()
    probs = model.predict_proba(points)
    np.testing.assert_allclose(probs.sum(axis=1), 1, rtol=1e-5)
    assert probs[~known].max(axis=1).mean() < probs[known].max(axis=1).mean()


def test_without_unlabeled_rows_and_prior_it_is_paws():
    points, truth = blobs(10, 3, seed=1)
    model = RoPAWSClassifier(temperature=0.1, prior_temperature=None).fit(points.numpy(), truth.numpy())
    queries, _ = blobs(4, 3, seed=2)
    expected = eq.soft_nn(queries, points, F.one_hot(truth, 3).float(), temperature=0.1)
    np.testing.assert_allclose(model.predict_proba(queries.numpy()), expected, rtol=1e-5)
    np.testing.assert_allclose(model.in_domain(queries.numpy()), 1, rtol=1e-6)


def test_unlabeled_rows_get_the_closed_form():
    points, y, _ = semi()
    model = RoPAWSClassifier(temperature=0.1, prior_temperature=0.2).fit(points, y)
    rows = F.normalize(torch.from_numpy(points), dim=1)
    support, labels = rows[y >= 0], F.one_hot(torch.from_numpy(y[y >= 0]), 3).float()
    expected = eq.ropaws_posterior(rows[y < 0], support, labels, prior_temperature=0.2)
    assert np.array_equal(model.transduction_[y < 0], expected.probs.argmax(dim=1).numpy())


def test_it_scales_rows_itself_and_does_not_mind_their_length():
    points, y, _ = semi()
    lengths = np.random.default_rng(0).uniform(0.1, 10, (len(points), 1)).astype(np.float32)
    plain, scaled = (RoPAWSClassifier().fit(x, y).predict_proba(points) for x in (points, points * lengths))
    np.testing.assert_allclose(plain, scaled, rtol=1e-3, atol=1e-5)


def test_labels_keep_their_names_and_lack_of_labels_is_an_error():
    points, truth = blobs(10, 2, seed=3)
    names = np.array(["cat", "dog"])[truth.numpy()]
    assert set(RoPAWSClassifier().fit(points.numpy(), names).predict(points.numpy())) == {"cat", "dog"}
    with pytest.raises(ValueError, match="every entry is -1"):
        RoPAWSClassifier().fit(points.numpy(), np.full(20, -1))


def test_it_is_as_good_as_nearest_neighbors_on_digits():
    from sklearn.datasets import load_digits

    pixels, truth = load_digits(return_X_y=True)
    hidden = np.random.default_rng(0).random(len(truth)) < 0.9
    y = np.where(hidden, -1, truth)
    model = RoPAWSClassifier().fit(pixels, y)
    assert (model.transduction_[hidden] == truth[hidden]).mean() > 0.95
    fixed = RoPAWSClassifier(temperature=0.1).fit(pixels, y)
    assert model.temperature_ < fixed.temperature_ == 0.1


def test_the_text_minus_one_is_not_taken_for_a_class():
    points, truth = blobs(10, 2, seed=3)
    names = np.array(["-1", "dog"])[truth.numpy()]
    with pytest.raises(ValueError, match="the text '-1'"):
        RoPAWSClassifier().fit(points.numpy(), names)


def test_names_may_be_mixed_with_unlabeled_rows_and_chance_may_be_of_any_kind():
    points, y, truth = semi()
    names = np.array(["cat", "dog", "owl"], object)
    mixed = np.array([names[label] if label >= 0 else -1 for label in y], object)
    for random_state in (None, np.random.RandomState(0), 3):
        model = RoPAWSClassifier(voters=20, random_state=random_state).fit(points, mixed)
        known = truth < 3
        assert (model.predict(points[known]) == names[truth[known]]).mean() > 0.98


def test_it_is_a_public_name():
    assert ropaws.RoPAWSClassifier is RoPAWSClassifier


def test_a_class_with_few_labels_keeps_its_say_with_and_without_unlabeled_rows():
    random = np.random.default_rng(0)
    points = random.normal(size=(12, 4)) * 0.3 + np.where(np.arange(12) < 11, 1, -1)[:, None]
    labels = np.array([0] * 11 + [1])
    queries = random.normal(size=(200, 4)) * 0.3 - 1
    for rows, y in ((points, labels), (np.vstack([points, queries[:5]]), np.append(labels, [-1] * 5))):
        model = RoPAWSClassifier(temperature=1.0, prior_temperature=None).fit(rows, y)
        assert (model.predict(queries) == 1).mean() > 0.95

import pickle
import re

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from sklearn.base import clone
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks
from sklearn.utils.validation import has_fit_parameter

import ropaws
from ropaws import RoPAWSClassifier
from ropaws import equations as eq
from ropaws.classify import classifier
from ropaws.classify.head import LabeledRows, Points
from ropaws.insight.metrics import detection
from tests.insight.test_pool import blobs


@parametrize_with_checks(
    [RoPAWSClassifier(steps=3), RoPAWSClassifier(head=None)],
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


def prepared(points, around):
    """As the estimator sees rows: unit length, centered."""
    return F.normalize(F.normalize(points, dim=1) - F.normalize(around, dim=1).mean(dim=0), dim=1)


@pytest.mark.parametrize("head", ["linear", None])
def test_it_spreads_labels_and_knows_what_is_of_no_class(head):
    points, y, truth = semi(labels_each=4)
    model = RoPAWSClassifier(head=head).fit(points, y)
    known = truth < 3
    assert model.head_ == head
    assert (model.predict(points[known]) == truth[known]).mean() > 0.98
    assert (model.transduction_[known] == truth[known]).mean() > 0.98
    inside = model.in_domain(points)
    assert inside[known].mean() > 0.7
    assert inside[~known].mean() < 0.3
    assert detection(torch.from_numpy(model.score_in_domain(points)), torch.from_numpy(known)).auroc > 0.99
    assert model.in_class_share_.low <= 0.75 <= model.in_class_share_.high
    np.testing.assert_allclose(model.predict_proba(points).sum(axis=1), 1, rtol=1e-9)


def test_without_unlabeled_rows_prior_and_regression_it_is_paws():
    points, truth = blobs(10, 3, seed=1)
    model = RoPAWSClassifier(head=None, temperature=0.1, prior=None, regression_share=0, lengths=False)
    model.fit(points.numpy(), truth.numpy())
    queries, _ = blobs(4, 3, seed=2)
    expected = eq.soft_nn(
        prepared(queries, points), prepared(points, points), F.one_hot(truth, 3).float(), temperature=0.1
    )
    np.testing.assert_allclose(model.predict_proba(queries.numpy()), expected, rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(model.in_domain(queries.numpy()), 1, rtol=1e-6)


def test_without_a_head_labels_propagate_to_the_closed_form():
    points, y, _ = semi()
    model = RoPAWSClassifier(
        head=None, temperature=0.1, prior="distance", prior_temperature=0.2, regression_share=0, lengths=False
    ).fit(points, y)
    rows = prepared(torch.from_numpy(points), torch.from_numpy(points))
    support, labels = rows[y >= 0], F.one_hot(torch.from_numpy(y[y >= 0]), 3).float()
    expected = eq.ropaws_posterior(rows[y < 0], support, labels, prior_temperature=0.2)
    assert model.prior_temperature_ == 0.2
    sure = expected.in_domain > 0.2
    winners = expected.probs.argmax(dim=1)
    assert np.array_equal(model.transduction_[y < 0][sure], winners[sure].numpy())


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize("head", ["linear", None])
@pytest.mark.parametrize("lengths", [True, False])
def test_the_scale_of_features_does_not_matter(scale, kind, head, lengths):
    points, y, _ = semi()
    each = np.random.default_rng(0).uniform(0.1, 10, (len(points), 1))
    rows = (points * scale * (1 if lengths else each)).astype(kind)  # rows of any length, unless these count
    model = RoPAWSClassifier(head=head, steps=30, lengths=lengths)
    plain = model.fit(points, y).predict_proba(points)
    scaled = model.fit(rows, y).predict_proba(rows)
    np.testing.assert_allclose(plain, scaled, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize(("features", "counts"), [(4, True), (65, False)])
def test_lengths_count_where_features_are_few(features, counts):
    """Two classes in one direction, one of them three times as far away; a third on the other side."""
    random = np.random.default_rng(0)
    direction = np.eye(1, features)[0] * features**0.5
    truth = np.repeat([0, 1, 2], 60)
    points = np.array([1.0, 3.0, -4.0])[truth, None] * direction + 0.25 * random.normal(size=(180, features))
    y = np.full(180, -1)
    for label in range(3):
        y[np.flatnonzero(truth == label)[:3]] = label
    found = {}
    for lengths in ("auto", True, False):
        model = RoPAWSClassifier(head=None, lengths=lengths).fit(points, y)
        found[lengths] = (model.predict(points) == truth).mean()
        assert model.transform(points).shape[1] == features + (
            lengths is True or (lengths == "auto" and counts)
        )
    assert found["auto"] == found[counts]
    assert found[True] > 0.95 > 0.85 > found[False]


@pytest.mark.parametrize("head", ["linear", None])
@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("with_pool", [True, False])
def test_a_class_with_95_labels_does_not_swallow_those_with_one(head, share, with_pool):
    """Separable blobs, and labels 95 : 1 : 1."""
    random = np.random.default_rng(3)
    truth = np.repeat(np.arange(3), 120)
    points = random.normal(size=(3, 10))[truth] + 0.3 * random.normal(size=(360, 10))
    y = np.full(360, -1)
    for label, count in enumerate((95, 1, 1)):
        y[np.flatnonzero(truth == label)[:count]] = label
    rows = np.ones(360, bool) if with_pool else y >= 0
    model = RoPAWSClassifier(head=head, regression_share=share, steps=60)
    model.fit(points[rows], y[rows])
    assert (model.predict(points)[y < 0] == truth[y < 0]).mean() > 0.95


def test_views_are_learned_from_and_checked():
    points, y, truth = semi()
    noise = np.random.default_rng(0).normal(size=(len(points), 3, points.shape[1]))
    views = points[:, None] + 0.1 * noise
    model = RoPAWSClassifier(steps=50).fit(points, y, views=views)
    known = truth < 3
    assert (model.predict(points[known]) == truth[known]).mean() > 0.98
    other = RoPAWSClassifier(steps=50).fit(points, y)
    assert not np.array_equal(model.transform(points), other.transform(points))
    with pytest.raises(ValueError, match=r"views must be \(n_samples, n_views, n_features\)"):
        RoPAWSClassifier().fit(points, y, views=views[:5])
    views[3, 1, 0] = np.nan
    with pytest.raises(ValueError, match="views has values that are not finite"):
        RoPAWSClassifier().fit(points, y, views=views)


def test_a_head_is_trained_unless_labels_speak_against_it(monkeypatch):
    points, y, _ = semi(labels_each=4)
    model = RoPAWSClassifier(steps=20).fit(points, y)
    assert model.head_ == "linear"
    assert model.head_reason_ == "kept: it changes none of the answers on 12 labels held out"

    def ruined(points, *_args, **_kwargs):
        return lambda rows: torch.ones_like(rows)

    monkeypatch.setattr(classifier, "train_head", ruined)
    settings = classifier.ClassifierSettings(prior="distance", steps=20, regression_share=0.0)
    labeled = LabeledRows(torch.from_numpy(np.flatnonzero(y >= 0)), torch.from_numpy(y[y >= 0]), 3)
    trial = classifier.try_head(Points(torch.from_numpy(points)), labeled, settings)
    assert not trial.use
    told = r"given up, as it costs too much: -\d+\.\d points \(standard error \d+\.\d\) on 12 labels held out"
    assert re.fullmatch(told, trial.reason)
    assert "standard error 0.0" not in trial.reason


def test_where_there_is_nothing_to_learn_from_there_is_no_head():
    points, y, truth = semi()
    assert "one class" in RoPAWSClassifier().fit(points, np.where(y > 0, -1, y)).head_reason_
    full = RoPAWSClassifier().fit(points, truth)
    assert full.head_ is None
    assert "no unlabeled row" in full.head_reason_
    single = RoPAWSClassifier(steps=20).fit(*semi(labels_each=1)[:2])
    assert single.head_ == "linear"
    assert "one label only" in single.head_reason_


def test_it_transforms_in_pipelines_survives_pickling_and_gives_frames():
    points, y, _ = semi()
    model = make_pipeline(StandardScaler(), RoPAWSClassifier(steps=20)).fit(points, y)
    again = pickle.loads(pickle.dumps(model))
    assert np.array_equal(model.predict_proba(points), again.predict_proba(points))
    rows = model.transform(points)
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, rtol=1e-5)
    copy = clone(model[-1]).set_params(steps=10)
    assert copy.get_params()["steps"] == 10
    assert not hasattr(copy, "classes_")
    named = RoPAWSClassifier(steps=20).set_output(transform="pandas").fit(points, y).transform(points)
    assert list(named.columns)[:2] == ["ropawsclassifier0", "ropawsclassifier1"]


@pytest.mark.parametrize("missing", [None, "", np.nan, -1])
def test_names_with_missing_ones(missing):
    points, y, truth = semi()
    names = np.array(["cat", "dog", "owl"], object)
    mixed = np.array([names[label] if label >= 0 else missing for label in y], object)
    model = RoPAWSClassifier(steps=20).fit(points, mixed)
    assert model.classes_.tolist() == ["cat", "dog", "owl"]
    known = truth < 3
    assert (model.predict(points[known]) == names[truth[known]]).mean() > 0.98


@pytest.mark.parametrize("kind", ["string", "category", "Int64"])
def test_columns_of_pandas_with_missing_ones(kind):
    points, y, truth = semi()
    names = [3, 4, 5] if kind == "Int64" else ["cat", "dog", "owl"]
    column = pd.Series([names[label] if label >= 0 else None for label in y], dtype=kind)
    frame = pd.DataFrame(points)
    model = RoPAWSClassifier(steps=20).fit(frame, column)
    assert model.classes_.tolist() == names
    assert model.score(frame, column) == 1
    known = truth < 3
    assert (model.predict(frame[known]) == np.array(names)[truth[known]]).mean() > 0.98


def test_unlabeled_rows_do_not_count_in_scores():
    points, y, _ = semi(labels_each=6)
    model = RoPAWSClassifier(head=None).fit(points, y)
    assert model.score(points, y) == model.score(points[y >= 0], y[y >= 0]) == 1
    assert cross_val_score(RoPAWSClassifier(head=None), points, y, cv=3).tolist() == [1, 1, 1]
    wrong = y.copy()
    first = np.flatnonzero(y == 0)[0]
    wrong[first] = 1
    weight = np.ones(len(y))
    assert model.score(points, wrong, weight) == model.score(points, wrong) == pytest.approx(17 / 18)
    weight[first] = 19
    assert model.score(points, wrong, sample_weight=weight) == pytest.approx(17 / 36)
    with pytest.raises(ValueError, match="y has no label"):
        model.score(points, np.full(len(y), -1))


def test_weights_of_rows_are_refused_with_the_reason():
    points, y, _ = semi()
    model = RoPAWSClassifier(head=None)
    with pytest.raises(TypeError, match=r"takes no sample_weight: .* set class_prior .* unlabeled \(-1\)"):
        model.fit(points, y, sample_weight=np.ones(len(y)))
    with pytest.raises(TypeError, match="fit takes X, y, views and out_of_class, got 'weights'"):
        model.fit(points, y, weights=1)
    assert not has_fit_parameter(model, "sample_weight")  # so that scikit-learn's own tools refuse it too


def test_numbers_with_missing_ones():
    points, y, _ = semi()
    model = RoPAWSClassifier(head=None).fit(points, np.where(y < 0, np.nan, y))
    assert model.classes_.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"head": "mlp"}, "head must be 'linear' or None, got 'mlp'"),
        ({"prior": "flat"}, "prior must be 'pool', 'distance' or None, got 'flat'"),
        ({"regression_share": 2}, "regression_share must be from 0 to 1, got 2"),
        ({"lengths": "some"}, "lengths must be 'auto', True or False"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
    ],
)
def test_settings_are_checked(settings, message):
    points, y, _ = semi()
    with pytest.raises(ValueError, match=message):
        RoPAWSClassifier(**settings).fit(points, y)


def test_the_same_seed_gives_the_same_numbers():
    points, y, _ = semi()
    one, two = (RoPAWSClassifier(steps=20, random_state=3).fit(points, y) for _ in range(2))
    assert np.array_equal(one.predict_proba(points), two.predict_proba(points))


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
    model = RoPAWSClassifier(head=None).fit(pixels, y)
    assert (model.transduction_[hidden] == truth[hidden]).mean() > 0.95
    fixed = RoPAWSClassifier(head=None, temperature=0.1).fit(pixels, y)
    assert model.temperature_ < fixed.temperature_ == 0.1


def test_the_text_minus_one_is_not_taken_for_a_class():
    points, truth = blobs(10, 2, seed=3)
    names = np.array(["-1", "dog"])[truth.numpy()]
    with pytest.raises(ValueError, match="the text '-1'"):
        RoPAWSClassifier().fit(points.numpy(), names)


@pytest.mark.parametrize("random_state", [None, np.random.RandomState(0), 3])
def test_chance_may_be_of_any_kind(random_state):
    points, y, truth = semi()
    model = RoPAWSClassifier(head=None, voters=20, random_state=random_state).fit(points, y)
    known = truth < 3
    assert (model.predict(points[known]) == truth[known]).mean() > 0.98


def test_the_flag_is_the_probability_below_the_threshold():
    X, y, truth = semi(labels_each=4)  # noqa: N806
    model = RoPAWSClassifier(steps=30).fit(X, y)
    flagged = model.out_of_class(X)
    assert model.threshold_ == 0.5
    assert (flagged == (model.in_domain(X) < 0.5)).all()
    outside = truth == 3
    assert flagged[outside].mean() > 0.9
    assert flagged[~outside].mean() < 0.1
    in_order = model.in_domain(X)[model.score_in_domain(X).argsort()]
    assert (np.diff(in_order) >= 0).all()
    assert len(np.unique(in_order)) > 230  # two may differ in the score by less than float32 shows
    far = RoPAWSClassifier(prior="distance", steps=30).fit(X, y)
    assert 0 < far.threshold_ < 1
    assert far.out_of_class(X)[y >= 0].mean() < 0.2


def test_rows_that_are_known_to_be_out_of_class_teach_it():
    X, y, truth = semi(labels_each=4)  # noqa: N806
    shown = np.zeros(len(y), bool)
    shown[np.flatnonzero(truth == 3)[:3]] = True
    before, after = (RoPAWSClassifier(steps=30).fit(X, y, out_of_class=mask) for mask in (None, shown))
    assert after.transduction_.shape == y.shape
    assert after.out_of_class(X[truth == 3]).all()
    assert after.in_domain(X[truth == 3]).mean() < before.in_domain(X[truth == 3]).mean()
    assert not after.out_of_class(X[truth < 3]).any()
    assert (after.predict(X[truth < 3]) == truth[truth < 3]).mean() > 0.98
    with pytest.raises(ValueError, match="out_of_class must be False for rows with a label, got True for 12"):
        RoPAWSClassifier().fit(X, y, out_of_class=np.ones(len(y), bool))
    with pytest.raises(ValueError, match="out_of_class must be 240 values True or False"):
        RoPAWSClassifier().fit(X, y, out_of_class=[True])


def test_it_is_a_public_name():
    assert ropaws.RoPAWSClassifier is RoPAWSClassifier


def test_a_class_with_few_labels_keeps_its_say_with_and_without_unlabeled_rows():
    random = np.random.default_rng(0)
    points = random.normal(size=(12, 4)) * 0.3 + np.where(np.arange(12) < 11, 1, -1)[:, None]
    labels = np.array([0] * 11 + [1])
    queries = random.normal(size=(200, 4)) * 0.3 - 1
    for rows, y in ((points, labels), (np.vstack([points, queries[:5]]), np.append(labels, [-1] * 5))):
        model = RoPAWSClassifier(head=None, temperature=1.0, prior=None).fit(rows, y)
        assert (model.predict(queries) == 1).mean() > 0.95

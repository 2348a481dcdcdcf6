"""How frequent classes are in the pool: what is taken for it, what is found, and what it is good for."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ropaws import RoPAWSClassifier
from ropaws.classify import head
from ropaws.classify.class_prior import (
    NOISE,
    around,
    bounded,
    checked_class_prior,
    jackknife_error,
    labels_agree,
    sampled,
    shrunk,
    starting_class_prior,
    with_interval,
)
from ropaws.classify.classifier import ClassifierSettings, OpenSetClassifier
from ropaws.classify.head import LabeledRows, Points
from ropaws.classify.in_class_share import fit_curve, in_class_share
from ropaws.classify.pool_frequencies import (
    Weighed,
    counted,
    estimated,
    label_parts,
    looks_unequal,
    reached,
)
from ropaws.classify.pool_prior import PoolPrior, RowPass
from ropaws.classify.soft_nn import LabeledEmbeddings, batch_class_prior, followed
from ropaws.core.features import FeatureRows
from ropaws.core.records import Support
from ropaws.methods import PAWS, RoPAWS

UNEQUAL = (400, 80, 20)


def long_tailed(labels, *, seed=0, junk=0, spread=0.35):
    """Three classes that overlap, in a pool of 400, 80 and 20.   ->  X, truth (-1 junk), y"""
    random = np.random.default_rng(seed)
    centers = 1.1 * np.eye(12)[: 3 + (junk > 0)]
    counts = (*UNEQUAL, junk) if junk else UNEQUAL
    clouds = zip(centers, counts, strict=True)
    X = np.concatenate([c + spread * random.normal(size=(n, 12)) for c, n in clouds])  # noqa: N806
    truth = np.repeat([0, 1, 2, -1][: len(counts)], counts)
    y = np.full(len(X), -1)
    for label, count in enumerate(labels):
        y[random.permutation(np.flatnonzero(truth == label))[:count]] = label
    return X, truth, y


TRUE = np.array(UNEQUAL) / sum(UNEQUAL)


@pytest.mark.parametrize(("labels", "junk"), [((6, 6, 6), 300), ((22, 5, 2), 0)])
def test_auto_finds_frequencies_and_is_right_more_often_for_it(labels, junk):
    right, error = {"uniform": 0.0, "auto": 0.0, "true": 0.0}, 0.0
    for seed in range(2):
        X, truth, y = long_tailed(labels, seed=seed, junk=junk, spread=0.3)  # noqa: N806
        rows = (y < 0) & (truth >= 0)
        for name in right:
            model = RoPAWSClassifier(class_prior=TRUE if name == "true" else name, steps=40).fit(X, y)
            right[name] += (model.predict(X[rows]) == truth[rows]).mean() / 2
            if name == "auto":
                error += np.abs(model.class_prior_ - TRUE).sum() / 2
                low, high = model.class_prior_interval_
                assert (low < model.class_prior_).all()
                assert (model.class_prior_ < high).all()
    assert error < 0.9 * np.abs(1 / 3 - TRUE).sum()
    assert right["uniform"] + 0.01 < right["auto"] < right["true"] + 0.02


def test_a_balanced_pool_stays_balanced():
    random = np.random.default_rng(0)
    X = np.concatenate([c + 0.45 * random.normal(size=(150, 12)) for c in 1.1 * np.eye(12)[:3]])  # noqa: N806
    y = np.full(450, -1)
    y[[0, 1, 2, 150, 151, 152, 300, 301, 302]] = np.repeat(range(3), 3)
    model = RoPAWSClassifier(steps=5).fit(X, y)
    assert model.class_prior_.tolist() == pytest.approx([1 / 3] * 3)
    low, high = model.class_prior_interval_
    assert (low < 1 / 3).all()
    assert (high > 1 / 3).all()


def test_uniform_is_what_it_was_to_the_last_digit():
    """An array of equal frequencies goes through every formula, 'uniform' through none of them."""
    X, _, y = long_tailed((6, 6, 6))  # noqa: N806
    plain = RoPAWSClassifier(class_prior="uniform", steps=30).fit(X, y)
    given = RoPAWSClassifier(class_prior=np.full(3, 1 / 3), steps=30).fit(X, y)
    np.testing.assert_allclose(plain.predict_proba(X), given.predict_proba(X), atol=2e-4)
    np.testing.assert_allclose(plain.in_domain(X), given.in_domain(X), atol=1e-4)
    assert plain.class_prior_.tolist() == pytest.approx([1 / 3] * 3)
    assert plain.class_prior_interval_.tolist() == [[0] * 3, [1] * 3]


@pytest.mark.parametrize("head_", ["linear", None])
def test_given_frequencies_are_in_the_answers(head_):
    X, _, y = long_tailed((6, 6, 6))  # noqa: N806
    likely = {}
    for first in (0.1, 0.8):
        prior = [first, (1 - first) / 2, (1 - first) / 2]
        model = RoPAWSClassifier(head=head_, class_prior=prior, steps=60).fit(X, y)
        np.testing.assert_allclose(model.class_prior_, prior, rtol=1e-6)
        likely[first] = model.predict_proba(X)[:, 0].mean()
    assert likely[0.8] > likely[0.1] + 0.1


def test_the_head_is_trained_to_meet_the_frequencies():
    X, _, y = long_tailed((6, 6, 6))  # noqa: N806
    points = Points(torch.from_numpy(X).float())
    where = torch.from_numpy(np.flatnonzero(y >= 0))
    labeled = LabeledRows(where, torch.from_numpy(y[y >= 0]), 3)
    means = {}
    for first in (0.1, 0.8):
        settings = ClassifierSettings(
            class_prior=(first, (1 - first) / 2, (1 - first) / 2), regression_share=0.0, prior=None, steps=100
        )
        means[first] = float(
            OpenSetClassifier(points, labeled, settings).classify(points.center)[:, 0].mean()
        )
    assert means[0.8] > means[0.1] + 0.1


def test_equal_labels_say_nothing_and_unequal_ones_are_a_sample():
    for counts in ([4, 4, 4], [4, 3, 4], [4, 4, 1]):  # the last class may have had one image only
        assert starting_class_prior("auto", torch.tensor(counts)) is None
    found = starting_class_prior("labels", torch.tensor([7, 2, 0]))
    assert found.tolist() == pytest.approx([7.5 / 10.5, 2.5 / 10.5, 0.5 / 10.5])
    assert starting_class_prior("labels", torch.tensor([4, 4])).tolist() == [0.5, 0.5]
    assert starting_class_prior("uniform", torch.tensor([7, 2, 0])) is None
    assert starting_class_prior("auto", torch.tensor([7, 2, 0]), unlabeled=False) is None
    assert starting_class_prior((0.5, 0.5), torch.tensor([7, 2])).tolist() == [0.5, 0.5]


def test_few_labels_that_differ_by_chance_say_that_classes_are_equal():
    counts = torch.tensor([7, 2, 0])  # X = (4^2 + 1 + 3^2) / 3
    kept = 1 - (2 / (26 / 3)) ** 2
    expected = 1 / 3 + kept * (np.array([7, 2, 0]) / 9 - 1 / 3)
    assert sampled(counts).tolist() == pytest.approx(expected, abs=1e-6)
    found = starting_class_prior("auto", counts).tolist()
    assert found == pytest.approx((9 * expected + 0.5) / 10.5, abs=1e-6)
    assert sampled(torch.tensor([5, 3, 4])).tolist() == pytest.approx([1 / 3] * 3)
    # Random samples of a balanced pool: nearer to the truth than their counts are.
    random = np.random.default_rng(0)
    draws = [random.multinomial(40, [0.1] * 10) for _ in range(200)]
    away = [[np.abs(p - 0.1).sum() for p in (sampled(torch.tensor(n)).numpy(), n / 40)] for n in draws]
    assert np.mean(away, axis=0)[0] < 0.5 * np.mean(away, axis=0)[1]
    many = torch.tensor([4000, 3000, 3000])
    assert sampled(many).tolist() == pytest.approx([0.4, 0.3, 0.3], abs=1e-3)


def test_small_differences_are_noise_where_labels_are_equal():
    error = torch.full((3,), 0.1 / math.sqrt(3))  # 0.1 over all classes together
    assert shrunk(torch.tensor([0.3, 0.36, 0.34]), error, wrong=0.0).tolist() == pytest.approx([1 / 3] * 3)
    counts = np.array([0.8, 0.16, 0.04])
    distance = np.linalg.norm(counts - 1 / 3)
    for wrong in (0.0, 0.4):
        found = shrunk(torch.from_numpy(counts), 2 * error, wrong=wrong)
        expected = counts ** ((1 + wrong) * (1 - (NOISE * 0.2 / distance) ** 4))
        assert found.tolist() == pytest.approx(expected / expected.sum())
    # Where nothing is left to chance and every prediction is right, what is found is the truth.
    assert shrunk(torch.from_numpy(counts), 0 * error, wrong=0.0).tolist() == pytest.approx(counts)
    assert shrunk(torch.from_numpy(counts), None, wrong=0.0).tolist() == pytest.approx([1 / 3] * 3)


def test_the_error_of_a_mean_is_what_the_jackknife_says():
    values = torch.from_numpy(np.random.default_rng(0).normal(size=(20, 3)))
    left_out = [values[torch.arange(20) != i].mean(dim=0) for i in range(20)]
    torch.testing.assert_close(jackknife_error(left_out), (values.var(dim=0) / 20).sqrt())  # in closed form
    assert jackknife_error(left_out[:1]) is None


def test_an_interval_of_counts_is_that_of_the_jackknife():
    counts, error = torch.tensor([0.8, 0.15, 0.05]), torch.tensor([0.1, 0.02, 0.1])
    found = around(torch.tensor([0.9, 0.05, 0.05]), counts, error)
    assert found.low.tolist() == pytest.approx([0.8 - 0.1645, 0.05, 0])
    assert found.high.tolist() == pytest.approx([0.9645, 0.15 + 0.0329, 0.05 + 0.1645])
    unknown = around(counts, counts, None)
    assert (unknown.low.tolist(), unknown.high.tolist()) == ([0, 0, 0], [1, 1, 1])


def test_every_label_is_left_out_once():
    parts = torch.stack(label_parts(torch.tensor([0, 0, 1, 2, 1, 2, 2, 0, 1, 1, 2, 0])))
    assert parts.shape == (10, 12)
    assert (parts.sum(dim=0) == 1).all()
    assert label_parts(torch.tensor([2])) == []


@pytest.mark.parametrize(("counts", "unequal"), [((60, 60, 0), False), ((100, 20, 0), True)])
def test_a_class_without_a_label_does_not_make_a_pool_unequal(counts, unequal):
    random = torch.Generator().manual_seed(0)
    truth = torch.repeat_interleave(torch.arange(3), torch.tensor(counts))
    points = F.normalize(torch.eye(8)[truth] + 0.2 * torch.randn(120, 8, generator=random), dim=1)
    where = torch.cat([(truth == c).nonzero()[:3, 0] for c in (0, 1)])
    support = LabeledEmbeddings(points[where], truth[where], 3)
    pool = Weighed(points, torch.ones(120), torch.eye(3)[truth].log())
    found = counted(reached(support, pool), pool, 3)
    assert looks_unequal(support, pool, found) == unequal
    estimate = estimated(support, pool, None, math.nan)
    assert estimate.guessed == unequal
    assert estimate.prior.estimate[:2].tolist() == pytest.approx(
        [0.83, 0.14] if unequal else [1 / 3] * 2, abs=0.05
    )


def test_a_lone_label_says_nothing_of_frequencies():
    prior = PoolPrior(8, 3, 60)
    rows = RowPass(FeatureRows(torch.randn(60, 8, generator=torch.Generator().manual_seed(0))))
    prior.fit(rows, torch.tensor([0]), torch.tensor([0]), class_prior="auto")
    assert prior.class_prior.tolist() == pytest.approx([1 / 3] * 3)
    assert prior.prior.isfinite().all()


def test_labels_that_contradict_the_pool_are_no_sample_of_it():
    pool = torch.tensor([0.7, 0.2, 0.1])
    assert labels_agree(torch.tensor([14, 4, 2]), pool)
    assert not labels_agree(torch.tensor([2, 4, 14]), pool)
    assert not labels_agree(torch.tensor([7, 6, 7]), torch.tensor([0.35, 0.3, 0.35]))  # or it is balanced


def test_labels_most_against_the_pool_do_no_harm():
    right = {}
    X, truth, y = long_tailed((2, 5, 12))  # noqa: N806
    rows = y < 0
    for choice in ("uniform", "auto", "labels"):
        model = RoPAWSClassifier(class_prior=choice, steps=40).fit(X, y)
        right[choice] = (model.predict(X[rows]) == truth[rows]).mean()
    assert right["auto"] > right["labels"]
    assert right["auto"] > right["uniform"] - 0.02


@pytest.mark.parametrize("labels", [(6, 6, 6), (22, 5, 2)])
def test_logistic_regression_gets_the_class_prior_in_the_place_of_what_labels_pull(labels):
    X, _, y = long_tailed(labels)  # noqa: N806
    rows, where = torch.from_numpy(X).float(), torch.from_numpy(np.flatnonzero(y >= 0))
    found = {}
    for name, choice in (("uniform", "uniform"), ("given", (0.7, 0.2, 0.1))):
        prior = PoolPrior(12, 3, len(X))
        prior.fit(RowPass(FeatureRows(rows)), where, torch.from_numpy(y[y >= 0]), class_prior=choice)
        found[name] = prior
    expected = torch.tensor([0.7, 0.2, 0.1]).log() - 15 / (15 + sum(labels) / 3) * torch.tensor(labels).log()
    changes = {
        name: prior.log_probs(rows) - prior._even_log_probs(prior.project(rows))
        for name, prior in found.items()
    }
    given = changes["given"] - changes["given"].mean(dim=1, keepdim=True)
    torch.testing.assert_close(given, (expected - expected.mean()).expand(len(rows), 3), atol=1e-4, rtol=1e-4)
    assert not changes["uniform"].any()


@pytest.mark.parametrize(
    ("y", "share"),
    [
        ([0, -1, -1, -1, 1, -1, -1, -1, 2, -1, -1, -1], None),  # twelve rows
        ([0, 0, 0] + [-1] * 9, None),  # one class
        ([0] + [-1] * 11, (0.0, 1.0)),  # one label: nothing is known of the share
        ([0] * 4 + [1] * 4 + [2] * 4, (0.0, 1.0)),  # no pool
    ],
)
def test_the_least_there_can_be_has_sensible_answers(y, share):
    random = np.random.default_rng(0)
    X = np.concatenate([c + 0.4 * random.normal(size=(4, 6)) for c in 2 * np.eye(6)[:3]])  # noqa: N806
    model = RoPAWSClassifier(steps=5).fit(X, y)
    classes = len(set(y) - {-1})
    assert model.class_prior_.sum() == pytest.approx(1)
    assert model.predict_proba(X).shape == (12, classes)
    assert model.transduction_[0] == 0
    if share is not None:
        assert (model.in_class_share_.low, model.in_class_share_.high) == share
    assert model.in_class_share_.doubt.startswith("The share is uncertain")


def test_no_class_is_given_up():
    assert float(bounded(torch.tensor([0.999, 0.001, 0.0])).min()) > 0.03


def test_an_interval_is_that_of_so_many_labels():
    few, many = (with_interval(torch.tensor([0.7, 0.3]), count) for count in (10, 1000))
    assert float(few.high[0] - few.low[0]) > 0.4
    assert float(many.high[0] - many.low[0]) < 0.06


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("even", "class_prior must be 'auto', 'uniform', 'labels' or frequencies, got 'even'"),
        (3, "got 3"),
        ([0.5, 0.2, 0.2], "must sum to 1, got 0.5, 0.2, 0.2, which sum to 0.9"),
        ([0.5, 0.5], "one frequency per class, 3, got 2"),
        ([1.0, 0.0, 0.0], "must have frequencies above 0"),
        ([math.nan, 0.5, 0.5], "must have frequencies above 0"),
    ],
)
def test_a_wrong_prior_is_named(given, words):
    X, _, y = long_tailed((2, 2, 2))  # noqa: N806
    with pytest.raises(ValueError, match=words):
        RoPAWSClassifier(class_prior=given).fit(X, y)


def test_checked_frequencies_are_numbers():
    assert checked_class_prior("x", ["0.25", "0.75"], 2) == (0.25, 0.75)


def test_a_label_stands_for_its_share_of_the_in_class_pool():
    """Labels of a rare class, low scores, that are as many as those of the frequent one."""
    random = np.random.default_rng(0)
    pool = torch.from_numpy(np.concatenate([random.normal(4, 1, 950), random.normal(0, 1, 50)]))
    labels = torch.from_numpy(np.concatenate([random.normal(4, 1, 40), random.normal(0, 1, 40)]))
    weights = torch.tensor([0.95 / 40] * 40 + [0.05 / 40] * 40)
    assert in_class_share(pool, labels) < 1.01
    low = torch.cat([pool, torch.from_numpy(random.normal(0, 1, 1000))])  # half of it is junk that looks rare
    assert abs(in_class_share(low, labels, weights) - 0.5) < 0.1
    assert in_class_share(low, labels) > 0.8
    assert fit_curve(low, labels, 0.5, weights).slope > fit_curve(low, labels, 0.5).slope
    equal = torch.full((80,), 0.3)
    assert in_class_share(low, labels, equal) == pytest.approx(in_class_share(low, labels), abs=0.02)


def test_a_batch_of_some_classes_has_their_frequencies():
    support = Support(
        torch.zeros(4, 1), torch.eye(2).repeat(2, 1), torch.arange(4), torch.tensor([3, 1, 3, 1])
    )
    found = batch_class_prior(torch.tensor([0.1, 0.2, 0.3, 0.4]), support)
    assert found.tolist() == pytest.approx([0.4 / 0.6, 0.2 / 0.6])
    assert batch_class_prior(None, support) is None


def test_a_guess_follows_the_mean_prediction_and_a_sample_does_not():
    support = Support(torch.zeros(2, 1), torch.eye(2), torch.arange(2), torch.tensor([3, 1]))
    guess, mean = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0.9, 0.1])
    found = followed(guess, mean, support)  # classes 3 and 1 share 0.6
    expected = [0.1, 0.95 * 0.2 + 0.05 * 0.06, 0.3, 0.95 * 0.4 + 0.05 * 0.54]
    assert found.tolist() == pytest.approx(expected)
    for _ in range(500):
        guess = followed(guess, mean, support)
    assert guess.tolist() == pytest.approx([0.1, 0.06, 0.3, 0.54], abs=1e-4)
    for labels, guessed in (((6, 6, 6), True), ((22, 5, 2), False), ((2, 5, 12), True)):
        X, _, y = long_tailed(labels)  # noqa: N806
        prior, where = PoolPrior(12, 3, len(X)), torch.from_numpy(np.flatnonzero(y >= 0))
        rows, known = RowPass(FeatureRows(torch.from_numpy(X).float())), torch.from_numpy(y[y >= 0])
        prior.fit(rows, where, known, class_prior="auto")
        before = prior.trained_class_prior.clone()
        torch.testing.assert_close(before, prior.class_prior)
        three = Support(torch.zeros(3, 1), torch.eye(3), torch.arange(3), torch.arange(3))
        prior.follow(torch.tensor([0.98, 0.01, 0.01]), three)
        assert bool(prior.guessed) == guessed
        assert torch.equal(prior.trained_class_prior, before) != guessed
        again = PoolPrior(12, 3, len(X))  # as when a run is resumed
        again.load_state_dict(prior.state_dict())
        assert torch.equal(again.trained_class_prior, prior.trained_class_prior)
        assert bool(again.guessed) == guessed


def test_given_frequencies_do_not_follow():
    X, _, y = long_tailed((6, 6, 6))  # noqa: N806
    prior, where = PoolPrior(12, 3, len(X)), torch.from_numpy(np.flatnonzero(y >= 0))
    rows = RowPass(FeatureRows(torch.from_numpy(X).float()))
    for choice in ("uniform", "labels", (0.5, 0.3, 0.2)):
        prior.fit(rows, where, torch.from_numpy(y[y >= 0]), class_prior=choice)
        assert not prior.guessed


def test_methods_say_what_they_need():
    for method in (PAWS, RoPAWS):
        assert method().class_prior == "uniform"  # the paper's
        with pytest.raises(ValueError, match="'auto' is estimated from densities"):
            method(class_prior="auto")
        with pytest.raises(ValueError, match=r"method.class_prior must sum to 1"):
            method(class_prior=(0.5, 0.2))
        assert method(class_prior="auto", judge="pool").class_prior == "auto"
    assert RoPAWS(class_prior="auto", prior="pool").class_prior == "auto"
    assert replace(head.OBJECTIVE).reweight_entropy

"""Images that a person called out-of-class, in training."""

import numpy as np
import pytest
import torch

import ropaws
from ropaws.cli.main import main
from ropaws.core.labels import OUT_OF_CLASS, OUT_OF_CLASS_NAME, UNLABELED
from ropaws.explore.fitting import Answered, fit_round
from ropaws.explore.pool import in_main_directions, pool_of_sources
from ropaws.explore.session import Session
from ropaws.methods.pool_calibration import pool_prior
from ropaws.pool.corpus import own_images
from ropaws.pool.listing import Pool
from tests.photos import fails

CLASSES, PER_KIND, LABELS, ANSWERS = 3, 60, 4, 8


def kinds():
    """Three classes, and two kinds of others, one of them close to a class.   ->  features, kind of each"""
    random = np.random.default_rng(0)
    centers = np.eye(5, 24) * 3
    centers[3] = 0.8 * centers[0] + 0.35 * centers[3]
    kind = np.repeat(np.arange(5), PER_KIND)
    return (centers[kind] + 0.35 * random.normal(size=(len(kind), 24))).astype(np.float32), kind


def answers(kind, *, outside):
    labels = np.full(len(kind), "", dtype="<U20")
    for number in range(CLASSES):
        labels[np.flatnonzero(kind == number)[:LABELS]] = f"class {number}"
    if outside:
        for number in (3, 4):
            labels[np.flatnonzero(kind == number)[:ANSWERS]] = OUT_OF_CLASS_NAME
    return labels


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run without the answers, and one with them."""
    features, kind = kinds()
    folder = tmp_path_factory.mktemp("answers")
    return [
        ropaws.Run(ropaws.train_on((features, answers(kind, outside=outside)), out=folder / str(outside)))
        for outside in (False, True)
    ]


def test_answers_teach_the_prior_and_the_flag(runs):
    features, kind = kinds()
    unseen = np.flatnonzero((kind == 3) & (answers(kind, outside=True) == ""))
    before, after = (run.predict(features) for run in runs)
    assert runs[1].class_names == ("class 0", "class 1", "class 2")
    flagged = [np.array([item.out_of_class for item in found]) for found in (before, after)]
    assert flagged[1][unseen].mean() > max(0.9, flagged[0][unseen].mean() + 0.2)
    assert flagged[1][kind < CLASSES].mean() < 0.1
    prior = pool_prior(runs[1].model)
    assert len(prior.outside) == 2 * ANSWERS
    known = np.flatnonzero(answers(kind, outside=True) == OUT_OF_CLASS_NAME)
    assert prior.prior[torch.from_numpy(known)].max() == 0
    assert len(pool_prior(runs[0].model).outside) == 0


def test_images_with_an_answer_are_no_part_of_the_pool_that_is_judged(runs):
    """Their truth is known to training: an AUROC of them would not be earned."""
    pool = runs[1].pool
    assert len(pool.positions) == 5 * PER_KIND - CLASSES * LABELS - 2 * ANSWERS
    assert set(pool.truth.tolist()) == {UNLABELED}


def test_a_run_agrees_with_the_page_it_was_trained_from(runs):
    features, kind = kinds()
    points = in_main_directions(runs[1].corpus.train_images, torch.arange(len(kind)))
    codes = runs[1].corpus.train_labels
    nothing = torch.zeros(len(kind), dtype=torch.bool)
    page = fit_round(points, Answered(codes, (0, 1, 2), nothing, nothing), lambda *_: None)
    run = np.array([OUT_OF_CLASS if p.out_of_class else int(p.label[-1]) for p in runs[1].predict(features)])
    rest = answers(kind, outside=True) == ""
    assert (page.predicted == run)[rest].mean() >= 0.98


def test_they_agree_on_a_small_pool_whose_classes_are_not_equally_frequent(tmp_path):
    """Frequencies are a guess there, which training follows; and few answers of both kinds count much."""
    features, kind = kinds()
    kept = np.concatenate([np.flatnonzero(kind == k)[:count] for k, count in enumerate((50, 18, 7, 12, 9))])
    features, kind = features[kept], kind[kept]
    labels = np.full(len(kind), "", dtype="<U20")
    for number, count in enumerate((4, 3, 2, 2, 2)):
        name = f"class {number}" if number < CLASSES else OUT_OF_CLASS_NAME
        labels[np.flatnonzero(kind == number)[:count]] = name
    run = ropaws.Run(ropaws.train_on((features, labels), out=tmp_path / "run"))
    prior = pool_prior(run.model).class_prior
    assert prior is not None
    assert prior[0] > 2 * prior[2]
    points = in_main_directions(run.corpus.train_images, torch.arange(len(kind)))
    nothing = torch.zeros(len(kind), dtype=torch.bool)
    answered = Answered(run.corpus.train_labels, (0, 1, 2), nothing, nothing)
    page = fit_round(points, answered, lambda *_: None)
    found = run.predict(features)
    rest = labels == ""
    said = np.array([OUT_OF_CLASS if p.out_of_class else int(p.label[-1]) for p in found])
    assert (page.predicted == said)[rest].all()
    assert {OUT_OF_CLASS, 0, 1, 2} == set(said[rest].tolist())
    np.testing.assert_allclose(page.in_class[rest], np.array([p.in_domain for p in found])[rest], atol=1e-3)
    np.testing.assert_allclose(page.probs[rest], np.array([p.probabilities for p in found])[rest], atol=0.05)


def test_marked_rows_of_a_table_and_a_folder_are_the_same_answers(photos, capsys):
    noise = sorted((photos / "pool").glob("noise-*.png"))[:4]
    rows = [f"{path},{path.parent.name},False" for path in sorted((photos / "labeled").rglob("*.png"))]
    table = photos / "labels.csv"
    table.write_text("\n".join(["path,label,out_of_class", *rows, *(f"{path},,True" for path in noise)]))
    apart = photos / "apart"
    apart.mkdir()
    for path in noise:
        (apart / path.name).symlink_to(path)
    by_table = own_images(table, [photos / "pool"], None)
    by_folder = own_images(photos / "labeled", [photos / "pool"], None, out_of_class=[apart])
    assert by_table.class_names == by_folder.class_names == ("block", "columns", "rows")
    for found in (by_table, by_folder):  # each image once, also those that are in the pool too
        assert len(found.train.images) == 9 + 36
        assert found.train.labels.count(OUT_OF_CLASS_NAME) == 4
    main(["train", "--labeled", str(photos / "labeled"), "--unlabeled", str(photos / "pool"),
          "--out-of-class", str(apart), "--out", str(photos / "run"), "--backbone", "small",
          "--train.steps", "1", "--no-report"])  # fmt: skip
    said = capsys.readouterr().err
    assert "4 images are known to be out-of-class; without densities of the pool" in said
    assert ropaws.Run(photos / "run").corpus.outside.tolist() == [9, 10, 11, 12]


def test_a_folder_of_the_name_holds_answers_and_no_class(photos):
    (photos / "labeled" / "Out-of-class").mkdir()
    (photos / "pool" / "noise-0.png").rename(photos / "labeled" / "Out-of-class" / "0.png")
    found = own_images(photos / "labeled", [photos / "pool"], None)
    assert len(found.class_names) == 3
    assert found.train.labels.count(OUT_OF_CLASS_NAME) == 1


def test_bad_out_of_class_folders_are_refused_in_one_line(photos, capsys):
    train = ["train", "--labeled", photos / "labeled", "--unlabeled", photos / "pool", "--out", photos / "r"]
    empty = photos / "empty"
    empty.mkdir()
    assert f"--out-of-class: {empty} has no image" in fails(capsys, *train, "--out-of-class", empty)
    gone = photos / "gone"
    assert f"--out-of-class: no folder or table at {gone}" in fails(capsys, *train, "--out-of-class", gone)
    rows = photos / "labeled" / "rows"
    line = fails(capsys, *train, "--out-of-class", rows)
    assert "has two labels, 'rows' and 'out-of-class'; remove one" in line
    assert "go with --labeled" in fails(capsys, "train", "--out-of-class", photos / "pool")
    assert not (photos / "r").exists()


def test_a_table_without_any_class_is_refused(photos, capsys):
    table = photos / "labels.csv"
    image = next((photos / "pool").iterdir())
    table.write_text(f"path,label,out_of_class\n{image},,True\n")
    line = fails(capsys, "train", "--labeled", table, "--out", photos / "r")
    assert "has no label of a class; all its labels are out-of-class" in line


def test_the_page_takes_answers_over(photos, tmp_path):
    class Features:
        """An embedder that needs no network."""

        def embed(self, pool):
            from ropaws.core.features import FeatureRows
            from ropaws.embedding.embedder import Embedded

            rows = FeatureRows(torch.randn(len(pool), 8, generator=torch.Generator().manual_seed(0)))
            facts = {"init": "pretrained", "backbone": "efficientnet-lite0", "size": 64}
            labels = tuple(label or "" for label in pool.labels)
            return Embedded(rows, torch.arange(len(pool)), pool.names, labels, (), facts)

    noise = sorted((photos / "pool").glob("noise-*.png"))[:3]
    table = photos / "labels.csv"
    rows = [f"{path},{path.parent.name}," for path in sorted((photos / "labeled").rglob("*.png"))]
    table.write_text("\n".join(["path,label,out_of_class", *rows, *(f"{path},,True" for path in noise)]))
    pool = pool_of_sources([photos / "pool"], [table], Features())
    session = Session(pool, tmp_path / "out")
    session.close()
    assert sorted(session.answers.classes.values()) == ["block", "columns", "rows"]
    assert int((session.codes == OUT_OF_CLASS).sum()) == 3
    listed = Pool.open(labeled=tmp_path / "out" / "labels.csv")
    assert listed.labels.count(OUT_OF_CLASS_NAME) == 3

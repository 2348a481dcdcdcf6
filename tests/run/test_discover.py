"""Likely new classes of a run: as groups, as files, and as labels to train on."""

import csv
import json

import numpy as np
import pytest
import torch

import ropaws
from ropaws import Run
from ropaws.cli.main import main
from ropaws.run.discover import accept
from tests.photos import fails, make_photos

KNOWN, NEW, EACH, LABELS = 3, 3, 40, 5


def clusters(random):
    """Features of three classes and of three kinds more.   ->  (n, d), (n,) kind"""
    centers = random.normal(size=(KNOWN + NEW, 32))
    kind = np.repeat(np.arange(KNOWN + NEW), EACH)
    points = centers[kind] + 0.5 * random.normal(size=(len(kind), 32))
    return points.astype(np.float32), kind


def table(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def on_features(tmp_path_factory):
    """A run on features; the labeled rows are the first ones of each class.   ->  run folder, kinds"""
    folder = tmp_path_factory.mktemp("discover")
    points, kind = clusters(np.random.default_rng(0))
    labels = np.where((np.arange(len(kind)) % EACH < LABELS) & (kind < KNOWN), kind, -1)
    names = np.array(["ape", "bee", "cat", ""])[labels]
    np.savez(folder / "own.npz", features=points, labels=names)
    main(["train", "--features", str(folder / "own.npz"), "--out", str(folder / "run"), "--no-report"])
    return folder / "run", kind


def test_kinds_of_the_pool_are_groups_with_their_nearest_class(on_features):
    run, kind = on_features
    found = Run(run).discover()
    assert found.images == len(kind) - KNOWN * LABELS
    assert found.out_of_class == pytest.approx(NEW * EACH, abs=6)
    assert len(found.groups) == NEW
    assert [group.number for group in found.groups] == [1, 2, 3]
    seen = set()
    for group in found.groups:
        kinds = kind[[member.image for member in group.members]]
        assert (kinds == np.bincount(kinds).argmax()).mean() > 0.95
        seen.add(int(np.bincount(kinds).argmax()))
        assert group.nearest_class in ("ape", "bee", "cat")
        assert 0 < group.nearest_share <= 1
        assert all(member.in_domain < 0.5 for member in group.members)
        order = [member.typicality for member in group.members]
        assert order == sorted(order, reverse=True)
    assert seen == {3, 4, 5}
    assert len(Run(run).discover(groups=5).groups) == 5


def test_groups_of_other_rows_are_found_too(on_features, tmp_path):
    run, _ = on_features
    points, kind = clusters(np.random.default_rng(0))
    np.savez(tmp_path / "more.npz", features=points[kind > 0])
    found = Run(run).discover([tmp_path / "more.npz"])
    assert found.images == 5 * EACH
    assert len(found.groups) == NEW
    for group in found.groups:
        assert len(set(kind[kind > 0][[member.image for member in group.members]].tolist())) == 1


def test_a_class_is_made_of_a_group_and_trained_on(on_features, tmp_path, capsys):
    run, kind = on_features
    out = tmp_path / "groups"
    main(["discover", str(run), "--out", str(out)])
    shown = " ".join(capsys.readouterr().out.split())
    assert "3 kinds (estimated)" in shown
    assert f"ropaws discover {run} --out {out} --accept 1=NAME" in shown
    rows = table(out / "groups.csv")
    assert {row["group"] for row in rows} == {"1", "2", "3"}
    assert "Group 3:" in (out / "groups.html").read_text()
    main(["discover", str(run), "--out", str(out), "--accept", "2=dog", "--train", str(tmp_path / "more")])
    assert "Labels: dog 5." in capsys.readouterr().out
    with np.load(out / "labels.npz") as arrays:
        names, counts = np.unique(arrays["labels"], return_counts=True)
    assert dict(zip(names.tolist(), counts.tolist(), strict=True)) == {
        "": len(kind) - 20, "ape": 5, "bee": 5, "cat": 5, "dog": 5,
    }  # fmt: skip
    more = Run(tmp_path / "more")
    assert more.class_names == ("ape", "bee", "cat", "dog")
    mine = {int(row["image"]) for row in rows if row["group"] == "2"}
    outputs = more.pool.outputs
    says = {
        int(image)
        for image, best, inside in zip(
            more.pool.positions, outputs.probs.argmax(dim=1), outputs.in_domain, strict=True
        )
        if int(best) == 3 and inside >= more.threshold
    }
    wrong = set(np.flatnonzero(kind != kind[next(iter(mine))]).tolist())
    assert len(says & mine) > 25
    assert len(says & wrong) < 5


def test_the_report_has_the_groups(on_features):
    run, _ = on_features
    main(["discover", str(run)])
    found = json.loads((run / "evaluation.json").read_text())["new_classes"]
    assert [group["group"] for group in found] == [1, 2, 3]
    assert all(len(group["images"]) == len(group["names"]) == 12 for group in found)
    page = Run(run).report().read_text()
    assert "<h2>Likely new classes</h2>" in page


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Files, and a run on them with a backbone of random weights."""
    folder = tmp_path_factory.mktemp("photos")
    photos = make_photos(folder)
    main(["train", "--labeled", str(photos / "labeled"), "--unlabeled", str(photos / "pool"), "--out",
          str(folder / "run"), "--backbone", "small", "--train.steps", "20", "--no-report"])  # fmt: skip
    return folder / "run", photos


@pytest.fixture
def grouped(photos, tmp_path):
    """Two groups of whatever is there: nearly all images are below so high a threshold."""
    run, _ = photos
    options = ["--groups", "2", "--threshold", "1", "--out", str(tmp_path)]
    main(["discover", str(run), *options])
    return Run(run), tmp_path


def test_the_labels_are_all_that_training_knows_and_the_new_ones(grouped, photos):
    run, folder = grouped
    groups = table(folder / "groups.csv")
    accepted = accept(run, folder, {2: " new  kind "})
    assert accepted.counts == {"new kind": 3}  # as many as each class has
    assert accepted.path == folder / "labels.csv"
    listed = ropaws.Pool.open(labeled=accepted.path)
    assert len(listed) == 45
    counts = {label: listed.labels.count(label) for label in set(listed.labels)}
    assert counts == {None: 33, "rows": 3, "columns": 3, "block": 3, "new kind": 3}
    mine = {row["path"] for row in groups if row["group"] == "2"}
    assert {n for n, label in zip(listed.names, listed.labels, strict=True) if label == "new kind"} <= mine
    options = accepted.command
    assert options[:3] == ["train", "--labeled", str(folder / "labels.csv")]
    assert options[options.index("--backbone") + 1] == "small" if run.config.model.frozen else True
    assert accept(run, folder, {1: "rows"}, per_class=7).counts == {"rows": 7}  # one that is there already


def test_a_table_of_groups_may_be_edited(grouped):
    run, folder = grouped
    rows = table(folder / "groups.csv")
    chosen = [row["path"] for row in rows[:4]]
    with (folder / "groups.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "group", "typicality"])
        writer.writerows([path, 7, 1] for path in chosen)
    main(["discover", str(run.path), "--out", str(folder), "--accept", "7=mine", "--per-class", "9"])
    found = {row["path"] for row in table(folder / "labels.csv") if row["label"] == "mine"}
    assert found == set(chosen)


def test_images_of_another_pool_join_the_training(photos, tmp_path, capsys):
    run, images = photos
    options = [str(run), str(images / "test"), "--out", str(tmp_path), "--groups", "1", "--threshold", "1"]
    main(["discover", *options])
    assert "Group 1:" in (tmp_path / "groups.html").read_text()
    assert (tmp_path / "groups.html").read_text().count("data:image/") >= 12
    main(["discover", *options[:4], "--accept", "1=dots"])
    shown = capsys.readouterr().out
    assert f"--unlabeled {images / 'test'}" in shown
    labeled = [row for row in table(tmp_path / "labels.csv") if row["label"] == "dots"]
    assert len(labeled) == 3
    assert all("/test/" in row["path"] for row in labeled)


def test_no_group_is_one_line(photos, capsys):
    run, _ = photos
    main(["discover", str(run), "--threshold", "0"])
    assert "No group among the 0 out-of-class images" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--groups", "0"], "groups must be at least 1, or left out to be estimated, got 0"),
        (["--threshold", "2"], "threshold must be a probability from 0 to 1, got 2"),
        (["--accept", "shoe"], "--accept must be NUMBER=NAME, such as 2=handbag, got shoe"),
        (["--accept", "1=a", "1=b"], "--accept names group 1 twice"),
        (["--accept", "1=out-of-class"], "is the verdict on images of no class"),
        (["--accept", "99=a"], "--accept: there is no group 99"),
        (["--accept", "1=a", "--per-class", "0"], "per-class must be at least 1, got 0"),
        (["--train", "x"], "--train goes with --accept, which is not given"),
        (["--per-class", "3"], "--per-class goes with --accept, which is not given"),
        (["nowhere"], "--out: name a folder for the groups of images"),
        (["--out", "no/folder"], "--out: no folder no; create it first"),
    ],
)
def test_bad_options_are_one_line(on_features, capsys, tmp_path, monkeypatch, options, line):
    monkeypatch.chdir(tmp_path)
    assert line in fails(capsys, "discover", on_features[0], *options)


def test_a_damaged_table_of_groups_is_one_line(grouped, capsys):
    run, folder = grouped
    for content in ("path,group\na,b\n", "nothing\nx\n"):
        (folder / "groups.csv").write_text(content)
        line = fails(capsys, "discover", run.path, "--out", folder, "--accept", "1=a")
        assert "is no table of groups; remove it, and discover again" in line


@pytest.mark.slow
def test_embedded_garments_with_default_settings(tmp_path, capsys):
    """Five classes with five labels each; the pool has these and five kinds more."""
    from PIL import Image

    from ropaws.pool.datasets.catalog import embedded_truth
    from ropaws.pool.sources import DataConfig, load_corpus

    corpus = load_corpus(DataConfig(source="fashion-demo"))
    truth = embedded_truth().labels
    for kind in range(10):
        for number, image in enumerate((truth == kind).nonzero().squeeze(1)[:65].tolist()):
            known = kind < 5 and number < 5
            folder = tmp_path / ("labeled/" + corpus.class_names[kind] if known else "pool")
            folder.mkdir(parents=True, exist_ok=True)
            pixels = corpus.train_images[torch.tensor([image])][0, 0].numpy()
            Image.fromarray(pixels).save(folder / f"{kind}-{number}.png")
    run = tmp_path / "run"
    main(["train", "--labeled", str(tmp_path / "labeled"), "--unlabeled", str(tmp_path / "pool"),
          "--out", str(run)])  # fmt: skip
    main(["discover", str(run)])
    groups: dict[str, list[int]] = {}
    for row in table(run / "new-classes/groups.csv"):
        groups.setdefault(row["group"], []).append(int(row["path"].rsplit("/", 1)[1][0]))
    assert 4 <= len(groups) <= 6
    pure = {
        int(np.bincount(kinds).argmax())
        for kinds in groups.values()
        if np.bincount(kinds).max() > 0.7 * len(kinds)
    }
    assert len(pure & {5, 6, 7, 8, 9}) >= 3
    bags = next(number for number, kinds in groups.items() if np.bincount(kinds).argmax() == 8)
    capsys.readouterr()
    main(["discover", str(run), "--accept", f"{bags}=bag", "--train", str(tmp_path / "more")])
    more = Run(tmp_path / "more")
    assert "bag" in more.class_names
    said = [p for p in more.predict(tmp_path / "pool") if p.label == "bag"]
    assert np.mean(["/8-" in p.path for p in said]) > 0.7
    assert sum("/8-" in p.path for p in said) > 30


def test_a_link_in_the_run_folder_is_not_followed(photos, tmp_path, capsys):
    run, _ = photos
    (tmp_path / "elsewhere").mkdir()
    folder = run / "new-classes"
    if folder.exists():
        folder.rename(tmp_path / "before")
    folder.symlink_to(tmp_path / "elsewhere")
    try:
        assert "link" in fails(capsys, "discover", run)
        assert list((tmp_path / "elsewhere").iterdir()) == []
    finally:
        folder.unlink()

"""Labels that spread through a pool in two passes: as if all of it were in memory."""

import csv
import json
import zipfile

import numpy as np
import pytest
import torch

import ropaws
from ropaws.classify.propagation import Electorate, choose_voters, held_out_mass
from ropaws.cli.main import main
from ropaws.pool import array_files as rows_module
from ropaws.pool.datasets import feature_file
from ropaws.pool.datasets.feature_file import RowNames, is_feature_file, read_feature_table
from ropaws.run import predict as predict_module
from ropaws.run import predict as spreading
from ropaws.run.predict import HeldRows
from tests.insight.test_pool import blobs


@pytest.fixture
def everything_is_mapped(monkeypatch):
    """As if the arrays of the tests were large."""
    for module in (rows_module, feature_file):
        monkeypatch.setattr(module, "MAPPED", 0)


@pytest.mark.parametrize("size", [1, 7, 60, 500])
def test_voters_of_parts_are_those_of_the_whole(size):
    random = torch.Generator().manual_seed(0)
    points = torch.randn(500, 3, generator=random)
    keys = torch.randint(0, 60, (500,), generator=random)  # many are equal: the first ones vote
    voters = Electorate(voters=40)
    for start in range(0, 500, size):
        voters.add(points[start : start + size], keys[start : start + size])
    chosen = choose_voters(500, 40, keys=keys)
    assert torch.equal(voters.positions, chosen)
    assert torch.equal(voters.points, points[chosen])
    assert voters.seen == 500


def test_held_rows_come_back_as_they_were_also_from_disk(monkeypatch):
    for held in (1 << 20, 1):
        monkeypatch.setattr(spreading, "HELD", held)
        rows = HeldRows()
        parts = [torch.randn(count, 3) for count in (4, 1, 6)]
        for part in parts:
            rows.add(part)
        for found, part in zip(rows, parts, strict=True):
            assert torch.equal(found, part)
        rows.close()


@pytest.fixture(scope="module")
def on_features(tmp_path_factory, one_thread):
    """A run on features, and more rows of the same kind."""
    folder = tmp_path_factory.mktemp("features")
    points, truth = blobs(60, 4, seed=0)
    labels = np.full(240, -1)
    for label in range(3):
        labels[np.flatnonzero(truth.numpy() == label)[:4]] = label
    np.savez(folder / "f.npz", features=points.numpy(), labels=labels)
    features = ("--features", str(folder / "f.npz"))
    main(["train", *features, "--out", str(folder / "run"), "--train.steps", "5", "--no-report"])
    np.save(folder / "more.npy", blobs(60, 4, seed=1)[0].numpy())
    return folder / "run", folder / "more.npy"


def table(run, source, out):
    main(["predict", str(run), str(source), "--propagate", "--out", str(out)])
    with out.open(newline="") as file:
        return list(csv.DictReader(file)), json.loads((out.parent / f"{out.name}.json").read_text())


def same(found, expected):
    (rows, facts), (wanted, others) = found, expected
    assert facts["threshold"] == pytest.approx(others["threshold"], abs=1e-5)
    assert len(rows) == len(wanted)
    for row, other in zip(rows, wanted, strict=True):
        assert row["label"] == other["label"]
        assert row["path"].rpartition("#")[2] == other["path"].rpartition("#")[2]
        for name in ("in_domain", "similarity", "p(0)", "p(1)", "p(2)"):
            assert float(row[name]) == pytest.approx(float(other[name]), abs=1e-5)


@pytest.mark.parametrize("prior", [True, False])
def test_features_in_blocks_and_mapped_are_labeled_as_in_memory(
    on_features, tmp_path, monkeypatch, everything_is_mapped, prior
):
    """With few voters, so that most rows ask them."""
    run, source = on_features
    config = json.loads((run / "config.json").read_text())
    config["method"]["in_domain_prior"] = prior
    (run / "config.json").write_text(json.dumps(config))
    for function in (Electorate.__init__, held_out_mass):
        monkeypatch.setitem(function.__kwdefaults__, "voters", 30)
    blocks = []
    embed = ropaws.Run.embed
    monkeypatch.setattr(ropaws.Run, "embed", lambda *a: blocks.append(len(a[1])) or embed(*a))
    whole = table(run, source, tmp_path / "whole.csv")
    monkeypatch.setattr(predict_module, "ROWS", 7)
    blocks.clear()
    same(table(run, source, tmp_path / "blocks.csv"), whole)
    assert max(blocks) == 7
    np.savez(tmp_path / "more.npz", features=np.load(source))
    same(table(run, tmp_path / "more.npz", tmp_path / "npz.csv"), whole)
    in_python = ropaws.predict(run, np.load(source, mmap_mode="r"), propagate=True)
    assert [item.path for item in in_python] == [""] * 240
    for item, row in zip(in_python, whole[0], strict=True):
        assert item.in_domain == pytest.approx(float(row["in_domain"]), abs=1e-5)


def test_large_arrays_are_mapped_and_small_or_compressed_ones_read(tmp_path, monkeypatch):
    values = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    np.save(tmp_path / "a.npy", values)
    np.save(tmp_path / "columns.npy", np.asfortranarray(values))
    np.savez(tmp_path / "a.npz", names=np.arange(50).astype(str), features=values)
    np.savez_compressed(tmp_path / "small.npz", features=values)
    for name in ("a.npy", "a.npz"):
        assert not isinstance(read_feature_table(tmp_path / name).features.array, np.memmap)
    for module in (rows_module, feature_file):
        monkeypatch.setattr(module, "MAPPED", 100)
    for name in ("a.npy", "columns.npy", "a.npz", "small.npz"):
        found = read_feature_table(tmp_path / name)
        assert isinstance(found.features.array, np.memmap) == (name != "small.npz")
        np.testing.assert_array_equal(found.features[:], values)
        np.testing.assert_array_equal(found.features[torch.tensor([4, 2])], values[[4, 2]])
        assert is_feature_file(tmp_path / name)
    assert read_feature_table(tmp_path / "a.npz").names[49] == "49"


def test_rows_without_names_are_as_many_as_one_likes(tmp_path, monkeypatch):
    monkeypatch.setenv("ROPAWS_MOST_PARSED_BYTES", "1000")
    np.save(tmp_path / "a.npy", np.ones((50, 4), np.float32))
    assert read_feature_table(tmp_path / "a.npy").names[49].endswith("a.npy#49")
    np.savez(tmp_path / "a.npz", names=np.arange(50).astype(str), features=np.ones((50, 4)))
    with pytest.raises(ValueError, match="50 rows: their list has"):
        read_feature_table(tmp_path / "a.npz")
    names = RowNames(None, 10**9)
    assert (len(names), names[5], list(names[3:5])) == (10**9, "", ["", ""])
    with pytest.raises(IndexError):
        RowNames(tmp_path, 3)[3]


def test_a_mapped_array_with_a_row_that_is_not_finite_or_a_false_header_is_refused(
    tmp_path, everything_is_mapped
):
    values = np.ones((50, 4), np.float32)
    values[[30, 40], 1] = np.inf
    np.save(tmp_path / "a.npy", values)
    with pytest.raises(ValueError, match="row 30 is not finite, of 2 such rows"):
        read_feature_table(tmp_path / "a.npy")
    np.savez(tmp_path / "a.npz", features=np.ones((50, 4)))
    content = (tmp_path / "a.npz").read_bytes().replace(b"(50, 4)", b"(99, 9)")
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.npz is not a readable \.npz file .*99, 9.* needs"):
        read_feature_table(tmp_path / "a.npz")
    with zipfile.ZipFile(tmp_path / "b.npz", "w") as archive:
        archive.writestr("features.npy", b"no array")
    with pytest.raises(ValueError, match=r"not an \.npy array"):
        read_feature_table(tmp_path / "b.npz")


def test_images_spread_alike_from_memory_and_from_disk(trained, tmp_path, monkeypatch):
    run, photos = trained
    found = []
    for held in (1 << 20, 1):
        monkeypatch.setattr(spreading, "HELD", held)
        out = tmp_path / f"{held}.csv"
        main(["predict", str(run), str(photos / "pool"), "--propagate", "--out", str(out)])
        found.append(out.read_text())
    assert found[0] == found[1]

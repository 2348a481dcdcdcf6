"""Labels for images: the same for every kind of input, with and without propagation."""

import csv
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save_file

import ropaws
from ropaws import RoPAWS, Run
from ropaws import equations as eq
from ropaws.classify.propagation import Electorate, held_out_mass, pool_posterior
from ropaws.cli.main import main
from ropaws.embedding.backbones import ModelConfig, build_encoder
from ropaws.methods import LabeledEmbeddings
from ropaws.pool.decoding import read_square
from ropaws.run import run as run_module
from ropaws.run.manifest import model_digest
from ropaws.run.predict import PoolPropagation, Predictor
from tests import tiny
from tests.photos import NAMES


def test_predict_in_python_takes_paths_images_and_arrays(trained):
    run, photos = trained
    path = photos / "pool" / "rows-0.png"
    with Image.open(path) as image:
        by_path, by_image, by_array = ropaws.predict(run, [path, image.copy(), np.asarray(image)])
    assert by_path.path == str(path)
    assert by_path.probabilities == pytest.approx(by_image.probabilities, abs=1e-6)
    assert by_path.probabilities == pytest.approx(by_array.probabilities, abs=1e-6)
    assert ropaws.predict(run, [path], threshold=1.0)[0].out_of_class
    assert not ropaws.predict(run, [path], threshold=0.0)[0].out_of_class
    with pytest.raises(ValueError, match="cannot be read"):
        ropaws.predict(run, [photos / "nowhere.png"])


def test_one_image_is_one_image_and_an_array_of_images_is_many(trained):
    run, photos = trained
    with Image.open(photos / "pool" / "rows-0.png") as opened:
        image = opened.convert("RGB")
    array = np.asarray(image)
    gray = np.asarray(image.convert("L"))
    (expected,) = ropaws.predict(run, [image])
    for single in (image, array, gray, gray[:, :, None], np.asarray(image.convert("RGBA"))):
        (found,) = ropaws.predict(run, single)
        assert found.probabilities == pytest.approx(expected.probabilities, abs=1e-6)
    for several in (
        np.stack([array] * 4),
        np.stack([gray] * 4),
        [array] * 4,
        np.stack([gray[:, :, None]] * 4),
    ):
        found = ropaws.predict(run, several)
        assert len(found) == 4
        assert found[3].probabilities == pytest.approx(expected.probabilities, abs=1e-6)
    assert ropaws.predict(run, np.zeros((0, 36, 36, 3), np.uint8)) == []


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (np.zeros((36, 36, 3)), r"got float64; if they are from 0 to 1, give \(255 \* array\)"),
        ([np.zeros((36, 36), np.float32)], "got float32"),
        ([np.zeros((36, 36), bool)], "got bool"),
        (np.zeros((2, 36, 36, 3), np.int64), "got int64"),
        ([np.zeros((36, 36, 2), np.uint8)], r"got shape \(36, 36, 2\)"),
        ([np.zeros((0, 36, 3), np.uint8)], r"got shape \(0, 36, 3\)"),
        ([np.zeros(36, np.uint8)], r"got shape \(36,\)"),
        ([torch.zeros(36, 36)], "got Tensor"),
        ([3], "got int"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_arrays_that_are_no_images_are_refused(trained, wrong, words):
    with pytest.raises(ValueError, match=words):
        ropaws.predict(trained[0], wrong)


def test_a_run_on_gray_images_takes_any_image(photos, tmp_path):
    """As the demo's runs are: their images come as arrays of one channel."""
    run = ropaws.train(tiny.config(tiny.write_data(tmp_path / "data.npz")), tmp_path / "run")
    (prediction,) = ropaws.predict(run, [photos / "pool" / "rows-0.png"])
    assert prediction.nearest_class in NAMES
    assert prediction.nearest.isdigit()  # no file: the position in the training images


def test_a_run_predicts_without_its_training_images(trained, tmp_path):
    run, photos = trained
    image = [photos / "pool" / "rows-0.png"]
    moved = shutil.copytree(run, tmp_path / "run")
    config = json.loads((moved / "config.json").read_text())
    config["data"].update(labeled="gone", unlabeled=["gone"], test="gone")
    (moved / "config.json").write_text(json.dumps(config))
    assert ropaws.predict(moved, image) == ropaws.predict(run, image)


# Label propagation over the images that are predicted


def with_method(run, copy, **settings):
    """A copy of a run that was trained with other settings of the method."""
    shutil.copytree(run, copy)
    config = json.loads((copy / "config.json").read_text())
    config["method"].update(settings)
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def embedded(run, files):
    """All files at once, through the network of the run."""
    squares = [read_square(file, run.config.data.image_size) for file in files]
    return run.outputs(torch.from_numpy(np.stack(squares)).permute(0, 3, 1, 2)).embedding


def predicted(run, sources, out, *options):
    """File name: row of the table that `ropaws predict --propagate` writes."""
    main(["predict", str(run), *map(str, sources), "--out", str(out), "--propagate", *options])
    with out.open(newline="") as file:
        return {row["path"]: row for row in csv.DictReader(file)}


def probabilities(rows, files):
    return torch.tensor([[float(rows[str(file)][f"p({name})"]) for name in sorted(NAMES)] for file in files])


@pytest.mark.parametrize(
    "settings",
    [
        {"prior_temperature": 0.1},
        {"prior_temperature": 0.1, "label_ratio": 0.2},
        {"prior_temperature": 0.1, "self_vote": True},
        {"in_domain_prior": False},
    ],
    ids=str,
)
def test_labels_propagate_as_the_run_was_trained_and_over_all_images(
    trained, tmp_path, monkeypatch, settings
):
    """Batches of 5 give what Eq. (12) says of all 36 images at once, with the run's own settings."""
    folder = with_method(trained[0], tmp_path / "run", **settings)
    files = sorted((trained[1] / "pool").iterdir())
    monkeypatch.setattr(run_module, "BATCH", 5)
    rows = predicted(folder, [trained[1] / "pool"], tmp_path / "labels.csv")
    run = Run(folder)
    points = embedded(run, files)
    has_prior = settings.get("in_domain_prior", True)
    used = {"prior_temperature": None} if not has_prior else settings
    expected = eq.ropaws_posterior(
        points,
        run.support.embeddings,
        run.support.one_hot,
        temperature=run.method.temperature,
        **used,
    )
    # Given in-class; and one temperature for all images, by which no order changes.
    shares = expected.probs - ((1 - expected.in_domain) / 3)[:, None]
    given = shares / shares.sum(dim=1, keepdim=True)
    voters = Electorate()
    voters.add(points, torch.arange(len(points)))
    temperature = PoolPropagation(run, voters, None).temperature
    calibrated = eq.sharpen(given, temperature=temperature)
    torch.testing.assert_close(probabilities(rows, files), calibrated, atol=2e-3, rtol=0)
    in_domain = torch.tensor([float(rows[str(file)]["in_domain"]) for file in files])
    plain = run.method.classify(points, run.support)
    # Without a prior the posterior is 1 everywhere and cannot tell; the plain score does.
    judged = expected.in_domain if has_prior else plain.in_domain
    torch.testing.assert_close(in_domain, judged, atol=2e-4, rtol=0)
    assert (expected.probs - plain.probs).abs().max() > 0.01  # propagation makes a difference here


def test_propagated_confidence_is_the_accuracy_of_held_out_labels():
    """Two classes that overlap; before, every confidence was near one half, however right the labels are."""
    random = torch.Generator().manual_seed(0)
    truth = torch.arange(600) % 2
    centers = F.normalize(torch.randn(2, 16, generator=random), dim=1)
    points = F.normalize(centers[truth] + 0.4 * torch.randn(600, 16, generator=random), dim=1)
    support = LabeledEmbeddings(points[:40], truth[:40], 2)
    method = RoPAWS(temperature=0.5, prior_temperature=2.0)
    run = SimpleNamespace(
        model=None, method=method, support=support, kernel=method.kernel(support), threshold=0.5
    )
    voters = Electorate()
    voters.add(points[40:], torch.arange(560))
    found = PoolPropagation(run, voters, None)(points[40:], None, 0).outputs.probs
    plain = pool_posterior(points[40:], support.embeddings, support.one_hot, run.kernel).probs
    right = float((found.argmax(dim=1) == truth[40:]).double().mean())
    assert 0.8 < right < 0.99
    assert float(plain.amax(dim=1).mean()) < right - 0.15  # what calibration mends
    assert float(found.amax(dim=1).mean()) == pytest.approx(right, abs=0.06)


def test_a_class_with_more_labels_has_no_larger_say(trained, tmp_path, monkeypatch):
    """Every label of one class twice: the same predictions, up to the labels that are held out."""
    monkeypatch.setattr(PoolPropagation, "_calibrated", lambda *_: 1.0)
    run = with_method(trained[0], tmp_path / "run", prior_temperature=0.1)
    pool = [trained[1] / "pool"]
    before = predicted(run, pool, tmp_path / "before.csv")
    support = load_file(run / "support.safetensors")
    facts = json.loads((run / "data.json").read_text())
    rows = [*range(len(support["labels"])), *(support["labels"] == 1).nonzero().squeeze(1).tolist()]
    for name in ("indices", "labels"):
        facts["labeled"][name] = [facts["labeled"][name][row] for row in rows]
    facts["labeled_names"] = [facts["labeled_names"][row] for row in rows]
    (run / "data.json").write_text(json.dumps(facts))
    metadata = {"model": model_digest(run)}
    save_file({name: value[rows] for name, value in support.items()}, run / "support.safetensors", metadata)
    after = predicted(run, pool, tmp_path / "after.csv")
    torch.testing.assert_close(probabilities(after, after), probabilities(before, after), atol=2e-4, rtol=0)
    for path, row in after.items():
        assert float(row["in_domain"]) == pytest.approx(float(before[path]["in_domain"]), abs=2e-4)


def test_propagation_depends_on_neither_the_order_of_the_files_nor_the_batches(
    trained, tmp_path, monkeypatch
):
    """Also where only some of the images vote."""
    for function in (Electorate.__init__, held_out_mass):
        monkeypatch.setitem(function.__kwdefaults__, "voters", 8)
    files = sorted((trained[1] / "pool").iterdir())
    shuffled = [files[i] for i in np.random.default_rng(0).permutation(len(files))]
    found, thresholds = [], []
    for batch, order in ((512, files), (7, files), (512, files[::-1]), (3, shuffled)):
        monkeypatch.setattr(run_module, "BATCH", batch)
        out = tmp_path / "labels.csv"
        found.append(predicted(trained[0], order, out))
        assert list(found[-1]) == [str(file) for file in order]
        thresholds.append(json.loads((tmp_path / "labels.csv.json").read_text())["threshold"])
    for rows in found[1:]:
        for path, row in rows.items():
            for column in ("in_domain", *(f"p({name})" for name in NAMES)):
                assert float(row[column]) == pytest.approx(float(found[0][path][column]), abs=1e-5)
            assert row["out_of_class"] == found[0][path]["out_of_class"]
    assert thresholds[1:] == pytest.approx(thresholds[:1] * 3, abs=1e-5)
    in_python = ropaws.predict(trained[0], files, propagate=True)
    for item in in_python:
        assert item.in_domain == pytest.approx(float(found[0][item.path]["in_domain"]), abs=1e-5)


def test_the_threshold_is_of_the_posterior_and_no_label_is_its_own_witness(trained, tmp_path):
    files = sorted((trained[1] / "pool").iterdir())
    rows = predicted(trained[0], files, tmp_path / "labels.csv")
    facts = json.loads((tmp_path / "labels.csv.json").read_text())
    run = Run(trained[0])
    points, support = embedded(run, files), run.support
    held_out = held_out_mass(points, support.embeddings, support.labels, run.kernel).mass.sum(dim=1)
    assert len(held_out) == 9
    assert facts["threshold"] == pytest.approx(float(held_out.quantile(0.05)), abs=1e-4)
    # The first labeled image, by hand: it joins the pool, and its label is not known.
    kept = torch.arange(9) > 0
    alone = pool_posterior(
        torch.cat([points, support.embeddings[:1]]),
        support.embeddings[kept],
        support.one_hot[kept],
        run.kernel,
    )
    assert held_out[0] == pytest.approx(float(alone.in_domain[-1]), rel=0.1)
    for row in rows.values():
        assert (row["out_of_class"] == "True") == (float(row["in_domain"]) < facts["threshold"])
    given = predicted(trained[0], files, tmp_path / "given.csv", "--threshold", "0.4")
    assert json.loads((tmp_path / "given.csv.json").read_text())["threshold"] == 0.4
    assert all((row["out_of_class"] == "True") == (float(row["in_domain"]) < 0.4) for row in given.values())


@pytest.mark.parametrize("labels", [30, 120])
def test_the_threshold_keeps_what_is_in_class(labels):
    """Three clusters in a sea of noise. The threshold of the plain score would lose most of it."""
    random = torch.Generator().manual_seed(0)
    centers = F.normalize(torch.randn(3, 16, generator=random), dim=1)

    def cluster(count):
        near = centers[torch.arange(count) % 3]
        return F.normalize(near + 0.1 * torch.randn(count, 16, generator=random), dim=1)

    support = LabeledEmbeddings(cluster(labels), torch.arange(labels) % 3, 3)
    noise = F.normalize(torch.randn(150, 16, generator=random), dim=1)
    points = torch.cat([cluster(300), noise])
    method = RoPAWS(prior_temperature=0.1)
    plain = method.threshold(support)
    run = SimpleNamespace(
        model=None, method=method, support=support, kernel=method.kernel(support), threshold=plain
    )
    verdicts = Predictor(run, propagate=True).judge(method.classify(points, support), torch.arange(450))
    kept = verdicts.outputs.in_domain >= verdicts.threshold
    assert 0.9 <= kept[:300].double().mean() <= 0.99
    assert kept[300:].double().mean() < 0.05
    assert (verdicts.outputs.in_domain[:300] >= plain).double().mean() < 0.5


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Of a backbone whose batch norms are not those of a new one: to fold them changes the rounding."""
    torch.manual_seed(0)
    backbone = build_encoder(ModelConfig(backbone="small"), channels=3).backbone
    for module in backbone.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            for values in (module.weight, module.running_var):
                torch.nn.init.uniform_(values, 0.5, 2.0)
            torch.nn.init.normal_(module.running_mean, std=0.5)
    file = tmp_path_factory.mktemp("weights") / "small.safetensors"
    save_file({name: value.contiguous() for name, value in backbone.state_dict().items()}, file)
    return file


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_predict_says_of_the_test_images_what_the_evaluation_says(photos, weights, tmp_path, precision):
    """A frozen backbone: files have its features from the cache, images in memory from their pixels."""
    main(["train", "--labeled", str(photos / "labeled"), "--unlabeled", str(photos / "pool"),
          "--test", str(photos / "test"), "--out", str(tmp_path / "run"), "--init", str(weights),
          "--train.steps", "20", "--train.precision", precision, "--no-report"])  # fmt: skip
    run = Run(tmp_path / "run")
    files = [Path(item.path) for item in run.predict(photos / "test")]
    for source in (photos / "test", [Image.open(file) for file in files], [Image.open(files[-1])]):
        predicted = Run(tmp_path / "run").predict(source)
        rows = slice(-len(predicted), None)
        probabilities = torch.tensor([item.probabilities for item in predicted])
        in_domain = torch.tensor([item.in_domain for item in predicted])
        torch.testing.assert_close(probabilities, run.test.outputs.probs[rows], rtol=0, atol=1e-5)
        torch.testing.assert_close(in_domain, run.test.outputs.in_domain[rows], rtol=0, atol=1e-5)

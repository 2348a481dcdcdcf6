"""The part "labels" of evaluate: where labels are compared, and what is written of them."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console

from ropaws.classify.soft_nn import LabeledEmbeddings
from ropaws.run.evaluate import PARTS

WRONG = list(range(4, 120, 13))  # images whose labels are wrong


class Gone:
    @property
    def train_images(self):
        raise FileNotFoundError("no data file at somewhere.npz")


def fake_run(*, frozen, corpus, console):
    """Three classes. The features show the truth; the embedding is what a head made of the given labels."""
    truth = torch.arange(3).repeat_interleave(40)
    labels = truth.clone()
    labels[WRONG] = (truth[WRONG] + 1) % 3
    noise = 0.3 * torch.randn(120, 8, generator=torch.Generator().manual_seed(0))
    split = SimpleNamespace(indices=torch.arange(100, 220))

    def features(images, indices):
        assert images == "images"
        assert torch.equal(indices, split.indices)
        return torch.eye(8)[truth] + noise

    return SimpleNamespace(
        support=LabeledEmbeddings(F.normalize(torch.eye(8)[labels] + noise / 3, dim=1), labels, 3),
        config=SimpleNamespace(model=SimpleNamespace(frozen=frozen)),
        kernel=SimpleNamespace(temperature=0.1),
        class_names=["ant", "bee", "cow"],
        facts=SimpleNamespace(split=split, labeled_names=None),
        corpus=corpus,
        features=features,
        say=lambda line: console.print(line, soft_wrap=True),
    )


@pytest.fixture
def console(tmp_path):
    with (tmp_path / "console").open("w+") as file:
        yield Console(file=file)


def test_a_frozen_backbone_has_not_learned_wrong_labels(console):
    found = PARTS["labels"](
        fake_run(frozen=True, corpus=SimpleNamespace(train_images="images"), console=console), {}
    )
    positions = {error["position"] for error in found["label_errors"]}
    assert positions <= set(WRONG)
    assert len(positions) >= 6
    error = next(error for error in found["label_errors"] if error["position"] == 17)
    assert error["image"] == 117
    assert error["name"] == "training image 117"
    assert (error["label"], error["suspected"]) == ("bee", "ant")
    assert error["other"] > 2 * error["own"]
    assert found["label_check"]["contradicted"] >= len(positions)
    assert found["label_check"]["by_chance"] > 0
    assert found["leave_one_out"] > 0.9  # in the embedding, as the run classifies


def test_without_frozen_features_the_embedding_counts(console):
    trained = PARTS["labels"](fake_run(frozen=False, corpus=Gone(), console=console), {})
    assert trained["label_errors"] == []
    gone = PARTS["labels"](fake_run(frozen=True, corpus=Gone(), console=console), {})
    assert gone == trained
    console.file.seek(0)
    said = console.file.read()
    assert "not available (no data file at somewhere.npz); labels are compared in the run's embedding" in said

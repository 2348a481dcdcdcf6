"""A finished run, loaded for use; and its evaluation."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import Tensor

from ropaws.config import RunConfig, read_config
from ropaws.data.corpus import Images
from ropaws.data.files import drop_unreadable_tests
from ropaws.data.sources import load_corpus
from ropaws.evaluation.features import embed
from ropaws.evaluation.soft_nn import evaluate_soft_nn
from ropaws.folder import CONFIG, EVALUATION, DataFacts, check_same_data, read_facts, training_seconds
from ropaws.models import Encoder, build_encoder
from ropaws.training.checkpoint import load_model, write_json
from ropaws.training.hardware import choose_device, choose_precision, half_type
from ropaws.training.progress import watch_files


@dataclass(frozen=True)
class Trained:
    """Settings, data facts and network of a run."""

    config: RunConfig
    facts: DataFacts
    model: Encoder

    def embed(self, images: Images, indices: Tensor | None = None) -> Tensor:
        """Unit embeddings of the images' central squares.   (n, channels, h, w) uint8  ->  (n, d)"""
        size = self.config.augment.size
        return embed(self.model, images, indices, size=size, normalize=self.facts.normalize)


def read_run_config(run: Path) -> RunConfig:
    if not (run / CONFIG).is_file():
        raise FileNotFoundError(f"{run} is not a run folder: it has no {CONFIG}; `ropaws train` makes one")
    return read_config(run / CONFIG)


def load_run(run: Path | str, *, device: str | None = None) -> Trained:
    """Network and data facts of a run folder; on the device it was trained for, or another."""
    run = Path(run)
    config = read_run_config(run)
    facts = read_facts(run)
    place = choose_device(device or config.train.device)
    half = half_type(choose_precision(config.train.precision, place))
    model = build_encoder(config.model, channels=len(facts.normalize.mean), autocast=half)
    load_model(run, model)
    return Trained(config, facts, model.to(place).eval())


def evaluate(run: Path | str, *, device: str | None = None) -> dict[str, Any]:
    """Test a run with its soft nearest-neighbour classifier; written to evaluation.json too.

    All figures are fractions. The support is all labelled images, a central crop each.
    """
    run = Path(run)
    corpus = load_corpus(read_run_config(run).data, watch=watch_files(Console(stderr=True)))
    if len(corpus.test_images) == 0:
        raise ValueError(f"the data of {run} has no test images; evaluation needs some with labels")
    trained = load_run(run, device=device)
    check_same_data(run, trained.facts, corpus)
    corpus = drop_unreadable_tests(corpus)
    split = trained.facts.split
    results: dict[str, Any] = evaluate_soft_nn(
        trained.embed(corpus.test_images),
        corpus.test_labels,
        trained.embed(corpus.train_images, split.indices),
        split.labels,
        classes=len(trained.facts.class_names),
        temperature=trained.config.method.temperature,
    )
    results["seconds"] = training_seconds(run)
    write_json(run / EVALUATION, results)
    return results


def collapsed(support: Tensor) -> bool:
    """Do the labelled images lie in one point, so that nothing was told apart?   support (l, d)"""
    return float((support @ support.T).mean()) > COLLAPSED


COLLAPSED = 0.98  # mean similarity of the labelled images above which nothing was told apart

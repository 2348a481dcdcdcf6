"""A finished run, loaded for use."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from ropaws.config import RunConfig, read_config
from ropaws.data.corpus import Images
from ropaws.evaluation.features import embed
from ropaws.evaluation.in_domain import (
    TYPICAL_PRIOR,
    default_threshold,
    fitted_prior_temperature,
    nearest_fellow,
)
from ropaws.folder import CONFIG, DataFacts, LabeledEmbeddings, read_facts
from ropaws.methods import RoPAWS
from ropaws.models import Encoder, build_encoder
from ropaws.training.checkpoint import load_model
from ropaws.training.hardware import choose_device, choose_precision, half_type


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


def load_run(run: Path | str, *, device: str | None = None, snapshot: Path | None = None) -> Trained:
    """Network and data facts of a run folder; on the device it was trained for, or another.

    snapshot: weights of an earlier step, see train.keep_every
    """
    run = Path(run)
    config = read_run_config(run)
    facts = read_facts(run)
    place = choose_device(device or config.train.device)
    half = half_type(choose_precision(config.train.precision, place))
    model = build_encoder(config.model, channels=len(facts.normalize.mean), autocast=half)
    load_model(run, model, snapshot)
    return Trained(config, facts, model.to(place).eval())


class Border(NamedTuple):
    """Where in-class ends for a run, judged by its labelled images."""

    prior_temperature: float
    threshold: float  # of the in-domain probability


def in_domain_border(method: object, support: LabeledEmbeddings) -> Border:
    """The prior that fits the distances among the labelled images, and the threshold that suits them."""
    fellows = nearest_fellow(support.embeddings, support.labels)
    typical = method.typical_prior if isinstance(method, RoPAWS) else TYPICAL_PRIOR
    temperature = fitted_prior_temperature(fellows, typical)
    return Border(temperature, default_threshold(fellows, temperature))


def collapsed(support: Tensor) -> bool:
    """Do the labelled images lie in one point, so that nothing was told apart?   support (l, d)"""
    return float((support @ support.T).mean()) > COLLAPSED


COLLAPSED = 0.98  # mean similarity of the labelled images above which nothing was told apart

"""Uncurated mixes of the literature by name: known classes, and what else is in the pool."""

from dataclasses import dataclass

from ropaws.data.corpus import Corpus, keep_classes, thin_out
from ropaws.data.datasets.archives import CIFAR10_CLASSES

ANIMALS = tuple(CIFAR10_CLASSES[i] for i in (2, 3, 4, 5, 6, 7))  # bird cat deer dog frog horse


@dataclass(frozen=True)
class Mix:
    """How a pool is combined from named datasets."""

    about: str
    source: str
    extra: tuple[str, ...] = ()  # joins without its labels
    known: tuple[str, ...] | int | None = None  # known classes: by name, the first ones by number, or all
    in_class: int | None = None  # images of known classes to keep
    out_of_class: int | None = None  # out-of-class images to keep

    def keep_known(self, corpus: Corpus) -> Corpus:
        """Of the source: the images of the other classes lose their labels."""
        if self.known is None:
            return corpus
        names = corpus.class_names[: self.known] if isinstance(self.known, int) else self.known
        return keep_classes(corpus, names)

    def thin_out(self, corpus: Corpus) -> Corpus:
        """Of all that has joined: as many images as the mix has."""
        if self.in_class is None or self.out_of_class is None:
            return corpus
        return thin_out(corpus, in_class=self.in_class, out_of_class=self.out_of_class)


def _paper(source: str, extra: str) -> Mix:
    return Mix(f"RoPAWS: all of {source}, and all of {extra} as out-of-class", source, (extra,))


def _opencos(source: str, extra: str) -> Mix:
    about = f"OpenCoS: 10,000 images of {source} and 40,000 of {extra} as out-of-class"
    return Mix(about, source, (extra,), in_class=10_000, out_of_class=40_000)


PAIRS = [
    ("cifar10", "cifar100"), ("cifar10", "tiny-imagenet"), ("cifar10", "svhn"),
    ("cifar100", "svhn"), ("cifar100", "tiny-imagenet"),
]  # fmt: skip

MIXES: dict[str, Mix] = {
    **{f"{source}+{extra}": _paper(source, extra) for source, extra in PAIRS},
    **{f"opencos:{source}+{extra}": _opencos(source, extra) for source, extra in PAIRS[1:]},
    "cifar10-animals": Mix(
        "OpenMatch: the 6 animals of cifar10 known, the 4 vehicles out-of-class", "cifar10", known=ANIMALS
    ),
    "cifar100-50": Mix(
        "the first 50 classes of cifar100 known, the other 50 out-of-class", "cifar100", known=50
    ),
}

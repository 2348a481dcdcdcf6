"""The named datasets and uncurated mixes: where each comes from, and how its official files are read."""

import importlib.resources
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ropaws.core.files import TABLE_FILE, is_image_file, read_regular
from ropaws.pool.corpus import Corpus, ImageFiles, keep_classes, thin_out
from ropaws.pool.datasets import archives
from ropaws.pool.datasets.archives import CIFAR10_CLASSES, Remote, Watch, fetch, is_archive, read_npz, unpack
from ropaws.pool.decoding import walk_images
from ropaws.pool.listing import Pool, merge


def list_tiny_imagenet(root: Path) -> ImageFiles:
    """train/WNID/images/*.JPEG; val/images/*.JPEG with the labels in val_annotations.txt."""
    folder = root / "tiny-imagenet-200"
    names = _read_lines(folder / "wnids.txt")
    train = _by_class(folder / "train", names)
    rows = [line.split("\t") for line in _read_lines(folder / "val" / "val_annotations.txt")]
    if any(len(row) < 2 for row in rows):
        raise ValueError(f"{folder / 'val/val_annotations.txt'} is damaged; unpack it again")
    test = Pool(tuple(folder / "val" / "images" / row[0] for row in rows), tuple(row[1] for row in rows))
    return ImageFiles(tuple(sorted(names)), train, test)


def list_imagenet(root: Path) -> ImageFiles:
    """train/WNID/*.JPEG; val/WNID/*.JPEG, or val/*.JPEG with the labels of the devkit or of Kaggle."""
    folder = root / "imagenet"
    names = sorted(path.name for path in (folder / "train").iterdir() if path.is_dir())
    if any(path.is_dir() for path in (folder / "val").iterdir()):
        test = _by_class(folder / "val", names)
    else:
        label_of = _imagenet_val_labels(folder)
        files = sorted(path for path in (folder / "val").iterdir() if is_image_file(path.name))
        missing = [path.name for path in files if path.stem not in label_of]
        if missing:
            raise ValueError(f"{folder}: no label for val/{missing[0]}")
        test = Pool(tuple(files), tuple(label_of[path.stem] for path in files))
    return ImageFiles(tuple(names), _by_class(folder / "train", names), test)


def _imagenet_val_labels(folder: Path) -> dict[str, str]:
    """WNID of each validation image, from LOC_val_solution.csv or ILSVRC2012_devkit_t12."""
    table = folder / "LOC_val_solution.csv"
    if table.is_file():
        rows = [line.split(",") for line in _read_lines(table)[1:]]
        return {name: boxes.split()[0] for name, boxes in rows}
    kit = folder / "ILSVRC2012_devkit_t12" / "data"
    if not kit.is_dir():
        raise FileNotFoundError(
            f"{folder / 'val'} has no class folders; put ILSVRC2012_devkit_t12 (unpacked) or"
            f" LOC_val_solution.csv into {folder}, which have the labels"
        )
    import scipy.io  # slow to load

    synsets = scipy.io.loadmat(kit / "meta.mat", squeeze_me=True)["synsets"]
    wnid_of = {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in synsets}
    numbers = _read_lines(kit / "ILSVRC2012_validation_ground_truth.txt")
    return {
        f"ILSVRC2012_val_{index:08d}": wnid_of[int(number)] for index, number in enumerate(numbers, start=1)
    }


def list_semi_inat(root: Path) -> ImageFiles:
    """l_train/CLASS/*, u_train/*: the uncurated setting. Tested on val/CLASS/*."""
    folder = root / "semi-inat-2021"
    return _semi_inat(folder, tuple(walk_images(folder / "u_train")))


def list_semi_inat_curated(root: Path) -> ImageFiles:
    """List Semi-iNat with the in-class part of u_train, whose file names are in u_train_in.txt."""
    folder = root / "semi-inat-2021"
    names = [Path(line).name for line in _read_lines(folder / "u_train_in.txt")]
    pool = {path.name: path for path in walk_images(folder / "u_train")}
    missing = [name for name in names if name not in pool]
    if missing:
        raise ValueError(f"{folder / 'u_train_in.txt'} names {missing[0]}, which is not in u_train")
    return _semi_inat(folder, tuple(pool[name] for name in names))


def _semi_inat(folder: Path, pool: tuple[Path, ...]) -> ImageFiles:
    names = sorted((path.name for path in (folder / "l_train").iterdir() if path.is_dir()), key=int)
    train = merge([_by_class(folder / "l_train", names), Pool(pool, (None,) * len(pool))])
    return ImageFiles(tuple(names), train, _by_class(folder / "val", names))


def _by_class(folder: Path, names: list[str]) -> Pool:
    images: list[Path] = []
    labels: list[str] = []
    for name in sorted(names):
        found = list(walk_images(folder / name))
        if not found:
            raise FileNotFoundError(f"incomplete: no image in {folder / name}; unpack it again")
        images += found
        labels += [name] * len(found)
    return Pool(tuple(images), tuple(labels))


def _read_lines(path: Path) -> list[str]:
    try:
        return [line for line in read_regular(path, TABLE_FILE).decode("utf-8").splitlines() if line.strip()]
    except FileNotFoundError:
        raise FileNotFoundError(f"incomplete: no {path}; unpack it again") from None


TORONTO = "https://www.cs.toronto.edu/~kriz"
STANFORD_DIGITS = "http://ufldl.stanford.edu/housenumbers"
ZALANDO = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
UMASS = "http://vis-www.cs.umass.edu/semi-inat-2021"


@dataclass(frozen=True)
class NamedDataset:
    """Facts about a dataset; all places are below the data folder."""

    about: str
    read: Callable[[Path], Corpus | ImageFiles]
    places: tuple[str, ...] = ()  # any of these folders or files: the dataset is there
    page: str = ""
    files: tuple[Remote, ...] = ()  # can be downloaded
    by_hand: str = ""  # else: what to put where
    folder: str = ""  # where the files belong, unpacked ones too


def read_embedded(_root: Path) -> Corpus:
    """Fashion-MNIST pool inside the package: five classes, half of 5,000 images out-of-class."""
    place = importlib.resources.files("ropaws.pool.datasets") / "embedded/fashion.npz"
    with importlib.resources.as_file(place) as path:
        return read_npz(path)


DATASETS: dict[str, NamedDataset] = {
    "fashion-demo": NamedDataset(
        "embedded: 5 classes of garments, 5,000 training images of which half are out-of-class",
        read_embedded,
    ),
    "cifar10": NamedDataset(
        "10 classes, 50,000 + 10,000 images of 32 px",
        archives.read_cifar10,
        ("cifar-10-batches-py", "cifar-10-batches-bin"),
        "https://www.cs.toronto.edu/~kriz/cifar.html",
        (Remote(f"{TORONTO}/cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a"),),
    ),
    "cifar100": NamedDataset(
        "100 classes, 50,000 + 10,000 images of 32 px",
        archives.read_cifar100,
        ("cifar-100-python", "cifar-100-binary"),
        "https://www.cs.toronto.edu/~kriz/cifar.html",
        (Remote(f"{TORONTO}/cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85"),),
    ),
    "svhn": NamedDataset(
        "house numbers, 10 digits, 73,257 + 26,032 images of 32 px",
        lambda root: archives.read_svhn(root / "svhn"),
        ("svhn/train_32x32.mat",),
        "http://ufldl.stanford.edu/housenumbers/",
        (
            Remote(f"{STANFORD_DIGITS}/train_32x32.mat", "e26dedcc434d2e4c54c9b2d4a06d8373"),
            Remote(f"{STANFORD_DIGITS}/test_32x32.mat", "eb5a983be6a315427106f1b164d9cef3"),
        ),
        folder="svhn",
    ),
    "tiny-imagenet": NamedDataset(
        "200 classes, 100,000 + 10,000 images of 64 px",
        list_tiny_imagenet,
        ("tiny-imagenet-200",),
        "http://cs231n.stanford.edu/",
        (
            Remote(
                "http://cs231n.stanford.edu/tiny-imagenet-200.zip", "90528d7ca1a48142e341f4ef8d21d0de"
            ),
        ),
    ),
    "stl10": NamedDataset(
        "10 classes, 5,000 labeled, 100,000 unlabeled (also other classes) + 8,000 images of 96 px",
        archives.read_stl10,
        ("stl10_binary",),
        "https://cs.stanford.edu/~acoates/stl10/",
        (
            Remote(
                "http://ai.stanford.edu/~acoates/stl10/stl10_binary.tar.gz",
                "91f7769df0f17e558f3565bffb0c7dfb",
            ),
        ),
    ),
    "fashion-mnist": NamedDataset(
        "10 classes of garments, 60,000 + 10,000 gray images of 28 px",
        lambda root: archives.read_fashion_mnist(root / "fashion-mnist"),
        ("fashion-mnist/train-images-idx3-ubyte.gz",),
        "https://github.com/zalandoresearch/fashion-mnist",
        (
            Remote(f"{ZALANDO}/train-images-idx3-ubyte.gz", "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
            Remote(f"{ZALANDO}/train-labels-idx1-ubyte.gz", "25c81989df183df01b3e8a0aad5dffbe"),
            Remote(f"{ZALANDO}/t10k-images-idx3-ubyte.gz", "bef4ecab320f06d8554ea6380940ec79"),
            Remote(f"{ZALANDO}/t10k-labels-idx1-ubyte.gz", "bb300cfdad3c16e7a12a480ee83cd310"),
        ),
        folder="fashion-mnist",
    ),
    "imagenet": NamedDataset(
        "1,000 classes, 1,281,167 + 50,000 images; 1 % and 10 % of the labels by a split",
        list_imagenet,
        ("imagenet/train",),
        "https://image-net.org/challenges/LSVRC/2012/",
        by_hand="log in there, download ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar, unpack them to"
        " imagenet/train/WNID/*.JPEG and imagenet/val (with ILSVRC2012_devkit_t12 in imagenet)",
    ),
    "semi-inat": NamedDataset(
        "Semi-iNat 2021, uncurated: 810 classes, 9,721 labeled, 313,248 unlabeled + 4,050 images",
        list_semi_inat,
        ("semi-inat-2021/l_train",),
        "https://github.com/cvl-umass/semi-inat-2021",
        by_hand=f"download l_train.tar.gz, u_train.tar.gz and val.tar.gz from {UMASS}/ and unpack them in"
        " semi-inat-2021 (no checksum is published, so it is not done for you)",
    ),
    "semi-inat-curated": NamedDataset(
        "the same with the 91,336 in-class ones of the unlabeled images",
        list_semi_inat_curated,
        ("semi-inat-2021/u_train_in.txt",),
        "https://github.com/cvl-umass/semi-inat-2021",
        by_hand="unpack l_train.tar.gz, u_train.tar.gz and val.tar.gz in semi-inat-2021, and put a list of"
        " the in-class file names (not among the published files) into semi-inat-2021/u_train_in.txt",
    ),
}  # fmt: skip


def is_there(dataset: NamedDataset, root: Path) -> bool:
    """True if one of its places and all files that need no unpacking are there."""
    plain = [root / dataset.folder / remote.name for remote in dataset.files if not is_archive(remote.name)]
    found = not dataset.places or any((root / place).exists() for place in dataset.places)
    return found and all(path.is_file() for path in plain)


def read_dataset(name: str, root: Path, *, download: bool, watch: Watch) -> Corpus | ImageFiles:
    """Read a named dataset; download it first if it is not there, where that is allowed and possible."""
    dataset = DATASETS[name]
    if not is_there(dataset, root):
        if not dataset.files:
            raise FileNotFoundError(f"no {name} below {root}: {dataset.by_hand}; {dataset.page}")
        files = ", ".join(remote.name for remote in dataset.files)
        place = root / dataset.folder
        remedy = (
            f"put {files} from {dataset.page} into {place}, or name another folder with --data.root"
            " (--root of `ropaws datasets`)"
        )
        archives_there = all((place / remote.name).is_file() for remote in dataset.files)
        if not download and not archives_there:
            raise FileNotFoundError(f"no {name} below {root}: {remedy}, or allow --data.download")
        for remote in dataset.files:
            try:
                path = fetch(remote, place, watch)
            except OSError as error:
                raise FileNotFoundError(
                    f"no {name} below {root}, and {remote.url} cannot be reached ({error}): {remedy}"
                ) from None
            unpack(path, place)
    try:
        return dataset.read(root)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(f"{name} below {root}: {error}") from None


ANIMALS = tuple(CIFAR10_CLASSES[i] for i in (2, 3, 4, 5, 6, 7))  # bird cat deer dog frog horse


@dataclass(frozen=True)
class Mix:
    """How a pool is combined from named datasets."""

    about: str
    source: str
    extra: tuple[str, ...] = ()  # joins without its labels
    known: tuple[str, ...] | tuple[int, ...] | int | None = None
    """Known classes: by name, by number, the first ones, or all."""
    in_class: int | None = None  # images of known classes to keep
    out_of_class: int | None = None  # out-of-class images to keep

    def keep_known(self, corpus: Corpus) -> Corpus:
        """Keep the labels of known classes; the images of the other classes lose theirs."""
        if self.known is None:
            return corpus
        known = range(self.known) if isinstance(self.known, int) else self.known
        names = [corpus.class_names[c] if isinstance(c, int) else c for c in known]
        return keep_classes(corpus, names)

    def thin_out(self, corpus: Corpus) -> Corpus:
        """Keep as many images of all that has joined as the mix has."""
        if self.in_class is None or self.out_of_class is None:
            return corpus
        return thin_out(corpus, in_class=self.in_class, out_of_class=self.out_of_class)


def _paper(source: str, extra: str) -> Mix:
    return Mix(f"RoPAWS: all of {source}, and all of {extra} as out-of-class", source, (extra,))


def _opencos(source: str, extra: str) -> Mix:
    about = f"OpenCoS: 10,000 images of {source} and 40,000 of {extra} as out-of-class"
    return Mix(about, source, (extra,), in_class=10_000, out_of_class=40_000)


def _control(times: int) -> Mix:
    """The in-class part stays as it is; only the number of out-of-class images differs."""
    about = f"control: 10,000 images of cifar10, and {times} times as many of cifar100 as out-of-class"
    return Mix(about, "cifar10", ("cifar100",), in_class=10_000, out_of_class=10_000 * times)


def _by_superclass(known: int) -> Mix:
    """CIFAR-100 by its superclasses: related classes are all known, or all out-of-class."""
    classes = tuple(fine for fine, coarse in enumerate(SUPERCLASSES) if coarse < known)
    about = (
        f"IOMatch: {len(classes)} classes of cifar100 known (superclasses 0 to {known - 1}), the others out"
    )
    return Mix(about, "cifar100", known=classes)


# The superclass of each of CIFAR-100's classes.
SUPERCLASSES = (
    4, 1, 14, 8, 0, 6, 7, 7, 18, 3, 3, 14, 9, 18, 7, 11, 3, 9, 7, 11, 6, 11, 5, 10, 7, 6, 13, 15, 3, 15,
    0, 11, 1, 10, 12, 14, 16, 9, 11, 5, 5, 19, 8, 8, 15, 13, 14, 17, 18, 10, 16, 4, 17, 4, 2, 0, 17, 4, 18,
    17, 10, 3, 2, 12, 12, 16, 12, 1, 9, 19, 2, 10, 0, 1, 16, 12, 9, 13, 15, 13, 16, 19, 2, 4, 6, 19, 5, 5, 8,
    19, 18, 1, 2, 15, 6, 0, 17, 8, 14, 13,
)  # fmt: skip
PAIRS = [
    ("cifar10", "cifar100"), ("cifar10", "tiny-imagenet"), ("cifar10", "svhn"),
    ("cifar100", "svhn"), ("cifar100", "tiny-imagenet"),
]  # fmt: skip

MIXES: dict[str, Mix] = {
    **{f"{source}+{extra}": _paper(source, extra) for source, extra in PAIRS},
    **{f"opencos:{source}+{extra}": _opencos(source, extra) for source, extra in PAIRS},
    **{f"control-{times}x": _control(times) for times in (0, 1, 2, 4)},
    **{
        f"iomatch:cifar100-{share}-{100 - share}": _by_superclass(known)
        for share, known in ((20, 4), (50, 10), (80, 16))
    },
    "cifar10-animals": Mix(
        "OpenMatch: the 6 animals of cifar10 known, the 4 vehicles out-of-class", "cifar10", known=ANIMALS
    ),
    "cifar100-50": Mix(
        "the first 50 classes of cifar100 known, the other 50 out-of-class", "cifar100", known=50
    ),
}


class PoolTruth(NamedTuple):
    class_names: tuple[str, ...]  # the in-classes first, then the others
    labels: Tensor  # (n,) of every image of the embedded pool


def embedded_truth() -> PoolTruth:
    """What the images of the embedded pool really are."""
    file = importlib.resources.files("ropaws.pool.datasets") / "embedded/pool_truth.npz"
    with file.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
        names = tuple(str(name) for name in arrays["class_names"])
        return PoolTruth(names, torch.from_numpy(arrays["labels"].astype(np.int64)))

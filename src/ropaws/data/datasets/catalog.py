"""The named datasets: where each comes from, and how its official files are read."""

import importlib.resources
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ropaws.data.corpus import Corpus
from ropaws.data.datasets import archives, folders
from ropaws.data.datasets.download import Remote, Watch, fetch, is_archive, unpack
from ropaws.data.datasets.npz import read_npz
from ropaws.data.files.reading import ImageFiles

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
    place = importlib.resources.files("ropaws.data.datasets") / "embedded/fashion.npz"
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
        folders.list_tiny_imagenet,
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
        folders.list_imagenet,
        ("imagenet/train",),
        "https://image-net.org/challenges/LSVRC/2012/",
        by_hand="log in there, download ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar, unpack them to"
        " imagenet/train/WNID/*.JPEG and imagenet/val (with ILSVRC2012_devkit_t12 in imagenet)",
    ),
    "semi-inat": NamedDataset(
        "Semi-iNat 2021, uncurated: 810 classes, 9,721 labeled, 313,248 unlabeled + 4,050 images",
        folders.list_semi_inat,
        ("semi-inat-2021/l_train",),
        "https://github.com/cvl-umass/semi-inat-2021",
        by_hand=f"download l_train.tar.gz, u_train.tar.gz and val.tar.gz from {UMASS}/ and unpack them in"
        " semi-inat-2021 (no checksum is published, so it is not done for you)",
    ),
    "semi-inat-curated": NamedDataset(
        "the same with the 91,336 in-class ones of the unlabeled images",
        folders.list_semi_inat_curated,
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

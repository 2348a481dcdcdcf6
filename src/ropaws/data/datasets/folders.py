"""Official datasets that are folders of images: Tiny-ImageNet, ImageNet, Semi-iNat 2021."""

from pathlib import Path

from ropaws.data.files.decoding import is_image_file, walk_images
from ropaws.data.files.listing import Listing, merge
from ropaws.data.files.reading import ImageFiles
from ropaws.limits import TABLE_FILE
from ropaws.runs.opening import read_regular


def list_tiny_imagenet(root: Path) -> ImageFiles:
    """train/WNID/images/*.JPEG; val/images/*.JPEG with the labels in val_annotations.txt."""
    folder = root / "tiny-imagenet-200"
    names = _read_lines(folder / "wnids.txt")
    train = _by_class(folder / "train", names)
    rows = [line.split("\t") for line in _read_lines(folder / "val" / "val_annotations.txt")]
    if any(len(row) < 2 for row in rows):
        raise ValueError(f"{folder / 'val/val_annotations.txt'} is damaged; unpack it again")
    test = Listing(tuple(folder / "val" / "images" / row[0] for row in rows), tuple(row[1] for row in rows))
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
        test = Listing(tuple(files), tuple(label_of[path.stem] for path in files))
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
    """The same with the in-class part of u_train, whose file names are in u_train_in.txt."""
    folder = root / "semi-inat-2021"
    names = [Path(line).name for line in _read_lines(folder / "u_train_in.txt")]
    pool = {path.name: path for path in walk_images(folder / "u_train")}
    missing = [name for name in names if name not in pool]
    if missing:
        raise ValueError(f"{folder / 'u_train_in.txt'} names {missing[0]}, which is not in u_train")
    return _semi_inat(folder, tuple(pool[name] for name in names))


def _semi_inat(folder: Path, pool: tuple[Path, ...]) -> ImageFiles:
    names = sorted((path.name for path in (folder / "l_train").iterdir() if path.is_dir()), key=int)
    train = merge([_by_class(folder / "l_train", names), Listing(pool, (None,) * len(pool))])
    return ImageFiles(tuple(names), train, _by_class(folder / "val", names))


def _by_class(folder: Path, names: list[str]) -> Listing:
    images: list[Path] = []
    labels: list[str] = []
    for name in sorted(names):
        found = list(walk_images(folder / name))
        if not found:
            raise FileNotFoundError(f"incomplete: no image in {folder / name}; unpack it again")
        images += found
        labels += [name] * len(found)
    return Listing(tuple(images), tuple(labels))


def _read_lines(path: Path) -> list[str]:
    try:
        return [line for line in read_regular(path, TABLE_FILE).decode("utf-8").splitlines() if line.strip()]
    except FileNotFoundError:
        raise FileNotFoundError(f"incomplete: no {path}; unpack it again") from None

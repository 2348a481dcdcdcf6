"""Official datasets that are folders of pictures: Tiny-ImageNet, ImageNet, Semi-iNat 2021."""

from pathlib import Path

from ropaws.data.files import Pictures
from ropaws.data.listing import Listing, merge
from ropaws.data.pictures import is_picture, walk_pictures


def list_tiny_imagenet(root: Path) -> Pictures:
    """train/WNID/images/*.JPEG; val/images/*.JPEG with the labels in val_annotations.txt."""
    folder = root / "tiny-imagenet-200"
    names = _read_lines(folder / "wnids.txt")
    train = _by_class(folder / "train", names)
    rows = [line.split("\t") for line in _read_lines(folder / "val" / "val_annotations.txt")]
    if any(len(row) < 2 for row in rows):
        raise ValueError(f"{folder / 'val/val_annotations.txt'} is damaged; unpack it again")
    test = Listing(tuple(folder / "val" / "images" / row[0] for row in rows), tuple(row[1] for row in rows))
    return Pictures(tuple(sorted(names)), train, test)


def list_imagenet(root: Path) -> Pictures:
    """train/WNID/*.JPEG; val/WNID/*.JPEG, or val/*.JPEG with the labels of the devkit or of Kaggle."""
    folder = root / "imagenet"
    names = sorted(path.name for path in (folder / "train").iterdir() if path.is_dir())
    if any(path.is_dir() for path in (folder / "val").iterdir()):
        test = _by_class(folder / "val", names)
    else:
        label_of = _imagenet_val_labels(folder)
        files = sorted(path for path in (folder / "val").iterdir() if is_picture(path.name))
        missing = [path.name for path in files if path.stem not in label_of]
        if missing:
            raise ValueError(f"{folder}: no label for val/{missing[0]}")
        test = Listing(tuple(files), tuple(label_of[path.stem] for path in files))
    return Pictures(tuple(names), _by_class(folder / "train", names), test)


def _imagenet_val_labels(folder: Path) -> dict[str, str]:
    """WNID of each validation picture, from LOC_val_solution.csv or ILSVRC2012_devkit_t12."""
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


def list_semi_inat(root: Path) -> Pictures:
    """l_train/CLASS/*, u_train/*: the uncurated setting. Tested on val/CLASS/*."""
    folder = root / "semi-inat-2021"
    return _semi_inat(folder, tuple(walk_pictures(folder / "u_train")))


def list_semi_inat_curated(root: Path) -> Pictures:
    """The same with the in-class part of u_train, whose file names are in u_train_in.txt."""
    folder = root / "semi-inat-2021"
    names = [Path(line).name for line in _read_lines(folder / "u_train_in.txt")]
    pile = {path.name: path for path in walk_pictures(folder / "u_train")}
    missing = [name for name in names if name not in pile]
    if missing:
        raise ValueError(f"{folder / 'u_train_in.txt'} names {missing[0]}, which is not in u_train")
    return _semi_inat(folder, tuple(pile[name] for name in names))


def _semi_inat(folder: Path, pile: tuple[Path, ...]) -> Pictures:
    names = sorted((path.name for path in (folder / "l_train").iterdir() if path.is_dir()), key=int)
    train = merge([_by_class(folder / "l_train", names), Listing(pile, (None,) * len(pile))])
    return Pictures(tuple(names), train, _by_class(folder / "val", names))


def _by_class(folder: Path, names: list[str]) -> Listing:
    pictures: list[Path] = []
    labels: list[str] = []
    for name in sorted(names):
        found = list(walk_pictures(folder / name))
        if not found:
            raise FileNotFoundError(f"incomplete: no picture in {folder / name}; unpack it again")
        pictures += found
        labels += [name] * len(found)
    return Listing(tuple(pictures), tuple(labels))


def _read_lines(path: Path) -> list[str]:
    try:
        return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except FileNotFoundError:
        raise FileNotFoundError(f"incomplete: no {path}; unpack it again") from None

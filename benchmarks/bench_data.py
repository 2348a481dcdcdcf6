"""Files for `ropaws bench`: CIFAR-10 with other images in the pool, as .npz.

python benchmarks/bench_data.py --data FOLDER --out FOLDER

FOLDER of --data has cifar10.npz, cifar100.npz, tinyimagenet32.npz and svhn.npz (train_images, train_labels,
and test_images, test_labels; 32 px; svhn.npz holds crops rebuilt from the full-number images). They are
subsets of the official sets, so figures made with them compare methods with one another, not with published
tables.
Shares of out-of-class images are those of the paper's mixes: one half with CIFAR-100, two thirds with
Tiny-ImageNet, 60 % with SVHN. The control has a fixed in-class pool and 0, 1, 2 and 4 times as many CIFAR-100
images. cifar10.npz has a curated pool. Test images are those of the pool's own kind of outliers (class -1),
and as unseen_images those of two other kinds.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from feature_collections import Array, Images, _arrays, _tiny

ANIMALS, VEHICLES = (2, 3, 4, 5, 6, 7), (0, 1, 8, 9)
PER_CLASS = 500  # of CIFAR-10 at most, so that a run takes a minute
OUT_TESTS = 1000
UNSEEN_TESTS = 500  # of each kind


def chosen(part: Images, classes: tuple[int, ...], per_class: int) -> tuple[Array, Array]:
    """The first images of each class, with class numbers in this order."""
    rows = [np.flatnonzero(part.labels == c)[:per_class] for c in classes]
    return part.images[np.concatenate(rows)], np.repeat(np.arange(len(classes)), [len(r) for r in rows])


def spread(images: Array, count: int) -> Array:
    """So many, from everywhere: the files are in order of class."""
    return images[np.linspace(0, len(images) - 1, count).astype(int)]


def write(
    path: Path,
    inside: tuple[Array, Array],
    outside: Array,
    tests: tuple[Array, Array],
    out_tests: Array,
    names: list[str],
    unseen: Sequence[Array] = (),
) -> None:
    def joined(part: tuple[Array, Array], extra: Array) -> tuple[Array, Array]:
        labels = np.concatenate([part[1], np.full(len(extra), -1)])
        return np.concatenate([part[0], extra]), labels

    train, test = joined(inside, outside), joined(tests, out_tests)
    others = (
        {"unseen_images": np.concatenate([spread(images, UNSEEN_TESTS) for images in unseen])}
        if unseen
        else {}
    )
    np.savez(
        path,
        train_images=train[0],
        train_labels=train[1],
        test_images=test[0],
        test_labels=test[1],
        class_names=np.array(names),
        **others,
    )
    print(f"{path}: {len(inside[0]):,} in-class and {len(outside):,} out-of-class training images")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    ten, hundred, digits = (_arrays(options.data, name) for name in ("cifar10", "cifar100", "svhn"))
    tiny = _tiny(options.data, options.out)
    with np.load(options.data / "cifar10.npz") as arrays:
        names = [str(name) for name in arrays["class_names"]]
    tests = (ten.test_images, ten.test_labels)
    everything = tuple(range(10))
    others = {"cifar100": hundred, "tiny": tiny, "svhn": digits}
    tests_of = {name: other.test_images for name, other in others.items()}
    per_class = {"cifar100": 500, "tiny": 208, "svhn": 200}
    for name, other in others.items():
        write(
            options.out / f"cifar10+{name}.npz",
            chosen(ten, everything, per_class[name]),
            other.images,
            tests,
            spread(other.test_images, min(OUT_TESTS, len(other.test_images))),
            names,
            [images for kind, images in tests_of.items() if kind != name],
        )
    near = spread(hundred.test_images, OUT_TESTS)
    far = [tests_of["tiny"], tests_of["svhn"]]
    nothing = hundred.images[:0]
    write(options.out / "cifar10.npz", chosen(ten, everything, PER_CLASS), nothing, tests, near, names, far)
    kept = np.isin(ten.test_labels, ANIMALS)
    number = np.full(10, -1)
    number[list(ANIMALS)] = range(len(ANIMALS))
    write(
        options.out / "cifar10-6-4.npz",
        chosen(ten, ANIMALS, PER_CLASS),
        chosen(ten, VEHICLES, PER_CLASS)[0],
        (ten.test_images[kept], number[ten.test_labels[kept]]),
        ten.test_images[~kept],
        [names[c] for c in ANIMALS],
        [tests_of["cifar100"], tests_of["svhn"]],
    )
    for times in (0, 1, 2, 4):
        outside = spread(hundred.images, 1000 * times)
        inside = chosen(ten, everything, 100)
        write(options.out / f"control-{times}x.npz", inside, outside, tests, near, names, far)


if __name__ == "__main__":
    main()

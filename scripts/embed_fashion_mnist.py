"""Make the embedded data from the four official Fashion-MNIST files.

python scripts/embed_fashion_mnist.py FOLDER    (the folder with *-ubyte.gz; Debian's package
dataset-fashion-mnist puts them into /usr/share/datasets/fashion-mnist)

The training part, an uncurated pool of 5,000, comes from the official training set and the test
part from the official test set. Half of each is out-of-class. The labels of 100 pool images per
class are in fashion.npz, for splits to grant; those of all the rest are in pool_truth.npz, which
evaluation may read and training does not. The choice is random from a fixed seed, so the files
can be made again.
"""

import gzip
import sys
from pathlib import Path

import numpy as np

IN_CLASS = {"t-shirt": 0, "trouser": 1, "pullover": 2, "dress": 3, "coat": 4}
OUT_OF_CLASS = {"sandal": 5, "shirt": 6, "sneaker": 7, "bag": 8, "ankle boot": 9}
POOL = 500  # images per class in the pool, of all ten classes
CANDIDATES = 100  # of them, images per known class that may be labeled
TEST = 200  # images per class in the test set, of all ten classes
UNKNOWN = -1
TARGET = Path(__file__).parent.parent / "src/ropaws/pool/datasets/embedded"


def read_idx(path: Path) -> np.ndarray:
    with gzip.open(path) as file:
        data = file.read()
    dims = data[3]
    shape = np.frombuffer(data, ">i4", count=dims, offset=4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * dims).reshape(shape)


def main(folder: Path) -> None:
    train_images, train_labels, test_images, test_labels = (
        read_idx(folder / f"{part}-{kind}-ubyte.gz")
        for part in ("train", "t10k")
        for kind in ("images-idx3", "labels-idx1")
    )
    rng = np.random.default_rng(2023)
    names = [*IN_CLASS, *OUT_OF_CLASS]
    pool, granted, truth, test, test_truth = [], [], [], [], []
    for new, old in enumerate([*IN_CLASS.values(), *OUT_OF_CLASS.values()]):
        pool += list(rng.permutation(np.flatnonzero(train_labels == old))[:POOL])
        truth += [new] * POOL
        known = CANDIDATES if new < len(IN_CLASS) else 0
        granted += [new] * known + [UNKNOWN] * (POOL - known)
        test += list(rng.permutation(np.flatnonzero(test_labels == old))[:TEST])
        test_truth += [new if new < len(IN_CLASS) else UNKNOWN] * TEST
    order = rng.permutation(len(pool))  # the order of the pool must not tell its labels
    np.savez_compressed(
        TARGET / "fashion.npz",
        class_names=np.array(names[: len(IN_CLASS)]),
        train_images=train_images[np.array(pool)[order]],
        train_labels=np.array(granted, np.int8)[order],
        test_images=test_images[np.array(test)],
        test_labels=np.array(test_truth, np.int8),
    )
    np.savez_compressed(
        TARGET / "pool_truth.npz", labels=np.array(truth, np.int8)[order], class_names=np.array(names)
    )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))

import pickle
import tracemalloc

import numpy as np
import pytest
import torch
from PIL import Image

import ropaws
from ropaws.pool.corpus import Corpus, join, measure_normalization
from ropaws.pool.sources import DataConfig, load_corpus
from tests.pool.datasets.test_npz import write_npz


def test_embedded_data_is_what_it_says():
    corpus = load_corpus(DataConfig(source="fashion-demo"))
    assert corpus.class_names == ("t-shirt", "trouser", "pullover", "dress", "coat")
    assert corpus.train_images.shape == (5000, 1, 28, 28)
    assert corpus.test_images.shape == (2000, 1, 28, 28)
    # 100 labels a class to grant, nothing known of the rest
    assert (corpus.train_labels + 1).bincount().tolist() == [4500, 100, 100, 100, 100, 100]
    assert (corpus.test_labels + 2).bincount().tolist() == [1000, 0, 200, 200, 200, 200, 200]


def test_embedded_files_are_small():
    import importlib.resources

    folder = importlib.resources.files("ropaws.pool.datasets") / "embedded"
    assert sum(len(file.read_bytes()) for file in folder.iterdir()) < 4_000_000


def test_the_true_labels_of_the_pool_agree_with_the_granted_ones_and_are_half_out_of_class():
    from ropaws.pool.datasets.catalog import embedded_truth

    truth = embedded_truth()
    corpus = load_corpus(DataConfig(source="fashion-demo"))
    assert truth.labels.bincount().tolist() == [500] * 10
    granted = corpus.train_labels >= 0
    assert torch.equal(truth.labels[granted], corpus.train_labels[granted])
    assert truth.class_names[:5] == corpus.class_names


def test_an_unknown_source_gets_the_nearest_name():
    with pytest.raises(ValueError, match="unknown data source 'cifar', did you mean 'cifar10'"):
        load_corpus(DataConfig(source="cifar"))


def cifar_batch(seed):
    random = np.random.default_rng(seed)
    return random.integers(0, 256, (10, 3072), dtype=np.uint8), list(range(10))


def write_cifar(root, kind):
    folder = root / f"cifar-10-batches-{kind}"
    folder.mkdir()
    for number, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        images, labels = cifar_batch(number)
        if kind == "py":
            content = {b"data": images, b"labels": labels, b"batch_label": b"x", b"filenames": [b"y"] * 10}
            (folder / name).write_bytes(pickle.dumps(content, protocol=3))
        else:
            records = np.concatenate([np.array(labels, np.uint8)[:, None], images], axis=1)
            (folder / f"{name}.bin").write_bytes(records.tobytes())
    return folder


@pytest.mark.parametrize("kind", ["py", "bin"])
def test_official_cifar10_files_are_read(tmp_path, kind):
    write_cifar(tmp_path, kind)
    corpus = load_corpus(DataConfig(source="cifar10", root=tmp_path))
    assert corpus.train_images.shape == (50, 3, 32, 32)
    assert corpus.test_labels.tolist() == list(range(10))
    assert corpus.class_names[3] == "cat"
    images, _ = cifar_batch(1)
    np.testing.assert_array_equal(corpus.train_images[10:20].numpy().reshape(10, 3072), images)


def test_a_cifar_pickle_cannot_run_code(tmp_path):
    folder = write_cifar(tmp_path, "py")

    class Evil:
        def __reduce__(self):
            return (tracemalloc.start, ())

    (folder / "data_batch_3").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ValueError, match="data_batch_3 is damaged"):
        load_corpus(DataConfig(source="cifar10", root=tmp_path))
    assert not tracemalloc.is_tracing()


def test_incomplete_cifar10_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no cifar10 below .*cifar-10-python\.tar\.gz"):
        load_corpus(DataConfig(source="cifar10", root=tmp_path))
    folder = write_cifar(tmp_path, "bin")
    (folder / "data_batch_2.bin").write_bytes(b"short")
    with pytest.raises(ValueError, match=r"data_batch_2\.bin is damaged: 5 bytes"):
        load_corpus(DataConfig(source="cifar10", root=tmp_path))
    (folder / "data_batch_2.bin").unlink()
    with pytest.raises(FileNotFoundError, match="incomplete"):
        load_corpus(DataConfig(source="cifar10", root=tmp_path))


def test_extra_data_joins_without_its_labels(tmp_path):
    write_npz(tmp_path / "a.npz")
    write_npz(tmp_path / "b.npz")
    paths = [str(tmp_path / name) for name in ("a.npz", "b.npz")]
    corpus = load_corpus(DataConfig(source=paths[0], extra=(paths[1],)))
    assert len(corpus.train_images) == 12
    assert corpus.train_labels.tolist() == [0, 1, -1, 0, 1, -1, *[-1] * 6]
    assert corpus.test_labels.tolist() == [0, 1, -2, -2, -2, -2]
    assert corpus.class_names == ("cat", "dog")


def test_extra_data_takes_the_shape_of_the_source():
    def corpus(size, channels, value):
        images = torch.full((2, channels, size, size), value, dtype=torch.uint8)
        return Corpus(
            ("a",), images, torch.zeros(2, dtype=torch.long), images, torch.zeros(2, dtype=torch.long)
        )

    for first, second in (((8, 3), (12, 1)), ((8, 1), (12, 3)), ((12, 3), (8, 3))):
        joined = join(corpus(*first, 10), corpus(*second, 200))
        assert joined.train_images.shape == (4, first[1], first[0], first[0])
        assert joined.test_images.shape == joined.train_images.shape
        assert joined.train_images[:2].unique().tolist() == [10]
        assert joined.train_images[2:].unique().tolist() == [200]


def test_normalization_gives_mean_zero_and_deviation_one():
    images = torch.randint(
        0, 256, (50, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    out = measure_normalization(images).apply_(images / 255)
    torch.testing.assert_close(out.mean(dim=(0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(out.std(dim=(0, 2, 3)), torch.ones(3), atol=1e-4, rtol=0)
    constant = torch.full((2, 1, 4, 4), 7, dtype=torch.uint8)
    assert measure_normalization(constant).apply_(constant / 255).isfinite().all()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "BMP"])
def test_an_image_of_a_pool_has_its_pixels(tmp_path, kind):
    """Also where nothing had to be turned or converted, so that Pillow would read too late."""
    Image.new("RGB", (5, 4), (200, 0, 0)).save(tmp_path / f"red.{kind.lower()}")
    red = np.asarray(ropaws.Pool.open(tmp_path).image(0))
    assert red.shape == (4, 5, 3)
    assert red[:, :, 0].mean() > 190

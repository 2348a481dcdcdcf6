"""Named datasets in tiny copies of their official files; downloads; mixes."""

import functools
import gzip
import hashlib
import http.server
import pickle
import tarfile
import threading
import zipfile
from dataclasses import replace

import numpy as np
import pytest
import scipy.io
import torch
from PIL import Image

from ropaws.core.labels import OUT_OF_CLASS, UNLABELED
from ropaws.pool.corpus import Corpus, ImageStack, keep_classes, thin_out
from ropaws.pool.datasets import catalog
from ropaws.pool.datasets.archives import Remote, fetch, unpack
from ropaws.pool.sources import DataConfig, load_corpus


def load(root, source, **settings):
    return load_corpus(DataConfig(source=source, root=root, download=False, **settings))


def noise(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def save_image(path, size=(64, 48), seed=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(noise(size[1], size[0], 3, seed=seed)).save(path, "JPEG")


def write_cifar100(root, kind="python"):
    folder = root / f"cifar-100-{kind}"
    folder.mkdir(parents=True)
    names = [f"thing{i:02d}" for i in range(100)]
    for seed, (part, count) in enumerate((("train", 200), ("test", 100))):
        images, labels = noise(count, 3072, seed=seed), [i % 100 for i in range(count)]
        if kind == "python":
            content = {b"data": images, b"fine_labels": labels, b"coarse_labels": [0] * count}
            (folder / part).write_bytes(pickle.dumps(content, protocol=3))
        else:
            fine = np.array(labels, np.uint8)[:, None]
            records = np.concatenate([np.zeros_like(fine), fine, images], axis=1)
            (folder / f"{part}.bin").write_bytes(records.tobytes())
    if kind == "python":
        meta = {b"fine_label_names": [name.encode() for name in names]}
        (folder / "meta").write_bytes(pickle.dumps(meta, protocol=3))
    else:
        (folder / "fine_label_names.txt").write_text("\n".join(names) + "\n")
    return noise(200, 3072).reshape(-1, 3, 32, 32)


@pytest.mark.parametrize("kind", ["python", "binary"])
def test_cifar100(tmp_path, kind):
    images = write_cifar100(tmp_path, kind)
    corpus = load(tmp_path, "cifar100")
    assert corpus.class_names[42] == "thing42"
    np.testing.assert_array_equal(corpus.train_images.numpy(), images)
    assert corpus.train_labels.tolist() == list(range(100)) * 2
    assert corpus.test_labels.tolist() == list(range(100))


def write_svhn(root, counts=(12, 6)):
    folder = root / "svhn"
    folder.mkdir(parents=True)
    for seed, (part, count) in enumerate(zip(("train", "test"), counts, strict=True)):
        labels = np.arange(count)[:, None] % 10 + 1  # 1 .. 10, where 10 is the digit 0
        content = {"X": noise(32, 32, 3, count, seed=seed), "y": labels}
        scipy.io.savemat(folder / f"{part}_32x32.mat", content)


def test_svhn(tmp_path):
    write_svhn(tmp_path)
    corpus = load(tmp_path, "svhn")
    assert corpus.train_labels.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2]
    expected = noise(32, 32, 3, 12)[:, :, :, 5].transpose(2, 0, 1)
    np.testing.assert_array_equal(corpus.train_images[5].numpy(), expected)
    (tmp_path / "svhn" / "test_32x32.mat").write_bytes(b"broken")
    with pytest.raises(ValueError, match=r"test_32x32\.mat is damaged"):
        load(tmp_path, "svhn")
    (tmp_path / "svhn" / "test_32x32.mat").unlink()
    with pytest.raises(FileNotFoundError, match=r"no svhn below .*test_32x32\.mat"):
        load(tmp_path, "svhn")


def test_stl10(tmp_path):
    folder = tmp_path / "stl10_binary"
    folder.mkdir()
    images = noise(4, 3, 96, 96)
    for part, count in (("train", 4), ("test", 3), ("unlabeled", 2)):
        # on disk each channel goes column by column
        (folder / f"{part}_X.bin").write_bytes(images[:count].transpose(0, 1, 3, 2).tobytes())
        if part != "unlabeled":
            (folder / f"{part}_y.bin").write_bytes(bytes(range(1, count + 1)))
    (folder / "class_names.txt").write_text("airplane\nbird\ncar\ncat\n")
    corpus = load(tmp_path, "stl10")
    assert corpus.train_labels.tolist() == [0, 1, 2, 3, UNLABELED, UNLABELED]
    np.testing.assert_array_equal(corpus.train_images.numpy(), np.concatenate([images, images[:2]]))
    assert corpus.class_names == ("airplane", "bird", "car", "cat")
    (folder / "train_X.bin").write_bytes(b"123")
    with pytest.raises(ValueError, match="3 bytes are not whole images"):
        load(tmp_path, "stl10")


def write_idx(path, array):
    lengths = b"".join(length.to_bytes(4, "big") for length in array.shape)
    path.write_bytes(gzip.compress(bytes((0, 0, 8, array.ndim)) + lengths + array.tobytes()))


def test_fashion_mnist(tmp_path):
    folder = tmp_path / "fashion-mnist"
    folder.mkdir()
    for part, count in (("train", 20), ("t10k", 10)):
        write_idx(folder / f"{part}-images-idx3-ubyte.gz", noise(count, 28, 28))
        write_idx(folder / f"{part}-labels-idx1-ubyte.gz", (np.arange(count) % 10).astype(np.uint8))
    corpus = load(tmp_path, "fashion-mnist")
    assert corpus.train_images.shape == (20, 1, 28, 28)
    np.testing.assert_array_equal(corpus.train_images[:, 0].numpy(), noise(20, 28, 28))
    assert corpus.class_names[9] == "ankle boot"
    write_idx(folder / "train-labels-idx1-ubyte.gz", np.zeros(3, np.uint8))
    with pytest.raises(ValueError, match="20 images, but 3 labels"):
        load(tmp_path, "fashion-mnist")
    (folder / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(b"\0\0\1\1"))
    with pytest.raises(ValueError, match="wrong magic number"):
        load(tmp_path, "fashion-mnist")


def write_tiny_imagenet(root, classes=("n02", "n01"), each=2):
    folder = root / "tiny-imagenet-200"
    folder.mkdir(parents=True)
    (folder / "wnids.txt").write_text("\n".join(classes) + "\n")
    lines = []
    for number, name in enumerate(classes):
        for i in range(each):
            save_image(
                folder / "train" / name / "images" / f"{name}_{i}.JPEG", (64, 64), seed=10 * number + i
            )
        save_image(folder / "val" / "images" / f"val_{number}.JPEG", (64, 64))
        lines.append(f"val_{number}.JPEG\t{name}\t0\t0\t62\t62")
    (folder / "val" / "val_annotations.txt").write_text("\n".join(lines) + "\n")
    return folder


def test_tiny_imagenet(tmp_path):
    write_tiny_imagenet(tmp_path)
    corpus = load(tmp_path, "tiny-imagenet")
    assert corpus.class_names == ("n01", "n02")
    assert corpus.train_images.shape == (4, 3, 64, 64)
    assert corpus.train_labels.tolist() == [0, 0, 1, 1]
    assert corpus.test_labels.tolist() == [1, 0]  # in the order of the annotations


def write_imagenet(root, val):
    folder = root / "imagenet"
    for name in ("n01", "n02"):
        for i in range(3):
            save_image(folder / "train" / name / f"{name}_{i}.JPEG", seed=i)
    for index, name in enumerate(("n02", "n01"), start=1):
        place = folder / "val" / name if val == "folders" else folder / "val"
        save_image(place / f"ILSVRC2012_val_{index:08d}.JPEG")
    if val == "kaggle":
        rows = [
            "ImageId,PredictionString",
            "ILSVRC2012_val_00000001,n02 1 2 3 4",
            "ILSVRC2012_val_00000002,n01 1 2 3 4",
        ]
        (folder / "LOC_val_solution.csv").write_text("\n".join(rows))
    if val == "devkit":
        kit = folder / "ILSVRC2012_devkit_t12" / "data"
        kit.mkdir(parents=True)
        kinds = [("ILSVRC2012_ID", "O"), ("WNID", "O")]
        synsets = np.array([(1, "n01"), (2, "n02")], dtype=kinds)
        scipy.io.savemat(kit / "meta.mat", {"synsets": synsets})
        (kit / "ILSVRC2012_validation_ground_truth.txt").write_text("2\n1\n")
    return folder


@pytest.mark.parametrize("val", ["folders", "kaggle", "devkit"])
def test_imagenet(tmp_path, val):
    write_imagenet(tmp_path, val)
    corpus = load(tmp_path, "imagenet", image_size=32)
    assert corpus.class_names == ("n01", "n02")
    assert corpus.train_labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert sorted(corpus.test_labels.tolist()) == [0, 1]
    if val != "folders":
        assert corpus.test_labels.tolist() == [1, 0]


def test_imagenet_says_what_is_missing(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"no imagenet below .*log in there, download ILSVRC2012_img_train\.tar"
    ):
        load(tmp_path, "imagenet")
    write_imagenet(tmp_path, "none")
    with pytest.raises(FileNotFoundError, match=r"val has no class folders; put ILSVRC2012_devkit_t12"):
        load(tmp_path, "imagenet")


def test_semi_inat(tmp_path):
    folder = tmp_path / "semi-inat-2021"
    for label in ("0", "2", "10"):
        save_image(folder / "l_train" / label / f"l{label}.jpg")
        save_image(folder / "val" / label / f"v{label}.jpg")
    for i in range(4):
        save_image(folder / "u_train" / f"u{i}.jpg", seed=i)
    corpus = load(tmp_path, "semi-inat", image_size=32)
    assert corpus.class_names == ("0", "2", "10")  # by number
    assert sorted(corpus.train_labels.tolist()) == [UNLABELED] * 4 + [0, 1, 2]
    assert sorted(corpus.test_labels.tolist()) == [0, 1, 2]
    with pytest.raises(FileNotFoundError, match=r"u_train_in\.txt"):
        load(tmp_path, "semi-inat-curated")
    (folder / "u_train_in.txt").write_text("u_train/u1.jpg\nu3.jpg\n")
    curated = load(tmp_path, "semi-inat-curated", image_size=32)
    assert [name.rsplit("/")[-1] for name in curated.train_names[3:]] == ["u1.jpg", "u3.jpg"]
    (folder / "u_train_in.txt").write_text("u9.jpg\n")
    with pytest.raises(ValueError, match=r"names u9\.jpg, which is not in u_train"):
        load(tmp_path, "semi-inat-curated")


def test_large_sets_of_images_are_not_decoded(tmp_path):
    write_tiny_imagenet(tmp_path)
    corpus = load(tmp_path, "tiny-imagenet", memory_gb=0.0)
    assert isinstance(corpus.train_images, ImageStack)
    assert corpus.train_images.shape == (4, 3, 64, 64)
    again = load(tmp_path, "tiny-imagenet")
    assert torch.equal(corpus.train_images[torch.tensor([3, 0])], again.train_images[torch.tensor([3, 0])])


# Downloads


@pytest.fixture
def host(tmp_path):
    """A folder that is served on this machine."""
    folder = tmp_path / "host"
    folder.mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield folder, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def offer(host, path, name):
    """Put a folder on the host as an archive; its row."""
    place, url = host
    archive = place / name
    with tarfile.open(archive, "w:gz") as file:
        file.add(path, path.name)
    return Remote(f"{url}/{name}", hashlib.md5(archive.read_bytes()).hexdigest())


def plain(items, _title, _total):
    return items


def test_a_dataset_is_downloaded_checked_and_unpacked(tmp_path, host, monkeypatch):
    write_cifar100(tmp_path / "original")
    remote = offer(host, tmp_path / "original" / "cifar-100-python", "cifar-100-python.tar.gz")
    row = replace(catalog.DATASETS["cifar100"], files=(remote,))
    monkeypatch.setitem(catalog.DATASETS, "cifar100", row)
    root = tmp_path / "data"
    with pytest.raises(
        FileNotFoundError, match=r"put cifar-100-python\.tar\.gz from .* or allow --data.download"
    ):
        load(root, "cifar100")
    corpus = load_corpus(DataConfig(source="cifar100", root=root))
    assert len(corpus.train_images) == 200
    assert sorted(path.name for path in root.iterdir()) == ["cifar-100-python", "cifar-100-python.tar.gz"]


def test_an_archive_that_was_put_there_by_hand_is_unpacked(tmp_path, host, monkeypatch):
    write_cifar100(tmp_path / "original")
    remote = offer(host, tmp_path / "original" / "cifar-100-python", "cifar-100-python.tar.gz")
    monkeypatch.setitem(catalog.DATASETS, "cifar100", replace(catalog.DATASETS["cifar100"], files=(remote,)))
    root = tmp_path / "data"
    root.mkdir()
    (host[0] / remote.name).rename(root / remote.name)
    assert len(load(root, "cifar100").train_images) == 200


def test_a_wrong_checksum_leaves_nothing_behind(tmp_path, host):
    (host[0] / "a.zip").write_bytes(b"not what it should be")
    with pytest.raises(ValueError, match=r"is not the official a\.zip: its MD5 is .*, not 0123"):
        fetch(Remote(f"{host[1]}/a.zip", "0123"), tmp_path / "data", plain)
    assert list((tmp_path / "data").iterdir()) == []


def test_a_planted_link_is_not_written_through(tmp_path, host):
    victim, data = tmp_path / "victim", tmp_path / "data"
    victim.write_text("mine")
    data.mkdir()
    content = b"the official file"
    remotes = [Remote(f"{host[1]}/{name}", hashlib.md5(content).hexdigest()) for name in ("a.zip", "b.zip")]
    for remote in remotes:
        (host[0] / remote.name).write_bytes(content)
    (data / "a.zip.part").symlink_to(victim)
    path = fetch(remotes[0], data, plain)
    assert path.read_bytes() == content
    assert not path.is_symlink()
    assert victim.read_text() == "mine"
    (data / "b.zip").symlink_to(tmp_path / "elsewhere")  # to nothing: it looks as if there were no file yet
    with pytest.raises(OSError, match=r"b\.zip is a symbolic link"):
        fetch(remotes[1], data, plain)
    assert not (tmp_path / "elsewhere").exists()
    assert sorted(path.name for path in data.iterdir()) == ["a.zip", "a.zip.part", "b.zip"]


def test_an_unreachable_host_says_what_to_put_where(tmp_path, monkeypatch):
    gone = Remote("http://127.0.0.1:9/cifar-10-python.tar.gz", "0")
    monkeypatch.setitem(catalog.DATASETS, "cifar10", replace(catalog.DATASETS["cifar10"], files=(gone,)))
    with pytest.raises(FileNotFoundError, match=r"cannot be reached .*put cifar-10-python\.tar\.gz from"):
        load_corpus(DataConfig(source="cifar10", root=tmp_path))


def test_archives_cannot_write_elsewhere(tmp_path):
    inside = tmp_path / "inside"
    inside.mkdir()
    with zipfile.ZipFile(tmp_path / "bad.zip", "w") as file:
        file.writestr("../outside.txt", "x")
    unpack(tmp_path / "bad.zip", inside)
    with tarfile.open(tmp_path / "bad.tar.gz", "w:gz") as file:
        (tmp_path / "x").write_text("x")
        file.add(tmp_path / "x", "../outside.txt")
    with pytest.raises(tarfile.FilterError):
        unpack(tmp_path / "bad.tar.gz", inside)
    assert not (tmp_path / "outside.txt").exists()
    assert [path.name for path in inside.iterdir()] == ["outside.txt"]


def test_every_dataset_and_mix_says_what_it_is():
    for dataset in catalog.DATASETS.values():
        assert dataset.about
        assert not dataset.places or dataset.files or dataset.by_hand
        assert all(len(remote.md5) == 32 for remote in dataset.files)
    for mix in catalog.MIXES.values():
        assert mix.about
        assert {mix.source, *mix.extra} <= set(catalog.DATASETS)


# Mixes


def corpus_of(*counts, out=0, size=8):
    """So many images of each class, numbered by their pixels."""
    labels = [label for label, count in enumerate(counts) for _ in range(count)] + [UNLABELED] * out
    images = torch.arange(len(labels), dtype=torch.uint8)[:, None, None, None].expand(-1, 3, size, size)
    names = tuple("abcdefghij"[: len(counts)])
    return Corpus(names, images.clone(), torch.tensor(labels), images[:0], torch.tensor(labels[:0]))


def test_unknown_classes_stay_as_images_without_a_label():
    corpus = corpus_of(2, 3, 4)._replace(test_labels=torch.tensor([0, 1, 2, OUT_OF_CLASS]))
    kept = keep_classes(corpus, ("c", "a"))
    assert kept.class_names == ("c", "a")
    assert kept.train_labels.tolist() == [1, 1, UNLABELED, UNLABELED, UNLABELED, 0, 0, 0, 0]
    assert kept.test_labels.tolist() == [1, OUT_OF_CLASS, 0, OUT_OF_CLASS]
    assert len(kept.train_images) == 9
    with pytest.raises(ValueError, match="no class 'z'; known are a, b, c"):
        keep_classes(corpus, ("z",))


def test_a_mix_has_as_many_images_as_it_says_and_always_the_same():
    corpus = corpus_of(10, 10, 10, out=20)
    thin = thin_out(corpus, in_class=7, out_of_class=12)
    assert (thin.train_labels + 1).bincount().tolist() == [12, 3, 2, 2]
    shown = thin.train_images[:, 0, 0, 0].long()
    assert torch.equal(corpus.train_labels[shown], thin.train_labels)  # labels stay with their images
    assert torch.equal(thin_out(corpus, in_class=7, out_of_class=12).train_images, thin.train_images)
    with pytest.raises(ValueError, match="needs 21 out-of-class images, but there are 20"):
        thin_out(corpus, in_class=3, out_of_class=21)


def write_cifar10(root):
    folder = root / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    for seed, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        labels = np.arange(10, dtype=np.uint8)[:, None]
        (folder / f"{name}.bin").write_bytes(
            np.concatenate([labels, noise(10, 3072, seed=seed)], 1).tobytes()
        )


def test_the_papers_mixes(tmp_path):
    write_cifar10(tmp_path)
    write_cifar100(tmp_path)
    write_svhn(tmp_path)
    write_tiny_imagenet(tmp_path)
    for extra, train, test in (("cifar100", 200, 100), ("svhn", 12, 6), ("tiny-imagenet", 4, 2)):
        corpus = load(tmp_path, f"cifar10+{extra}")
        assert corpus.class_names[0] == "airplane"
        assert corpus.train_images.shape == (50 + train, 3, 32, 32)
        assert corpus.train_labels.tolist() == list(range(10)) * 5 + [UNLABELED] * train
        assert corpus.test_labels.tolist() == list(range(10)) + [OUT_OF_CLASS] * test
    corpus = load(tmp_path, "cifar100+svhn")
    assert corpus.train_labels.tolist() == list(range(100)) * 2 + [UNLABELED] * 12


def test_open_set_splits_of_one_dataset(tmp_path):
    write_cifar10(tmp_path)
    write_cifar100(tmp_path)
    animals = load(tmp_path, "cifar10-animals")
    assert animals.class_names == ("bird", "cat", "deer", "dog", "frog", "horse")
    assert animals.train_labels[:10].tolist() == [-1, -1, 0, 1, 2, 3, 4, 5, -1, -1]
    assert len(animals.train_images) == 50
    half = load(tmp_path, "cifar100-50")
    assert half.class_names == tuple(f"thing{i:02d}" for i in range(50))
    assert half.train_labels.tolist() == ([*range(50)] + [UNLABELED] * 50) * 2


def test_opencos_mixes_are_thinned_out(tmp_path, monkeypatch):
    write_cifar10(tmp_path)
    write_svhn(tmp_path)
    name = "opencos:cifar10+svhn"
    mix = catalog.MIXES[name]
    assert (mix.in_class, mix.out_of_class) == (10_000, 40_000)
    with pytest.raises(ValueError, match="the mix needs 1,000 images of 'airplane', but there are 5"):
        load(tmp_path, name)
    monkeypatch.setitem(catalog.MIXES, name, replace(mix, in_class=20))
    with pytest.raises(ValueError, match="the mix needs 40,000 out-of-class images, but there are 12"):
        load(tmp_path, name)
    monkeypatch.setitem(catalog.MIXES, name, replace(mix, in_class=20, out_of_class=5))
    corpus = load(tmp_path, name)
    assert (corpus.train_labels + 1).bincount().tolist() == [5] + [2] * 10


def test_a_mix_cannot_join_another(tmp_path):
    write_cifar10(tmp_path)
    with pytest.raises(ValueError, match="is a mix; name its datasets"):
        load(tmp_path, "cifar10", extra=("cifar100+svhn",))


def test_superclasses_of_cifar100():
    """Five classes each, as published; IOMatch's splits take the first 4, 10 and 16."""
    counts = [catalog.SUPERCLASSES.count(number) for number in range(20)]
    assert counts == [5] * 20
    # By the alphabetical order of the official names: apple, aquarium fish, baby; maple, oak, palm, pine,
    # willow are the trees; trout is a fish.
    assert catalog.SUPERCLASSES[:3] == (4, 1, 14)
    assert [fine for fine, coarse in enumerate(catalog.SUPERCLASSES) if coarse == 17] == [47, 52, 56, 59, 96]
    for share, known in ((20, 20), (50, 50), (80, 80)):
        assert len(catalog.MIXES[f"iomatch:cifar100-{share}-{100 - share}"].known) == known


def test_iomatch_split_of_cifar100(tmp_path):
    write_cifar100(tmp_path)
    corpus = load(tmp_path, "iomatch:cifar100-20-80")
    classes = [fine for fine, coarse in enumerate(catalog.SUPERCLASSES) if coarse < 4]
    assert corpus.class_names == tuple(f"thing{i:02d}" for i in classes)
    expected = [classes.index(c) if c in classes else UNLABELED for c in range(100)]
    assert corpus.train_labels.tolist() == expected * 2


def test_the_control_keeps_the_in_class_part(tmp_path, monkeypatch):
    write_cifar10(tmp_path)
    write_cifar100(tmp_path)
    kept = []
    for times in (0, 1, 2, 4):
        name = f"control-{times}x"
        mix = catalog.MIXES[name]
        assert (mix.in_class, mix.out_of_class) == (10_000, times * 10_000)
        monkeypatch.setitem(catalog.MIXES, name, replace(mix, in_class=20, out_of_class=20 * times))
        corpus = load(tmp_path, name)
        assert (corpus.train_labels == UNLABELED).sum() == 20 * times
        kept.append(corpus.train_images[corpus.train_labels != UNLABELED])
    assert all(torch.equal(images, kept[0]) for images in kept)

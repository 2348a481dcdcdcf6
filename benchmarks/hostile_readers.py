"""What reads a stranger's files, and a sandbox with one good file of each kind."""

import contextlib
import gzip
import io
import os
import pickle
import shutil
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import hostile_files as files
import numpy as np
import torch
from PIL import Image
from rich.console import Console

import ropaws
from ropaws import recipes
from ropaws.cli.main import main
from ropaws.core.randomness import SupportConfig
from ropaws.embedding.backbones import backbone_builder, build_encoder
from ropaws.embedding.feature_cache import FeatureStore
from ropaws.embedding.weight_files import fit_weights, read_weights
from ropaws.pool.augment import AugmentConfig
from ropaws.pool.content import UnreadableError, content_key, image_size
from ropaws.pool.corpus import Corpus
from ropaws.pool.datasets import archives
from ropaws.pool.datasets.archives import read_npz
from ropaws.pool.datasets.feature_file import read_feature_table, read_features
from ropaws.pool.decoding import read_image, read_square
from ropaws.pool.listing import list_labeled
from ropaws.pool.sources import DataConfig, read_split
from ropaws.report.compare_page import compare_runs, write_comparison
from ropaws.report.rivals import verdict
from ropaws.report.run_files import RunFiles
from ropaws.report.run_page import render
from ropaws.run.predict import predict
from ropaws.run.run import Run, read_run_config
from ropaws.run.train_state import build
from ropaws.training.checkpoint import load_checkpoint, restore

REFUSALS = (ValueError, OSError, MemoryError, UnreadableError)  # what the command line says in one line
QUIET = Console(quiet=True)
RUN, WHOLE, IMAGES, FOREIGN, OUTSIDE = "run", "whole", "images", "foreign", "outside"
FORMATS = {
    "rgb.png": {}, "gray16.png": {}, "palette.png": {}, "alpha.png": {}, "plain.jpg": {"quality": 80},
    "progressive.jpg": {"progressive": True}, "cmyk.jpg": {}, "lossy.webp": {}, "plain.gif": {},
    "lossless.webp": {"lossless": True}, "plain.bmp": {}, "plain.tif": {},
    "packed.tif": {"compression": "tiff_lzw"},
}  # fmt: skip
# Formats that Pillow knows and that are not read, under names of those that are: some start programs, some
# take memory before their size is known.
NOT_READ = {"postscript.jpg": "EPS", "icon.png": "ICO", "apple.png": "ICNS", "wavelet.jpg": "JPEG2000"}


# The sandbox


def make_sandbox(folder: Path) -> None:
    """A trained and evaluated run, and one good file of every kind that is read."""
    folder.mkdir(parents=True)
    data = _write_arrays(folder)
    run = ropaws.train(_config(data), folder / RUN, console=QUIET)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        main(["report", str(run)])
    (run / "checkpoint.previous.pt").replace(run / "checkpoint.pt")
    weights = build_encoder(_config(data).model, channels=1).backbone.state_dict()
    torch.save(
        {"state_dict": {f"module.{name}": value for name, value in weights.items()}}, folder / "init.pth"
    )
    shutil.copy(run / "model.safetensors", folder / "init.safetensors")
    _write_images(folder / IMAGES)
    _write_foreign(folder / FOREIGN)
    _write_tables(folder)
    _write_archives(folder)
    (folder / OUTSIDE).mkdir()
    (folder / OUTSIDE / "precious.json").write_text('{"secret": "5da3e1c2"}\n')


def _draw(label: int, random: Any) -> Any:
    image = random.integers(0, 60, (12, 12))
    if label < 0:
        return random.integers(0, 256, (12, 12)).astype(np.uint8)
    image[[np.s_[::3, :], np.s_[:, ::3], np.s_[3:9, 3:9]][label]] += 180
    return image.astype(np.uint8)


def _write_arrays(folder: Path) -> Path:
    random = np.random.default_rng(0)
    train, test = np.array([0, 1, 2, -1] * 10), np.array([0, 1, 2, -1] * 5)
    np.savez(
        folder / "data.npz",
        train_images=np.stack([_draw(label, random) for label in train]),
        train_labels=train,
        test_images=np.stack([_draw(label, random) for label in test]),
        test_labels=test,
        class_names=np.array(["rows", "columns", "block"]),
    )
    rows = random.normal(size=(20, 8)).astype(np.float32)
    np.savez(
        folder / "features.npz",
        features=rows,
        labels=np.array([0, 1, -1, -1] * 5),
        views=np.stack([rows, rows], 1),
    )
    np.save(folder / "features.npy", rows)
    return folder / "data.npz"


def _config(data: Path) -> Any:
    base = recipes.demo()
    return replace(
        base,
        model=replace(base.model, backbone="small-8", projection_hidden=16, projection_dims=16),
        data=DataConfig(source=str(data), labels_per_class=2),
        augment=AugmentConfig(size=12, small_crops=1, small_size=8),
        support=SupportConfig(images_per_class=2, views=2),
        optim=replace(base.optim, warmup=2),
        train=replace(
            base.train, steps=4, batch=8, checkpoint_every=2, keep_every=2, precision="fp32", device="cpu"
        ),
    )


def _write_images(folder: Path) -> None:
    folder.mkdir()
    random = np.random.default_rng(1)
    rgb = Image.fromarray(random.integers(0, 256, (40, 36, 3), dtype=np.uint8))
    modes = {
        "gray16.png": Image.fromarray(random.integers(0, 65536, (40, 36)).astype(np.uint16)),
        "palette.png": rgb.quantize(16),
        "alpha.png": rgb.convert("RGBA"),
        "cmyk.jpg": rgb.convert("CMYK"),
        "plain.gif": rgb.quantize(64),
    }
    for name, options in FORMATS.items():
        modes.get(name, rgb).save(folder / name, **options)


def _write_foreign(folder: Path) -> None:
    folder.mkdir()
    for name, kind in NOT_READ.items():
        Image.new("RGB", (64, 64), "red").save(folder / name, kind)
    cards = ["SIMPLE  = T", "BITPIX  = 8", "NAXIS   = 2", "NAXIS1  = 30000", "NAXIS2  = 30000", "END"]
    (folder / "stars.png").write_bytes("".join(card.ljust(80) for card in cards).ljust(2880).encode())


def _write_tables(folder: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [(f"{IMAGES}/{name}", label) for name in FORMATS for label in ("cat", "dog")]
    text = "path,label\n" + "".join(f"{path},{label}\n" for path, label in rows)
    (folder / "table.csv").write_text(text)
    columns = {"path": [path for path, _ in rows], "label": [label for _, label in rows]}
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "table.parquet")
    (folder / "split.txt").write_text("# some\n0\n1\n2\n4\n")


def _write_archives(folder: Path) -> None:
    random = np.random.default_rng(2)
    images = random.integers(0, 256, (6, 28, 28), dtype=np.uint8)
    head = bytes((0, 0, 8, 3)) + b"".join(length.to_bytes(4, "big") for length in images.shape)
    (folder / "images.gz").write_bytes(gzip.compress(head + images.tobytes()))
    batch = {b"data": random.integers(0, 256, (3, 3072), dtype=np.uint8), b"labels": [0, 1, 2]}
    (folder / "batch").write_bytes(pickle.dumps(batch, protocol=4))
    store = FeatureStore(folder / "cache", "0" * 32, (2, 8), 1e9, print)
    keys = random.integers(0, 256, (5, 16), dtype=np.uint8)
    store.write(keys, random.normal(size=(5, 2, 8)).astype(np.float16))
    next((folder / "cache" / ("0" * 32)).iterdir()).rename(folder / "segment")


# The readers: each gets the sandbox, and may refuse with one of REFUSALS


def config(box: Path) -> None:
    read_run_config(box / RUN)
    _label_an_image(box)


def facts(box: Path) -> None:
    _label_an_image(box)


def _label_an_image(box: Path) -> None:
    """Opens config, data facts, weights and labeled embeddings, and uses them."""
    found = predict(Run(box / RUN, device="cpu", console=QUIET), box / IMAGES / "rgb.png")
    assert 0 <= max(found[0].probabilities) <= 1, found


def as_trained(box: Path) -> None:
    """The device is the run's own word."""
    predict(Run(box / RUN, console=QUIET), box / IMAGES / "rgb.png")


def page(box: Path) -> None:
    run = box / RUN
    text = render(RunFiles(run))
    assert "5da3e1c2" not in text, "the page shows what is outside the folder"
    verdict(RunFiles(run))
    comparison = compare_runs([run, box / WHOLE])
    comparison.rows(), comparison.settings_rows()
    write_comparison(comparison, box / "comparison.html")


def outputs(box: Path) -> None:
    run = Run(box / RUN, device="cpu", console=QUIET)
    _ = run._read_kept()


_parts: dict[Path, Any] = {}


def checkpoint(box: Path) -> None:
    run = box / RUN
    if run not in _parts:
        whole = Run(box / WHOLE, device="cpu", console=QUIET)
        _parts[run] = build(whole.config, whole.corpus, whole.facts, torch.device("cpu"), "fp32", QUIET)
    parts = _parts[run]
    restore(
        load_checkpoint(run, lambda line: None),
        parts.model,
        parts.optimizer,
        parts.scaler,
    )


def init(name: str) -> Callable[[Path], None]:
    def read(box: Path) -> None:
        fit_weights(backbone_builder("small-8")(1), read_weights(box / name))

    return read


init_safetensors = init("init.safetensors")


def arrays(box: Path) -> None:
    for read in (read_npz, list_labeled):
        with contextlib.suppress(*REFUSALS):
            read(box / "data.npz")


def feature_arrays(box: Path) -> None:
    for read in (read_features, read_feature_table):
        with contextlib.suppress(*REFUSALS):
            read(box / "features.npz")


def feature_rows(box: Path) -> None:
    read_feature_table(box / "features.npy")


def table(name: str) -> Callable[[Path], None]:
    def read(box: Path) -> None:
        list_labeled(box / name)

    return read


def mnist(box: Path) -> None:
    archives._read_idx(box / "images.gz", 3)


def cifar(box: Path) -> None:
    archives._cifar_batch(box / "batch", "labels")


def split(box: Path) -> None:
    labels = torch.tensor([0, 1, 2, -1] * 10)
    read_split(
        box / "split.txt", Corpus(("a", "b", "c"), torch.zeros(40, 1, 2, 2), labels, labels[:0], labels[:0])
    )


def segment(box: Path) -> None:
    folder = box / "cache" / ("0" * 32)
    shutil.copy(box / "segment", folder / f"{'1' * 32}.safetensors")
    FeatureStore(box / "cache", "0" * 32, (2, 8), 1e9, lambda line: None).find(np.zeros((1, 16), np.uint8))


def image(name: str) -> Callable[[Path], None]:
    def read(box: Path) -> None:
        content_key(box / IMAGES / name)
        assert read_square(box / IMAGES / name, 32).shape == (32, 32, 3)
        assert read_image(box / IMAGES / name, 32, "whole").square.shape == (32, 32, 3)

    return read


def foreign(name: str) -> Callable[[Path], str]:
    def read(box: Path) -> str:
        """Refused, damaged or not, unless a change has made an image of it."""
        content_key(box / FOREIGN / name)
        try:
            read_square(box / FOREIGN / name, 32)
            image_size(box / FOREIGN / name)
        except UnreadableError as error:
            return f"ropaws: {error}"
        return "read"

    return read


COMMANDS = (
    ("evaluate", "RUN"),
    ("evaluate", "RUN", "--only", "gallery", "propagation", "snapshots"),
    ("predict", "RUN", "IMAGES", "--out", "OUT.csv", "--propagate"),
    ("predict", "RUN", "FEATURES", "--out", "OUT.csv"),
    ("predict", "RUN", "TABLE", "--out", "OUT.jsonl"),
    ("suggest", "RUN", "--n", "3"),
    ("report", "RUN"),
    ("compare", "RUN", "WHOLE", "--out", "OUT.html"),
    ("train", "--resume", "RUN", "--no-report"),
    ("finetune", "RUN", "--rates", "0.1", "--epochs", "1"),
    ("check", "--labeled", "TABLE", "--unlabeled", "IMAGES"),
    ("check", "--labeled", "TABLE", "--unlabeled", "FOREIGN"),
    ("predict", "RUN", "FOREIGN", "--out", "OUT.csv"),
    ("embed", "IMAGES", "--init", "INIT", "--backbone", "small-8", "--out", "OUT.npz"),
    (
        "train",
        "--labeled",
        "TABLE",
        "--unlabeled",
        "DATA",
        "--init",
        "INIT",
        "--out",
        "NEW",
        "--train.steps",
        "1",
    ),
    ("train", "CONFIG", "--out", "NEW", "--train.steps", "1", "--no-report"),
)


def command(words: tuple[str, ...], box: Path) -> str:
    """What the command said; an exit code other than 0 and 2 is an error."""
    named = {
        "RUN": RUN, "WHOLE": WHOLE, "IMAGES": IMAGES, "FOREIGN": FOREIGN, "TABLE": "table.csv",
        "FEATURES": "features.npy", "DATA": "data.npz", "INIT": "init.pth", "NEW": "new",
        "CONFIG": f"{RUN}/config.json", "OUT.csv": "out.csv", "OUT.jsonl": "out.jsonl",
        "OUT.html": "out.html", "OUT.npz": "out.npz",
    }  # fmt: skip
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            main([str(box / named[word]) if word in named else word for word in words])
        except SystemExit as end:
            if end.code not in (0, 2, None):
                raise RuntimeError(f"exit code {end.code}: {said.getvalue()[-500:]}") from None
            if end.code == 2 and not said.getvalue().splitlines()[-1].startswith("ropaws: "):
                raise RuntimeError(f"not one line: {said.getvalue()[-500:]}") from None
    if "Traceback" in said.getvalue():
        raise RuntimeError(f"a traceback: {said.getvalue()[-500:]}")
    shutil.rmtree(box / "new", ignore_errors=True)
    return said.getvalue()


# Files that are not files


def strange(path: Path, random: Random, box: Path) -> None:
    """A pipe, a device, a folder, a link to something outside, or gigabytes of nothing."""
    path.unlink()
    kind = random.randrange(7)
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        path.symlink_to("/dev/zero")
    elif kind == 2:
        path.mkdir()
    elif kind == 3:
        path.symlink_to(box / OUTSIDE / "precious.json")
    elif kind == 4:
        with path.open("wb") as file:
            file.truncate(random.choice((1 << 31, 1 << 36, 1 << 40)))
    elif kind == 5:
        path.symlink_to(path)
    else:
        os.mknod(path, stat.S_IFSOCK | 0o600)


class Reader(NamedTuple):
    """A file that is changed, how, and what reads it."""

    name: str
    file: str
    change: files.Mutation
    read: Callable[[Path], object]
    cases: int  # of the full trial


READERS = [
    Reader("config.json", "run/config.json", files.json_changed, config, 9_000),
    Reader("config.json, its device", "run/config.json", files.json_changed, as_trained, 2_000),
    Reader("data.json", "run/data.json", files.json_changed, facts, 8_000),
    *(
        Reader(f"page: {name}", f"run/{name}", change, page, cases)
        for name, change, cases in (
            ("config.json", files.json_changed, 2_000),
            ("data.json", files.json_changed, 1_000),
            ("environment.json", files.json_changed, 1_000),
            ("evaluation.json", files.json_changed, 3_000),
            ("gallery.json", files.json_changed, 1_500),
            ("metrics.jsonl", files.lines_changed, 1_500),
        )
    ),
    Reader("support.safetensors", "run/support.safetensors", files.safetensors_changed, facts, 4_000),
    Reader("model.safetensors", "run/model.safetensors", files.safetensors_changed, facts, 4_000),
    Reader("embeddings.safetensors", "run/embeddings.safetensors", files.safetensors_changed, outputs, 4_000),
    Reader("checkpoint.pt", "run/checkpoint.pt", files.checkpoint_changed, checkpoint, 5_000),
    Reader("weights .pth", "init.pth", files.checkpoint_changed, init("init.pth"), 5_000),
    Reader("weights .safetensors", "init.safetensors", files.safetensors_changed, init_safetensors, 3_000),
    Reader("images .npz", "data.npz", files.npz_changed, arrays, 7_000),
    Reader("features .npz", "features.npz", files.npz_changed, feature_arrays, 4_000),
    Reader("features .npy", "features.npy", files.npy_changed, feature_rows, 3_000),
    Reader("table .csv", "table.csv", files.table_changed, table("table.csv"), 6_000),
    Reader("table .parquet", "table.parquet", files.bytes_changed, table("table.parquet"), 3_000),
    Reader("split.txt", "split.txt", files.table_changed, split, 2_000),
    Reader("feature cache", "segment", files.safetensors_changed, segment, 2_000),
    Reader("MNIST archive", "images.gz", files.gzip_changed, mnist, 2_000),
    Reader("CIFAR pickle", "batch", files.pickle_changed, cifar, 2_000),
    *(
        Reader(f"image {name}", f"{IMAGES}/{name}", files.image_changed, image(name), 2_000)
        for name in FORMATS
    ),
    *(
        Reader(f"not an image {name}", f"{FOREIGN}/{name}", files.bytes_changed, foreign(name), 500)
        for name in (*NOT_READ, "stars.png")
    ),
]  # fmt: skip
TARGETS = sorted({reader.file for reader in READERS if reader.file not in ("segment", "batch", "images.gz")})


def by_command(random: Random, box: Path) -> tuple[str, ...]:
    """A changed file and a command that may read it."""
    reader = random.choice([reader for reader in READERS if reader.file in TARGETS])
    path = box / reader.file
    if random.random() < 0.35:
        strange(path, random, box)
    else:
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(reader.change(content, random))
    return random.choice(COMMANDS)

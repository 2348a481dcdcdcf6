"""Reading images: ours against a plain per-image Dataset with a DataLoader of as many workers.

python benchmarks/loading.py                   about ten minutes; writes results/loading.json
python benchmarks/loading.py --only reading    images a second alone, about four minutes

A few thousand JPEGs of about 500 x 375 are generated. First, images a second: both read all images,
in batches and in random order, as squares of 110 px (for views of 96) and of 256 px (for views of 224),
interleaved. The plain way is what peers do: open, convert, resize the shorter side, crop the center, to a
float tensor. Ours is measured without a cache, and with one that was filled before; whole images are read, as
random views are made of them, and the central squares of --data.crop center besides. Then, milliseconds of
single steps in one thread (time of the processor), also of those that were tried and not kept; simplejpeg's
where it is installed (pip install simplejpeg; it is no dependency). Last, the loader's share of a training
step at 96, 160 and 224 px: the time that the loop waits for data, of all its time.
"""

import argparse
import functools
import importlib.util
import io
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from timing import interleaved, median_ratio, write_results
from torch.utils.data import DataLoader, Dataset

from ropaws import recipes
from ropaws.core.hardware import keep_freed_memory
from ropaws.core.optimizers import LARS
from ropaws.core.randomness import SupportConfig
from ropaws.core.records import Batch
from ropaws.core.worker_pool import map_in_workers
from ropaws.embedding.backbones import build_encoder
from ropaws.pool.augment import Normalization
from ropaws.pool.corpus import ImageStack
from ropaws.pool.decoding import Crop, SquareCache, read_batch, squeeze
from ropaws.training.loaders import BatchStream, TrainingData
from ropaws.training.loop import fit

IMAGES, BATCH, WORKERS, REPEATS = 3000, 128, 2, 5
SIZES = {96: 110, 224: 256}  # pixels of a view: pixels that are kept of an image
STEPS = 8
WAYS = 60  # images that single steps are tried on


def write_images(folder: Path, count: int) -> list[Path]:
    """Photographs in kind: large smooth forms, edges and some grain, at camera quality."""
    random = np.random.default_rng(0)
    paths = []
    for index in range(count):
        width, height = int(random.integers(440, 560)), int(random.integers(330, 420))
        forms, detail = (
            Image.fromarray(random.integers(0, 256, shape, dtype=np.uint8)).resize((width, height), 3)
            for shape in ((6, 8, 3), (48, 64, 3))
        )
        image = np.asarray(Image.blend(forms, detail, 0.3)).astype(np.int16)
        image += random.integers(-6, 7, image.shape, dtype=np.int16)
        path = folder / f"{index:05d}.jpg"
        Image.fromarray(image.clip(0, 255).astype(np.uint8)).save(path, quality=90)
        paths.append(path)
    return paths


class PlainImages(Dataset[torch.Tensor]):
    def __init__(self, paths: list[Path], size: int) -> None:
        self.paths, self.size = paths, size

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        with Image.open(self.paths[index]) as opened:
            image = opened.convert("RGB")
        scale = self.size / min(image.size)
        width, height = (max(self.size, round(side * scale)) for side in image.size)
        image = image.resize((width, height), Image.Resampling.BILINEAR)
        left, top = (width - self.size) // 2, (height - self.size) // 2
        image = image.crop((left, top, left + self.size, top + self.size))
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255


class Repeating:
    """The batches of one DataLoader, epoch after epoch: starting workers is not what is measured."""

    def __init__(self, make: Callable[[], Iterator[object]]) -> None:
        self.make = make
        self.current = make()

    def epoch(self, batches: int) -> None:
        for _ in range(batches):
            next(self.current)


def plain_batches(paths: list[Path], size: int) -> Iterator[torch.Tensor]:
    loader = DataLoader(
        PlainImages(paths, size), BATCH, shuffle=True, drop_last=True, num_workers=WORKERS,
        persistent_workers=True, multiprocessing_context="spawn",
    )  # fmt: skip
    while True:
        yield from loader


def our_batches(paths: list[Path], size: int, cache: SquareCache | None, crop: Crop) -> Iterator[object]:
    stack = ImageStack(paths, size, crop=crop, cache=cache, workers=WORKERS)
    yield from stream(stack)._all_pixels(0, 10**6)


def stream(stack: ImageStack, recipe: str = "demo", **augment: float) -> BatchStream:
    config = recipes.get(recipe)
    one_label = torch.zeros(1, dtype=torch.long)
    data = TrainingData(stack, one_label, one_label, Normalization((0.5,) * 3, (0.25,) * 3))
    support = SupportConfig(images_per_class=1, views=1)
    view = replace(config.augment, **augment)
    return BatchStream(data, config.method.views(view), view, support, BATCH, seed=0, size=view.size)


def images_per_second(paths: list[Path], folder: Path) -> dict[str, object]:
    results: dict[str, object] = {}
    batches = IMAGES // BATCH
    for view, size in SIZES.items():
        cache = SquareCache(folder / f"cache-{size}", 4 * 2**30)
        ways = {
            "plain": Repeating(lambda s=size: plain_batches(paths, s)),
            "ropaws": Repeating(lambda s=size: our_batches(paths, s, None, "whole")),
            "ropaws, cache": Repeating(lambda s=size, c=cache: our_batches(paths, s, c, "whole")),
            "ropaws, center": Repeating(lambda s=size: our_batches(paths, s, None, "center")),
        }
        seconds = interleaved(
            {name: lambda w=way: w.epoch(batches) for name, way in ways.items()}, REPEATS, warm_up=2
        )
        rates = {k: round(batches * BATCH / statistics.median(v)) for k, v in seconds.items()}
        plain = seconds.pop("plain")
        speedups = {name: round(median_ratio(plain, ours), 2) for name, ours in seconds.items()}
        results[f"{view}px"] = {"image_size": size, "images_per_second": rates, "speedup": speedups}
        print(f"{view} px: {rates}, {speedups}")
    return results


def milliseconds_of_ways(paths: list[Path], size: int) -> dict[str, float]:
    """Of decoding and of resizing an image, each alone."""
    contents = [path.read_bytes() for path in paths]
    decoded = [Image.open(path).convert("RGB") for path in paths]
    ways: dict[str, Callable[[int], object]] = {
        "decode, Pillow": lambda i: Image.open(io.BytesIO(contents[i])).load(),
        "decode, Pillow, YCbCr": lambda i: drafted(contents[i], "YCbCr", size).load(),
        "resize, Pillow": lambda i: decoded[i].resize((size, size), Image.Resampling.BILINEAR),
        "resize, torch": lambda i: squeeze(decoded[i], size),
    }
    if importlib.util.find_spec("simplejpeg") is not None:
        import simplejpeg

        ways["decode, simplejpeg"] = lambda i: simplejpeg.decode_jpeg(contents[i])
        ways["decode at 3/4 or so, simplejpeg"] = lambda i: simplejpeg.decode_jpeg(
            contents[i], min_height=size, min_width=size
        )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a worker
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(REPEATS):
        for name, way in ways.items():
            began = time.process_time()  # other programs do not count
            for i in range(len(paths)):
                way(i)
            seconds[name].append((time.process_time() - began) / len(paths))
    torch.set_num_threads(threads)
    return {name: round(1000 * statistics.median(taken), 2) for name, taken in seconds.items()}


def drafted(content: bytes, mode: str, size: int) -> Image.Image:
    image = Image.open(io.BytesIO(content))
    image.draft(mode, (size, size))
    return image


def loader_share(paths: list[Path], folder: Path) -> dict[str, object]:
    """Of a step of a small network with two large views: how long the loop waits for images."""
    results: dict[str, object] = {}
    for view in (96, 160, 224):
        size = round(view * 8 / 7)
        for name, cache in (("decoding", None), ("cache", SquareCache(folder / "share", 4 * 2**30))):
            stack = ImageStack(paths, size, crop="whole", cache=cache, workers=WORKERS)
            if cache is not None:
                fill(stack)
            config = recipes.get("demo")
            source = stream(stack, size=view, small_size=round(0.6 * view), small_crops=0)
            model = config.method.build(build_encoder(config.model, channels=3), classes=1, pool=len(stack))
            waits, total = timed_steps(source, model, config.method)
            share = round(sum(waits) / sum(total), 3)
            results[f"{view}px, {name}"] = {
                "seconds_a_step": round(statistics.median(total), 2), "share_of_loader": share,
            }  # fmt: skip
            print(f"{view} px, {name}: {statistics.median(total):.2f} s per step, {share:.1%} of it waiting")
    return results


def fill(stack: ImageStack) -> None:
    """The cache, with whole images."""
    requests = (stack.request(part, "whole") for part in torch.arange(len(stack)).split(BATCH))
    for _ in map_in_workers(functools.partial(read_batch, cache=stack.cache), requests, workers=WORKERS):
        pass


def timed_steps(source: BatchStream, model, method) -> tuple[list[float], list[float]]:
    waits: list[float] = []

    def watched() -> Iterator:
        batches = source._all_pixels(0, STEPS + 2)
        while True:
            began = time.perf_counter()
            try:
                step, pixels = next(batches)
            except StopIteration:
                return
            waits.append(time.perf_counter() - began)
            yield Batch(
                step,
                STEPS + 2,
                source.unlabeled_views(step, pixels.unlabeled, pixels.unlabeled_aspects),
                pixels.pool_index,
                source.support_batch(step, pixels.labeled, pixels.labeled_aspects),
            )

    began = time.perf_counter()
    steps = fit(model, method, watched(), LARS(model.parameters(), lr=0.1), lambda step: 0.1)
    moments = [began, *(time.perf_counter() for _ in steps)]
    total = [after - before for before, after in itertools.pairwise(moments)]
    return waits[2:], total[2:]  # the first steps pay for starting the workers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("reading", "ways", "training"), help="one part of the three")
    only = parser.parse_args().only
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "images").mkdir()
        began = time.perf_counter()
        paths = write_images(folder / "images", WAYS if only == "ways" else IMAGES)
        print(f"{len(paths)} images written in {time.perf_counter() - began:.0f} s")
        results: dict[str, object] = {}
        if only != "ways":
            sizes = [path.stat().st_size for path in paths]
            results |= {
                "images": IMAGES, "mean_kilobytes": round(statistics.mean(sizes) / 1000, 1),
                "batch": BATCH, "workers": WORKERS, "turns": REPEATS,
            }  # fmt: skip
        if only in (None, "reading"):
            results |= images_per_second(paths, folder)
        if only in (None, "ways"):
            results["ways"] = milliseconds_of_ways(paths[:WAYS], SIZES[224])
        if only in (None, "training"):
            results["training"] = loader_share(paths, folder)
    write_results("loading", results)


if __name__ == "__main__":
    main()

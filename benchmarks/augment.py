"""Batched augmentation against the same pipeline, an image at a time, in Pillow.

python benchmarks/augment.py        a few seconds; writes results/augment.json

Both do CIFAR's large view: random resized crop, flip, color jitter of strength 0.5 in random order
(p 0.8), solarize (p 0.2), equalize (p 0.2), normalization to float32.
"""

import random
import statistics

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageOps
from timing import interleaved, median_ratio, write_results

from ropaws.core.hardware import keep_freed_memory
from ropaws.pool.augment import AugmentConfig, Normalization, augment

BATCH, VIEWS, REPEATS = 256, 8, 12  # a turn makes the eight views of one training step


def pillow_view(image: np.ndarray, config: AugmentConfig, normalize: Normalization) -> np.ndarray:
    """One random view as a Dataset of the usual kind makes it."""
    height, width, _ = image.shape
    image = Image.fromarray(image)
    for _ in range(10):
        area = random.uniform(*config.scale) * height * width
        aspect = np.exp(random.uniform(np.log(3 / 4), np.log(4 / 3)))
        w, h = round((area * aspect) ** 0.5), round((area / aspect) ** 0.5)
        if w <= width and h <= height:
            top, left = random.randint(0, height - h), random.randint(0, width - w)
            image = image.crop((left, top, left + w, top + h))
            break
    image = image.resize((config.size, config.size), Image.Resampling.BILINEAR)
    if random.random() < config.flip:
        image = ImageOps.mirror(image)
    if random.random() < config.jitter:
        image = pillow_jitter(image, config.jitter_strength)
    if random.random() < config.solarize:
        image = ImageOps.solarize(image, random.randint(0, 256))
    if random.random() < config.equalize:
        image = ImageOps.equalize(image)
    pixels = np.asarray(image, np.float32) / 255
    return ((pixels - normalize.mean) / normalize.std).astype(np.float32).transpose(2, 0, 1)


def pillow_jitter(image: Image.Image, strength: float) -> Image.Image:
    operations = [ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color, None]
    random.shuffle(operations)
    for enhance in operations:
        if enhance is not None:
            image = enhance(image).enhance(1 + 0.8 * strength * random.uniform(-1, 1))
            continue
        hue, saturation, value = image.convert("HSV").split()
        shift = int(256 * 0.2 * strength * random.uniform(-1, 1))
        turned = (np.asarray(hue).astype(np.int16) + shift).astype(np.uint8)
        image = Image.merge("HSV", (Image.fromarray(turned), saturation, value)).convert("RGB")
    return image


def main() -> None:
    keep_freed_memory()
    normalize = Normalization((0.49, 0.48, 0.45), (0.25, 0.24, 0.26))
    results: dict[str, object] = {"batch": BATCH, "views": VIEWS, "turns": REPEATS}
    for size in (32, 96):
        config = AugmentConfig(size=size)
        arrays = np.random.default_rng(0).integers(0, 256, (BATCH, size, size, 3), dtype=np.uint8)
        images = torch.from_numpy(arrays).permute(0, 3, 1, 2).contiguous()
        generator = torch.Generator().manual_seed(0)
        seconds = interleaved(
            {
                "pillow": lambda a=arrays, c=config: [
                    torch.from_numpy(np.stack([pillow_view(image, c, normalize) for image in a]))
                    for _ in range(VIEWS)
                ],
                "ropaws": lambda i=images, c=config, g=generator: [
                    augment(i, c, normalize, g) for _ in range(VIEWS)
                ],
            },
            REPEATS if size == 32 else 4,
        )
        rates = {name: round(BATCH * VIEWS / statistics.median(values)) for name, values in seconds.items()}
        ratio = round(median_ratio(seconds["pillow"], seconds["ropaws"]), 1)
        results[f"{size}px"] = {"images_per_second": rates, "speedup": ratio}
        print(f"{size} px: Pillow {rates['pillow']:,}/s, ropaws {rates['ropaws']:,}/s, {ratio} times as fast")
    write_results("augment", results)


if __name__ == "__main__":
    main()

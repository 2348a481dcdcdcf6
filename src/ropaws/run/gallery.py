"""The images of a report, chosen and made small, so that a run folder shows them without its images."""

import base64
import io
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from ropaws.core.features import Features
from ropaws.core.files import read_json, write_json
from ropaws.core.labels import OUT_OF_CLASS
from ropaws.core.run_layout import GALLERY
from ropaws.insight.neighbors import nearest, tsne
from ropaws.pool.content import ImageRef, UnreadableError
from ropaws.pool.corpus import Images
from ropaws.pool.decoding import read_squares
from ropaws.run.run import Run

SIDE = 64  # pixels of a thumbnail at most; smaller images stay as they are
LOSSLESS = 40  # pixels up to which a thumbnail is a PNG
POINTS = 1000  # of the t-SNE
ROW = 12  # images of a row of a grid
MOST_CLASSES = 20
QUERIES = 6  # of each kind, for the nearest labeled neighbors
ERRORS = 24  # suspected label errors that are shown
NEIGHBORS = 5  # nearest labeled images of a query
LEAST_TESTS = 4  # fewer make no map: the pool is shown instead


def draw_gallery(run: Run, label_errors: list[int], suggestions: list[int]) -> dict[str, Any]:
    """All that gallery.json holds; thumbnails are data URIs, by 'train/INDEX' and 'test/INDEX'.

    label_errors, suggestions: training images that the report shows besides
    """
    found: dict[str, Any] = {
        "confident": _confident(run),
        "neighbors": _neighbors(run),
        "outside": _outside(run),
        "projection": _projection(run),
    }
    wanted = set(_keys(found))
    wanted |= {f"train/{image}" for image in (*suggestions, *label_errors[:ERRORS])}
    found["thumbnails"] = _thumbnails(run, wanted)
    return found


def add_thumbnails(run: Run, images: list[int]) -> None:
    """Add training images that gallery.json does not show yet; nothing where there is no such file."""
    path = run.path / GALLERY
    if not path.exists():
        return
    found = read_json(path, inside=run.path)
    if not isinstance(found, dict) or not isinstance(found.get("thumbnails"), dict):
        raise ValueError(f"{path} is damaged; `ropaws evaluate {run.path}` writes it again")
    wanted = {f"train/{image}" for image in images} - set(found["thumbnails"])
    if wanted:
        found["thumbnails"].update(_thumbnails(run, wanted))
        write_json(path, found)


def _keys(value: object) -> Iterable[str]:
    """Every thumbnail that is named anywhere inside."""
    if isinstance(value, dict):
        for name, item in value.items():
            if name == "key":
                yield item
            elif name == "keys":
                yield from item
            else:
                yield from _keys(item)
    elif isinstance(value, list):
        for item in value:
            yield from _keys(item)


def _confident(run: Run) -> list[dict[str, Any]]:
    """The unlabeled images that most surely belong to each class."""
    pool, outputs = run.pool, run.pool.outputs
    confidence, predicted = outputs.probs.max(dim=1)
    sure = confidence * outputs.in_domain
    rows = []
    for number, name in enumerate(run.class_names[:MOST_CLASSES]):
        members = (predicted == number).nonzero().squeeze(1)
        best = members[sure[members].argsort(descending=True)[:ROW]].tolist()
        images = [
            {
                "key": f"train/{int(pool.positions[row])}",
                "name": pool.name(row),
                "confidence": float(confidence[row]),
                "in_domain": float(outputs.in_domain[row]),
            }
            for row in best
        ]
        rows.append({"class": name, "images": images})
    return rows


def _outside(run: Run) -> list[dict[str, Any]]:
    """The unlabeled images farthest from every label."""
    pool, scores = run.pool, run.pool.outputs.in_domain
    predicted = pool.outputs.probs.argmax(dim=1)
    return [
        {
            "key": f"train/{int(pool.positions[row])}",
            "name": pool.name(row),
            "label": run.class_names[int(predicted[row])],
            "in_domain": float(scores[row]),
        }
        for row in scores.argsort()[: 2 * ROW].tolist()
        if scores[row] < run.threshold
    ]


def _neighbors(run: Run) -> list[dict[str, Any]]:
    """In-class and out-of-class queries, each with its nearest labeled images, as in the paper.

    Queries are test images where there are some, whose truth is known; else unlabeled ones, as predicted.
    """
    tested = len(run.test.labels) >= LEAST_TESTS
    outputs = run.test.outputs if tested else run.pool.outputs
    inside = run.test.labels >= 0 if tested else outputs.in_domain >= run.threshold
    random = torch.Generator().manual_seed(0)
    rows = []
    for kind, places in (
        ("in-class", inside.nonzero().squeeze(1)),
        ("out-of-class", (~inside).nonzero().squeeze(1)),
    ):
        for row in places[torch.randperm(len(places), generator=random)[:QUERIES]].tolist():
            known = int(run.test.labels[row]) if tested else OUT_OF_CLASS
            rows.append(
                {
                    "kind": kind,
                    "key": f"test/{row}" if tested else f"train/{int(run.pool.positions[row])}",
                    "truth": run.class_names[known] if known >= 0 else None,
                    "predicted": run.class_names[int(outputs.probs[row].argmax())],
                    "in_domain": float(outputs.in_domain[row]),
                    "neighbors": _nearest_labeled(run, outputs.embedding[row]),
                }
            )
    return rows


def _nearest_labeled(run: Run, point: Tensor) -> list[dict[str, Any]]:
    found = nearest(point[None], run.support.embeddings, NEIGHBORS)
    return [
        {
            "key": f"train/{int(run.facts.split.indices[position])}",
            "label": run.class_names[int(run.support.labels[position])],
            "similarity": similarity,
        }
        for similarity, position in zip(found.similarity[0].tolist(), found.position[0].tolist(), strict=True)
    ]


def _projection(run: Run) -> dict[str, Any] | None:
    """t-SNE of test images by their truth, or of unlabeled ones by what they look like."""
    tested = len(run.test.labels) >= LEAST_TESTS
    outputs = run.test.outputs if tested else run.pool.outputs
    count = len(outputs.embedding)
    chosen = torch.arange(count)
    if count > POINTS:
        order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
        chosen = order[:POINTS].sort().values
    if len(chosen) < LEAST_TESTS:
        return None
    confidence, predicted = outputs.probs[chosen].max(dim=1)
    scores = outputs.in_domain[chosen]
    if tested:
        labels = run.test.labels[chosen]
        keys = [f"test/{row}" for row in chosen.tolist()]
    else:
        labels = torch.where(scores >= run.threshold, predicted, OUT_OF_CLASS)
        keys = [f"train/{row}" for row in run.pool.positions[chosen].tolist()]
    places = tsne(outputs.embedding[chosen])
    return {
        "of": "test" if tested else "pool",
        "points": [[round(float(x), 2), round(float(y), 2)] for x, y in places],
        "labels": labels.tolist(),
        "predicted": predicted.tolist(),
        "confidence": [round(value, 3) for value in confidence.tolist()],
        "in_domain": [round(value, 3) for value in scores.tolist()],
        "keys": keys,
    }


def train_thumbnails(run: Run, images: Iterable[int]) -> dict[int, str]:
    """Data URIs of training images."""
    found = _thumbnails(run, {f"train/{image}" for image in images})
    return {int(key.split("/")[1]): uri for key, uri in found.items()}


def file_thumbnails(files: Sequence[ImageRef], images: Iterable[int]) -> dict[int, str]:
    """Data URIs of these images of a list; those that cannot be read are left out."""
    places = sorted(set(images))
    squares = zip(places, read_squares([files[place] for place in places], SIDE), strict=True)
    return {
        place: _data_uri(torch.from_numpy(square.copy()).permute(2, 0, 1))
        for place, square in squares
        if not isinstance(square, UnreadableError)
    }


def _thumbnails(run: Run, wanted: set[str]) -> dict[str, str]:
    corpus = run.corpus
    found: dict[str, str] = {}
    for part, images in (("train", corpus.train_images), ("test", corpus.test_images)):
        if isinstance(images, Features):  # nothing to see
            continue
        numbers = (int(key.split("/")[1]) for key in wanted if key.startswith(f"{part}/"))
        places = sorted(number for number in numbers if 0 <= number < len(images))
        for start in range(0, len(places), 256):
            some = places[start : start + 256]
            found.update(zip([f"{part}/{p}" for p in some], _data_uris(images, some), strict=True))
    return found


def _data_uris(images: Images, places: list[int]) -> list[str]:
    return [_data_uri(image) for image in images[torch.tensor(places)]]


def _data_uri(image: Tensor) -> str:
    """(channels, h, w) uint8  ->  a small image as text"""
    pixels = image.permute(1, 2, 0).numpy()
    small = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    small.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    kind = "png" if max(small.size) <= LOSSLESS else "jpeg"
    stream = io.BytesIO()
    small.save(stream, kind, quality=85)
    return f"data:image/{kind};base64,{base64.b64encode(stream.getvalue()).decode()}"

"""The pictures of a report, chosen and made small, so that a run folder shows them without its images."""

import base64
import io
from collections.abc import Iterable
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from ropaws.data.corpus import Images
from ropaws.evaluation.neighbors import nearest
from ropaws.evaluation.projection import tsne
from ropaws.material import Material
from ropaws.training.checkpoint import read_json, write_json

PICTURES = "pictures.json"
SIDE = 64  # pixels of a thumbnail at most; smaller images stay as they are
LOSSLESS = 40  # pixels up to which a thumbnail is a PNG
POINTS = 1000  # of the t-SNE
ROW = 8  # images of a row of a grid
MOST_CLASSES = 20
QUERIES = 6  # of each kind, for the nearest labelled neighbours
DOUBTS = 24
LEAST_TESTS = 4  # fewer make no map: the pile is shown instead


def draw_gallery(material: Material, results: dict[str, Any]) -> dict[str, Any]:
    """All that pictures.json holds; thumbnails are data URIs, by 'train/INDEX' and 'test/INDEX'."""
    found: dict[str, Any] = {
        "confident": _confident(material),
        "neighbors": _neighbors(material),
        "outside": _outside(material),
        "projection": _projection(material),
    }
    wanted = set(_keys(found))
    wanted |= {f"train/{item['image']}" for item in results.get("suggestions", [])}
    for doubt in results.get("doubts", [])[:DOUBTS]:
        wanted.add(f"train/{doubt['image']}")
    found["thumbnails"] = _thumbnails(material, wanted)
    return found


def add_thumbnails(material: Material, images: list[int]) -> None:
    """For training images that pictures.json does not show yet; nothing where there is no such file."""
    path = material.run / PICTURES
    if not path.exists():
        return
    found = read_json(path)
    wanted = {f"train/{image}" for image in images} - set(found["thumbnails"])
    if wanted:
        found["thumbnails"].update(_thumbnails(material, wanted))
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


def _judged(material: Material, points: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Confidence, class and in-domain probability of each point.   (n, d)  ->  (n,) each"""
    confidence, predicted = material.probs(points).max(dim=1)
    return confidence, predicted, material.in_domain(points)


def _confident(material: Material) -> list[dict[str, Any]]:
    """For each class the unlabelled images that most surely belong to it."""
    confidence, predicted, scores = _judged(material, material.embedded.pool)
    sure = confidence * scores
    rows = []
    for number, name in enumerate(material.facts.class_names[:MOST_CLASSES]):
        places = (predicted == number).nonzero().squeeze(1)
        best = places[sure[places].argsort(descending=True)[:ROW]].tolist()
        images = [
            {
                "key": f"train/{int(material.embedded.pool_index[place])}",
                "name": material.pool_name(place),
                "confidence": float(confidence[place]),
                "in_domain": float(scores[place]),
            }
            for place in best
        ]
        rows.append({"class": name, "images": images})
    return rows


def _outside(material: Material) -> list[dict[str, Any]]:
    """The unlabelled images farthest from every label."""
    _, predicted, scores = _judged(material, material.embedded.pool)
    return [
        {
            "key": f"train/{int(material.embedded.pool_index[place])}",
            "name": material.pool_name(place),
            "label": material.facts.class_names[int(predicted[place])],
            "in_domain": float(scores[place]),
        }
        for place in scores.argsort()[: 3 * ROW].tolist()
        if scores[place] < material.border.threshold
    ]


def _neighbors(material: Material) -> list[dict[str, Any]]:
    """In-class and out-of-class queries, each with its nearest labelled images, as in the paper.

    Queries are test images where there are some, whose truth is known; else unlabelled ones, as judged.
    """
    embedded, names = material.embedded, material.facts.class_names
    tested = len(embedded.test) >= LEAST_TESTS
    points = embedded.test if tested else embedded.pool
    if len(points) == 0:
        return []
    _, predicted, scores = _judged(material, points)
    inside = embedded.test_labels >= 0 if tested else scores >= material.border.threshold
    random = torch.Generator().manual_seed(0)
    rows = []
    for kind, places in (
        ("in-class", inside.nonzero().squeeze(1)),
        ("out-of-class", (~inside).nonzero().squeeze(1)),
    ):
        for place in places[torch.randperm(len(places), generator=random)[:QUERIES]].tolist():
            found = nearest(points[[place]], material.support.embeddings, 5)
            known = int(embedded.test_labels[place]) if tested else -1
            rows.append(
                {
                    "kind": kind,
                    "key": f"test/{place}" if tested else f"train/{int(embedded.pool_index[place])}",
                    "truth": names[known] if known >= 0 else None,
                    "predicted": names[int(predicted[place])],
                    "in_domain": float(scores[place]),
                    "neighbors": [
                        {
                            "key": f"train/{int(material.facts.split.indices[position])}",
                            "label": names[int(material.support.labels[position])],
                            "similarity": similarity,
                        }
                        for similarity, position in zip(
                            found.similarity[0].tolist(), found.position[0].tolist(), strict=True
                        )
                    ],
                }
            )
    return rows


def _projection(material: Material) -> dict[str, Any] | None:
    """t-SNE of test images by their truth, or of unlabelled ones by what they look like."""
    embedded = material.embedded
    tested = len(embedded.test) >= LEAST_TESTS
    points = embedded.test if tested else embedded.pool
    chosen = torch.arange(len(points))
    if len(points) > POINTS:
        order = torch.randperm(len(points), generator=torch.Generator().manual_seed(0))
        chosen = order[:POINTS].sort().values
    if len(chosen) < LEAST_TESTS:
        return None
    confidence, predicted, scores = _judged(material, points[chosen])
    if tested:
        labels = embedded.test_labels[chosen]
        keys = [f"test/{place}" for place in chosen.tolist()]
    else:
        labels = torch.where(scores >= material.border.threshold, predicted, -1)
        keys = [f"train/{place}" for place in embedded.pool_index[chosen].tolist()]
    places = tsne(points[chosen])
    return {
        "of": "test" if tested else "pool",
        "points": [[round(float(x), 2), round(float(y), 2)] for x, y in places],
        "labels": labels.tolist(),
        "predicted": predicted.tolist(),
        "confidence": [round(value, 3) for value in confidence.tolist()],
        "in_domain": [round(value, 3) for value in scores.tolist()],
        "keys": keys,
    }


def _thumbnails(material: Material, wanted: set[str]) -> dict[str, str]:
    corpus = material.corpus
    found: dict[str, str] = {}
    for part, images in (("train", corpus.train_images), ("test", corpus.test_images)):
        places = sorted(int(key.split("/")[1]) for key in wanted if key.startswith(f"{part}/"))
        for start in range(0, len(places), 256):
            some = places[start : start + 256]
            found.update(zip([f"{part}/{p}" for p in some], _data_uris(images, some), strict=True))
    return found


def _data_uris(images: Images, places: list[int]) -> list[str]:
    return [_data_uri(image) for image in images[torch.tensor(places)]]


def _data_uri(image: Tensor) -> str:
    """(channels, h, w) uint8  ->  a small picture as text"""
    pixels = image.permute(1, 2, 0).numpy()
    picture = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    picture.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    kind = "png" if max(picture.size) <= LOSSLESS else "jpeg"
    stream = io.BytesIO()
    picture.save(stream, kind, quality=85)
    return f"data:image/{kind};base64,{base64.b64encode(stream.getvalue()).decode()}"

"""Labels in from other tools: exports of Label Studio, FiftyOne and COCO as rows of path and label.

An image is where the file says; else below the folder of the file, where the exports of the tool have it.
"""

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from ropaws.core.files import is_image_file, read_json

Row = dict[str, object]  # path, label (None without one), out_of_class
Finder = Callable[[str], str]  # where the image is that a file names

LOCAL_FILES = "/data/local-files/?d="  # of Label Studio: then a path below its document root
UPLOADED = re.compile(r"/data/upload/(?:\d+/)?")
UPLOAD_MARK = re.compile(r"^[0-9a-f]{8}-")  # what Label Studio puts before the name of an uploaded file
PLACES = ("", "data", "images", "..", "../data", "../images")  # where exports have the images
KNOWN = (
    "tasks of Label Studio (JSON), labels.json or samples.json of FiftyOne,"
    " and images, annotations and categories of COCO"
)


def read_label_export(path: Path, folder: Path | str) -> Iterator[Row]:
    """Rows of path, label and out_of_class, as tables of ours have them.

    folder: what paths are relative to; an address where the file is a copy of one behind it

    Raises:
        ValueError: It is no such file, or an image has several labels.
    """
    content = read_json(path)
    find = _Places(folder) if isinstance(folder, Path) else str
    try:
        if isinstance(content, list):
            yield from _label_studio(content, find)
        elif {"images", "annotations", "categories"} <= content.keys():
            yield from _coco(content, find)
        elif "samples" in content:
            yield from _fiftyone_samples(content["samples"], find)
        else:
            yield from _fiftyone(content["labels"], content.get("classes"), find)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no export that is read ({error!r:.80}); known are {KNOWN}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


class _Places:
    """Finds files below the folder of an export."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names: dict[str, dict[str, str]] = {}  # files of each place by their names without endings

    def __call__(self, name: str) -> str:
        if "://" in name:
            return name
        places = (self.folder / place / name for place in PLACES)
        found = next((str(place) for place in places if place.is_file()), None)
        if found is None and not is_image_file(name):  # FiftyOne leaves the ending away
            found = next(filter(None, (self._stems(place).get(name) for place in PLACES)), None)
        return str(Path(found or self.folder / name).absolute())

    def _stems(self, place: str) -> dict[str, str]:
        if place not in self.names:
            folder = self.folder / place
            names = sorted(filter(is_image_file, os.listdir(folder))) if folder.is_dir() else []
            self.names[place] = {os.path.splitext(name)[0]: str(folder / name) for name in names}
        return self.names[place]


def _row(image: str, label: object, outside: object = False) -> Row:
    return {"path": image, "label": label, "out_of_class": outside}


def _only(labels: Iterable[str], image: str) -> str | None:
    """The label of an image; None without one."""
    found = sorted(set(labels))
    if len(found) > 1:
        raise ValueError(
            f"{image} has several labels ({', '.join(found)}); images of one class each are read, so keep one"
        )
    return found[0] if found else None


def _label_studio(tasks: list[Any], find: Finder) -> Iterator[Row]:
    """Of each task the choice of a person. Predictions are no labels; a cancelled annotation says nothing."""
    for task in tasks:
        data = task.get("data", task)  # JSON-MIN has the fields of the task itself
        image = _task_image(data)
        if "data" not in task:
            choice = task.get("choice")
            yield _row(find(_stored(image)), _only(_choices([{"value": choice}]), image))
            continue
        answers = [answer for answer in task.get("annotations", ()) if not answer.get("was_cancelled")]
        checked = [answer for answer in answers if answer.get("ground_truth")]
        labels = {name for answer in checked or answers for name in _choices(answer["result"])}
        outside = bool(answers) and not labels and data.get("out_of_class") in (True, "True")
        yield _row(find(_stored(image)), _only(labels, image), outside)


def _task_image(data: Mapping[str, Any]) -> str:
    """The field of a task that names an image, whatever it is called."""
    texts = [value for value in data.values() if isinstance(value, str)]
    image = data.get("image") or next(filter(is_image_file, texts), None)
    if not isinstance(image, str):
        raise TypeError(f"a task without an image, but {', '.join(data)}")
    return image


def _stored(image: str) -> str:
    """The path below Label Studio's document root, or the name that an uploaded file had."""
    if image.startswith(LOCAL_FILES):
        place = unquote(image.removeprefix(LOCAL_FILES))
        return f"/{place}" if Path(f"/{place}").is_file() else place
    if UPLOADED.match(image):
        return UPLOAD_MARK.sub("", unquote(UPLOADED.sub("", image)))
    return image


def _choices(results: Iterable[Any]) -> list[str]:
    values = [result["value"] for result in results if result.get("type", "choices") == "choices"]
    found = [value.get("choices", []) if isinstance(value, dict) else value for value in values]
    return [name for each in found for name in ([each] if isinstance(each, str) else each or [])]


def _coco(content: Mapping[str, Any], find: Finder) -> Iterator[Row]:
    """Of each image the category of its annotations."""
    names = {category["id"]: str(category["name"]) for category in content["categories"]}
    labels = defaultdict(set)
    for annotation in content["annotations"]:
        labels[annotation["image_id"]].add(names[annotation["category_id"]])
    for image in content["images"]:
        label = _only(labels[image["id"]], image["file_name"])
        outside = label is None and image.get("out_of_class") is True
        yield _row(find(image["file_name"]), label, outside)


def _fiftyone(labels: Mapping[str, Any], classes: list[str] | None, find: Finder) -> Iterator[Row]:
    """labels.json of a FiftyOneImageClassificationDataset: classes by name or number."""
    for image, said in labels.items():
        label = said["label"] if isinstance(said, dict) else said
        yield _row(find(image), classes[label] if classes and isinstance(label, int) else label)


def _fiftyone_samples(samples: list[Any], find: Finder) -> Iterator[Row]:
    """samples.json of a FiftyOneDataset: its field ground_truth, or its only classification."""
    for sample in samples:
        said = {
            name: value["label"]
            for name, value in sample.items()
            if isinstance(value, dict) and value.get("_cls") == "Classification"
        }
        labels = [said["ground_truth"]] if "ground_truth" in said else list(said.values())
        if len(labels) > 1:
            raise ValueError(f"fields {', '.join(said)} have labels; export one of them as ground_truth")
        yield _row(find(sample["filepath"]), labels[0] if labels else None)

"""Labels in from Label Studio, FiftyOne and COCO, and what is written comes back."""

import json

import pytest
from PIL import Image

from ropaws.core.labels import OUT_OF_CLASS_NAME
from ropaws.pool.listing import Pool
from ropaws.run.output_formats import FIELDS, Output, write_labels


@pytest.fixture
def images(tmp_path):
    """Four images in a folder `data` beside the export, the last without a label."""
    (tmp_path / "data").mkdir()
    for number, name in enumerate(("a", "b", "c", "d")):
        Image.new("RGB", (30, 20), (60 * number, 80, 90)).save(tmp_path / "data" / f"{name}.png")
    return tmp_path


def task(name, *choices, **facts):
    result = [{"type": "choices", "value": {"choices": list(choices)}}]
    return {"data": {"image": name}, "annotations": [{"result": result if choices else [], **facts}]}


def fiftyone(target):
    return {"labels": {"a": target("cat", 0), "b": target("dog", 1), "c": target("cat", 0), "d": None}}


COCO = {
    "images": [{"id": 10 + k, "file_name": f"{name}.png"} for k, name in enumerate("abcd")],
    "annotations": [{"id": k, "image_id": 10 + k, "category_id": c} for k, c in enumerate((7, 9, 7))],
    "categories": [{"id": 7, "name": "cat"}, {"id": 9, "name": "dog"}],
}
SAMPLES = {
    "samples": [
        {
            "filepath": f"data/{name}.png",
            "tags": [],
            "ground_truth": label and {"_cls": "Classification", "label": label},
        }
        for name, label in zip("abcd", ("cat", "dog", "cat", None), strict=True)
    ]
}
TASKS = [
    task("/data/upload/3/0123abcd-a.png", "cat"),
    task("data/b.png", "dog"),
    {"data": {"image": "c.png"}, "annotations": [
        {"result": [{"type": "choices", "value": {"choices": ["dog"]}}], "was_cancelled": True},
        {"result": [{"type": "choices", "value": {"choices": ["cat"]}}]},
    ]},
    {"data": {"image": "d.png"},
     "predictions": [{"result": [{"type": "choices", "value": {"choices": ["dog"]}}]}]},
]  # fmt: skip


@pytest.mark.parametrize(
    "content",
    [
        COCO,
        SAMPLES,
        TASKS,
        [
            {"image": f"{name}.png", "choice": label}
            for name, label in zip("abc", ("cat", "dog", "cat"), strict=True)
        ]
        + [{"image": "d.png", "annotator": 1}],
        fiftyone(lambda name, _: name),
        fiftyone(lambda _, number: number) | {"classes": ["cat", "dog"]},
        fiftyone(lambda _, number: {"label": number, "confidence": 0.5}) | {"classes": ["cat", "dog"]},
    ],
)
def test_labels_of_other_tools_are_read(images, content):
    (images / "export.json").write_text(json.dumps(content))
    pool = Pool.open(labeled=images / "export.json")
    assert pool.labels == ("cat", "dog", "cat", None)
    assert [image.name for image in pool.images] == ["a.png", "b.png", "c.png", "d.png"]
    assert pool.image(0).size[0] > 0
    assert Pool.open(images / "export.json").labels == (None,) * 4


@pytest.mark.parametrize("kind", ["label-studio", "fiftyone", "coco"])
def test_what_is_written_comes_back(images, kind):
    empty = dict.fromkeys(FIELDS) | {
        "in_domain": 0.9,
        "confidence": 0.8,
        "out_of_class": False,
        "answered": True,
    }
    rows = [
        empty | {"path": str(images / "data" / f"{name}.png"), "label": label, "out_of_class": not label}
        for name, label in zip("abcd", ("cat", "dog", "cat", ""), strict=True)
    ]
    write_labels(images / "t.json", rows, Output(kind, ("cat", "dog")))
    outside = None if kind == "fiftyone" else OUT_OF_CLASS_NAME  # null says nothing there
    assert Pool.open(labeled=images / "t.json").labels == ("cat", "dog", "cat", outside)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"a": 1}, "is no export that is read"),
        ([1, 2], "is no export that is read"),
        ({"labels": [1]}, "is no export that is read"),
        ([{"data": {"text": "words"}}], "is no export that is read"),
        ([task("a.png", "cat", ), task("b.png", "cat", "dog")], "b.png has several labels (cat, dog)"),
        (COCO | {"annotations": [{"image_id": 10, "category_id": c} for c in (7, 9)]},
         "a.png has several labels"),
        (COCO | {"annotations": [{"image_id": 10, "category_id": 1}]}, "is no export that is read"),
        ({"labels": {"a": 5}, "classes": ["cat"]}, "is no export that is read"),
        ({"samples": [{"filepath": "data/a.png",
                       "p": {"_cls": "Classification", "label": "x"},
                       "q": {"_cls": "Classification", "label": "x"}}]},
         "fields p, q have labels"),
        ({"labels": {"zzz": "cat"}}, "names 1 files that are not there"),
        ([], "has no rows"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_one_line(images, content, message):
    (images / "export.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r".") as error:
        Pool.open(labeled=images / "export.json")
    assert message in str(error.value)
    assert "\n" not in str(error.value)

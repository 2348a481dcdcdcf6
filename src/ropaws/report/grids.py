"""The sections of a report that show images."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ropaws.report.charts import OUT, class_color
from ropaws.report.page import esc
from ropaws.report.run_files import MissingError, RunFiles, figure
from ropaws.report.verdict import no_better_than_chance

SHOWN_ERRORS = 24
SHOWN_NEXT = 12  # suggestions that are shown at once
SCATTER = 640
NAME = 60  # characters of a file name, from its end


def _image(files: RunFiles, key: str, label: str) -> str:
    uri = files.thumbnail(key)
    if uri is None:
        return f'<img alt="{esc(label)} (no thumbnail)" src="data:,">'
    tiny = ' class="tiny"' if uri.startswith("data:image/png") else ""
    return f'<img{tiny} alt="{esc(label)}" title="{esc(label)}" src="{esc(uri)}">'


def _tile(files: RunFiles, key: str, label: str, words: str) -> str:
    return f'<div class="tile">{_image(files, key, label)}{words}</div>'


def projection(files: RunFiles) -> str:
    """A map of the embedding; hovering or tapping a point shows its image."""
    found = files.gallery["projection"]
    if found is None:
        raise MissingError("there are too few images for a t-SNE")
    names = files.class_names
    xs, ys = zip(*found["points"], strict=True)
    left, top = min(xs), min(ys)
    scale = (SCATTER - 20) / (max(max(xs) - left, max(ys) - top) or 1)
    # Out-of-class points first, so that the classes are drawn over them.
    order = sorted(range(len(xs)), key=lambda i: found["labels"][i] >= 0)
    dots = "".join(
        f'<circle cx="{10 + (xs[i] - left) * scale:.1f}" cy="{10 + (ys[i] - top) * scale:.1f}"'
        f' r="{3.2 if found["labels"][i] >= 0 else 2.4}" fill="{class_color(found["labels"][i])}"'
        f' data-i="{i}" data-c="{found["labels"][i]}"/>'
        for i in order
    )
    used = sorted({number for number in found["labels"] if number >= 0})
    buttons = "".join(
        f'<button type="button" data-c="{number}"><span class="dot" style="background:{class_color(number)}">'
        f"</span>{esc(names[number])}</button>"
        for number in used
    )
    if any(number < 0 for number in found["labels"]):
        buttons += (
            f'<button type="button" data-c="-1"><span class="dot" style="background:{OUT};'
            'border:1px solid var(--dim)"></span>out-of-class</button>'
        )
    tips = {
        "thumbnails": [files.thumbnail(key) for key in found["keys"]],
        "lines": [_lines(found, names, i) for i in range(len(xs))],
    }
    what = (
        "Test images; the color is the true class."
        if found["of"] == "test"
        else "Unlabeled images; the color is the class that they look like."
    )
    payload = json.dumps(tips).replace("<", "\\u003c")  # nothing inside can end the script element
    return (
        f"<p>{what} Out-of-class images are black. Hover over a point, or tap it, to see the image. Tap a"
        f' class to hide it.</p><div class="legend" id="classes">{buttons}</div>'
        f'<figure class="large"><svg id="map" class="plot" viewBox="0 0 {SCATTER} {SCATTER}" role="img"'
        f' aria-label="t-SNE of the embeddings" style="max-width:44rem">{dots}</svg></figure>'
        f'<script type="application/json" id="tips">{payload}</script>'
    )


def _lines(found: dict[str, Any], names: list[str], i: int) -> list[str]:
    label = found["labels"][i]
    truth = names[label] if label >= 0 else "out-of-class"
    known = "is" if found["of"] == "test" else "looks"
    return [
        f"{known} {truth}",
        f"predicted {names[found['predicted'][i]]}, {found['confidence'][i]:.0%}",
        f"in-domain {found['in_domain'][i]:.0%}",
    ]


def confident(files: RunFiles) -> str:
    rows = ""
    for item in files.gallery["confident"]:
        tiles = "".join(
            _tile(files, image["key"], image["name"], f"{image['confidence']:.0%}")
            for image in item["images"]
        )
        shown = tiles or '<span class="dim">none</span>'
        rows += f'<h3>{esc(item["class"])}</h3><div class="grid">{shown}</div>'
    return f"<p>The unlabeled images with the highest confidence in each class.</p>{rows}"


def neighbors(files: RunFiles) -> str:
    parts = {"in-class": "", "out-of-class": ""}
    for query in files.gallery["neighbors"]:
        truth = query["truth"] or query["kind"]
        first = _tile(files, query["key"], truth, f"{esc(truth)}<br>in-domain {query['in_domain']:.0%}")
        others = "".join(
            _tile(files, item["key"], item["label"], f"{esc(item['label'])}<br>{item['similarity']:.2f}")
            for item in query["neighbors"]
        )
        parts[query["kind"]] += f'<div class="query">{first}{others}</div>'
    shown = "".join(f"<div><h3>{kind} queries</h3>{rows}</div>" for kind, rows in parts.items() if rows)
    if not shown:
        raise MissingError("there are no query images")
    return (
        "<p>Each row is a query with its most similar labeled images and their cosine similarities. A robust"
        f" model finds look-alikes of out-of-class images too, but at lower similarity.</p>{shown}"
    )


def outside(files: RunFiles) -> str:
    found = files.gallery["outside"]
    if not found:
        return "<p>No unlabeled image looks out-of-class.</p>"
    tiles = "".join(
        _tile(files, item["key"], item["name"], f"in-domain {item['in_domain']:.1%}") for item in found
    )
    return f'<p>Unlabeled images farthest from every label.</p><div class="grid">{tiles}</div>'


def label_errors(files: RunFiles) -> str:
    found = files.found("label_errors")
    if not found:
        return "<p>No label is contradicted by the other labels.</p>"
    if no_better_than_chance(files, files.evaluation.get("leave_one_out", 1.0)):
        return (
            "<p>The labels predict one another no better than guessing, so suspected errors mean nothing yet:"
            " train longer.</p>"
        )
    items = "".join(
        _item(
            files,
            error["image"],
            f"<b>{esc(error['label'])}</b>, or {esc(error['suspected'])}?<br>probability {error['other']:.0%}"
            f" against {error['own']:.0%}<br><span class=dim>{esc(error['name'][-NAME:])}</span>",
        )
        for error in found[:SHOWN_ERRORS]
    )
    more = f" The first {SHOWN_ERRORS} are shown." if len(found) > SHOWN_ERRORS else ""
    return (
        f"<p>{len(found)} labeled images whose neighbors vote for another class; each is judged without its"
        f" own label. Look at them: the label may be wrong, or the class may be hard.{more}</p>"
        f'<div class="list">{items}</div>'
    )


def suggestions(files: RunFiles) -> str:
    found = files.found("suggestions")
    if not found:
        return "<p>There is no unlabeled image to label.</p>"
    text = (
        "<p>The unlabeled images whose labels would tell the most, best first: each represents many images"
        " that likely belong to a class and that no label is near to. Label them, add them to the labeled"
        f" images and train again; <code>ropaws suggest {esc(files.run)} --out next.csv</code> writes the"
        f" list.{_expected(found)}</p>"
    )
    return text + _listed(files, found) + _new_classes(files)


def _expected(found: Sequence[Mapping[str, Any]]) -> str:
    """How many of a list belong to a class; nothing of lists of 0.1.0, which held new classes, too."""
    likely = [figure(item.get("in_domain")) for item in found if item.get("kind") == "in-class"]
    if len(likely) < len(found) or None in likely:
        return ""
    return f" About {sum(filter(None, likely)):.0f} of the {len(found)} belong to a class."


def _new_classes(files: RunFiles) -> str:
    found = files.evaluation.get("new_classes")
    if not isinstance(found, list) or not found:
        return ""
    text = "<p>Likely new classes: centers of clusters of out-of-class images, the largest first.</p>"
    return text + _listed(files, found)


def _listed(files: RunFiles, found: Sequence[Mapping[str, Any]]) -> str:
    """The first few, and the others folded away."""
    items = [
        _item(
            files,
            item["image"],
            f"<b>{esc(item['rank'])}.</b> {esc(item['reason'])}<br><span"
            f" class=dim>{esc(item['name'][-NAME:])}</span>",
        )
        for item in found
    ]
    shown = f'<div class="list next">{"".join(items[:SHOWN_NEXT])}</div>'
    if len(items) > SHOWN_NEXT:
        rest = "".join(items[SHOWN_NEXT:])
        shown += (
            f"<details><summary>{len(items) - SHOWN_NEXT} more</summary>"
            f'<div class="list next">{rest}</div></details>'
        )
    return shown


def _item(files: RunFiles, image: int, words: str) -> str:
    """Words beside an image, or alone where there is no thumbnail."""
    key = f"train/{image}"
    image_tag = _image(files, key, str(image)) if files.thumbnail(key) else ""
    return f'<div class="item">{image_tag}<div>{words}</div></div>'

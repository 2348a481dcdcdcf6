"""The demo's results as one self-contained page."""

import base64
import html
from collections.abc import Mapping
from pathlib import Path

from ropaws.report.tables import COLUMNS, Results, comparison_rows

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .8rem; text-align: right; border-bottom: 1px solid #8886; }
th:first-child, td:first-child { text-align: left; }
td { white-space: nowrap; }
img { max-width: 100%; background: white; border-radius: 6px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; }
dd { margin: 0; }
"""


def _plain(value: object) -> str:
    """A group of settings as words: 'size 28, scale 0.75 1.0'."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_plain(item)}" for name, item in value.items())
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def write_demo_page(path: Path, results: Results, settings: Mapping[str, object], figure: Path) -> None:
    """Table, figure and settings; opens from disk without a network."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in ("method", *COLUMNS.values()))
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
        for row in comparison_rows(results)
    )
    facts = "".join(
        f"<dt>{html.escape(k)}</dt><dd>{html.escape(_plain(v))}</dd>" for k, v in settings.items()
    )
    picture = base64.b64encode(figure.read_bytes()).decode()
    path.write_text(
        f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>ropaws demo</title><style>{STYLE}</style></head><body>
<h1>Learning from an uncurated pile</h1>
<p>A few labelled garments of five classes, and 5,000 unlabelled images of which half belong to none of them.
All methods share the labels, the network, the augmentation and the number of steps. Figures are percent on
unseen test images, mean and standard deviation over seeds; seconds are training time.</p>
<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>
<p>Accuracy counts in-class images. A good method is confident in-class (conf. in) and not out-of-class
(conf. out); AUROC says
how well the similarity to the nearest label tells the two apart (50 is guessing), ECE how far confidence
is from accuracy.</p>
<h2>Embeddings of test images</h2>
<p>t-SNE; classes in colour, out-of-class images in black.</p>
<img alt="t-SNE of the embeddings of PAWS and RoPAWS" src="data:image/png;base64,{picture}">
<h2>Settings</h2><dl>{facts}</dl>
</body></html>
""",
        encoding="utf-8",
    )

"""The demo's results as one self-contained page."""

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path

from ropaws.report.page import esc, facts, page, table
from ropaws.report.tables import COLUMNS, Results, comparison_rows

INTRODUCTION = """<h1>Learning from an uncurated pool</h1>
<p>A few labeled garments of five classes, and 5,000 unlabeled images of which half belong to none of them.
All methods share the labels, the network, the augmentation and the number of steps. Figures are percent on
unseen test images, mean and standard deviation over seeds; seconds are training time.</p>"""
EXPLANATION = """<p>Accuracy counts in-class images. A good method is confident in-class (conf. in) and not
out-of-class (conf. out); AUROC says how well the similarity to the nearest label tells the two apart (50 is
guessing), ECE how far confidence is from accuracy.</p>"""


def write_demo_page(
    path: Path, results: Results, settings: Mapping[str, object], figure: Path, pages: Sequence[str] = ()
) -> None:
    """Table, figure and settings; opens without a network. pages: reports of the single runs."""
    links = ", ".join(f'<a href="{esc(address)}">{esc(address)}</a>' for address in pages)
    image = base64.b64encode(figure.read_bytes()).decode()
    body = [
        INTRODUCTION,
        table(["method", *COLUMNS.values()], comparison_rows(results)),
        EXPLANATION,
        f"<p>All about each run: {links}.</p>" if links else "",
        "<h2>Embeddings of test images</h2><p>t-SNE; classes in color, out-of-class images in black.</p>",
        '<img style="max-width: 100%; background: white; border-radius: 6px"'
        f' alt="t-SNE of the embeddings of PAWS and RoPAWS" src="data:image/png;base64,{image}">',
        f"<h2>Settings</h2>{facts(settings.items())}",
    ]
    path.write_text(page("ropaws demo", "\n".join(body)), encoding="utf-8")

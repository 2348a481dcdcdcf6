"""Small charts as SVG, in the colors of the page; every bar and line says its value on hover.

They are drawn by hand: what plotting libraries write either needs scripts, or knows neither the colors of the
page nor hovering, and a template is no place for the arithmetic of coordinates.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

from markupsafe import Markup
from markupsafe import escape as esc

WIDTH, HEIGHT = 420, 230
SCATTER = 640
LEFT, RIGHT, TOP, BOTTOM = 62, 10, 30, 36
LINES = ("var(--one)", "var(--two)", "var(--three)", "var(--four)", "var(--five)", "var(--six)")
# Okabe and Ito's colors, which color-blind readers can tell apart; black is for out-of-class.
COLORS = ("#E69F00", "#56B4E9", "#009E73", "#CC79A7", "#D55E00", "#0072B2", "#B8A800")
OUT = "#000000"


def class_color(number: int) -> str:
    """Of a class; beyond the first ones around the color wheel by the golden angle."""
    if number < 0:
        return OUT
    return COLORS[number] if number < len(COLORS) else f"hsl({number * 137.5 % 360:.0f} 65% 45%)"


class Axes:
    """A plot area: data coordinates in, SVG coordinates out."""

    def __init__(self, x: tuple[float, float], y: tuple[float, float]) -> None:
        self.x, self.y = x, y

    def at(self, x: float, y: float) -> tuple[float, float]:
        across = (x - self.x[0]) / ((self.x[1] - self.x[0]) or 1)
        up = (y - self.y[0]) / ((self.y[1] - self.y[0]) or 1)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    def frame(self, x_label: str, y_label: str, x_marks: Mapping[float, str] | None = None) -> str:
        """Axes with three marks each, or those given for x."""
        parts = []
        for x, text in (x_marks or {}).items():
            across, bottom = self.at(x, self.y[0])
            parts.append(f'<text x="{across:.1f}" y="{bottom + 14:.1f}" text-anchor="middle">{text}</text>')
        for share in (0.0, 0.5, 1.0):
            x, y = (low + share * (high - low) for low, high in (self.x, self.y))
            across, bottom = self.at(x, self.y[0])
            left, up = self.at(self.x[0], y)
            anchor = {0.0: "start", 0.5: "middle", 1.0: "end"}[share]
            if x_marks is None:
                parts.append(
                    f'<text x="{across:.1f}" y="{bottom + 14:.1f}" text-anchor="{anchor}">{_mark(x)}</text>'
                )
            parts.append(f'<text x="{left - 5:.1f}" y="{up + 4:.1f}" text-anchor="end">{_mark(y)}</text>')
            end = self.at(self.x[1], y)[0]
            parts.append(f'<line class="axis" x1="{left:.1f}" x2="{end:.1f}" y1="{up:.1f}" y2="{up:.1f}"/>')
        middle = (LEFT + WIDTH - RIGHT) / 2
        parts.append(f'<text x="{middle}" y="{HEIGHT - 4}" text-anchor="middle">{esc(x_label)}</text>')
        # Above the plot: beside it a long one is cut off, and it meets the marks.
        parts.append(f'<text x="2" y="14">{esc(y_label)}</text>')
        return "".join(parts)


def _mark(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2g}"


def _svg(content: str, label: str) -> Markup:
    return Markup(f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{esc(label)}">{content}</svg>')


def _legend(colors: Mapping[str, str], *, always: bool = False) -> Markup:
    """Names beside their colors; a single one needs none, unless it is asked for."""
    if len(colors) < 2 and not always:
        return Markup()
    items = "".join(
        f'<span><span class="dot" style="background:{color}"></span>{esc(name)}</span>'
        for name, color in colors.items()
    )
    return Markup(f'<div class="legend">{items}</div>')


def _line_colors(names: Iterable[str]) -> dict[str, str]:
    return dict(zip(names, itertools.cycle(LINES), strict=False))


def _polyline(places: Iterable[tuple[float, float]], color: str, title: str = "") -> str:
    path = " ".join(f"{across:.1f},{up:.1f}" for across, up in places)
    return f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.8">{title}</polyline>'


def _circle(place: tuple[float, float], radius: float, color: str, title: str) -> str:
    across, up = place
    return (
        f'<circle cx="{across:.1f}" cy="{up:.1f}" r="{radius}" fill="{color}"><title>{title}</title></circle>'
    )


def line_chart(
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    x_label: str,
    y_label: str,
    y: tuple[float, float] | None = None,
    colors: Mapping[str, str] | None = None,
) -> Markup:
    """Lines over one axis; those without a point are left out.

    colors: by name, where several charts of a page show the same things; a legend is always there then.
    """
    series = {name: points for name, points in series.items() if points}
    if not series:
        raise ValueError("nothing to draw")
    xs, ys = zip(*(point for points in series.values() for point in points), strict=True)
    margin = 0.05 * (max(ys) - min(ys)) or 0.05 * abs(max(ys)) or 1.0
    low = min(ys) - margin if min(ys) < 0 else max(0.0, min(ys) - margin)
    axes = Axes((min(xs), max(xs)), y or (low, max(ys) + margin))
    shown = {name: colors[name] for name in series} if colors else _line_colors(series)
    parts = [axes.frame(x_label, y_label)]
    for name, points in series.items():
        places = [axes.at(*point) for point in points]
        title = f"<title>{esc(name)}: {points[-1][1]:.4g} at the end</title>"
        parts.append(_polyline(places, shown[name], title))
        if len(points) < 30:
            parts += [
                _circle(place, 2.6, shown[name], f"{esc(name)}: {value:.4g}")
                for place, (_, value) in zip(places, points, strict=True)
            ]
    return _svg("".join(parts), y_label) + _legend(shown, always=bool(colors))


def error_chart(
    series: Mapping[str, Sequence[tuple[float, float, float]]], *, x_label: str, y_label: str
) -> Markup:
    """Lines through points (x, y, standard error of y); each doubling of x > 0 takes the same width."""
    points = [point for found in series.values() for point in found]
    if not points:
        raise ValueError("nothing to draw")
    xs = sorted({point[0] for point in points})
    low, high = min(y - error for _, y, error in points), max(y + error for _, y, error in points)
    margin = 0.05 * (high - low) or 1.0
    # Some room on either side, so that error bars side by side stay inside.
    axes = Axes((math.log2(xs[0]) - 0.3, math.log2(xs[-1]) + 0.3), (low - margin, high + margin))
    parts, colors = [axes.frame(x_label, y_label, {math.log2(x): _mark(x) for x in xs})], _line_colors(series)
    for number, (name, found) in enumerate(series.items()):
        shift = 5.0 * (number - (len(series) - 1) / 2)  # so that bars of two lines do not cover each other
        places = [(axes.at(math.log2(x), y)[0] + shift, axes.at(0, y)[1]) for x, y, _ in found]
        parts.append(_polyline(places, colors[name]))
        for place, (x, y, error) in zip(places, found, strict=True):
            top, bottom = axes.at(0, y + error)[1], axes.at(0, y - error)[1]
            parts.append(
                f'<line x1="{place[0]:.1f}" x2="{place[0]:.1f}" y1="{top:.1f}" y2="{bottom:.1f}"'
                f' stroke="{colors[name]}" stroke-width="1.2"/>'
                + _circle(place, 3, colors[name], f"{esc(name)}, {x:g}: {y:.1f} ± {error:.1f}")
            )
    return _svg("".join(parts), f"{y_label} over {x_label}") + _legend(colors)


def histogram(counts: Mapping[str, Sequence[int]], *, x_label: str, threshold: float | None = None) -> Markup:
    """Shares of values from 0 to 1, for each group; a dashed rule marks the threshold."""
    shares = {name: [n / (sum(values) or 1) for n in values] for name, values in counts.items()}
    top = max(max(values) for values in shares.values()) or 1.0
    axes = Axes((0.0, 1.0), (0.0, top))
    parts = [axes.frame(x_label, "share of images")]
    colors = _line_colors(counts)
    for number, (name, values) in enumerate(shares.items()):
        for place, share in enumerate(values):
            left, up = axes.at((place + number / len(shares)) / len(values), share)
            right, bottom = axes.at((place + (number + 1) / len(shares)) / len(values), 0)
            parts.append(
                f'<rect x="{left:.1f}" y="{up:.1f}" width="{max(0.5, right - left - 0.6):.1f}"'
                f' height="{bottom - up:.1f}" fill="{colors[name]}">'
                f"<title>{esc(name)}: {counts[name][place]:,} images</title></rect>"
            )
    if threshold is not None:
        x, low = axes.at(threshold, 0)
        parts.append(f'<line class="rule" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{low:.1f}"/>')
        side, shift = ("start", 4) if threshold < 0.7 else ("end", -4)
        parts.append(
            f'<text x="{x + shift:.1f}" y="{TOP + 9}" text-anchor="{side}">threshold {threshold:.2f}</text>'
        )
    return _svg("".join(parts), x_label) + _legend(colors)


def reliability_diagram(bins: Sequence[Mapping[str, float]]) -> Markup:
    """Accuracy of predictions of each confidence; on the dashed line they are equal."""
    axes = Axes((0.0, 1.0), (0.0, 1.0))
    parts = [axes.frame("confidence", "accuracy")]
    most = max(item["images"] for item in bins) or 1
    for item in bins:
        if not item["images"]:
            continue
        left, up = axes.at(item["low"], item["accuracy"])
        right, bottom = axes.at(item["high"], 0)
        parts.append(
            f'<rect x="{left + 0.5:.1f}" y="{up:.1f}" width="{right - left - 1:.1f}"'
            f' height="{bottom - up:.1f}"'
            f' fill="var(--one)" opacity="{0.25 + 0.75 * item["images"] / most:.2f}"><title>confidence'
            f" {item['confidence']:.0%}, right {item['accuracy']:.0%} of {item['images']:,}"
            f" images</title></rect>"
        )
    (a, b), (c, d) = axes.at(0, 0), axes.at(1, 1)
    parts.append(f'<line class="rule" x1="{a}" y1="{b}" x2="{c}" y2="{d}"/>')
    return _svg("".join(parts), "reliability diagram")


def scatter(points: Sequence[tuple[float, float]], labels: Sequence[int], *, label: str) -> Markup:
    """A map in the colors of the classes, as high as its points need.

    Each point says its number and class to the script of the page.
    """
    xs, ys = zip(*points, strict=True)
    left, top = min(xs), min(ys)
    scale = (SCATTER - 20) / (max(max(xs) - left, max(ys) - top) or 1)
    # Out-of-class points first, so that the classes are drawn over them.
    dots = "".join(
        f'<circle cx="{10 + (xs[i] - left) * scale:.1f}" cy="{10 + (ys[i] - top) * scale:.1f}"'
        f' r="{3.2 if labels[i] >= 0 else 2.4}" fill="{class_color(labels[i])}" data-i="{i}"'
        f' data-c="{int(labels[i])}"/>'
        for i in sorted(range(len(xs)), key=lambda i: labels[i] >= 0)
    )
    box = f"0 0 {SCATTER} {20 + (max(ys) - top) * scale:.0f}"
    return Markup(
        f'<svg id="map" class="plot" viewBox="{box}" role="img" aria-label="{esc(label)}">{dots}</svg>'
    )

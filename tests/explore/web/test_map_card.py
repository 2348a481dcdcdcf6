"""Points that a graphics card draws are those that the page writes as pixels itself."""

import http.server
import threading
from pathlib import Path

import pytest

WEB = Path(__file__).parents[3] / "src/ropaws/explore/web"
ARGUMENTS = [
    "--no-sandbox",
    "--enable-unsafe-swiftshader",
]  # a card in software, which the page would not take
DRAWN = """
async () => {
  const { MapCanvas } = await import("/map_canvas.js");
  const { pointColors } = await import("/colors.js");
  const n = 500;
  const some = (low, high, k) =>
    Float32Array.from({ length: n }, (_, i) => low + ((i * k) % n) / n * (high - low));
  const columns = { n, x: some(-5, 5, 7), y: some(-3, 3, 211), label: new Int16Array(n).fill(-1),
    predicted: Int16Array.from({ length: n }, (_, i) => i % 3) };
  columns.label[40] = 2;
  const classes = [0, 1, 2].map((id) => ({ id, name: `${id}` }));
  const mask = Uint8Array.from({ length: n }, (_, i) => i % 5 ? 1 : 0);
  const colors = pointColors(columns, "predicted", classes, false, mask);
  const scene = { columns, view: { x: 0.3, y: -0.2, scale: 30 }, fitScale: 30, colors, mask, dark: false,
    selected: Uint32Array.from([17, 60]), hovered: null, lasso: [] };
  const found = [];
  for (const options of [{ noCard: true }, { slowCard: true }]) {
    const element = document.createElement("canvas");
    element.style = "width: 400px; height: 300px";
    document.body.append(element);
    const map = new MapCanvas(element, options);
    map.resize();
    map.draw(scene);
    const shown = document.createElement("canvas");
    [shown.width, shown.height] = [element.width, element.height];
    const context = shown.getContext("2d");
    if (map.card) context.drawImage(map.below, 0, 0);
    context.drawImage(element, 0, 0);
    found.push({ card: !!map.card, pixels: [...context.getImageData(0, 0, shown.width, shown.height).data] });
  }
  return found;
}
"""


class Handler(http.server.SimpleHTTPRequestHandler):
    def __init__(self, *given):
        super().__init__(*given, directory=str(WEB))

    def log_message(self, format, *given):
        """Silent."""


def test_a_card_draws_what_the_page_writes(browser, chromium):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    other = browser.browser_type.launch(executable_path=chromium, args=ARGUMENTS)
    try:
        page = other.new_page()
        page.goto(f"http://127.0.0.1:{server.server_port}/keys.js")
        written, drawn = page.evaluate(DRAWN)
    finally:
        other.close()
        server.shutdown()
        server.server_close()
    assert not written["card"]
    if not drawn["card"]:
        pytest.skip("this browser has no WebGL2, not even in software")
    assert len(written["pixels"]) == len(drawn["pixels"]) > 100_000
    pairs = list(zip(chunks(written["pixels"]), chunks(drawn["pixels"]), strict=True))
    differ = sum(max(abs(a - b) for a, b in zip(one, other, strict=True)) > 40 for one, other in pairs)
    painted = sum(pixel[3] > 0 for pixel in chunks(written["pixels"]))
    assert painted > 2000
    assert differ < 0.12 * painted  # at the edges of discs


def chunks(values):
    return [values[at : at + 4] for at in range(0, len(values), 4)]

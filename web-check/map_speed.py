"""How long the map of `ropaws explore` takes to draw 100,000 points and a million, in chromium.

There is no graphics card: WebGL is computed by the processor (SwiftShader), in whose place the page writes
pixels itself.

python web-check/map_speed.py     writes benchmarks/results/explore_map.json
"""

import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

HERE = Path(__file__).parent
WEB = HERE.parent / "src/ropaws/explore/web"
OUT = HERE.parent / "benchmarks/results/explore_map.json"
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
SECONDS = 540

results: queue.Queue[dict[str, Any]] = queue.Queue()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        file = WEB / Path(path).name if path.startswith("/web/") else HERE / Path(path).name
        if file.suffix not in KINDS or not file.is_file():
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Type", KINDS[file.suffix])
        self.end_headers()
        self.wfile.write(file.read_bytes())

    def do_POST(self) -> None:
        results.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""


def rounded(value: Any) -> Any:
    """To hundredths of a millisecond."""
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    return round(value, 2) if isinstance(value, float) else value


def main() -> None:
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        sys.exit("no chromium on this machine")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}/map_speed.html"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = ("--headless=new", "--no-sandbox", "--enable-unsafe-swiftshader", "--window-size=1280,900")
        process = subprocess.Popen(
            [browser, *options, f"--user-data-dir={profile}", address], stderr=subprocess.DEVNULL
        )
        try:
            found = results.get(timeout=SECONDS)
        finally:
            process.terminate()
            process.wait()
    machine = {"cores": os.cpu_count(), "load_average": round(os.getloadavg()[0], 1)}
    found = {"browser": "chromium, headless, without a GPU"} | machine | rounded(found)
    OUT.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

"""From a folder of images and no label to a classifier, as a person does it: in a browser, with a crash in between."""

import json
import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from ropaws.data.datasets.truth import embedded_truth
from ropaws.data.sources import DataConfig, load_corpus
from tests.conftest import REQUIRE_BROWSER

if os.environ.get(REQUIRE_BROWSER):
    import playwright.sync_api as playwright
else:
    playwright = pytest.importorskip("playwright.sync_api")

IMAGES = 400
CLASSES = ("t-shirt", "trouser", "pullover", "dress", "coat")  # five of the ten kinds of garments
LEAST_ACCURACY = 0.6  # of what is left; guessing one of five classes or none has 0.17
PREDICTED = """async () => {
  const found = [];
  for (let offset = 0; ; offset += 500) {
    const reply = await fetch("/api/images", {
      method: "POST",
      headers: { "Content-Type": "application/json", "X-Ropaws-Client": "test" },
      body: JSON.stringify({ view: "all", offset, limit: 500 }),
    });
    const { items, total } = await reply.json();
    found.push(...items);
    if (found.length >= total) return found;
  }
}"""


@pytest.fixture(scope="module")
def garments(tmp_path_factory):
    """A folder of embedded garments; the truth by file name: a class, or 5 and more for others."""
    folder = tmp_path_factory.mktemp("garments")
    images, truth = load_corpus(DataConfig(source="fashion-demo")).train_images, embedded_truth().labels
    chosen = np.random.default_rng(0).permutation(len(truth))[:IMAGES]
    for number in chosen.tolist():
        Image.fromarray(images[number, 0].numpy()).save(folder / f"{number:04}.png")
    return folder, {f"{number:04}.png": int(truth[number]) for number in chosen}


class Server:
    """`ropaws explore` in a process of its own."""

    def __init__(self, folder, out, port=0):
        command = [sys.executable, "-m", "ropaws", "explore", "--unlabeled", str(folder), "--out", str(out)]
        self.process = subprocess.Popen(
            [*command, "--port", str(port), "--no-browser"], stdout=subprocess.PIPE, text=True
        )
        said = ""
        for line in self.process.stdout:
            said += line
            if found := re.search(r"http://127\.0\.0\.1:(\d+)/\S+", line):
                self.address, self.port = found[0], int(found[1])
                return
        pytest.fail(f"the server did not start: {said}")

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.close()

    def close(self):
        self.process.terminate()
        self.process.wait(20)
        self.process.stdout.close()


class Person:
    """Knows garments, and looks only at what the page shows."""

    def __init__(self, page, truth):
        self.page = page
        self.truth = truth
        self.answered = 0

    def name_classes(self):
        self.page.wait_for_selector("#name-classes[open]")
        self.page.fill("#name-classes textarea", "\n".join(CLASSES))
        self.page.click("#name-classes button[type=submit]")
        self.page.wait_for_selector("#name-classes:not([open])", state="attached")
        self.page.wait_for_selector(".tile.cursor")

    def current(self):
        return self.page.locator(".tile.cursor").get_attribute("title").splitlines()[0].split("/")[-1]

    def answer(self):
        """One image, by a key; the page moves on by itself."""
        name = self.current()
        self.page.keyboard.press(str(1 + self.truth[name]) if self.truth[name] < len(CLASSES) else "o")
        self.answered += 1
        return name

    def label(self, count):
        for _ in range(count):
            self.page.wait_for_selector(".tile.cursor:not(.answered)", timeout=60_000)
            self.answer()
            self.page.wait_for_timeout(30)

    def refit(self):
        before = self.state()["round"]
        self.page.wait_for_function("document.querySelector('#job').hidden", timeout=120_000)
        self.page.keyboard.press("r")
        for _ in range(2400):
            state = self.state()
            if state["round"] > before and state["job"] is None:
                break
            self.page.wait_for_timeout(50)
        assert state["error"] is None
        assert state["round"] > before
        self.page.click("#views >> text=Suggested")
        self.page.wait_for_timeout(1500)  # the page asks every second

    def state(self):
        return self.page.evaluate("async () => (await fetch('/api/state')).json()")

    def accuracy(self):
        """Of the classifier on images without an answer: its class, or out-of-class, is right."""
        state = self.state()
        names = {each["id"]: each["name"] for each in state["classes"]}
        right = []
        for item in self.page.evaluate(PREDICTED):
            kind = self.truth[item["name"].split("/")[-1]]
            if item["label"] == -1:
                expected = CLASSES[kind] if kind < len(CLASSES) else None
                right.append(names.get(item["predicted"]) == expected)
        return sum(right) / len(right)


def test_from_zero_labels_to_a_classifier(garments, tmp_path, chromium):
    folder, truth = garments
    server = Server(folder, tmp_path / "out")
    said = []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("console", lambda message: said.append(message.text))
        page.goto(server.address)
        person = Person(page, truth)
        person.name_classes()
        page.uncheck("#auto-refit") if page.locator("#auto-refit").is_checked() else None

        person.label(19)
        name = person.answer()
        page.wait_for_timeout(500)
        before = person.state()["counts"]
        page.keyboard.press("z")  # undone, and answered again
        page.wait_for_timeout(500)
        after = person.state()["counts"]
        assert after["unlabeled"] == before["unlabeled"] + 1
        assert person.current() == name
        person.answer()
        page.wait_for_timeout(500)
        assert person.state()["counts"]["unlabeled"] == IMAGES - 20
        person.refit()
        first = person.accuracy()

        page.reload()
        page.wait_for_selector(".tile.cursor")
        assert person.state()["counts"]["unlabeled"] == IMAGES - 20
        person.label(8)
        page.wait_for_timeout(500)
        assert said == []  # until the server is gone, nothing was wrong

        server.kill()
        page.wait_for_timeout(300)
        person.answer()  # goes on while the server is away: kept in the browser
        page.wait_for_selector("#banner:not([hidden])", timeout=20_000)
        server = Server(folder, tmp_path / "out", server.port)
        page.wait_for_selector("#banner[hidden]", state="attached", timeout=60_000)
        for _ in range(400):
            counts = person.state()["counts"]
            if counts["unlabeled"] == IMAGES - 29 and person.state()["job"] is None:
                break
            page.wait_for_timeout(100)
        assert counts["unlabeled"] == IMAGES - 29  # nothing was lost on either side
        said.clear()  # requests that failed while it was away

        page.click("#views >> text=Suggested")
        page.wait_for_timeout(1500)
        person.label(11)
        page.wait_for_timeout(500)
        person.refit()
        second = person.accuracy()
        state = person.state()
        shots = os.environ.get("ROPAWS_SCREENSHOTS")
        for width, height in ((1280, 900), (390, 844)):
            page.set_viewport_size({"width": width, "height": height})
            page.wait_for_timeout(1500)
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            if shots:
                page.screenshot(path=f"{shots}/explore-{width}.png")
        assert said == []
        browser.close()
    server.close()
    print(f"accuracy {first:.1%} with 20 answers, {second:.1%} with 40")
    assert state["counts"]["unlabeled"] == IMAGES - 40
    assert len(state["panel"]["rounds"]) == 2
    assert second >= LEAST_ACCURACY
    kept = [json.loads(line) for line in (tmp_path / "out/answers.jsonl").read_text().splitlines()]
    assert sum(entry["do"] == "label" for entry in kept) == 41  # forty and the one that was undone

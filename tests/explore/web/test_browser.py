"""The page in a real browser, with a real server: what a person sees and does."""

import dataclasses
import errno
import json
import threading
import time

import numpy as np
import pytest

from ropaws.classify import head
from ropaws.explore import browsing, fitting, outputs, page_state
from ropaws.explore.answer_log import RefusedError
from ropaws.explore.page_state import columns
from ropaws.insight import label_errors
from tests.explore.pools import COUNT, NAMES, OTHERS, label_some, make_pool, truth
from tests.explore.serving import PATIENCE, TOKEN, served

WIDE = {"width": 1280, "height": 900}
DASH = "\N{EN DASH}"
NARROW = {"width": 390, "height": 844}


@pytest.fixture
def server(tmp_path):
    """Classes with two labels each, and no model."""
    with served(make_pool(tmp_path / "pool"), tmp_path / "out") as (client, session):
        label_some(session, per_class=2)
        yield client, session


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """A model of some labels, two of which are wrong, shared by the tests that need one."""
    folder = tmp_path_factory.mktemp("fitted")
    with (
        pytest.MonkeyPatch.context() as patch,
        served(make_pool(folder / "pool"), folder / "out") as (client, session),
    ):
        patch.setattr(label_errors, "GAIN", -np.inf)  # so few errors may be chance
        patch.setattr(label_errors, "ERROR_RATES", (0.3,))
        ids = label_some(session, per_class=6)
        session.label(np.flatnonzero(truth() == OTHERS)[:6].tolist(), -2, why="grid", tab="tab")
        session.label(np.flatnonzero(truth() == 0)[6:8].tolist(), ids[1], why="grid", tab="tab")
        session.add_class("<img src=x onerror=alert(1)> " + "wide" * 15, [], tab="tab")
        client.post("/api/refit")
        while (state := client.state())["round"] == 0:
            assert state["error"] is None
            time.sleep(0.1)
        client.post("/api/cancel")  # the slow estimate of the accuracy is not needed here
        client.wait()
        yield client, session


# Messages go away after some seconds, and make room for each other: all that was said is kept.
HEARD = """
window.heard = [];
new MutationObserver((changes) => {
  for (const change of changes)
    for (const node of change.addedNodes)
      if (node.classList?.contains("message")) window.heard.push(node.firstChild.textContent);
}).observe(document, { childList: true, subtree: true });
"""
DRAWN = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"


class Window:
    """A page of the app, with everything that its console said."""

    def __init__(self, context, client):
        self.page = context.new_page()
        self.page.set_default_timeout(1000 * PATIENCE)
        self.page.add_init_script(HEARD)
        self.said = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.goto(f"{client.origin}/?token={TOKEN}")

    def press(self, *keys):
        for key in keys:
            self.page.keyboard.press(key)
        return self

    def wait(self, condition):
        """Until a line of JavaScript is true; Playwright's own way needs eval, which the policy forbids."""
        wait_until(self, lambda: self.page.evaluate(f"Boolean({condition})"))
        return self

    def hears(self, *parts):
        """Until the page has said something with these parts since the last time that one waited."""

        def holds():
            return any(all(part in text for part in parts) for text in self.page.evaluate("heard"))

        wait_until(self, holds)
        self.page.evaluate("heard.length = 0")
        return self

    def settle(self):
        """Until what was clicked is laid out and drawn."""
        self.page.evaluate(DRAWN)

    def show(self, view):
        self.page.click(f'#views >> text="{view}"')
        self.wait(f"document.querySelector('#grid-title').textContent === {json.dumps(view)}")
        return self.wait("document.querySelector('#grid').ariaBusy !== 'true'")

    def count(self, selector):
        return self.page.locator(selector).count()

    def text(self, selector):
        return self.page.inner_text(selector)

    def question(self):
        """What the page asks, once it asks: a busy browser opens the dialog a moment after the click."""
        self.page.wait_for_selector("#ask[open]")
        return self.text("#ask-text")


@pytest.fixture
def opened(browser):
    """A function that opens the app in a browser of its own, or in a given one."""
    contexts = []

    def open_window(client, context=None, viewport=WIDE, scheme="light"):
        if context is None:
            context = browser.new_context(viewport=viewport, color_scheme=scheme)
            contexts.append(context)
        window = Window(context, client)
        window.page.wait_for_selector(".tile, #grid .empty")
        return window

    yield open_window
    for context in contexts:
        context.close()


def class_ids(session):
    return list(session.answers.classes)


def wait_until(window, holds):
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, (window.said, window.text("body")[:2000])
        window.page.wait_for_timeout(50)


def wait_for_label(window, client, number, code):
    def holds():
        return client.post("/api/images", {"ids": [number]}).json["items"][0]["label"] == code

    wait_until(window, holds)


def shown(window, selector=".tile"):
    """The numbers in the names of the images of the grid."""
    titles = window.page.evaluate(f"[...document.querySelectorAll('{selector}')].map((tile) => tile.title)")
    return [int(title.splitlines()[0].rsplit("-", 1)[1][:3]) for title in titles]


def cursor(window):
    """The image at the cursor."""
    (number,) = shown(window, ".tile.cursor")
    return number


def on_map(window, session):
    """Where each image is in the window, while the map shows all of them."""
    box = window.page.locator("#map-canvas").bounding_box()
    packed, _ = columns(session)
    x, y = (np.frombuffer(packed, "<f4", COUNT, 4 * COUNT * k) for k in (0, 1))
    scale = min((box["width"] - 32) / np.ptp(x), (box["height"] - 32) / np.ptp(y))
    left = box["x"] + box["width"] / 2 + (x - (x.max() + x.min()) / 2) * scale
    top = box["y"] + box["height"] / 2 + (y - (y.max() + y.min()) / 2) * scale
    return left.tolist(), top.tolist()


def point_on_map(window, session, number):
    """Wait until the map has an image under the pointer: a map just shown is fitted a moment later."""

    def is_under_the_pointer():
        left, top = on_map(window, session)
        window.page.mouse.move(left[number] + 30, top[number] + 30)
        window.page.mouse.move(left[number], top[number])
        return window.page.locator("#tooltip img").is_visible()

    window.wait("!document.querySelector('#map-canvas').hidden")
    wait_until(window, is_under_the_pointer)


def click_on_map(window, session, number):
    point_on_map(window, session, number)
    window.page.mouse.down()
    window.page.mouse.up()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [WIDE, NARROW], ids=["1280", "390"])
def test_no_message_in_the_console_and_nothing_wider_than_the_window(fitted, opened, viewport, scheme):
    window = opened(fitted[0], viewport=viewport, scheme=scheme)
    tabs = ("images", "map", "classes", "panel") if viewport is NARROW else ("images",)
    for tab in tabs:
        if viewport is NARROW:
            window.page.click(f"#tabs [data-tab={tab}]")
        window.settle()
        assert window.page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
    for key in ("v", "Escape", "c", "Escape", "?", "Escape"):
        window.press(key)
        window.settle()
        assert window.page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
    assert window.said == []
    assert window.count("img[src=x]") == 0  # the name of a class is text


def test_keys_label_the_image_at_the_cursor_and_move_on(server, opened):
    client, session = server
    ids = class_ids(session)
    window = opened(client).show("Unlabeled")
    first = cursor(window)
    window.press("2")
    wait_for_label(window, client, first, ids[1])
    second = cursor(window)
    assert second != first
    window.press("o")
    wait_for_label(window, client, second, -2)
    third = cursor(window)
    window.press("s")
    wait_for_label(window, client, third, -3)
    window.press("z")
    wait_for_label(window, client, third, -1)
    wait_until(window, lambda: cursor(window) == third)
    assert window.said == []


def test_a_key_held_down_labels_one_image(server, opened):
    client, _ = server
    before = client.state()["counts"]["labeled"]
    window = opened(client)
    window.page.keyboard.down("1")
    window.page.keyboard.down("1")  # the second is a repeat
    window.page.keyboard.down("1")
    window.page.keyboard.up("1")
    window.wait("document.querySelector('.tile.answered')")
    window.page.wait_for_timeout(300)
    assert client.state()["counts"]["labeled"] == before + 1


def test_at_the_end_of_a_list_a_key_does_not_hit_the_last_image_again(server, opened):
    client, session = server
    ids = class_ids(session)
    window = opened(client).show("Labeled")
    names = shown(window)
    window.page.locator(".tile").last.click()
    window.press("o")
    wait_for_label(window, client, names[-1], -2)
    window.wait("document.querySelector('#grid').ariaBusy !== 'true'")
    window.press("1")
    window.hears("No image to label")
    window.press("ArrowLeft", "3")  # on purpose, it can still be changed
    wait_for_label(window, client, names[-2], ids[2])
    assert session.codes[names[-1]] == -2


def test_keys_do_nothing_while_typing(server, opened):
    client, _ = server
    before = client.state()["revision"]
    window = opened(client).press("/")
    window.page.keyboard.type("1os")
    window.wait("document.querySelector('#grid-title').textContent.includes('1os')")
    assert client.state()["revision"] == before


def test_a_range_is_selected_and_labeled_at_once(server, opened):
    client, session = server
    ids = class_ids(session)
    window = opened(client)
    window.show("All images")
    tiles = window.page.locator(".tile")
    tiles.nth(10).click()
    tiles.nth(14).click(modifiers=["Shift"])
    tiles.nth(12).click(modifiers=["Control"])
    window.wait("document.querySelector('#target').textContent === 'Label 4 selected images:'")
    window.press("3")
    for number in (10, 11, 13, 14):
        wait_for_label(window, client, number, ids[2])
    assert session.codes[12] == -1
    assert window.text("#target") == "Label the current image:"


def test_pages_turn_and_only_one_is_loaded(server, opened):
    window = opened(server[0]).show("All images")
    assert window.text("#page-where") == f"1{DASH}60 of 120"
    window.press("PageDown")
    window.wait(f"document.querySelector('#page-where').textContent === '61{DASH}120 of 120'")
    assert window.count(".tile") == 60


def test_without_classes_the_page_asks_for_them(tmp_path, opened):
    with served(make_pool(tmp_path / "pool"), tmp_path / "out") as (client, _):
        window = opened(client)
        window.page.wait_for_selector("#name-classes[open]")
        window.page.fill("#name-text", "circle\n\n square \ncircle")
        window.page.click("#name-classes >> text=Create")
        window.wait("document.querySelectorAll('#class-list button.class').length === 2")
        assert [info["name"] for info in client.state()["classes"]] == ["circle", "square"]
        assert window.said == []


def test_a_new_class_is_made_while_labeling_then_renamed_and_merged(server, opened):
    client, _ = server
    window = opened(client)
    number = cursor(window)
    window.press("c")
    window.page.keyboard.type("<b>moon</b>")
    window.press("Enter")
    window.wait("document.querySelectorAll('#class-list button.class').length === 4")
    new = client.state()["classes"][3]
    assert new["name"] == "<b>moon</b>"
    wait_for_label(window, client, number, new["id"])
    assert window.count("#class-list b") == 0
    window.page.click("#class-list li:last-child >> text=Edit")
    window.page.fill("#edit-name", "moon")
    window.page.click("#edit-class >> text=Rename")
    window.wait("document.querySelector('#class-list li:last-child .name').textContent === 'moon'")
    window.page.click("#class-list li:last-child >> text=Edit")
    window.page.select_option("#edit-into", label=NAMES[0])
    window.page.click("#edit-merge")
    assert window.question() == f"Merge moon into {NAMES[0]}, with its 1 label?"
    window.page.click("#ask >> text=Cancel")
    assert len(client.state()["classes"]) == 4
    window.page.click("#class-list li:last-child >> text=Edit")
    window.page.select_option("#edit-into", label=NAMES[0])
    window.page.click("#edit-merge")
    window.page.click("#ask-ok")
    window.wait("document.querySelectorAll('#class-list button.class').length === 3")
    wait_for_label(window, client, number, client.state()["classes"][0]["id"])


def test_a_suspected_error_is_confirmed_or_corrected_by_one_key(fitted, opened):
    client, session = fitted
    wrong = session.suspects()
    assert wrong
    label = int(session.codes[wrong[0]])
    assert label != class_ids(session)[truth()[wrong[0]]]
    window = opened(client).show("Suspected label errors")
    assert cursor(window) == wrong[0]
    window.press("y")
    wait_until(window, lambda: session.suspects() == wrong[1:])
    assert session.codes[wrong[0]] == label
    window.press("z")
    wait_until(window, lambda: session.suspects() == wrong)
    window.show("All images").show("Suspected label errors")
    window.press("Enter")
    wait_for_label(window, client, wrong[0], class_ids(session)[truth()[wrong[0]]])
    window.press("z")  # others share the session
    wait_for_label(window, client, wrong[0], label)


def test_answers_wait_while_the_server_is_away_and_survive_the_tab(server, opened):
    client, session = server
    ids = class_ids(session)
    window = opened(client)
    context = window.page.context
    first = cursor(window)
    context.set_offline(True)
    window.press("1")
    window.wait("document.querySelector('#banner').textContent.startsWith('Connection lost')")
    second = cursor(window)
    window.press("2")
    ours = "Object.entries(localStorage).filter(([key]) => key.startsWith('ropaws-outbox'))"
    kept = f"{ours}.map(([, text]) => text)"
    assert [a["label"] for a in json.loads(window.page.evaluate(kept)[0])] == ids[:2]
    window.page.close()
    context.set_offline(False)
    assert session.codes[first] == -1
    window = opened(client, context)
    wait_for_label(window, client, first, ids[0])
    wait_for_label(window, client, second, ids[1])
    window.wait(f"({kept}).length === 0")


# The next answer stays on its way until the page is told that it was lost; later requests go through.
HOLD_ANSWERS = """() => {
    const send = window.fetch;
    window.fetch = (path, options) => {
        if (path !== "/api/labels") return send(path, options);
        window.fetch = send;
        return new Promise((_, fail) => (window.loseAnswer = () => fail(new TypeError("lost"))));
    };
}"""


def test_undo_takes_back_an_answer_that_fails_on_its_way(server, opened):
    client, session = server
    window = opened(client)
    number = cursor(window)
    window.page.evaluate(HOLD_ANSWERS)
    window.press("1")
    window.wait("window.loseAnswer")
    window.press("z")  # while it is on its way
    window.page.evaluate("window.loseAnswer()")
    wait_until(window, lambda: cursor(window) == number)
    window.wait("document.querySelector('#banner').hidden")
    assert session.codes[number] == -1


def test_the_last_answer_of_a_list_is_undone_and_given_again(server, opened, monkeypatch):
    """By one key, as soon as the image is back, however late the server's answers come."""
    client, session = server
    window = opened(client)
    browse, packed = browsing.browse, page_state.columns
    rest = len(session.suggested())
    for left in range(rest - 1, -1, -1):
        number = cursor(window)
        if left == 0:
            monkeypatch.setattr(browsing, "browse", lambda *args: time.sleep(0.3) or browse(*args))
            monkeypatch.setattr(page_state, "columns", lambda of: time.sleep(0.3) or packed(of))
        window.press("1")
        wait_until(window, lambda left=left: len(session.suggested()) == left)
    window.press("z")
    wait_until(window, lambda: session.codes[number] == -1)
    window.wait("document.querySelector('#grid').ariaBusy !== 'true' && document.querySelector('.cursor')")
    assert cursor(window) == number
    window.press("2")
    wait_for_label(window, client, number, class_ids(session)[1])


def test_a_new_round_brings_new_suggestions_but_keeps_the_image_at_the_cursor(server, opened):
    """Someone may be about to press a key for it."""
    client, session = server
    window = opened(client)
    window.press("ArrowRight", "ArrowRight")
    before, at_cursor = shown(window), cursor(window)
    session._publish(dataclasses.replace(session.fitted, suggestions=session.fitted.suggestions[::-1]))
    wait_until(window, lambda: shown(window) != before)
    assert cursor(window) == at_cursor
    after = shown(window)
    assert after[:3] == before[:3]
    assert after[3:] == [number for number in before[::-1] if number not in before[:3]]


def test_a_new_round_takes_the_notes_of_the_one_before_away(server, opened):
    """The image at the cursor shows what the new model says of it, or nothing."""
    client, session = server
    window = opened(client)
    notes = "[...document.querySelectorAll('.tile .note')].map((note) => note.textContent)"
    first, second, *rest = session.fitted.suggestions
    window.press("ArrowRight")
    assert cursor(window) == second.position
    changed = [second._replace(stands_for=777), *rest]
    session._publish(dataclasses.replace(session.fitted, suggestions=changed))
    window.wait(f"({notes}).includes('stands for 777 images')")
    assert shown(window)[:2] == [first.position, second.position]
    assert window.count("#tile-0 .note") == 0
    assert window.text("#tile-1 .note") == "stands for 777 images"


def test_a_refused_answer_is_taken_back_and_said(server, opened, monkeypatch):
    client, session = server
    window = opened(client)

    def refuse(*_, **__):
        raise RefusedError("refused for a test")

    monkeypatch.setattr(session, "label", refuse)
    window.press("1")
    window.hears("Not saved: 1 image labeled circle: refused for a test")
    assert window.count(".tile.answered .badge:not([hidden])") == 0


def test_two_tabs_see_each_others_labels(server, opened):
    client, session = server
    ids = class_ids(session)
    one = opened(client)
    two = opened(client, one.page.context)
    number = cursor(one)
    assert cursor(two) == number
    one.press("1")
    wait_for_label(one, client, number, ids[0])
    two.wait("document.querySelector('#tile-0 .badge:not([hidden])')")
    two.page.locator(".tile").nth(1).click()
    second = cursor(two)
    two.press("2")
    wait_for_label(two, client, second, ids[1])
    one.press("z")  # of this tab, not of the other
    wait_for_label(one, client, number, -1)
    assert session.codes[second] == ids[1]


def test_the_map_shows_an_image_under_the_pointer_and_the_lasso_selects(fitted, opened):
    client, session = fitted
    window = opened(client)
    point_on_map(window, session, 5)
    box = window.page.locator("#map-canvas").bounding_box()
    left = np.array(on_map(window, session)[0])
    window.wait("document.querySelector('#tooltip strong').textContent.startsWith('image-')")
    middle, spread = (left.min() + left.max()) / 2, 3
    inside = np.flatnonzero(left < middle)
    window.page.click("#lasso")
    corners = [
        (box["x"] + spread, box["y"] + spread),
        (middle, box["y"] + spread),
        (middle, box["y"] + box["height"] - spread),
        (box["x"] + spread, box["y"] + box["height"] - spread),
    ]
    window.page.mouse.move(*map(float, corners[0]))
    window.page.mouse.down()
    for corner in corners[1:]:
        window.page.mouse.move(*map(float, corner), steps=4)
    window.page.mouse.up()
    window.wait("document.querySelector('#grid-title').textContent.startsWith('Selection of')")
    assert window.text("#target") == f"Label {len(inside)} selected images:"
    assert window.said == []


def test_the_map_draws_what_the_colors_say(fitted, opened):
    client, _ = fitted
    window = opened(client)
    window.wait("!document.querySelector('#map-canvas').hidden")
    drawn = """() => {
      const canvas = document.querySelector("#map-canvas");
      const bytes = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
      const seen = new Set();
      for (let k = 0; k < bytes.length; k += 4) {
        if (bytes[k + 3] === 255) seen.add([...bytes.slice(k, k + 3)].join());
      }
      return [...seen];
    }"""
    legend = """() => [...document.querySelectorAll("#map-legend .dot")].map(
      (dot) => getComputedStyle(dot).backgroundColor.match(/\\d+/g).join())"""
    circle, square, star, _, out_of_class, _ = window.page.evaluate(legend)
    wait_until(window, lambda: {circle, square, star, out_of_class} <= set(window.page.evaluate(drawn)))
    window.page.select_option("#map-color", "suspected")
    wait_until(window, lambda: not {circle, square, star} & set(window.page.evaluate(drawn)))


def test_contours_are_drawn_and_taken_away_by_a_key(fitted, opened):
    """In the color of letters, which no point of a light map has."""
    client, _ = fitted
    window = opened(client)
    window.wait("!document.querySelector('#map-canvas').hidden")
    black = """() => {
      const canvas = document.querySelector("#map-canvas");
      const bytes = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
      let count = 0;
      for (let k = 0; k < bytes.length; k += 4)
        count += bytes[k] + bytes[k + 1] + bytes[k + 2] < 30 && bytes[k + 3] > 200;
      return count;
    }"""
    pressed = "document.querySelector('#contours').ariaPressed === "
    window.wait(pressed + "'false'")  # of few images single ones can be seen
    window.settle()
    without = window.page.evaluate(black)
    window.press("d").wait(pressed + "'true'")
    wait_until(window, lambda: window.page.evaluate(black) > without + 300)
    window.page.click("#contours")
    window.wait(pressed + "'false'")
    wait_until(window, lambda: window.page.evaluate(black) < without + 30)
    window.press("d")
    for _ in range(4):
        window.page.click("#zoom-in")  # between single images there is nothing to say
    wait_until(window, lambda: window.page.evaluate(black) < without + 100)
    assert [line for line in window.said if "getImageData" not in line] == []


def test_read_only_shows_and_changes_nothing(tmp_path, opened):
    with served(make_pool(tmp_path / "pool"), tmp_path / "out") as (client, session):
        label_some(session)
    with served(make_pool(tmp_path / "pool"), tmp_path / "out", read_only=True) as (client, session):
        before = session.codes.tolist()
        window = opened(client).show("All images")
        window.press("1", "o", "s", "z", "y", "c", "r")
        window.page.wait_for_timeout(500)
        assert not window.page.is_visible("#label-bar")
        assert not window.page.is_visible("#refit")
        assert window.said == []
        assert session.codes.tolist() == before


def test_the_image_opens_and_labeling_goes_from_one_to_the_next(fitted, opened):
    client, session = fitted
    ids = class_ids(session)
    window = opened(client)
    first = cursor(window)
    window.press("Enter")
    window.page.wait_for_selector("#detail[open] meter")
    assert window.count("#detail .near") > 0
    name = window.text("#detail-name")
    window.press("1")
    wait_for_label(window, client, first, ids[0])
    window.wait(f"document.querySelector('#detail-name').textContent !== {json.dumps(name)}")
    window.press("Escape")
    window.page.wait_for_selector("#detail", state="hidden")
    assert window.said == []


def test_the_page_says_stale_until_an_undo_during_a_refit_is_fitted(server, opened, monkeypatch):
    """Many images are marked, a refit starts by itself, and the marks are taken back while it runs."""
    client, session = server
    session.auto_refit = True
    given, may_end = [], [threading.Event(), threading.Event()]
    real = fitting.fit_round

    def slow(points, answered, report):
        given.append(int((answered.labels == -2).sum()))
        assert may_end[len(given) - 1].wait(PATIENCE)
        return real(points, answered, report)

    monkeypatch.setattr(head, "STEPS", 15)
    monkeypatch.setattr(fitting, "fit_round", slow)
    window = opened(client).show("Unlabeled").press("a", "o")
    wait_until(window, lambda: given)
    window.press("z")
    wait_until(window, lambda: client.state()["counts"]["out_of_class"] == 0)
    may_end[0].set()
    window.wait("document.querySelector('#model-state').textContent.startsWith('Round 1, stale: 60 images')")
    may_end[1].set()
    window.wait("document.querySelector('#model-state').textContent === 'Round 2.'")
    assert given == [60, 0]
    client.wait()
    client.post("/api/export", {"kind": "predictions"})
    window.wait("document.querySelector('#outputs').textContent.includes('predictions.csv, from round 2')")
    assert session.answers.exports["predictions.csv"]["labels"] == session.digest()
    assert session.answers.exports["predictions.csv"]["made_from"] == session.digest()
    assert window.said == []


# The page at the size of a screen

SCREEN = {"width": 1280, "height": 800}
SIZES = pytest.mark.parametrize("viewport", [SCREEN, NARROW], ids=["1280", "390"])
SCROLLED = """() => [...document.querySelectorAll("*")].filter((node) => {
  const { overflowX, overflowY } = getComputedStyle(node);
  const isTall = node.scrollHeight > node.clientHeight + 1 && /auto|scroll/.test(overflowY);
  const isWide = node.scrollWidth > node.clientWidth + 1 && /auto|scroll/.test(overflowX);
  return node.clientHeight > 0 && (isTall || isWide);
}).map((node) => node.id || node.tagName)"""
CUT = """(selector) => [...document.querySelectorAll(selector)].filter((node) => node.clientWidth > 0 &&
  (node.scrollWidth > node.clientWidth + 1 || node.scrollHeight > node.clientHeight + 2)
).map((node) => node.textContent)"""


def tabs_of(window, viewport):
    """Show each part of the page in turn."""
    group, names = ("layout", ("both", "map", "images"))
    if viewport is NARROW:
        group, names = ("tab", ("images", "map", "classes", "panel"))
    for name in names:
        window.page.click(f"button[data-{group}={name}]")
        window.settle()
        yield name


@SIZES
def test_the_page_is_as_high_as_the_window(fitted, opened, viewport):
    window = opened(fitted[0], viewport=viewport)
    if viewport is NARROW:
        window.page.click("#show-filters")
    window.show("All images")
    if viewport is NARROW:
        window.page.click("#show-filters")
    assert window.count(".tile") == 60
    for part in tabs_of(window, viewport):
        assert window.page.evaluate("document.documentElement.scrollHeight") == viewport["height"], part
        assert set(window.page.evaluate(SCROLLED)) <= {"grid", "ASIDE", "panel", "classes", "label-bar"}, part


@SIZES
def test_nothing_is_cut_that_a_person_needs(fitted, opened, viewport):
    """Notes, shares and buttons, with a class name as long as they come."""
    client, session = fitted
    window = opened(client, viewport=viewport)
    window.wait("document.querySelector('.tile .note')")
    assert window.page.evaluate(CUT, "button, .note, #page-where, #grid-title") == []
    shares = "[...document.querySelectorAll('.guess:not([hidden]) :last-child')]"
    assert window.page.evaluate(f"{shares}.every((share) => share.textContent.endsWith('%'))")
    assert window.count(".guess:not([hidden])") > 10
    inside = "share.getBoundingClientRect().right <= share.closest('.tile').getBoundingClientRect().right"
    assert window.page.evaluate(f"{shares}.every((share) => {inside})")
    session.rename_class(class_ids(session)[0], "a rather long class name", tab="tab")
    window.wait("document.querySelector('.guess').textContent.includes('a rather long')")
    assert window.page.evaluate(f"{shares}.every((share) => {inside})")
    session.undo("tab")


@SIZES
def test_the_name_of_a_prediction_is_whole(fitted, opened, viewport):
    window = opened(fitted[0], viewport=viewport)
    if viewport is NARROW:
        window.page.click("#show-filters")
    window.show("Out-of-class")
    if viewport is NARROW:
        window.page.click("#show-filters")
    assert window.count(".guess:not([hidden]) .name") > 10
    assert window.page.evaluate(CUT, ".guess .name") == []


# Never label what is not seen


def show_map_alone(window, viewport):
    window.page.click("#tabs [data-tab=map]" if viewport is NARROW else "#layouts [data-layout=map]")
    window.wait("document.querySelector('#target').textContent === 'Select images on the map to label them.'")


@SIZES
def test_beside_the_map_alone_no_key_labels_an_image_that_is_not_shown(server, opened, viewport):
    client, _ = server
    window = opened(client, viewport=viewport)
    before = client.state()["revision"]
    show_map_alone(window, viewport)
    assert not window.page.is_visible("#label-buttons")
    window.press("1", "o", "s", "y", "Backspace", "c")
    window.hears("No image to label")
    assert window.count("#picker[open]") == 0
    window.page.wait_for_timeout(300)
    assert client.state()["revision"] == before
    assert window.said == []


@SIZES
def test_what_is_selected_on_the_map_alone_is_shown_and_labeled(server, opened, viewport):
    client, session = server
    window = opened(client, viewport=viewport)
    show_map_alone(window, viewport)
    click_on_map(window, session, 5)
    window.wait("document.querySelectorAll('#target-images img').length === 1")
    assert window.text("#target") == "Label 1 selected image:"
    number = int(window.page.get_attribute("#target-images img", "src").split("/")[3])
    assert window.page.evaluate("document.documentElement.scrollHeight") == viewport["height"]
    window.press("2")
    wait_for_label(window, client, number, class_ids(session)[1])


@SIZES
def test_beside_many_selected_images_the_buttons_stay_in_sight(server, opened, viewport):
    window = opened(server[0], viewport=viewport).press("a")
    window.page.click("#tabs [data-tab=map]" if viewport is NARROW else "#layouts [data-layout=map]")
    window.wait("document.querySelectorAll('#target-images img').length === 12")
    bottom = "node => node.getBoundingClientRect().bottom"
    lowest = window.page.locator("#label-buttons").evaluate(bottom)
    assert lowest <= window.page.locator("#label-bar").evaluate(bottom) <= viewport["height"]


def test_on_a_tab_without_images_no_key_labels(server, opened):
    client, _ = server
    window = opened(client, viewport=NARROW)
    before = client.state()["revision"]
    window.page.locator(".tile").nth(1).click()  # even what is selected
    for tab in ("classes", "panel"):
        window.page.click(f"#tabs [data-tab={tab}]")
        window.press("1", "o")
    window.page.wait_for_timeout(300)
    assert client.state()["revision"] == before


def test_an_image_that_is_scrolled_away_is_shown_before_it_is_labeled(server, opened):
    client, session = server
    window = opened(client, viewport=SCREEN).show("Unlabeled")
    number = cursor(window)
    before = client.state()["revision"]
    window.page.evaluate("document.querySelector('#grid').scrollTop = 900")
    window.press("1")
    window.hears("The current image was out of")
    assert client.state()["revision"] == before
    window.press("1")
    wait_for_label(window, client, number, class_ids(session)[0])


# Keys after a click, a search, a lasso


def test_enter_and_escape_leave_the_search_box(server, opened):
    client, session = server
    window = opened(client).show("All images").press("/")
    window.page.keyboard.type("image-08")
    window.press("Enter")
    window.wait("document.querySelectorAll('.tile').length === 10")
    assert window.page.evaluate("document.activeElement.id") != "filter-text"
    window.press("1")
    wait_for_label(window, client, 80, class_ids(session)[0])
    window.press("/")
    window.page.keyboard.type("4")
    window.press("Escape")
    window.wait("document.querySelectorAll('.tile').length === 60")
    assert window.page.evaluate("document.activeElement.id") != "filter-text"
    assert window.page.input_value("#filter-text") == ""


def test_enter_takes_the_suggestion_after_the_open_view_was_clicked_again(fitted, opened):
    client, session = fitted
    window = opened(client).show("Suspected label errors").show("Suspected label errors")
    number = cursor(window)
    before = int(session.codes[number])
    window.press("Enter")
    wait_until(window, lambda: int(session.codes[number]) != before)
    window.press("z")
    wait_for_label(window, client, number, before)


def test_after_a_lasso_the_first_image_is_shown_and_after_its_label_the_grid_stays(server, opened):
    client, session = server
    window = opened(client, viewport=SCREEN).show("All images")
    point_on_map(window, session, 5)
    window.page.evaluate("document.querySelector('#grid').scrollTop = 400")
    window.page.focus("#map-canvas")
    box = window.page.locator("#map-canvas").bounding_box()
    left, right = box["x"] + 2, box["x"] + box["width"] - 2
    top, low = box["y"] + 2, box["y"] + box["height"] - 2
    window.page.keyboard.down("Shift")
    window.page.mouse.move(left, top)
    window.page.mouse.down()
    for corner in ((right, top), (right, low), (left, low)):
        window.page.mouse.move(*corner, steps=4)
    window.page.mouse.up()
    window.page.keyboard.up("Shift")
    window.wait("document.querySelector('#grid-title').textContent === 'Selection of 120 images'")
    window.wait("document.querySelector('#grid').scrollTop === 0")
    assert shown(window)[0] == cursor(window) == 0
    window.page.evaluate("document.querySelector('#grid').scrollTop = 300")
    window.press("o")
    wait_until(window, lambda: client.state()["counts"]["out_of_class"] == COUNT)
    window.page.wait_for_timeout(300)
    assert window.text("#page-where") == f"1{DASH}60 of 120"
    assert window.page.evaluate("document.querySelector('#grid').scrollTop") == 300
    window.press("1")  # no image is hit by another key
    window.hears("No image to label")
    assert client.state()["counts"]["out_of_class"] == COUNT


def test_a_table_is_written_during_a_refit_and_goes_stale(server, opened, monkeypatch):
    client, session = server
    monkeypatch.setattr(head, "STEPS", 15)
    client.post("/api/refit")
    client.wait()
    may_end, real = threading.Event(), fitting.fit_round

    def slow(points, answered, report):
        assert may_end.wait(PATIENCE)
        return real(points, answered, report)

    monkeypatch.setattr(fitting, "fit_round", slow)
    session.label([40], -2, why="grid", tab="tab")
    client.post("/api/refit")
    window = opened(client)
    window.wait("document.querySelector('#job-text').textContent === 'refitting'")
    window.page.click("#outputs >> text=Predictions")
    text = "predictions.csv, from round 1, without 1 newer answer"
    window.wait(f"document.querySelector('#outputs').textContent.includes('{text}')")
    window.hears(f"Written: {text}")
    assert "stale" not in window.text("#outputs")
    may_end.set()
    window.wait("document.querySelector('#model-state').textContent === 'Round 2.'")
    window.wait(f"document.querySelector('#outputs').textContent.includes('{text} (stale)')")
    assert window.said == []


def test_a_full_disk_is_said_each_time_and_not_when_there_is_space(server, opened, monkeypatch):
    client, _ = server
    real = outputs.write_labels

    def full(path, *_):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(outputs, "write_labels", full)
    window = opened(client)
    for _ in range(2):
        window.page.click("#outputs >> text=Predictions")
        window.hears("No space left on device", "predictions.csv")
        window.page.evaluate("document.querySelector('#alerts button')?.click()")  # may be gone by itself
    monkeypatch.setattr(outputs, "write_labels", real)
    window.page.click("#outputs >> text=Predictions")
    window.hears("Written: predictions.csv")
    window.page.wait_for_timeout(1500)
    assert window.text("#alerts") == ""


@SIZES
def test_a_class_is_deleted_after_a_question_and_undone(server, opened, viewport):
    client, session = server
    window = opened(client, viewport=viewport)
    if viewport is NARROW:
        window.page.click("#tabs [data-tab=classes]")
    window.page.click("#class-list li:last-child >> text=Edit")
    window.page.click("#edit-class >> text=Delete the class")
    assert window.question() == "Delete star? Its 2 images will be unlabeled."
    assert window.page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
    window.page.click("#ask >> text=Cancel")
    assert len(client.state()["classes"]) == 3
    window.page.click("#class-list li:last-child >> text=Edit")
    window.page.click("#edit-class >> text=Delete the class")
    window.page.click("#ask-ok")
    window.wait("document.querySelectorAll('#class-list button.class').length === 2")
    assert client.state()["counts"]["labeled"] == 4
    window.press("z")
    window.wait("document.querySelectorAll('#class-list button.class').length === 3")
    assert (session.codes == class_ids(session)[2]).sum() == 2
    assert window.said == []


@SIZES
def test_an_audit_can_be_blind_and_says_what_it_found(fitted, opened, viewport):
    client, session = fitted
    session.start_audit(3, tab="tab")
    sample = session.open_audit()
    window = opened(client, viewport=viewport)
    if viewport is NARROW:
        window.page.click("#tabs [data-tab=panel]")
    window.page.check("#audit input[type=checkbox]")
    window.page.click("#audit >> text=Continue the audit")
    if viewport is NARROW:
        window.page.click("#tabs [data-tab=images]")
    wait_until(window, lambda: shown(window) == sample)
    assert window.count(".guess:not([hidden])") == 0
    window.press("v")
    window.page.wait_for_selector("#detail[open] .chip")
    assert window.count("#detail meter") == window.count("#detail .near") == 0
    window.press("Escape")
    for number in sample:
        window.press("o")
        wait_for_label(window, client, number, -2)
    right = sum(int(session.predicted[number]) == -2 for number in sample)
    found = f"The audit of 3 images is done: {right} of 3 predictions were right."
    window.wait(f"document.querySelector('#grid').textContent === '{found}'")
    window.wait(f"document.querySelector('#audit').textContent.includes('{found}')")
    assert window.said == []


@SIZES
def test_more_like_this_from_the_grid_and_from_the_open_image(server, opened, viewport):
    client, _ = server
    window = opened(client, viewport=viewport)
    window.press("ArrowRight")
    number = cursor(window)
    window.press("m")
    window.wait(f"document.querySelector('#grid-title').textContent === 'More like image-{number:03}.png'")
    window.wait("document.querySelector('#grid').ariaBusy !== 'true'")
    assert cursor(window) == number
    second = shown(window)[1]
    assert truth()[second] == truth()[number]
    window.press("ArrowRight", "v")
    window.page.click("#detail >> text=More like this")
    window.wait(f"document.querySelector('#grid-title').textContent === 'More like image-{second:03}.png'")
    assert not window.page.is_visible("#detail")
    assert window.said == []


@SIZES
def test_the_size_of_the_images_is_chosen_and_kept(server, opened, viewport):
    client, _ = server
    window = opened(client, viewport=viewport)
    if viewport is NARROW:
        window.page.click("#show-filters")
    heights = []
    for size in ("small", "medium", "large"):
        window.page.select_option("#tile-size", size)
        heights.append(window.page.locator(".thumb").first.bounding_box()["height"])
        assert window.page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
    assert heights == sorted(set(heights))
    again = opened(client, window.page.context)
    assert again.page.locator(".thumb").first.bounding_box()["height"] == heights[-1]
    assert window.said == again.said == []


def test_on_a_phone_the_open_image_can_be_labeled_without_scrolling(fitted, opened):
    window = opened(fitted[0], viewport=NARROW).press("v")
    window.page.wait_for_selector("#detail[open] .near")
    buttons = window.page.locator("#detail-labels").bounding_box()
    assert buttons["y"] + buttons["height"] <= NARROW["height"]
    image = window.page.locator("#detail-image").bounding_box()
    assert image["y"] + image["height"] <= buttons["y"]


def test_on_a_phone_open_filters_cover_no_button(server, opened):
    window = opened(server[0], viewport=NARROW)
    window.page.click("#show-filters")
    hit = """(id) => {
      const box = document.getElementById(id).getBoundingClientRect();
      const middle = [(box.left + box.right) / 2, (box.top + box.bottom) / 2];
      return document.elementFromPoint(...middle)?.id === id;
    }"""
    for button in ("show-filters", "tile-size", "open-current", "select-page", "page-after"):
        assert window.page.evaluate(hit, button), button
    assert window.page.evaluate("document.documentElement.scrollHeight") == NARROW["height"]
    assert not window.page.is_visible("#label-bar")


# Likely new classes, and how frequent the classes are


@SIZES
def test_a_button_makes_a_class_of_the_typical_images_of_a_group(tmp_path, opened, viewport):
    with served(make_pool(tmp_path / "pool"), tmp_path / "out") as (client, session):
        ids = label_some(session, per_class=4)
        session.label(np.flatnonzero(truth() == 0)[4:12].tolist(), ids[0], why="grid", tab="tab")
        session.label(np.flatnonzero(truth() == OTHERS)[:4].tolist(), -2, why="grid", tab="tab")
        client.post("/api/refit")
        client.wait(240)
        first = browsing.new_class_list(session)[0]
        window = opened(client, viewport=viewport)
        if viewport == NARROW:
            window.page.click("#show-filters")
        window.show("New classes")
        if viewport == NARROW and window.page.is_visible("#filters"):
            window.page.click("#show-filters")
        window.page.wait_for_selector(".cluster")
        assert window.count(".cluster-class") == 0  # a group is chosen first
        window.page.click(".cluster >> nth=0")
        window.page.wait_for_selector(".cluster-class")
        count = len(first["typical"])
        assert window.text(".cluster-class") == f"New class of the {count} most typical images…"
        window.page.click(".cluster-class")
        assert window.text("#picker-title") == f"Label {count} images as"
        window.page.fill("#picker-text", "moon")
        window.press("Enter")
        wait_until(window, lambda: "moon" in session.answers.classes.values())
        number = next(key for key, name in session.answers.classes.items() if name == "moon")
        wait_until(window, lambda: (session.codes == number).sum() == count)
        assert set(np.flatnonzero(session.codes == number).tolist()) == set(first["typical"])
        assert window.said == []


@SIZES
def test_the_panel_has_a_bar_for_the_frequency_of_each_class(tmp_path, opened, viewport):
    with served(make_pool(tmp_path / "pool"), tmp_path / "out") as (client, session):
        ids = label_some(session, per_class=3)
        session.label(np.flatnonzero(truth() == 0)[3:14].tolist(), ids[0], why="grid", tab="tab")
        session.rename_class(ids[1], "a name that is wide " * 4, tab="tab")
        client.post("/api/refit")
        client.wait(240)
        window = opened(client, viewport=viewport)
        found = client.state()["panel"]["frequencies"]
        if viewport is NARROW:
            window.page.click("#tabs [data-tab=panel]")
        bars = window.page.locator(".frequencies li")
        bars.first.scroll_into_view_if_needed()
        assert bars.count() == len(found) == len(NAMES)
        for bar, each in zip(bars.all(), found, strict=True):
            low, high = round(100 * each["low"]), round(100 * each["high"])
            assert f"({low} to {high}%)" in bar.inner_text()
            box, row = bar.locator(".bar").bounding_box(), bar.bounding_box()
            assert box["width"] >= 60
            assert box["x"] + box["width"] <= row["x"] + row["width"]
        assert window.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert window.said == []

"""The page in a real browser, with a real server: what a person sees and does."""

import dataclasses
import json
import os
import time

import numpy as np
import pytest

from ropaws.explore.answer_log import RefusedError
from tests.conftest import REQUIRE_BROWSER
from tests.explore.pools import COUNT, NAMES, OTHERS, label_some, make_pool, truth
from tests.explore.serving import TOKEN, served

if os.environ.get(REQUIRE_BROWSER):
    import playwright.sync_api as playwright
else:
    playwright = pytest.importorskip("playwright.sync_api")

WIDE = {"width": 1280, "height": 900}
DASH = "\N{EN DASH}"
NARROW = {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def browser(chromium):
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield started
        started.close()


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
    with served(make_pool(folder / "pool"), folder / "out") as (client, session):
        ids = label_some(session, per_class=6)
        session.label(np.flatnonzero(truth() == OTHERS)[:6].tolist(), -2, why="grid", tab="tab")
        session.label(np.flatnonzero(truth() == 0)[6:8].tolist(), ids[1], why="grid", tab="tab")
        session.add_class("<img src=x onerror=alert(1)> " + "wide" * 15, [], tab="tab")
        client.post("/api/refit")
        while client.state()["round"] == 0:
            time.sleep(0.1)
        client.post("/api/cancel")  # the slow estimate of the accuracy is not needed here
        client.wait(240)
        yield client, session


class Window:
    """A page of the app, with everything that its console said."""

    def __init__(self, context, client):
        self.page = context.new_page()
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

    def show(self, view):
        self.page.click(f'#views >> text="{view}"')
        self.wait(f"document.querySelector('#grid-title').textContent === {json.dumps(view)}")
        return self.wait("document.querySelector('#grid').ariaBusy !== 'true'")

    def count(self, selector):
        return self.page.locator(selector).count()

    def text(self, selector):
        return self.page.inner_text(selector)


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
    end = time.monotonic() + 30
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


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [WIDE, NARROW], ids=["1280", "390"])
def test_no_message_in_the_console_and_nothing_wider_than_the_window(fitted, opened, viewport, scheme):
    window = opened(fitted[0], viewport=viewport, scheme=scheme)
    tabs = ("images", "map", "classes", "panel") if viewport is NARROW else ("images",)
    for tab in tabs:
        if viewport is NARROW:
            window.page.click(f"#tabs [data-tab={tab}]")
        window.page.wait_for_timeout(300)
        assert window.page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
    for key in ("v", "Escape", "c", "Escape", "?", "Escape"):
        window.press(key)
        window.page.wait_for_timeout(200)
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
    window.wait("document.querySelector('#messages').textContent.startsWith('No image to label')")
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
    assert window.text("#target") == "Label 4 selected images:"
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


def test_undo_takes_back_an_answer_that_fails_on_its_way(server, opened):
    client, session = server
    window = opened(client)
    number = cursor(window)
    routes = []
    window.page.route("**/api/labels", lambda route: routes.append(route))
    window.press("1")
    wait_until(window, lambda: routes)
    window.press("z")  # while it is on its way
    routes[0].abort()
    wait_until(window, lambda: cursor(window) == number)
    window.page.unroute("**/api/labels")
    window.wait("document.querySelector('#banner').hidden")
    assert session.codes[number] == -1


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


def test_a_refused_answer_is_taken_back_and_said(server, opened, monkeypatch):
    client, session = server
    window = opened(client)

    def refuse(*_, **__):
        raise RefusedError("refused for a test")

    monkeypatch.setattr(session, "label", refuse)
    window.press("1")
    window.wait("document.querySelector('#alerts').textContent.includes('refused for a test')")
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
    window.wait("!document.querySelector('#map-canvas').hidden")
    box = window.page.locator("#map-canvas").bounding_box()
    columns, _ = session.columns()
    x, y = (np.frombuffer(columns, "<f4", COUNT, 4 * COUNT * k) for k in (0, 1))
    scale = min((box["width"] - 32) / np.ptp(x), (box["height"] - 32) / np.ptp(y))
    left = box["x"] + box["width"] / 2 + (x - (x.max() + x.min()) / 2) * scale
    top = box["y"] + box["height"] / 2 + (y - (y.max() + y.min()) / 2) * scale
    window.page.mouse.move(float(left[5]), float(top[5]))
    window.wait("document.querySelector('#tooltip img')")
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
    window.page.wait_for_timeout(300)
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
    assert {circle, square, star, out_of_class} <= set(window.page.evaluate(drawn))
    window.page.select_option("#map-color", "suspected")
    window.page.wait_for_timeout(200)
    assert not {circle, square, star} & set(window.page.evaluate(drawn))


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
    assert not window.page.is_visible("#detail")
    assert window.said == []

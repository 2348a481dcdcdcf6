import json
import socket

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from ropaws.classify import head
from ropaws.explore import server as web_server
from ropaws.explore.server import bind
from tests.explore.pools import COUNT, label_some, make_pool, truth
from tests.explore.serving import TOKEN, Client, served


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def server(place):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head, "STEPS", 15)
        with served(make_pool(place / "pool"), place / "out") as (client, session):
            label_some(session)
            session.refit()
            session.jobs.wait()
            yield client, session


def test_the_state_has_what_the_page_needs(server):
    client, _ = server
    state = client.state()
    assert state["images"] == COUNT
    assert [each["name"] for each in state["classes"]] == ["circle", "square", "star"]
    assert state["counts"]["labeled"] == 12
    assert state["undo"] == "star: 4 images"
    assert state["outputs"]["labels_csv"].endswith("labels.csv")
    assert len(json.dumps(state)) < 10_000  # asked for every second


def test_columns_are_packed_as_the_page_reads_them(server):
    client, session = server
    reply = client.get("/api/columns")
    data, n = reply.body, COUNT
    assert len(data) == n * (4 + 4 + 2 + 2 + 1 + 1 + 1 + 1)
    x = np.frombuffer(data, "<f4", n)
    predicted = np.frombuffer(data, "<i2", n, offset=8 * n)
    label = np.frombuffer(data, "<i2", n, offset=10 * n)
    confidence = np.frombuffer(data, np.uint8, n, offset=12 * n)
    in_domain = np.frombuffer(data, np.uint8, n, offset=13 * n)
    assert np.array_equal(x, session.plane[:, 0])
    assert np.array_equal(predicted, session.predicted)
    assert np.array_equal(label, session.codes)
    assert np.allclose(confidence / 255, session.confidence, atol=0.01)
    assert np.allclose(in_domain / 255, session.fitted.in_class, atol=0.01)
    state = client.state()
    version = f"{state['session']}-{state['revision']}-{state['model_version']}-{state['map_version']}"
    assert reply.headers["x-ropaws-version"] == version


def test_columns_are_sent_in_parts(server, monkeypatch):
    """The page says how much has come; the server starts to send before it has gone through all of them."""
    client, _ = server
    whole = client.get("/api/columns")
    sent = []
    parts = web_server.StreamingResponse
    monkeypatch.setattr(web_server, "PART", 100)
    monkeypatch.setattr(
        web_server,
        "StreamingResponse",
        lambda given, **rest: parts((sent.append(len(part)) or part for part in given), **rest),
    )
    again = client.get("/api/columns")
    assert again.body == whole.body
    assert int(again.headers["content-length"]) == len(whole.body) == sum(sent)
    assert max(sent) == 100


def test_a_label_and_its_undo(server):
    client, session = server
    number = int(np.flatnonzero(session.codes == -1)[0])
    before = client.state()["revision"]
    assert client.post("/api/labels", {"ids": [number], "label": 0}).json == {"revision": before + 1}
    assert client.get(f"/api/images/{number}").json["label"] == 0
    assert client.post("/api/undo").json == {"undone": "circle: 1 image", "ids": [number]}
    assert client.get(f"/api/images/{number}").json["label"] == -1


def test_two_tabs_keep_each_others_labels(server):
    client, session = server
    other = Client(client.port, tab="other")
    first, second = np.flatnonzero(session.codes == -1)[:2].tolist()
    client.post("/api/labels", {"ids": [first], "label": 0})
    other.post("/api/labels", {"ids": [second], "label": 1})
    other.post("/api/undo")
    assert session.codes[[first, second]].tolist() == [0, -1]
    assert other.post("/api/undo").status == 409
    client.post("/api/undo")
    assert session.codes[first] == -1


def test_classes_over_the_wire(server):
    client, session = server
    name = "<img src=x onerror=alert(1)>"
    made = client.post("/api/classes", {"action": "add", "name": name}).json["id"]
    assert client.state()["classes"][-1]["name"] == name  # text, as it is
    assert client.post("/api/classes", {"action": "add", "name": name}).status == 409
    assert client.post("/api/classes", {"action": "rename", "id": made, "name": "moon"}).status == 200
    assert client.post("/api/classes", {"action": "merge", "id": made, "into": 0}).status == 200
    assert client.post("/api/classes", {"action": "merge", "id": made, "into": 0}).status == 409
    for _ in range(3):
        assert client.post("/api/undo").status == 200
    assert made not in session.answers.classes
    client.wait()  # merging refits, which adds a round to the log that other tests watch


def test_thumbnails_are_made_once(server, place):
    client, _ = server
    first = client.get("/api/images/5/thumbnail")
    assert first.headers["content-type"] == "image/png"  # small images stay as they are
    kept = list((place / "out/thumbnails").rglob("*"))
    assert client.get("/api/images/5/thumbnail").body == first.body
    assert list((place / "out/thumbnails").rglob("*")) == kept
    assert "private" in first.headers["cache-control"]


def test_an_image_that_disappears_is_said_and_its_label_stays(tmp_path):
    pool = make_pool(tmp_path / "pool", 8)
    with served(pool, tmp_path / "out") as (client, session):
        client.get("/api/images/2/thumbnail")
        client.post("/api/classes", {"action": "add", "name": "cat", "ids": [2]})
        (tmp_path / "pool/image-002.png").unlink()
        for kind in ("thumbnail", "full"):
            reply = client.get(f"/api/images/2/{kind}")
            assert reply.status == 404
            assert "not there any more" in reply.error
        assert "not there any more" in client.get("/api/images/2").json["note"]
        assert client.post("/api/images", {}).json["total"] == 8
        assert session.codes[2] == 0


def test_a_full_disk_is_said_in_one_line(server, monkeypatch):
    client, session = server

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(session.log, "_write", full)
    before = session.codes.copy()
    reply = client.post("/api/labels", {"ids": [50], "label": 0})
    assert reply.status == 507
    assert "No space left" in reply.error
    assert np.array_equal(session.codes, before)


NONSENSE = [
    b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"ids":"all","label":0}', b'{"ids":[0]}',
    b'{"label":0}',
    b'{"ids":[0.5],"label":0}', b'{"ids":[true],"label":0}', b'{"ids":[-1],"label":0}',
    b'{"ids":[0],"label":"cat"}', b'{"ids":[0],"label":1e99}', b'{"ids":[0],"label":99999}',
    b'{"ids":[0],"label":0,"x":1}', b'{"ids":[99999999],"label":0}', b'{"ids":[0],"label":NaN}',
    b"[" * 100_000, b'{"ids":[' + b"9" * 5000 + b'],"label":0}', b'{"ids":[0],"label":0,"why":"<script>"}',
]  # fmt: skip


@pytest.mark.parametrize("body", NONSENSE, ids=range(len(NONSENSE)))
@pytest.mark.parametrize("path", ["/api/labels", "/api/confirm", "/api/classes", "/api/images", "/api/audit"])
def test_nonsense_gets_one_line_and_changes_nothing(server, path, body):
    client, session = server
    before = session.log.revision
    if (path, body) == ("/api/confirm", b'{"ids":[0]}'):
        return  # that is how to confirm
    reply = client.post(path, body)
    if path == "/api/images" and reply.status == 200:
        return  # it had nothing but known names
    assert reply.status in (400, 409, 422), reply.body[:200]
    assert 0 < len(reply.error) < 400
    assert "\n" not in reply.error
    assert session.log.revision == before


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
KEYS = st.sampled_from(["view", "class", "label", "confidence", "in_domain", "text", "ids", "cluster", "sort",
                        "descending", "offset", "limit"])  # fmt: skip


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=st.dictionaries(KEYS, VALUES, max_size=4))
def test_any_question_is_answered_or_refused(server, body):
    client, _ = server
    reply = client.post("/api/images", json.dumps(body).encode())
    assert reply.status in (200, 400, 409, 422)


@pytest.mark.parametrize("tab", ["x" * 100, "ü" * 10])
def test_odd_tabs(server, tab):
    client, _ = server
    reply = client.post("/api/undo", headers={"X-Ropaws-Client": tab.encode()})
    assert reply.status in (200, 409, 422)


def test_the_map_and_a_fit_come_at_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr(head, "STEPS", 15)
    labels = {int(n): f"class {truth()[n]}" for n in range(30) if truth()[n] < 3}
    with served(make_pool(tmp_path / "pool", labels=labels), tmp_path / "out", background=True) as (
        client,
        _,
    ):
        client.wait()
        state = client.state()
    assert state["map_version"] == 3
    assert state["round"] == 1
    assert [each["labels"] for each in state["panel"]["rounds"]] == [len(labels)]


def test_a_port_in_use():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"--port {port} is in use; choose another, or 0"):
            bind(port)


def test_without_a_port_the_next_free_one_is_taken(monkeypatch):
    first = bind(0)
    first.listen()
    monkeypatch.setattr("ropaws.explore.server.PORT", first.getsockname()[1])
    second = bind(None)
    assert second.getsockname()[1] > first.getsockname()[1]
    assert second.getsockname()[0] == "127.0.0.1"  # of this machine alone
    first.close()
    second.close()


def test_a_name_that_is_not_utf8_does_not_break_the_page(tmp_path):
    pool = make_pool(tmp_path / "pool", 8, labels={0: "caf\udce9"})
    with served(pool, tmp_path / "out") as (client, _):
        assert client.state()["classes"][0]["name"] == "caf\udce9"


def test_cookies_of_other_programs_do_not_lock_the_person_out(server):
    client, _ = server
    own = f"ropaws-{client.port}={TOKEN}"
    for other in ('prefs={"a": 1}', "sess=a b", "foo", "x=\xe9"):
        assert client.get("/api/state", headers={"Cookie": f"{other}; {own}".encode("latin-1")}).status == 200


def test_the_size_of_an_image_is_that_of_the_file(tmp_path):
    pool = make_pool(tmp_path / "pool", 4)
    path = tmp_path / "pool/image-001.png"
    exif = Image.Exif()
    exif[274] = 6  # lies on its side
    Image.new("RGB", (6000, 4000)).save(path, "JPEG", exif=exif)
    with served(pool, tmp_path / "out") as (client, _):
        found = client.get("/api/images/1").json
    assert (found["width"], found["height"]) == (4000, 6000)


def test_an_unknown_image_for_a_new_class_is_refused(server):
    client, session = server
    before = session.log.revision
    assert client.post("/api/classes", {"action": "add", "name": "x", "ids": [9999]}).status == 409
    assert session.log.revision == before

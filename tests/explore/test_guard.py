"""What an attacker would try: from another site, from another name for this machine, without the token."""

import os
import socket
import stat
import urllib.parse
from pathlib import Path

import pytest

from ropaws.cli.explore import open_browser
from ropaws.explore.guard import MOST_BYTES, kept_token
from tests.explore.pools import make_pool
from tests.explore.serving import PATIENCE, TOKEN, served

SECRET = "the secret of another folder"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "secret.txt").write_text(SECRET)
    with served(make_pool(folder / "pool", 12), folder / "out") as (client, session):
        session.add_class("cat", [], tab="tab")
        yield client, session


READS = ["/", "/api/state", "/api/columns", "/api/images/0", "/api/images/0/thumbnail", "/api/images/0/full",
         "/api/new-classes", "/report", "/web/main.js"]  # fmt: skip
WRITES = [("/api/labels", {"ids": [0], "label": 0}), ("/api/classes", {"action": "add", "name": "x"}),
          ("/api/undo", {}), ("/api/refit", {}), ("/api/cancel", {}), ("/api/audit", {"n": 3}),
          ("/api/confirm", {"ids": [0]}), ("/api/auto-refit", {"on": True}),
          ("/api/export", {"kind": "folders"}), ("/api/images", {})]  # fmt: skip


def unchanged(session, before):
    assert session.log.revision == before
    assert session.jobs.shown() is None


@pytest.mark.parametrize("path", READS)
@pytest.mark.parametrize(
    "cookie", [None, "", "ropaws-1=x", "{own}=", "{own}=wrong", "{own}=" + TOKEN[:-1], "a;b=\x01"]
)
def test_nothing_is_read_without_the_token(server, path, cookie):
    client, _ = server
    value = cookie and cookie.replace("{own}", f"ropaws-{client.port}")
    reply = client.get(path, headers={"Cookie": value})
    assert reply.status == 401
    assert "terminal" in reply.body.decode()
    assert reply.headers["content-type"] == (
        "text/html; charset=utf-8" if path == "/" else "application/json"
    )
    assert SECRET not in reply.body.decode()


@pytest.mark.parametrize("token", ["", "?token=wrong", "?token=%3Cscript%3E"])
def test_a_person_without_the_token_sees_a_page(server, token):
    client, _ = server
    reply = client.get(f"/{token}", headers={"Cookie": None, "Origin": None})
    assert reply.status == 401
    assert reply.body.startswith(b"<!doctype html>")
    assert b"open the address that the terminal shows" in reply.body
    assert b"script" not in reply.body
    assert "default-src 'none'" in reply.headers["content-security-policy"]


HONEST = "Host: 127.0.0.1:{port}|Origin: http://127.0.0.1:{port}|Cookie: ropaws-{port}={token}"


def raw(client, *lines, body, is_cut=False):
    """The first line of the answer to a request whose bytes are as given; "" if there is no answer."""
    text = "|".join(("POST /api/labels HTTP/1.1", HONEST, "Content-Type: application/json", *lines))
    head = text.replace("{port}", str(client.port)).replace("{token}", TOKEN).replace("|", "\r\n")
    with socket.create_connection(("127.0.0.1", client.port), timeout=PATIENCE) as connection:
        connection.sendall(head.encode() + b"\r\n\r\n" + body)
        if is_cut:
            connection.shutdown(socket.SHUT_WR)
        return connection.makefile("rb").readline().decode()


def test_a_request_that_was_cut_is_not_acted_on(server):
    """What has come of it may be valid JSON."""
    client, session = server
    before = session.log.revision
    body = b'{"ids":[0],"label":0}'
    assert raw(client, f"Content-Length: {len(body) + 40}", body=body, is_cut=True) == ""
    client.state()
    unchanged(session, before)
    assert " 200 " in raw(client, f"Content-Length: {len(body)}", body=body)
    assert session.log.revision == before + 1


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: 127", b"whole, then a part"])
def test_a_connection_that_does_not_get_on_is_closed(server, monkeypatch, sent):
    client, _ = server
    monkeypatch.setattr("ropaws.explore.server.CONNECTION_SECONDS", 0.3)
    whole = f"GET /web/api.js HTTP/1.1|{HONEST}||".replace("|", "\r\n")
    whole = whole.replace("{port}", str(client.port)).replace("{token}", TOKEN)
    with socket.create_connection(("127.0.0.1", client.port), timeout=PATIENCE) as connection:
        if sent.startswith(b"whole"):
            connection.sendall(whole.encode())
            assert b" 200 " in connection.recv(1 << 16)
            connection.sendall(b"GET /")
        else:
            connection.sendall(sent)
        while connection.recv(1 << 16):  # raises an error if the server does not close it
            pass
    monkeypatch.undo()  # a busy machine may need longer for an honest request
    assert client.get("/").status == 200


@pytest.mark.parametrize("header", ["Origin: http://127.0.0.1:{port}", "Origin: http://evil.example",
                                    "Content-Type: application/json", "Cookie: a=b"])  # fmt: skip
def test_a_header_that_comes_twice_is_refused(server, header):
    client, session = server
    before = session.log.revision
    body = b'{"ids":[0],"label":0}'
    assert " 400 " in raw(client, header, f"Content-Length: {len(body)}", body=body)
    unchanged(session, before)


def test_a_request_that_does_not_come_is_given_up(server, monkeypatch):
    client, session = server
    before = session.log.revision
    monkeypatch.setattr("ropaws.explore.guard.READ_SECONDS", 0.2)
    with socket.create_connection(("127.0.0.1", client.port), timeout=PATIENCE) as connection:
        head = f"POST /api/labels HTTP/1.1|{HONEST}|Content-Type: application/json|Content-Length: 99||"
        text = head.replace("{port}", str(client.port)).replace("{token}", TOKEN).replace("|", "\r\n")
        connection.sendall(text.encode() + b'{"ids":[0]')
        assert b" 408 " in connection.makefile("rb").readline()
    unchanged(session, before)


@pytest.mark.parametrize(("path", "body"), WRITES)
def test_nothing_is_changed_without_the_token(server, path, body):
    client, session = server
    before = session.log.revision
    assert client.post(path, body, headers={"Cookie": None}).status == 401
    unchanged(session, before)


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "localhost.evil.example:{port}",
     "127.0.0.1:{port}@evil.example", "", None, "127.0.0.1.nip.io:{port}", "[::1]:{port}"],
)  # fmt: skip
def test_a_name_that_was_pointed_at_this_machine_is_refused(server, host):
    """DNS rebinding: the browser believes that it talks to evil.example, and sends its own origin."""
    client, session = server
    before = session.log.revision
    name = host and host.replace("{port}", str(client.port))
    for path in READS:
        assert client.get(path, headers={"Host": name}).status in (400, 403)
    for path, body in WRITES:
        assert client.post(path, body, headers={"Host": name, "Origin": f"http://{name}"}).status in (
            400,
            403,
        )
    unchanged(session, before)


def test_localhost_is_this_machine(server):
    client, _ = server
    name = f"localhost:{client.port}"
    assert client.get("/api/state", headers={"Host": name, "Origin": f"http://{name}"}).status == 200


@pytest.mark.parametrize(
    "origin",
    ["http://evil.example", "https://127.0.0.1:{port}", "http://127.0.0.1", "null", "file://", None,
     "http://127.0.0.1:{port}.evil.example"],
)  # fmt: skip
@pytest.mark.parametrize(("path", "body"), WRITES)
def test_requests_of_other_sites_change_nothing(server, origin, path, body):
    """The browser would add the cookie if it were not strict; the origin tells the sites apart."""
    client, session = server
    before = session.log.revision
    value = origin and origin.replace("{port}", str(client.port))
    reply = client.post(path, body, headers={"Origin": value})
    assert reply.status == 403
    unchanged(session, before)


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_images_are_not_shown_inside_other_sites(server, site):
    client, _ = server
    assert client.get("/api/images/0/full", headers={"Sec-Fetch-Site": site, "Origin": None}).status == 403
    reply = client.get("/api/images/0/full")
    assert reply.status == 200
    assert reply.headers["cross-origin-resource-policy"] == "same-origin"


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None]
)
def test_forms_are_refused(server, kind):
    """A form of another site needs no permission to send these."""
    client, session = server
    before = session.log.revision
    body = b'{"ids":[0],"label":0}'
    assert client.post("/api/labels", body, headers={"Content-Type": kind}).status == 415
    unchanged(session, before)


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "GET"])
def test_other_verbs_change_nothing(server, method):
    client, session = server
    before = session.log.revision
    reply = client.send(method, "/api/labels", b'{"ids":[0],"label":0}')
    assert reply.status == 405
    assert "access-control-allow-origin" not in reply.headers
    unchanged(session, before)


PATHS = ["/web/../guard.py", "/web/..%2fguard.py", "/web/%2e%2e/guard.py", "/web/....//guard.py",
         "/web//etc/passwd", "/web/..\\guard.py", "/web/%00main.js", "/../secret.txt", "/secret.txt",
         "/api/images/../../secret.txt",
         "/api/images/secret.txt/full", "/api/images/-1/full", "/api/images/12/full", "/api/images/0x0/full",
         "/api/images/1e0/full", "/api/images/99999999999999999999/full", "/api/images/%2e%2e/full", "/docs",
         "/openapi.json", "/redoc", "/api/images/0/..%2f..%2fsecret.txt", "//etc/passwd",
         "/web/index.html/.."]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_files_are_served_by_number_never_by_path(server, path):
    client, _ = server
    reply = client.get(path)
    assert reply.status in (404, 409, 422)
    assert SECRET not in reply.body.decode("latin-1")
    assert len(reply.error) < 400


def test_what_is_shown_is_decoded_and_encoded_anew(tmp_path):
    """A file that is an image and a page at once leaves only its pixels."""
    pool = make_pool(tmp_path / "pool", 4)
    path = tmp_path / "pool/image-000.png"
    path.write_bytes(path.read_bytes() + b"<script>alert(1)</script>")
    with served(pool, tmp_path / "out") as (client, _):
        for kind in ("thumbnail", "full"):
            reply = client.get(f"/api/images/0/{kind}")
            assert reply.status == 200
            assert b"<script>" not in reply.body
            assert reply.headers["x-content-type-options"] == "nosniff"
            assert reply.headers["content-type"] in ("image/png", "image/jpeg")


def test_a_link_in_the_pool_shows_an_image_or_nothing(tmp_path):
    pool = make_pool(tmp_path / "pool", 4)
    (tmp_path / "secret.txt").write_text(SECRET)
    (tmp_path / "pool/image-000.png").unlink()
    (tmp_path / "pool/image-000.png").symlink_to(tmp_path / "secret.txt")
    with served(pool, tmp_path / "out") as (client, _):
        reply = client.get("/api/images/0/full")
        assert reply.status == 404
        assert SECRET not in reply.body.decode()


def test_the_token_becomes_a_cookie_that_scripts_and_other_sites_do_not_get(server):
    client, _ = server
    reply = client.get(f"/?token={TOKEN}", headers={"Cookie": None, "Origin": None})
    assert reply.status == 200
    assert b'http-equiv="refresh" content="0; url=/"' in reply.body  # the token leaves the address bar
    assert TOKEN.encode() not in reply.body
    assert b'<link rel="icon" href="data:,">' in reply.body  # or a browser asks for one that is not there
    cookie = reply.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert reply.headers["referrer-policy"] == "no-referrer"
    assert client.get("/?token=wrong", headers={"Cookie": None}).status == 401


def test_pages_run_no_foreign_script_and_are_not_framed(server):
    client, _ = server
    for path in ("/", "/web/main.js", "/api/state"):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["x-frame-options"] == "DENY"


def test_long_requests_end_early(server):
    client, session = server
    before = session.log.revision
    body = b'{"ids":[' + b"0," * (MOST_BYTES // 2) + b'0],"label":0}'
    assert client.post("/api/labels", body).status == 413
    unchanged(session, before)


def test_read_only_shows_everything_and_changes_nothing(tmp_path):
    pool = make_pool(tmp_path / "pool", 8)
    with served(pool, tmp_path / "out", read_only=True) as (client, session):
        assert client.state()["read_only"] is True
        assert client.post("/api/images", {}).json["total"] == 8
        assert client.get("/api/images/0/thumbnail").status == 200
        for path, body in WRITES:
            if path != "/api/images":
                reply = client.post(path, body)
                assert reply.status == 409
                assert "--read-only" in reply.error
        assert session.log.revision == 0
    assert not (tmp_path / "out").exists()


def test_the_browser_is_started_without_the_token_and_gets_it(server, browser, monkeypatch):
    """Arguments of a process can be read by every user of the machine."""
    client, _ = server
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    open_browser(f"{client.origin}/?token={TOKEN}")
    (address,) = opened
    assert TOKEN not in address
    door = Path(urllib.parse.urlparse(address).path)
    assert TOKEN in door.read_text()
    assert door.stat().st_mode & 0o077 == door.parent.stat().st_mode & 0o077 == 0
    page = browser.new_page()
    page.goto(address)
    page.wait_for_selector("#views button, #name-classes[open]")
    assert page.url == f"{client.origin}/"
    page.context.close()


def test_the_token_is_kept_for_its_owner_alone(tmp_path):
    path = tmp_path / ".token"
    token = kept_token(path)
    assert len(token) >= 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert kept_token(path) == token  # tabs stay valid after a restart
    path.chmod(0o644)  # others may have read it
    assert kept_token(path) != token
    path.write_text("short")
    assert len(kept_token(path)) >= 32


def test_a_planted_link_in_the_place_of_the_token_is_replaced(tmp_path):
    (tmp_path / "elsewhere").write_text("x" * 40)
    (tmp_path / "elsewhere").chmod(0o600)
    (tmp_path / ".token").symlink_to(tmp_path / "elsewhere")
    token = kept_token(tmp_path / ".token")
    assert token != "x" * 40
    assert not os.path.islink(tmp_path / ".token")
    assert (tmp_path / "elsewhere").read_text() == "x" * 40

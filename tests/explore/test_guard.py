"""What an attacker would try: from another site, from another name for this machine, without the token."""

import os
import stat

import pytest

from ropaws.explore.guard import MOST_BYTES, kept_token
from tests.explore.pools import make_pool
from tests.explore.serving import TOKEN, served

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
    assert not session.jobs.is_running("refit")


@pytest.mark.parametrize("path", READS)
@pytest.mark.parametrize(
    "cookie", [None, "", "ropaws-1=x", "{own}=", "{own}=wrong", "{own}=" + TOKEN[:-1], "a;b=\x01"]
)
def test_nothing_is_read_without_the_token(server, path, cookie):
    client, _ = server
    value = cookie and cookie.replace("{own}", f"ropaws-{client.port}")
    reply = client.get(path, headers={"Cookie": value})
    assert reply.status == 401
    assert "terminal" in reply.error


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
    assert reply.status == 303
    assert reply.headers["location"] == "/"  # and leaves the address bar
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

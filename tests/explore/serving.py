"""A server in this process, and a client that sends what it is told: honest headers or an attacker's."""

import contextlib
import http.client
import json
import threading
import time

from ropaws.explore.server import bind, build_app, build_server
from ropaws.explore.session import Session

TOKEN = "t" * 32
PATIENCE = 240  # seconds that a test waits for what must come, however busy the machine is


class Reply:
    def __init__(self, status, headers, body):
        self.status = status
        self.headers = headers
        self.body = body

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def error(self):
        return self.json["error"]


class Client:
    def __init__(self, port, tab="tab"):
        self.port = port
        self.origin = f"http://127.0.0.1:{port}"
        self.tab = tab

    def send(self, method, path, body=None, headers=None, *, honest=True):
        """honest: with the headers of our own page; a header of None is left out."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        own = {
            "Host": f"127.0.0.1:{self.port}",
            "Origin": self.origin,
            "Cookie": f"ropaws-{self.port}={TOKEN}",
            "X-Ropaws-Client": self.tab,
            "Content-Type": "application/json",
        }
        given = {**(own if honest else {}), **(headers or {})}
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for name, value in given.items():
            if value is not None:
                connection.putheader(name, value)
        if data is not None:
            connection.putheader("Content-Length", str(len(data)))
        connection.endheaders(data)
        reply = connection.getresponse()
        try:
            content = reply.read()
        except ConnectionResetError:  # refused before all that was sent had been read
            content = b""
        found = Reply(reply.status, dict(reply.getheaders()), content)
        connection.close()
        return found

    def get(self, path, **options):
        return self.send("GET", path, **options)

    def post(self, path, body=None, **options):
        return self.send("POST", path, {} if body is None else body, **options)

    def state(self):
        return self.get(f"/api/state?client={self.tab}").json

    def wait(self, seconds=PATIENCE):
        """Until no job is running."""
        end = time.monotonic() + seconds
        while (state := self.state())["job"] is not None:
            assert time.monotonic() < end, state["job"]
            time.sleep(0.05)
        return state


@contextlib.contextmanager
def served(pool, folder, *, read_only=False, background=False):
    """A client, and the session behind it."""
    session = Session(pool, folder, read_only=read_only)
    session.auto_refit = False
    if background:
        session.start_background()
    sock = bind(0)
    port = sock.getsockname()[1]
    app = build_app(session, port=port, token=TOKEN)
    server = build_server(app)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield Client(port), session
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        sock.close()

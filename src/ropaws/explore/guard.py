"""Who may talk to the server: a browser of this machine that was given the token, from our own page.

Any web page that a person visits can send requests to this machine. So: the Host must be ours (a name that an
attacker points at 127.0.0.1 is not), requests that change something must come from our own origin, as JSON,
and every request needs the token, which the terminal shows and the browser is started with.
"""

import asyncio
import hmac
import html
import json
import os
import re
import secrets
import stat
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MOST_BYTES = 8 << 20  # of a request: a million images by number
READ_SECONDS = 30  # until the whole request has come
JUDGED = ("host", "origin", "content-type", "sec-fetch-site", "cookie")
PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>ropaws explore</title>
<link rel="icon" href="data:,">
"""
TOKEN_BYTES = 24
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# The report is a file of a run folder: it may run its own script, but it is nobody's origin.
REPORT_POLICY = (
    "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline';"
    " img-src data:"
)
HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}


class Guard:
    """Lets through what may pass; everything else gets one line and no work is done for it.

    Args:
        app: The application behind it.
        port: Of the server.
        token: Of this server.
    """

    def __init__(self, app: App, *, port: int, token: str) -> None:
        self.app = app
        self.token = token
        self.cookie = f"ropaws-{port}"
        self.hosts = {f"{name}:{port}" for name in ("127.0.0.1", "localhost")}
        self.origins = {f"http://{host}" for host in self.hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # websockets are not used
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        refused = _refuse_repeated(scope) or self._refuse(scope, headers)
        if refused is not None:
            await _answer(send, *refused)
            return
        if scope["path"] == "/" and (given := _token_in(scope)) is not None:
            await self._welcome(send, given)
            return
        if not self._knows(headers):
            line = "not allowed: open the address that the terminal shows, with its token"
            await (_answer_page if scope["path"] == "/" else _answer)(send, 401, line)
            return
        try:
            body = await asyncio.wait_for(_read(receive), READ_SECONDS)
        except TimeoutError:
            await _answer(send, 408, f"the request took longer than {READ_SECONDS} seconds to arrive")
            return
        except _CutError:  # nobody is there to be answered
            return
        if body is None:
            await _answer(send, 413, f"a request has at most {MOST_BYTES >> 20} MB")
            return
        await self.app(scope, _replayed(body, receive), _with_headers(send, scope["path"]))

    def _refuse(self, scope: Scope, headers: Mapping[str, str]) -> tuple[int, str] | None:
        """Status and line for a request that does not come from our own page."""
        if headers.get("host", "") not in self.hosts:
            return 403, "this server answers to 127.0.0.1 and localhost only"
        changes = scope["method"] not in ("GET", "HEAD")
        origin = headers.get("origin")
        if origin is not None and origin not in self.origins:
            return 403, "requests of other sites are refused"
        is_address_bar = scope["method"] == "GET" and scope["path"] == "/"
        if headers.get("sec-fetch-site", "none") not in ("same-origin", "none") and not is_address_bar:
            return 403, "requests of other sites are refused"
        if not changes:
            return None
        if origin is None:
            return 403, "a request that changes something must name its origin"
        if headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
            return 415, "a request must be JSON"
        return None

    async def _welcome(self, send: Send, given: str) -> None:
        """The token becomes a cookie, and leaves the address bar."""
        if not _same(given, self.token):
            await _answer_page(send, 401, "wrong token: open the address that the terminal shows")
            return
        cookie = f"{self.cookie}={self.token}; HttpOnly; SameSite=Strict; Path=/; Max-Age=2592000"
        # A page that leads on, and no redirect: after a step from another site, such as the file that the
        # terminal opens, a browser would not send this cookie.
        text = PAGE + '<meta http-equiv="refresh" content="0; url=/">\n<a href="/">ropaws explore</a>\n'
        await _send(send, 200, "text/html; charset=utf-8", text, cookie=cookie)

    def _knows(self, headers: Mapping[str, str]) -> bool:
        """By hand: programs of this machine share cookies, and an odd one of another must not hide ours."""
        pairs = (part.strip().partition("=") for part in headers.get("cookie", "").split(";"))
        return any(name == self.cookie and _same(value, self.token) for name, _, value in pairs)


def _same(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), token.encode())


def _token_in(scope: Scope) -> str | None:
    found = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("token")
    return found[0] if found else None


def _refuse_repeated(scope: Scope) -> tuple[int, str] | None:
    """A request is judged by these headers, so there must be one of each at most."""
    names = Counter(name.decode("latin-1") for name, _ in scope["headers"])
    twice = next((name for name in JUDGED if names[name] > 1), None)
    return None if twice is None else (400, f"a request has at most one {twice} header")


class _CutError(Exception):
    """The connection ended before the request did."""


async def _read(receive: Receive) -> bytes | None:
    """The whole body; None if it is too long.

    Raises:
        _CutError: The rest of it will not come: what has come may look whole, and is not to be acted on.
    """
    parts: list[bytes] = []
    length = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise _CutError
        part = message.get("body", b"")
        length += len(part)
        if length > MOST_BYTES:
            return None
        parts.append(part)
        if not message.get("more_body"):
            return b"".join(parts)


def _replayed(body: bytes, rest: Receive) -> Receive:
    """The body again, for the application; then the end of the connection, when that comes."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        return messages.pop(0) if messages else await rest()

    return receive


def _with_headers(send: Send, path: str) -> Send:
    policy = REPORT_POLICY if path == "/report" else POLICY

    async def wrapped(message: Message) -> None:
        if message["type"] == "http.response.start":
            own = {name.lower() for name, _ in message.get("headers", [])}
            added = {**HEADERS, "content-security-policy": policy, "cache-control": "no-store"}
            if path == "/report":  # a sandbox has no opener
                del added["cross-origin-opener-policy"]
            message["headers"] = [
                *message.get("headers", []),
                *((k.encode(), v.encode()) for k, v in added.items() if k.encode() not in own),
            ]
        await send(message)

    return wrapped


async def _answer(send: Send, status: int, line: str) -> None:
    await _send(send, status, "application/json", json.dumps({"error": line}))


async def _answer_page(send: Send, status: int, line: str) -> None:
    """As _answer, for a person who looks at it."""
    text = f"<h1>ropaws explore</h1>\n<p>{html.escape(line.capitalize())}.</p>\n"
    await _send(send, status, "text/html; charset=utf-8", PAGE + text)


async def _send(send: Send, status: int, media_type: str, text: str, *, cookie: str = "") -> None:
    own = {"content-type": media_type, "content-security-policy": POLICY, "cache-control": "no-store"}
    if cookie:
        own["set-cookie"] = cookie
    raw = [(name.encode(), value.encode()) for name, value in {**HEADERS, **own}.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": text.encode()})


def kept_token(path: Path) -> str:
    """The token of a folder, for its owner alone: tabs that are open stay valid when the server restarts."""
    try:
        facts = os.lstat(path)
        private = stat.S_ISREG(facts.st_mode) and not facts.st_mode & 0o077 and facts.st_uid == os.getuid()
        token = path.read_text() if private and facts.st_size < 200 else ""
        if re.fullmatch(r"[\w-]{32,}", token, re.ASCII):
            return token
    except FileNotFoundError:
        pass
    token = new_token()
    _write_private(path, token)
    return token


def new_token() -> str:
    return secrets.token_urlsafe(TOKEN_BYTES)


def write_door(path: Path, address: str) -> None:
    """A page for its owner alone that leads to an address: a browser's arguments are seen by all."""
    _write_private(path, f'{PAGE}<meta http-equiv="refresh" content="0; url={html.escape(address)}">\n')


def _write_private(path: Path, text: str) -> None:
    """In the place of whatever is there, which may be a link."""
    path.unlink(missing_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(file, "w") as stream:
        stream.write(text)

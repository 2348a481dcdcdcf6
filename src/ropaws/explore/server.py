"""The server behind the page: requests in, answers of the session out; docs/explore.md has the API."""

import asyncio
import contextlib
import errno
import json
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import uvicorn
from fastapi import FastAPI, Header, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from ropaws.explore import browsing, outputs, page_state
from ropaws.explore.answer_log import RefusedError
from ropaws.explore.browsing import Query
from ropaws.explore.guard import Guard
from ropaws.explore.images import FULL_SIDE, Encoded, encode, open_shown, shown_size
from ropaws.explore.session import Session
from ropaws.pool.content import UnreadableError
from ropaws.run.output_formats import FormatName

WEB = Path(__file__).parent / "web"
KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
HOST = "127.0.0.1"
PORT, PORTS = 8765, 20  # the first port that is tried, and how many
MOST_IDS = 1_000_000
CONNECTION_SECONDS = 60.0  # in which a connection must get on; the page itself waits no longer
LONGEST_TAB = 64
PART = 1 << 20  # bytes of columns that are sent at a time

Number = Annotated[int, Field(ge=0, le=2**31 - 1)]
Numbers = Annotated[list[Number], Field(max_length=MOST_IDS)]
Share = Annotated[float, Field(ge=0, le=1)]
Tab = Annotated[str, Header(alias="X-Ropaws-Client", max_length=LONGEST_TAB)]


class AsciiJson(JSONResponse):
    """Plain ASCII: names that are not UTF-8 are escaped, and do not break the answer."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content).encode()


class Body(BaseModel):
    """What a browser sends; anything else is refused."""

    model_config = ConfigDict(extra="forbid", strict=True)


class ImagesBody(Body):
    view: str = "all"
    class_: Annotated[int | None, Field(alias="class", ge=-2, le=32767)] = None
    label: Annotated[int | None, Field(ge=-3, le=32767)] = None
    confidence: tuple[Share, Share] | None = None
    in_domain: tuple[Share, Share] | None = None
    text: Annotated[str, Field(max_length=1000)] = ""
    ids: Numbers | None = None
    cluster: Number | None = None
    like: Number | None = None
    sort: str = ""
    descending: bool = False
    offset: Number = 0
    limit: Annotated[int, Field(ge=1, le=500)] = 60

    def query(self) -> Query:
        if self.view not in browsing.VIEWS:
            raise RefusedError(f"view must be one of {', '.join(browsing.VIEWS)}, got {self.view!r:.60}")
        if self.sort and self.sort not in browsing.SORTS:
            raise RefusedError(f"sort must be one of {', '.join(browsing.SORTS)}, got {self.sort!r:.60}")
        given = self.model_dump(exclude_none=True)
        return Query(**{PARTS.get(name, name): value for name, value in given.items()})


PARTS = {"class_": "predicted"}  # of a query that the page names otherwise


class LabelBody(Body):
    ids: Numbers
    label: Annotated[int, Field(ge=-3, le=32767)]
    why: Literal["suggested", "audit", "grid", "map", "label-error"] = "grid"


class IdsBody(Body):
    ids: Numbers


class ClassBody(Body):
    action: Literal["add", "rename", "merge", "delete"]
    id: Number | None = None
    into: Number | None = None
    name: Annotated[str | None, Field(max_length=1000)] = None
    ids: Numbers = Field(default_factory=list)


class AuditBody(Body):
    n: Annotated[int, Field(ge=1, le=10_000)]


class OnBody(Body):
    on: bool


class ExportBody(Body):
    kind: Literal["folders", "predictions", "run", "finetune"]
    format: FormatName = "csv"  # of predictions


class NoBody(Body):
    pass


def build_app(session: Session, *, port: int, token: str) -> Guard:
    """The application, guarded. Closing it closes the session."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        session.close()

    app = FastAPI(
        docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan, default_response_class=AsciiJson
    )
    _explain_errors(app)
    _add_page(app, session)
    _add_views(app, session)
    _add_answers(app, session)
    return Guard(app, port=port, token=token)


def _explain_errors(app: FastAPI) -> None:
    """Every error is one line for a person."""

    def line(status: int, text: str) -> JSONResponse:
        return AsciiJson({"error": text}, status)

    @app.exception_handler(RequestValidationError)
    def _invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"] if part not in ("body", "query", "path"))
        return line(422, f"{place or 'request'}: {first['msg']}"[:300])

    @app.exception_handler(HTTPException)
    def _http(_: Request, error: HTTPException) -> JSONResponse:
        return line(error.status_code, str(error.detail)[:300])

    @app.exception_handler(RefusedError)
    def _refused(_: Request, error: RefusedError) -> JSONResponse:
        return line(409, str(error))

    @app.exception_handler(UnreadableError)
    def _unreadable(_: Request, error: UnreadableError) -> JSONResponse:
        return line(404, f"this image cannot be shown: {error}")

    @app.exception_handler(Exception)
    def _fault(_: Request, error: Exception) -> JSONResponse:
        return line(500, f"this should not happen ({type(error).__name__}: {error!s:.200}); please report it")

    @app.exception_handler(OSError)
    def _disk(_: Request, error: OSError) -> JSONResponse:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return line(507 if full else 500, " ".join(str(error).split()) or type(error).__name__)


def _add_page(app: FastAPI, session: Session) -> None:
    files = {path.name: path for path in WEB.iterdir() if path.suffix in KINDS}

    @app.get("/")
    def page() -> Response:
        return _static(files["index.html"])

    @app.get("/web/{name}")
    def static(name: str) -> Response:
        if name not in files:  # by name from a list: no path is ever built from a request
            raise HTTPException(404, "there is no such file")
        return _static(files[name])

    @app.get("/report")
    def report() -> Response:
        found = outputs.report_page(session)
        if found is None:
            raise HTTPException(404, "there is no report yet; train a run first")
        return Response(found, media_type="text/html; charset=utf-8")


def _static(path: Path) -> Response:
    return Response(path.read_bytes(), media_type=f"{KINDS[path.suffix]}; charset=utf-8")


def _add_views(app: FastAPI, session: Session) -> None:
    @app.get("/api/state")
    def state(client: Annotated[str, Field(max_length=LONGEST_TAB)] = "") -> dict[str, Any]:
        return page_state.state(session, client) | {"outputs": outputs.output_facts(session)}

    @app.get("/api/columns")
    def columns() -> Response:
        data, version = page_state.columns(session)
        headers = {"X-Ropaws-Version": version, "Content-Length": str(len(data))}
        parts = (data[start : start + PART] for start in range(0, len(data), PART))
        return StreamingResponse(parts, media_type="application/octet-stream", headers=headers)

    @app.post("/api/images")
    def images(body: ImagesBody) -> dict[str, Any]:
        return browsing.browse(session, body.query())

    @app.get("/api/images/{number}")
    def image(number: int) -> dict[str, Any]:
        found = browsing.details(session, number)
        try:
            width, height = shown_size(session.pool.images[number])
            found |= {"width": width, "height": height}
        except UnreadableError as error:
            found |= {"width": 0, "height": 0, "note": f"this image cannot be shown: {error}"}
        return found

    @app.get("/api/images/{number}/thumbnail")
    def thumbnail(number: int) -> Response:
        return _encoded(session, number, session.thumbnails.get)

    @app.get("/api/images/{number}/full")
    def full(number: int) -> Response:
        return _encoded(session, number, lambda n: encode(open_shown(session.pool.images[n]), FULL_SIDE))

    @app.get("/api/new-classes")
    def new_classes() -> list[dict[str, Any]]:
        return browsing.new_class_list(session)


def _encoded(session: Session, number: int, make: Callable[[int], Encoded]) -> Response:
    if not 0 <= number < len(session.pool):
        raise HTTPException(404, f"images have numbers from 0 to {len(session.pool) - 1}, got {number}")
    found = make(number)
    # Numbers are those of this process: the page adds the id of the session, so another start asks anew.
    headers = {"Cache-Control": "private, max-age=3600"}
    return Response(found.data, media_type=found.media_type, headers=headers)


def _add_answers(app: FastAPI, session: Session) -> None:
    def writable() -> None:
        if session.read_only:
            raise RefusedError("this page is for looking only: started with --read-only")

    @app.post("/api/labels")
    def labels(body: LabelBody, tab: Tab = "") -> dict[str, int]:
        writable()
        return {"revision": session.label(body.ids, body.label, why=body.why, tab=tab)}

    @app.post("/api/confirm")
    def confirm(body: IdsBody, tab: Tab = "") -> dict[str, int]:
        writable()
        return {"revision": session.confirm(body.ids, tab=tab)}

    @app.post("/api/undo")
    def undo(_: NoBody, tab: Tab = "") -> dict[str, Any]:
        writable()
        text, ids = session.undo(tab)
        return {"undone": text, "ids": ids}

    @app.post("/api/classes")
    def classes(body: ClassBody, tab: Tab = "") -> dict[str, int]:
        writable()
        if body.action == "add":
            return {"id": session.add_class(body.name, body.ids, tab=tab), "revision": session.log.revision}
        if body.id is None or (body.action == "merge" and body.into is None):
            raise RefusedError(f"{body.action} needs the number of a class")
        if body.action == "rename":
            session.rename_class(body.id, body.name, tab=tab)
        elif body.action == "delete":
            session.delete_class(body.id, tab=tab)
        else:
            assert body.into is not None
            session.merge_class(body.id, body.into, tab=tab)
        return {"id": body.id, "revision": session.log.revision}

    @app.post("/api/refit")
    def refit(_: NoBody) -> dict[str, bool]:
        writable()
        if not session.refit():
            raise RefusedError("a refit is running already")
        return {"started": True}

    @app.post("/api/cancel")
    def cancel(_: NoBody) -> dict[str, str | None]:
        writable()
        job = session.jobs.cancel()
        return {"cancelled": None if job is None else job.kind}

    @app.post("/api/auto-refit")
    def auto_refit(body: OnBody) -> dict[str, bool]:
        writable()
        session.auto_refit = body.on
        return {"on": body.on}

    @app.post("/api/audit")
    def audit(body: AuditBody, tab: Tab = "") -> dict[str, int]:
        writable()
        return session.start_audit(body.n, tab=tab)

    @app.post("/api/export")
    def export(body: ExportBody) -> dict[str, str]:
        writable()
        return {"text": outputs.export(session, body.kind, body.format)}


def bind(port: int | None) -> socket.socket:
    """A socket of this machine alone.

    Args:
        port: Which one; None for the first free one from 8765 on, 0 for any.

    Raises:
        OSError: It is in use.
    """
    for candidate in [port] if port is not None else range(PORT, PORT + PORTS):
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((HOST, candidate))
            sock.listen()  # a browser that comes before the server answers waits, and is not refused
        except OSError as error:
            sock.close()
            if error.errno == errno.EADDRINUSE and port is None:
                continue
            reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
            raise OSError(f"--port {candidate} {reason}; choose another, or 0 for any that is free") from None
        return sock
    raise OSError(f"ports {PORT} to {PORT + PORTS - 1} are all in use; name a free one with --port, or 0")


def serve(session: Session, sock: socket.socket, token: str) -> None:
    """Answer requests until Ctrl-C."""
    app = build_app(session, port=sock.getsockname()[1], token=token)
    build_server(app).run(sockets=[sock])


def build_server(app: Guard) -> uvicorn.Server:
    """Without an access log, as addresses hold the token; open connections do not keep it from ending."""
    return uvicorn.Server(
        uvicorn.Config(
            app,
            http=Watched,
            log_level="warning",
            access_log=False,
            server_header=False,
            lifespan="on",
            timeout_graceful_shutdown=2,
        )
    )


class Watched(AutoHTTPProtocol):  # type: ignore[valid-type,misc]
    """A connection that ends if its request does not come, or its answer is not taken."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._look(None)

    def _look(self, before: object) -> None:
        """At the request that is answered: the same as at the last look, or none yet, is the end."""
        if self.transport.is_closing():
            return
        now = self.cycle or "none"
        if now is before:
            self.transport.close()
        else:
            self.loop.call_later(CONNECTION_SECONDS, self._look, now)

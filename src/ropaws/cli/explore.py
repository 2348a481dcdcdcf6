"""`ropaws explore`."""

import atexit
import shutil
import tempfile
import threading
import webbrowser
from dataclasses import dataclass, replace
from pathlib import Path

import tyro

from ropaws.cli.parsing import parse, refuse_images, run_of
from ropaws.core.terminal import say
from ropaws.embedding.backbones import PRETRAINED
from ropaws.embedding.embedder import Embedder

FOLDER = "explore"  # in a run, or in the current folder
NEEDS = "ropaws explore needs FastAPI and uvicorn: pip install 'ropaws[explore]'"


@dataclass(frozen=True)
class Explore:
    """Look at your images in the browser, label them, and see the classifier change.

    Start from a trained run, or from a folder of images with few labels or none. Features are computed once
    by a pretrained network; then a refit takes seconds. Every answer is saved at once; the same command
    continues where you stopped.

    ropaws explore runs/mine
    ropaws explore --unlabeled photos/pool
    ropaws explore --unlabeled photos/pool --labeled photos/labeled --out explore/photos
    ropaws explore --unlabeled photos/pool --probabilities theirs.csv
    """

    run: tyro.conf.Positional[Path | None] = None
    """A run folder; instead of --unlabeled."""
    unlabeled: tuple[Path, ...] = ()
    """Folders, searched recursively, images, tables of paths, .npz files, or saved datasets."""
    labeled: tuple[Path, ...] = ()
    """Sources with labels: folders with one folder per class, tables of path and label ..."""
    probabilities: Path | None = None
    """With --unlabeled: predictions of another model, to look at and to choose labels by: a table with path
    and a column p(NAME) per class, or with label and confidence; or an .npz of names, classes, probs."""
    out: Path | None = None
    """Folder of the answers: answers.jsonl, labels.csv, trained runs. By default RUN/explore, or
    explore/NAME after the first source."""
    port: int | None = None
    """Port on this machine; by default the first free one from 8765 on, 0 for any."""
    browser: bool = True
    """Open the page; --no-browser prints its address only."""
    read_only: bool = False
    """For showing: nothing can be changed."""
    backbone: str | None = None
    """The network: auto (the default: the best at hand, or the one that --init fits), a name of `ropaws
    backbones` (several joined by +), or timm:NAME."""
    init: Path = PRETRAINED
    """Weights: pretrained, or a .pth or .safetensors file; of several networks FILE+FILE."""
    size: int | None = None
    """Pixels per side that the network sees; by default as `ropaws train` chooses it."""
    cache: Path | None = None
    """Folder that keeps features; by default ~/.cache/ropaws/features."""
    method: str | None = None
    """The run's method, repeated, if it is not part of ropaws: package.module:Class."""
    device: str | None = None
    """Where to compute."""


def explore(arguments: list[str]) -> None:
    command = parse(Explore, "explore", arguments)
    _check(command)
    try:
        import fastapi  # noqa: F401 - only to know whether it is there
        import uvicorn  # noqa: F401
    except ImportError:
        raise ValueError(NEEDS) from None
    from ropaws.explore.guard import kept_token, new_token
    from ropaws.explore.server import bind, serve
    from ropaws.explore.session import Session

    sock = bind(command.port)  # before features are computed: that may take minutes
    try:
        folder = _folder(command)
        pool = _pool(command)
        session = Session(pool, folder, read_only=command.read_only)
        token = kept_token(folder / ".token") if folder.is_dir() and not command.read_only else new_token()
        session.start_background()
        address = f"http://127.0.0.1:{sock.getsockname()[1]}/?token={token}"
        kept = "Nothing can be changed" if command.read_only else f"Your answers are kept in {folder}"
        say(f"{len(pool):,} images. {kept}.")
        say(f"Open {address}")
        say("Ctrl-C ends the server; the same command continues.", flush=True)
        if command.browser:
            # In a thread: a browser of the terminal would keep the server from starting.
            threading.Thread(target=open_browser, args=(address,), daemon=True).start()
        serve(session, sock, token)
    finally:
        sock.close()


def _check(command: Explore) -> None:
    if command.run is not None and (command.unlabeled or command.labeled):
        raise ValueError("name a run, or --unlabeled and --labeled images, not both")
    if command.run is None and not command.unlabeled and not command.labeled:
        raise ValueError("name a run folder, or images with --unlabeled: ropaws explore --unlabeled FOLDER")
    if command.probabilities is not None and command.run is not None:
        raise ValueError(
            "--probabilities takes the place of a run's own; name images with --unlabeled instead"
        )
    if command.run is not None:
        refuse_images(command.run)
    if command.port is not None and not 0 <= command.port <= 65535:
        raise ValueError(f"--port must be from 0 to 65535, got {command.port}")


def _folder(command: Explore) -> Path:
    if command.out is not None:
        return command.out
    if command.run is not None:
        return command.run / FOLDER
    first = (*command.unlabeled, *command.labeled)[0]
    return Path(FOLDER) / (first.absolute().stem or "images")


def _pool(command: Explore):  # type: ignore[no-untyped-def]
    from ropaws.explore.pool import pool_of_run, pool_of_sources
    from ropaws.explore.predictions import read_predictions

    if command.run is not None:
        return pool_of_run(run_of(command.run, command.method, pool=0, device=command.device))
    embedder = Embedder(
        command.backbone,
        init=command.init,
        size=command.size,
        cache=command.cache,
        device=command.device or "auto",
    )
    pool = pool_of_sources(command.unlabeled, command.labeled, embedder)
    if command.probabilities is None:
        return pool
    found = read_predictions(command.probabilities, pool.names, pool.class_names)
    if found.missing:
        few = f"{command.probabilities} has no row for {found.missing:,} images"
        say(f"{few}: all classes are as likely there")
    return replace(pool, outputs=found.outputs, class_names=found.class_names)


def open_browser(address: str) -> None:
    """By a file of the owner alone: the arguments of a process, and so the token, can be read by everyone."""
    from ropaws.explore.guard import write_door

    folder = Path(tempfile.mkdtemp(prefix="ropaws-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    write_door(folder / "explore.html", address)
    webbrowser.open((folder / "explore.html").as_uri())

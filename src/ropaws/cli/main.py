"""The command line: find the command, run it, turn errors into one line.

Commands are imported when they are called, so that `ropaws --help` does not load torch.
"""

import importlib
import os
import platform
import sys
import tempfile
import traceback
import warnings
from collections.abc import Sequence
from typing import NoReturn

from ropaws.core.cores import CoreTimes, core_times
from ropaws.core.labels import nearest

# name: (module, summary); the module has a function of the command's name
COMMANDS = {
    "demo": ("ropaws.cli.bench", "the main job on embedded images: a table of methods, a report"),
    "bench": ("ropaws.cli.bench", "compare methods on equal terms: data x labels x seeds"),
    "check": ("ropaws.cli.data", "look for problems in your own images before training"),
    "train": ("ropaws.cli.train", "train a model; every setting is an option"),
    "evaluate": (
        "ropaws.cli.analyze",
        "analyze a run: accuracy, calibration, out-of-class detection, baselines",
    ),
    "report": ("ropaws.cli.analyze", "show a run on one page"),
    "compare": ("ropaws.cli.analyze", "put runs side by side"),
    "suggest": ("ropaws.cli.suggest", "suggest which unlabeled images to label next"),
    "discover": ("ropaws.cli.suggest", "find likely new classes, and train with them as classes"),
    "explore": ("ropaws.cli.explore", "look at images in the browser, label them, refit in seconds"),
    "finetune": ("ropaws.cli.train", "fine-tune a run on its labels, or train a linear probe"),
    "predict": ("ropaws.cli.predict", "label images with a run, and find those of no known class"),
    "export": ("ropaws.cli.predict", "write a run as one file that needs no ropaws, or its model card"),
    "embed": ("ropaws.cli.embed", "compute the features of images with a pretrained network"),
    "backbones": ("ropaws.cli.embed", "list the pretrained networks, or download one"),
    "cache": ("ropaws.cli.data", "show what the cache of features holds, or clear it"),
    "datasets": ("ropaws.cli.data", "list the named datasets and mixes, or download and count one"),
    "recipes": ("ropaws.cli.train", "list the published runs, or show one"),
}

# Those that send images through a network or fit to features, in this process.
COMPUTING = ("train", "evaluate", "suggest", "discover", "explore", "finetune", "predict", "embed")

HEAD = """usage: ropaws COMMAND [options]

Open-set semi-supervised learning: a few labeled images, and a large uncurated pool of unlabeled ones.

commands:
"""
OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")  # what torch says of it


def overview() -> str:
    lines = (f"  {name:<10} {summary}\n" for name, (_, summary) in COMMANDS.items())
    more = "`ropaws COMMAND --help` explains a command; --help-all shows all of its settings."
    return f"{HEAD}{''.join(lines)}\n{more}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `ropaws`. Bad input: one line, exit code 2. Stopped by the user: 130. A fault of ours:
    one line that names a file with the details, and 1.
    """
    # Libraries announce their own plans on stderr; a user of the command line can do nothing about it.
    warnings.filterwarnings("ignore", category=FutureWarning)
    try:
        _dispatch(list(sys.argv[1:] if arguments is None else arguments))
    except KeyboardInterrupt as stop:  # TrainingStopped is one, and says how to resume
        _fail(str(stop) or "interrupted", 130)
    except Exception as error:
        if os.environ.get("ROPAWS_DEBUG"):
            raise
        message = _one_line(error)
        if message is None:
            _fail(_unexpected(error), 1)
        _fail(message, 2)


def _one_line(error: Exception) -> str | None:
    """What to say of an error that a person can do something about; None for one that is a fault of ours."""
    text = " ".join(str(error).split())
    is_torch_memory = isinstance(error, RuntimeError) and any(words in text for words in OUT_OF_MEMORY)
    if isinstance(error, MemoryError) or is_torch_memory:
        reason = text[:200] or "allocation failed"
        return f"not enough memory ({reason}); use smaller images, batches or networks"
    if isinstance(error, ValueError | OSError) or type(error).__name__ == "TrainingDivergedError":
        return text
    return None


def _unexpected(error: Exception) -> str:
    """What to say of a fault of ours; the traceback goes to a file, which only this user can read."""
    details = "".join(traceback.format_exception(error))
    kind = type(error).__name__
    try:
        handle, path = tempfile.mkstemp(prefix="ropaws-error-", suffix=".txt")
        with open(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(
                f"ropaws {sys.argv[1:]}\n{platform.platform()}, Python {platform.python_version()}\n{details}"
            )
    except OSError as reason:
        print(details, file=sys.stderr)
        return f"unexpected {kind}, a fault of ropaws; please report it with the lines above ({reason})"
    return f"unexpected {kind}, a fault of ropaws; please open an issue with the details in {path}"


def _fail(message: str, code: int) -> NoReturn:
    from ropaws.core.terminal import say

    say(f"ropaws: {message}", error=True)
    sys.exit(code)


def _dispatch(arguments: list[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(overview())
        return
    if arguments[0] == "--version":
        from ropaws import __version__

        print(f"ropaws {__version__}")
        return
    name, *rest = arguments
    if name not in COMMANDS:
        raise ValueError(
            f"unknown command {name!r}, did you mean {nearest(name, COMMANDS)!r}? See `ropaws --help`"
        )
    started = core_times()
    command = getattr(importlib.import_module(COMMANDS[name][0]), name)
    if name in COMPUTING and not {"-h", "--help", "--help-all"} & set(rest):
        _leave_room(started)
    command(rest)


def _leave_room(started: CoreTimes | None) -> None:
    """See leave_room: loading torch has taken long enough to see what else the machine does."""
    from ropaws.core.hardware import leave_room
    from ropaws.core.terminal import say

    if (line := leave_room(started, os.environ)) is not None:
        say(line, error=True)

"""Entry point of `ropaws` and `python -m ropaws`."""

import os
import sys

from ropaws.launch import started_by_launcher


def main() -> None:
    """Loading torch takes seconds; Ctrl-C meanwhile ends quietly too."""
    try:
        from ropaws import cli

        cli.main()
    except KeyboardInterrupt:
        print("ropaws: interrupted", file=sys.stderr)
        sys.exit(130)
    except SystemExit as end:
        if started_by_launcher():
            _leave(end.code if isinstance(end.code, int) else 1)
        raise
    if started_by_launcher():
        _leave(0)


def _leave(code: int) -> None:
    """Without the interpreter's shutdown, in which a thread of gloo sometimes aborts, all work being done."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()

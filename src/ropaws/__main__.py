"""Entry point of `ropaws` and `python -m ropaws`."""

import os
import sys

# How the threads of torch wait for each other, unless the user has said so. Threads that spin make training
# several times slower as soon as another program needs a core; threads that sleep at once make it slower on a
# quiet machine, because waking up takes longer than most waits. benchmarks/busy.py compares. GOMP_SPINCOUNT
# is for the OpenMP of GCC, which torch brings on Linux; others know the policy alone.
WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "3000"}


def main() -> None:
    """Run the command line. Loading torch takes seconds; Ctrl-C during that time ends quietly too."""
    if not WAITING.keys() & os.environ.keys():
        os.environ.update(WAITING)  # read when torch is loaded
    # torch would tell each process of a run that looking for unused weights takes time: methods need it.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        from ropaws.cli.main import main as run_command

        run_command()
    except KeyboardInterrupt:
        print("ropaws: interrupted", file=sys.stderr)
        sys.exit(130)
    except SystemExit as end:
        if _has_joined_others():
            _leave(end.code if isinstance(end.code, int) else 1)
        raise
    if _has_joined_others():
        _leave(0)


def _has_joined_others() -> bool:
    """Is this one of several processes? Without torch loaded there was nothing to join."""
    distributed = sys.modules.get("ropaws.core.distributed")
    return distributed is not None and distributed.planned_place().size > 1


def _leave(code: int) -> None:
    """End without the interpreter's shutdown, in which a gloo thread sometimes aborts after all work."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()

"""Entry point of `ropaws` and `python -m ropaws`."""

import sys


def main() -> None:
    """Loading torch takes seconds; Ctrl-C meanwhile ends quietly too."""
    try:
        from ropaws import cli

        cli.main()
    except KeyboardInterrupt:
        sys.exit("ropaws: interrupted")


if __name__ == "__main__":
    main()

"""``python -m specli`` and the ``specli`` script."""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Run the command line and exit with its code."""
    # Until a command watches SIGINT itself, Ctrl-C ends the process at once: no traceback from half an import.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from specli.cli.main import run

    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()

"""The command `moeflux`."""

from __future__ import annotations

import signal
import sys

from . import _native


def main() -> None:
    """Runs the command line. The extension handles signals itself."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    program = [sys.executable, "-m", "moeflux"]
    sys.exit(_native.run_command(program, sys.argv[1:]))

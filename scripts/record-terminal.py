#!/usr/bin/env python3
"""Records a command in a terminal as an animated SVG.

usage: scripts/record-terminal.py OUT.svg COMMAND [ARG ...]

The prompt line is typed first, then the command's output appears as it came. Renderers without CSS
animations show the last frame. The program is shown as `moeflux`, whatever its path.
"""

import html
import os
import pty
import re
import select
import subprocess
import sys
import time

COLUMNS, FONT, LINE = 88, 14, 20
WIDTH = FONT * 0.602


def record(command):
    """Runs the command on a pseudo-terminal. Yields (seconds, text)."""
    leader, follower = pty.openpty()
    environment = dict(os.environ, COLUMNS=str(COLUMNS), LINES="24", TERM="dumb")
    start = time.monotonic()
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=follower, stderr=follower, env=environment
    )
    os.close(follower)
    frames = []
    while True:
        ready, _, _ = select.select([leader], [], [], 0.05)
        if ready:
            try:
                data = os.read(leader, 65536)
            except OSError:
                break
            if not data:
                break
            frames.append((time.monotonic() - start, data.decode(errors="replace")))
        elif process.poll() is not None:
            break
    if process.wait() != 0:
        sys.exit(f"the command failed with {process.returncode}")
    return frames


def wrapped(frames):
    """Places each piece of text: (seconds, row, column, text)."""
    row, column, placed = 0, 0, []
    for seconds, text in frames:
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r\n", "\n")
        for piece in re.findall(r"\n|[^\n]+", text):
            while piece:
                if piece == "\n":
                    row, column, piece = row + 1, 0, ""
                    continue
                shown, piece = piece[: COLUMNS - column], piece[COLUMNS - column :]
                placed.append((seconds, row, column, shown))
                column += len(shown)
                if piece:
                    row, column = row + 1, 0
    return placed


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    out, command = sys.argv[1], sys.argv[2:]
    words = ["moeflux"] + [w if re.fullmatch(r"[\w./=-]+", w) else f'"{w}"' for w in command[1:]]
    prompt = "$ " + " ".join(words)
    typed = 0.03 * len(prompt) + 0.4
    placed = wrapped([(0.03 * i, c) for i, c in enumerate(prompt)] + [(0.0, "\n")])
    first_row = placed[-1][1] + 1
    for seconds, row, column, text in wrapped(record(command)):
        placed.append((typed + seconds, first_row + row, column, text))
    height = (max(row for _, row, _, _ in placed) + 2) * LINE
    width = COLUMNS * WIDTH + 32
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height + 16}" '
        f'width="{width:.0f}" height="{height + 16}" role="img" aria-label="{html.escape(prompt)}">',
        "<style>@keyframes show{from{opacity:0}to{opacity:1}}"
        "text{animation:show 1ms backwards;white-space:pre}</style>",
        '<rect width="100%" height="100%" rx="8" fill="#14161b"/>',
        f'<g font-family="ui-monospace,Menlo,Consolas,monospace" font-size="{FONT}" fill="#d7dae0">',
    ]
    for seconds, row, column, text in placed:
        x, y = 16 + column * WIDTH, 16 + (row + 1) * LINE - 5
        lines.append(
            f'<text x="{x:.1f}" y="{y}" textLength="{len(text) * WIDTH:.1f}" '
            f'style="animation-delay:{seconds:.2f}s">{html.escape(text)}</text>'
        )
    with open(out, "w") as file:
        file.write("\n".join(lines + ["</g>", "</svg>", ""]))


main()

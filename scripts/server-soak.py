#!/usr/bin/env python3
"""Loads a running `moeflux serve` with random clients, of which many fail.

    moeflux serve --port 9000 --sessions 4 --exact &
    scripts/server-soak.py --port 9000 --pid $!

Undisturbed clients ask for answers that are known from when they were alone: each must be the same
to the bit, which holds under --exact. The others leave in any phase, read slowly, or send wrong
requests. RSS after the last request must be within 5 % of that after a fifth of them. Python's
standard library only; needs /proc for RSS.
"""

import argparse
import http.client
import json
import random
import socket
import sys
import threading
import time
from collections import Counter

CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
TITLES = ["The Fox and the Crow", "The Lion and the Mouse", "The Ant and the Grasshopper", "Rain"]
WRONG = [
    (CHAT, b"{"),
    (CHAT, b'{"messages": []}'),
    (MESSAGES, b'{"messages": [{"role": "king"}]}'),
    (MESSAGES, b"[" * 10_000),
    (CHAT, b'{"messages": [{"role": "user", "content": "\\ud800"}]}'),
    ("/nowhere", b"{}"),
    (CHAT, b'{"messages": [{"role": "user", "content": "' + b"x " * 100_000 + b'"}]}'),
]


def ask(index, tokens):
    """Path and body of a request, by its number."""
    title = TITLES[index % len(TITLES)]
    body = {
        "messages": [{"role": "user", "content": f"Tell me the fable of {title}."}],
        "max_tokens": tokens,
        "temperature": index % 3,
        "seed": index % 12,
        "stream": index % 2 == 0,
    }
    return (MESSAGES if index % 4 > 1 else CHAT), body


class Soak:
    """A run against one server."""

    def __init__(self, args):
        self.args = args
        self.random = random.Random(args.seed)
        self.lock = threading.Lock()
        self.counts = Counter()
        self.problems = []
        self.slowest_error = 0.0
        self.alone = {}

    def connect(self):
        return http.client.HTTPConnection(self.args.host, self.args.port, timeout=120)

    def post(self, path, body):
        """Status and bytes of the response."""
        connection = self.connect()
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("POST", path, data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = response.read()
        connection.close()
        return response.status, answer

    def bytes(self, path, body):
        """A request."""
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {self.args.host}\r\n"
        return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data

    def open(self, path, body):
        """A socket with a request whose response was not read."""
        stream = socket.create_connection((self.args.host, self.args.port), timeout=120)
        stream.sendall(self.bytes(path, body))
        return stream

    def problem(self, text):
        with self.lock:
            self.problems.append(text)

    def text(self, path, body):
        """Text of an answer, or None if the waiting line is full."""
        status, answer = self.post(path, body)
        if status in (429, 529):
            return None
        if status != 200:
            raise ValueError(f"{path}: {status} {answer[:200]}")
        if not body["stream"]:
            answer = json.loads(answer)
            if path == CHAT:
                return answer["choices"][0]["message"]["content"]
            return "".join(block.get("text", "") for block in answer["content"])
        text = ""
        lines = [line[6:] for line in answer.decode().splitlines() if line.startswith("data: ")]
        for line in lines:
            if line == "[DONE]":
                continue
            event = json.loads(line)
            if path == CHAT:
                if event["choices"]:
                    text += event["choices"][0]["delta"].get("content") or ""
            else:
                text += event.get("delta", {}).get("text", "")
        if path == CHAT and lines[-1] != "[DONE]":
            raise ValueError("a stream without an end")
        return text

    def undisturbed(self, index):
        path, body = ask(index, 48)
        text = self.text(path, body)
        if text is None:
            return "busy"
        if text != self.alone[index % 12]:
            self.problem(f"request {index}: {text!r} differs from {self.alone[index % 12]!r}")
        return "undisturbed"

    def leaves(self, index, dice):
        path, body = ask(index, 400)
        stream = self.open(path, body)
        if dice < 0.3:
            time.sleep(dice)
        elif dice < 0.6:
            stream.recv(300)
        stream.close()
        return "left"

    def cut(self, index, dice):
        path, body = ask(index, 48)
        whole = self.bytes(path, body)
        stream = socket.create_connection((self.args.host, self.args.port), timeout=120)
        stream.sendall(whole[: int(len(whole) * dice)])
        stream.close()
        return "cut off"

    def slow(self, index):
        path, body = ask(2 * index, 200)
        stream = self.open(path, body)
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        for _ in range(20):
            if not stream.recv(64):
                break
            time.sleep(0.02)
        stream.close()
        return "slow"

    def wrong(self, index):
        path, body = WRONG[index % len(WRONG)]
        since = time.monotonic()
        status, answer = self.post(path, body)
        with self.lock:
            self.slowest_error = max(self.slowest_error, time.monotonic() - since)
        if not 400 <= status < 500 or "message" not in json.loads(answer)["error"]:
            self.problem(f"{path} {body[:60]!r}: {status} {answer[:200]!r}")
        return "wrong"

    def client(self, index, kind, dice):
        try:
            if kind < 0.4:
                done = self.undisturbed(index)
            elif kind < 0.6:
                done = self.leaves(index, dice)
            elif kind < 0.7:
                done = self.cut(index, dice)
            elif kind < 0.8:
                done = self.slow(index)
            else:
                done = self.wrong(index)
        except Exception as error:  # pylint: disable=broad-except
            self.problem(f"request {index}: {type(error).__name__} {error}")
            done = "failed"
        with self.lock:
            self.counts[done] += 1

    def wait_idle(self):
        """Waits until no request runs."""
        for _ in range(600):
            connection = self.connect()
            connection.request("GET", "/metrics")
            lines = connection.getresponse().read().decode().splitlines()
            connection.close()
            gauges = [line for line in lines if line.startswith("moeflux_requests_")]
            gauges = [line.split() for line in gauges if "{" not in line]
            if all(float(v) == 0 for name, v in gauges if name.endswith(("running", "queued"))):
                return
            time.sleep(0.1)
        self.problem("the server is not idle a minute after the last client left")

    def rss(self):
        """Resident memory in KiB that is not a file's."""
        with open(f"/proc/{self.args.pid}/status", encoding="ascii") as status:
            fields = dict(line.split(":", 1) for line in status)
        return sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem"))

    def run(self):
        for index in range(12):
            self.alone[index] = self.text(*ask(index, 48))
        sizes, total = {}, self.args.requests
        first = max(total // 5, 1)
        since = time.monotonic()
        done = 0
        for until in (first, total):
            indexes = list(range(done, until))
            dice = {i: (self.random.random(), self.random.random()) for i in indexes}

            def work(indexes=indexes, dice=dice):
                while True:
                    with self.lock:
                        if not indexes:
                            return
                        index = indexes.pop(0)
                    self.client(index, *dice[index])

            threads = [threading.Thread(target=work) for _ in range(self.args.clients)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            done = until
            self.wait_idle()
            if self.args.pid:
                sizes[until] = self.rss()
        seconds = time.monotonic() - since
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.counts.items()))
        print(f"{total} requests in {seconds:.0f} s: {kinds}")
        print(f"slowest refusal: {1000 * self.slowest_error:.0f} ms")
        if sizes:
            growth = sizes[total] / sizes[first] - 1
            mib = [f"{size / 1024:.1f} MiB after {count}" for count, size in sizes.items()]
            print(f"memory: {', '.join(mib)}: {100 * growth:+.1f} %")
            if growth > 0.05:
                self.problem("memory grew by more than 5 %")
        for problem in self.problems[:20]:
            print(problem, file=sys.stderr)
        return 1 if self.problems else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--pid", type=int, help="process of the server, for its memory")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=12, help="clients at once")
    parser.add_argument("--seed", type=int, default=1)
    return Soak(parser.parse_args()).run()


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Measures `moeflux serve` beside `moeflux bench`: prints the rows of docs/measured/server.md.

    scripts/server-figures.py target/release/moeflux

Starts servers of the built-in model, each with one compute thread, whose CPU time is then the
worker's. CPU times are those of /proc/PID/task/*/schedstat, which other processes change little;
server and bench alternate, and medians are quoted. Python's standard library only.
"""

import argparse
import contextlib
import json
import os
import re
import resource
import selectors
import socket
import statistics
import subprocess
import sys
import time

PROMPT = 32
SHORT, LONG = 32, 288
SESSIONS = 8
ENGINE = ["--threads", "1", "--ctx", "2048"]
HOST = "127.0.0.1"
CHAT = "/v1/chat/completions"
# Threads of the engine: all others are the server's.
ENGINE_THREADS = ("serving", "compute", "read")


class Server:
    """A running server. Ends with its block."""

    def __init__(self, binary, sessions):
        command = [binary, "serve", "--port", "0", "--quiet", "--sessions", str(sessions), *ENGINE]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.port = int(re.search(r":(\d+)/v1", self.process.stdout.readline()).group(1))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()

    def cpu(self):
        """Seconds of CPU of the worker, and of all threads that are not the engine's."""
        worker, others = 0, 0
        tasks = f"/proc/{self.process.pid}/task"
        for task in os.listdir(tasks):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                with open(f"{tasks}/{task}/comm", encoding="ascii") as file:
                    name = file.read().strip()
                with open(f"{tasks}/{task}/schedstat", encoding="ascii") as file:
                    seconds = int(file.read().split()[0]) / 1e9
                if name == "serving":
                    worker += seconds
                elif not name.startswith(ENGINE_THREADS):
                    others += seconds
        return worker, others

    def memory(self):
        """Bytes of resident memory that is not a file's."""
        with open(f"/proc/{self.process.pid}/status", encoding="ascii") as status:
            fields = dict(line.split(":", 1) for line in status)
        return sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem")) << 10

    def send(self, path, body):
        """A socket with a request whose response was not read."""
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n"
        stream = socket.create_connection((HOST, self.port), timeout=120)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        return stream


def chat(index, tokens):
    """A greedy answer of at most `tokens` tokens."""
    content = f"Tell me a long fable of {index} crows."
    return {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def read(streams):
    """Reads streams to their ends: the times of their events."""
    times = {stream: [] for stream in streams}
    tails = {stream: b"" for stream in streams}
    with selectors.DefaultSelector() as selector:
        for stream in streams:
            selector.register(stream, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                stream = key.fileobj
                data = stream.recv(1 << 16)
                if not data:
                    selector.unregister(stream)
                    stream.close()
                    continue
                now = time.perf_counter()
                times[stream] += [now] * data.count(b"data: {")
                tails[stream] = (tails[stream] + data)[-2000:]
    for tail in tails.values():
        if not tail.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            raise ValueError(f"a stream without an end: {tail[-300:]!r}")
    usage = [int(re.findall(rb'"completion_tokens":(\d+)', tail)[-1]) for tail in tails.values()]
    return list(times.values()), usage


def bench(binary, tokens, sessions):
    """Seconds of CPU of a bench, and its tokens per second."""
    command = [binary, "bench", "--json", "-r", "1", "-p", str(PROMPT), "-n", str(tokens)]
    command += ENGINE[:2] + (["--sessions", str(sessions)] if sessions > 1 else [])
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    rate = json.loads(done.stdout)["decode"]["tokens_per_second"]["median"]
    return cpu, rate


def quantiles(values):
    values = sorted(values)
    middle = statistics.median(values)
    return f"{middle:.4g} ({values[0]:.4g} to {values[-1]:.4g})"


def decode(args, sessions):
    """CPU and time per token of `sessions` streams at once, beside bench."""
    with Server(args.binary, sessions) as server:
        rows = {name: [] for name in ("worker", "others", "rate", "bench", "bench rate")}
        # Prompts are in the prefix cache from then on.
        read([server.send(CHAT, chat(index, 1)) for index in range(sessions)])
        for _ in range(args.repeats):
            spent, counts = {}, {}
            for tokens in (SHORT, LONG):
                before = server.cpu()
                streams = [server.send(CHAT, chat(index, tokens)) for index in range(sessions)]
                times, usage = read(streams)
                spent[tokens] = [b - a for a, b in zip(before, server.cpu())]
                counts[tokens] = sum(usage)
            count = counts[LONG] - counts[SHORT]
            rows["worker"].append(1e6 * (spent[LONG][0] - spent[SHORT][0]) / count)
            rows["others"].append(1e6 * (spent[LONG][1] - spent[SHORT][1]) / count)
            # From when all have started to when the first one ends.
            since, until = max(t[1] for t in times), min(t[-1] for t in times)
            within = sum(1 for t in times for at in t if since < at <= until)
            rows["rate"].append(within / (until - since))
            short, long = (bench(args.binary, tokens, sessions) for tokens in (SHORT, LONG))
            rows["bench"].append(1e6 * (long[0] - short[0]) / (sessions * (LONG - SHORT)))
            rows["bench rate"].append(long[1])
    print(f"## {sessions} at once, up to {LONG} tokens each, {args.repeats} times")
    print(f"other threads, us of CPU per token: {quantiles(rows['others'])}")
    print(f"worker, us of CPU per token: {quantiles(rows['worker'])}")
    print(f"bench, us of CPU per token: {quantiles(rows['bench'])}")
    share = statistics.median(rows["worker"]) / statistics.median(rows["bench"])
    print(f"worker to bench: {100 * share:.1f} %")
    print(f"tokens/s of all: {quantiles(rows['rate'])}")
    print(f"tokens/s of bench: {quantiles(rows['bench rate'])}")
    share = statistics.median(rows["rate"]) / statistics.median(rows["bench rate"])
    print(f"server to bench: {100 * share:.1f} %")


def chats(args):
    """CPU of the server's threads per token in each API, and a cached prompt's first byte."""
    with Server(args.binary, 2) as server:
        for path in (CHAT, "/v1/messages"):
            per_token = []
            for index in range(args.repeats):
                counts, spent = [], []
                for tokens in (4, 200):
                    before = server.cpu()[1]
                    with contextlib.closing(server.send(path, chat(index, tokens))) as stream:
                        text = b"".join(iter(lambda s=stream: s.recv(1 << 16), b""))
                    spent.append(server.cpu()[1] - before)
                    usage = re.findall(rb'"(?:completion|output)_tokens":(\d+)', text)
                    counts.append(int(usage[-1]))
                if counts[1] - counts[0] > 20:
                    per_token.append(1e6 * (spent[1] - spent[0]) / (counts[1] - counts[0]))
            print(f"{path}: other threads, us of CPU per token: {quantiles(per_token)}")
            first, rest = [], []
            for _ in range(20 * args.repeats):
                worker = server.cpu()[0]
                since = time.perf_counter()
                stream = server.send(path, chat(0, 1))
                data = b""
                while not re.search(rb'"content":"[^"]|"text":"[^"]', data):
                    data += stream.recv(1 << 16)
                elapsed = time.perf_counter() - since
                stream.close()
                # The time of a thread counts once it waits.
                time.sleep(0.01)
                first.append(1e3 * elapsed)
                rest.append(1e3 * (elapsed - (server.cpu()[0] - worker)))
            print(f"{path}: cached prompt, ms to the first text: {quantiles(first)}")
            print(f"{path}: of which not the worker's CPU: {quantiles(rest)}")


def idle(args):
    """Memory of idle connections."""
    with Server(args.binary, 1) as server:
        get = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
        for name, data in (("never used", b""), ("after a request", get)):
            before, count = server.memory(), 400
            streams = [socket.create_connection((HOST, server.port)) for _ in range(count)]
            for stream in streams:
                stream.sendall(data)
                if data:
                    stream.recv(1000)
            time.sleep(1)
            each = (server.memory() - before) / count / 1024
            print(f"idle connection, {name}: {each:.1f} KiB")
            for stream in streams:
                stream.close()
            time.sleep(1)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("binary")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--only", choices=["decode", "chats", "idle", "many"])
    args = parser.parse_args()
    parts = {
        "idle": lambda: idle(args),
        "chats": lambda: chats(args),
        "decode": lambda: decode(args, 1),
        "many": lambda: decode(args, SESSIONS),
    }
    for name, part in parts.items():
        if args.only in (None, name):
            part()
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())

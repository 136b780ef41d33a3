#!/usr/bin/env python3
"""Measures `moeflux serve` under clients that each send one request after the other.

    scripts/server-load.py target/release/moeflux --clients 8,32 -- --model DIR --device gpu

What follows `--` goes to the server and to `moeflux bench`, which measures the same batches
without HTTP. Prompts are random tokens, so none is in the prefix cache. Python's standard library
only.
"""

import argparse
import asyncio
import json
import random
import re
import statistics
import subprocess
import sys
import time

HOST = "127.0.0.1"


class Client:
    """Sends requests one after the other and keeps the times of their events."""

    def __init__(self, port, args, seed):
        self.port, self.args, self.random = port, args, random.Random(seed)
        self.waits, self.gaps, self.events = [], [], []
        self.tokens = 0

    async def run(self):
        for _ in range(self.args.requests):
            await self.request()

    async def request(self):
        prompt = [self.random.randrange(32, 250) for _ in range(self.args.prompt)]
        body = {"prompt": prompt, "max_tokens": self.args.tokens, "temperature": 0}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        reader, writer = await asyncio.open_connection(HOST, self.port)
        since = last = time.perf_counter()
        writer.write(head.encode() + data)
        text = b""
        while chunk := await reader.read(1 << 16):
            now = time.perf_counter()
            text += chunk
            for _ in range(chunk.count(b"data: {")):
                (self.waits if last == since else self.gaps).append(now - last)
                self.events.append(now)
                last = now
        writer.close()
        if b"data: [DONE]" not in text:
            raise ValueError(f"a stream without an end: {text[:300]!r}")
        self.tokens += int(re.findall(rb'"completion_tokens":(\d+)', text)[-1])


def measure(binary, args, clients):
    """Figures of `clients` clients at once."""
    command = [binary, "serve", "--port", "0", "--quiet", "--sessions", str(clients)]
    command += ["--ctx", str(args.prompt + args.tokens + 64), *args.engine]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            port = int(re.search(r":(\d+)/v1", server.stdout.readline()).group(1))
            # Kernels are compiled for the first requests.
            warm = argparse.Namespace(**{**vars(args), "requests": 1, "tokens": 4})

            async def run(settings, seed):
                all_clients = [Client(port, settings, seed + i) for i in range(clients)]
                await asyncio.gather(*(client.run() for client in all_clients))
                return all_clients

            asyncio.run(run(warm, 1000))
            since = time.perf_counter()
            done = asyncio.run(run(args, 1))
        finally:
            server.terminate()
    # Until the first client is done, all are at work.
    until = min(client.events[-1] for client in done)
    count = sum(1 for client in done for at in client.events if at <= until)
    # Some events have several tokens, and those of the ends have none.
    events = sum(len(client.events) for client in done)
    count *= sum(client.tokens for client in done) / events
    gaps = [gap for client in done for gap in client.gaps]
    waits = [wait for client in done for wait in client.waits]
    # Without prefill: the share of time in which a token follows another one.
    decoding = sum(gaps) / (sum(gaps) + sum(waits))
    return count / (until - since), decoding, waits, gaps


def bench(binary, args, clients):
    """Tokens per second that batches of `clients` sessions decode."""
    command = [binary, "bench", "--json", "-r", "2", "-p", str(args.prompt), "-n", str(args.tokens)]
    command += ["--sessions", str(clients), *args.engine]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    found = json.loads(done.stdout)["contexts"][0]
    prefill = found["prefill"]["tokens_per_second"]["median"]
    return prefill, found["decode"]["tokens_per_second"]["median"]


def milliseconds(values):
    cuts = statistics.quantiles(values, n=100)
    return f"{1e3 * statistics.median(values):.1f} ms (p99 {1e3 * cuts[98]:.1f})"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("binary")
    parser.add_argument("--clients", default="8,32", help="numbers of clients")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of an answer")
    parser.add_argument("--requests", type=int, default=3, help="requests of each client")
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args = parser.parse_args(sys.argv[1:end])
    args.engine = sys.argv[end + 1 :]
    for clients in map(int, args.clients.split(",")):
        rate, decoding, waits, gaps = measure(args.binary, args, clients)
        prefill, decode = bench(args.binary, args, clients)
        print(f"## {clients} clients, prompts of {args.prompt}, answers of {args.tokens} tokens")
        print(f"first token after {milliseconds(waits)}, then every {milliseconds(gaps)}")
        print(f"tokens/s of all: {rate:.0f}, of decoding alone {rate / decoding:.0f}")
        seconds = args.prompt / prefill + args.tokens / decode
        print(f"bench: {decode:.0f} in decode; {args.tokens / seconds:.0f} with prefill")
        print(f"server to bench with prefill: {100 * rate * seconds / args.tokens:.0f} %")


if __name__ == "__main__":
    main()

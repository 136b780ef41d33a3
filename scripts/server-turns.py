#!/usr/bin/env python3
"""Measures the third turn of conversations that take turns on a server with fewer sessions, against
that of conversations that never leave their session.

    moeflux synth qwen3.6-35b-a3b --layers 8 --out MODEL
    scripts/server-turns.py target/release/moeflux MODEL --memory 8GiB --ctx 4096

The time of a turn is that of an answer of one token. Also prints the peak memory, the budget and
the memory of the prefix cache. Python's standard library only.
"""

import argparse
import http.client
import json
import pathlib
import random
import re
import statistics
import subprocess
import time

HOST = "127.0.0.1"
SESSIONS = 4
TURNS = 3
WORDS = ["fox", "crow", "cheese", "tree", "wolf", "sheep"]


class Server:
    """A running server. Ends with its block."""

    def __init__(self, args):
        command = [args.binary, "serve", "--port", "0", "--quiet", "--model", args.model]
        command += ["--sessions", str(SESSIONS), *args.engine]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.port = int(re.search(r":(\d+)/v1", self.process.stdout.readline()).group(1))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()

    def request(self, method, path, body=None):
        connection = http.client.HTTPConnection(HOST, self.port, timeout=600)
        connection.request(method, path, body and json.dumps(body))
        response = connection.getresponse()
        text = response.read()
        if response.status != 200:
            raise ValueError(text)
        return json.loads(text)

    def peak(self):
        """Peak memory in bytes."""
        status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+)", status).group(1)) << 10

    def turn(self, messages, text, tokens):
        """A turn: seconds, and the tokens of the prompt that were computed."""
        messages.append({"role": "user", "content": text})
        body = {"messages": messages, "temperature": 0, "max_tokens": tokens}
        start = time.perf_counter()
        answer = self.request("POST", "/v1/chat/completions", body)
        seconds = time.perf_counter() - start
        content = answer["choices"][0]["message"]["content"] or ""
        messages.append({"role": "assistant", "content": content})
        usage = answer["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return seconds, usage["prompt_tokens"] - cached


def talk(server, conversations, seed, words):
    """Turns of several conversations, one after another: those of the last turn."""
    texts = random.Random(seed)
    messages = [[] for _ in range(conversations)]
    for turn in range(TURNS):
        last = turn + 1 == TURNS
        turns = []
        for conversation in messages:
            text = " ".join(texts.choice(WORDS) for _ in range(words if turn == 0 else words // 4))
            turns.append(server.turn(conversation, text, 1 if last else 8))
    return turns


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("binary")
    parser.add_argument("model")
    parser.add_argument("--conversations", default="8,32")
    parser.add_argument("--words", type=int, default=80)
    args, args.engine = parser.parse_known_args()
    print("| conversations | seconds of the third turn | computed tokens | against staying |")
    print("|---|---|---|---|")
    for count in map(int, args.conversations.split(",")):
        with Server(args) as server:
            talk(server, 1, 0, args.words)
            turns = talk(server, count, 1, args.words)
            alone = [talk(server, 1, 2 + i, args.words)[0] for i in range(min(count, 12))]
            times = [statistics.median(seconds for seconds, _ in each) for each in (turns, alone)]
            computed = [max(tokens for _, tokens in each) for each in (turns, alone)]
            ratio = f"{times[0] / times[1]:.2f}"
            print(f"| {count} in turn | {times[0]:.3f} | {computed[0]} | {ratio} |")
            print(f"| {len(alone)} that stay | {times[1]:.3f} | {computed[1]} | |")
            plan = server.request("GET", "/moeflux/plan")
            for pool in plan["pools"]:
                lines = {line["name"]: line["bytes"] for line in pool["lines"]}
                states = lines.get("marks", 0) >> 20
                print(f"{pool['place']}: {pool['budget'] >> 20} MiB, prefix cache {states} MiB")
            print(f"peak: {server.peak() >> 20} MiB", flush=True)


if __name__ == "__main__":
    main()

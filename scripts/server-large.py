#!/usr/bin/env python3
"""Measures prefix reuse and grammars of `moeflux serve` on a large model: prints the rows of
docs/measured/server.md.

    moeflux synth qwen3.6-35b-a3b --layers 8 --out MODEL
    scripts/server-large.py target/release/moeflux MODEL

The model is copied by links, with a template that has tools. A conversation with tools and a system
prompt of 10,000 tokens is followed by another one, by its second turn, and by both after a restart.
Then eight streams with different schemas alternate with eight without. Python's standard library
only.
"""

import argparse
import http.client
import json
import os
import pathlib
import re
import statistics
import subprocess
import tempfile
import threading
import time

HOST = "127.0.0.1"
SESSIONS = 8
TOKENS = 48
ROUNDS = 5
TEMPLATE = pathlib.Path(__file__).parent / "tool-model" / "json.jinja"


class Server:
    """A running server. Ends with its block."""

    def __init__(self, args, model, *options):
        command = [args.binary, "serve", "--port", "0", "--quiet", "--model", model]
        command += ["--sessions", str(SESSIONS), *args.engine, *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.port = int(re.search(r":(\d+)/v1", self.process.stdout.readline()).group(1))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()

    def chat(self, body):
        """Streams an answer: its message, usage, and the times of the request and its events."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=600)
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        times = [time.perf_counter()]
        connection.request("POST", "/v1/chat/completions", json.dumps(body))
        response = connection.getresponse()
        if response.status != 200:
            raise ValueError(response.read())
        text, usage = "", None
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                content = choice["delta"].get("content")
                if content:
                    text += content
                    times.append(time.perf_counter())
        return {"role": "assistant", "content": text}, usage, times


def prefixes(args, model):
    """Computed tokens and times to the first token of a long conversation."""
    words = [f"Rule {i}: read files with care, and say what is in them." for i in range(150)]
    system = {"role": "system", "content": " ".join(words)}
    schema = {"type": "object", "properties": {"path": {"type": "string"}}}
    function = {"name": "read", "description": "Reads a file.", "parameters": schema}
    tools = [{"type": "function", "function": function}]
    first = [system, {"role": "user", "content": "Is it there?"}]
    other = [system, {"role": "user", "content": "Where is it?"}]

    def ask(server, name, messages):
        body = {"messages": messages, "tools": tools, "temperature": 0, "max_tokens": 16}
        message, usage, times = server.chat(body)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        computed = usage["prompt_tokens"] - cached
        wait = times[1] - times[0] if len(times) > 1 else float("nan")
        prompt = usage["prompt_tokens"]
        print(f"| {name} | {prompt} | {computed} | {wait:.3f} s |", flush=True)
        return message

    print("| request | prompt tokens | computed | first text |")
    print("|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        with Server(args, model, "--prefix-cache", folder) as server:
            answer = ask(server, "first", first)
            ask(server, "another conversation", other)
            second = [*first, answer, {"role": "user", "content": "And the other one?"}]
            answer = ask(server, "second turn", second)
        with Server(args, model, "--prefix-cache", folder) as server:
            third = [*second, answer, {"role": "user", "content": "And then?"}]
            ask(server, "third turn, after a restart", third)
            ask(server, "a new conversation, after a restart",
                [system, {"role": "user", "content": "Which one is it?"}])


def schema(index):
    """A schema whose answers do not end within the measurement."""
    item = [{"type": "integer"}, {"type": "string"}, {"enum": ["red", "green", "blue"]}][index % 3]
    properties = {f"key{index}": item, "list": {"type": "array", "items": item, "minItems": 1000}}
    return {"type": "object", "properties": properties, "required": list(properties),
            "additionalProperties": False}


def streams(server, formats):
    """Tokens per second of one stream per format, and the slowest first token."""
    results = [None] * len(formats)

    def run(index):
        body = {
            "messages": [{"role": "user", "content": f"Number {index}"}],
            "max_tokens": TOKENS, "temperature": 1, "seed": index,
        }
        if formats[index] is not None:
            named = {"name": "answer", "strict": True, "schema": formats[index]}
            body["response_format"] = {"type": "json_schema", "json_schema": named}
        results[index] = server.chat(body)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(formats))]
    start = time.perf_counter()
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    took = time.perf_counter() - start
    tokens = sum(usage["completion_tokens"] for _, usage, _ in results)
    waits = [times[1] - times[0] for _, _, times in results if len(times) > 1]
    return tokens / took, max(waits)


def grammars(args, model):
    with Server(args, model) as server:
        plain, bound = [None] * SESSIONS, [schema(i) for i in range(SESSIONS)]
        streams(server, plain)
        streams(server, bound)
        rates = {"plain": [], "bound": []}
        for _ in range(ROUNDS):
            rates["plain"].append(streams(server, plain)[0])
            rates["bound"].append(streams(server, bound)[0])
        one = {"plain": [], "bound": []}
        for _ in range(ROUNDS):
            one["plain"].append(streams(server, plain[:1])[1])
            one["bound"].append(streams(server, bound[:1])[1])
    rate = {name: statistics.median(values) for name, values in rates.items()}
    wait = {name: statistics.median(values) * 1e3 for name, values in one.items()}
    ratio = rate["bound"] / rate["plain"]
    print(f"eight streams: {rate['plain']:.1f} tokens/s, with schemas {rate['bound']:.1f}: "
          f"{ratio:.3f}")
    print(f"first text of one: {wait['plain']:.1f} ms, with a schema {wait['bound']:.1f} ms")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("binary")
    parser.add_argument("model")
    parser.add_argument("engine", nargs="*", help="options of the engine, behind --")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for path in pathlib.Path(args.model).resolve().iterdir():
            if path.name != "chat_template.jinja":
                os.symlink(path, pathlib.Path(folder) / path.name)
        (pathlib.Path(folder) / "chat_template.jinja").write_text(TEMPLATE.read_text())
        prefixes(args, folder)
        grammars(args, folder)


if __name__ == "__main__":
    main()

"""Tests of the package with Ray on two nodes, in the network namespaces "a" and "b" that
scripts/ray.sh makes. They run in "a", and kill whatever is in "b"."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import threading
import time
import unittest
import urllib.request

import openai
import ray
from ray import serve

import moeflux.ray

MODEL = "tales-18m"
OPEN = {"device": "cpu", "sessions": 2, "memory": "256MiB", "threads": 1}
URL = "http://127.0.0.1:8000"
ADDRESSES = {"a": "10.77.0.1", "b": "10.77.0.2"}
PORT = 6399
# Seconds until a node, a replica or a row must be there.
PATIENCE = 120


def start_node(namespace):
    """Starts a node with two CPUs, as Ray counts them."""
    address = ADDRESSES[namespace]
    role = (
        ["--head", f"--port={PORT}", "--include-dashboard=false"]
        if namespace == "a"
        else [f"--address={ADDRESSES['a']}:{PORT}"]
    )
    options = ["--num-cpus=2", "--object-store-memory=200000000", "--disable-usage-stats"]
    command = ["ip", "netns", "exec", namespace, "ray", "start", f"--node-ip-address={address}"]
    started = subprocess.run(
        [*command, *role, *options], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    if started.returncode != 0:
        raise RuntimeError(started.stderr)


def wait_for(condition):
    """Waits until a condition is true."""
    end = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"expected {condition} within {PATIENCE} s")
        time.sleep(0.1)


def nodes():
    """Addresses of the nodes that are alive."""
    return {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}


def pids(*command):
    """Processes that a command lists."""
    listed = subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout
    return [int(pid) for pid in listed.split()]


def workers():
    return pids("pgrep", "-f", "^ray::.*Placed")


def replicas():
    return pids("pgrep", "-f", "^ray::ServeReplica:default:Replica")


def kill(pids):
    for pid in pids:
        # Those that end with another are gone by then.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def setUpModule():
    start_node("a")
    ray.init(f"{ADDRESSES['a']}:{PORT}", log_to_driver=False, logging_level="ERROR")


def two_nodes():
    if len(nodes()) < 2:
        start_node("b")
        wait_for(lambda: len(nodes()) == 2)


class Placed(moeflux.ray.Generate):
    """Says where a row was answered."""

    def __call__(self, batch):
        done = super().__call__(batch)
        context = ray.get_runtime_context()
        done["node"] = [context.get_node_id()] * len(done["answer"])
        done["worker"] = [os.getpid()] * len(done["answer"])
        return done


class Data(unittest.TestCase):
    COUNT = 400
    OPTIONS = {"max_tokens": 20, "temperature": 3.0}

    def setUp(self):
        two_nodes()

    def answers(self, kill_at):
        """Answers all rows, and calls the functions of `kill_at` at their numbers of rows. Checks
        that each row is there once, with its text."""
        ray.data.DataContext.get_current().enable_progress_bars = False
        rows = [{"id": i, "prompt": f"Tell me the fable number {i}."} for i in range(self.COUNT)]
        answered = ray.data.from_items(rows, override_num_blocks=50).map_batches(
            Placed,
            fn_constructor_args=(MODEL,),
            fn_constructor_kwargs={"open": OPEN, **self.OPTIONS},
            batch_size=8,
            compute=ray.data.ActorPoolStrategy(size=2),
            # One for each node.
            num_cpus=2,
        )
        got, since = [], time.monotonic()
        for row in answered.iter_rows():
            got.append(row)
            kill_at.get(len(got), lambda: None)()
        print(f"{len(got)} rows in {time.monotonic() - since:.1f} s", flush=True)
        self.assertEqual(sorted(row["id"] for row in got), list(range(self.COUNT)))
        generate = moeflux.ray.Generate(MODEL, open=OPEN, **self.OPTIONS)
        some = [row for row in got if row["id"] % 10 == 0]
        again = generate({name: [row[name] for row in some] for name in ("id", "prompt")})
        self.assertEqual(again["answer"], [row["answer"] for row in some])
        self.assertEqual(len({row["node"] for row in got}), 2)
        return got

    def test_killed_workers_lose_and_double_nothing(self):
        killed = []

        def kill_workers():
            wait_for(lambda: len(workers()) == 2)
            found = workers()
            kill(found)
            killed.extend(found)

        got = self.answers({40: kill_workers, 160: kill_workers})
        self.assertEqual(len(set(killed)), 4)
        self.assertTrue({row["worker"] for row in got} - set(killed))

    def test_a_killed_node_loses_and_doubles_nothing(self):
        self.answers({100: lambda: kill(pids("ip", "netns", "pids", "b"))})
        self.assertEqual(nodes(), {ADDRESSES["a"]})


class Conversations(unittest.TestCase):
    def test_turns_of_a_conversation_have_its_name(self):
        def name(**body):
            return moeflux.ray._conversation(json.dumps(body).encode())

        user = {"role": "user", "content": "Why?"}
        system = {"role": "system", "content": "Be brief."}
        later = [{"role": "assistant", "content": "So."}, {"role": "user", "content": "How?"}]
        first = name(messages=[system, user])
        self.assertEqual(name(messages=[system, user, *later], stream=True), first)
        self.assertNotEqual(name(messages=[user]), first)
        marked = {"type": "text", "text": "Why?", "cache_control": {"type": "ephemeral"}}
        parts = [{"role": "user", "content": [marked]}]
        self.assertEqual(name(messages=parts), name(messages=[user, *later]))
        self.assertEqual(name(input="Why?"), name(input=[user, *later]))
        self.assertEqual(len({name(messages=[user]), name(messages=later), first, ""}), 4)
        strange = [1, None, "Why?", {"role": "user", "content": "\ud800"}]
        for messages in (strange, [], {}, 1, None, [system]):
            self.assertEqual(name(messages=messages), "")
        for body in (b"", b"{", b"[]", b"1", b"[" * 100_000, b"\xff"):
            self.assertEqual(moeflux.ray._conversation(body), "")
        self.assertNotEqual(name(messages=strange[3:]), "")


def fable(number):
    return [{"role": "user", "content": f"Tell me the fable number {number}."}]


def post(path, body):
    data = json.dumps(body).encode()
    asked = urllib.request.Request(URL + path, data, {"content-type": "application/json"})
    with urllib.request.urlopen(asked, timeout=PATIENCE) as response:
        return response.read().decode()


class Serve(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        two_nodes()
        cls.model = moeflux.Model.open(MODEL, **OPEN)
        cls.addClassCleanup(cls.model.close)
        serve.start(logging_config={"log_level": "ERROR"})
        cls.addClassCleanup(serve.shutdown)
        since = time.monotonic()
        serve.run(
            moeflux.ray.app(
                MODEL,
                open=OPEN,
                num_replicas=2,
                max_replicas_per_node=1,
                max_ongoing_requests=4,
                health_check_period_s=1,
            )
        )
        print(f"two replicas after {time.monotonic() - since:.1f} s", flush=True)
        cls.client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none")

    def setUp(self):
        # Also after a test that has killed one.
        numbers = itertools.count(1000)

        def both_replicas_answer():
            answers = [self.ask(fable(next(numbers)), 1) for _ in range(8)]
            return len({answer.headers["x-moeflux-replica"] for answer in answers}) == 2

        wait_for(both_replicas_answer)

    def text(self, messages, tokens=20):
        return self.model.chat(messages, temperature=0, max_tokens=tokens).text

    def ask(self, messages, tokens=20, **options):
        """The raw response of a chat completion."""
        return self.client.chat.completions.with_raw_response.create(
            model=MODEL, messages=messages, temperature=0, max_tokens=tokens, **options
        )

    def test_all_apis_answer_as_the_model(self):
        messages = fable(1)
        expected = self.text(messages)
        self.assertEqual([model.id for model in self.client.models.list()], [MODEL])
        whole = self.ask(messages).parse()
        self.assertEqual(whole.choices[0].message.content, expected)
        stream = self.client.chat.completions.create(
            model=MODEL, messages=messages, temperature=0, max_tokens=20, stream=True
        )
        parts = [event.choices[0].delta.content or "" for event in stream if event.choices]
        self.assertEqual("".join(parts), expected)
        self.assertGreater(len(parts), 5)
        body = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 20}
        answer = json.loads(post("/v1/messages", body))
        self.assertEqual(answer["content"][0]["text"], expected)
        body = {"model": MODEL, "messages": messages}
        body["options"] = {"temperature": 0, "num_predict": 20}
        lines = [json.loads(line) for line in post("/api/chat", body).splitlines()]
        self.assertEqual("".join(line["message"]["content"] for line in lines), expected)
        with self.assertRaises(openai.BadRequestError):
            self.ask([])

    def test_a_client_that_goes_frees_its_place(self):
        to_one = {"x-session-id": "one"}

        def is_busy():
            asked = urllib.request.Request(f"{URL}/slots", headers=to_one)
            with urllib.request.urlopen(asked, timeout=PATIENCE) as response:
                return any(slot["is_processing"] for slot in json.load(response))

        # Minutes of work.
        stream = self.ask(
            fable(2),
            tokens=2000,
            n=64,
            stream=True,
            extra_body={"ignore_eos": True},
            extra_headers=to_one,
        )
        next(iter(stream.parse()))
        self.assertTrue(is_busy())
        stream.http_response.close()
        since = time.monotonic()
        wait_for(lambda: not is_busy())
        self.assertLess(time.monotonic() - since, 10)

    def test_a_killed_replica_fails_no_client_that_tries_again(self):
        expected, wrong, retries = {}, [], []
        for number in range(8):
            expected[number] = self.text(fable(number), 60)

        def ask(number):
            for _ in range(6):
                answer = self.ask(fable(number), 60)
                retries.append(answer.retries_taken)
                text = answer.parse().choices[0].message.content
                if text != expected[number]:
                    wrong.append(text)

        threads = [threading.Thread(target=ask, args=(number,)) for number in expected]
        for thread in threads:
            thread.start()
        wait_for(lambda: len(retries) >= 8)
        kill(replicas()[:1])
        for thread in threads:
            thread.join()
        print(f"{len(retries)} requests, {sum(map(bool, retries))} tried again", flush=True)
        self.assertEqual((len(retries), wrong), (48, []))

    def test_conversations_return_to_their_replica(self):
        conversations, names = [], []

        def turn(messages):
            """Asks, and appends the answer. Returns the replica and the tokens it knew."""
            answer = self.ask(messages)
            reply = answer.parse()
            self.assertEqual(reply.choices[0].message.content, self.text(messages))
            messages.append({"role": "assistant", "content": reply.choices[0].message.content})
            messages.append({"role": "user", "content": "And then?"})
            known = reply.usage.prompt_tokens_details.cached_tokens
            return answer.headers["x-moeflux-replica"], known, reply.usage.prompt_tokens

        # Replicas have names by chance: conversations begin until each has two.
        lengths = []
        while len(set(names)) < 2 or min(map(names.count, names)) < 2:
            conversations.append(fable(len(conversations)))
            replica, _, length = turn(conversations[-1])
            names.append(replica)
            lengths.append(length)
            self.assertLess(len(names), 40)
        for _ in range(3):
            for i, messages in enumerate(conversations):
                replica, known, length = turn(messages)
                self.assertEqual(replica, names[i])
                self.assertGreaterEqual(known, lengths[i])
                lengths[i] = length
        kill(replicas()[:1])
        after = [turn(messages)[0] for messages in conversations]
        [lost] = set(names) - set(after)
        # The one that Serve starts in its place may be there already.
        new = set(after) - set(names)
        for before, now in zip(names, after):
            if before != lost:
                self.assertIn(now, {before} | new)
        print(f"{names.count(lost)} of {len(after)} conversations moved", flush=True)


if __name__ == "__main__":
    unittest.main(verbosity=2)

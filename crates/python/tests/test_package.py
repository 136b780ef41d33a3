"""Tests of the package with the model in the wheel: `python -m unittest discover`."""

import asyncio
import dataclasses
import gc
import json
import multiprocessing
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import urllib.error
import urllib.request

import numpy as np

import moeflux

FOX = "Tell me the fable of The Fox and the Crow."


def open_model(**options):
    return moeflux.Model.open("tales-18m", device="cpu", **options)


class Answers(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.model = open_model(sessions=3, exact=True)

    @classmethod
    def tearDownClass(cls):
        cls.model.close()

    def test_answers_are_the_same_in_every_way_to_ask(self):
        model = self.model
        whole = model.chat(FOX, temperature=0, max_tokens=30)
        self.assertEqual((whole.finish, len(whole.tokens)), ("length", 30))
        self.assertEqual(whole.usage.completion_tokens, 30)
        messages = [{"role": "user", "content": FOX}]
        stream = model.stream(messages, temperature=0, max_tokens=30)
        self.assertEqual("".join(stream.text()), whole.text)
        self.assertEqual(stream.answer.tokens, whole.tokens)
        for ordered in (True, False):
            answers = model.batch([messages] * 5, ordered=ordered, temperature=0, max_tokens=30)
            answers = list(answers)
            self.assertEqual({answer.text for answer in answers}, {whole.text})
            self.assertEqual(sorted(answer.index for answer in answers), list(range(5)))
        tokens = model.tokenizer.apply_chat_template(messages)
        with model.session() as session:
            answer = session.generate(tokens, temperature=0, max_tokens=30)
            self.assertEqual((answer.text, answer.tokens), (whole.text, whole.tokens))
            self.assertEqual(session.tokens, tokens + whole.tokens)
            again = session.stream(tokens, temperature=0, max_tokens=30)
            self.assertEqual("".join(again.text()), whole.text)
            self.assertEqual(again.answer.tokens, whole.tokens)

    def test_log_probabilities_are_those_of_the_logits(self):
        model = self.model
        prompt = model.tokenizer.encode("Once upon a time there was a")
        answer = model.generate(
            prompt, temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=True
        )
        self.assertEqual(len(answer.logprobs), 4)
        self.assertEqual(len(answer.prompt_logprobs), len(prompt) - 1)
        with model.session() as session:
            rows = session.feed_all(prompt)
            self.assertEqual(rows.shape, (len(prompt), model.vocab_size))
            rows = rows.astype(np.float64)
            rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
            for i, entry in enumerate(answer.prompt_logprobs):
                self.assertAlmostEqual(entry.logprob, rows[i, prompt[i + 1]], places=4)
            first = answer.logprobs[0]
            self.assertEqual(first.token, int(rows[-1].argmax()))
            self.assertAlmostEqual(first.logprob, rows[-1].max(), places=4)
            self.assertEqual(first.top[0][0], first.token)
            self.assertEqual(session.sample(temperature=0), first.token)
        score = model.score([(prompt[:3], prompt[3:])])[0]
        expected = sum(rows[i, prompt[i + 1]] for i in range(2, len(prompt) - 1))
        self.assertAlmostEqual(score.logprob, expected, places=3)
        self.assertGreater(model.perplexity("Once upon a time"), 1)

    def test_embeddings_have_length_one(self):
        rows = self.model.embed(["a fox", "a crow", "a fox"])
        self.assertEqual(rows.shape, (3, self.model.hidden_size))
        np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, rtol=1e-5)
        np.testing.assert_array_equal(rows[0], rows[2])

    def test_hidden_states_are_those_of_embeddings(self):
        tokens = self.model.tokenizer.encode("A fox saw a crow.")
        with self.model.session() as session:
            hidden = session.feed_all(tokens, hidden=True)
            self.assertEqual(hidden.shape, (len(tokens), self.model.hidden_size))
            self.assertEqual(session.logits.shape, (0,))
            out = np.zeros_like(hidden)
            session.reset()
            self.assertIs(session.feed_all(tokens, hidden=True, out=out), out)
            np.testing.assert_array_equal(out, hidden)
        for pooling, row in (("first", hidden[0]), ("last", hidden[-1])):
            [pooled] = self.model.embed([tokens], pooling=pooling, normalize=False)
            np.testing.assert_array_equal(pooled, row)

    def test_uses_of_experts_are_counted(self):
        before = self.model.expert_uses()
        self.assertEqual(before.shape[0], len(self.model.layers))
        with self.model.session() as session:
            session.feed([1, 2, 3])
        used = self.model.expert_uses() - before
        self.assertEqual(used.dtype, np.uint64)
        # Each layer with experts chooses as many for each token.
        sums = {int(row.sum()) for row in used if row.any()}
        self.assertEqual((len(sums), max(sums) % 3), (1, 0))

    def test_prompts_may_end_before_the_answer(self):
        messages = [{"role": "user", "content": [{"type": "text", "text": FOX}]}]
        tokenizer = self.model.tokenizer
        whole = tokenizer.apply_chat_template(messages)
        start = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
        self.assertLess(len(start), len(whole))
        self.assertEqual(start, whole[: len(start)])

    def test_functions_are_tools(self):
        def weather(city: str, days: int = 1) -> str:
            """The weather of a city."""

        from moeflux import _options

        tool = _options.tool_json(weather)
        self.assertEqual(tool["description"], "The weather of a city.")
        self.assertEqual(tool["parameters"]["required"], ["city"])
        self.assertEqual(tool["parameters"]["properties"]["days"], {"type": "integer"})

    def test_misspelt_options_are_type_errors(self):
        with self.assertRaisesRegex(TypeError, "max_token"):
            self.model.chat(FOX, max_token=3)
        with self.assertRaisesRegex(TypeError, "contxt"):
            open_model(contxt=3)
        with self.assertRaises(moeflux.SamplingError):
            self.model.chat(FOX, temperature=-1)
        with self.assertRaises(moeflux.ContextError):
            self.model.generate([10**9 % 2**32])

    def test_progress_callbacks_raise_their_exceptions(self):
        def report(progress):
            raise KeyError(progress.phase)

        long = self.model.tokenizer.encode("Once upon a time there was a fox. " * 60)
        with self.model.session() as session:
            with self.assertRaises(KeyError):
                while True:
                    session.reset()
                    session.sync(long, progress=report)


class Sessions(unittest.TestCase):
    def test_a_session_takes_one_call_at_a_time(self):
        with open_model(context=2048) as model:
            session = model.session()
            long = model.tokenizer.encode("Once upon a time there was a fox. " * 150)[:2000]
            cancel = moeflux.Cancel()
            started, cancelled = threading.Event(), []

            def work():
                try:
                    while True:
                        session.sync(long, cancel=cancel, progress=lambda _: started.set())
                        session.reset()
                except moeflux.Cancelled as error:
                    cancelled.append(error.kind)

            thread = threading.Thread(target=work)
            thread.start()
            started.wait(60)
            with self.assertRaises(moeflux.BusyError):
                while True:
                    session.tokens
            cancel()
            thread.join()
            self.assertEqual(cancelled, ["cancelled"])
            had = len(session)
            self.assertEqual(session.sync(long).reused, had)

    def test_arrays_keep_their_values(self):
        with open_model() as model, model.session([1, 2, 3]) as session:
            before = session.logits
            kept = before.copy()
            self.assertFalse(before.flags.writeable)
            session.decode(4)
            np.testing.assert_array_equal(before, kept)
            del before
            gc.collect()
            address = session.logits.ctypes.data
            for token in range(5, 15):
                session.decode(token)
            self.assertEqual(session.logits.ctypes.data, address)

    def test_named_sessions_take_the_places_of_idle_ones(self):
        with open_model(sessions=2) as model:
            list(model.batch(["Once", "There"], max_tokens=2))
            first, second = model.session(), model.session()
            with self.assertRaises(moeflux.ContextError):
                model.session()
            with self.assertRaises(moeflux.ContextError):
                model.generate("Once", max_tokens=2)
            second.close()
            self.assertEqual(len(model.generate("Once", max_tokens=2).tokens), 2)
            first.close()

    def test_saved_sessions_say_why_they_are_refused(self):
        with open_model() as model, tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "s"
            session = model.session([1, 2, 3])
            size = session.save(path)
            self.assertEqual(size, path.stat().st_size)
            path.write_bytes(path.read_bytes()[:-9])
            with self.assertRaises(moeflux.SnapshotError) as caught:
                session.restore(path)
            self.assertIn(caught.exception.reason, ("truncated", "damaged"))
            self.assertEqual(session.tokens, [1, 2, 3])


    def test_a_closed_stream_frees_its_session(self):
        with open_model() as model, model.session() as session:
            stream = session.stream("Once", max_tokens=1000)
            first = next(stream)
            stream.close()
            self.assertTrue(stream.answer.text.startswith(first.text))
            self.assertEqual(stream.answer.finish, "cancelled")
            had = session.tokens
            self.assertEqual(len(session.generate(max_tokens=3).tokens), 3)
            self.assertEqual(session.tokens[: len(had)], had)


class Ends(unittest.TestCase):
    def test_close_ends_all_handles(self):
        model = open_model(sessions=3)
        session = model.session([1, 2, 3])
        mark, logits = session.mark(), session.logits
        stream = model.stream("Once", max_tokens=1000)
        next(stream)
        model.close()
        model.close()
        self.assertTrue(model.closed)
        for call in (
            lambda: session.tokens,
            lambda: session.decode(4),
            lambda: session.rewind(mark),
            lambda: model.chat(FOX),
            lambda: model.session(),
            lambda: model.stats(),
            lambda: list(stream),
        ):
            with self.assertRaises(moeflux.ClosedError):
                call()
        self.assertEqual(mark.tokens, [1, 2, 3])
        self.assertEqual(len(logits), model.vocab_size)

    def test_opening_and_closing_leaves_nothing(self):
        def held():
            gc.collect()
            threads = len(os.listdir("/proc/self/task"))
            files = len(os.listdir("/proc/self/fd"))
            pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
            return threads, files, pages * os.sysconf("SC_PAGE_SIZE")

        def once():
            with open_model(memory="256MiB") as model:
                model.generate("Once", max_tokens=2)
                model.session([1, 2, 3])

        for _ in range(3):
            once()
        threads, files, memory = held()
        for _ in range(25):
            once()
        after = held()
        self.assertLessEqual(after[:2], (threads, files))
        self.assertLess(after[2] - memory, 24 << 20)

    def test_handles_are_not_pickled(self):
        with open_model() as model:
            for handle in (model, model.session(), model.stream("Once")):
                with self.assertRaisesRegex(TypeError, "cannot be pickled"):
                    pickle.dumps(handle)

    def test_a_forked_process_gets_an_error(self):
        with open_model() as model:
            session = model.session([1, 2, 3])
            reader, writer = os.pipe()
            child = os.fork()
            if child == 0:
                kinds = []
                for call in (lambda: model.chat(FOX), lambda: session.tokens, model.close):
                    try:
                        call()
                    except moeflux.Error as error:
                        kinds.append(error.kind)
                os.write(writer, " ".join(kinds).encode())
                del session, model
                gc.collect()
                os._exit(0)
            os.close(writer)
            said = os.read(reader, 1000).decode()
            _, status = os.waitpid(child, 0)
            self.assertEqual((said, status), ("forked forked forked", 0))
            self.assertEqual(session.tokens, [1, 2, 3])

    def test_spawned_processes_open_models(self):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            text = pool.apply(answered, (FOX,))
        with open_model() as model:
            self.assertEqual(model.chat(FOX, temperature=0, max_tokens=8).text, text)


def answered(question):
    with open_model() as model:
        return model.chat(question, temperature=0, max_tokens=8).text


class Interruptions(unittest.TestCase):
    """Ctrl-C in another process, whose main thread computes."""

    def interrupted(self, call):
        # A machine that is busy may delay one, not all.
        self.assertLess(min(self.seconds_of(call) for _ in range(3)), 0.5)

    def seconds_of(self, call):
        program = f"""
import signal, sys, time, moeflux
# It is ignored in the background of a shell.
signal.signal(signal.SIGINT, signal.default_int_handler)
model = moeflux.Model.open("tales-18m", device="cpu", sessions=2)
session = model.session()
long = model.tokenizer.encode("Once upon a time there was a fox. " * 150)[:model.context - 2]
print("ready", flush=True)
try:
    while True:
        {call}
except KeyboardInterrupt:
    print("interrupted", flush=True)
assert session.tokens is not None
model.close()
"""
        child = subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
        )
        self.addCleanup(child.stdout.close)
        guard = threading.Timer(60, child.kill)
        guard.start()
        self.addCleanup(guard.cancel)
        self.assertEqual(child.stdout.readline(), "ready\n")
        time.sleep(0.3)
        since = time.monotonic()
        child.send_signal(signal.SIGINT)
        self.assertEqual(child.stdout.readline(), "interrupted\n")
        seconds = time.monotonic() - since
        self.assertEqual(child.wait(20), 0)
        return seconds

    def test_prefill(self):
        self.interrupted("session.reset(); session.sync(long)")

    def test_decode(self):
        self.interrupted("model.generate('Once', max_tokens=100000)")

    def test_batch(self):
        self.interrupted("list(model.batch(['Once'] * 50, max_tokens=50))")

    def test_session_answers(self):
        self.interrupted("session.generate('Once', max_tokens=1000)")

    def test_other_threads_run_meanwhile(self):
        with open_model() as model, model.session() as session:
            long = model.tokenizer.encode("Once upon a time there was a fox. " * 150)
            gaps, done = [], threading.Event()

            def clock():
                last = time.monotonic()
                while not done.is_set():
                    time.sleep(0.001)
                    now = time.monotonic()
                    gaps.append(now - last)
                    last = now

            thread = threading.Thread(target=clock)
            thread.start()
            session.sync(long[: model.context - 1])
            done.set()
            thread.join()
            self.assertLess(max(gaps), 0.25)


@dataclasses.dataclass
class Animal:
    name: str
    legs: int


class Forms(unittest.TestCase):
    def test_a_class_is_a_form(self):
        with open_model() as model:
            form = moeflux.Form.json(Animal)
            answer = model.generate("A fox:", form=form, max_tokens=300, seed=1)
            if answer.finish == "stop":
                self.assertIsInstance(answer.parsed(), Animal)
            with self.assertRaises(TypeError):
                model.chat(FOX, form={"type": "object"})

    def test_without_room_forms_are_errors(self):
        with open_model(grammars=False) as model:
            with self.assertRaises(moeflux.GrammarError):
                model.chat(FOX, form=moeflux.Form.choice(["a"]))


class Errors(unittest.TestCase):
    def test_wrong_messages_and_tokens_are_errors_of_the_package(self):
        wrong = [
            [{"content": "hello"}],
            [{"role": "nobody", "content": "hello"}],
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            [{"role": "assistant", "tool_calls": [{"id": "a"}]}],
        ]
        with open_model() as model, model.session() as session:
            for messages in wrong:
                with self.assertRaisesRegex(moeflux.Error, r"messages\[0\]"):
                    model.chat(messages)
            for token in (-1, 1 << 40, model.vocab_size):
                with self.assertRaises(moeflux.ContextError):
                    session.feed([token])
                with self.assertRaises(moeflux.ContextError):
                    session.decode(token)
            with self.assertRaises(moeflux.Error):
                model.tokenizer.bytes_of(model.vocab_size)

    def test_the_floor_opens_and_less_does_not(self):
        plan = moeflux.Model.inspect("tales-18m", device="cpu", context=512)
        small = {"context": 512, "device": "cpu", "memory": plan.floor + (1 << 20)}
        with moeflux.Model.open("tales-18m", **small) as model:
            self.assertLessEqual(model.plan().floor, small["memory"])
        small["memory"] = plan.floor // 2
        with self.assertRaisesRegex(moeflux.BudgetError, "give memory") as caught:
            moeflux.Model.open("tales-18m", **small)
        self.assertNotIn("--", str(caught.exception))

    def test_messages_go_to_a_logger_or_a_callable(self):
        with self.assertLogs("moeflux", "INFO") as logs, open_model():
            for _ in range(100):
                if logs.output:
                    break
                time.sleep(0.05)
        self.assertIn("tales-18m: open, on", logs.output[0])
        seen = []
        moeflux.log_to(lambda level, message: seen.append((level, message)), 3)
        self.addCleanup(moeflux.log_to, None)
        with open_model():
            while not seen:
                time.sleep(0.05)
        self.assertEqual(seen[0][0], 3)

    def test_errors_have_the_classes_of_python(self):
        with self.assertRaises(FileNotFoundError if False else moeflux.FileError) as caught:
            moeflux.Model.open("/nowhere/at/all")
        self.assertIsInstance(caught.exception, OSError)
        with self.assertRaises(moeflux.BudgetError) as caught:
            open_model(memory="1MiB")
        self.assertIsInstance(caught.exception, MemoryError)
        self.assertGreater(caught.exception.floor, 1 << 20)
        with tempfile.TemporaryDirectory() as folder:
            with self.assertRaises(moeflux.Error):
                moeflux.Model.open(folder)

    def test_records_are_shown(self):
        with open_model() as model:
            answer = model.chat(FOX, max_tokens=3, temperature=0)
            self.assertIn("text=", repr(answer))
            self.assertIn(answer.text, answer._repr_html_())
            self.assertIn("dense", repr(model.plan()))
            self.assertIn("<table>", model.plan()._repr_html_())
            self.assertEqual((model.stats() - model.stats()).tokens, 0)
            self.assertEqual(answer.message["content"], answer.text)


class Serving(unittest.TestCase):
    BODY = {
        "model": "x",
        "messages": [{"role": "user", "content": FOX}],
        "temperature": 0,
        "max_tokens": 10,
    }

    def test_a_server_on_a_port_answers_as_the_model(self):
        with open_model(sessions=2) as model:
            text = model.chat(FOX, temperature=0, max_tokens=10).text
            with model.serve(port=0, api_key="secret") as server:
                request = urllib.request.Request(
                    server.url + "/v1/chat/completions",
                    json.dumps(self.BODY).encode(),
                    {"Authorization": "Bearer secret", "Content-Type": "application/json"},
                )
                with urllib.request.urlopen(request, timeout=60) as reply:
                    answer = json.load(reply)
                self.assertEqual(answer["choices"][0]["message"]["content"], text)
                with self.assertRaises(urllib.error.HTTPError):
                    urllib.request.urlopen(server.url + "/v1/models", timeout=60)
            # The model goes on after its server.
            self.assertEqual(model.chat(FOX, temperature=0, max_tokens=10).text, text)
            model.serve(port=0)
        self.assertTrue(model.closed)

    def test_an_application_streams_and_ends_with_its_client(self):
        async def ask(app, body, stop_after=None):
            sent, gone = [], asyncio.Event()
            messages = [{"type": "http.request", "body": json.dumps(body).encode()}]

            async def receive():
                if messages:
                    return messages.pop()
                await gone.wait()
                return {"type": "http.disconnect"}

            async def send(message):
                sent.append(message)
                if stop_after is not None and len(sent) >= stop_after:
                    gone.set()

            scope = {
                "type": "http",
                "method": "POST",
                "path": "/api/v1/chat/completions",
                "root_path": "/api",
                "query_string": b"",
                "headers": [(b"host", b"example.com"), (b"content-type", b"application/json")],
            }
            await app(scope, receive, send)
            return sent

        async def main():
            with open_model(sessions=2) as model:
                text = model.chat(FOX, temperature=0, max_tokens=10).text
                app = model.asgi()
                head, *parts = await ask(app, self.BODY)
                self.assertEqual(head["status"], 200)
                answer = json.loads(b"".join(part["body"] for part in parts))
                self.assertEqual(answer["choices"][0]["message"]["content"], text)
                streamed = {**self.BODY, "stream": True}
                parts = await ask(app, streamed)
                body = b"".join(part.get("body", b"") for part in parts)
                self.assertTrue(body.endswith(b"data: [DONE]\n\n"))
                endless = {**streamed, "max_tokens": 100000}
                parts = await ask(app, endless, stop_after=3)
                self.assertLess(len(parts), 100)
            # An application keeps its model.
            app = open_model(sessions=2).asgi()
            gc.collect()
            head, *_ = await ask(app, self.BODY)
            self.assertEqual(head["status"], 200)
            app._model.close()

        asyncio.run(main())


class Batches(unittest.TestCase):
    def test_rows_have_the_same_texts_in_every_batch(self):
        from moeflux.ray import Generate

        generate = Generate(
            "tales-18m", open={"device": "cpu", "sessions": 2}, max_tokens=12, temperature=3.0
        )
        rows = {"id": list(range(5)), "prompt": ["A fox", "A crow", "A fox", "A lamb", "A wolf"]}
        whole = generate(rows)
        self.assertNotIn("answer_error", whole)
        for i in range(5):
            one = generate({name: values[i : i + 1] for name, values in rows.items()})
            self.assertEqual(one["answer"], whole["answer"][i : i + 1])
        self.assertNotEqual(whole["answer"][0], whole["answer"][2])
        with self.assertRaises(TypeError):
            pickle.dumps(generate)
        generate._model.close()


class Loops(unittest.TestCase):
    def test_tasks_share_a_model(self):
        async def main():
            with open_model(sessions=3) as model:
                tasks = [model.achat(FOX, temperature=0, max_tokens=10) for _ in range(8)]
                texts = {answer.text for answer in await asyncio.gather(*tasks)}
                self.assertEqual(texts, {model.chat(FOX, temperature=0, max_tokens=10).text})
                async with model.stream("Once", max_tokens=500) as stream:
                    async for _ in stream:
                        break
                self.assertEqual(stream.answer.finish, "cancelled")

        asyncio.run(main())


if __name__ == "__main__":
    unittest.main()

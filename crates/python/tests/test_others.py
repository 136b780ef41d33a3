"""Tests of the package with Ray and lm-evaluation-harness."""

import os
import signal
import threading
import time
import unittest

import numpy as np
import ray
from lm_eval.api.instance import Instance

import moeflux.lm_eval
import moeflux.ray

OPTIONS = {"max_tokens": 20, "temperature": 3.0}


class RayData(unittest.TestCase):
    def test_killed_workers_lose_and_double_nothing(self):
        ray.init(log_to_driver=False, logging_level="ERROR", num_cpus=2)
        self.addCleanup(ray.shutdown)
        ray.data.DataContext.get_current().enable_progress_bars = False
        count = 400
        rows = [{"id": i, "prompt": f"Tell me the fable number {i}."} for i in range(count)]
        answered = ray.data.from_items(rows, override_num_blocks=50).map_batches(
            moeflux.ray.Generate,
            fn_constructor_args=("tales-18m",),
            fn_constructor_kwargs={
                "open": {"device": "cpu", "sessions": 2, "memory": "256MiB", "threads": 1},
                **OPTIONS,
            },
            batch_size=8,
            concurrency=1,
            max_restarts=-1,
            max_task_retries=-1,
        )
        killed, is_done = [], threading.Event()

        def kill():
            while len(killed) < 2 and not is_done.wait(1):
                for worker in os.popen("pgrep -f 'ray::.*Generate'").read().split():
                    # One that computes.
                    if int(worker) not in killed:
                        time.sleep(1)
                        os.kill(int(worker), signal.SIGKILL)
                        killed.append(int(worker))
                        break

        killer = threading.Thread(target=kill)
        killer.start()
        got = answered.take_all()
        is_done.set()
        killer.join()
        self.assertGreater(len(killed), 0)
        self.assertEqual(sorted(row["id"] for row in got), list(range(count)))
        generate = moeflux.ray.Generate("tales-18m", open={"device": "cpu"}, **OPTIONS)
        for row in got:
            if row["id"] % 40 == 0:
                again = generate({"id": [row["id"]], "prompt": [row["prompt"]]})
                self.assertEqual(again["answer"], [row["answer"]])


class Harness(unittest.TestCase):
    def test_log_likelihoods_are_those_of_the_logits(self):
        def instance(kind, *args):
            return Instance(request_type=kind, doc={}, arguments=args, idx=0)

        model = moeflux.lm_eval.MoefluxLM("tales-18m", device="cpu", exact=True)
        self.addCleanup(model.close)
        pairs = [("A fox saw a", " crow"), ("A fox saw a ", "crow"), ("", "Once")]
        scores = model.loglikelihood([instance("loglikelihood", *pair) for pair in pairs])
        self.assertEqual(scores[0], scores[1])
        text = "Once upon a time there was a fox who saw a crow. " * 3
        [rolling] = model.loglikelihood_rolling([instance("loglikelihood_rolling", text)])
        tokens = model._encode(text)
        with model._model.session() as session:
            rows = session.feed_all([model._prefix, *tokens]).astype(np.float64)
        rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
        expected = sum(rows[i, token] for i, token in enumerate(tokens))
        self.assertAlmostEqual(rolling, expected, delta=1e-3)
        asked = {"until": ["."], "max_gen_toks": 20}
        [answer] = model.generate_until([instance("generate_until", "A fox", asked)])
        self.assertNotIn(".", answer)


if __name__ == "__main__":
    unittest.main()

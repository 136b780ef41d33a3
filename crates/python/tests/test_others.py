"""Tests of the package with lm-evaluation-harness."""

import unittest

import numpy as np
from lm_eval.api.instance import Instance

import moeflux.lm_eval


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

"""lm-evaluation-harness: a model of moeflux for its tasks.

    python -m moeflux.lm_eval --model moeflux \\
        --model_args pretrained=Qwen3-30B-A3B-4bit,memory=8GiB --tasks lambada_openai

Other options of `moeflux.Model.open` are model_args too.
"""

# The harness has no types.
# mypy: ignore-errors

from __future__ import annotations

import json

from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows

from ._errors import Error
from ._model import Model
from ._options import ChatOptions

__all__ = ["MoefluxLM"]


@register_model("moeflux")
class MoefluxLM(LM):
    """A model for the tasks of lm-evaluation-harness."""

    def __init__(
        self,
        pretrained="tales-18m",
        batch_size=None,
        max_batch_size=None,
        device=None,
        max_gen_toks=256,
        **options,
    ):
        super().__init__()
        del batch_size, max_batch_size
        if device is not None:
            options["device"] = device
        self._model = Model.open(pretrained, **options)
        self._tokenizer = self._model.tokenizer
        self._max_gen_toks = int(max_gen_toks)
        start = self._tokenizer.encode("", add_special_tokens=True)
        ends = self._tokenizer.end_tokens
        if not start and not ends:
            raise ValueError(f"{pretrained}: the tokenizer has no token that starts or ends a text")
        self._prefix = start[0] if start else ends[0]

    @property
    def tokenizer_name(self):
        return self._model.path.replace("/", "__")

    def apply_chat_template(self, chat_history, add_generation_prompt=True):
        if not add_generation_prompt:
            raise ValueError("prompts end where the answer begins: leave add_generation_prompt on")
        return self._tokenizer.render_chat(chat_history)

    def _encode(self, text):
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _pair(self, context, continuation):
        """Tokens of a context and its continuation, as the harness splits them."""
        if not context:
            return [self._prefix], self._encode(continuation)
        spaces = len(context) - len(context.rstrip())
        if spaces:
            continuation = context[-spaces:] + continuation
            context = context[:-spaces]
        whole, before = self._encode(context + continuation), self._encode(context)
        return before, whole[len(before) :]

    def _scores(self, pairs):
        """Scores of pairs of tokens, in their order; equal contexts follow each other."""
        window = self._model.context
        order = sorted(range(len(pairs)), key=lambda i: pairs[i][0])
        cut = []
        for i in order:
            context, more = pairs[i]
            more = more[-(window - 1) :]
            cut.append((context[len(context) + len(more) - window :] or context[-1:], more))
            if len(context) + len(more) <= window:
                cut[-1] = (context, more)
        scores = dict(zip(order, self._model.score(cut)))
        return [scores[i] for i in range(len(pairs))]

    def loglikelihood(self, requests, disable_tqdm=False):
        pairs = [self._pair(*request.args) for request in requests]
        return [(score.logprob, score.greedy) for score in self._scores(pairs)]

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        totals = []
        for request in requests:
            windows = get_rolling_token_windows(
                token_list=self._encode(request.args[0]),
                prefix_token=self._prefix,
                max_seq_len=self._model.context - 1,
                context_len=1,
            )
            pairs = [(list(context), list(more)) for context, more in windows]
            # A window's context has the tokens before its continuation.
            pairs = [(c[: len(c) - len(m) + 1], m) for c, m in pairs]
            totals.append(sum(score.logprob for score in self._scores(pairs)))
        return totals

    def generate_until(self, requests, disable_tqdm=False):
        groups = {}
        for i, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(i)
        texts = [""] * len(requests)
        for key, indices in groups.items():
            options = json.loads(key)
            until = options.get("until") or []
            until = [until] if isinstance(until, str) else list(until)
            maximum = int(options.get("max_gen_toks", self._max_gen_toks))
            sampled = bool(options.get("do_sample", False))
            sampling: ChatOptions = {
                "stop": [text for text in until if text],
                "max_tokens": maximum,
                "temperature": float(options.get("temperature", 1.0)) if sampled else 0.0,
            }
            if sampled and "top_p" in options:
                sampling["top_p"] = float(options["top_p"])
            if sampled and "top_k" in options:
                sampling["top_k"] = int(options["top_k"])
            if sampled and "repetition_penalty" in options:
                sampling["repetition_penalty"] = float(options["repetition_penalty"])
            room = max(1, self._model.context - maximum)
            prompts = [self._encode(requests[i].args[0])[-room:] for i in indices]
            for i, answer in zip(indices, self._model.batch(prompts, **sampling)):
                texts[i] = answer.text
        return texts

    def close(self):
        """Closes the model."""
        try:
            self._model.close()
        except Error:
            pass


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()

#!/usr/bin/env python3
"""Writes a small tokenizer of Kimi's kind, and tiktoken's ids of difficult texts.

    pip install tiktoken regex && scripts/make-tiktoken-golden.py [FOLDER [RANDOM_TEXTS]]

Writes tiktoken.model, tokenizer_config.json and golden.json to FOLDER
(crates/text/tests/data/tiktoken). The ranks are trained here; the ids are those of
`tiktoken.Encoding`, as in Kimi's tokenization_kimi.py.
"""

import base64
import collections
import json
import pathlib
import random
import sys

import regex
import tiktoken

HERE = pathlib.Path(__file__).parent
FOLDER = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "../crates/text/tests/data/tiktoken"
RANDOM_TEXTS = int(sys.argv[2]) if len(sys.argv) > 2 else 60
TOKENS, SPECIAL_TOKENS = 600, 256
# tokenization_kimi.py, pat_str
LETTERS = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]%s[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]%s"
SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join([
    r"[\p{Han}]+", LETTERS % ("*", "+") + SUFFIX, LETTERS % ("+", "*") + SUFFIX, r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+",
])
TEXTS = [
    "", " ", "a", "Hello, world!", "I'm sure they'll say WE'VE won, it's JOHN'S; she'd 'tis o'clock 'S",
    "HTTPServer camelCase snake_case XMLHttpRequest iPhone McDonald", "0 12 123 1234 1234567 3.14159 1e-9 ½ ² Ⅻ ٣٤٥",
    "狐狸和乌鸦。", "狐狸ate乌鸦3只,好!", "中文English混合text，标点。ひらがなカタカナ漢字かな交じり문장 한국어",
    "〇一二々〆 㐀𠀀𪛖 豈", "é e\u0301 ñ Ǆ ǅ ʰa ªº ﬁ naïve CAFÉ",
    "русский текст ЗАГЛАВНЫЕ ελληνικά हिन्दी العربية ไทย עברית", "😀😁👩‍👩‍👧‍👦🏳️‍🌈🇩🇪👍🏽", "\U0001F600\U0001F9FF\U0001FAE0",
    "a  b   c    d\t\te \t f\n\n\ng\r\nh \n i\r\r\nj   ", "   leading", "trailing   ", "\n", " \n", "\n ", "\u00a0\u3000\u2028x\u200b",
    "def f(x):\n    return {'a': [1, 2], \"b\": x ** 2}  # comment\n\n\n", "!!!???...---===***", "=" * 70, " " * 70, "a" * 70,
    "ab" * 40, "abcabcabcabcabca aaaaa xyzzy xyz yz zyx wxyz", "\x00\x01\x7f\x80\xa0\xad\uFFFD\uFEFF",
    "<|im_system|>system<|im_middle|>You are Kimi.<|im_end|><|im_user|>user<|im_middle|>你好 hi<|im_end|>"
    "<|im_assistant|>assistant<|im_middle|>", "[BOS][EOS] [BOS ] <|im_end|<|im_end|>|> <|reserved_token_603|><|reserved_token_605|><think>x</think>",
]
# Tokens that training never produces: merged in another order than their ranks (`wxyz` before its
# parts), not reachable by merges (`zyx`: no two of its letters are a token), and overlaps that only
# a fixed order resolves.
ODD = ["wxyz", "aaaa", "aaa", "aa", "wx", "yz", "xyz", "zyx", "bcab", "bc", "ab", "cab", "abca", "狸ate"]


def train():
    corpus = "\n".join(TEXTS * 3) + HERE.joinpath("../crates/moeflux/tests/data/fables.json").read_text()
    words = collections.Counter(
        tuple(bytes([b]) for b in w.encode()) for w in regex.findall(PATTERN, corpus, regex.V1)
    )
    # Bytes are not in order of their values: printable ones first, as in published files.
    tokens = [bytes([b]) for b in sorted(range(256), key=lambda b: (not 33 <= b <= 126, b))]
    tokens += [token.encode() for token in ODD]
    while len(tokens) < TOKENS:
        pairs = collections.Counter()
        for word, count in words.items():
            for pair in zip(word, word[1:]):
                pairs[pair] += count
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        joined = {}
        for word, count in words.items():
            parts, i = [], 0
            while i < len(word):
                two = word[i : i + 2] == best
                parts.append(b"".join(best) if two else word[i])
                i += 2 if two else 1
            joined[tuple(parts)] = count
        words = joined
        if b"".join(best) not in tokens:
            tokens.append(b"".join(best))
    return tokens


def random_text(rng):
    alphabet = "abcxyzABC's'llтЖéßǅ狐狸和〇한カ0159½ \t\n\r\u00a0.,!<|>[]_-😀👍🏽\u0301\u200d\x00"
    snippets = ["'re", "'LL", "<|im_end|>", "[EOS]", "  ", "\r\n", "狐狸", "aaaa", "wxyz", "zyx", "abcabc", "the "]
    return "".join(rng.choice(snippets if rng.random() < 0.3 else alphabet) for _ in range(rng.randrange(1, 25)))


tokens = train()
named = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>", 4: "<|im_assistant|>", 10: "<|im_system|>",
         17: "<|im_middle|>", 22: "<think>", 23: "</think>", 254: "[UNK]", 255: "[PAD]"}
special = {named.get(i, f"<|reserved_token_{TOKENS + i}|>"): TOKENS + i for i in range(SPECIAL_TOKENS)}
encoding = tiktoken.Encoding(
    "kimi", pat_str=PATTERN, mergeable_ranks={t: i for i, t in enumerate(tokens)}, special_tokens=special
)
rng = random.Random(3)
texts = TEXTS + [random_text(rng) for _ in range(RANDOM_TEXTS)]
cases = [json.dumps([text, encoding.encode(text, allowed_special="all")], ensure_ascii=False) for text in texts]
decoder = {
    TOKENS + i: {"content": token, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
                 "special": "think" not in token}
    for i, token in named.items()
}
config = {
    "added_tokens_decoder": decoder,
    "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
    "bos_token": "[BOS]", "eos_token": "[EOS]", "pad_token": "[PAD]", "unk_token": "[UNK]",
    "tokenizer_class": "TikTokenTokenizer",
}
FOLDER.mkdir(parents=True, exist_ok=True)
ranks = (b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens))
(FOLDER / "tiktoken.model").write_bytes(b"".join(ranks))
(FOLDER / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
(FOLDER / "golden.json").write_text("[\n" + ",\n".join(cases) + "\n]\n")

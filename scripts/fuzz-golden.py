#!/usr/bin/env python3
"""Compares moeflux with mlx-lm on random checkpoints: shapes, quantisation, layout and chunking drawn from a seed.

usage: scripts/fuzz-golden.py BIN [--seeds FIRST:END] [--keep DIR] [-- ARGUMENT ...]

BIN is the moeflux binary; what follows `--` is passed to every `BIN logits` (`-- --memory 4MiB --chunk 3`). Needs
`pip install "mlx[cpu]" mlx-lm`. Prints one line per seed; a seed always gives the same checkpoint. The bars are those
of the goldens: logits and hidden states within 1e-3 of the rms, the same sets of experts. A case whose routing hangs on
less than 1e-4 of a router logit is reported as `close` and not counted: there rounding may choose otherwise.
"""
import argparse
import contextlib
import io
import json
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from golden import DTYPES, Case, Reference, make_checkpoint, read_safetensors, rms

BAR, CLOSE = 1e-3, 1e-4
BITS, GROUPS = (2, 3, 4, 5, 6, 8), (32, 64, 128)
TENSORS = ("mlp.gate", "lm_head", "embed_tokens", "q_proj", "k_proj", "v_proj", "o_proj", "switch_mlp.gate_proj",
           "switch_mlp.up_proj", "down_proj", "in_proj_qkv", "in_proj_z", "in_proj_a", "out_proj",
           "shared_expert_gate", "shared_expert.up_proj")


def common_config(r):
    """What both architectures have."""
    kv_heads, experts = r.choice((1, 2, 3, 4)), r.randint(2, 24)
    return dict(
        hidden_size=r.choice((32, 64, 96, 128, 160, 256)), num_hidden_layers=r.randint(1, 5),
        num_attention_heads=kv_heads * r.choice((1, 2, 3)), num_key_value_heads=kv_heads,
        head_dim=r.choice((16, 24, 32, 48, 64, 96, 128)), num_experts=experts,
        num_experts_per_tok=r.randint(1, min(experts, 10)), moe_intermediate_size=r.choice((32, 64, 96, 128)),
        rms_norm_eps=r.choice((1e-5, 1e-6)), vocab_size=r.randint(258, 500),
        tie_word_embeddings=r.random() < 0.4, max_position_embeddings=4096, norm_topk_prob=r.random() < 0.6,
        hidden_act="silu", eos_token_id=1)


def qwen3_moe_config(r):
    c = common_config(r)
    layers = range(c["num_hidden_layers"])
    return c | dict(
        architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", intermediate_size=r.choice((64, 160, 192)),
        decoder_sparse_step=r.choice((1, 1, 2, 3)), mlp_only_layers=[i for i in layers if r.random() < 0.15],
        rope_theta=r.choice((10000.0, 1000000.0)), rope_scaling=None,
        # mlx-lm reads no biases here.
        attention_bias=False)


def qwen3_5_moe_config(r):
    c = common_config(r)
    interval, key_heads = r.randint(2, 4), r.randint(1, 3)
    # mlx-lm needs a layer of each kind.
    layers = c["num_hidden_layers"] = r.randint(interval, 5)
    c |= dict(
        model_type="qwen3_5_moe_text", linear_num_key_heads=key_heads,
        linear_num_value_heads=key_heads * r.choice((1, 2, 4)), linear_key_head_dim=r.choice((16, 32, 48, 64, 128)),
        linear_value_head_dim=r.choice((16, 32, 48, 64, 128)), linear_conv_kernel_dim=r.choice((2, 3, 4, 4, 5, 6)),
        shared_expert_intermediate_size=r.choice((32, 64, 96, 128)), attn_output_gate=True,
        full_attention_interval=interval, attention_bias=r.random() < 0.2,
        rope_parameters=dict(rope_type="default", rope_theta=r.choice((10000, 10000000)),
                             partial_rotary_factor=r.choice((0.25, 0.5, 1.0))))
    if r.random() < 0.6:
        c["layer_types"] = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers)]
    names = dict(architectures=["Qwen3_5MoeForConditionalGeneration"], model_type="qwen3_5_moe")
    if r.random() < 0.5:
        return c | names
    return names | dict(text_config=c, tie_word_embeddings=c["tie_word_embeddings"], eos_token_id=1)


def random_case(seed):
    """The case of a seed."""
    r = random.Random(seed)
    config = r.choice((qwen3_moe_config, qwen3_5_moe_config))(r)
    fused = config["model_type"] == "qwen3_5_moe"
    overrides = {t: r.choice([(b, g) for b in BITS for g in GROUPS] + [None] * 3)
                 for t in r.sample(TENSORS, r.randint(0, 6))}
    group = r.choice(GROUPS)
    # Below the group, mlx-lm quantises nothing, and its recipes name what they could not quantise.
    columns = config.get("text_config", config)["hidden_size"]
    group = max(g for g in GROUPS if g <= group and columns % g == 0)
    return Case(
        config, layout=r.choice(("mlx",) * 5 + ("mlx-plain", "hub", "hub")), dtype=r.choice(list(DTYPES)),
        bits=r.choice(BITS), group=group, overrides=overrides, map=r.choice(("named", "nothing")),
        recipe=r.choice((None,) * 5 + ("mixed_2_6", "mixed_3_4", "mixed_3_6", "mixed_4_6")),
        shards=r.choice((1, 1, 2, 3, 7)), prefix=r.choice(("model.language_model.", "model.")),
        state_dtype=r.choice((None, "f32")), extras=fused and r.random() < 0.5, prompt=r.randint(1, 60),
        steps=r.randint(0, 8))


def describe(case):
    """A case in a few words."""
    c = case.config.get("text_config", case.config)
    words = [case.config["model_type"], case.layout, case.dtype]
    if case.layout == "mlx":
        words.append(case.recipe or f"{case.bits}b")
        words.append(f"g{case.group} {len(case.overrides)} overrides {case.map}")
    words.append(f"L{c['num_hidden_layers']} h{c['hidden_size']} top {c['num_experts_per_tok']} of {c['num_experts']}")
    return " ".join(words)


def run(binary, folder, ids, prefill, arguments):
    """What `moeflux logits` writes for `ids`."""
    tokens, out = folder / "tokens.json", folder / "out.safetensors"
    tokens.write_text(json.dumps(ids))
    out.unlink(missing_ok=True)
    done = subprocess.run(
        [binary, "logits", "--exact", "--model", folder, "--tokens", tokens, "--prefill", str(prefill), "--trace",
         "--out", out, *arguments], capture_output=True, text=True, timeout=300)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise RuntimeError(f"exit {done.returncode}: {lines[-1] if lines else 'no message'}")
    return read_safetensors(out)


def compare(ours, logits, hidden, experts):
    """(problems, worst difference over the rms) of our tensors against mlx-lm's."""
    problems, worst = [], 0.0
    for name, want in {"logits": logits, **{f"hidden.{i}": h for i, h in hidden.items()}}.items():
        got = ours.get(name)
        if got is None or got.shape != want.shape:
            problems.append(f"{name}: {'missing' if got is None else f'{got.shape}, not {want.shape}'}")
            continue
        difference = float(np.abs(got - want).max()) / rms(want)
        worst = max(worst, difference) if np.isfinite(difference) else np.inf
        if not difference <= BAR:
            row = int(np.abs(got - want).max(axis=1).argmax())
            problems.append(f"{name} row {row}: {difference:.1e} of the rms")
    for i, want in experts.items():
        got = ours.get(f"experts.{i}")
        if got is None or got.shape != want.shape:
            problems.append(f"experts.{i}: {'missing' if got is None else f'{got.shape}, not {want.shape}'}")
        elif not np.array_equal(np.sort(got, 1), np.sort(want, 1)):
            row = int(np.argmax((np.sort(got, 1) != np.sort(want, 1)).any(axis=1)))
            problems.append(f"experts.{i} row {row}: {got[row].tolist()}, not {want[row].tolist()}")
    surplus = {n for n in ours if n.startswith("experts.")} - {f"experts.{i}" for i in experts}
    problems += [f"{n}: not a MoE layer" for n in sorted(surplus)]
    return problems, worst


def check(binary, folder, seed, arguments):
    """Makes, computes and compares the case of a seed: (verdict, details)."""
    case, r = random_case(seed), random.Random(-1 - seed)
    with contextlib.redirect_stdout(io.StringIO()):
        make_checkpoint(folder, case, seed)
        reference = Reference(folder)
    ids = [r.randrange(2, 258) for _ in range(case.prompt + case.steps)]
    chunks = [ids[: case.prompt], *([t] for t in ids[case.prompt :])]
    logits, hidden, experts, gap = reference.trace(chunks)
    try:
        ours = run(binary, folder, ids, case.prompt, arguments)
    except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
        return "FAIL", str(error)
    problems, worst = compare(ours, np.concatenate(logits), hidden, experts)
    if problems and gap < CLOSE:
        return "close", f"router gap {gap:.0e}: {problems[0]}"
    return ("FAIL", "; ".join(problems[:3])) if problems else ("ok", f"{worst:.1e}")


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("binary", metavar="BIN", type=Path)
    args.add_argument("--seeds", default="0:50", metavar="FIRST:END", help="the seeds to try (default 0:50)")
    args.add_argument("--keep", type=Path, metavar="DIR", help="keep failing checkpoints here")
    own, passed_on = sys.argv[1:], []
    if "--" in own:
        own, passed_on = own[: own.index("--")], own[own.index("--") + 1 :]
    args = args.parse_args(own)
    binary = args.binary.resolve()
    if not binary.is_file():
        raise SystemExit(f"{args.binary}: no such file")
    first, end = map(int, args.seeds.split(":"))
    failed = 0
    for seed in range(first, end):
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / f"seed-{seed}"
            verdict, details = check(binary, folder, seed, passed_on)
            if verdict == "FAIL" and args.keep:
                shutil.copytree(folder, args.keep / folder.name, dirs_exist_ok=True)
        failed += verdict == "FAIL"
        print(f"{seed:5} {verdict:5} {describe(random_case(seed))}: {details}", flush=True)
    print(f"{end - first} cases, {failed} failed")
    raise SystemExit(failed > 0)


if __name__ == "__main__":
    main()

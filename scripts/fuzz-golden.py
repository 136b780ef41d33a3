#!/usr/bin/env python3
"""Compares moeflux with mlx-lm on random checkpoints: shapes, quantization and layout from a seed.

usage: scripts/fuzz-golden.py BIN [--seeds FIRST:END] [--only MODEL_TYPE] [--prompt N] [--keep DIR]
                              [-- ARGUMENT ...]

BIN is the moeflux binary. Arguments after `--` are passed to every `BIN logits` (`-- --memory 4MiB
--chunk 3`). Needs `pip install "mlx[cpu]" mlx-lm`. Prints one line per seed; a seed always gives
the same checkpoint. Tolerances are those of the goldens: logits and hidden states within 1e-3 of
the rms, the same sets of experts. A case in which a choice depends on less than 1e-4 of a router
logit, or of an indexer's score, is reported as `close` and not counted, as rounding may change the
choice. The reference is mlx-lm with the corrections of corrected.py.
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

import cases
from golden import DTYPES, Case, Reference, make_checkpoint, read_safetensors, rms

BAR, CLOSE = 1e-3, 1e-4
BITS, GROUPS = (2, 3, 4, 5, 6, 8), (32, 64, 128)
TENSORS = ("mlp.gate", "lm_head", "embed_tokens", "q_proj", "k_proj", "v_proj", "o_proj", "switch_mlp.gate_proj",
           "switch_mlp.up_proj", "down_proj", "in_proj_qkv", "in_proj_z", "in_proj_a", "out_proj",
           "shared_expert_gate", "shared_expert.up_proj", "embed_q", "unembed_out", "q_b_proj", "kv_a_proj_with_mqa",
           "indexer.wk", "in_proj_qkvz", "mlp.router", "router.proj", "experts.gate_proj", "switch_glu.up_proj")
FP8 = ("qwen3_moe", "deepseek_v3", "kimi_k2", "deepseek_v32", "glm_moe_dsa", "glm4_moe", "minimax_m2")


def common_config(r):
    """Keys of both Qwen architectures."""
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


def attention_config(r):
    """Keys of attention heads, and common keys."""
    kv_heads = r.choice((1, 2, 3, 4))
    return dict(
        hidden_size=r.choice((32, 64, 96, 128, 160)), num_hidden_layers=r.randint(1, 4),
        num_attention_heads=kv_heads * r.choice((1, 2, 3)), num_key_value_heads=kv_heads,
        head_dim=r.choice((16, 32, 48, 64, 96, 128)), vocab_size=r.randint(258, 400),
        rms_norm_eps=r.choice((1e-5, 1e-6)))


def grouped_router_config(r):
    """noaux_tc with or without groups."""
    groups = r.choice((1, 1, 2, 4))
    chosen, size = r.randint(1, groups), r.randint(2, 6)
    return dict(n_group=groups, topk_group=chosen, n_routed_experts=groups * size,
                num_experts_per_tok=r.randint(1, min(chosen * size, 8)), n_shared_experts=r.choice((1, 1, 2)),
                moe_intermediate_size=r.choice((32, 64, 96, 160)), intermediate_size=r.choice((64, 96, 160)),
                first_k_dense_replace=r.choice((0, 1, 1, 2)), norm_topk_prob=r.random() < 0.7,
                routed_scaling_factor=r.choice((1.0, 1.7, 2.5)))


def latent_config(r):
    """Multi-head latent attention."""
    c, heads = attention_config(r), r.choice((1, 2, 3, 4, 8))
    del c["head_dim"]
    return c | grouped_router_config(r) | dict(
        num_attention_heads=heads, num_key_value_heads=heads, kv_lora_rank=r.choice((32, 64, 96, 128)),
        q_lora_rank=r.choice((32, 64, 96)), qk_rope_head_dim=r.choice((8, 16, 24, 32)),
        qk_nope_head_dim=r.choice((16, 32, 48, 64)), v_head_dim=r.choice((16, 32, 48, 64)),
        attention_bias=r.random() < 0.2)


def random_yarn(r):
    """DeepSeek's YaRN, with an original context short enough to have an effect."""
    if r.random() < 0.25:
        return None
    fast = r.choice((32, 32, 8, 1))
    return cases.yarn(beta_fast=fast, factor=r.choice((2, 16.0, 40)), mscale=r.choice((1.0, 0.7)),
                      mscale_all_dim=r.choice((1.0, 1.0, 0.5)),
                      original_max_position_embeddings=r.choice((64, 512, 4096)))


def deepseek_v3_config(r):
    c = latent_config(r) | dict(rope_scaling=random_yarn(r))
    if r.random() < 0.3:
        c["q_lora_rank"] = None
    return r.choice((cases.deepseek_v3, cases.kimi_k2))(**c)


def indexer_config(r):
    dims = r.choice((32, 48, 64, 96))
    return dict(index_head_dim=dims, qk_rope_head_dim=r.choice((8, 16, 32)), index_n_heads=r.choice((4, 8, 16)),
                index_topk=r.choice((1, 4, 8, 16, 32)))


def deepseek_v32_config(r):
    return cases.deepseek_v32(**latent_config(r) | indexer_config(r) | dict(rope_scaling=random_yarn(r)))


def glm_moe_dsa_config(r):
    c = latent_config(r) | indexer_config(r)
    c["head_dim"] = c["qk_rope_head_dim"]
    if r.random() < 0.4:
        kinds = r.choices(("full", "shared"), k=c["num_hidden_layers"] - 1)
        c["indexer_types"] = ["full", *kinds]
    return cases.glm_moe_dsa(**c)


def glm4_moe_config(r):
    return cases.glm4_moe(**attention_config(r) | grouped_router_config(r) | dict(
        use_qk_norm=r.random() < 0.5, attention_bias=r.random() < 0.5,
        partial_rotary_factor=r.choice((0.25, 0.5, 1.0))))


def gpt_oss_config(r):
    # mlx-lm needs a layer of each kind, and MXFP4 multiples of 32.
    c, experts = attention_config(r), r.randint(2, 12)
    layers = c["num_hidden_layers"] = r.randint(2, 4)
    kinds = [r.choice(("sliding_attention", "full_attention")) for _ in range(layers - 2)]
    scaling = dict(beta_fast=32.0, beta_slow=1.0, factor=r.choice((4.0, 32.0)), rope_type="yarn", truncate=False,
                   original_max_position_embeddings=r.choice((512, 4096)))
    return cases.gpt_oss(**c | dict(
        layer_types=["sliding_attention", "full_attention", *kinds], num_local_experts=experts, rope_scaling=scaling,
        num_experts_per_tok=r.randint(1, min(experts, 6)), intermediate_size=r.choice((32, 64, 96)),
        sliding_window=r.choice((1, 4, 16, 100)), swiglu_limit=r.choice((7.0, 7.0, 1.5))))


def minimax_m2_config(r):
    c, experts = attention_config(r), r.randint(2, 12)
    return cases.minimax_m2(**c | dict(
        rotary_dim=r.choice((8, 16)), num_local_experts=experts, num_experts_per_tok=r.randint(1, min(experts, 8)),
        intermediate_size=r.choice((32, 64, 96)), use_qk_norm=r.random() < 0.8,
        tie_word_embeddings=r.random() < 0.3))


def granitemoe_config(r):
    # mlx-lm's heads are as wide as hidden_size makes them.
    c, experts = attention_config(r), r.randint(2, 12)
    del c["head_dim"]
    c["hidden_size"] = c["num_attention_heads"] * r.choice((32, 64, 96))
    factors = {key: round(r.uniform(low, high), 3) for key, low, high in (
        ("attention_multiplier", 0.05, 0.3), ("embedding_multiplier", 0.7, 3.0), ("residual_multiplier", 0.2, 1.2),
        ("logits_scaling", 0.5, 8.0))}
    return cases.granitemoe(**c | factors | dict(
        num_local_experts=experts, num_experts_per_tok=r.randint(1, min(experts, 8)),
        intermediate_size=r.choice((32, 64, 96)), tie_word_embeddings=r.random() < 0.6))


def qwen3_next_config(r):
    c, interval, key_heads = common_config(r), r.randint(2, 4), r.randint(1, 3)
    layers = c["num_hidden_layers"] = r.randint(interval, 5)
    # mlx-lm recognizes the Hub's layout by its experts, so the last layer has some.
    dense = [i for i in range(layers - 1) if r.random() < 0.15]
    return cases.qwen3_next(**c | dict(
        full_attention_interval=interval, linear_num_key_heads=key_heads,
        linear_num_value_heads=key_heads * r.choice((1, 2, 4)), linear_key_head_dim=r.choice((16, 32, 48)),
        linear_value_head_dim=r.choice((16, 32, 48)), linear_conv_kernel_dim=r.choice((2, 4, 4, 5)),
        shared_expert_intermediate_size=r.choice((32, 64, 96)), intermediate_size=r.choice((64, 160)),
        mlp_only_layers=dense, decoder_sparse_step=r.choice((1, 1, layers)),
        partial_rotary_factor=r.choice((0.25, 0.5, 1.0)), attention_bias=r.random() < 0.2))


def gemma4_config(r):
    c, experts = attention_config(r), r.randint(2, 12)
    layers = c["num_hidden_layers"] = r.randint(2, 4)
    kinds = [r.choice(("sliding_attention", "full_attention")) for _ in range(layers - 1)]
    # Every layer has the same number of query heads.
    shared = [h for h in (1, 2, 3, 4) if c["num_attention_heads"] % h == 0]
    return cases.gemma4(**c | dict(
        layer_types=[*kinds, "full_attention"], global_head_dim=r.choice((32, 48, 64, 128)),
        num_global_key_value_heads=r.choice(shared), attention_k_eq_v=r.random() < 0.7, num_experts=experts,
        top_k_experts=r.randint(1, min(experts, 8)), moe_intermediate_size=r.choice((32, 64, 96)),
        intermediate_size=r.choice((64, 160)), sliding_window=r.choice((1, 4, 16, 100)),
        final_logit_softcapping=r.choice((30.0, 10.0))))


CONFIGS = dict(
    qwen3_moe=qwen3_moe_config, qwen3_5_moe=qwen3_5_moe_config, qwen3_next=qwen3_next_config,
    deepseek_v3=deepseek_v3_config, deepseek_v32=deepseek_v32_config, glm_moe_dsa=glm_moe_dsa_config,
    glm4_moe=glm4_moe_config, gpt_oss=gpt_oss_config, granitemoe=granitemoe_config, minimax_m2=minimax_m2_config,
    gemma4=gemma4_config)


def random_format(r, config):
    """Random quantization: affine, one of the floating-point formats, or none."""
    text, kind = config.get("text_config", config), config["model_type"]
    layout = r.choice(("mlx",) * 5 + ("mlx-plain", "hub", "hub"))
    mode = r.choice(("affine",) * 4 + ("mxfp4", "nvfp4", "mxfp8"))
    if layout == "hub":
        return dict(layout=layout, mode=r.choice(("affine", "fp8")) if kind in FP8 else "affine")
    if mode != "affine" and layout == "mlx":
        # 16 or 32 weights share a scale. Router and embedding stay affine, as in published models.
        group = 16 if mode == "nvfp4" else 32
        overrides = {t: (8, 32, "affine") for t in ("mlp.gate", "router", "router.proj", "embed_tokens", "moe.gate")}
        return dict(layout=layout, mode=mode, bits=8 if mode == "mxfp8" else 4, group=group, overrides=overrides)
    overrides = {t: r.choice([(b, g) for b in BITS for g in GROUPS] + [None] * 3)
                 for t in r.sample(TENSORS, r.randint(0, 6))}
    # mlx-lm does not quantize rows shorter than a group, and its recipes list tensors that they
    # skip.
    group, columns = r.choice(GROUPS), text["hidden_size"]
    group = max(g for g in GROUPS if g <= group and columns % g == 0)
    chosen = dict(layout=layout, bits=r.choice(BITS), group=group, overrides=overrides,
                  map=r.choice(("named", "nothing")))
    if kind in ("qwen3_moe", "qwen3_5_moe"):
        chosen["recipe"] = r.choice((None,) * 5 + ("mixed_2_6", "mixed_3_4", "mixed_3_6", "mixed_4_6"))
    elif "kv_lora_rank" in text and layout == "mlx" and r.random() < 0.4:
        rank = text["kv_lora_rank"]
        chosen |= dict(kv_b_proj=(r.choice(BITS), max(g for g in GROUPS if rank % g == 0)), map="nothing",
                       overrides=dict(embed_q=None, unembed_out=None) | overrides)
        chosen["overrides"] |= dict(embed_q=None, unembed_out=None)
    return chosen


def random_case(seed, only=None):
    """The case of a seed."""
    r = random.Random(seed)
    config = CONFIGS[only or r.choice(list(CONFIGS))](r)
    kind = config["model_type"]
    extras = kind in ("qwen3_5_moe", "gemma4") and r.random() < 0.5
    chosen = random_format(r, config)
    if chosen["layout"] == "hub" and r.random() < 0.3 and kind in ("deepseek_v3", "glm4_moe", "deepseek_v32"):
        config["num_nextn_predict_layers"], extras = 1, True
    low, short, long = r.choice((0.0, 0.0, -1.0)), r.randint(1, 60), r.randint(100, 300)
    # Large enough that each norm after a block of gemma4 shows beside its scaled embeddings.
    loud = {f"post_{block}_layernorm.weight": 2.0 for block in ("attention", "feedforward")} if kind == "gemma4" else {}
    return Case(
        config, dtype=r.choice(list(DTYPES)), shards=r.choice((1, 1, 2, 3, 7)),
        prefix="model.language_model." if kind == "gemma4" else r.choice(("model.language_model.", "model.")),
        state_dtype=r.choice((None, "f32")), extras=extras, bias_dtype=r.choice(("f32", "bf16")),
        shift={"e_score_correction_bias": low} | loud, prompt=long if r.random() < 0.2 else short,
        steps=r.randint(0, 8), **chosen)


def describe(case):
    """Short description of a case."""
    c = case.config.get("text_config", case.config)
    words = [case.config["model_type"], case.layout, case.dtype]
    if case.layout == "mlx":
        words.append(case.recipe or f"{case.mode} {case.bits}b".removeprefix("affine "))
        words.append(f"g{case.group} {len(case.overrides)} overrides {case.map}")
        words += ["kv_b_proj"] if case.kv_b_proj else []
    elif case.mode == "fp8":
        words.append("fp8")
    first = lambda *keys: next(c[key] for key in keys if key in c)
    k, experts = first("top_k_experts", "num_experts_per_tok"), first(
        "num_experts", "num_local_experts", "n_routed_experts")
    words.append(f"L{c['num_hidden_layers']} h{c['hidden_size']} top {k} of {experts} P{case.prompt}")
    return " ".join(words)


def run(binary, folder, ids, prefill, arguments):
    """Output of `moeflux logits` for `ids`."""
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


def check(binary, folder, seed, case, arguments):
    """Makes, computes and compares the case of a seed: (verdict, details)."""
    r = random.Random(-1 - seed)
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
    if problems and (gap < CLOSE or reference.ties):
        return "close", f"router gap {gap:.0e}: {problems[0]}"
    return ("FAIL", "; ".join(problems[:3])) if problems else ("ok", f"{worst:.1e}")


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("binary", metavar="BIN", type=Path)
    args.add_argument("--seeds", default="0:50", metavar="FIRST:END", help="the seeds to try (default 0:50)")
    args.add_argument("--only", choices=sorted(CONFIGS), help="only this architecture")
    args.add_argument("--prompt", type=int, metavar="N", help="prompts of N tokens, for every seed")
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
            case = random_case(seed, args.only)
            case.prompt = args.prompt or case.prompt
            text = case.config.get("text_config", case.config)
            text["max_position_embeddings"] = max(text["max_position_embeddings"], 2 * case.prompt)
            verdict, details = check(binary, folder, seed, case, passed_on)
            if verdict == "FAIL" and args.keep:
                shutil.copytree(folder, args.keep / folder.name, dirs_exist_ok=True)
        failed += verdict == "FAIL"
        print(f"{seed:5} {verdict:5} {describe(case)}: {details}", flush=True)
    print(f"{end - first} cases, {failed} failed")
    raise SystemExit(failed > 0)


if __name__ == "__main__":
    main()

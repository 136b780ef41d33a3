#!/usr/bin/env python3
"""Makes the golden checkpoints of crates/engine/tests/data/goldens: logits that mlx-lm computed, not we.

usage: scripts/make-golden.py [CASE ...] [--out DIR] [--list]        (no case: all of the table below)

Needs `pip install "mlx[cpu]" mlx-lm`. Each folder holds config.json, the weights, a byte-level tokenizer, and

  golden.json          token ids of the prompt and of the greedy steps, the seed, versions, and two margins:
                       `router_gap`, the closest call between a chosen expert and one that was not, in router logits;
                       `noise`, how far a relative change of 1e-6 in the norms moves a logit, over the rms of all
  golden.safetensors   prompt_ids i32 [P]                  gen_ids_f32 i32 [N]
                       prefill_logits_f32 f32 [P, vocab]   the prompt in one pass
                       decode_logits_f32 f32 [N, vocab]    row i follows feeding gen_ids_f32[i]
                       hidden_f32.L f32 [P, hidden]        output of decoder layer L on the prompt
                       experts_f32.L i32 [P + N, k]        chosen experts of a MoE layer, as a set

All of it in f32 with the same weights upcast exactly. Random weights amplify rounding, so the seed is the first one
whose margins are wide enough that any right f32 implementation chooses the same experts.
"""
import argparse
import json
from pathlib import Path

import mlx.core as mx
import numpy as np

from golden import Case, Reference, make_checkpoint, rms, versions

GOLDENS = Path(__file__).resolve().parent.parent / "crates/engine/tests/data/goldens"
LEAST_ROUTER_GAP, MOST_NOISE, NUDGE = 2e-3, 5e-5, 1e-6


def qwen3_moe(**changes):
    """A tiny Qwen3-MoE config; the vocabulary is odd on purpose, the rows of a matrix need no alignment."""
    return dict(
        architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", hidden_size=64, num_hidden_layers=3,
        intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=8,
        num_experts_per_tok=2, decoder_sparse_step=1, mlp_only_layers=[], moe_intermediate_size=32,
        rms_norm_eps=1e-6, vocab_size=259, rope_theta=1000000.0, tie_word_embeddings=False,
        max_position_embeddings=4096, norm_topk_prob=True, rope_scaling=None, hidden_act="silu",
        attention_bias=False, eos_token_id=1, bos_token_id=0) | changes


def qwen3_5_text(**changes):
    """A tiny text config of Qwen3.5-MoE. `interval` and `rotary` stand for the keys that follow from them."""
    interval, rotary = changes.pop("interval", 4), changes.pop("rotary", 0.25)
    types = changes.pop("types", True)
    config = dict(
        model_type="qwen3_5_moe_text", hidden_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, linear_num_value_heads=4, linear_num_key_heads=2,
        linear_key_head_dim=32, linear_value_head_dim=32, linear_conv_kernel_dim=4, num_experts=8,
        num_experts_per_tok=2, shared_expert_intermediate_size=32, moe_intermediate_size=32, rms_norm_eps=1e-6,
        vocab_size=259, max_position_embeddings=4096, tie_word_embeddings=False, attention_bias=False,
        attn_output_gate=True, full_attention_interval=interval, hidden_act="silu", norm_topk_prob=True,
        mamba_ssm_dtype="float32", eos_token_id=1,
        rope_parameters=dict(mrope_interleaved=True, mrope_section=[3, 3, 2], partial_rotary_factor=rotary,
                             rope_theta=10000000, rope_type="default")) | changes
    if types:
        config["layer_types"] = ["linear_attention" if (i + 1) % interval else "full_attention"
                                 for i in range(config["num_hidden_layers"])]
    return config


def qwen3_5_moe(**changes):
    """The nested config of Qwen3.5-MoE, as the vision-language checkpoints have it."""
    text = qwen3_5_text(**changes)
    return dict(architectures=["Qwen3_5MoeForConditionalGeneration"], model_type="qwen3_5_moe", text_config=text,
                tie_word_embeddings=text["tie_word_embeddings"], eos_token_id=1)


def qwen3_5_flat(**changes):
    """The same without `text_config`, as text-only exports have it."""
    return qwen3_5_text(**changes) | dict(architectures=["Qwen3_5MoeForCausalLM"], model_type="qwen3_5_moe")


CASES = {
    # 3 bits, with 6 for lm_head and some v_proj and down_proj; the router has 3. Query width is not the hidden size.
    "qwen3_moe_mixed_3_6": Case(
        qwen3_moe(hidden_size=128, num_attention_heads=6, num_key_value_heads=2, num_experts=6,
                  moe_intermediate_size=64),
        recipe="mixed_3_6", bits=3, group=64),
    # A dense layer by name, tied embeddings, weights of the top-k not renormalised, k = 1, as many kv heads as heads.
    "qwen3_moe_dense_tied": Case(
        qwen3_moe(hidden_size=96, num_attention_heads=3, num_key_value_heads=3, intermediate_size=160,
                  mlp_only_layers=[1], tie_word_embeddings=True, norm_topk_prob=False, num_experts_per_tok=1),
        bits=5, group=32, dtype="f16", overrides={"mlp.gate": (8, 32)}),
    # Every second layer dense, all experts but one chosen, 2 bits in groups of 128 (no head and no router so).
    "qwen3_moe_sparse_step": Case(
        qwen3_moe(hidden_size=128, num_hidden_layers=4, intermediate_size=256, decoder_sparse_step=2, num_experts=7,
                  num_experts_per_tok=6, moe_intermediate_size=128),
        bits=2, group=128, overrides={"lm_head": (4, 128), "k_proj": (3, 128)}),
    # Six settings in one model and none of them named: bits and group size follow from the shapes.
    "qwen3_moe_inferred": Case(
        qwen3_moe(hidden_size=128, num_hidden_layers=2, moe_intermediate_size=64, num_experts_per_tok=3),
        bits=4, group=64, dtype="f32", map="nothing",
        overrides={"lm_head": (8, 128), "embed_tokens": (6, 64), "v_proj": (8, 32), "o_proj": (5, 32),
                   "switch_mlp.down_proj": (6, 32), "switch_mlp.up_proj": (3, 128)}),
    # 8 bits over five shards; the map says `false` for the router and the head, which stay bf16. One kv head.
    "qwen3_moe_shards": Case(
        qwen3_moe(num_key_value_heads=1, num_experts=9, num_experts_per_tok=4, eos_token_id=[1, 0]),
        bits=8, group=32, shards=5, overrides={"mlp.gate": None, "lm_head": None}),
    # Unquantised f32, experts stacked; every expert is chosen.
    "qwen3_moe_plain_f32": Case(
        qwen3_moe(num_hidden_layers=2, head_dim=16, num_experts=4, num_experts_per_tok=4, rope_theta=10000.0,
                  rms_norm_eps=1e-5),
        layout="mlx-plain", dtype="f32"),
    # As the Hub has it: one bf16 tensor per expert and projection, an expert's three in three shards; a dense layer.
    "qwen3_moe_hub": Case(
        qwen3_moe(mlp_only_layers=[0], num_experts=6, num_experts_per_tok=3, num_key_value_heads=4, head_dim=24),
        layout="hub", shards=3),
    # As the Hub has it: fused experts, A_log and gated norm in f32, tensors of vision and of token prediction.
    "qwen3_5_moe_hub": Case(
        qwen3_5_moe(interval=3, num_hidden_layers=3, num_experts=5, num_experts_per_tok=3),
        layout="hub", shards=2, state_dtype="f32", extras=True),
    # As the Hub has it, text only: flat config, f16, tied, value heads wider than key heads, conv of width 3.
    "qwen3_5_moe_hub_text": Case(
        qwen3_5_flat(interval=2, num_hidden_layers=3, linear_num_key_heads=1, linear_num_value_heads=2,
                     linear_value_head_dim=48, linear_conv_kernel_dim=3, tie_word_embeddings=True, num_experts=5),
        layout="hub", dtype="f16", prefix="model."),
    # Flat config, tied, no layer_types, one value head per key head, rotary on half a head, conv of width 3.
    "qwen3_5_moe_flat_tied": Case(
        qwen3_5_flat(interval=2, types=False, rotary=0.5, hidden_size=96, linear_num_key_heads=3,
                     linear_num_value_heads=3, linear_conv_kernel_dim=3, tie_word_embeddings=True,
                     norm_topk_prob=False, num_key_value_heads=4),
        bits=4, group=32, overrides={"mlp.gate": (8, 32), "shared_expert_gate": (8, 32)}),
    # Four value heads per key head, keys wider than values, rotary on the whole head of 48, a last linear layer, k = 1.
    "qwen3_5_moe_ratio_4": Case(
        qwen3_5_moe(interval=3, rotary=1.0, num_hidden_layers=4, head_dim=48, linear_num_key_heads=1,
                    linear_num_value_heads=4, linear_key_head_dim=64, linear_value_head_dim=32,
                    num_experts_per_tok=1, shared_expert_intermediate_size=64),
        bits=6, group=32, extras=True,
        overrides={"down_proj": (8, 32), "v_proj": (3, 64), "in_proj_qkv": (5, 64), "embed_tokens": (4, 32)}),
    # mlx-lm's 2-and-6-bit recipe in groups of 128, f16 scales, conv of width 5.
    "qwen3_5_moe_mixed_2_6": Case(
        qwen3_5_moe(interval=3, hidden_size=128, num_hidden_layers=3, moe_intermediate_size=128, num_experts=4,
                    shared_expert_intermediate_size=128, linear_conv_kernel_dim=5, num_attention_heads=8),
        recipe="mixed_2_6", bits=2, group=128, dtype="f16"),
    # Groups of 64 that do not divide the inputs of out_proj (96) or o_proj (96): those stay bf16 in a quantised model.
    # The attention has biases.
    "qwen3_5_moe_odd_group": Case(
        qwen3_5_moe(interval=3, num_hidden_layers=3, num_attention_heads=3, num_key_value_heads=1,
                    linear_key_head_dim=48, linear_value_head_dim=48, linear_num_value_heads=2,
                    linear_num_key_heads=1, moe_intermediate_size=64, num_experts_per_tok=7,
                    shared_expert_intermediate_size=64, attention_bias=True),
        bits=5, group=64, shards=2, map="nothing"),
    # Unquantised f32, flat, stacked: width 2 of the convolution, the smallest there is.
    "qwen3_5_moe_plain_f32": Case(
        qwen3_5_flat(interval=2, num_hidden_layers=2, head_dim=16, rotary=0.5, linear_key_head_dim=16,
                     linear_value_head_dim=24, linear_conv_kernel_dim=2, num_experts=3, rms_norm_eps=1e-5),
        layout="mlx-plain", dtype="f32"),
}


def attempt(folder, case, seed):
    """Makes checkpoint and golden with one seed; returns its margins."""
    make_checkpoint(folder, case, seed)
    reference = Reference(folder)
    vocab = reference.config.get("text_config", reference.config)["vocab_size"]
    prompt = np.random.default_rng(seed + 1).integers(2, min(vocab, 258), case.prompt).tolist()
    reference.start()
    last, generated = reference.feed(prompt)[-1], []
    for _ in range(case.steps):
        generated.append(int(last.argmax()))
        last = reference.feed([generated[-1]])[-1]
    (prefill, *decode), hidden, experts, gap = reference.trace([prompt, *([t] for t in generated)])
    reference.perturb(seed, NUDGE)
    reference.start()
    noise = float(np.abs(reference.feed(prompt) - prefill).max()) / rms(prefill)

    tensors = {"prompt_ids": np.array(prompt, np.int32), "gen_ids_f32": np.array(generated, np.int32),
               "prefill_logits_f32": prefill, "decode_logits_f32": np.concatenate(decode)}
    tensors |= {f"hidden_f32.{i}": h[: len(prompt)] for i, h in hidden.items()}
    tensors |= {f"experts_f32.{i}": e for i, e in experts.items()}
    mx.save_safetensors(str(folder / "golden.safetensors"), {k: mx.array(v) for k, v in tensors.items()}, versions())
    golden = dict(arch=case.config["model_type"], seed=seed, **versions(), prompt_ids=prompt, gen_ids_f32=generated,
                  logits_rms=rms(prefill), router_gap=gap if np.isfinite(gap) else None, noise=noise)
    (folder / "golden.json").write_text(json.dumps(golden, indent=1) + "\n")
    return gap, noise


def make(folder, case):
    """Makes a case with the first seed whose margins are wide enough."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed in range(7, 60):
        gap, noise = attempt(folder, case, seed)
        if gap >= LEAST_ROUTER_GAP and noise <= MOST_NOISE:
            kb = sum(f.stat().st_size for f in folder.iterdir()) / 1e3
            print(f"{folder.name:26} {kb:5.0f} kB  seed {seed:2}  router gap {gap:.1e}  noise {noise:.1e}", flush=True)
            return
    raise SystemExit(f"{folder.name}: no seed below 60 is wide enough (last: gap {gap:.1e}, noise {noise:.1e})")


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("cases", nargs="*", metavar="CASE")
    args.add_argument("--out", type=Path, default=GOLDENS)
    args.add_argument("--list", action="store_true", help="print the names of the cases")
    args = args.parse_args()
    if unknown := set(args.cases) - set(CASES):
        raise SystemExit(f"no such case: {', '.join(sorted(unknown))} (see --list)")
    for name in args.cases or CASES:
        print(name) if args.list else make(args.out / name, CASES[name])


if __name__ == "__main__":
    main()

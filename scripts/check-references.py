#!/usr/bin/env python3
"""Computes gpt_oss, deepseek_v32 and glm_moe_dsa in plain numpy, written from the models' own code.

Prints which of the possible readings the goldens and mlx-lm follow; docs/references.md has the
proof of the right one.

usage: scripts/check-references.py FOLDER ...   (checkpoints in the MLX layout, with a golden)

Computes in f64 on the dequantized weights, the whole prompt in one pass without a cache. For each
reading: the largest difference to the golden and to uncorrected mlx-lm, over the rms, and the first
row above 1e-4.
"""
import json
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm import utils as mlx_utils

from golden import read_safetensors, rms


def load(folder):
    """(config, name -> f64 array), with packed matrices dequantized."""
    config = json.loads((folder / "config.json").read_text())
    raw, settings, out = {}, config.get("quantization", {}), {}
    for file in folder.glob("model*.safetensors"):
        raw |= mx.load(str(file))
    for name, value in raw.items():
        base, _, leaf = name.rpartition(".")
        if base + ".scales" in raw and leaf in ("scales", "biases"):
            continue
        if base + ".scales" in raw and leaf == "weight":
            own = {k: settings[k] for k in ("bits", "group_size", "mode") if k in settings} | settings.get(base, {})
            scales, biases = raw[base + ".scales"], raw.get(base + ".biases")
            if biases is not None:
                scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
            value = mx.dequantize(value, scales, biases, **own)
        out[name] = np.array(value.astype(mx.float32), np.float64)
    return config, out


def rms_norm(x, weight, eps):
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * weight


def layer_norm(x, weight, bias):
    x = x - x.mean(-1, keepdims=True)
    return rms_norm(x, weight, 1e-6) + bias


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def yarn(dims, theta, scaling, truncate):
    """(inverse frequencies [dims / 2], concentration): YaRN, arXiv 2309.00071; plain RoPE without
    `scaling`."""
    inverse = theta ** -(np.arange(0, dims, 2) / dims)
    if not scaling or scaling.get("rope_type", scaling.get("type")) == "default":
        return inverse, 1.0
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]
    edge = lambda turns: dims * np.log(original / (turns * 2 * np.pi)) / (2 * np.log(theta))
    low, high = edge(scaling["beta_fast"]), edge(scaling["beta_slow"])
    if truncate:
        low, high = np.floor(low), np.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    far = np.clip((np.arange(dims // 2) - low) / max(high - low, 1e-3), 0, 1)
    mscale = lambda m: 0.1 * m * np.log(factor) + 1
    concentration = mscale(scaling.get("mscale", 1)) / mscale(scaling.get("mscale_all_dim", 0))
    return inverse / factor * far + inverse * (1 - far), concentration


def rotate(x, inverse, concentration, interleaved):
    """RoPE on the first 2 * len(inverse) elements of x [n, heads, d]; position = row."""
    angle = np.arange(len(x))[:, None, None] * inverse
    cos, sin, n = np.cos(angle) * concentration, np.sin(angle) * concentration, 2 * len(inverse)
    pairs, halves = (np.s_[..., 0:n:2], np.s_[..., 1:n:2]), (np.s_[..., : n // 2], np.s_[..., n // 2 : n])
    first, second = pairs if interleaved else halves
    out = x.copy()
    out[first] = x[first] * cos - x[second] * sin
    out[second] = x[second] * cos + x[first] * sin
    return out


def gpt_oss(config, w, ids, truncate):
    """openai/gpt-oss, gpt_oss/torch/model.py."""
    heads, kv_heads, d = (config[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    eps, limit, k = config["rms_norm_eps"], config["swiglu_limit"], config["num_experts_per_tok"]
    inverse, concentration = yarn(d, config["rope_theta"], config["rope_scaling"], truncate)
    n = len(ids)
    distance = np.arange(n)[:, None] - np.arange(n)
    x = w["model.embed_tokens.weight"][ids]
    for i, kind in enumerate(config["layer_types"]):
        p = f"model.layers.{i}."
        linear = lambda name, t: t @ w[f"{p}{name}.weight"].T + w[f"{p}{name}.bias"]
        t = rms_norm(x, w[p + "input_layernorm.weight"], eps)
        q, key, v = (linear(f"self_attn.{m}_proj", t).reshape(n, -1, d) for m in "qkv")
        q, key = (rotate(t, inverse, concentration, interleaved=False) for t in (q, key))
        key, v = (np.repeat(t, heads // kv_heads, axis=1) for t in (key, v))
        scores = np.einsum("qhd,khd->hqk", q, key) / np.sqrt(d)
        seen = (distance >= 0) & ((kind == "full_attention") | (distance < config["sliding_window"]))
        sinks = np.broadcast_to(w[p + "self_attn.sinks"][:, None, None], (heads, n, 1))
        weights = softmax(np.concatenate([np.where(seen, scores, -np.inf), sinks], -1))[..., :-1]
        x = x + linear("self_attn.o_proj", np.einsum("hqk,khd->qhd", weights, v).reshape(n, -1))
        t = rms_norm(x, w[p + "post_attention_layernorm.weight"], eps)
        logits, y = linear("mlp.router", t), np.zeros_like(x)
        for row in range(n):
            chosen = np.argsort(-logits[row], kind="stable")[:k]
            for e, weight in zip(chosen, softmax(logits[row, chosen])):
                part = lambda m: w[f"{p}mlp.experts.{m}"][e]
                expert = lambda m, t: part(m + "_proj.weight") @ t + part(m + "_proj.bias")
                gate = np.minimum(expert("gate", t[row]), limit)
                up = np.clip(expert("up", t[row]), -limit, limit)
                y[row] += weight * expert("down", gate * sigmoid(1.702 * gate) * (up + 1))
        x = x + y
    return rms_norm(x, w["model.norm.weight"], eps) @ w["lm_head.weight"].T


def sparse_mla(config, w, ids, interleaved, late):
    """deepseek-ai/DeepSeek-V3.2-Exp, inference/model.py: MLA over the positions of the indexer."""
    heads, rank, rope, nope, v_dim = (config[k] for k in (
        "num_attention_heads", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
    index_heads, index_dim, index_k = (config[k] for k in ("index_n_heads", "index_head_dim", "index_topk"))
    eps, scaling = config["rms_norm_eps"], config["rope_scaling"]
    theta = (config.get("rope_parameters") or config)["rope_theta"]
    inverse, concentration = yarn(rope, theta, scaling, truncate=True)
    scale = (nope + rope) ** -0.5
    if scaling:
        scale *= (0.1 * scaling["mscale_all_dim"] * np.log(scaling["factor"]) + 1) ** 2
    n = len(ids)
    causal = np.tri(n, dtype=bool)
    x = w["model.embed_tokens.weight"][ids]
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}."
        a = p + "self_attn."
        t = rms_norm(x, w[p + "input_layernorm.weight"], eps)
        latent_q = rms_norm(t @ w[a + "q_a_proj.weight"].T, w[a + "q_a_layernorm.weight"], eps)
        q = (latent_q @ w[a + "q_b_proj.weight"].T).reshape(n, heads, nope + rope)
        kv = t @ w[a + "kv_a_proj_with_mqa.weight"].T
        latent = rms_norm(kv[:, :rank], w[a + "kv_a_layernorm.weight"], eps)
        k_rope = rotate(kv[:, None, rank:], inverse, concentration, interleaved=True)[:, 0]
        q_rope = rotate(q[..., nope:], inverse, concentration, interleaved=True)
        key = np.einsum("tr,hdr->thd", latent, np.swapaxes(w[a + "embed_q.weight"], 1, 2))
        value = np.einsum("tr,hdr->thd", latent, w[a + "unembed_out.weight"])
        scores = np.einsum("qhd,khd->hqk", q[..., :nope], key) + np.einsum("qhd,kd->hqk", q_rope, k_rope)

        iq = (latent_q @ w[a + "indexer.wq_b.weight"].T).reshape(n, index_heads, index_dim)
        ik = layer_norm(t @ w[a + "indexer.wk.weight"].T, *(w[f"{a}indexer.k_norm.{k}"] for k in ("weight", "bias")))
        iq = rotate(iq, inverse, concentration, interleaved)
        ik = rotate(ik[:, None], inverse, concentration, interleaved)[:, 0]
        iw = t @ w[a + "indexer.weights_proj.weight"].T * index_heads**-0.5 * index_dim**-0.5
        index = np.einsum("qh,hqk->qk", iw, np.maximum(np.einsum("qhd,kd->hqk", iq, ik), 0))
        index = np.where(causal, index, -np.inf)
        index[index == 0] = 0.0  # no negative zeros
        if late:
            order = n - 1 - np.argsort(-index[:, ::-1], axis=-1, kind="stable")
        else:
            order = np.argsort(-index, axis=-1, kind="stable")
        seen = np.zeros_like(causal)
        np.put_along_axis(seen, order[:, :index_k], True, axis=-1)
        ranked = np.take_along_axis(index, order, -1)[index_k:]
        for row in np.where(ranked[:, index_k - 1] == ranked[:, index_k])[0] if n > index_k else ():
            print(f"    layer {i}, position {row + index_k}: a tie at the cut, score {ranked[row, index_k]}")
        weights = softmax(np.where(causal & seen, scores * scale, -np.inf))
        x = x + np.einsum("hqk,khd->qhd", weights, value).reshape(n, -1) @ w[a + "o_proj.weight"].T

        t = rms_norm(x, w[p + "post_attention_layernorm.weight"], eps)
        linear = lambda name, t: t @ w[name + "_proj.weight"].T
        mlp = lambda m, t: linear(m + ".down", silu(linear(m + ".gate", t)) * linear(m + ".up", t))
        if i < config["first_k_dense_replace"]:
            x = x + mlp(p + "mlp", t)
            continue
        y, raw = mlp(p + "mlp.shared_experts", t), sigmoid(t @ w[p + "mlp.gate.weight"].T)
        for row in range(n):
            biased = (raw[row] + w[p + "mlp.gate.e_score_correction_bias"]).reshape(config["n_group"], -1)
            if config["n_group"] > 1:
                best = np.sort(biased, -1)[:, -2:].sum(-1)
                out = np.argsort(-best, kind="stable")[config["topk_group"] :]
                biased[out] = -np.inf
            chosen = np.argsort(-biased.ravel(), kind="stable")[: config["num_experts_per_tok"]]
            total = raw[row, chosen].sum()
            for e in chosen:
                g, u, d = (w[f"{p}mlp.switch_mlp.{m}_proj.weight"][e] for m in ("gate", "up", "down"))
                weight = raw[row, e] / total * config["routed_scaling_factor"]
                y[row] += weight * (d @ (silu(g @ t[row]) * (u @ t[row])))
        x = x + y
    return rms_norm(x, w["model.norm.weight"], eps) @ w["lm_head.weight"].T


READINGS = {
    "gpt_oss": {"YaRN's edges as they are": (gpt_oss, dict(truncate=False)),
                "YaRN's edges rounded": (gpt_oss, dict(truncate=True))},
} | dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), {
    f"indexer pairs {pairs}, ties to the {ties}": (sparse_mla, dict(interleaved=interleaved, late=late))
    for pairs, interleaved in (("halves", False), ("neighbours", True))
    for ties, late in (("earlier", False), ("later", True))
})


def compare(got, want):
    """The difference, for printing."""
    rows = np.abs(got - want).max(-1) / rms(want)
    first = np.argmax(rows > 1e-4) if (rows > 1e-4).any() else "none"
    return f"{rows.max():.1e} (first row: {first})"


def main():
    for folder in map(Path, sys.argv[1:]):
        config, weights = load(folder)
        golden = read_safetensors(folder / "golden.safetensors")
        ids = golden["prompt_ids"].tolist()
        want = golden["prefill_logits_f32"]
        model, _ = mlx_utils.load_model(folder)
        model.set_dtype(mx.float32)
        mlx = np.array(model(mx.array([ids]))[0])
        print(folder.name)
        for reading, (model, arguments) in READINGS[config["model_type"]].items():
            logits = model(config, weights, ids, **arguments)
            differences = compare(logits[-len(want) :], want), compare(logits, mlx)
            print(f"  {reading:45} golden {differences[0]}   mlx-lm {differences[1]}", flush=True)


if __name__ == "__main__":
    main()

"""mlx-lm as the reference, corrected where it departs from the models' own code.

docs/references.md proves each correction. `load` replaces mlx-lm's loader; `install` replaces
functions of mlx-lm:

  noaux_tc routers   groups that were not chosen count as minus infinity, not as 0 (deepseek_v3,
                     deepseek_v32, glm4_moe, bailing_moe)
  YaRN               honours `truncate: false` (gpt_oss)
  clamped SwiGLU     honours `swiglu_limit` (gpt_oss)
  indexer            LayerNorm with epsilon 1e-6 (deepseek_v32, glm_moe_dsa); `indexer_types`: a
                     shared one uses the positions of the last full one (glm_moe_dsa)
  norms of latents   have the epsilon `rms_norm_eps` (all latent attention)
  kv_b_proj          if quantized: dequantized, and not quantized again after the split
  FP8 blocks         dequantized to f32, not rounded to bf16
  extra layers       of multi-token prediction are removed at any depth
"""
import math
from unittest import mock

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm import utils as mlx_utils
from mlx_lm.models import bailing_moe, deepseek_v3, deepseek_v32, glm4_moe
from mlx_lm.models.activations import SwigluOAI
from mlx_lm.models.rope_utils import YarnRoPE

softmax_router = bailing_moe.group_expert_select


def biased_scores(logits, bias, n_group, topk_group):
    """(sigmoids, selection scores of noaux_tc, group scores or None): [.., experts] or
    [.., groups]."""
    raw = mx.sigmoid(logits.astype(mx.float32))
    scores, groups = raw + bias, None
    if n_group > 1:
        parts = mx.unflatten(scores, -1, (n_group, -1))
        groups = mx.sort(parts, axis=-1)[..., -2:].sum(axis=-1)
        rank = mx.argsort(mx.argsort(-groups, axis=-1), axis=-1)
        scores = mx.where((rank < topk_group)[..., None], parts, -mx.inf).flatten(-2)
    return raw, scores, groups


def select(logits, bias, top_k, n_group, topk_group, routed_scaling_factor, norm_topk_prob):
    """noaux_tc as in DeepSeek's `Gate`: (expert ids, weights)."""
    raw, scores, _ = biased_scores(logits, bias, n_group, topk_group)
    ids = mx.argsort(-scores, axis=-1)[..., :top_k]
    weights = mx.take_along_axis(raw, ids, axis=-1)
    if top_k > 1 and norm_topk_prob:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return ids, weights * routed_scaling_factor


def select_ling(logits, bias, top_k, n_group, topk_group, scale, norm_topk_prob, score_function):
    """As `select`, or a plain softmax router."""
    if score_function == "sigmoid":
        return select(logits, 0.0 if bias is None else bias, top_k, n_group, topk_group, scale, norm_topk_prob)
    return softmax_router(logits, bias, top_k, n_group, topk_group, scale, norm_topk_prob, score_function)


class Remembering(deepseek_v32.Indexer):
    """An indexer that records its positions."""

    chosen = None

    def __call__(self, x, qr, mask, cache=None):
        Remembering.chosen = super().__call__(x, qr, mask, cache)
        return Remembering.chosen


class Shared(nn.Module):
    """Replaces an indexer: returns the positions of the last one."""

    def __call__(self, x, qr, mask, cache=None):
        if cache is not None:
            # mlx-lm's attention requires a cache that grows.
            zeros = mx.zeros((*x.shape[:1], 1, x.shape[1], 1))
            cache.update_and_fetch(zeros, zeros)
        return Remembering.chosen


def share_indexers(model, types):
    """Installs `Shared` in the layers that `types` names, before weights are loaded."""
    for layer, kind in zip(model.layers, types):
        if kind == "shared":
            layer.self_attn.indexer = Shared()
        else:
            layer.self_attn.indexer.__class__ = Remembering


def install():
    """Replaces the routers' function. All other corrections are per model."""
    for module in (deepseek_v3, deepseek_v32, glm4_moe):
        module.group_expert_select = select
    bailing_moe.group_expert_select = select_ling
    # The same model by the name of its second generation.
    mlx_utils.MODEL_REMAPPING["bailing_moe_v2"] = "bailing_moe"


def yarn_periods(dims, base, scaling):
    """theta^(2i/d) scaled by YaRN [dims / 2], with edges that are not rounded (arXiv
    2309.00071)."""
    inverse = base ** -(np.arange(0, dims, 2) / dims)
    edge = lambda turns: dims * math.log(scaling["original_max_position_embeddings"] / (turns * 2 * math.pi)) / (
        2 * math.log(base))
    low, high = max(edge(scaling.get("beta_fast", 32)), 0), min(edge(scaling.get("beta_slow", 1)), dims - 1)
    far = np.clip((np.arange(dims // 2) - low) / max(high - low, 1e-3), 0, 1)
    return mx.array((1 / (inverse / scaling["factor"] * far + inverse * (1 - far))).astype(np.float32))


def prepare(weights, config):
    """Tensors of a checkpoint, in a form that mlx-lm's `sanitize` leaves intact."""
    layers, out = config["num_hidden_layers"], {}
    for name, value in weights.items():
        parts = name.split("layers.")
        if len(parts) == 2 and parts[1].split(".")[0].isdigit() and int(parts[1].split(".")[0]) >= layers:
            continue
        base = name.removesuffix(".weight")
        if name.endswith("_scale_inv") or ".kv_b_proj." in name and not name.endswith(".weight"):
            continue
        if name + "_scale_inv" in weights:
            value = dequantise_blocks(value, weights[name + "_scale_inv"])
        elif ".kv_b_proj." in name and base + ".scales" in weights:
            scales, biases = (weights[f"{base}.{k}"].astype(mx.float32) for k in ("scales", "biases"))
            rank = config["kv_lora_rank"]
            value = mx.dequantize(value, scales, biases, rank // scales.shape[-1], value.shape[-1] * 32 // rank)
        out[name] = value
    return out


def dequantise_blocks(value, scale):
    """f32 values of an FP8 E4M3 matrix [.., m, n] with one scale per 128x128 block."""
    m, n = value.shape[-2:]
    full = mx.repeat(mx.repeat(scale.astype(mx.float32), 128, axis=-2), 128, axis=-1)
    return mx.from_fp8(value, dtype=mx.float32) * full[..., :m, :n]


def load(folder):
    """(model, config) of a checkpoint, all weights upcast exactly to f32."""
    config = mlx_utils.load_config(folder)
    text = config.get("text_config", config)
    model_class, _ = mlx_utils._get_classes(config)
    sanitize = getattr(model_class, "sanitize", lambda _, weights: weights)

    def prepared(model, weights):
        share_indexers(model, config.get("indexer_types") or [])
        return sanitize(model, prepare(weights, text))

    with mock.patch.object(model_class, "sanitize", prepared, create=True):
        model, config = mlx_utils.load_model(folder)
    model.set_dtype(mx.float32)
    scaling = text.get("rope_scaling") or {}
    for name, module in model.named_modules():
        if name.endswith(("q_a_layernorm", "kv_a_layernorm")):
            module.eps = text["rms_norm_eps"]
        elif isinstance(module, YarnRoPE) and not scaling.get("truncate", True):
            module._freqs = yarn_periods(module.dims, text["rope_theta"], scaling)
        elif isinstance(module, SwigluOAI):
            module._limit = text.get("swiglu_limit", 7.0)
        elif isinstance(module, deepseek_v32.Indexer):
            module.k_norm.eps = 1e-6
    mx.eval(model.parameters())
    return model, config


install()

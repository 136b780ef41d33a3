"""Tiny random checkpoints and their results in mlx-lm: shared by make-golden.py and fuzz-golden.py.

Needs `pip install "mlx[cpu]" mlx-lm` (written against mlx 0.32, mlx-lm 0.32). Nothing is
downloaded.

A case is a `Case`: a config as the Hub has it, quantization settings, the dtype of all other
tensors, and a layout:

  mlx         quantized as mlx-lm writes it: stacked experts, RMSNorm weights with the 1 added
  mlx-plain   the same, unquantized
  hub         Hugging Face's own layout, unquantized except for gpt_oss. Most models have one tensor
              per expert and projection.
              qwen3_5_moe, gemma4: fused `experts.gate_up_proj` [E, 2I, H] and
              `experts.down_proj` [E, H, I].
              qwen3_vl_moe: the same by inputs, [E, H, 2I] and [E, I, H].
              Qwen's delta-nets: conv1d [C, 1, K], RMSNorm weights without the 1 (except the gated
              norm of the delta-net).
              DeepSeek: `kv_b_proj` whole. minimax_m2: w1, w2, w3.
              granitemoe: fused as above, under the names of linear layers.
              gpt_oss: experts in MXFP4, `gate_up_proj_blocks` with gate and up rows interleaved.

`Reference` loads a finished folder through mlx-lm with the corrections of corrected.py, upcasts
every tensor exactly, and computes in f32.
"""
import copy
import json
import struct
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
from mlx.utils import tree_flatten, tree_map_with_path, tree_unflatten
from mlx_lm import utils as mlx_utils
from mlx_lm.convert import mixed_quant_predicate_builder
from mlx_lm.models import deepseek_v32
from mlx_lm.models.cache import make_prompt_cache

import corrected
import seeded

mx.set_default_device(mx.cpu)

DTYPES = dict(bf16=mx.bfloat16, f16=mx.float16, f32=mx.float32)
HUB_DTYPES = dict(bf16="bfloat16", f16="float16", f32="float32")


@dataclass
class Case:
    """One checkpoint to make. `config` is the Hub's; the table is in cases.py."""

    config: dict
    layout: str = "mlx"
    dtype: str = "bf16"
    bits: int = 4
    group: int = 64
    # "affine", "mxfp4", "nvfp4" or "mxfp8". In the hub layout "fp8": E4M3, a scale per 128x128
    # block.
    mode: str = "affine"
    # Tensor path suffix -> (bits, group) or (bits, group, mode); None: not quantized. First match
    # wins.
    overrides: dict = field(default_factory=dict)
    # MLX layout of DeepSeek's attention: bits and group of a whole `kv_b_proj`, which replaces
    # embed_q and unembed_out.
    kv_b_proj: tuple | None = None
    # Tensor name suffix -> value added to all of its random values.
    shift: dict = field(default_factory=dict)
    # dtype of e_score_correction_bias, which mlx-lm keeps in f32 and some exports do not.
    bias_dtype: str = "f32"
    # One of mlx-lm's mixed recipes ("mixed_3_6"); replaces `bits` and `overrides`.
    recipe: str | None = None
    # Overrides in config.json. "named": each is listed, unquantized ones as false. "nothing": none
    # is; they follow from the shapes.
    map: str = "named"
    shards: int = 1
    # Hub layout: prefix of the decoder's tensors. qwen3_5_moe: "model.language_model.", or "model."
    # for text only.
    prefix: str = "model.language_model."
    # dtype of A_log and of the delta-net's gated norm in the hub layout; f32 in some exports.
    state_dtype: str | None = None
    # Extra tensors of a vision tower and of multi-token prediction, which a text runtime must skip.
    extras: bool = False
    prompt: int = 21
    steps: int = 12
    # Number of the prompt's last rows that a golden stores (None: all).
    keep: int | None = None
    # Whether the first seed is used, regardless of its margins.
    any_seed: bool = False


# --- making a checkpoint --------------------------------------------------------------------------


def random_tensor(rng, name, shape):
    """Random values, large enough that each part (gates, norms, biases, decay) shows in the
    logits."""
    fan_in = np.sqrt(shape[-1])
    if name.endswith("A_log"):
        return np.log(rng.uniform(0.1, 8.0, shape))
    if name.endswith("dt_bias"):
        return rng.normal(-1.0, 1.0, shape)
    if "conv1d" in name:
        return rng.normal(0.0, 0.4, shape)
    if name.endswith("sinks"):
        return rng.normal(0.0, 1.0, shape)
    if name.endswith("norm.bias"):
        return rng.normal(0.0, 0.1, shape)
    if name.endswith("layer_scalar"):
        return rng.uniform(0.5, 1.0, shape)
    if name.endswith("router.scale"):
        # Over the root of the hidden size, so that the router's logits are of order 1.
        return rng.normal(1.0, 0.15, shape) * np.sqrt(shape[-1])
    if name.endswith("per_expert_scale"):
        return rng.uniform(0.5, 1.5, shape)
    if "norm" in name:
        return np.clip(rng.normal(1.0, 0.15, shape), 0.55, 1.9)
    if len(shape) == 1:
        return rng.normal(0.0, 0.1, shape)
    if "embed_tokens" in name or "word_embeddings" in name:
        return rng.normal(0.0, 1.0, shape)
    routers = ("mlp.gate.weight", "mlp.gate.gate_proj.weight", "moe.gate.weight", "router.weight",
               "router.proj.weight", "router.layer.weight")
    if name.endswith(routers) or "lm_head" in name:
        return rng.normal(0.0, 3.0 / fan_in, shape)
    return rng.normal(0.0, 1.5 / fan_in, shape)


def random_model(case, seed):
    """A model of mlx-lm with random weights in the case's dtype; A_log stays f32, as in mlx-lm."""
    dtype = DTYPES[case.dtype]
    model_class, args_class = mlx_utils._get_classes(case.config)
    model = model_class(args_class.from_dict(copy.deepcopy(case.config)))
    corrected.share_indexers(model, case.config.get("indexer_types") or [])
    rng = np.random.default_rng(seed)

    def random(name, shape):
        value = random_tensor(rng, name, shape) + next((v for k, v in case.shift.items() if name.endswith(k)), 0.0)
        return mx.array(value.astype(np.float32))

    model.update(tree_unflatten(
        [(name, random(name, value.shape)) for name, value in sorted(tree_flatten(model.parameters()))]))
    keep = getattr(model, "cast_predicate", lambda _: True)
    model.update(tree_map_with_path(lambda k, v: v.astype(dtype) if keep(k) else v, model.parameters()))
    model.eval()
    return model


def quantise(model, case):
    """Quantizes `model` in place. Returns it, and the config with mlx-lm's `quantization` map."""
    routers = getattr(model, "quant_predicate", None) or (lambda path, module: True)
    unquantised = []

    def by_overrides(path, module):
        setting = next((s for suffix, s in case.overrides.items() if path.endswith(suffix)), "default")
        if setting is None:
            unquantised.append(path)
            return False
        params = routers(path, module) if setting == "default" else dict(zip(("bits", "group_size", "mode"), setting))
        if isinstance(params, dict) and module.weight.shape[-1] % params["group_size"]:
            return False
        return params

    predicate = mixed_quant_predicate_builder(case.recipe, model, case.group) if case.recipe else by_overrides
    model, config = mlx_utils.quantize_model(
        model, copy.deepcopy(case.config), case.group, case.bits, case.mode, quant_predicate=predicate
    )
    if case.map == "nothing":
        config["quantization"] = {k: config["quantization"][k] for k in ("group_size", "bits", "mode")}
    else:
        # mlx-vlm and older exports list unquantized tensors with `false`.
        config["quantization"] |= {path: False for path in sorted(unquantised)}
    config["quantization_config"] = config["quantization"]
    return model, config


def hub_tensors(weights, case):
    """Converts mlx-lm's tensors to the Hub's names and shapes: the inverse of mlx-lm's
    `sanitize`."""
    kind = case.config["model_type"]
    nested, qwen_linear = kind.startswith(("qwen3_5", "qwen3_vl", "gemma4")), kind.startswith(("qwen3_5", "qwen3_next"))
    letters = dict(gate_proj="w1", down_proj="w2", up_proj="w3") if kind == "minimax_m2" else {}
    out = {}
    for source, value in weights.items():
        name = source
        if nested:
            name = name.removeprefix("language_model.")
            if name.startswith("model."):
                name = case.prefix + name.removeprefix("model.")
        if ".switch_mlp." in name or ".switch_glu." in name:
            stem = name.removesuffix(".weight").replace("experts.switch_glu", "switch_mlp")
            base, projection = stem.split(".switch_mlp.")
            fused = dict(gate_up_proj="input_linear.weight", down_proj="output_linear.weight")
            if not nested and kind != "granitemoe":
                for e in range(value.shape[0]):
                    out[f"{base}.experts.{e}.{letters.get(projection, projection)}.weight"] = value[e]
                continue
            if projection == "up_proj":
                continue
            if projection == "gate_proj":
                up = weights[source.replace("gate_proj", "up_proj")]
                value, projection = mx.concatenate([value, up], axis=1), "gate_up_proj"
            if kind.startswith("qwen3_vl"):
                value = mx.contiguous(value.swapaxes(1, 2))
            out[f"{base}.{fused[projection] if kind == 'granitemoe' else f'experts.{projection}'}"] = value
            continue
        if qwen_linear and "conv1d" in name:
            value = mx.contiguous(value.moveaxis(1, 2))
        elif qwen_linear and "norm" in name and "linear_attn" not in name:
            # Exact: a bf16 or f16 value from 0.5 to 2, minus 1, needs no more mantissa bits.
            assert float(value.min()) >= 0.5 and float(value.max()) < 2.0
            value = value - mx.array(1.0, value.dtype)
        if "linear_attn" in name and name.endswith(("A_log", "linear_attn.norm.weight")):
            value = value.astype(DTYPES[case.state_dtype or case.dtype])
        out[name.replace("mlp.gate.gate_proj.", "mlp.gate.")] = value
    return out


def whole_kv_b_proj(weights, setting):
    """Replaces the halves of `kv_b_proj` by the whole, [heads * (nope + v), rank]. `setting` is
    (bits, group) or None."""
    for name in [n for n in weights if n.endswith(".embed_q.weight")]:
        base = name.removesuffix("embed_q.weight")
        halves = weights.pop(name).swapaxes(-1, -2), weights.pop(base + "unembed_out.weight")
        whole = mx.contiguous(mx.concatenate(halves, axis=1).flatten(0, 1))
        parts = [whole] if setting is None else mx.quantize(whole, bits=setting[0], group_size=setting[1])
        weights |= {f"{base}kv_b_proj.{leaf}": part for leaf, part in zip(("weight", "scales", "biases"), parts)}
    return weights


def published_mxfp4(weights):
    """Experts of gpt_oss as published by OpenAI: gate and up rows interleaved, blocks of 16 bytes
    with a scale."""
    out = {}
    for name, value in weights.items():
        if ".mlp.experts." not in name:
            out[name] = value
            continue
        base, projection, leaf = name.rsplit(".", 2)
        if projection == "up_proj":
            continue
        if projection == "gate_proj":
            up = weights[f"{base}.up_proj.{leaf}"]
            value, projection = mx.stack([value, up], axis=2).flatten(1, 2), "gate_up_proj"
        if leaf == "weight":
            value = mx.unflatten(mx.contiguous(value).view(mx.uint8), -1, (-1, 16))
        out[f"{base}.{projection}_{dict(weight='blocks').get(leaf, leaf)}"] = mx.contiguous(value)
    return out


def published_fp8(weights):
    """Matrices of the decoder layers, except the router, in E4M3 with an f32 scale per 128x128
    block."""
    out = {}
    for name, value in weights.items():
        if value.ndim != 2 or ".layers." not in name or name.endswith((".gate.weight", "weights_proj.weight")):
            out[name] = value
            continue
        m, n = value.shape
        pad = mx.pad(value.astype(mx.float32), ((0, -m % 128), (0, -n % 128)))
        blocks = mx.abs(pad).reshape(-(-m // 128), 128, -1, 128).max(axis=(1, 3))
        out[name + "_scale_inv"] = scale = blocks / 448
        full = mx.repeat(mx.repeat(scale, 128, axis=0), 128, axis=1)[:m, :n]
        out[name] = mx.to_fp8(value.astype(mx.float32) / full)
    return out


def extra_tensors(case):
    """Tensors outside the text model, under their published names."""
    dtype, zeros = DTYPES[case.dtype], {}
    if "num_nextn_predict_layers" in case.config:
        layer = f"model.layers.{case.config['num_hidden_layers']}."
        zeros[layer + "eh_proj.weight"] = (16, 32)
        zeros[layer + "enorm.weight"] = zeros[layer + "shared_head.norm.weight"] = (16,)
        zeros[layer + "self_attn.kv_b_proj.weight"] = (32, 16)
        zeros[layer + "mlp.experts.0.gate_proj.weight"] = (8, 16)
        zeros[layer + "mlp.gate.e_score_correction_bias"] = (4,)
        return {name: mx.full(shape, 0.5, dtype) for name, shape in zeros.items()}
    if case.config["model_type"] == "gemma4":
        prefix = "model." if case.layout == "hub" else ""
        zeros[prefix + "vision_tower.encoder.layers.0.self_attn.q_proj.linear.weight"] = (8, 8)
        zeros[prefix + "embed_vision.embedding_projection.weight"] = (16, 8)
        return {name: mx.full(shape, 0.5, dtype) for name, shape in zeros.items()}
    vision = "model.visual." if case.layout == "hub" else "vision_tower."
    zeros[vision + "patch_embed.proj.weight"] = (8, 3, 2, 4, 4)
    zeros[vision + "blocks.0.attn.qkv.weight"] = (24, 8)
    zeros[vision + "blocks.0.attn.qkv.bias"] = (24,)
    zeros[vision + "merger.norm.weight"] = (8,)
    if case.layout == "hub":
        zeros["mtp.fc.weight"] = (16, 32)
        zeros["mtp.norm.weight"] = (16,)
        zeros["mtp.layers.0.input_layernorm.weight"] = (16,)
        zeros["mtp.layers.0.self_attn.q_proj.weight"] = (32, 16)
        zeros["mtp.layers.0.mlp.experts.gate_up_proj"] = (4, 16, 16)
        zeros["mtp.layers.0.mlp.experts.down_proj"] = (4, 16, 8)
    return {name: mx.full(shape, 0.5, dtype) for name, shape in zeros.items()}


def save_weights(folder, weights, shards):
    """Writes the tensors to `shards` files in turn, so that planes of one matrix are in several."""
    names = sorted(weights)
    files = ["model.safetensors"] if shards == 1 else [
        f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)
    ]
    for i, file in enumerate(files):
        part = {name: weights[name] for name in names[i::shards]}
        mx.save_safetensors(str(folder / file), part, metadata={"format": "mlx"})
        label_fp8(folder / file, {name for name in part if name + "_scale_inv" in weights})
    if shards > 1:
        index = {"metadata": {"total_size": sum(v.nbytes for v in weights.values())},
                 "weight_map": {name: files[i % shards] for i, name in enumerate(names)}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def label_fp8(file, names):
    """Sets the dtype of tensors to E4M3 in the header; mlx saves them as u8."""
    if names:
        data = file.read_bytes()
        (n,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + n])
        for name in names:
            header[name]["dtype"] = "F8_E4M3"
        text = json.dumps(header, separators=(",", ":")).encode()
        file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + n :])


def make_checkpoint(folder, case, seed):
    """Writes config, weights and tokenizer of `case` to `folder`. Deletes older weights there."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("model*.safetensors*"):
        old.unlink()
    model = random_model(case, seed)
    config = copy.deepcopy(case.config)
    if case.layout == "mlx":
        model, config = quantise(model, case)
    elif case.config["model_type"] == "gpt_oss" and case.layout == "hub":
        experts = lambda path, _: ".mlp.experts." in path
        model, _ = mlx_utils.quantize_model(model, {}, 32, 4, "mxfp4", quant_predicate=experts)
    weights = dict(tree_flatten(model.parameters()))
    for name in [n for n in weights if n.endswith("e_score_correction_bias")]:
        weights[name] = weights[name].astype(DTYPES[case.bias_dtype])
    if case.layout == "hub" or case.kv_b_proj:
        weights = whole_kv_b_proj(weights, case.kv_b_proj)
    if case.layout == "hub":
        config.get("text_config", config)["dtype"] = HUB_DTYPES[case.dtype]
        if case.config["model_type"] == "gpt_oss":
            weights = published_mxfp4(weights)
            config["quantization_config"] = dict(quant_method="mxfp4", modules_to_not_convert=[
                "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"])
        weights = hub_tensors(weights, case)
        if case.mode == "fp8":
            weights = published_fp8(weights)
            config["quantization_config"] = dict(
                activation_scheme="dynamic", fmt="e4m3", quant_method="fp8", weight_block_size=[128, 128])
    if case.extras:
        weights |= extra_tensors(case)
    save_weights(folder, weights, case.shards)
    seeded.lay_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(config, indent=1))


# --- results of mlx-lm ----------------------------------------------------------------------------


class Reference:
    """A checkpoint in mlx-lm: weights upcast exactly to f32, all activations f32."""

    def __init__(self, folder):
        self.model, self.config = corrected.load(Path(folder))
        # Rows of which an indexer's last chosen position and first rejected one have the same score.
        self.cache, self.ties = None, 0

    def start(self):
        """Starts a new sequence."""
        self.cache = make_prompt_cache(self.model)

    def feed(self, ids):
        """Logits f32 [n, vocab] of `ids`, appended to the sequence."""
        logits = self.model(mx.array([ids]), cache=self.cache)
        return np.array(logits[0].astype(mx.float32))

    def perturb(self, seed, relative):
        """Multiplies every weight vector (norms, decay, delta-net biases) by 1 + relative * N(0,
        1). The change of the logits measures how much the model amplifies rounding."""
        rng = np.random.default_rng(seed)
        nudge = lambda v: v * mx.array(1 + relative * rng.normal(size=v.shape).astype(np.float32))
        self.model.update(tree_map_with_path(lambda _, v: nudge(v) if v.ndim == 1 else v, self.model.parameters()))

    def trace(self, ids_list):
        """Feeds the lists of ids to a new sequence. Returns (logits per list, hidden, experts,
        gap).

        hidden[L] f32 [n, hidden] is the output of decoder layer L; experts[L] i32 [n, k] is the
        chosen set of a MoE layer, unordered; both over all rows fed. gap is the smallest distance
        between the router logits of the last chosen expert and the first rejected one, or between
        indexer scores of positions. Below about 1e-4, rounding may change the choice."""
        hidden, experts, gaps, undo = {}, {}, [np.inf], []

        def wrap(module_class, see):
            call = module_class.__call__

            def seen(module, x, *args, **kwargs):
                y = call(module, x, *args, **kwargs)
                see(module, x, y)
                return y

            undo.append((module_class, call))
            module_class.__call__ = seen

        layers = list(self.model.layers)
        blocks = {i: block for i, block in enumerate(map(moe_block, layers)) if block is not None}
        number = {id(layer): i for i, layer in enumerate(layers)} | {id(block): i for i, block in blocks.items()}

        def see_layer(layer, x, y):
            y = y[0] if isinstance(y, tuple) else y
            hidden.setdefault(number[id(layer)], []).append(np.array(y[0]))

        def see_moe(moe, x, y):
            if id(moe) not in number:
                return
            scores, k, gap = routing(moe, x)
            order = np.argsort(-scores, axis=-1, kind="stable")
            gaps.extend([gap, cut(scores, order, k)])
            experts.setdefault(number[id(moe)], []).append(order[:, :k].astype(np.int32))

        for layer_class in {type(layer) for layer in layers}:
            wrap(layer_class, see_layer)
        for moe_class in {type(block) for block in blocks.values()}:
            wrap(moe_class, see_moe)
        try:
            with mock.patch.object(deepseek_v32, "mx", IndexerWatch(gaps)) as watch:
                self.start()
                logits = [self.feed(ids) for ids in ids_list]
                self.ties = watch.ties
        finally:
            for module_class, call in undo:
                module_class.__call__ = call
        join = lambda rows: {i: np.concatenate(v) for i, v in sorted(rows.items())}
        return logits, join(hidden), join(experts), min(gaps)


class IndexerWatch:
    """`mlx.core` for mlx-lm's DeepSeek-V3.2. Records the gap between the last chosen position and
    the first rejected one; rows without a gap are counted."""

    def __init__(self, gaps):
        self.gaps, self.ties = gaps, 0

    def __getattr__(self, name):
        return getattr(mx, name)

    def argpartition(self, scores, kth, axis):
        if kth < 0:
            rows = np.array(scores[0, 0])
            rows = rows[np.isfinite(rows).sum(-1) > -kth]
            for row in rows[:, None]:
                gap = cut(row, np.argsort(-row, axis=-1, kind="stable"), -kth)
                self.ties += gap == 0
                self.gaps.append(gap or np.inf)
        return mx.argpartition(scores, kth=kth, axis=axis)


def cut(scores, order, k):
    """Smallest distance, over all rows, between the k-th largest score and the next."""
    if not len(scores) or k >= scores.shape[-1]:
        return np.inf
    top = np.take_along_axis(scores, order[:, : k + 1], -1)
    return float((top[:, k - 1] - top[:, k]).min())


def moe_block(layer):
    """The module of a decoder layer whose input the router reads, or None in a dense layer."""
    if hasattr(layer, "router"):
        return layer.router
    block = getattr(layer, "block_sparse_moe", None) or layer.mlp
    return block if hasattr(block, "switch_mlp") or hasattr(block, "experts") else None


def routing(moe, x):
    """(selection scores of a MoE block [n, experts], k, gap of its groups), in units of router
    logits. A sigmoid changes by at most a quarter of the change of its logit."""
    x = x[0] if x.ndim == 3 else x
    if hasattr(moe, "per_expert_scale"):
        logits = moe.proj(mx.fast.rms_norm(x, moe.scale * moe._root_size, moe.eps))
        return np.array(logits), moe.config.top_k_experts, np.inf
    if hasattr(moe, "router") and hasattr(moe.router, "layer"):
        return np.array(moe.router.layer(x)), moe.router.top_k, np.inf
    if hasattr(moe, "router"):
        return np.array(moe.router(x)), moe.num_experts_per_tok, np.inf
    if hasattr(moe, "e_score_correction_bias"):
        _, scores, _ = corrected.biased_scores(moe.gate(x), moe.e_score_correction_bias, 1, 1)
        return 4 * np.array(scores), moe.num_experts_per_tok, np.inf
    gate = moe.gate
    if hasattr(gate, "expert_bias") and gate.score_function == "softmax":
        return np.array(gate.gate_proj(x)), gate.top_k, np.inf
    if hasattr(gate, "expert_bias"):
        logits, bias = gate.gate_proj(x), gate.expert_bias
    elif hasattr(gate, "e_score_correction_bias"):
        logits, bias = x @ gate.weight.T, gate.e_score_correction_bias
    else:
        return np.array(gate(x)), moe.top_k, np.inf
    _, scores, groups = corrected.biased_scores(logits, bias, gate.n_group, gate.topk_group)
    gap = np.inf
    if groups is not None:
        groups = 4 * np.array(groups)
        gap = cut(groups, np.argsort(-groups, axis=-1, kind="stable"), gate.topk_group)
    return 4 * np.array(scores), gate.top_k, gap


def read_safetensors(path):
    """name -> numpy array of a safetensors file of f32, i32 and u8."""
    data = Path(path).read_bytes()
    (n,) = struct.unpack("<Q", data[:8])
    kinds, out = {"F32": np.float32, "I32": np.int32, "U8": np.uint8}, {}
    for name, entry in json.loads(data[8 : 8 + n]).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            out[name] = np.frombuffer(data[8 + n + begin : 8 + n + end], kinds[entry["dtype"]]).reshape(entry["shape"])
    return out


def rms(a):
    """Root of the mean square."""
    return float(np.sqrt(np.mean(np.square(a, dtype=np.float64))))


def versions():
    """The versions that made a golden, for its metadata."""
    return {"mlx": mx.__version__, "mlx_lm": mlx_lm.__version__}

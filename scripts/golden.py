"""Tiny random checkpoints, and what mlx-lm computes on them: the parts that make-golden.py and fuzz-golden.py share.

Needs `pip install "mlx[cpu]" mlx-lm` (written against mlx 0.32, mlx-lm 0.32). Nothing is downloaded.

A case is a `Case`: a config as the Hub has it, how to quantise, the dtype of everything that is not quantised, and a
layout:

  mlx         quantised as mlx-lm writes it: stacked experts, RMSNorm weights with the 1 already added
  mlx-plain   the same, unquantised
  hub         Hugging Face's own layout, unquantised. qwen3_moe: one tensor per expert and projection. qwen3_5_moe:
              fused `experts.gate_up_proj` [E, 2I, H] and `experts.down_proj` [E, H, I], conv1d [C, 1, K], RMSNorm
              weights without the 1 (but not the gated norm of the delta-net).

`Reference` loads a finished folder through mlx-lm's own loader, upcasts every tensor exactly and computes in f32.
"""
import copy
import json
import struct
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
from mlx.utils import tree_flatten, tree_map_with_path, tree_unflatten
from mlx_lm import utils as mlx_utils
from mlx_lm.convert import mixed_quant_predicate_builder
from mlx_lm.models.cache import make_prompt_cache

mx.set_default_device(mx.cpu)

DTYPES = dict(bf16=mx.bfloat16, f16=mx.float16, f32=mx.float32)
HUB_DTYPES = dict(bf16="bfloat16", f16="float16", f32="float32")


@dataclass
class Case:
    """One checkpoint to make. `config` is the Hub's; see the table in make-golden.py."""

    config: dict
    layout: str = "mlx"
    dtype: str = "bf16"
    bits: int = 4
    group: int = 64
    # Tensor path suffix -> (bits, group), or None for "leave it unquantised". The first match wins.
    overrides: dict = field(default_factory=dict)
    # One of mlx-lm's mixed recipes ("mixed_3_6"); replaces `bits` and `overrides`.
    recipe: str | None = None
    # What config.json says about overrides: "named" lists each (unquantised ones as false), "nothing" leaves the
    # reader to infer them from the shapes.
    map: str = "named"
    shards: int = 1
    # Hub layout: prefix of the decoder's tensors (qwen3_5_moe: "model.language_model.", or "model." for text only).
    prefix: str = "model.language_model."
    # dtype of A_log and of the delta-net's gated norm in the hub layout, which some exports keep in f32.
    state_dtype: str | None = None
    # Extra tensors of a vision tower and of multi-token prediction, which a text runtime has to skip.
    extras: bool = False
    prompt: int = 21
    steps: int = 12


# --- making a checkpoint ---------------------------------------------------------------------------------------------


def random_tensor(rng, name, shape):
    """Random values wide enough that every part (gates, norms, biases, decay, routing) shows in the logits."""
    fan_in = np.sqrt(shape[-1])
    if name.endswith("A_log"):
        return np.log(rng.uniform(0.1, 8.0, shape))
    if name.endswith("dt_bias"):
        return rng.normal(-1.0, 1.0, shape)
    if "conv1d" in name:
        return rng.normal(0.0, 0.4, shape)
    if "norm" in name:
        return np.clip(rng.normal(1.0, 0.15, shape), 0.55, 1.9)
    if len(shape) == 1:
        return rng.normal(0.0, 0.1, shape)
    if "embed_tokens" in name:
        return rng.normal(0.0, 1.0, shape)
    if name.endswith("mlp.gate.weight") or "lm_head" in name:
        return rng.normal(0.0, 3.0 / fan_in, shape)
    return rng.normal(0.0, 1.5 / fan_in, shape)


def random_model(config, seed, dtype):
    """A model of mlx-lm with random weights in `dtype` (A_log stays f32, as mlx-lm keeps it)."""
    model_class, args_class = mlx_utils._get_classes(config)
    model = model_class(args_class.from_dict(copy.deepcopy(config)))
    rng = np.random.default_rng(seed)
    weights = [
        (name, mx.array(random_tensor(rng, name, value.shape).astype(np.float32)))
        for name, value in sorted(tree_flatten(model.parameters()))
    ]
    model.update(tree_unflatten(weights))
    keep = getattr(model, "cast_predicate", lambda _: True)
    model.update(tree_map_with_path(lambda k, v: v.astype(dtype) if keep(k) else v, model.parameters()))
    model.eval()
    return model


def quantise(model, case):
    """Quantises `model` in place; returns it, and the config with the `quantization` map that mlx-lm writes."""
    routers = getattr(model, "quant_predicate", None) or (lambda path, module: True)
    unquantised = []

    def by_overrides(path, module):
        setting = next((s for suffix, s in case.overrides.items() if path.endswith(suffix)), "default")
        if setting is None:
            unquantised.append(path)
            return False
        params = routers(path, module) if setting == "default" else dict(bits=setting[0], group_size=setting[1])
        if isinstance(params, dict) and module.weight.shape[-1] % params["group_size"]:
            return False
        return params

    predicate = mixed_quant_predicate_builder(case.recipe, model, case.group) if case.recipe else by_overrides
    model, config = mlx_utils.quantize_model(
        model, copy.deepcopy(case.config), case.group, case.bits, quant_predicate=predicate
    )
    if case.map == "nothing":
        config["quantization"] = {k: config["quantization"][k] for k in ("group_size", "bits", "mode")}
    else:
        # mlx-vlm and older exports name the tensors that stay as they are with `false`.
        config["quantization"] |= {path: False for path in sorted(unquantised)}
    config["quantization_config"] = config["quantization"]
    return model, config


def hub_tensors(weights, case):
    """Turns mlx-lm's tensors into the Hub's names and shapes: the inverse of mlx-lm's `sanitize`."""
    fused = case.config["model_type"].startswith("qwen3_5")
    out = {}
    for source, value in weights.items():
        name = source
        if fused:
            name = name.removeprefix("language_model.")
            if name.startswith("model."):
                name = case.prefix + name.removeprefix("model.")
        if ".switch_mlp." in name:
            base, projection = name.removesuffix(".weight").split(".switch_mlp.")
            if not fused:
                for e in range(value.shape[0]):
                    out[f"{base}.experts.{e}.{projection}.weight"] = value[e]
            elif projection == "down_proj":
                out[f"{base}.experts.down_proj"] = value
            elif projection == "gate_proj":
                up = weights[source.replace("gate_proj", "up_proj")]
                out[f"{base}.experts.gate_up_proj"] = mx.concatenate([value, up], axis=1)
            continue
        if fused and "conv1d" in name:
            value = mx.contiguous(value.moveaxis(1, 2))
        elif fused and "norm" in name and "linear_attn" not in name:
            # Exact: a bf16 or f16 number between 0.5 and 2, less 1, has no more digits than before.
            assert float(value.min()) >= 0.5 and float(value.max()) < 2.0
            value = value - mx.array(1.0, value.dtype)
        if "linear_attn" in name and name.endswith(("A_log", "linear_attn.norm.weight")):
            value = value.astype(DTYPES[case.state_dtype or case.dtype])
        out[name] = value
    return out


def extra_tensors(case):
    """Tensors that are no part of the text model, under the names that published files give them."""
    dtype, zeros = DTYPES[case.dtype], {}
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
    """Writes the tensors dealt out over `shards` files, so that the parts of one matrix or expert lie apart."""
    names = sorted(weights)
    files = ["model.safetensors"] if shards == 1 else [
        f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)
    ]
    for i, file in enumerate(files):
        part = {name: weights[name] for name in names[i::shards]}
        mx.save_safetensors(str(folder / file), part, metadata={"format": "mlx"})
    if shards > 1:
        index = {"metadata": {"total_size": sum(v.nbytes for v in weights.values())},
                 "weight_map": {name: files[i % shards] for i, name in enumerate(names)}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def save_tokenizer(folder):
    """A byte-level tokenizer of 258 tokens: <bos>, <eos> and one per byte (id = byte + 2)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shown = {b: chr(b) for b in plain}
    shown |= {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in shown)}
    special = lambda i, text: dict(id=i, content=text, single_word=False, lstrip=False, rstrip=False,
                                   normalized=False, special=True)
    bytelevel = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True)
    model = dict(type="BPE", dropout=None, unk_token=None, continuing_subword_prefix=None, end_of_word_suffix=None,
                 fuse_unk=False, byte_fallback=False, ignore_merges=False, merges=[],
                 vocab={"<bos>": 0, "<eos>": 1, **{shown[b]: b + 2 for b in range(256)}})
    tokenizer = dict(version="1.0", truncation=None, padding=None, normalizer=None, post_processor=None,
                     added_tokens=[special(0, "<bos>"), special(1, "<eos>")], pre_tokenizer=bytelevel,
                     decoder=bytelevel, model=model)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    (folder / "tokenizer_config.json").write_text(json.dumps(
        dict(tokenizer_class="PreTrainedTokenizerFast", bos_token="<bos>", eos_token="<eos>")))


def make_checkpoint(folder, case, seed):
    """Writes config, weights and tokenizer of `case` into `folder`, which is emptied of older weights."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("model*.safetensors*"):
        old.unlink()
    model = random_model(case.config, seed, DTYPES[case.dtype])
    config = copy.deepcopy(case.config)
    if case.layout == "mlx":
        model, config = quantise(model, case)
    weights = dict(tree_flatten(model.parameters()))
    if case.layout == "hub":
        weights = hub_tensors(weights, case)
        config.get("text_config", config)["dtype"] = HUB_DTYPES[case.dtype]
    if case.extras:
        weights |= extra_tensors(case)
    save_weights(folder, weights, case.shards)
    save_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(config, indent=1))


# --- what mlx-lm computes on it --------------------------------------------------------------------------------------


class Reference:
    """A checkpoint in mlx-lm: weights upcast exactly to f32, all activations f32."""

    def __init__(self, folder):
        self.model, self.config = mlx_utils.load_model(Path(folder))
        self.model.set_dtype(mx.float32)
        mx.eval(self.model.parameters())
        self.cache = None

    def start(self):
        """Forgets what was fed."""
        self.cache = make_prompt_cache(self.model)

    def feed(self, ids):
        """Logits f32 [n, vocab] of `ids`, fed after what was fed before."""
        logits = self.model(mx.array([ids]), cache=self.cache)
        return np.array(logits[0].astype(mx.float32))

    def perturb(self, seed, relative):
        """Multiplies every weight vector (norms, decay, biases of delta-nets) by 1 + relative * N(0, 1): how far that
        moves the logits says how much the model amplifies rounding."""
        rng = np.random.default_rng(seed)
        nudge = lambda v: v * mx.array(1 + relative * rng.normal(size=v.shape).astype(np.float32))
        self.model.update(tree_map_with_path(lambda _, v: nudge(v) if v.ndim == 1 else v, self.model.parameters()))

    def trace(self, ids_list):
        """Feeds each list of ids from a fresh start. Returns (logits per list, hidden, experts, gap): hidden[L] f32
        [n, hidden] is the output of decoder layer L, experts[L] i32 [n, k] the chosen set of a MoE layer, unordered,
        both over all rows fed; gap the smallest distance between the router logits of the last expert chosen and of
        the first one not: below about 1e-4 rounding may choose otherwise."""
        hidden, experts, gaps, undo = {}, {}, [np.inf], []

        def wrap(module_class, see):
            call = module_class.__call__

            def seen(module, x, *args, **kwargs):
                y = call(module, x, *args, **kwargs)
                see(module, x, y)
                return y

            undo.append((module_class, call))
            module_class.__call__ = seen

        number = {id(layer): i for i, layer in enumerate(self.model.layers)}
        number |= {id(layer.mlp): i for i, layer in enumerate(self.model.layers)}

        def see_layer(layer, x, y):
            hidden.setdefault(number[id(layer)], []).append(np.array(y[0]))

        def see_moe(moe, x, y):
            logits, k = np.array(moe.gate(x)[0]), moe.top_k
            order = np.argsort(-logits, axis=-1, kind="stable")
            top = np.take_along_axis(logits, order, -1)
            if k < logits.shape[-1]:
                gaps.append(float((top[:, k - 1] - top[:, k]).min()))
            experts.setdefault(number[id(moe)], []).append(order[:, :k].astype(np.int32))

        for layer_class in {type(layer) for layer in self.model.layers}:
            wrap(layer_class, see_layer)
        for moe_class in {type(layer.mlp) for layer in self.model.layers if hasattr(layer.mlp, "switch_mlp")}:
            wrap(moe_class, see_moe)
        try:
            self.start()
            logits = [self.feed(ids) for ids in ids_list]
        finally:
            for module_class, call in undo:
                module_class.__call__ = call
        join = lambda rows: {i: np.concatenate(v) for i, v in sorted(rows.items())}
        return logits, join(hidden), join(experts), min(gaps)


def read_safetensors(path):
    """name -> numpy array of an f32 or i32 safetensors file."""
    data = Path(path).read_bytes()
    (n,) = struct.unpack("<Q", data[:8])
    kinds, out = {"F32": np.float32, "I32": np.int32}, {}
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

"""transformers as the reference, for checkpoints in the Hub's layout. Needs torch and transformers."""
import json
import re
import sys
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

torch.set_grad_enabled(False)
transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()

# Models that use the code of another one.
SAME = dict(kimi_k2="deepseek_v3", mimo_v2="mimo_v2_flash")
# Shards of tensor parallelism in MiMo-V2.5's `qkv_proj`.
QKV_SHARDS = 4
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
# Output of AWQ's eight in a word whose code is at bits 4 i.
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def versions():
    """The versions that made a golden, for its metadata."""
    return {"transformers": transformers.__version__, "torch": torch.__version__}


# --- quantized weights ----------------------------------------------------------------------------


def fields(words, order=range(8)):
    """Codes of 4 bits of i32 words [rows, n]: [rows, 8 n], the first in the lowest bits."""
    codes = (words[..., None] >> torch.arange(0, 32, 4, dtype=torch.int32)) & 15
    return codes[..., torch.tensor(list(order)).argsort()].flatten(-2)


def e2m1(words):
    """Values of FP4 codes, two to a byte, the first in the low half."""
    words = words.view(torch.uint8)
    return E2M1[torch.stack([words & 15, words >> 4], -1).flatten(-2).long()]


def scaled(values, scale):
    """Values [rows, cols] times a scale for all, or for equal blocks of rows and columns; the last
    may be cut off, where blocks are of 128."""
    if scale.dtype in (torch.uint8, torch.float8_e8m0fnu):
        scale = 2.0 ** (scale.view(torch.uint8).float() - 127)
    scale = scale.float()
    for axis in range(scale.ndim if scale.numel() > 1 else 0):
        length, blocks = values.shape[axis], scale.shape[axis]
        block = 128 if blocks == -(-length // 128) > 1 else length // blocks
        scale = scale.repeat_interleave(block, axis).narrow(axis, 0, length)
    return values * scale


def dequantized(tensors, config):
    """The checkpoint's tensors with quantized matrices as f32: compressed-tensors' and modelopt's
    FP8, FP4 and integers, AWQ and GPTQ of 4 bits, FP8 of DeepSeek."""
    out, gptq = {}, (config.get("quantization_config") or {}).get("quant_method") == "gptq"
    of = lambda name, ends: next((tensors[name + end] for end in ends if name + end in tensors), None)
    leaves = (r"(_packed|_scale(_2|_inv)?|_shape|_g_idx|_global_scale)$|"
              r"\.(qzeros|scales|g_idx|input_scale|input_global_scale)$")
    for name, value in tensors.items():
        stem = name.removesuffix("_packed")
        scale = of(stem, ("_scale", "_scale_inv"))
        if name.endswith(".qweight"):
            base = name.removesuffix(".qweight")
            codes = fields(value.T).T if gptq else fields(value, AWQ_ORDER)
            zeros = fields(tensors[base + ".qzeros"]) + 1 if gptq else fields(tensors[base + ".qzeros"], AWQ_ORDER)
            scales = tensors[base + ".scales"].float()
            group = of(base, (".g_idx",))
            group = torch.arange(len(codes)) // (len(codes) // len(scales)) if group is None else group.long()
            out[base + ".weight"] = ((codes - zeros[group]) * scales[group]).T.contiguous()
        elif scale is not None and value.dtype == torch.int32:
            codes, group = (fields(value) - 8).float(), of(stem, ("_g_idx",))
            out[stem] = scaled(codes, scale) if group is None else codes * scale.float()[:, group.long()]
        elif scale is not None and value.dtype in (torch.uint8, torch.int8):
            factor, divisor = of(stem, ("_scale_2",)), of(stem, ("_global_scale",))
            if divisor is not None:
                scale = scale.float() / divisor
            out[stem] = scaled(e2m1(value), scale if factor is None else scale.float() * factor)
        elif scale is not None:
            out[stem] = scaled(value.float(), scale)
        elif not re.search(leaves, name):
            out[name] = value
    return out


def unsharded(tensors, config):
    """MiMo-V2.5's `qkv_proj`, shards of [queries, keys, values] one after another, as three matrices."""
    out = {}
    for name, value in tensors.items():
        if not name.endswith(".qkv_proj.weight"):
            out[name] = value
            continue
        window = "swa_" if config["hybrid_layer_pattern"][int(name.split(".")[2])] else ""
        of = lambda key: config[window + key] // (QKV_SHARDS if "heads" in key else 1)
        heads, key_heads = of("num_attention_heads"), of("num_key_value_heads")
        sizes = [heads * of("head_dim"), key_heads * of("head_dim"), key_heads * of("v_head_dim")]
        parts = zip(*(shard.split(sizes) for shard in value.chunk(QKV_SHARDS)))
        for projection, shards in zip(("q_proj", "k_proj", "v_proj"), parts):
            out[name.replace("qkv_proj", projection)] = torch.cat(shards).contiguous()
    return out


def padded(tensors, counts):
    """Tensors of a pruned model, with experts of zeros in the layers that have fewer; `prune` cuts them off."""
    out, most = dict(tensors), max(counts)
    for name, value in tensors.items():
        layer, _, module = name.removeprefix("model.layers.").partition(".")
        missing = range(counts[int(layer)], most) if module.startswith("mlp.") else ()
        if module == "mlp.gate.weight":
            out[name] = torch.cat([value, value.new_zeros(len(missing), value.shape[1])])
        elif module.startswith("mlp.experts.0."):
            out |= {name.replace("experts.0.", f"experts.{i}."): torch.zeros_like(value) for i in missing}
    return out


# --- the model ------------------------------------------------------------------------------------


def merged(config, changes):
    """A config with changes, also inside its parts."""
    inner = lambda key, value: merged(config.get(key) or {}, value) if isinstance(value, dict) else value
    return config | {key: inner(key, value) for key, value in changes.items()}


def recurrent(model):
    """Lets Kimi Delta Attention take its recurrent form for prompts too. The chunked form rounds visibly in f32: up
    to 2e-4 of the rms."""
    for library in {sys.modules[type(module).__module__] for module in model.modules()}:
        if rule := getattr(library, "recurrent_kimi_delta_attention", None):
            library.chunk_kimi_delta_attention = (
                lambda *args, chunk_size=None, rule=rule, **more: rule(*args, **more))


def prune(model, counts):
    """Leaves the first experts of each layer."""
    for layer, count in zip(model.model.layers, counts):
        for module in layer.mlp.modules():
            for name, value in module.named_parameters(recurse=False):
                if hasattr(module, "num_experts"):
                    setattr(module, name, torch.nn.Parameter(value[:count].clone(), requires_grad=False))
            module.num_experts = count


class Reference:
    """A checkpoint in transformers: weights upcast exactly to f32, eager attention, on the CPU. `changes`: keys of the
    config that transformers needs and publishers do not write."""

    def __init__(self, folder, changes):
        self.config, self.cache = json.loads((folder / "config.json").read_text()), None
        kind = self.config["model_type"]
        config = merged(self.config, changes) | dict(model_type=SAME.get(kind, kind))
        config.pop("quantization_config", None)
        tensors = {name: v for file in folder.glob("model*.safetensors") for name, v in load_file(file).items()}
        if "quantization_config" in self.config:
            tensors = dequantized(tensors, self.config)
        tensors = unsharded(tensors, self.config)
        counts = self.config.get("per_layer_num_experts")
        if counts:
            tensors = padded(tensors, counts)
        if "thinker_config" in config:  # A model that listens and speaks: its thinker alone.
            config = config["thinker_config"]
            tensors = {name.removeprefix("thinker."): v for name, v in tensors.items()}
        with tempfile.TemporaryDirectory() as temp:
            (Path(temp) / "config.json").write_text(json.dumps(config))
            save_file(tensors, Path(temp) / "model.safetensors", {"format": "pt"})
            known = transformers.AutoConfig.from_pretrained(temp)
            text = type(known) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING and "vision_config" not in config
            factory = transformers.AutoModelForCausalLM if text else transformers.AutoModelForImageTextToText
            self.model = factory.from_pretrained(
                temp, config=known, dtype=torch.float32, attn_implementation="eager").float().eval()
        for name, module in self.model.named_modules():
            if name.endswith(("q_a_layernorm", "kv_a_layernorm")):  # docs/references.md
                module.variance_epsilon = known.get_text_config().rms_norm_eps
        if counts:
            prune(self.model, counts)
        recurrent(self.model)

    def start(self):
        """Starts a new sequence."""
        self.cache = None

    def feed(self, ids):
        """Logits f32 [n, vocab] of `ids`, appended to the sequence."""
        out = self.model(input_ids=torch.tensor([ids]), past_key_values=self.cache, use_cache=True)
        self.cache = out.past_key_values
        return out.logits[0].float().numpy()

    def perturb(self, seed, relative):
        """Multiplies every weight vector by 1 + relative * N(0, 1): a measure of how much the model amplifies
        rounding."""
        random = torch.Generator().manual_seed(seed)
        for parameter in self.model.parameters():
            if parameter.ndim == 1:
                parameter.mul_(1 + relative * torch.randn(parameter.shape, generator=random))

    def trace(self, ids_list):
        """Feeds the lists of ids to a new sequence. Returns (logits per list, hidden, experts, gap), as
        `golden.Reference`; the gap is that of every top-k of transformers' routers, in standard deviations of its
        scores."""
        hidden, experts, gaps, hooks, topk = {}, {}, [np.inf], [], torch.topk

        def see_experts(layer):
            def see(module, args, kwargs):
                given = (*args, *kwargs.values())
                ids = next(t for t in given if torch.is_tensor(t) and t.dtype in (torch.int64, torch.int32))
                experts.setdefault(layer, []).append(ids.reshape(-1, ids.shape[-1]).numpy().astype(np.int32))
            return see

        def see_hidden(layer):
            def see(module, args, out):
                out = out[0] if isinstance(out, tuple) else out
                hidden.setdefault(layer, []).append(out[0].flatten(1).float().numpy())
            return see

        def watched(scores, k, dim=-1, **more):
            if k < scores.shape[dim]:
                # Some indexers mask with the least finite number.
                seen = scores.masked_fill(scores <= torch.finfo(scores.dtype).min, -np.inf)
                top = topk(seen, k + 1, dim).values
                gap = (top.select(dim, k - 1) - top.select(dim, k)) / seen[seen.isfinite()].std()
                gaps.extend(gap[gap.isfinite()].flatten().tolist())
            return topk(scores, k, dim, **more)

        for name, module in self.model.named_modules():
            layer = re.search(r"(?:^|\.)layers\.(\d+)((?:\.\w+)*)$", name)
            if not layer or re.search(r"vision|visual|mtp", name):
                continue
            if not layer[2]:
                hooks.append(module.register_forward_hook(see_hidden(int(layer[1]))))
            elif layer[2].endswith(".experts"):
                hooks.append(module.register_forward_pre_hook(see_experts(int(layer[1])), with_kwargs=True))
        try:
            with mock.patch.object(torch, "topk", watched), mock.patch.object(torch.Tensor, "topk", watched):
                self.start()
                logits = [self.feed(ids) for ids in ids_list]
        finally:
            for hook in hooks:
                hook.remove()
        join = lambda rows: {i: np.concatenate(v) for i, v in sorted(rows.items())}
        return logits, join(hidden), join(experts), min(gaps)

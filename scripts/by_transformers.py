"""transformers as the reference, for checkpoints in the Hub's layout. Needs torch and transformers."""
import json
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
SAME = dict(kimi_k2="deepseek_v3")


def versions():
    """The versions that made a golden, for its metadata."""
    return {"transformers": transformers.__version__, "torch": torch.__version__}


def unpacked(tensors):
    """compressed-tensors' integers of 4 bits as f32 matrices: (code - 8) * scale, the first code in the lowest bits."""
    out = {}
    for name, value in tensors.items():
        if not name.endswith(("weight_packed", "weight_scale", "weight_shape")):
            out[name] = value
        elif name.endswith("weight_packed"):
            stem = name.removesuffix("_packed")
            scale = tensors[stem + "_scale"].float()
            codes = (value[..., None] >> torch.arange(0, 32, 4, dtype=torch.int32)) & 15
            blocks = (codes.float() - 8).reshape(*scale.shape, -1)
            out[stem] = (blocks * scale[..., None]).reshape(tensors[stem + "_shape"].tolist())
    return out


class Reference:
    """A checkpoint in transformers: weights upcast exactly to f32, eager attention, on the CPU."""

    def __init__(self, folder):
        config = json.loads((folder / "config.json").read_text())
        # transformers does not resolve packed integers without another library.
        read = {k: v for k, v in config.items() if k != "quantization_config"}
        read["model_type"] = SAME.get(config["model_type"], config["model_type"])
        tensors = {name: v for file in folder.glob("model*.safetensors") for name, v in load_file(file).items()}
        with tempfile.TemporaryDirectory() as temp:
            (Path(temp) / "config.json").write_text(json.dumps(read))
            save_file(unpacked(tensors) if "quantization_config" in config else tensors, Path(temp) / "model.safetensors", {"format": "pt"})
            self.model = transformers.AutoModelForCausalLM.from_pretrained(
                temp, dtype=torch.float32, attn_implementation="eager").eval()
        self.config, self.cache = config, None

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
                hidden.setdefault(layer, []).append(out.reshape(-1, out.shape[-1]).float().numpy())
            return see

        def watched(scores, k, dim=-1, **more):
            if k < scores.shape[dim]:
                top = topk(scores, k + 1, dim).values
                gap = (top.select(dim, k - 1) - top.select(dim, k)) / scores[scores.isfinite()].std()
                gaps.extend(gap[gap.isfinite()].flatten().tolist())
            return topk(scores, k, dim, **more)

        for i, layer in enumerate(self.model.model.layers):
            hooks.append(layer.register_forward_hook(see_hidden(i)))
            block = getattr(layer.mlp, "experts", None)
            if block is not None:
                hooks.append(block.register_forward_pre_hook(see_experts(i), with_kwargs=True))
        try:
            with mock.patch.object(torch, "topk", watched):
                self.start()
                logits = [self.feed(ids) for ids in ids_list]
        finally:
            for hook in hooks:
                hook.remove()
        join = lambda rows: {i: np.concatenate(v) for i, v in sorted(rows.items())}
        return logits, join(hidden), join(experts), min(gaps)

#!/usr/bin/env python3
"""Makes a random checkpoint of a model that transformers has, for `scripts/make-golden.py --like`.

usage: scripts/random-model.py CONFIG.json FOLDER [--prompt 16] [--steps 6]

Writes bf16 weights under the published names, the config as it is, a tokenizer, and a golden.json that asks for a
prompt and steps. Needs torch and transformers, and mlx-lm, as make-golden.py does.
"""
import argparse
import json
import shutil
from pathlib import Path

import numpy as np
import torch
import transformers

import seeded
from golden import random_tensor

args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
args.add_argument("config", type=Path, metavar="CONFIG.json")
args.add_argument("folder", type=Path, metavar="FOLDER")
args.add_argument("--prompt", type=int, default=16, metavar="N", help="tokens of the prompt")
args.add_argument("--steps", type=int, default=6, metavar="N", help="greedy steps after it")
args = args.parse_args()
args.folder.mkdir(parents=True)
rng = np.random.default_rng(7)
model = transformers.AutoModelForCausalLM.from_config(
    transformers.AutoConfig.from_pretrained(args.config), dtype=torch.bfloat16)
for name, value in model.state_dict().items():
    value.copy_(torch.from_numpy(np.asarray(random_tensor(rng, name, tuple(value.shape)))))
model.save_pretrained(args.folder)
(args.folder / "generation_config.json").unlink(missing_ok=True)
shutil.copy(args.config, args.folder / "config.json")
seeded.lay_tokenizer(args.folder)
(args.folder / "golden.json").write_text(json.dumps(dict(
    prompt_ids=rng.integers(2, 258, args.prompt).tolist(), gen_ids_f32=[0] * args.steps,
    transformers=transformers.__version__), indent=1))

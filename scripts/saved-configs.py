#!/usr/bin/env python3
"""Writes the goldens' configs as the installed transformers saves them again, for the test `saved_configs`.

    pip install transformers==VERSION
    scripts/saved-configs.py

Writes crates/moeflux/tests/data/saved_configs/transformers-VERSION.json: golden to config, one per line. Settings of
quantisation are left out: transformers copies them. Goldens of architectures that this version does not have are too.
"""
import json
import pathlib

import transformers

DATA = pathlib.Path(__file__).parent.parent / "crates/moeflux/tests/data"
QUANTIZATION = ("quantization", "quantization_config")


def saved(config):
    """The config as `save_pretrained` writes it; None for an unknown architecture."""
    name = config["model_type"]
    # A text-only export has the composite's name. transformers saves it under the text model's.
    if "text_config" not in config and name + "_text" in transformers.CONFIG_MAPPING:
        name += "_text"
    if name not in transformers.CONFIG_MAPPING:
        return None
    config = {key: value for key, value in config.items() if key not in QUANTIZATION}
    return json.loads(transformers.CONFIG_MAPPING[name].from_dict(config).to_json_string())


lines = []
for folder in sorted((DATA / "goldens").iterdir()):
    if (folder / "golden.safetensors").exists():
        config = saved(json.loads((folder / "config.json").read_text()))
        if config:
            lines.append(f"{json.dumps(folder.name)}: {json.dumps(config)}")
path = DATA / f"saved_configs/transformers-{transformers.__version__}.json"
path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
print(f"{path}: {len(lines)} configs")

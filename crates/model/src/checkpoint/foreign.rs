//! Files and layouts that are recognised but not read: pointers of Git LFS, adapters, other
//! quantisations. Each is described with what helps.

use std::{
    collections::{BTreeSet, HashMap},
    path::Path,
};

use moeflux_base::{Error, seam::json};
use serde_json::Value;

use super::{data_file::DataFile, gguf, location::TensorInfo, packed, text_config::text_config};

/// Formats of weights that are read, for error messages.
const READ: &str = "read are unquantised weights, MLX's affine, mxfp4, nvfp4 and mxfp8, FP8, MXFP4, \
                    NVFP4, integers of compressed-tensors (pack-quantized), AWQ and GPTQ: take a \
                    repository of this model with one of them";

/// Values of `quant_method` and `quant_algo` whose layouts are read, in lower case. Their errors
/// are about tensors.
const READ_METHODS: [&str; 11] = [
    "fp8",
    "mxfp4",
    "mlx",
    "compressed-tensors",
    "modelopt",
    "modelopt_fp4",
    "nvfp4",
    "mxfp8",
    "fbgemm_fp8",
    "awq",
    "gptq",
];

/// End of the names that a quantisation gives to tensors.
struct NameEnding {
    ending: &'static str,
    method: &'static str,
}

const NAME_ENDINGS: [NameEnding; 7] = [
    NameEnding { ending: ".weight.absmax", method: "bitsandbytes" },
    NameEnding { ending: ".SCB", method: "bitsandbytes" },
    NameEnding { ending: ".weight._data", method: "quanto" },
    NameEnding { ending: ".W_q", method: "HQQ" },
    NameEnding { ending: ".trellis", method: "EXL3" },
    NameEnding { ending: ".q_weight", method: "EXL2" },
    NameEnding { ending: ".codebooks", method: "AQLM" },
];

/// Problem of a file that goes on with another file of tensors after its own, which end at `end`.
pub(super) fn joined(file: &DataFile, end: u64) -> Option<String> {
    let mut start = [0; 9];
    let rest = file.len().checked_sub(end)?;
    file.read_exact_at(&mut start, end).ok()?;
    let (prefix, next) = start.split_at(8);
    let header = u64::from_le_bytes(prefix.try_into().ok()?);
    let is_safetensors = next == b"{" && header <= rest - 8;
    (is_safetensors || start.starts_with(b"GGUF")).then(|| {
        format!(
            "another file of tensors begins at byte {end}: shards were joined to one file, which \
             has the tensors of the first one only: keep them apart, by their published names, in \
             one folder"
        )
    })
}

/// Problem of a file that begins with `start`, if it is a stand-in for the file itself.
pub(super) fn stand_in(start: &[u8]) -> Option<String> {
    let begins = |text: &str| {
        start.get(..text.len()).is_some_and(|s| s.eq_ignore_ascii_case(text.as_bytes()))
    };
    if begins("version https://git-lfs") {
        return Some(
            "this is a pointer of Git LFS, not the file itself: run `git lfs pull` in its folder"
                .into(),
        );
    }
    if begins("/annex/objects/") || begins("../.git/annex") {
        return Some(
            "this is a pointer of git-annex, not the file itself: run `git annex get .` in its \
             folder"
                .into(),
        );
    }
    (begins("<!doctype html") || begins("<html")).then(|| {
        "this is a web page, not the file itself: the address that it was downloaded from needs \
         a login, or shows the file instead of sending it"
            .into()
    })
}

/// Problem of a folder without `config.json`.
pub(super) fn no_config(folder: &Path, names: &BTreeSet<String>) -> String {
    if names.contains(packed::JOURNAL) {
        return "this is a model that is not packed yet: run the same `moeflux pack` again to \
                finish it"
            .into();
    }
    if let Some(problem) = adapter(folder, names).or_else(|| cut_piece(names)) {
        return problem;
    }
    if names.contains("params.json") {
        return "this model is in the format of its authors, without config.json: take its \
                repository in the format of transformers or MLX"
            .into();
    }
    let is_model = |name: &&String| folder.join(name).join("config.json").is_file();
    let models: Vec<_> = names.iter().filter(is_model).map(String::as_str).collect();
    if !models.is_empty() {
        return format!("there is no config.json here, but in: {}; give one", models.join(", "));
    }
    "there is no config.json here: is this the folder of a model?".into()
}

/// Problem of a folder without safetensors.
pub(super) fn no_tensors(folder: &Path, names: &BTreeSet<String>) -> String {
    if let Some(problem) = adapter(folder, names).or_else(|| cut_piece(names)) {
        return problem;
    }
    let missing = "there is no model.safetensors and no model.safetensors.index.json: only the \
                   safetensors format is supported";
    let is_pickle = |name: &&String| {
        [".bin", ".pt", ".pth", ".ckpt"].iter().any(|ending| name.ends_with(ending))
    };
    match names.iter().find(is_pickle) {
        Some(pickle) => format!(
            "{missing}; {pickle} is PyTorch's: transformers converts it, by loading the model and \
             save_pretrained"
        ),
        None => missing.into(),
    }
}

/// Problem of a folder with pieces of a GGUF file.
fn cut_piece(names: &BTreeSet<String>) -> Option<String> {
    names.iter().find_map(|name| gguf::cut_piece(name))
}

/// Problem of a folder that holds an adapter.
fn adapter(folder: &Path, names: &BTreeSet<String>) -> Option<String> {
    names.contains("adapter_config.json").then(|| {
        let config = std::fs::read(folder.join("adapter_config.json")).unwrap_or_default();
        let config: Value = json::parse(&config).unwrap_or_default();
        let base = ["base_model_name_or_path", "model"].iter().find_map(|key| config[key].as_str());
        format!(
            "this is an adapter (LoRA) of {}, not a model: merge it into that model \
             (merge_and_unload of peft, or mlx_lm.fuse), and give the result",
            base.map_or("another model".into(), |base| format!("{base:?}"))
        )
    })
}

/// Checks that no tensor is of an adapter beside the weights that it changes.
pub(super) fn check_adapter(
    tensors: &HashMap<String, TensorInfo>,
    files: &[DataFile],
) -> Result<(), Error> {
    let is_adapter =
        |name: &&String| name.contains(".lora_A") || name.contains(".lora_embedding_A");
    let Some(name) = tensors.keys().filter(is_adapter).min() else { return Ok(()) };
    let problem = "it is of an adapter (LoRA) that is not merged into the weights: load it with \
                   peft, and give what merge_and_unload and save_pretrained write";
    let path = files[tensors[name].file as usize].path().to_owned();
    Err(Error::Tensor { tensor: name.clone(), path, problem: problem.into() })
}

/// Description of a quantisation that is not read: by `quant_method` of the config, or by the names
/// of the tensors.
pub(super) fn quantization(
    config: &Value,
    tensors: &HashMap<String, TensorInfo>,
) -> Option<String> {
    let text = text_config(config);
    let maps = [config, text].into_iter().flat_map(|config| {
        ["quantization_config", "compression_config", "quantization"].map(|key| &config[key])
    });
    let method = |map: &'_ Value| {
        Some(["quant_method", "quant_algo"].iter().find_map(|k| map[k].as_str())?.to_owned())
    };
    if let Some(method) = maps.filter_map(method).next() {
        return (!READ_METHODS.contains(&method.to_lowercase().as_str())).then(|| {
            format!(
                "its weights are quantised by {method:?} (\"quant_method\" in config.json), which \
                 is not read; {READ}"
            )
        });
    }
    let found = NAME_ENDINGS.iter().find(|known| tensors.keys().any(|n| n.ends_with(known.ending)));
    found.map(|known| {
        format!(
            "its weights are quantised by {}, as tensors *{} say, which is not read; {READ}",
            known.method, known.ending
        )
    })
}

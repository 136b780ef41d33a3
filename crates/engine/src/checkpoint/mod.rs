//! Checkpoint floor: a published model's files, opened in place.
//!
//! [`Checkpoint`] opens a folder, reads its small files and the tensor index of each large one. To
//! architectures it is a `TensorSource`.
//!
//! - The interface to architectures: `source.rs`. A source without files: `recorder.rs`.
//! - Which bytes make up a tensor, a matrix or an expert: `location.rs`.
//! - How a matrix or vector is found by name, and in which format: `tensors.rs`, for block-scaled
//!   formats `block_scaled.rs`.
//! - How weights are read: `read.rs`.
//! - File handles and mirrors on other disks: `data_file.rs`, `mirror_folders.rs`.
//! - The safetensors index, packed models, the built-in model: `safetensors.rs`, `packed`,
//!   `embedded.rs`.
//!
//! Knows: files, tensor names, dtypes, formats. Must not know: architectures, devices, sessions.

mod block_scaled;
mod compressed_tensors;
mod data_file;
mod embedded;
pub(crate) mod frame;
pub(crate) mod location;
mod mirror_folders;
pub(crate) mod model_id;
pub(crate) mod packed;
mod quantization;
mod read;
pub(crate) mod recorder;
mod safetensors;
pub(crate) mod source;
mod tensors;

use std::{
    collections::{BTreeSet, HashMap},
    path::{Path, PathBuf},
    sync::Arc,
};

pub(crate) use data_file::{DataFile, read_at};
pub use embedded::unpack_embedded;
pub(crate) use frame::digest;
pub use location::{MatrixSource, Segment, VectorSource};
pub(crate) use location::{MatrixStack, TensorInfo};
use mirror_folders::ModelFolders;
pub use model_id::ModelId;
use packed::PackedExperts;
use quantization::Quantization;
pub(crate) use read::READ_THREADS;
use source::SourceChanges;

use crate::base::error::Error;

/// Maximum size of a JSON file in bytes.
const MAX_JSON: u64 = 256 << 20;

/// An opened model folder, or the built-in model: its JSON files and the locations of its tensors.
///
/// Opening reads headers only, and for a packed model at most 16 MiB of its dense tensors,
/// regardless of the size of the files.
#[derive(Debug)]
pub struct Checkpoint {
    folder: PathBuf,
    mirrors: Vec<PathBuf>,
    config: serde_json::Value,
    quantization: Quantization,
    files: Arc<Vec<DataFile>>,
    tensors: HashMap<String, TensorInfo>,
    changes: SourceChanges,
    text_files: HashMap<&'static str, Vec<u8>>,
    packed: Option<PackedExperts>,
}

/// Names of the small files that are read whole, where they exist.
pub(crate) const TEXT_FILES: [&str; 6] = [
    "config.json",
    "tokenizer.json",
    "tiktoken.model",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
];

/// Contents of a small file of a checkpoint.
#[derive(Clone, Debug, Default)]
pub struct TextFile<'a> {
    /// The whole contents.
    pub bytes: &'a [u8],
    /// The file, for error messages.
    pub path: PathBuf,
}

impl Checkpoint {
    /// Opens a model's folder as it was published.
    ///
    /// # Errors
    /// The folder or one of its files is missing, cannot be read, or contradicts itself.
    pub fn open(folder: &Path) -> Result<Self, Error> {
        Self::open_with(folder, &[])
    }

    /// Opens a folder whose tensor files are also in mirrors, on other disks: the folders in
    /// `mirrors`, and the folders named in its `mirrors.txt`, one per line. Files in several
    /// folders must be copies of each other. Tensor files missing in the folder itself are read
    /// from a mirror. Mirrors are searched for tensor files only.
    ///
    /// # Errors
    /// As [`Checkpoint::open`]; a mirror cannot be opened or has none of the model's files.
    pub fn open_with(folder: &Path, mirrors: &[PathBuf]) -> Result<Self, Error> {
        let folders = ModelFolders::open(folder, mirrors)?;
        let names = folders.own_names();
        if !names.contains("config.json") {
            let problem = match names.contains(packed::JOURNAL) {
                true => {
                    "this is a model that is not packed yet: run the same `moeflux pack` again to \
                     finish it"
                }
                false => "there is no config.json here: is this the folder of a model?",
            };
            return Err(Error::Checkpoint { path: folder.into(), problem: problem.into() });
        }
        let mut shards = BTreeSet::new();
        let mut expected = HashMap::new();
        if names.contains("model.safetensors.index.json") {
            expected = weight_map(&folder.join("model.safetensors.index.json"))?;
            shards.extend(expected.values().map(String::as_str));
            if let Some(missing) = shards.iter().find(|shard| folders.locate(shard).is_none()) {
                let problem = format!(
                    "the index names it, but it is missing: download the shard {missing} again"
                );
                return Err(Error::Checkpoint { path: folder.join(missing), problem });
            }
        } else {
            shards.extend(
                folders.names().filter(|n| n.starts_with("model") && n.ends_with(".safetensors")),
            );
        }
        if shards.is_empty() {
            let problem = "there is no model.safetensors and no model.safetensors.index.json: only \
                           the safetensors format is supported";
            return Err(Error::Checkpoint { path: folder.into(), problem: problem.into() });
        }
        let all = shards.iter().copied().chain([packed::EXPERTS]);
        folders.check_mirrors(all.clone())?;
        let files = all.filter_map(|name| folders.locate(name)).map(|path| DataFile::open(&path));
        let files = files.collect::<Result<Vec<_>, _>>()?;
        let mut text_files = HashMap::new();
        for name in TEXT_FILES {
            if names.contains(name) {
                text_files.insert(name, DataFile::open(&folder.join(name))?.read_all(MAX_JSON)?);
            }
        }
        let mut checkpoint = Self::assemble(folder, files, text_files)?;
        for (tensor, shard) in &expected {
            let found =
                checkpoint.tensors.get(tensor).map(|t| checkpoint.files[t.file as usize].path());
            if found.and_then(Path::file_name) != Some(shard.as_ref()) {
                return Err(Error::Tensor {
                    tensor: tensor.clone(),
                    path: folders.locate(shard).unwrap_or_else(|| folder.join(shard)),
                    problem:
                        "the index places it in this shard, which lacks it: download both again"
                            .into(),
                });
            }
        }
        checkpoint.mirrors = folders.into_mirrors();
        Ok(checkpoint)
    }

    /// Builds a checkpoint of opened files: parses the config and merges the tensor indices.
    fn assemble(
        folder: &Path,
        files: Vec<DataFile>,
        text_files: HashMap<&'static str, Vec<u8>>,
    ) -> Result<Self, Error> {
        let path = folder.join("config.json");
        let config: serde_json::Value = serde_json::from_slice(
            text_files.get("config.json").map_or(&[][..], |t| t),
        )
        .map_err(|e| Error::Checkpoint {
            path: path.clone(),
            problem: format!("this is not JSON: {e}; download it again"),
        })?;
        let quantization = Quantization::from_config(&config, &path)?;
        let mut tensors = HashMap::new();
        let mut packed = None;
        for (i, file) in files.iter().enumerate() {
            let index = match file.path().file_name() {
                Some(name) if name == packed::EXPERTS => {
                    packed.insert(PackedExperts::open(file, i as u32)?).tensors(i as u32)
                }
                _ => safetensors::read_index(file, i as u32)?,
            };
            for (name, info) in index {
                if let Some(first) = tensors.insert(name.clone(), info) {
                    let problem = format!(
                        "it is also in {}: remove one of them",
                        files[first.file as usize].path().display()
                    );
                    return Err(Error::Tensor { tensor: name, path: file.path().into(), problem });
                }
            }
        }
        if let Some(packed) = &packed {
            packed.check_dense(&files)?;
        }
        Ok(Self {
            folder: folder.into(),
            mirrors: Vec::new(),
            config,
            quantization,
            files: Arc::new(files),
            changes: tensors::detect_changes(&tensors),
            tensors,
            text_files,
            packed,
        })
    }

    /// A checkpoint of one file that does not exist yet. It can be inspected and planned for, not
    /// run.
    ///
    /// # Errors
    /// The config has a broken "quantization".
    pub(crate) fn planned(
        config: serde_json::Value,
        tensors: HashMap<String, TensorInfo>,
    ) -> Result<Self, Error> {
        let folder = Path::new("(planned)");
        let bytes = tensors.values().map(|t| t.bytes).sum();
        Ok(Self {
            folder: folder.into(),
            mirrors: Vec::new(),
            quantization: Quantization::from_config(&config, folder)?,
            config,
            files: Arc::new(vec![DataFile::planned("(planned)/model.safetensors", bytes)]),
            changes: tensors::detect_changes(&tensors),
            tensors,
            text_files: HashMap::new(),
            packed: None,
        })
    }

    /// The model's folder, for messages.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Mirror folders, which hold some or all of the tensor files.
    pub fn mirrors(&self) -> &[PathBuf] {
        &self.mirrors
    }

    /// Contents of `config.json`.
    pub fn config(&self) -> &serde_json::Value {
        &self.config
    }

    /// One of the small files, if it exists: `config.json`, `tokenizer.json`, `tiktoken.model`,
    /// `tokenizer_config.json`, `chat_template.jinja` or `generation_config.json`.
    pub fn text_file(&self, name: &str) -> Option<TextFile<'_>> {
        let bytes = self.text_files.get(name)?;
        Some(TextFile { bytes, path: self.folder.join(name) })
    }

    /// The files that hold tensors.
    pub(crate) fn files(&self) -> &Arc<Vec<DataFile>> {
        &self.files
    }

    /// Bytes of all files that hold tensors.
    pub fn total_bytes(&self) -> u64 {
        self.files.iter().map(DataFile::len).sum()
    }

    /// Number of files that hold tensors.
    pub fn shards(&self) -> usize {
        self.files.len()
    }
}

/// `model.safetensors.index.json`.
#[derive(serde::Deserialize)]
struct ShardIndex {
    weight_map: HashMap<String, String>,
}

/// Reads the index file of a sharded checkpoint: tensor name to file name.
fn weight_map(path: &Path) -> Result<HashMap<String, String>, Error> {
    let bytes = DataFile::open(path)?.read_all(MAX_JSON)?;
    let index: ShardIndex = serde_json::from_slice(&bytes).map_err(|e| Error::Checkpoint {
        path: path.into(),
        problem: format!("this is not the index of a sharded checkpoint: {e}; download it again"),
    })?;
    for shard in index.weight_map.values() {
        let plain = Path::new(shard).components().count() == 1
            && !shard.contains(['/', '\\'])
            && shard != "..";
        if !plain {
            let problem = format!(
                "it names the shard {shard:?}, which is not a plain file name in this folder"
            );
            return Err(Error::Checkpoint { path: path.into(), problem });
        }
    }
    Ok(index.weight_map)
}

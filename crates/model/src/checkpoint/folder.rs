//! A model's files: found, opened and checked.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::Arc,
};

use moeflux_base::{Error, TextFile, TextFiles, TokenizerFile, seam::json, setters};

use super::{
    arriving::ArrivingFile,
    data_file::DataFile,
    foreign,
    gguf::{self, GgufModel, GgufSet, GgufSummary, keys::Convert},
    limits::{TEXT_FILES, TOKENIZER, max_small},
    location::TensorInfo,
    mirror_folders::ModelFolders,
    model_path,
    packed::{self, PackedExperts},
    quantization::Quantization,
    rope_scaling::RopeScaling,
    safetensors,
    shards::Shards,
    source::SourceChanges,
    tensor_names::plain_name,
    tensors,
};

/// An opened model: a folder, GGUF files, or the built-in model. Its JSON files and the locations
/// of its tensors.
///
/// Opening reads headers only, and for a packed model at most 16 MiB of its dense tensors,
/// regardless of the size of the files.
#[derive(Debug)]
pub struct Checkpoint {
    pub(super) folder: PathBuf,
    pub(super) mirrors: Vec<PathBuf>,
    pub(super) config: serde_json::Value,
    pub(super) quantization: Quantization,
    pub(super) files: Arc<Vec<DataFile>>,
    pub(super) tensors: HashMap<String, TensorInfo>,
    pub(super) changes: SourceChanges,
    pub(super) text_files: HashMap<&'static str, Vec<u8>>,
    /// `tokenizer.json`: the other small files are held.
    pub(super) tokenizer: Option<DataFile>,
    pub(super) packed: Option<PackedExperts>,
    pub(super) gguf: Option<GgufSummary>,
    pub(super) findings: Findings,
    pub(super) rope_scaling: Option<RopeScaling>,
    pub(super) drafter: Option<Box<SplitDrafter>>,
}

/// A head for multi-token prediction in a separate folder.
#[derive(Debug)]
pub(super) struct SplitDrafter {
    /// Its files are the model's, then its own.
    checkpoint: Checkpoint,
    /// Number of the head's files.
    files: usize,
}

/// Where else a model's files are, and what differs from them.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct CheckpointOptions {
    /// Folders on other disks with copies of tensor files, beside the ones that the model's folder
    /// lists in its `mirrors.txt`, one per line. Files in several folders must be copies of each
    /// other. Mirrors are searched for tensor files only, also for files that the folder lacks.
    pub mirrors: Vec<PathBuf>,
    /// Files of tensors that are still arriving. Reads wait for their bytes.
    pub arriving: Vec<ArrivingFile>,
    /// Pre-tokenizer of a model in GGUF, in place of its `tokenizer.ggml.pre`.
    pub tokenizer_pre: Option<String>,
    /// Folder of a head for multi-token prediction that was split from the model.
    pub drafter: Option<PathBuf>,
}

setters!(CheckpointOptions {
    mirrors: Vec<PathBuf>,
    arriving: Vec<ArrivingFile>,
    tokenizer_pre: impl Into<Option<String>>,
    drafter: impl Into<Option<PathBuf>>,
});

/// Findings beside the tensors, for errors and remarks.
#[derive(Clone, Debug, Default)]
pub(super) struct Findings {
    /// File of each tensor, as the index says.
    pub(super) index: HashMap<String, String>,
    /// Description of a quantisation that is not read.
    pub(super) foreign: Option<String>,
    /// Remarks for users, see [`Checkpoint::notes`].
    notes: Vec<String>,
}

impl Checkpoint {
    /// The same with the tensors of `drafter`, a head for multi-token prediction that was split
    /// from this model.
    ///
    /// # Errors
    /// The drafter is a packed copy or in GGUF, or files of one of both are in use.
    pub fn with_drafter(self, mut drafter: Self) -> Result<Self, Error> {
        if drafter.packed.is_some() || drafter.gguf.is_some() {
            let problem = "expected a drafter in safetensors, got a packed copy or GGUF";
            return Err(Error::Checkpoint { path: drafter.folder, problem: problem.into() });
        }
        let take = |files: Arc<Vec<DataFile>>| {
            Arc::into_inner(files)
                .ok_or_else(|| Error::internal("a checkpoint in use has no drafter"))
        };
        let mut files = take(self.files)?;
        let own = files.len();
        files.extend(take(drafter.files)?.into_iter().map(DataFile::without_mirrors));
        let files = Arc::new(files);
        drafter.tensors.values_mut().for_each(|tensor| tensor.file += own as u32);
        drafter.files = Arc::clone(&files);
        let drafter = SplitDrafter { files: files.len() - own, checkpoint: drafter };
        Ok(Self { files, drafter: Some(Box::new(drafter)), ..self })
    }

    /// Opens a model's folder or a GGUF file without a drafter. `convert` reads the keys of GGUF's
    /// architectures.
    pub(crate) fn open_model(
        folder: &Path,
        options: &CheckpointOptions,
        convert: Convert,
    ) -> Result<Self, Error> {
        let CheckpointOptions { mirrors, arriving, tokenizer_pre, drafter: _ } = options;
        let tokenizer_pre = tokenizer_pre.as_deref();
        if gguf::is_gguf_file(folder) {
            let set = GgufSet::of_file(folder);
            let folders = ModelFolders::open(&set.folder, mirrors, arriving)?;
            return Self::open_gguf(&set, folders, tokenizer_pre, convert);
        }
        let folder = &model_path::model_folder(folder)?;
        let folders = ModelFolders::open(folder, mirrors, arriving)?;
        let is_hub = folders.own_names().contains("config.json")
            && folders.names().any(|name| name.ends_with(".safetensors"));
        if !is_hub && let Some(set) = GgufSet::of_folder(folder, folders.own_names())? {
            return Self::open_gguf(&set, folders, tokenizer_pre, convert);
        }
        if tokenizer_pre.is_some() {
            let problem = "this is not a model in GGUF, and its tokenizer says how texts are cut: \
                           leave --tokenizer-pre out";
            return Err(Error::Checkpoint { path: folder.clone(), problem: problem.into() });
        }
        let names = folders.own_names();
        if !names.contains("config.json") {
            let problem = foreign::no_config(folder, names);
            return Err(Error::Checkpoint { path: folder.clone(), problem });
        }
        let shards = Shards::choose(folder, &folders)?;
        let all = shards.names.iter().map(String::as_str).chain([packed::EXPERTS]);
        folders.check_mirrors(all.clone())?;
        let files = all.filter_map(|name| folders.open_file(name).transpose());
        let files = files.collect::<Result<Vec<_>, _>>()?;
        let mut text_files = HashMap::new();
        for name in TEXT_FILES.into_iter().filter(|name| *name != TOKENIZER) {
            if names.contains(name) {
                let file = DataFile::open(&folder.join(name))?;
                text_files.insert(name, file.read_text(max_small(name))?);
            }
        }
        let mut checkpoint = Self::assemble(folder, files, text_files)?;
        checkpoint.findings.index = shards.index;
        checkpoint.findings.notes.extend(shards.note);
        if names.contains(TOKENIZER) {
            let file = DataFile::open(&folder.join(TOKENIZER))?;
            file.check_start()?;
            checkpoint.tokenizer = Some(file);
        }
        checkpoint.mirrors = folders.into_mirrors();
        Ok(checkpoint)
    }

    /// Opens a model in GGUF.
    fn open_gguf(
        set: &GgufSet,
        folders: ModelFolders,
        tokenizer_pre: Option<&str>,
        convert: Convert,
    ) -> Result<Self, Error> {
        folders.check_mirrors(set.names.iter().map(String::as_str))?;
        let model = GgufModel::open(set, &folders, tokenizer_pre, convert)?;
        let GgufModel { files, tensors, config, text, summary } = model;
        let made = [
            ("config.json", Some(config.to_string().into_bytes())),
            ("tokenizer_config.json", Some(text.config)),
            ("generation_config.json", Some(text.generation)),
            ("chat_template.jinja", text.template),
        ];
        let path = set.first();
        Ok(Self {
            tokenizer: Some(DataFile::made(&path, text.tokenizer)),
            folder: path,
            mirrors: folders.into_mirrors(),
            quantization: Quantization::from_config(&config, &set.folder)?,
            changes: tensors::detect_changes(&config, &tensors),
            config,
            files: Arc::new(files),
            tensors,
            text_files: made.into_iter().filter_map(|(name, text)| Some((name, text?))).collect(),
            packed: None,
            gguf: Some(summary),
            findings: Findings { notes: text.note.into_iter().collect(), ..Findings::default() },
            rope_scaling: None,
            drafter: None,
        })
    }

    /// Builds a checkpoint of opened files: parses the config and merges the tensor indices.
    pub(super) fn assemble(
        folder: &Path,
        files: Vec<DataFile>,
        text_files: HashMap<&'static str, Vec<u8>>,
    ) -> Result<Self, Error> {
        let path = folder.join("config.json");
        let config = text_files.get("config.json").map_or(&[][..], |file| file);
        let config: serde_json::Value = json::parse(config)
            .map_err(|e| Error::Checkpoint { path: path.clone(), problem: json::problem(&e) })?;
        let quantization = Quantization::from_config(&config, &path)?;
        let mut tensors = HashMap::new();
        // Names in the files, by plain name, where they differ.
        let mut renamed = HashMap::new();
        let mut packed = None;
        for (i, file) in files.iter().enumerate() {
            let index = match file.path().file_name() {
                Some(name) if name == packed::EXPERTS => {
                    packed.insert(PackedExperts::open(file, i as u32)?).tensors(i as u32)
                }
                _ => safetensors::read_index(file, i as u32)?,
            };
            for (name, info) in index {
                let plain = plain_name(&name);
                if let Some(first) = tensors.insert(plain.clone(), info) {
                    let first_path = files[first.file as usize].path().display();
                    let problem = match renamed.get(&plain).unwrap_or(&plain) {
                        other if *other == name => {
                            format!("it is also in {first_path}: remove one of them")
                        }
                        other => format!(
                            "without what training tools put into names it is {plain}, as {other} \
                             in {first_path} is: remove one of them"
                        ),
                    };
                    return Err(Error::Tensor { tensor: name, path: file.path().into(), problem });
                }
                if plain != name {
                    renamed.insert(plain, name);
                }
            }
        }
        foreign::check_adapter(&tensors, &files)?;
        if let Some(packed) = &packed {
            packed.check_dense(&files)?;
        }
        Ok(Self {
            folder: folder.into(),
            mirrors: Vec::new(),
            quantization,
            files: Arc::new(files),
            changes: tensors::detect_changes(&config, &tensors),
            findings: Findings {
                foreign: foreign::quantization(&config, &tensors),
                ..Findings::default()
            },
            rope_scaling: None,
            drafter: None,
            config,
            tensors,
            text_files,
            tokenizer: None,
            packed,
            gguf: None,
        })
    }

    /// A checkpoint of one file that does not exist yet. It can be inspected and planned for, not
    /// run.
    ///
    /// # Errors
    /// The config has a broken "quantization".
    #[doc(hidden)]
    pub fn planned(
        config: serde_json::Value,
        tensors: HashMap<String, TensorInfo>,
    ) -> Result<Self, Error> {
        let folder = Path::new("(planned)");
        let bytes = tensors.values().map(|t| t.bytes).sum();
        Ok(Self {
            folder: folder.into(),
            mirrors: Vec::new(),
            quantization: Quantization::from_config(&config, folder)?,
            changes: tensors::detect_changes(&config, &tensors),
            config,
            files: Arc::new(vec![DataFile::planned("(planned)/model.safetensors", bytes)]),
            tensors,
            text_files: HashMap::new(),
            tokenizer: None,
            packed: None,
            gguf: None,
            findings: Findings::default(),
            rope_scaling: None,
            drafter: None,
        })
    }

    /// The model's folder, or the first of its GGUF files, for messages.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Description of a model in GGUF.
    pub fn gguf(&self) -> Option<&GgufSummary> {
        self.gguf.as_ref()
    }

    /// Options that open these files again.
    pub fn options(&self) -> CheckpointOptions {
        let tokenizer_pre = self.gguf.as_ref().and_then(|gguf| gguf.tokenizer_pre.clone());
        CheckpointOptions {
            mirrors: self.mirrors.clone(),
            arriving: self.arriving(),
            tokenizer_pre,
            drafter: self.drafter().map(|drafter| drafter.folder.clone()),
        }
    }

    /// Mirror folders, which hold some or all of the tensor files.
    pub fn mirrors(&self) -> &[PathBuf] {
        &self.mirrors
    }

    /// Remarks for users on the choice of files, and on what they lack.
    pub fn notes(&self) -> &[String] {
        &self.findings.notes
    }

    /// Contents of `config.json`.
    pub fn config(&self) -> &serde_json::Value {
        &self.config
    }

    /// One of the small files that are held, if it exists: `config.json`, `tiktoken.model`,
    /// `tokenizer_config.json`, `special_tokens_map.json`, `chat_template.jinja`,
    /// `chat_template.json` or `generation_config.json`.
    pub fn text_file(&self, name: &str) -> Option<TextFile<'_>> {
        let bytes = self.text_files.get(name)?;
        let path = if self.gguf.is_some() { self.folder.clone() } else { self.folder.join(name) };
        Some(TextFile { bytes, path })
    }

    /// `tokenizer.json`, if it exists. It is read as a stream: published ones have up to 40 MB.
    #[doc(hidden)]
    pub fn tokenizer_file(&self) -> Option<&DataFile> {
        self.tokenizer.as_ref()
    }

    /// The head for multi-token prediction in a separate folder.
    pub fn drafter(&self) -> Option<&Self> {
        self.drafter.as_ref().map(|drafter| &drafter.checkpoint)
    }

    /// The files that hold the model's tensors, without the drafter's, which are after them.
    #[doc(hidden)]
    pub fn own_files(&self) -> &[DataFile] {
        let of_drafter = self.drafter.as_ref().map_or(0, |drafter| drafter.files);
        &self.files[..self.files.len() - of_drafter]
    }

    /// The files that hold tensors.
    #[doc(hidden)]
    pub fn files(&self) -> &Arc<Vec<DataFile>> {
        &self.files
    }

    /// Bytes of all files that hold tensors.
    pub fn total_bytes(&self) -> u64 {
        self.own_files().iter().map(DataFile::len).sum()
    }

    /// Number of files that hold tensors.
    pub fn shards(&self) -> usize {
        self.own_files().len()
    }
}

impl TextFiles for Checkpoint {
    fn folder(&self) -> &Path {
        Self::folder(self)
    }

    fn text_file(&self, name: &str) -> Option<TextFile<'_>> {
        Self::text_file(self, name)
    }

    fn tokenizer(&self) -> Option<TokenizerFile<'_>> {
        let file = self.tokenizer_file()?;
        let reader = Box::new(file.reader_at(file.text_start()));
        Some(TokenizerFile { reader, path: file.path() })
    }
}

/// Name of the tensor that holds the byte at `offset` of a file of tensors.
pub fn tensor_at(file: &DataFile, offset: u64) -> Option<String> {
    let tensors = match gguf::is_gguf_file(file.path()) {
        true => gguf::read_index(file),
        false => safetensors::read_index(file, 0),
    };
    let found =
        tensors.ok()?.into_iter().find(|(_, t)| (t.offset..t.offset + t.bytes).contains(&offset));
    found.map(|(name, _)| name)
}

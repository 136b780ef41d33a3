//! A model in GGUF: one file or several parts.

use std::collections::{BTreeMap, HashMap};

use moeflux_base::Error;
use serde_json::{Value, json};

use super::{
    super::{data_file::DataFile, location::TensorInfo, mirror_folders::ModelFolders},
    header::Header,
    keys::{Convert, Converted, Keys},
    metadata::Metadata,
    names,
    parts::GgufSet,
    text::{self, GgufText},
    types,
};

/// Key of the config that is made: an object in the config of a GGUF file and of its packed copy.
pub(in crate::checkpoint) const GGUF: &str = "gguf";
/// Key in that object: see `SourceChanges`.
pub(in crate::checkpoint) const VALUE_HEADS_DEALT: &str = "value_heads_dealt";
/// Key in that object, only where it is true: see `SourceChanges`.
pub(in crate::checkpoint) const PAIRS_ADJACENT: &str = "pairs_adjacent";

/// A model's GGUF files, with tensors and config by the Hub's names.
pub(in crate::checkpoint) struct GgufModel {
    pub(in crate::checkpoint) files: Vec<DataFile>,
    pub(in crate::checkpoint) tensors: HashMap<String, TensorInfo>,
    pub(in crate::checkpoint) config: Value,
    pub(in crate::checkpoint) text: GgufText,
    pub(in crate::checkpoint) summary: GgufSummary,
}

/// Description of a model's GGUF files.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct GgufSummary {
    /// `general.name`.
    pub name: Option<String>,
    /// Name of `general.file_type`. The types of tensors may differ from it.
    pub recipe: Option<String>,
    /// Number of keys of the metadata.
    pub keys: usize,
    /// Pre-tokenizer that was asked for in place of the file's.
    pub tokenizer_pre: Option<String>,
    /// Types of the tensors of each file.
    pub parts: Vec<GgufPart>,
}

/// Types of the tensors of a file.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct GgufPart {
    /// Name of the file.
    pub file: String,
    /// Number of tensors by type.
    pub types: BTreeMap<String, usize>,
}

impl GgufModel {
    /// Opens the files of a model.
    ///
    /// # Errors
    /// A file is missing, damaged or no model; the parts do not belong together; the architecture
    /// or the tokenizer is not read.
    pub(in crate::checkpoint) fn open(
        set: &GgufSet,
        folders: &ModelFolders,
        tokenizer_pre: Option<&str>,
        convert: Convert,
    ) -> Result<Self, Error> {
        let open = |name: &String| {
            folders.open_file(name)?.ok_or_else(|| Error::Checkpoint {
                path: set.folder.join(name),
                problem: "this file of the model is missing: download it".into(),
            })
        };
        let files = set.names.iter().map(open).collect::<Result<Vec<_>, _>>()?;
        let headers = files.iter().enumerate().map(|(i, file)| Header::read(file, i as u32));
        let headers = headers.collect::<Result<Vec<_>, _>>()?;
        let Some(first) = headers.first() else {
            return Err(Error::internal("a GGUF model without files; please report this"));
        };
        check_kind(&first.metadata, &files)?;
        check_parts(&headers)?;
        let parts = headers.iter().zip(&files).map(|(header, file)| GgufPart::new(header, file));
        let summary = GgufSummary {
            name: first.metadata.text(&files, "general.name").unwrap_or_default(),
            recipe: first.metadata.integer("general.file_type")?.map(types::recipe),
            keys: first.metadata.keys().count(),
            tokenizer_pre: tokenizer_pre.map(str::to_owned),
            parts: parts.collect(),
        };
        let key = "general.architecture";
        let prefix = first.metadata.text(&files, key)?;
        let prefix = prefix.ok_or_else(|| first.metadata.missing(key))?;
        let metadata = first.metadata.clone();
        let mut found = HashMap::new();
        for (name, info) in headers.into_iter().flat_map(|header| header.tensors) {
            let path = files[info.file as usize].path();
            if let Some(other) = found.insert(name.clone(), info) {
                let problem =
                    format!("it is also in {}", files[other.file as usize].path().display());
                return Err(Error::Tensor { tensor: name, path: path.into(), problem });
            }
        }
        let keys = Keys { prefix: &prefix, metadata: &metadata, files: &files, tensors: &found };
        let Converted { config, names: rows, value_heads_dealt, pairs_adjacent } = convert(&keys)?;
        let mut config = Value::Object(config);
        config[GGUF] = json!({ VALUE_HEADS_DEALT: value_heads_dealt });
        if pairs_adjacent {
            config[GGUF][PAIRS_ADJACENT] = true.into();
        }
        let text = text::text_files(&metadata, &files, tokenizer_pre)?;
        let mut tensors = HashMap::with_capacity(found.len());
        for (name, info) in &found {
            let has = |name: &str| found.contains_key(name);
            let hub =
                |name: &String| names::hub_name(name, rows, has).unwrap_or_else(|| name.clone());
            match names::fused_projections(name, has) {
                Some(names) => {
                    let is_factor = name.ends_with(names::FACTOR);
                    let same = || is_factor.then(|| [(); 3].map(|()| info.clone()));
                    let split = || match names::is_beside_kda(name, has) {
                        true => thirds(info),
                        false => split_projections(info, &config),
                    };
                    let parts = same().or_else(split);
                    let parts = parts.ok_or_else(|| {
                        let (tensor, path) =
                            (name.clone(), files[info.file as usize].path().into());
                        let problem = "its rows are not those of queries, keys and values".into();
                        Error::Tensor { tensor, path, problem }
                    })?;
                    tensors.extend(names.iter().map(hub).zip(parts));
                }
                None => drop(tensors.insert(hub(name), info.clone())),
            }
        }
        Ok(Self { tensors, files, config, text, summary })
    }
}

/// Names, as in the file, and locations of the tensors of a file.
///
/// # Errors
/// As [`Header::read`].
pub(in crate::checkpoint) fn read_index(
    file: &DataFile,
) -> Result<Vec<(String, TensorInfo)>, Error> {
    Ok(Header::read(file, 0)?.tensors)
}

impl GgufPart {
    fn new(header: &Header, file: &DataFile) -> Self {
        let mut types = BTreeMap::new();
        for (_, info) in &header.tensors {
            *types.entry(info.dtype.clone()).or_insert(0) += 1;
        }
        let name = file.path().file_name().unwrap_or_default();
        Self { file: name.to_string_lossy().into_owned(), types }
    }
}

/// Refuses files that are no models.
fn check_kind(metadata: &Metadata, files: &[DataFile]) -> Result<(), Error> {
    let text = |key: &str| metadata.text(files, key).ok().flatten();
    let kind = match (text("general.type").as_deref(), text("general.architecture").as_deref()) {
        (Some("adapter"), _) => {
            "an adapter (LoRA), not a model: merge it by llama.cpp's llama-export-lora, and give \
             the result"
        }
        (Some("imatrix"), _) => "an importance matrix for quantizing, not a model",
        (Some("mmproj"), _) | (_, Some("clip")) => {
            "the projector of a vision model: give the file of the language model"
        }
        _ => return Ok(()),
    };
    Err(metadata.error(format!("this is {kind}")))
}

/// Checks that the files are the parts of one model, in order.
fn check_parts(headers: &[Header]) -> Result<(), Error> {
    let (count_key, number_key, total_key) = ("split.count", "split.no", "split.tensors.count");
    for (i, Header { metadata, .. }) in headers.iter().enumerate() {
        let count = metadata.integer(count_key)?;
        match count {
            None if headers.len() == 1 => return Ok(()),
            Some(n) if n == headers.len() as u64 => {}
            None => return Err(metadata.missing(count_key)),
            Some(n) if n > 1 && headers.len() == 1 => {
                let problem = format!(
                    "is {n}, but the file has not the name of a part: NAME-00001-of-{n:05}.gguf"
                );
                return Err(metadata.problem(count_key, &problem));
            }
            Some(n) => {
                let problem = format!("is {n}, but by its name it is one of {}", headers.len());
                return Err(metadata.problem(count_key, &problem));
            }
        }
        if metadata.integer(number_key)?.unwrap_or(0) != i as u64 {
            let problem = format!("is not {i}, as its name says: the parts are mixed up");
            return Err(metadata.problem(number_key, &problem));
        }
    }
    let tensors: usize = headers.iter().map(|header| header.tensors.len()).sum();
    for Header { metadata, .. } in headers {
        if let Some(total) = metadata.integer(total_key)?.filter(|n| *n != tensors as u64) {
            let problem = format!("is {total}, but all parts have {tensors}: some part is another");
            return Err(metadata.problem(total_key, &problem));
        }
    }
    Ok(())
}

/// Three matrices of equally many rows, one after the other.
fn thirds(info: &TensorInfo) -> Option<[TensorInfo; 3]> {
    let rows = *info.shape.first()? as u64;
    let each = rows / 3;
    row_ranges(info, [each; 3]).filter(|_| rows.is_multiple_of(3))
}

/// Queries, keys and values of a tensor that has the rows of all three, one after the other.
fn split_projections(info: &TensorInfo, config: &Value) -> Option<[TensorInfo; 3]> {
    let size = |key: &str| config[key].as_u64();
    let rows = *info.shape.first()? as u64;
    let heads = size("num_attention_heads")?;
    let width = size("head_dim").or_else(|| size("hidden_size")?.checked_div(heads))?;
    let (queries, keys) = match size("v_head_dim") {
        // All layers have as many query heads.
        Some(values) => {
            let queries = heads.checked_mul(width)?;
            let each = rows.checked_sub(queries)?.checked_div(width.checked_add(values)?)?;
            (queries, each.checked_mul(width)?)
        }
        // All layers have as many heads of keys and values.
        None => {
            let keys = size("num_key_value_heads")?.checked_mul(width)?;
            (rows.checked_sub(keys.checked_mul(2)?)?, keys)
        }
    };
    let values = rows.checked_sub(queries)?.checked_sub(keys)?;
    row_ranges(info, [queries, keys, values])
}

/// Three matrices of these numbers of rows, one after the other.
fn row_ranges(info: &TensorInfo, [first, second, third]: [u64; 3]) -> Option<[TensorInfo; 3]> {
    let row = info.bytes.checked_div(*info.shape.first()? as u64)?;
    let part = |first: u64, count: u64| {
        let mut shape = info.shape.clone();
        if let Some(rows) = shape.first_mut() {
            *rows = count as usize;
        }
        let (offset, bytes) = (info.offset + first * row, count * row);
        TensorInfo { offset, bytes, shape, ..info.clone() }
    };
    Some([part(0, first), part(first, second), part(first + second, third)])
}

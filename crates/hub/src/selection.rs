//! Choice of the files that a model needs.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    io::Read,
    path::{Path, PathBuf},
};

use serde::{
    Deserialize, Deserializer,
    de::{IgnoredAny, MapAccess, Visitor},
};

use crate::{error::HubError, file_path::FilePath, json, model_name::ModelName};

/// The index of a checkpoint's shards.
pub(crate) const INDEX: &str = "model.safetensors.index.json";

/// Files beside the weights that a checkpoint may need.
const COMPANIONS: [&str; 16] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tiktoken.model",
    "*.tiktoken",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "quantize_config.json",
    "*.safetensors.index.json",
    "*token_map.json",
];

/// Quantizations of GGUF that are taken where none is named, the best first.
const DEFAULT_QUANTIZATIONS: [&str; 3] = ["Q4_K_M", "UD-Q4_K_XL", "MXFP4"];

/// Variants that an error lists, at most.
const MAX_LISTED: usize = 40;

/// Choice of the files to download: all that the model needs, or all that patterns name.
#[derive(Clone, Debug, Default)]
pub struct Selection {
    include: Vec<String>,
}

/// The chosen files.
#[derive(Clone, Debug)]
pub(crate) struct Chosen {
    pub(crate) files: BTreeSet<FilePath>,
    /// First file of a GGUF model.
    gguf: Option<FilePath>,
}

impl Chosen {
    /// Path for `--model`: the snapshot's folder, or the GGUF file in it.
    pub(crate) fn location(&self, snapshot: &Path) -> PathBuf {
        match &self.gguf {
            Some(gguf) => gguf.below(snapshot),
            None => snapshot.to_owned(),
        }
    }

    /// Leaves out weights that the index of shards does not name: other copies of the same weights.
    pub(crate) fn keep_indexed(&mut self, ShardIndex { weight_map: Shards(shards) }: &ShardIndex) {
        let is_needed = |path: &FilePath| {
            !path.name().ends_with(".safetensors") || shards.contains(path.as_str())
        };
        // An index without a file that exists is left to the error of the loader.
        if self.files.iter().any(|path| shards.contains(path.as_str())) {
            self.files.retain(is_needed);
        }
    }
}

/// Names of shards, by the index.
#[derive(Default, Deserialize)]
pub(crate) struct ShardIndex {
    weight_map: Shards,
}

impl ShardIndex {
    /// Reads an index. One of another form names nothing, as the loader reports it.
    ///
    /// # Errors
    /// The source fails or is too long.
    pub(crate) fn read(source: impl Read) -> serde_json::Result<Self> {
        match json::read(source) {
            Err(error) if !error.is_io() => Ok(Self::default()),
            result => result,
        }
    }
}

/// Names of files, each once.
#[derive(Default)]
struct Shards(BTreeSet<String>);

impl<'de> Deserialize<'de> for Shards {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(ShardsVisitor)
    }
}

struct ShardsVisitor;

impl<'de> Visitor<'de> for ShardsVisitor {
    type Value = Shards;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map from tensors to files")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Shards, A::Error> {
        let mut shards = BTreeSet::new();
        while let Some((IgnoredAny, name)) = map.next_entry::<_, String>()? {
            json::check_file(shards.len(), &name)?;
            shards.insert(name);
        }
        Ok(Shards(shards))
    }
}

impl Selection {
    /// Files whose paths match one of these patterns, with `*` and `?`.
    pub fn patterns(include: Vec<String>) -> Self {
        Self { include }
    }

    /// Whether a file of this name, which is no path of the cache, might be chosen.
    pub(crate) fn may_choose(&self, name: &str) -> bool {
        if !self.include.is_empty() {
            return self.include.iter().any(|pattern| matches_pattern(pattern, name));
        }
        let name = name.rsplit(['/', '\\']).next().unwrap_or(name).to_ascii_lowercase();
        let mut patterns = COMPANIONS.iter().chain(&["*.safetensors", "*.gguf"]);
        patterns.any(|pattern| matches_pattern(pattern, &name))
    }

    /// Chooses from a repository's files.
    ///
    /// # Errors
    /// No file fits, or several GGUF models do.
    pub(crate) fn select(
        &self,
        model: &ModelName,
        paths: &[&FilePath],
    ) -> Result<Chosen, HubError> {
        let pick = |is_chosen: &dyn Fn(&FilePath) -> bool| -> BTreeSet<FilePath> {
            paths.iter().copied().filter(|path| is_chosen(path)).cloned().collect()
        };
        let nothing = |wanted: &str, available: String| HubError::NothingSelected {
            repository: model.repository(),
            wanted: wanted.to_owned(),
            available,
        };
        if !self.include.is_empty() {
            let fits = |path: &FilePath| {
                self.include.iter().any(|pattern| matches_pattern(pattern, path.as_str()))
            };
            let files = pick(&fits);
            if files.is_empty() {
                let available = listed(paths.iter().map(|path| path.to_string()));
                return Err(nothing(&self.include.join(", "), available));
            }
            let gguf = files.iter().find(|path| is_gguf(path)).cloned();
            let gguf = gguf.filter(|_| !files.iter().any(|path| path.as_str() == "config.json"));
            return Ok(Chosen { files, gguf });
        }
        let is_weights =
            |path: &FilePath| path.depth() == 0 && path.name().ends_with(".safetensors");
        if model.variant().is_none() && paths.iter().any(|path| is_weights(path)) {
            let is_companion = |path: &FilePath| {
                path.depth() == 0
                    && COMPANIONS.iter().any(|pattern| matches_pattern(pattern, path.as_str()))
            };
            let files = pick(&|path| is_weights(path) || is_companion(path));
            return Ok(Chosen { files, gguf: None });
        }
        let variants = gguf_variants(paths);
        let chosen = match model.variant() {
            Some(wanted) => variants.iter().find(|(name, files)| fits(wanted, name, files)),
            None => match variants.len() {
                1 => variants.iter().next(),
                _ => DEFAULT_QUANTIZATIONS.iter().find_map(|wanted| {
                    variants.iter().find(|(name, files)| fits(wanted, name, files))
                }),
            },
        };
        let Some((_, files)) = chosen else {
            let wanted = model.variant().unwrap_or("a model in safetensors or GGUF");
            let labels = variants.keys().map(|name| label(name).unwrap_or(name).to_owned());
            let available = match variants.is_empty() {
                true => listed(paths.iter().map(|path| path.to_string())),
                false => listed(labels),
            };
            return Err(nothing(wanted, available));
        };
        let files: BTreeSet<_> = files.iter().map(|&path| path.clone()).collect();
        let gguf = files.first().cloned();
        Ok(Chosen { files, gguf })
    }
}

fn is_gguf(path: &FilePath) -> bool {
    path.name().to_ascii_lowercase().ends_with(".gguf")
}

/// Models in GGUF of a repository: the common name of their parts, and the parts.
fn gguf_variants<'a>(paths: &[&'a FilePath]) -> BTreeMap<String, Vec<&'a FilePath>> {
    let mut variants: BTreeMap<String, Vec<&FilePath>> = BTreeMap::new();
    for path in paths.iter().copied().filter(|path| is_gguf(path)) {
        let name = path.name().to_ascii_lowercase();
        // Projectors of images, and statistics for quantizing.
        if ["mmproj", "imatrix", "mtp-"].iter().any(|other| name.starts_with(other)) {
            continue;
        }
        let stem = &path.as_str()[..path.as_str().len() - ".gguf".len()];
        variants.entry(without_part(stem).to_owned()).or_default().push(path);
    }
    variants
}

/// The name of a model in parts, without `-00001-of-00003`.
fn without_part(stem: &str) -> &str {
    let is_number = |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    let parts = stem.rsplit_once("-of-").and_then(|(before, total)| {
        let (name, part) = before.rsplit_once('-')?;
        (is_number(total) && is_number(part)).then_some(name)
    });
    parts.unwrap_or(stem)
}

/// Whether a name such as `Q4_K_M`, `sub` or `sub/model.gguf` means the variant with this common
/// name.
fn fits(wanted: &str, name: &str, files: &[&FilePath]) -> bool {
    let is_file = files.iter().any(|path| path.as_str() == wanted || path.name() == wanted);
    let is_folder = name.rsplit_once('/').is_some_and(|(folder, _)| folder == wanted);
    is_file || is_folder || label(name).is_some_and(|label| label.eq_ignore_ascii_case(wanted))
}

/// Quantization in the name of a GGUF model: `UD-Q4_K_XL` of `sub/GLM-4.6-UD-Q4_K_XL`.
fn label(name: &str) -> Option<&str> {
    let name = name.rsplit('/').next()?;
    let is_quantization = |text: &str| {
        let text = text.to_ascii_uppercase();
        let numbered = ["Q", "IQ", "TQ", "MXFP", "NVFP"].iter().any(|kind| {
            let digits = text.strip_prefix(kind);
            digits.is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
        });
        numbered || ["F16", "BF16", "F32", "FP16"].contains(&text.as_str())
    };
    let start = name
        .char_indices()
        .filter(|&(_, c)| c == '-' || c == '.')
        .map(|(at, _)| at + 1)
        .find(|&at| is_quantization(&name[at..]))?;
    // Unsloth's dynamic recipes have a mark before the type.
    let has_mark = name[..start].to_ascii_uppercase().ends_with("-UD-");
    Some(&name[if has_mark { start - "UD-".len() } else { start }..])
}

/// Names in a message.
fn listed(names: impl Iterator<Item = String>) -> String {
    let mut names: Vec<_> = names.collect();
    let more = names.len().saturating_sub(MAX_LISTED);
    names.truncate(MAX_LISTED);
    if more > 0 {
        names.push(format!("{more} more"));
    }
    match names.is_empty() {
        true => "no files".into(),
        false => names.join(", "),
    }
}

/// Whether a path matches a pattern, in which `*` stands for any characters, also `/`, and `?` for
/// one.
fn matches_pattern(pattern: &str, path: &str) -> bool {
    let (pattern, path): (Vec<_>, Vec<_>) = (pattern.chars().collect(), path.chars().collect());
    let (mut p, mut t) = (0, 0);
    // Where the last `*` was, and how far it reaches.
    let mut star: Option<(usize, usize)> = None;
    while t < path.len() {
        match pattern.get(p) {
            Some('*') => {
                star = Some((p, t));
                p += 1;
            }
            Some(&c) if c == '?' || c == path[t] => {
                p += 1;
                t += 1;
            }
            _ => match &mut star {
                Some((at, reach)) => {
                    *reach += 1;
                    p = *at + 1;
                    t = *reach;
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|&c| c == '*')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths(names: &[&str]) -> Vec<FilePath> {
        names.iter().map(|name| FilePath::new(name).unwrap()).collect()
    }

    fn chosen(model: &str, selection: &Selection, names: &[&str]) -> Result<Chosen, HubError> {
        let paths = paths(names);
        selection.select(&model.parse().unwrap(), &paths.iter().collect::<Vec<_>>())
    }

    fn names(chosen: &Chosen) -> Vec<&str> {
        chosen.files.iter().map(FilePath::as_str).collect()
    }

    const GGUF: [&str; 8] = [
        "README.md",
        "M-Q4_K_M.gguf",
        "M-Q8_0.gguf",
        "UD-Q2_K_XL/M-UD-Q2_K_XL-00001-of-00002.gguf",
        "UD-Q2_K_XL/M-UD-Q2_K_XL-00002-of-00002.gguf",
        "M-Q2_K.gguf",
        "mmproj-F16.gguf",
        "imatrix_unsloth.gguf",
    ];

    #[test]
    fn a_checkpoint_has_weights_and_companions_of_its_top_folder() {
        let files = [
            "README.md",
            "config.json",
            "model-00001-of-00002.safetensors",
            INDEX,
            "tokenizer.json",
            "original/consolidated.safetensors",
            "consolidated.safetensors",
            "model-00002-of-00002.safetensors",
            "onnx/model.onnx",
            "pytorch_model.bin",
        ];
        let mut chosen = chosen("a/b", &Selection::default(), &files).unwrap();
        assert!(names(&chosen).contains(&"consolidated.safetensors"));
        chosen.keep_indexed(
            &ShardIndex::read(
                r#"{"weight_map": {"x": "model-00001-of-00002.safetensors",
                                   "y": "model-00002-of-00002.safetensors"}}"#
                    .as_bytes(),
            )
            .unwrap(),
        );
        assert_eq!(
            names(&chosen),
            [
                "config.json",
                "model-00001-of-00002.safetensors",
                "model-00002-of-00002.safetensors",
                INDEX,
                "tokenizer.json"
            ]
        );
        assert_eq!(chosen.location(Path::new("s")), Path::new("s"));
    }

    #[test]
    fn a_quantization_is_one_model_with_all_parts() {
        let all = Selection::default();
        assert_eq!(names(&chosen("a/b", &all, &GGUF).unwrap()), ["M-Q4_K_M.gguf"]);
        assert_eq!(names(&chosen("a/b:q8_0", &all, &GGUF).unwrap()), ["M-Q8_0.gguf"]);
        let parts = chosen("a/b:UD-Q2_K_XL", &all, &GGUF).unwrap();
        assert_eq!(parts.files.len(), 2);
        assert_eq!(
            parts.location(Path::new("s")),
            Path::new("s/UD-Q2_K_XL/M-UD-Q2_K_XL-00001-of-00002.gguf")
        );
        assert_eq!(names(&chosen("a/b:Q2_K", &all, &GGUF).unwrap()), ["M-Q2_K.gguf"]);
        let folder = ["M-Q4_K_M.gguf", "small/M.gguf"];
        assert_eq!(names(&chosen("a/b:small", &all, &folder).unwrap()), ["small/M.gguf"]);
        assert_eq!(names(&chosen("a/b:M-Q8_0.gguf", &all, &GGUF).unwrap()), ["M-Q8_0.gguf"]);
        let error = chosen("a/b:Q3_K_M", &all, &GGUF).unwrap_err().to_string();
        assert!(error.contains("Q3_K_M") && error.contains("Q8_0, UD-Q2_K_XL"), "{error}");
        let error = chosen("a/b", &all, &["x.bin"]).unwrap_err().to_string();
        assert!(error.contains("x.bin"), "{error}");
    }

    #[test]
    fn patterns_choose_files_alone() {
        let some = Selection::patterns(vec!["*.md".into(), "M-Q?_0.gguf".into()]);
        assert_eq!(names(&chosen("a/b", &some, &GGUF).unwrap()), ["M-Q8_0.gguf", "README.md"]);
        assert!(matches_pattern("*b*d", "abcd") && matches_pattern("a*", "a/b/c"));
        assert!(!matches_pattern("*b*d", "abc") && !matches_pattern("", "a"));
        assert!(matches_pattern("**", "") && !matches_pattern("?", ""));
    }
}

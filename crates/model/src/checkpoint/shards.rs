//! Choice of the files that hold a model's tensors: by the index, or by the files that exist.

use std::{
    collections::{BTreeSet, HashMap},
    path::Path,
};

use moeflux_base::{Error, seam::json};

use super::{
    data_file::DataFile, foreign, limits::MAX_JSON, mirror_folders::ModelFolders,
    tensor_names::plain_name,
};

/// Index of a checkpoint in several files.
const INDEX: &str = "model.safetensors.index.json";

/// Files that hold a model's tensors.
#[derive(Debug, Default)]
pub(super) struct Shards {
    pub(super) names: BTreeSet<String>,
    /// File of each tensor, as the index says; empty without one.
    pub(super) index: HashMap<String, String>,
    /// A remark for users on the choice.
    pub(super) note: Option<String>,
}

/// `model.safetensors.index.json`.
#[derive(serde::Deserialize)]
struct ShardIndex {
    weight_map: HashMap<String, String>,
}

impl Shards {
    /// Chooses the files of a folder and its mirrors. The files that the index names; if none of
    /// them exists, the files that are there and whole.
    ///
    /// # Errors
    /// A file that the index or a series of files names is missing, or there is none.
    pub(super) fn choose(folder: &Path, folders: &ModelFolders) -> Result<Self, Error> {
        let found: BTreeSet<&str> =
            folders.names().filter(|name| name.ends_with(".safetensors")).collect();
        if !folders.own_names().contains(INDEX) {
            return Self::without_index(folder, folders, &found);
        }
        let path = folder.join(INDEX);
        let (problem, error) = match ShardIndex::read(&path) {
            Ok(index) => {
                let index = index.plain(&path)?;
                let names: BTreeSet<String> = index.values().cloned().collect();
                let missing: Vec<_> =
                    names.iter().filter(|n| !found.contains(n.as_str())).collect();
                let problem = match missing.first() {
                    None if !names.is_empty() => return Ok(Self { names, index, note: None }),
                    None => "the index names no file".to_owned(),
                    Some(first) => format!(
                        "the index names it, but it is missing, as {} of {} files are: download \
                         the shard {first} again",
                        missing.len(),
                        names.len()
                    ),
                };
                let path = missing.first().map_or(path.clone(), |first| folder.join(first));
                let error = Error::Checkpoint { path, problem };
                if missing.len() < names.len() {
                    return Err(error);
                }
                ("names none of the files that are here".to_owned(), error)
            }
            Err(error) => (format!("cannot be used ({error})"), error),
        };
        let Some(names) = whole(&found) else { return Err(error) };
        let list: Vec<_> = names.iter().map(String::as_str).collect();
        let note =
            Some(format!("{}: it {problem}: {} is read instead", path.display(), list.join(", ")));
        Ok(Self { names, index: HashMap::new(), note })
    }

    fn without_index(
        folder: &Path,
        folders: &ModelFolders,
        found: &BTreeSet<&str>,
    ) -> Result<Self, Error> {
        let is_model = |name: &&str| name.starts_with("model");
        let mut names: BTreeSet<String> =
            found.iter().filter(|n| is_model(n)).map(|n| (*n).to_owned()).collect();
        if names.is_empty() {
            // Older exports of MLX name their files weights.00.safetensors.
            let is_weights = |name: &&&str| !name.contains("adapter");
            names = found.iter().filter(is_weights).map(|n| (*n).to_owned()).collect();
        }
        if names.is_empty() {
            let problem = foreign::no_tensors(folder, folders.own_names());
            return Err(Error::Checkpoint { path: folder.into(), problem });
        }
        let missing = names.iter().filter_map(|name| Series::of(name, ENDING)).find_map(|series| {
            (1..=series.count.min(MAX_SERIES))
                .map(|number| series.name(number))
                .find(|name| !names.contains(name))
        });
        match missing {
            None => Ok(Self { names, ..Self::default() }),
            Some(_) if names.contains(WHOLE) => {
                Ok(Self { names: [WHOLE.to_owned()].into(), ..Self::default() })
            }
            Some(missing) => Err(Error::Checkpoint {
                problem: "this file of a series is missing: download it".into(),
                path: folder.join(missing),
            }),
        }
    }
}

/// Name of the file of a checkpoint in one file.
const WHOLE: &str = "model.safetensors";

/// Maximum number of files of a series; published ones have some hundred.
pub(super) const MAX_SERIES: usize = 100_000;

/// Names of a model's files that need no index: one whole file, or a complete series.
fn whole(found: &BTreeSet<&str>) -> Option<BTreeSet<String>> {
    if found.contains(WHOLE) {
        return Some([WHOLE.to_owned()].into());
    }
    found.iter().filter(|n| n.starts_with("model")).find_map(|name| {
        let series = Series::of(name, ENDING)?;
        let all = (1..=series.count.min(MAX_SERIES)).map(|number| series.name(number));
        let all: Option<BTreeSet<_>> =
            all.map(|name| found.contains(name.as_str()).then_some(name)).collect();
        all.filter(|all| !all.is_empty())
    })
}

/// End of the names of safetensors files.
const ENDING: &str = ".safetensors";

/// Files `PREFIX-00001-of-00003.safetensors`, or with another ending.
pub(super) struct Series<'a> {
    prefix: &'a str,
    digits: usize,
    pub(super) count: usize,
    total: &'a str,
    ending: &'static str,
}

impl<'a> Series<'a> {
    /// The series that a file belongs to.
    pub(super) fn of(name: &'a str, ending: &'static str) -> Option<Self> {
        let (rest, total) = name.strip_suffix(ending)?.rsplit_once("-of-")?;
        let (prefix, number) = rest.rsplit_once('-')?;
        number.parse::<usize>().ok()?;
        Some(Self { prefix, digits: number.len(), count: total.parse().ok()?, total, ending })
    }

    /// Start of all names.
    pub(super) fn prefix(&self) -> &'a str {
        self.prefix
    }

    pub(super) fn name(&self, number: usize) -> String {
        let Self { prefix, digits, total, ending, .. } = self;
        format!("{prefix}-{number:0digits$}-of-{total}{ending}")
    }
}

impl ShardIndex {
    /// Reads the index file of a sharded checkpoint.
    fn read(path: &Path) -> Result<Self, Error> {
        let bytes = DataFile::open(path)?.read_text(MAX_JSON)?;
        json::parse(&bytes).map_err(|e| {
            let problem = json::problem(&e);
            let problem = format!("this is not the index of a sharded checkpoint: {problem}");
            Error::Checkpoint { path: path.into(), problem }
        })
    }

    /// File of each tensor, by plain name.
    ///
    /// # Errors
    /// A file is outside the folder.
    fn plain(self, path: &Path) -> Result<HashMap<String, String>, Error> {
        let is_plain = |shard: &str| {
            Path::new(shard).components().count() == 1
                && !shard.contains(['/', '\\'])
                && shard != ".."
        };
        match self.weight_map.values().find(|shard| !is_plain(shard)) {
            None => {
                let shards = self.weight_map.into_iter();
                Ok(shards.map(|(name, shard)| (plain_name(&name), shard)).collect())
            }
            Some(shard) => {
                let problem = format!(
                    "it names the shard {shard:?}, which is not a plain file name in this folder"
                );
                Err(Error::Checkpoint { path: path.into(), problem })
            }
        }
    }
}

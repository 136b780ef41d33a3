//! Files of a model in GGUF: one, or a series of parts.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    io::Read,
    path::{Path, PathBuf},
};

use moeflux_base::Error;

use super::{
    super::shards::{MAX_SERIES, Series},
    header::MAGIC,
};

const ENDING: &str = ".gguf";

/// Maximum pieces of a file cut by its bytes that an error lists.
const MAX_PIECES: usize = 99;

/// Names of a model's files, in order, and their folder.
#[derive(Debug)]
pub(in crate::checkpoint) struct GgufSet {
    pub(in crate::checkpoint) folder: PathBuf,
    pub(in crate::checkpoint) names: Vec<String>,
}

/// Whether a path has the name of a GGUF file.
pub(in crate::checkpoint) fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("gguf"))
}

/// Whether a file is GGUF, by the ending of its name or by its magic number. Ollama names its blobs
/// by digest, and a link may have any name.
pub(in crate::checkpoint) fn is_gguf_file(path: &Path) -> bool {
    let has_magic = || {
        let mut start = [0; MAGIC.len()];
        let read = File::open(path).and_then(|mut file| file.read_exact(&mut start));
        read.is_ok() && start == *MAGIC
    };
    !path.is_dir() && (is_gguf(path) || path.is_file() && has_magic())
}

/// Kind of a file that is beside a model, by its name.
fn beside(name: &str) -> Option<&'static str> {
    let lower = name.to_ascii_lowercase();
    let starts = |prefix: &str| lower.starts_with(prefix);
    Some(match () {
        () if starts("mmproj") || lower.contains("-mmproj") => "the projector of a vision model",
        () if starts("imatrix") || lower.contains("imatrix.gguf") => "an importance matrix",
        () if starts("mtp-") => "a draft model for multi-token prediction",
        () => return None,
    })
}

/// Advice on a file that is a piece of a GGUF file cut by its bytes, by its name.
pub(in crate::checkpoint) fn cut_piece(name: &str) -> Option<String> {
    let (whole, piece) = name.split_once(".gguf")?;
    let piece = piece.strip_prefix(['.', '-'])?;
    let kind = ["part", "split"].into_iter().find(|start| piece.starts_with(start))?;
    let stem = &name[..name.len() - piece.len() + kind.len()];
    let count = piece[kind.len()..].split_once("of").and_then(|(_, count)| count.parse().ok());
    let pieces = match count.filter(|count| (1..=MAX_PIECES).contains(count)) {
        // A pattern would put the tenth piece before the second one.
        Some(count) => {
            (1..=count).map(|i| format!("{stem}{i}of{count}")).collect::<Vec<_>>().join(" ")
        }
        None => format!("{stem}*"),
    };
    Some(format!(
        "{name} is a piece of a file that was cut by its bytes: join all pieces in order, \
         `cat {pieces} > {whole}.gguf`, and give the result"
    ))
}

impl GgufSet {
    /// The files of the model that a file belongs to.
    pub(in crate::checkpoint) fn of_file(path: &Path) -> Self {
        let folder = path.parent().filter(|folder| *folder != Path::new(""));
        let folder = folder.unwrap_or(Path::new(".")).to_owned();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let series = Series::of(&name, ENDING).filter(|s| (2..=MAX_SERIES).contains(&s.count));
        let names = match series {
            Some(series) => (1..=series.count).map(|number| series.name(number)).collect(),
            None => vec![name.into_owned()],
        };
        Self { folder, names }
    }

    /// The files of the model to which the file `name` of a folder belongs; `None` if it is not of
    /// a model in GGUF.
    pub(in crate::checkpoint) fn of_model(folder: &Path, name: &str) -> Option<Self> {
        let is_model = is_gguf(Path::new(name)) && beside(name).is_none();
        is_model.then(|| Self::of_file(&folder.join(name)))
    }

    /// The only model among the files of a folder; `None` if there is no GGUF file.
    ///
    /// # Errors
    /// There are several models, or only files that are beside one.
    pub(in crate::checkpoint) fn of_folder(
        folder: &Path,
        names: &BTreeSet<String>,
    ) -> Result<Option<Self>, Error> {
        let bad = |problem| Error::Checkpoint { path: folder.into(), problem };
        let files = names.iter().filter(|name| is_gguf(Path::new(name)));
        let (others, models): (Vec<&String>, _) = files.partition(|name| beside(name).is_some());
        let mut sets = BTreeMap::new();
        for name in models {
            let set = Self::of_file(&folder.join(name));
            sets.insert(set.names.first().cloned(), set);
        }
        if sets.len() > 1 {
            let list: Vec<_> = sets.into_keys().flatten().collect();
            let problem =
                format!("the folder has several models in GGUF: give one of {}", list.join(", "));
            return Err(bad(problem));
        }
        let other = others.first().and_then(|name| Some((name, beside(name)?)));
        match (sets.into_values().next(), other) {
            (Some(set), _) => Ok(Some(set)),
            (None, Some((name, kind))) => {
                Err(bad(format!("{name} is {kind}, not a model: the model itself is missing")))
            }
            (None, None) => Ok(None),
        }
    }

    /// Name of the model: that of its first file, without ending and number.
    pub(in crate::checkpoint) fn title(&self) -> String {
        let name = self.names.first().map_or("", String::as_str);
        match Series::of(name, ENDING).filter(|_| self.names.len() > 1) {
            Some(series) => series.prefix().to_owned(),
            None => match is_gguf(Path::new(name)) {
                true => name[..name.len() - ENDING.len()].to_owned(),
                false => name.to_owned(),
            },
        }
    }

    /// Path of the first file.
    pub(in crate::checkpoint) fn first(&self) -> PathBuf {
        self.folder.join(self.names.first().map_or("", String::as_str))
    }
}

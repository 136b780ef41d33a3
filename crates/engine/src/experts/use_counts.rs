//! Use counts: how often routers have chosen each expert of a model, over all runs. A file per
//! model keeps them, so that the next process knows which experts are used most.

use std::{
    cmp::Reverse,
    io::{self, Write},
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use moeflux_base::{
    AtomicFile, Readers, create_private_folder,
    seam::{FolderLimits, read_text, shrink_folder},
};
use moeflux_model::checkpoint::ModelId;
use serde::{Deserialize, Serialize};

use super::counters::ExpertCounters;

/// Variance of counts of equally likely experts, as a multiple of their mean. It is 1 for
/// independent choices; consecutive tokens often choose the same experts.
const CHANCE: f64 = 2.0;

/// Maximum count of an expert. All counts of a layer are halved beyond it, so that later uses weigh
/// more.
const MAX_COUNT: u64 = 1 << 20;

/// Maximum bytes of a file: ten digits for each of a million experts.
const MAX_BYTES: u64 = 10 << 20;

/// Limits of the folder: the models that were used last.
const LIMITS: FolderLimits = FolderLimits { bytes: 32 << 20, files: 64 };

const VERSION: u32 = 1;
const EXTENSION: &str = "uses";

/// Uses of each expert of a model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct UseCounts {
    layers: Vec<Vec<u64>>,
}

impl UseCounts {
    /// Zeros for layers with as many experts.
    pub(crate) fn new(experts: &[usize]) -> Self {
        Self { layers: experts.iter().map(|count| vec![0; *count]).collect() }
    }

    /// Uses in the first `layers` layers, from counters. Callers leave out the layer of a drafter,
    /// which is not always attached.
    pub(crate) fn of_counters(counters: &ExpertCounters, layers: usize) -> Self {
        let layers = (0..layers).map(|layer| {
            let uses = counters.experts(layer).map(|expert| expert.uses);
            uses.collect()
        });
        Self { layers: layers.collect() }
    }

    /// Adds uses of an expert.
    #[cfg(test)]
    pub(crate) fn add(&mut self, layer: usize, expert: usize, uses: u64) {
        self.layers[layer][expert] += uses;
    }

    /// The sum of both, in the shape of these.
    pub(crate) fn plus(&self, other: &Self) -> Self {
        let mut sum = self.clone();
        for (layer, other) in sum.layers.iter_mut().zip(&other.layers) {
            let counts = layer.iter_mut().zip(other);
            counts.for_each(|(count, other)| *count = count.saturating_add(*other));
        }
        sum
    }

    /// Adds the uses in `now` that are not in `before`.
    fn add_since(&mut self, now: &Self, before: &Self) {
        for ((layer, now), before) in self.layers.iter_mut().zip(&now.layers).zip(&before.layers) {
            for ((count, now), before) in layer.iter_mut().zip(now).zip(before) {
                *count = count.saturating_add(now.saturating_sub(*before));
            }
            while layer.iter().any(|count| *count > MAX_COUNT) {
                layer.iter_mut().for_each(|count| *count /= 2);
            }
        }
    }

    /// Number of layers.
    pub(super) fn layers(&self) -> usize {
        self.layers.len()
    }

    /// Uses of a layer's experts.
    pub(super) fn of_layer(&self, layer: usize) -> &[u64] {
        self.layers.get(layer).map_or(&[], |layer| layer)
    }

    /// All uses.
    pub(crate) fn total(&self) -> u64 {
        self.layers.iter().flatten().sum()
    }

    /// Expected uses of each of a layer's experts by a row that chooses `top_k`: counts, moved to
    /// their mean as far as their differences may be chance (James and Stein, 1961).
    pub(crate) fn expected(&self, layer: usize, experts: usize, top_k: usize) -> Vec<f64> {
        let counts = self.of_layer(layer);
        let count = |expert: usize| counts.get(expert).map_or(0.0, |count| *count as f64);
        let mean = (0..experts).map(count).sum::<f64>() / experts.max(1) as f64;
        let deviations = (0..experts).map(|expert| (count(expert) - mean).powi(2));
        let variance = deviations.sum::<f64>() / experts.saturating_sub(1).max(1) as f64;
        let kept = if variance > 0.0 { (1.0 - CHANCE * mean / variance).max(0.0) } else { 0.0 };
        let of_row = top_k as f64 / experts.max(1) as f64;
        let share = |expert| match mean > 0.0 {
            true => 1.0 + kept * (count(expert) / mean - 1.0),
            false => 1.0,
        };
        (0..experts).map(|expert| of_row * share(expert)).collect()
    }

    /// Experts that were used, as (layer, expert), the most used ones first.
    pub(crate) fn hottest(&self) -> Vec<(u32, u32)> {
        let of_layer = |(layer, counts): (u32, &Vec<u64>)| {
            let used = counts.iter().zip(0..).filter(|(count, _)| **count > 0);
            used.map(|(count, expert)| (*count, (layer, expert))).collect::<Vec<_>>()
        };
        let mut all: Vec<_> = (0..).zip(&self.layers).flat_map(of_layer).collect();
        all.sort_by_key(|(count, _)| Reverse(*count));
        all.into_iter().map(|(_, expert)| expert).collect()
    }

    fn has_shape_of(&self, other: &Self) -> bool {
        let lens = |counts: &Self| counts.layers.iter().map(Vec::len).collect::<Vec<_>>();
        lens(self) == lens(other)
    }
}

/// Contents of a file.
#[derive(Serialize, Deserialize)]
struct UsesFile {
    version: u32,
    model: ModelId,
    layers: Vec<Vec<u64>>,
}

/// Folder of use counts, for [`EngineOptions`](crate::EngineOptions): a private file of at most
/// 10 MiB for each model. Files may be deleted at any time. A file that is damaged, or of another
/// model, is ignored.
#[derive(Clone, Debug)]
pub struct UseCountsFolder(PathBuf);

impl UseCountsFolder {
    /// A folder, which is created when counts are saved.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self(folder.into())
    }

    /// File of a model.
    fn file(&self, model: ModelId) -> PathBuf {
        self.0.join(model.to_string()).with_extension(EXTENSION)
    }

    /// Counts of earlier runs, in the shape of `own`. `None` without a file.
    ///
    /// # Errors
    /// The file is damaged, or of another model; the text names the file and the problem.
    pub(crate) fn load(
        &self,
        model: ModelId,
        own: &UseCounts,
    ) -> Result<Option<UseCounts>, String> {
        let path = self.file(model);
        let text = match read_text(&path, MAX_BYTES) {
            Ok(text) => text,
            Err(error)
                if matches!(error.kind(), io::ErrorKind::Other | io::ErrorKind::InvalidData) =>
            {
                return Err(ignored(&path, &error.to_string()));
            }
            // Missing, or in a folder that cannot be read.
            Err(_) => return Ok(None),
        };
        let file: UsesFile =
            serde_json::from_str(&text).map_err(|error| ignored(&path, &error.to_string()))?;
        let counts = UseCounts { layers: file.layers };
        let problem = match () {
            () if file.version != VERSION => {
                format!("expected version {VERSION}, got {}", file.version)
            }
            () if file.model != model => format!("it is of the model {}", file.model),
            () if !counts.has_shape_of(own) => "it has other layers than the model".into(),
            () if counts.layers.iter().flatten().any(|count| *count > MAX_COUNT) => {
                format!("expected counts of at most {MAX_COUNT}")
            }
            () => return Ok(Some(counts)),
        };
        Err(ignored(&path, &problem))
    }

    /// Adds the uses in `now` that are not in `before` to the file of a model, which other
    /// processes may have changed.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn save(
        &self,
        model: ModelId,
        now: &UseCounts,
        before: &UseCounts,
    ) -> io::Result<()> {
        let saved = self.load(model, now).ok().flatten();
        let mut counts = saved.unwrap_or_else(|| {
            let experts: Vec<usize> = now.layers.iter().map(Vec::len).collect();
            UseCounts::new(&experts)
        });
        counts.add_since(now, before);
        let file = UsesFile { version: VERSION, model, layers: counts.layers };
        create_private_folder(&self.0)?;
        let text = serde_json::to_vec(&file)?;
        let target = AtomicFile::create(&self.file(model), Readers::Owner)?;
        target.file().write_all(&text)?;
        target.finish()?;
        shrink_folder(&self.0, EXTENSION, LIMITS, |_| true);
        Ok(())
    }
}

/// Uses of a model's experts in earlier runs and in this one.
#[derive(Debug)]
pub(crate) struct UseHistory {
    folder: UseCountsFolder,
    model: ModelId,
    /// Number of layers without a drafter.
    layers: usize,
    earlier: UseCounts,
    /// Uses of this run that the file has.
    saved: Mutex<UseCounts>,
}

impl UseHistory {
    /// Reads the file of a model; a problem with it becomes a note. `counted`: uses of this run.
    pub(crate) fn open(
        folder: UseCountsFolder,
        model: ModelId,
        counted: UseCounts,
        notes: &mut Vec<String>,
    ) -> Self {
        let found = folder.load(model, &counted);
        let earlier = found.unwrap_or_else(|problem| {
            notes.push(problem);
            None
        });
        let (layers, earlier) = (counted.layers(), earlier.unwrap_or_default());
        Self { folder, model, layers, earlier, saved: Mutex::new(counted) }
    }

    /// Uses in earlier runs.
    pub(crate) fn earlier(&self) -> &UseCounts {
        &self.earlier
    }

    /// Saves the uses in `counters`, if some are new. Without access to the folder nothing is kept,
    /// and nothing is reported.
    pub(crate) fn save(&self, counters: &ExpertCounters) {
        let mut saved = self.saved.lock().unwrap_or_else(PoisonError::into_inner);
        let now = UseCounts::of_counters(counters, self.layers);
        if now.total() > saved.total() {
            let _ = self.folder.save(self.model, &now, &saved);
            *saved = now;
        }
    }
}

fn ignored(path: &Path, problem: &str) -> String {
    format!("{}: use counts of experts are ignored: {problem}", path.display())
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};

    use super::*;

    const MODEL: ModelId = ModelId([7; 32]);

    fn counts(layers: &[&[u64]]) -> UseCounts {
        UseCounts { layers: layers.iter().map(|layer| layer.to_vec()).collect() }
    }

    #[test]
    fn runs_add_their_uses_to_the_file() {
        let root = tempfile::tempdir().unwrap();
        let folder = UseCountsFolder::new(root.path().join("a/uses"));
        let zeros = UseCounts::new(&[0, 3]);
        assert_eq!(folder.load(MODEL, &zeros), Ok(None));
        let first = counts(&[&[], &[1, 2, 3]]);
        folder.save(MODEL, &first, &zeros).unwrap();
        // The same process again, then another one.
        folder.save(MODEL, &counts(&[&[], &[1, 5, 3]]), &first).unwrap();
        folder.save(MODEL, &counts(&[&[], &[0, 0, 9]]), &zeros).unwrap();
        let found = folder.load(MODEL, &zeros).unwrap().unwrap();
        assert_eq!(found, counts(&[&[], &[1, 5, 12]]));
        assert_eq!((found.total(), found.hottest()), (18, vec![(1, 2), (1, 1), (1, 0)]));
        assert_eq!(folder.load(ModelId([8; 32]), &zeros), Ok(None));
    }

    #[test]
    fn a_damaged_or_foreign_file_is_ignored_with_a_note() {
        let root = tempfile::tempdir().unwrap();
        let folder = UseCountsFolder::new(root.path());
        let own = counts(&[&[1, 2]]);
        let path = folder.file(MODEL);
        let good = format!(r#"{{"version":1,"model":"{MODEL}","layers":[[1,2]]}}"#);
        let cases = [
            (good[..good.len() - 1].to_owned(), "EOF"),
            (good.replace(":1,", ":2,"), "expected version 1, got 2"),
            (good.replace("07", "08"), "it is of the model"),
            (good.replace("[1,2]", "[1,2,3]"), "other layers"),
            (good.replace("[1,2]", "[1,-2]"), "invalid value"),
            (good.replace("[1,2]", "[1,2000000]"), "at most"),
        ];
        for (text, problem) in cases {
            fs::write(&path, text).unwrap();
            let note = folder.load(MODEL, &own).unwrap_err();
            assert!(note.contains(problem) && note.contains(".uses: "), "{note}");
        }
        File::create(&path).unwrap().set_len(MAX_BYTES + 1).unwrap();
        assert!(folder.load(MODEL, &own).unwrap_err().contains("bytes"));
        // It is replaced.
        folder.save(MODEL, &own, &UseCounts::new(&[2])).unwrap();
        assert_eq!(folder.load(MODEL, &own), Ok(Some(own)));
    }

    #[test]
    fn later_uses_weigh_more() {
        let mut all = counts(&[&[MAX_COUNT, 8], &[4, 4]]);
        all.add_since(&counts(&[&[0, 4], &[1, 0]]), &UseCounts::new(&[2, 2]));
        assert_eq!(all, counts(&[&[MAX_COUNT, 12], &[5, 4]]));
        all.add_since(&counts(&[&[2, 0], &[0, 0]]), &UseCounts::new(&[2, 2]));
        assert_eq!(all, counts(&[&[MAX_COUNT / 2 + 1, 6], &[5, 4]]));
    }

    #[test]
    fn few_uses_say_little() {
        // Counts of the second layer vary no more than by chance.
        let uses = counts(&[&[1, 0, 0, 0], &[90, 110, 106, 94], &[15_000, 14_990, 10, 0]]);
        let [few, chance, many] = [0, 1, 2].map(|layer| uses.expected(layer, 4, 2));
        assert!((many.iter().sum::<f64>() - 2.0).abs() < 1e-12);
        assert_eq!([few, chance], [[0.5; 4]; 2]);
        assert!(many[0] > 0.99 && many[1] > 0.99 && many[3] < 0.01, "{many:?}");
        assert_eq!(UseCounts::default().expected(5, 2, 1), [0.5, 0.5]);
    }
}

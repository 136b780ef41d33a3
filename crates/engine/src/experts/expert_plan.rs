//! Recorded plan of experts: which of them the host's processor computes beside a card. Answers
//! depend on it by rounding, so it has a number and can be kept in a file.

use std::{
    hash::Hasher,
    io::{self, Write},
    path::{Path, PathBuf},
};

use moeflux_base::{AtomicFile, Error, PlanError, Readers, seam::read_text};
use moeflux_model::checkpoint::ModelId;
use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_64;

use super::{
    division::ExpertTimes,
    placement::{PlacedLayer, Placement},
};

const VERSION: u32 = 1;

/// Maximum bytes of a file: eight digits for each of four million experts.
const MAX_BYTES: u64 = 32 << 20;

/// Recorded division of experts between a card and the host's processor, for
/// [`PlacementOptions::recorded`]. With the same plan, another engine gives the same bits.
///
/// [`PlacementOptions::recorded`]: crate::experts::PlacementOptions
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ExpertPlan {
    version: u32,
    /// Number that all plans with this division have.
    number: String,
    model: ModelId,
    /// Measured times that the division followed from.
    times: ExpertTimes,
    layers: Vec<RecordedLayer>,
    /// Its file, for messages.
    #[serde(skip)]
    path: PathBuf,
}

/// Division of a layer's experts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct RecordedLayer {
    /// Number of experts.
    experts: usize,
    /// Experts in the card's memory, as far as it has room. Results do not depend on them.
    on_card: Vec<u32>,
    /// Experts that the host's processor computes in steps of few rows.
    computed: Vec<u32>,
}

/// Maximum experts of a layer.
const MAX_EXPERTS: usize = 1 << 16;

impl RecordedLayer {
    /// The first problem of the lists, if they have any.
    fn problem(&self) -> Option<String> {
        let Self { experts, on_card, computed } = self;
        if *experts > MAX_EXPERTS {
            return Some(format!("expected at most {MAX_EXPERTS} experts, got {experts}"));
        }
        let is_too_large = |expert: &&u32| **expert as usize >= *experts;
        if let Some(expert) = on_card.iter().chain(computed).find(is_too_large) {
            return Some(format!("expected experts below {experts}, got {expert}"));
        }
        let pairs = || on_card.windows(2).chain(computed.windows(2));
        if let Some(pair) = pairs().find(|pair| pair[0] >= pair[1]) {
            return Some(format!("expected ascending experts, got {} after {}", pair[1], pair[0]));
        }
        let both = on_card.iter().find(|expert| computed.binary_search(expert).is_ok())?;
        Some(format!("expected each expert once, got {both} twice"))
    }
}

/// Number of a division: the same for the same computed experts, wherever the others are.
/// `card_reads`: whether the card reads experts in host memory, in steps of many rows all of them.
fn number<'a>(card_reads: bool, layers: impl Iterator<Item = (usize, &'a [u32])>) -> String {
    let mut hasher = XxHash3_64::new();
    hasher.write(&[card_reads.into()]);
    for (experts, computed) in layers {
        hasher.write(&(experts as u64).to_le_bytes());
        hasher.write(&(computed.len() as u64).to_le_bytes());
        computed.iter().for_each(|expert| hasher.write(&expert.to_le_bytes()));
    }
    format!("{:016x}", hasher.finish())
}

impl Placement {
    /// Number of the division; `None` if the host computes no expert.
    pub(crate) fn number(&self) -> Option<String> {
        let computed: Vec<Vec<u32>> = (0..self.own_layers())
            .map(|layer| self.computed_in(layer).map(|expert| expert as u32).collect())
            .collect();
        let layers = computed.iter().enumerate();
        let layers = layers.map(|(layer, computed)| (self.experts(layer), &computed[..]));
        (self.computed() > 0).then(|| number(self.card_reads(), layers))
    }
}

impl ExpertPlan {
    /// Records a placement.
    pub(crate) fn new(model: ModelId, placement: &Placement, times: ExpertTimes) -> Self {
        let ids = |experts: &mut dyn Iterator<Item = usize>| experts.map(|e| e as u32).collect();
        let layer = |layer| RecordedLayer {
            experts: placement.experts(layer),
            on_card: ids(&mut placement.on_card(layer)),
            computed: ids(&mut placement.computed_in(layer)),
        };
        let layers: Vec<_> = (0..placement.own_layers()).map(layer).collect();
        let number = Self::number_of(&layers);
        Self { version: VERSION, number, model, times, layers, path: PathBuf::new() }
    }

    fn number_of(layers: &[RecordedLayer]) -> String {
        number(true, layers.iter().map(|layer| (layer.experts, &layer.computed[..])))
    }

    /// Number of the division.
    pub fn number(&self) -> &str {
        &self.number
    }

    /// Measured times that the division followed from.
    pub fn times(&self) -> &ExpertTimes {
        &self.times
    }

    /// Reads a recorded plan. `None` if there is no such file.
    ///
    /// # Errors
    /// [`PlanError::Recorded`] if the file cannot be read, is no recorded plan, or was changed.
    pub fn read(path: &Path) -> Result<Option<Self>, Error> {
        let text = match read_text(path, MAX_BYTES) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(problem(path, error.to_string())),
        };
        let mut plan: Self =
            serde_json::from_str(&text).map_err(|error| problem(path, error.to_string()))?;
        plan.path = path.to_owned();
        if plan.version != VERSION {
            let text = format!("expected version {VERSION}, got {}", plan.version);
            return Err(problem(path, text));
        }
        let of_layer =
            |(i, layer): (usize, &RecordedLayer)| Some(format!("layer {i}: {}", layer.problem()?));
        if let Some(text) = plan.layers.iter().enumerate().find_map(of_layer) {
            return Err(problem(path, text));
        }
        let number = Self::number_of(&plan.layers);
        if plan.number != number {
            let text = format!("expected the number {number} of its lists, got {}", plan.number);
            return Err(problem(path, text));
        }
        Ok(Some(plan))
    }

    /// Writes the plan to a file.
    ///
    /// # Errors
    /// [`PlanError::Recorded`] if it cannot be written.
    pub fn write(&self, path: &Path) -> Result<(), Error> {
        let write = || {
            let file = AtomicFile::create(path, Readers::Umask)?;
            let mut text = serde_json::to_vec(self)?;
            text.push(b'\n');
            file.file().write_all(&text)?;
            file.finish()
        };
        write().map_err(|error: io::Error| problem(path, error.to_string()))
    }

    /// The placement on a card with `slots` slots of each class.
    ///
    /// # Errors
    /// [`PlanError::Recorded`] if the plan is of another model.
    pub(crate) fn placement(
        &self,
        model: ModelId,
        layers: &[PlacedLayer],
        slots: &[usize],
    ) -> Result<Placement, Error> {
        if self.model != model {
            let text = format!("it is of the model {}, this is {model}", self.model);
            return Err(problem(&self.path, text));
        }
        let [own, recorded] = [
            layers
                .iter()
                .filter(|layer| layer.is_own)
                .map(|layer| layer.experts)
                .collect::<Vec<_>>(),
            self.layers.iter().map(|layer| layer.experts).collect(),
        ];
        if own != recorded {
            let text = "its layers have other numbers of experts than the model's layers".into();
            return Err(problem(&self.path, text));
        }
        let [computed, on_card] = [
            self.layers.iter().map(|layer| layer.computed.clone()).collect::<Vec<_>>(),
            self.layers.iter().map(|layer| layer.on_card.clone()).collect(),
        ];
        Ok(Placement::recorded(layers, slots, &computed, &on_card))
    }

    /// The error of a device on which the plan cannot hold.
    pub(crate) fn does_not_fit(&self, device: &str) -> Error {
        problem(&self.path, format!("it divides experts between card and processor, but {device}"))
    }
}

fn problem(path: &Path, problem: String) -> Error {
    PlanError::Recorded { path: path.to_owned(), problem }.into()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::experts::placement::PlacementRule;

    const MODEL: ModelId = ModelId([7; 32]);
    const LAYERS: [PlacedLayer; 2] =
        [PlacedLayer { experts: 4, top_k: 2, class: 0, is_own: true }; 2];

    fn placement(slots: usize) -> Placement {
        let rule = PlacementRule { uses: None, ways: &[] };
        let mut placement = Placement::new(&LAYERS, &[slots], true, rule);
        placement.set_computed(1, 2);
        placement
    }

    #[test]
    fn a_plan_is_read_as_it_was_written() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("plan.json");
        assert!(ExpertPlan::read(&path).unwrap().is_none());
        let placement = placement(4);
        let plan = ExpertPlan::new(MODEL, &placement, ExpertTimes::default());
        plan.write(&path).unwrap();
        let read = ExpertPlan::read(&path).unwrap().unwrap();
        assert_eq!((read.number(), &read.layers), (plan.number(), &plan.layers));
        assert_eq!(Some(read.number()), placement.number().as_deref());
        // A smaller card reads the experts that it has no room for, and the number stays.
        for slots in [4, 3, 0] {
            let again = read.placement(MODEL, &LAYERS, &[slots]).unwrap();
            assert_eq!(again.number(), placement.number());
            assert_eq!(again.on_card(0).count() + again.on_card(1).count(), slots);
        }
        let error = read.placement(ModelId([8; 32]), &LAYERS, &[4]).unwrap_err().to_string();
        assert!(error.contains("plan.json") && error.contains("of the model"), "{error}");
        let error = read.placement(MODEL, &LAYERS[..1], &[4]).unwrap_err().to_string();
        assert!(error.contains("numbers of experts"), "{error}");
    }

    #[test]
    fn a_changed_file_is_an_error_that_names_it() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("plan.json");
        let plan = ExpertPlan::new(MODEL, &placement(4), ExpertTimes::default());
        let good = serde_json::to_string(&plan).unwrap();
        let computed = good.rfind("[").unwrap();
        let cases = [
            (good[..good.len() / 2].to_owned(), "EOF"),
            ("{}".to_owned(), "missing field"),
            (good.replacen("\"version\":1", "\"version\":9", 1), "expected version 1, got 9"),
            (format!("{}[9]}}]}}", &good[..computed]), "expected experts below 4, got 9"),
            (format!("{}[1,1]}}]}}", &good[..computed]), "ascending experts, got 1 after 1"),
            (
                good.replacen("[0,1,2,3]", "[0,1]", 1).replacen(
                    "\"computed\":[]",
                    "\"computed\":[1]",
                    1,
                ),
                "each expert once, got 1",
            ),
            (good.replacen("\"experts\":4", "\"experts\":99999999", 1), "at most 65536"),
            (format!("{}[1]}}]}}", &good[..computed]), "expected the number"),
        ];
        for (text, problem) in cases {
            fs::write(&path, &text).unwrap();
            let error = ExpertPlan::read(&path).unwrap_err().to_string();
            assert!(error.contains(problem) && error.contains("plan.json"), "{error}\n{text}");
        }
        assert!(ExpertPlan::read(root.path()).is_err());
    }

    #[test]
    fn plans_that_compute_the_same_experts_have_the_same_number() {
        let rule = PlacementRule { uses: None, ways: &[] };
        let place = |slots| Placement::new(&LAYERS, &[slots], true, rule);
        assert_eq!(place(8).number(), None, "nothing is computed on the host");
        let number = place(4).number();
        assert!(number.is_some() && number != place(3).number());
        // By Python's xxhash, so that files of this version keep their numbers.
        let layers = [(4, &[][..]), (4, &[1, 3])];
        assert_eq!(super::number(true, layers.into_iter()), "6a60a4f5ad29098e");
        let mut other = place(4);
        other.set_computed(1, 0);
        assert_eq!(other.number(), None);
    }
}

//! Placement: which experts a card computes, and which the host's processor.
//!
//! It is fixed when a model is opened, from sizes and measured speeds, never by the contents of a
//! cache: where an expert is computed changes the rounding of its result.

use std::{fmt, str::FromStr};

/// How experts that have no place on a card are computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ExpertsOnHost {
    /// The card computes them, and reads them over the bus.
    #[default]
    Read,
    /// The host's processor computes them.
    Compute,
}

impl ExpertsOnHost {
    /// All choices.
    pub const ALL: [Self; 2] = [Self::Read, Self::Compute];

    /// Name in options and reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Compute => "compute",
        }
    }
}

impl fmt::Display for ExpertsOnHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for ExpertsOnHost {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|choice| choice.name() == text);
        found.ok_or_else(|| format!("{text:?} is neither read nor compute"))
    }
}

/// Experts by id: those of each layer from a first one on are computed by the host's processor,
/// in steps of few rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Placement {
    /// By layer: the first expert that the host computes; the number of experts for none.
    first_on_host: Vec<usize>,
    /// By layer: number of experts.
    counts: Vec<usize>,
    /// Rows of a step from which on the card computes all experts.
    max_rows: usize,
}

impl Placement {
    /// Rows of a step that the host computes experts for, where the card can read them instead. A
    /// longer step has several rows for most experts: the card then reads an expert faster than the
    /// host computes it.
    pub(crate) const MAX_ROWS: usize = 32;

    /// Gives a card the first experts of each layer, as many as its share of `slots` has room for.
    /// `layers`: number of experts and slot class of each layer. `card_reads`: whether the card can
    /// compute experts in host memory.
    pub(crate) fn new(
        layers: impl Iterator<Item = (usize, usize)> + Clone,
        slots: &[usize],
        card_reads: bool,
    ) -> Self {
        let counts = layers.clone().map(|(count, _)| count).collect();
        let mut experts = vec![0; slots.len()];
        layers.clone().for_each(|(count, class)| experts[class] += count);
        let mut before = vec![0; slots.len()];
        let share = |(count, class): (usize, usize)| {
            let first = before[class];
            before[class] += count;
            let all = experts[class].max(1);
            let slots_before = |experts: usize| experts * slots[class].min(all) / all;
            slots_before(first + count) - slots_before(first)
        };
        let max_rows = Self::max_rows_for(card_reads);
        Self { first_on_host: layers.map(share).collect(), counts, max_rows }
    }

    /// Maximum rows of a step that the host computes experts for.
    pub(crate) const fn max_rows_for(card_reads: bool) -> usize {
        if card_reads { Self::MAX_ROWS } else { usize::MAX }
    }

    /// Number of experts that the host computes.
    pub(crate) fn experts_on_host(&self) -> usize {
        self.counts.iter().zip(&self.first_on_host).map(|(count, first)| count - first).sum()
    }

    /// The first expert of a layer that is not on the card.
    pub(crate) fn first_on_host(&self, layer: usize) -> usize {
        self.first_on_host.get(layer).copied().unwrap_or(usize::MAX)
    }

    /// The first expert of a layer that the host computes in a step; `None` if the card computes
    /// all of them.
    pub(crate) fn computed_from(&self, layer: usize, rows: usize) -> Option<usize> {
        let first = self.first_on_host(layer);
        (rows <= self.max_rows && first < *self.counts.get(layer)?).then_some(first)
    }

    /// Whether the host computes experts in a step of `rows` rows.
    pub(crate) fn computes(&self, rows: usize) -> bool {
        rows <= self.max_rows
    }

    /// Maximum rows of a step that the host computes experts for, of steps of up to `rows` rows.
    pub(crate) fn max_rows(&self, rows: usize) -> usize {
        rows.min(self.max_rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_card_has_the_same_share_of_each_layer() {
        // A dense layer, two of a class, one of another class that the card holds whole.
        let layers = [(0, 0), (64, 0), (64, 0), (8, 1)];
        let placement = Placement::new(layers.into_iter(), &[45, 8], true);
        assert_eq!([0, 1, 2, 3].map(|layer| placement.first_on_host(layer)), [0, 22, 23, 8]);
        assert_eq!(placement.computed_from(1, 1), Some(22));
        assert_eq!(placement.computed_from(1, Placement::MAX_ROWS), Some(22));
        assert_eq!(placement.computed_from(1, Placement::MAX_ROWS + 1), None);
        assert_eq!(placement.computed_from(3, 1), None);
        let copies = Placement::new(layers.into_iter(), &[45, 8], false);
        assert_eq!(copies.computed_from(2, 1 << 20), Some(23));
        assert_eq!((placement.max_rows(512), copies.max_rows(512)), (Placement::MAX_ROWS, 512));
    }

    #[test]
    fn choices_are_parsed_by_their_names() {
        for choice in ExpertsOnHost::ALL {
            assert_eq!(choice.to_string().parse(), Ok(choice));
        }
        assert!("auto ".parse::<ExpertsOnHost>().is_err());
    }
}

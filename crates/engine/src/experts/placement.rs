//! Placement: which experts a card computes, and which the host's processor.
//!
//! It is fixed when a model is opened, from sizes and measured speeds, never by the contents of a
//! cache: where an expert is computed changes the rounding of its result.

use std::{fmt, str::FromStr};

use moeflux_base::{Error, PlanError};

/// How experts that have no place on a card are computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ExpertsOnHost {
    /// The card computes them, and reads them over the bus.
    #[default]
    Read,
    /// The host's processor computes them.
    Compute,
    /// The card reads some and the processor computes the others, as many as makes both end
    /// together by the speeds that are measured when the model is opened.
    Auto,
}

impl ExpertsOnHost {
    /// All choices.
    pub const ALL: [Self; 3] = [Self::Read, Self::Compute, Self::Auto];

    /// Name in options and reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Compute => "compute",
            Self::Auto => "auto",
        }
    }
}

impl fmt::Display for ExpertsOnHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for ExpertsOnHost {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        Self::ALL.into_iter().find(|choice| choice.name() == name).ok_or_else(|| {
            let known = Self::ALL.map(Self::name).join(", ");
            PlanError::UnknownExpertsOnHost { name: name.to_owned(), known }.into()
        })
    }
}

/// Experts of each layer by id: first the experts in the card's memory, then the ones in host
/// memory that the card reads, then the ones that the host's processor computes, in steps of few
/// rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Placement {
    layers: Vec<LayerPlacement>,
    /// Whether the card can compute experts in host memory.
    card_reads: bool,
}

/// Placement of a layer's experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct LayerPlacement {
    /// Number of experts.
    count: usize,
    /// The first expert in host memory; `count` for none.
    first_on_host: usize,
    /// The first expert that the host computes; `count` for none.
    first_computed: usize,
}

impl Placement {
    /// Rows of a step that the host computes experts for, where the card can read them instead. A
    /// longer step has several rows for most experts: the card then reads an expert faster than the
    /// host computes it.
    pub(crate) const MAX_ROWS: usize = 32;

    /// Gives a card the first experts of each layer, as many as its share of `slots` has room for,
    /// and the host all others to compute. `layers`: number of experts and slot class of each
    /// layer. `card_reads`: whether the card can compute experts in host memory.
    pub(crate) fn new(
        layers: impl Iterator<Item = (usize, usize)> + Clone,
        slots: &[usize],
        card_reads: bool,
    ) -> Self {
        let mut experts = vec![0; slots.len()];
        layers.clone().for_each(|(count, class)| experts[class] += count);
        let mut before = vec![0; slots.len()];
        let place = |(count, class): (usize, usize)| {
            let first = before[class];
            before[class] += count;
            let all = experts[class].max(1);
            let slots_before = |experts: usize| experts * slots[class].min(all) / all;
            let first_on_host = slots_before(first + count) - slots_before(first);
            LayerPlacement { count, first_on_host, first_computed: first_on_host }
        };
        Self { layers: layers.map(place).collect(), card_reads }
    }

    /// Maximum rows of a step that the host computes experts for, of steps of up to `rows` rows.
    pub(crate) fn max_rows(card_reads: bool, rows: usize) -> usize {
        if card_reads { rows.min(Self::MAX_ROWS) } else { rows }
    }

    /// Whether the card can compute experts in host memory. If not, the host computes all of them.
    pub(crate) fn card_reads(&self) -> bool {
        self.card_reads
    }

    /// Leaves `computed` of a layer's experts in host memory to the host, the last ones. The card
    /// reads the others.
    pub(crate) fn set_computed(&mut self, layer: usize, computed: usize) {
        if let Some(layer) = self.layers.get_mut(layer) {
            layer.first_computed =
                layer.count.saturating_sub(computed).clamp(layer.first_on_host, layer.count);
        }
    }

    /// Number of experts that the host computes.
    pub(crate) fn computed(&self) -> usize {
        self.layers.iter().map(|layer| layer.count - layer.first_computed).sum()
    }

    /// By layer: the first expert that the host computes.
    pub(crate) fn first_computed(&self) -> Vec<u32> {
        self.layers.iter().map(|layer| layer.first_computed as u32).collect()
    }

    /// Number of a layer's experts in the card's memory.
    pub(crate) fn on_card(&self, layer: usize) -> usize {
        self.layers.get(layer).map_or(0, |layer| layer.first_on_host)
    }

    /// Whether an expert has a place in the card's memory.
    pub(crate) fn is_on_card(&self, layer: usize, expert: usize) -> bool {
        self.layers.get(layer).is_none_or(|layer| expert < layer.first_on_host)
    }

    /// Whether the card computes an expert in steps of few rows.
    pub(crate) fn is_computed_by_card(&self, layer: usize, expert: usize) -> bool {
        self.layers.get(layer).is_none_or(|layer| expert < layer.first_computed)
    }

    /// The first expert of a layer that the host computes in a step; `None` if the card computes
    /// all of them.
    pub(crate) fn computed_from(&self, layer: usize, rows: usize) -> Option<usize> {
        let LayerPlacement { count, first_computed, .. } = *self.layers.get(layer)?;
        (self.computes(rows) && first_computed < count).then_some(first_computed)
    }

    /// Whether the host computes experts in a step of `rows` rows.
    pub(crate) fn computes(&self, rows: usize) -> bool {
        rows == Self::max_rows(self.card_reads, rows)
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
        assert_eq!([0, 1, 2, 3].map(|layer| placement.on_card(layer)), [0, 22, 23, 8]);
        assert_eq!(placement.first_computed(), [0, 22, 23, 8]);
        assert_eq!(placement.computed_from(1, 1), Some(22));
        assert_eq!(placement.computed_from(1, Placement::MAX_ROWS), Some(22));
        assert_eq!(placement.computed_from(1, Placement::MAX_ROWS + 1), None);
        assert_eq!(placement.computed_from(3, 1), None);
        let copies = Placement::new(layers.into_iter(), &[45, 8], false);
        assert_eq!(copies.computed_from(2, 1 << 20), Some(23));
        let max_rows = [true, false].map(|card_reads| Placement::max_rows(card_reads, 512));
        assert_eq!(max_rows, [Placement::MAX_ROWS, 512]);
    }

    #[test]
    fn a_card_reads_the_experts_on_the_host_that_it_does_not_leave_to_it() {
        let layers = [(64, 0), (64, 0)];
        let mut placement = Placement::new(layers.into_iter(), &[64], true);
        assert_eq!(placement.computed(), 64);
        placement.set_computed(0, 20);
        placement.set_computed(1, 0);
        assert_eq!((placement.first_computed(), placement.computed()), (vec![44, 64], 20));
        assert_eq!([0, 1].map(|layer| placement.computed_from(layer, 1)), [Some(44), None]);
        assert!(placement.is_on_card(0, 31) && !placement.is_on_card(0, 32));
        assert!(placement.is_computed_by_card(0, 43) && !placement.is_computed_by_card(0, 44));
        // No more than are on the host.
        placement.set_computed(0, 1000);
        assert_eq!(placement.computed_from(0, 1), Some(32));
    }

    #[test]
    fn choices_are_parsed_by_their_names() {
        for choice in ExpertsOnHost::ALL {
            assert_eq!(choice.to_string().parse::<ExpertsOnHost>().unwrap(), choice);
        }
        let error = "auto ".parse::<ExpertsOnHost>().unwrap_err().to_string();
        assert!(error.contains("read, compute, auto"), "{error}");
    }
}

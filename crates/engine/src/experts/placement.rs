//! Placement: which experts are in a card's memory, which of the others it reads over the bus, and
//! which the host's processor computes.
//!
//! Which experts the processor computes is fixed when a model is opened, or between answers, never
//! by the contents of a cache: it changes the rounding of results. Which of the others are on the
//! card does not.

use std::{fmt, str::FromStr};

use moeflux_base::{Error, PlanError};

use super::{division::ExpertTime, source::ExpertId, use_counts::UseCounts};

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

/// Layer whose experts are placed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlacedLayer {
    /// Number of experts; zero in a dense layer.
    pub(crate) experts: usize,
    /// Experts per row.
    pub(crate) top_k: usize,
    /// Class of slots.
    pub(crate) class: usize,
    /// Whether it is a layer of the model, and not of a drafter, which follow.
    pub(crate) is_own: bool,
}

/// Rule of a placement, besides numbers of slots.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlacementRule<'a> {
    /// Uses of experts in earlier runs.
    pub(crate) uses: Option<&'a UseCounts>,
    /// Times of the experts of a layer in host memory, for each way to compute them. A layer is
    /// computed in the fastest way.
    pub(crate) ways: &'a [ExpertTime],
}

impl PlacementRule<'_> {
    /// Expected uses of each of a layer's experts by a row.
    fn expected(&self, index: usize, layer: &PlacedLayer) -> Vec<f64> {
        match self.uses {
            Some(uses) => uses.expected(index, layer.experts, layer.top_k),
            None => vec![layer.top_k as f64 / layer.experts.max(1) as f64; layer.experts],
        }
    }

    /// Seconds of a layer's experts in host memory with this many expected uses.
    fn seconds(&self, uses: f64) -> f64 {
        let ways = self.ways.iter().map(|way| way.fixed + way.each * uses);
        ways.min_by(f64::total_cmp).unwrap_or(uses)
    }
}

/// Place of an expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// The card's memory.
    Card,
    /// Host memory, from which the card reads it.
    Read,
    /// Host memory, where the processor computes it.
    Computed,
}

/// Places of the experts of each layer.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Placement {
    layers: Vec<LayerPlacement>,
    /// Number of layers without a drafter's.
    own_layers: usize,
    /// Whether the card can compute experts in host memory.
    card_reads: bool,
}

/// Places of a layer's experts.
#[derive(Clone, Debug, Default, PartialEq)]
struct LayerPlacement {
    /// By expert.
    places: Vec<Place>,
    /// Experts in host memory, those with most expected uses first.
    on_host: Vec<u32>,
    /// Expected share of uses that are of experts on the card.
    card_share: f64,
}

impl LayerPlacement {
    /// A layer whose experts are on the card or computed by the host. `expected`: expected uses of
    /// each expert by a row.
    fn new(on_card: &[bool], expected: &[f64]) -> Self {
        let is_on_card = |expert: &u32| on_card[*expert as usize];
        let uses = |expert: &u32| expected[*expert as usize];
        let experts = 0..on_card.len() as u32;
        let mut on_host: Vec<u32> = experts.clone().filter(|e| !is_on_card(e)).collect();
        on_host.sort_by(|a, b| uses(b).total_cmp(&uses(a)));
        let of_card: f64 = experts.filter(is_on_card).map(|e| uses(&e)).sum();
        let of_all: f64 = expected.iter().sum();
        let place = |on_card: &bool| if *on_card { Place::Card } else { Place::Computed };
        Self {
            places: on_card.iter().map(place).collect(),
            on_host,
            card_share: of_card / of_all.max(f64::MIN_POSITIVE),
        }
    }

    fn is(&self, expert: usize, place: Place) -> bool {
        self.places.get(expert) == Some(&place)
    }
}

impl Placement {
    /// Rows of a step that the host computes experts for, where the card can read them instead. A
    /// longer step has several rows for most experts: the card then reads an expert faster than the
    /// host computes it.
    pub(crate) const MAX_ROWS: usize = 32;

    /// Gives a card some whole layers, and the experts of the others that are used most, as many as
    /// its `slots` of each class have room for: the choice with the shortest expected time. The
    /// host computes all others. `card_reads`: whether the card can compute experts in host memory.
    pub(crate) fn new(
        layers: &[PlacedLayer],
        slots: &[usize],
        card_reads: bool,
        rule: PlacementRule<'_>,
    ) -> Self {
        let expected: Vec<_> =
            (0..).zip(layers).map(|(i, layer)| rule.expected(i, layer)).collect();
        let mut on_card: Vec<_> = layers.iter().map(|layer| vec![false; layer.experts]).collect();
        for (class, slots) in slots.iter().enumerate() {
            let is_of_class = |i: &usize| layers[*i].class == class && layers[*i].experts > 0;
            let of_class: Vec<usize> = (0..layers.len()).filter(is_of_class).collect();
            for (layer, expert) in chosen_for_card(&of_class, &expected, *slots, &rule) {
                on_card[layer][expert] = true;
            }
        }
        let places = on_card.iter().zip(&expected);
        let places = places.map(|(on_card, expected)| LayerPlacement::new(on_card, expected));
        Self { layers: places.collect(), own_layers: own_layers(layers), card_reads }
    }

    /// A recorded placement: the host computes the `computed` experts of each layer. The card has
    /// the `preferred` ones, then others, as many as its `slots` of each class have room for, and
    /// reads the rest.
    pub(crate) fn recorded(
        layers: &[PlacedLayer],
        slots: &[usize],
        computed: &[Vec<u32>],
        preferred: &[Vec<u32>],
    ) -> Self {
        let mut left = slots.to_vec();
        let mut placed: Vec<_> = layers
            .iter()
            .map(|layer| {
                LayerPlacement::new(&vec![false; layer.experts], &vec![1.0; layer.experts])
            })
            .collect();
        placed.iter_mut().for_each(|layer| layer.places.fill(Place::Read));
        for (layer, computed) in placed.iter_mut().zip(computed) {
            computed.iter().for_each(|expert| layer.places[*expert as usize] = Place::Computed);
        }
        let mut give = |i: usize, experts: &mut dyn Iterator<Item = usize>| {
            let (layer, left) = (&mut placed[i], &mut left[layers[i].class]);
            for expert in experts {
                if *left > 0 && layer.is(expert, Place::Read) {
                    layer.places[expert] = Place::Card;
                    *left -= 1;
                }
            }
        };
        for (i, experts) in preferred.iter().enumerate() {
            give(i, &mut experts.iter().map(|expert| *expert as usize));
        }
        (0..layers.len()).for_each(|i| give(i, &mut (0..layers[i].experts)));
        for layer in &mut placed {
            let places = &layer.places;
            layer.on_host.retain(|expert| places[*expert as usize] != Place::Card);
            layer.card_share = 1.0 - layer.on_host.len() as f64 / places.len().max(1) as f64;
        }
        Self { layers: placed, own_layers: own_layers(layers), card_reads: true }
    }

    /// Maximum rows of a step that the host computes experts for, of steps of up to `rows` rows.
    pub(crate) fn max_rows(card_reads: bool, rows: usize) -> usize {
        if card_reads { rows.min(Self::MAX_ROWS) } else { rows }
    }

    /// Whether the card can compute experts in host memory. If not, the host computes all of them.
    pub(crate) fn card_reads(&self) -> bool {
        self.card_reads
    }

    /// Leaves `computed` of a layer's experts in host memory to the host, of all ranks by expected
    /// uses. The card reads the others.
    pub(crate) fn set_computed(&mut self, layer: usize, computed: usize) {
        let Some(LayerPlacement { places, on_host, .. }) = self.layers.get_mut(layer) else {
            return;
        };
        let count = on_host.len();
        let computed = computed.min(count);
        for (i, expert) in on_host.iter().enumerate() {
            let is_computed = (i + 1) * computed / count > i * computed / count;
            let place = if is_computed { Place::Computed } else { Place::Read };
            places[*expert as usize] = place;
        }
    }

    /// Number of experts that the host computes.
    pub(crate) fn computed(&self) -> usize {
        (0..self.layers.len()).map(|layer| self.computed_in(layer).count()).sum()
    }

    /// Experts of a layer that the host computes in steps of few rows, in their order.
    pub(crate) fn computed_in(&self, layer: usize) -> impl Iterator<Item = usize> {
        self.experts_at(layer, Place::Computed)
    }

    /// Experts of a layer in the card's memory, in their order.
    pub(crate) fn on_card(&self, layer: usize) -> impl Iterator<Item = usize> {
        self.experts_at(layer, Place::Card)
    }

    /// Whether the card has some of a layer's experts, but not all.
    pub(crate) fn has_part_on_card(&self, layer: usize) -> bool {
        (1..self.experts(layer)).contains(&self.on_card(layer).count())
    }

    fn experts_at(&self, layer: usize, place: Place) -> impl Iterator<Item = usize> {
        let places = self.layers.get(layer).map_or(&[][..], |layer| &layer.places);
        let found = places.iter().enumerate().filter(move |(_, found)| **found == place);
        found.map(|(expert, _)| expert)
    }

    /// Expected share of a layer's uses that are of experts on the card.
    pub(crate) fn card_share(&self, layer: usize) -> f64 {
        self.layers.get(layer).map_or(1.0, |layer| layer.card_share)
    }

    /// Number of a layer's experts.
    pub(crate) fn experts(&self, layer: usize) -> usize {
        self.layers.get(layer).map_or(0, |layer| layer.places.len())
    }

    /// Number of layers without a drafter's.
    pub(crate) fn own_layers(&self) -> usize {
        self.own_layers
    }

    /// Whether an expert has a place in the card's memory.
    pub(crate) fn is_on_card(&self, layer: usize, expert: usize) -> bool {
        self.layers.get(layer).is_none_or(|layer| layer.is(expert, Place::Card))
    }

    /// Whether the host computes an expert in steps of few rows.
    pub(crate) fn is_computed(&self, layer: usize, expert: usize) -> bool {
        self.layers.get(layer).is_some_and(|layer| layer.is(expert, Place::Computed))
    }

    /// Whether the host computes any of a layer's experts in a step of `rows` rows.
    pub(crate) fn computes_in(&self, layer: usize, rows: usize) -> bool {
        self.computes(rows) && self.computed_in(layer).next().is_some()
    }

    /// Whether the host computes experts in a step of `rows` rows.
    pub(crate) fn computes(&self, rows: usize) -> bool {
        rows == Self::max_rows(self.card_reads, rows)
    }

    /// Expected seconds of a row through the experts in host memory, by a rule.
    pub(crate) fn seconds_on_host(&self, layers: &[PlacedLayer], rule: &PlacementRule<'_>) -> f64 {
        let of_layers = self.layers.iter().zip(layers).enumerate().map(|(i, (placed, layer))| {
            let expected = rule.expected(i, layer);
            let uses: f64 = placed.on_host.iter().map(|expert| expected[*expert as usize]).sum();
            if placed.on_host.is_empty() { 0.0 } else { rule.seconds(uses) }
        });
        of_layers.sum()
    }

    /// Exchanges the places of an expert on the card and of one in host memory.
    pub(crate) fn exchange(&mut self, leaves: ExpertId, comes: ExpertId) {
        let place = |id: ExpertId| self.layers.get(id.layer)?.places.get(id.expert).copied();
        let (Some(Place::Card), Some(left)) = (place(leaves), place(comes)) else { return };
        if left == Place::Card {
            return;
        }
        let layer = &mut self.layers[leaves.layer];
        layer.places[leaves.expert] = left;
        layer.on_host.push(leaves.expert as u32);
        let layer = &mut self.layers[comes.layer];
        layer.places[comes.expert] = Place::Card;
        layer.on_host.retain(|expert| *expert as usize != comes.expert);
    }
}

fn own_layers(layers: &[PlacedLayer]) -> usize {
    layers.iter().filter(|layer| layer.is_own).count()
}

/// Experts for `slots` slots of a card, of layers whose experts have the same size: all experts of
/// some layers, and the ones of the others with most expected uses.
fn chosen_for_card(
    layers: &[usize],
    expected: &[Vec<f64>],
    slots: usize,
    rule: &PlacementRule<'_>,
) -> Vec<(usize, usize)> {
    // Layers whose uses are spread over many experts are the first to be whole.
    let mut by_spread = layers.to_vec();
    let spread = |layer: &usize| expected[*layer].iter().map(|uses| uses * uses).sum::<f64>();
    by_spread.sort_by(|a, b| spread(a).total_cmp(&spread(b)));
    let mut by_uses: Vec<(usize, usize)> = layers
        .iter()
        .flat_map(|layer| (0..expected[*layer].len()).map(move |expert| (*layer, expert)))
        .collect();
    let uses = |(layer, expert): (usize, usize)| expected[layer][expert];
    by_uses.sort_by(|a, b| uses(*b).total_cmp(&uses(*a)));
    let mut is_whole = vec![false; expected.len()];
    let mut taken = 0;
    let (mut best, mut fewest) = (Vec::new(), f64::INFINITY);
    for whole in 0..=by_spread.len() {
        if whole > 0 {
            let layer = by_spread[whole - 1];
            is_whole[layer] = true;
            taken += expected[layer].len();
        }
        let Some(left) = slots.checked_sub(taken) else { break };
        let others = by_uses.iter().copied().filter(|(layer, _)| !is_whole[*layer]);
        let mut on_host = vec![None; expected.len()];
        for (layer, expert) in others.clone().skip(left) {
            *on_host[layer].get_or_insert(0.0) += uses((layer, expert));
        }
        let seconds: f64 = on_host.iter().flatten().map(|uses| rule.seconds(*uses)).sum();
        // As good with more whole layers.
        if seconds <= fewest * (1.0 + 1e-9) {
            fewest = seconds;
            let of_whole = by_uses.iter().copied().filter(|(layer, _)| is_whole[*layer]);
            best = of_whole.chain(others.take(left)).collect();
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn way(fixed: f64, each: f64) -> ExpertTime {
        ExpertTime { fixed, each }
    }

    const UNIFORM: PlacementRule<'_> = PlacementRule { uses: None, ways: &[way(1.0, 1.0)] };

    fn layer(experts: usize, class: usize) -> PlacedLayer {
        PlacedLayer { experts, top_k: 2, class, is_own: true }
    }

    fn on_card(placement: &Placement) -> Vec<usize> {
        (0..placement.own_layers()).map(|layer| placement.on_card(layer).count()).collect()
    }

    #[test]
    fn a_card_has_whole_layers_where_all_experts_are_used_as_much() {
        // A dense layer, two of a class, one of another class that the card holds whole.
        let layers = [layer(0, 0), layer(64, 0), layer(64, 0), layer(8, 1)];
        let placement = Placement::new(&layers, &[85, 8], true, UNIFORM);
        assert_eq!(on_card(&placement), [0, 64, 21, 8]);
        assert_eq!(placement.computed(), 43);
        let computes = |rows| [0, 1, 2, 3].map(|layer| placement.computes_in(layer, rows));
        assert_eq!(computes(1), [false, false, true, false]);
        assert_eq!(computes(Placement::MAX_ROWS), computes(1));
        assert_eq!(computes(Placement::MAX_ROWS + 1), [false; 4]);
        let copies = Placement::new(&layers, &[85, 8], false, UNIFORM);
        assert!(copies.computes_in(2, 1 << 20));
        let max_rows = [true, false].map(|card_reads| Placement::max_rows(card_reads, 512));
        assert_eq!(max_rows, [Placement::MAX_ROWS, 512]);
    }

    #[test]
    fn a_card_has_the_experts_that_are_used_most() {
        let layers = [layer(8, 0), layer(8, 0)];
        // In the first layer, experts 5 and 7 have nearly all uses; in the second, all are equal.
        let mut uses = UseCounts::new(&[8, 8]);
        for (expert, count) in [(5, 10_000), (7, 10_000)] {
            uses.add(0, expert, count);
        }
        (0..8).for_each(|expert| uses.add(1, expert, 2_500));
        let place = |slots, ways: &[ExpertTime]| {
            Placement::new(&layers, &[slots], true, PlacementRule { uses: Some(&uses), ways })
        };
        let few = place(2, &[way(1.0, 1.0)]);
        assert_eq!(few.on_card(0).collect::<Vec<_>>(), [5, 7]);
        assert!(few.card_share(0) > 0.98 && few.card_share(1) == 0.0);
        // The second layer whole, the rest for the first.
        let more = place(10, &[way(0.01, 1.0)]);
        assert_eq!((on_card(&more), more.is_on_card(0, 7)), (vec![2, 8], true));
        // A layer with any expert on the host takes long.
        assert_eq!(on_card(&place(8, &[way(100.0, 1.0)])).into_iter().max(), Some(8));
        // But not if few uses are better computed in another way.
        assert_eq!(on_card(&place(8, &[way(100.0, 1.0), way(0.0, 3.0)])), [2, 6]);
    }

    #[test]
    fn a_card_reads_the_experts_on_the_host_that_it_does_not_leave_to_it() {
        let layers = [layer(64, 0), layer(64, 1)];
        let mut placement = Placement::new(&layers, &[32, 32], true, UNIFORM);
        assert_eq!(placement.computed(), 64);
        placement.set_computed(0, 20);
        placement.set_computed(1, 0);
        assert_eq!(placement.computed(), 20);
        assert_eq!([0, 1].map(|layer| placement.computes_in(layer, 1)), [true, false]);
        assert_eq!(placement.on_card(0).count(), 32);
        // No more than are on the host.
        placement.set_computed(0, 1000);
        assert_eq!(placement.computed_in(0).count(), 32);
        assert!(placement.computed_in(0).all(|expert| !placement.is_on_card(0, expert)));
    }

    #[test]
    fn experts_exchange_their_places() {
        let mut placement = Placement::new(&[layer(4, 0), layer(4, 0)], &[6], true, UNIFORM);
        placement.set_computed(1, 1);
        let computed = placement.computed_in(1).next().unwrap();
        let read = (2..4).find(|expert| *expert != computed).unwrap();
        let id = |layer, expert| ExpertId { layer, expert };
        placement.exchange(id(0, 1), id(1, read));
        assert_eq!(on_card(&placement), [3, 3]);
        assert!(placement.is_on_card(1, read) && !placement.is_on_card(0, 1));
        // No exchange: one is not on the card, or the other is.
        let before = placement.clone();
        placement.exchange(id(0, 1), id(1, computed));
        placement.exchange(id(0, 0), id(1, read));
        assert_eq!(placement, before);
        placement.exchange(id(0, 0), id(1, computed));
        assert!(placement.is_computed(0, 0) && placement.is_on_card(1, computed));
        placement.set_computed(0, 2);
        assert!(placement.is_computed(0, 0) && placement.is_computed(0, 1));
    }

    #[test]
    fn time_in_host_memory_follows_from_uses() {
        let layers = [layer(4, 0), layer(4, 0)];
        let ways = [ExpertTime { fixed: 1.0, each: 2.0 }, ExpertTime { fixed: 2.0, each: 1.0 }];
        let rule = PlacementRule { uses: None, ways: &ways };
        let seconds = |slots, rule: &PlacementRule<'_>| {
            Placement::new(&layers, &[slots], true, *rule).seconds_on_host(&layers, rule)
        };
        // Two experts of four a row: the faster way for two uses, for a half, and for none.
        assert_eq!([0, 4, 7, 8].map(|slots| seconds(slots, &rule)), [8.0, 4.0, 2.0, 0.0]);
        let mut uses = UseCounts::new(&[4, 4]);
        (0..4).for_each(|expert| uses.add(0, expert, 1000));
        uses.add(1, 3, 4000);
        let known = PlacementRule { uses: Some(&uses), ways: &ways };
        let blind = Placement::new(&layers, &[5], true, rule);
        assert!(blind.seconds_on_host(&layers, &known) > 3.9);
        assert!(seconds(5, &known) < 1.1);
    }

    #[test]
    fn a_recorded_placement_computes_the_same_experts_on_any_card() {
        let layers = [layer(4, 0), layer(4, 0)];
        let computed = [vec![1], vec![0, 3]];
        let preferred = [vec![0, 2], vec![2]];
        for (slots, on_cards) in
            [(0, vec![0, 0]), (3, vec![2, 1]), (5, vec![3, 2]), (8, vec![3, 2])]
        {
            let placement = Placement::recorded(&layers, &[slots], &computed, &preferred);
            assert_eq!(on_card(&placement), on_cards);
            let found = [0, 1].map(|layer| placement.computed_in(layer).collect::<Vec<_>>());
            assert_eq!(found, [vec![1], vec![0, 3]]);
        }
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

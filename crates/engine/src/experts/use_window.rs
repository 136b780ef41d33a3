//! Window of recent uses: experts of a card that are used less than others in host memory, and
//! should be exchanged for them.

use std::collections::BTreeMap;

use super::{
    counters::ExpertCounters, placement::Placement, source::ExpertId, use_counts::UseCounts,
};

/// Steps between two looks at the counters.
const PERIOD: u32 = 64;
/// Maximum exchanges at a time. With experts of 3 MB they take less than 1 % of the steps' time.
const MAX_EXCHANGES: usize = 8;
/// Share of earlier uses that still counts after a period.
const KEPT: f64 = 0.9;
/// How much more an expert must be used than the one whose place it takes: a factor, and a multiple
/// of the standard deviation of the difference. Of thousands of experts, some differ by four of
/// these by chance.
const MIN_RATIO: f64 = 1.5;
const MIN_DEVIATIONS: f64 = 6.0;
/// Uses in a step that a whole layer on the card is worth: it is computed in fewer kernels, which
/// takes as long as a third of the read of an expert of 3 MB.
const WHOLE_LAYER: f64 = 0.3;

/// An expert that leaves a card, and one that comes to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Exchange {
    pub(crate) leaves: ExpertId,
    pub(crate) comes: ExpertId,
}

/// Recent uses of experts, older ones weighted less.
#[derive(Debug)]
pub(crate) struct UseWindow {
    /// Steps since the last look at the counters.
    steps: u32,
    /// Steps in which the recent uses were counted, weighted alike.
    weight: f64,
    seen: UseCounts,
    recent: Vec<Vec<f64>>,
}

/// Experts whose slots have one size, with their recent uses.
#[derive(Default)]
struct ClassUses {
    /// On the card; in a layer that is whole there, with the uses that its wholeness is worth.
    on_card: Vec<(f64, ExpertId)>,
    /// Read from host memory by the card.
    read: Vec<(f64, ExpertId)>,
}

impl UseWindow {
    /// A window over the first `layers` layers that begins with the current counts. A drafter's
    /// layer, which follows them, is not counted.
    pub(crate) fn new(counters: &ExpertCounters, layers: usize) -> Self {
        let seen = UseCounts::of_counters(counters, layers);
        let recent = (0..layers).map(|layer| vec![0.0; seen.of_layer(layer).len()]);
        Self { steps: 0, weight: 0.0, recent: recent.collect(), seen }
    }

    /// Bytes of a window.
    pub(crate) fn bytes(experts: usize) -> u64 {
        (experts * (size_of::<u64>() + size_of::<f64>())) as u64
    }

    /// Counts a step. Every few steps returns which experts should be exchanged, the most useful
    /// exchange first. `class`: class of slots of a layer; `None` if none of its experts can be
    /// exchanged.
    pub(crate) fn step(
        &mut self,
        counters: &ExpertCounters,
        placement: &Placement,
        class: &dyn Fn(usize) -> Option<usize>,
    ) -> Vec<Exchange> {
        self.steps += 1;
        if self.steps < PERIOD {
            return Vec::new();
        }
        self.weight = self.weight * KEPT + f64::from(self.steps);
        self.steps = 0;
        let now = UseCounts::of_counters(counters, self.recent.len());
        for (layer, recent) in self.recent.iter_mut().enumerate() {
            let uses = now.of_layer(layer).iter().zip(self.seen.of_layer(layer));
            for (recent, (now, before)) in recent.iter_mut().zip(uses) {
                *recent = *recent * KEPT + now.saturating_sub(*before) as f64;
            }
        }
        self.seen = now;
        let mut classes: BTreeMap<usize, ClassUses> = BTreeMap::new();
        for (layer, recent) in self.recent.iter().enumerate() {
            let Some(class) = class(layer) else { continue };
            let of_class = classes.entry(class).or_default();
            let is_whole = !placement.has_part_on_card(layer);
            let of_whole = if is_whole { WHOLE_LAYER * self.weight } else { 0.0 };
            for (expert, uses) in recent.iter().enumerate() {
                let id = ExpertId { layer, expert };
                if placement.is_on_card(layer, expert) {
                    of_class.on_card.push((uses + of_whole, id));
                } else if !placement.is_computed(layer, expert) {
                    of_class.read.push((*uses, id));
                }
            }
        }
        let mut exchanges = Vec::new();
        for ClassUses { mut on_card, mut read } in classes.into_values() {
            on_card.sort_by(|a, b| a.0.total_cmp(&b.0));
            read.sort_by(|a, b| b.0.total_cmp(&a.0));
            let pairs = on_card.into_iter().zip(read);
            let paying = pairs.take_while(|((of_card, _), (uses, _))| pays(*uses, *of_card));
            exchanges.extend(paying.map(|((of_card, leaves), (uses, comes))| {
                (uses - of_card, Exchange { leaves, comes })
            }));
        }
        exchanges.sort_by(|a, b| b.0.total_cmp(&a.0));
        exchanges.truncate(MAX_EXCHANGES);
        exchanges.into_iter().map(|(_, exchange)| exchange).collect()
    }
}

/// Whether an expert with `uses` should take the place of one with `of_card` uses.
fn pays(uses: f64, of_card: f64) -> bool {
    let chance = MIN_DEVIATIONS * (uses + of_card).sqrt();
    uses > of_card * MIN_RATIO && uses - of_card > chance
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experts::placement::{PlacedLayer, PlacementRule};

    fn counters() -> ExpertCounters {
        ExpertCounters::of_experts(&[4, 4])
    }

    fn placement() -> Placement {
        let layers = [PlacedLayer { experts: 4, top_k: 2, class: 0, is_own: true }; 2];
        let rule = PlacementRule { uses: None, ways: &[] };
        let mut placement = Placement::new(&layers, &[5], true, rule);
        placement.set_computed(1, 1);
        placement
    }

    fn period(window: &mut UseWindow, counters: &ExpertCounters) -> Vec<Exchange> {
        let steps = (0..PERIOD).map(|_| window.step(counters, &placement(), &|_| Some(0)));
        steps.fold(Vec::new(), |all, exchanges| [all, exchanges].concat())
    }

    #[test]
    fn experts_that_are_used_more_come_to_the_card() {
        // The first layer and an expert of the second are on the card, one is computed.
        let placement = placement();
        let computed = placement.computed_in(1).next().unwrap();
        let read: Vec<usize> = (1..4).filter(|expert| *expert != computed).collect();
        let counters = counters();
        let mut window = UseWindow::new(&counters, 2);
        assert_eq!(period(&mut window, &counters), []);
        // The first layer is whole: an expert of the second one leaves instead.
        (0..4).for_each(|expert| counters.add_uses(0, expert, 10 + expert));
        counters.add_uses(1, 0, 20);
        counters.add_uses(1, computed, 1000);
        counters.add_uses(1, read[0], 200);
        counters.add_uses(1, read[1], 40);
        let exchange = Exchange {
            leaves: ExpertId { layer: 1, expert: 0 },
            comes: ExpertId { layer: 1, expert: read[0] },
        };
        assert_eq!(period(&mut window, &counters), [exchange]);
        // Layers without an empty slot are left alone.
        counters.add_uses(1, read[0], 200);
        for _ in 0..PERIOD {
            assert_eq!(window.step(&counters, &placement, &|_| None), []);
        }
        // Uses that are not repeated count less and less.
        (0..40).for_each(|_| drop(period(&mut window, &counters)));
        assert_eq!(period(&mut window, &counters), []);
    }

    #[test]
    fn few_uses_are_chance() {
        let (counters, placement) = (counters(), placement());
        let read = (1..4).find(|expert| !placement.is_computed(1, *expert)).unwrap();
        let mut window = UseWindow::new(&counters, 2);
        counters.add_uses(1, read, 36);
        assert_eq!(period(&mut window, &counters), []);
    }
}

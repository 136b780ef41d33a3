//! Layer cards: which card of a device has which layers of a model.
//!
//! Each card has layers that follow each other, the first card the first ones. Where the cards hold
//! the whole model together, each has room for its layers, and the faster ones have as many as they
//! have room for. Where they do not, all have about the same share of their experts.

use std::ops::Range;

use moeflux_base::{Error, PlanError};
use moeflux_model::blueprint::{Blueprint, LayerBlueprint, MixerBlueprint};

/// Relative speed of the fastest card.
pub(super) const FULL_SPEED: u64 = 16;

/// Share of a fast card's room that its layers fill: the prefix cache needs some, too.
const MAX_FULLNESS: f64 = 0.9;

/// Bytes of a layer, or of a run of layers, on its card.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct LayerLoad {
    /// Dense weights and states.
    pub(super) fixed: u64,
    /// Slots of all experts.
    pub(super) experts: u64,
    /// Weights read per token.
    pub(super) read: u64,
}

/// Memory and speed of a card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CardRoom {
    /// Bytes for layers.
    pub(super) bytes: u64,
    /// Bandwidth relative to the fastest card, at most [`FULL_SPEED`].
    pub(super) speed: u64,
}

impl LayerLoad {
    fn plus(self, other: Self) -> Self {
        Self {
            fixed: self.fixed.saturating_add(other.fixed),
            experts: self.experts.saturating_add(other.experts),
            read: self.read.saturating_add(other.read),
        }
    }

    /// Share of a room that is taken; more than 1 if it does not fit.
    fn fullness(self, room: u64) -> f64 {
        self.fixed.saturating_add(self.experts) as f64 / room.max(1) as f64
    }

    /// Share of the experts that have no slot in a room, or more than 1 if the rest does not fit.
    fn missing(self, room: u64) -> f64 {
        match room.checked_sub(self.fixed) {
            Some(_) if self.experts == 0 => 0.0,
            Some(left) => 1.0 - left as f64 / self.experts as f64,
            None => 1.0 + self.fixed as f64 / room.max(1) as f64,
        }
    }
}

/// Loads of the layers, and what the first and the last card hold beside theirs.
#[derive(Clone, Debug)]
pub(super) struct ModelLoad {
    pub(super) layers: Vec<LayerLoad>,
    /// By layer: whether it can be the first of a card.
    pub(super) can_be_first: Vec<bool>,
    /// Bytes of the embedding.
    pub(super) first: u64,
    /// Bytes of the head.
    pub(super) last: u64,
}

impl ModelLoad {
    /// Load of a run of layers on one of `cards` cards.
    fn of_run(&self, card: usize, cards: usize, layers: Range<usize>) -> LayerLoad {
        let ends = [(0, self.first, 0), (cards - 1, self.last, self.last)];
        let ends = ends.into_iter().filter(|(at, ..)| *at == card);
        let ends = ends.map(|(_, fixed, read)| LayerLoad { fixed, experts: 0, read });
        ends.chain(self.layers[layers].iter().copied()).fold(LayerLoad::default(), LayerLoad::plus)
    }

    /// The card of each layer.
    pub(super) fn split(&self, cards: &[CardRoom]) -> Result<Vec<usize>, Error> {
        if cards.len() <= 1 {
            return Ok(vec![0; self.layers.len()]);
        }
        let evenly = |share: fn(LayerLoad, u64) -> f64| {
            self.best(cards, |load, card| RunCost { time: 0, share: share(load, card.bytes) })
        };
        let fits = evenly(LayerLoad::fullness)?;
        let best = match fits.cost.share <= 1.0 {
            true if cards.iter().any(|card| card.speed < FULL_SPEED) => {
                let most = MAX_FULLNESS.max(fits.cost.share);
                self.best(cards, |load, card| {
                    let share = load.fullness(card.bytes);
                    let time = load.read.saturating_mul(FULL_SPEED) / card.speed.max(1);
                    RunCost { time: if share > most { u64::MAX } else { time }, share }
                })?
            }
            true => fits,
            false => evenly(LayerLoad::missing)?,
        };
        let mut card_of_layer = Vec::with_capacity(self.layers.len());
        best.ends.iter().enumerate().for_each(|(card, end)| card_of_layer.resize(*end, card));
        Ok(card_of_layer)
    }

    /// The split with the least cost.
    fn best(
        &self,
        cards: &[CardRoom],
        cost: impl Fn(LayerLoad, &CardRoom) -> RunCost,
    ) -> Result<SplitChoice, Error> {
        let count = self.layers.len();
        // By end: the best split of the layers before it among the cards so far.
        let mut best: Vec<Option<SplitChoice>> = vec![None; count + 1];
        best[0] = Some(SplitChoice {
            cost: RunCost { time: 0, share: f64::NEG_INFINITY },
            ends: Vec::new(),
        });
        for (card, room) in cards.iter().enumerate() {
            let mut next: Vec<Option<SplitChoice>> = vec![None; count + 1];
            for (start, before) in best.iter().take(count).enumerate() {
                let Some(before) = before else { continue };
                if !self.can_be_first[start] && start > 0 {
                    continue;
                }
                for (end, split) in next.iter_mut().enumerate().skip(start + 1) {
                    let load = self.of_run(card, cards.len(), start..end);
                    let cost = before.cost.with(cost(load, room));
                    if split.as_ref().is_none_or(|other| cost.is_less(other.cost)) {
                        let ends = before.ends.iter().copied().chain([end]).collect();
                        *split = Some(SplitChoice { cost, ends });
                    }
                }
            }
            best = next;
        }
        best.pop().flatten().ok_or_else(|| self.too_many(cards.len()))
    }

    fn too_many(&self, cards: usize) -> Error {
        let parts = self.can_be_first.iter().skip(1).filter(|first| **first).count() + 1;
        PlanError::TooManyCards { cards, parts: parts.min(self.layers.len()) }.into()
    }
}

/// Cost of runs of layers on their cards.
#[derive(Clone, Copy, Debug)]
struct RunCost {
    /// Bytes that a token reads, scaled by the speeds of their cards.
    time: u64,
    /// Share of the worst card.
    share: f64,
}

impl RunCost {
    /// Cost of these runs and one more.
    fn with(self, run: Self) -> Self {
        Self { time: self.time.saturating_add(run.time), share: self.share.max(run.share) }
    }

    /// Whether the time is less, or equal and the worst card has the smaller share.
    fn is_less(self, other: Self) -> bool {
        (self.time, self.share) < (other.time, other.share)
    }
}

/// Ends of the runs of layers, and their cost.
#[derive(Clone, Debug)]
struct SplitChoice {
    cost: RunCost,
    ends: Vec<usize>,
}

/// Whether each layer can be the first of a card. One that reads the positions that an earlier
/// layer's indexer chose is on the card of that layer.
pub(super) fn can_be_first(blueprint: &Blueprint) -> Vec<bool> {
    // Whether a layer chooses positions, or reads those of an earlier one.
    let chooses = |layer: &LayerBlueprint| match layer.mixer() {
        Some(MixerBlueprint::Mla(mla)) => mla.sparse.as_ref().map(|_| mla.indexer().is_some()),
        _ => None,
    };
    let next = |layer| blueprint.layers.iter().skip(layer).find_map(chooses);
    (0..blueprint.layers.len()).map(|layer| next(layer).unwrap_or(true)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model(layers: usize) -> ModelLoad {
        ModelLoad {
            layers: vec![LayerLoad { fixed: 10, experts: 90, read: 20 }; layers],
            can_be_first: vec![true; layers],
            first: 0,
            last: 0,
        }
    }

    fn rooms(bytes: &[u64]) -> Vec<CardRoom> {
        bytes.iter().map(|bytes| CardRoom { bytes: *bytes, speed: FULL_SPEED }).collect()
    }

    fn counts(cards: &[usize]) -> Vec<usize> {
        let last = cards.iter().copied().max().unwrap_or(0);
        (0..=last).map(|card| cards.iter().filter(|c| **c == card).count()).collect()
    }

    #[test]
    fn layers_fit_their_cards_where_the_whole_model_fits() {
        let cards = model(10).split(&rooms(&[700, 310])).unwrap();
        assert_eq!(cards, [0, 0, 0, 0, 0, 0, 0, 1, 1, 1]);
        assert_eq!(counts(&model(8).split(&rooms(&[10_000, 5_000, 5_000])).unwrap()), [4, 2, 2]);
        // Embedding and head take room.
        let ends = ModelLoad { first: 300, last: 100, ..model(6) };
        assert_eq!(counts(&ends.split(&rooms(&[500, 500])).unwrap()), [2, 4]);
    }

    #[test]
    fn cards_that_are_too_small_have_the_same_share_of_their_experts() {
        // 20 layers of 100 in a room of 300 and one of 160.
        let cards = counts(&model(20).split(&rooms(&[300, 160])).unwrap());
        assert_eq!(cards, [13, 7]);
        // Even if not all dense weights fit, every card has a layer.
        assert_eq!(counts(&model(3).split(&rooms(&[1, 1, 1])).unwrap()), [1, 1, 1]);
    }

    #[test]
    fn faster_cards_have_the_layers_that_they_have_room_for() {
        let split = |rooms: &[(u64, u64)]| {
            let cards =
                rooms.iter().map(|(bytes, speed)| CardRoom { bytes: *bytes, speed: *speed });
            counts(&model(10).split(&cards.collect::<Vec<_>>()).unwrap())
        };
        assert_eq!(split(&[(1000, 16), (1000, 16)]), [5, 5]);
        assert_eq!(split(&[(1000, 8), (1000, 16)]), [1, 9]);
        assert_eq!(split(&[(1000, 16), (1000, 15)]), [9, 1]);
        assert_eq!(split(&[(500, 8), (700, 16), (500, 15)]), [1, 6, 3]);
        // More than nine tenths only where the model needs it.
        assert_eq!(split(&[(500, 16), (550, 8)]), [5, 5]);
        // Cards that are too small: the bus decides.
        assert_eq!(split(&[(300, 16), (300, 8)]), [5, 5]);
    }

    #[test]
    fn layers_that_share_positions_are_on_one_card() {
        let mut shared = model(4);
        shared.can_be_first = vec![true, false, false, true];
        assert_eq!(shared.split(&rooms(&[200, 200])).unwrap(), [0, 0, 0, 1]);
        let error = shared.split(&rooms(&[200, 200, 200])).unwrap_err().to_string();
        assert!(error.contains("3 cards") && error.contains("at most 2 parts"), "{error}");
        assert!(model(2).split(&rooms(&[1, 1, 1])).is_err());
    }
}

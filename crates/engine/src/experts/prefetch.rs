//! Which experts the next layer may need, and whether it pays to read them before its router has spoken.
//!
//! While a layer's reads are under way, the next layer's router is shown the residual stream as it stands: what it would
//! choose is most of what it will choose. Those experts are read when nothing is left to read that a layer waits for, and
//! given up when the router has spoken. Whether its guesses are good enough, and often enough not in memory anyway, is counted
//! for each layer, and no more are read than the disk has time for between the reads of two layers.

use std::time::{Duration, Instant};

/// Whether to look ahead.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PrefetchMode {
    /// Where it pays, which is measured for each layer.
    #[default]
    Auto,
    /// Always.
    On,
    /// Never.
    Off,
}

/// Rows of a step up to which the next layer's router is asked. Of more rows each has its own idea, and the experts that
/// they all want together are soon all that there are.
pub(crate) const PREFETCH_ROWS: usize = 8;

/// The most guesses of one layer that are read, however fast the disk is.
const MOST: usize = 16;

/// From this share of right guesses on it pays. A wrong one takes the disk from a layer that waits for as long as the pieces
/// that had begun take, a right one saves about as much.
const PAYS: f32 = 0.5;

/// What one more guess weighs in the share of right ones, and one more layer in the disk's spare time.
const WEIGHT: f32 = 1.0 / 64.0;

/// From so many guesses of a layer on that are not in memory it pays: asking a router takes a fiftieth of what reading an
/// expert takes.
const ABSENT: f32 = 1.0 / 32.0;

/// What one more asking weighs in how many are not in memory: one that finds some is enough for the next steps to ask.
const ASKING: f32 = 1.0 / 16.0;

/// Where it does not pay, guesses are made and judged in one step of so many, and read only if they are good.
const REST: u32 = 16;

#[derive(Clone, Copy, Debug)]
struct Guesses {
    /// The share of guesses that were right, of late.
    right: f32,
    /// Guesses that were not in memory, of late.
    absent: f32,
    /// Steps until the next trial.
    rest: u32,
}

/// What to do about a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effort {
    /// Nothing.
    None,
    /// Guess, and see how good the guesses are.
    Guess,
    /// Read what is guessed.
    Read,
}

/// Guesses and how good they are.
#[derive(Debug, Default)]
pub(crate) struct Prefetcher {
    mode: PrefetchMode,
    layers: Vec<Guesses>,
    /// The guesses about one layer that were not in memory.
    guesses: Vec<u32>,
    about: Option<usize>,
    spare: Spare,
}

/// What the disk could read between the reads of two layers that follow each other.
#[derive(Debug, Default)]
struct Spare {
    /// The layer before, when it began, and how long it took to read what it needed.
    before: Option<(usize, Instant, Duration)>,
    /// Experts, of late.
    experts: f32,
}

impl Spare {
    /// A layer begins, on a disk that gives so many experts a second. What other layers than the next one leave is not theirs to use.
    fn begin(&mut self, layer: usize, now: Instant, rate: f32) {
        let Some((before, began, reading)) = self.before.take() else { return };
        if before + 1 == layer && rate.is_finite() {
            let idle = now.saturating_duration_since(began).saturating_sub(reading);
            self.experts += (idle.as_secs_f32() * rate - self.experts) * WEIGHT;
        }
    }

    /// How many guesses keep the disk busy, the last one perhaps for longer than there is time.
    fn guesses(&self) -> usize {
        (self.experts.ceil() as usize).clamp(1, MOST)
    }
}

impl Prefetcher {
    /// For so many layers, with `k` experts chosen of each row.
    pub(crate) fn new(mode: PrefetchMode, layers: usize, k: usize) -> Self {
        let fresh = Guesses { right: PAYS, absent: 1.0, rest: 0 };
        let guesses = Vec::with_capacity(PREFETCH_ROWS * k);
        Self { mode, layers: vec![fresh; layers], guesses, about: None, spare: Spare::default() }
    }

    /// Bytes that are held for so many layers.
    pub(crate) fn bytes(layers: usize, k: usize) -> u64 {
        (layers * size_of::<Guesses>() + PREFETCH_ROWS * k * size_of::<u32>()) as u64
    }

    /// Whether anything is ever read ahead.
    pub(crate) fn is_on(&self) -> bool {
        self.mode != PrefetchMode::Off
    }

    /// A layer of a step of few rows begins, on a disk that gives so many experts a second.
    pub(crate) fn layer_begins(&mut self, layer: usize, now: Instant, rate: f32) {
        self.spare.begin(layer, now, rate);
    }

    /// A layer that began then has all its experts; it took so long to read those that it had to.
    pub(crate) fn layer_has_read(&mut self, layer: usize, began: Instant, reading: Duration) {
        self.spare.before = Some((layer, began, reading));
    }

    /// What to do about a layer in this step.
    pub(crate) fn effort(&mut self, layer: usize) -> Effort {
        match (self.mode, self.layers.get_mut(layer)) {
            (PrefetchMode::Off, _) | (_, None) => Effort::None,
            (PrefetchMode::On, _) => Effort::Read,
            (PrefetchMode::Auto, Some(guesses)) => {
                let effort = if guesses.right >= PAYS { Effort::Read } else { Effort::Guess };
                if effort == Effort::Read && guesses.absent >= ABSENT {
                    return effort;
                }
                match guesses.rest.checked_sub(1) {
                    Some(rest) => {
                        guesses.rest = rest;
                        Effort::None
                    }
                    None => {
                        guesses.rest = REST;
                        effort
                    }
                }
            }
        }
    }

    /// Begins to collect guesses about a layer.
    pub(crate) fn begin(&mut self, layer: usize) {
        self.guesses.clear();
        self.about = Some(layer);
    }

    /// Notes a guess that is not in memory; whether it should be read, if any.
    pub(crate) fn guess(&mut self, expert: u32) -> bool {
        if self.guesses.len() >= self.spare.guesses() || self.guesses.contains(&expert) {
            return false;
        }
        self.guesses.push(expert);
        true
    }

    /// Compares the guesses with what the router has chosen.
    pub(crate) fn judge(&mut self, layer: usize, is_needed: impl Fn(u32) -> bool) {
        if self.about.take() != Some(layer) {
            return;
        }
        if let Some(of) = self.layers.get_mut(layer) {
            of.absent += (self.guesses.len() as f32 - of.absent) * ASKING;
            for guess in &self.guesses {
                let right = if is_needed(*guess) { 1.0 } else { 0.0 };
                of.right += (right - of.right) * WEIGHT;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(prefetcher: &mut Prefetcher, right: bool) -> Effort {
        let effort = prefetcher.effort(1);
        if effort != Effort::None {
            prefetcher.begin(1);
            assert!(prefetcher.guess(7) && !prefetcher.guess(7));
            prefetcher.judge(1, |expert| right && expert == 7);
        }
        effort
    }

    #[test]
    fn a_layer_whose_guesses_are_wrong_is_left_alone_until_they_are_right() {
        let mut prefetcher = Prefetcher::new(PrefetchMode::Auto, 2, 8);
        let efforts: Vec<Effort> = (0..100).map(|_| step(&mut prefetcher, false)).collect();
        assert_eq!(efforts[0], Effort::Read);
        assert!(efforts[1..].iter().all(|e| *e != Effort::Read));
        assert_eq!(
            efforts.iter().filter(|e| **e == Effort::Guess).count(),
            99usize.div_ceil(REST as usize + 1)
        );
        let later: Vec<Effort> = (0..2000).map(|_| step(&mut prefetcher, true)).collect();
        assert_eq!(later.last(), Some(&Effort::Read));
    }

    #[test]
    fn a_layer_that_misses_nothing_is_asked_seldom_until_it_misses() {
        let mut prefetcher = Prefetcher::new(PrefetchMode::Auto, 2, 4);
        let mut ask = |absent: bool| {
            let effort = prefetcher.effort(1);
            if effort != Effort::None {
                prefetcher.begin(1);
                assert!(!absent || prefetcher.guess(7));
                prefetcher.judge(1, |_| true);
            }
            effort
        };
        let asked = (0..400).filter(|_| ask(false) != Effort::None).count();
        assert!((60..100).contains(&asked), "{asked} of 400");
        let until = (0..=REST).position(|_| ask(true) == Effort::Read);
        assert!(until.is_some(), "good guesses are read whenever a layer is asked");
        assert_eq!([(); 9].map(|()| ask(true)), [Effort::Read; 9]);
    }

    #[test]
    fn no_more_is_read_than_the_disk_has_time_for() {
        let mut prefetcher = Prefetcher::new(PrefetchMode::Auto, 3, 8);
        let (start, ms) = (Instant::now(), Duration::from_millis);
        let taken = |prefetcher: &mut Prefetcher| {
            prefetcher.begin(1);
            (0..40).filter(|expert| prefetcher.guess(*expert)).count()
        };
        assert_eq!(taken(&mut prefetcher), 1, "nothing is known yet");
        // Layers of 10 ms that read for 7 leave 3, on a disk that takes 2 for an expert.
        for step in 0..300 {
            let began = start + ms(20 * step);
            prefetcher.layer_begins(0, began, 500.0);
            prefetcher.layer_has_read(0, began, ms(7));
            prefetcher.layer_begins(1, began + ms(10), 500.0);
            prefetcher.layer_has_read(1, began + ms(10), ms(7));
            // What passes between layers that do not follow each other counts for nothing.
            prefetcher.layer_begins(0, began + ms(1_000), 500.0);
        }
        assert_eq!(taken(&mut prefetcher), 2);
        for step in 0..300 {
            let began = start + ms(20 * step);
            prefetcher.layer_has_read(0, began, ms(0));
            prefetcher.layer_begins(1, began + ms(10), 1e6);
        }
        assert_eq!(taken(&mut prefetcher), MOST);
    }

    #[test]
    fn guesses_about_another_layer_are_not_judged() {
        let mut prefetcher = Prefetcher::new(PrefetchMode::Auto, 2, 8);
        prefetcher.begin(0);
        prefetcher.guess(3);
        prefetcher.judge(1, |_| false);
        prefetcher.judge(0, |_| false);
        assert_eq!([0, 1].map(|layer| prefetcher.effort(layer)), [Effort::Read; 2]);
    }

    #[test]
    fn off_is_off_and_on_is_on() {
        for (mode, effort) in [(PrefetchMode::Off, Effort::None), (PrefetchMode::On, Effort::Read)]
        {
            let mut prefetcher = Prefetcher::new(mode, 2, 8);
            assert!((0..20).all(|_| step(&mut prefetcher, false) == effort));
        }
    }
}

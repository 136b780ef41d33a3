//! Speculative prefetch: the router of the next layer with experts predicts which ones to read
//! early.
//!
//! While a layer's reads are in flight, that router runs on the current residual
//! stream. Its top-k predicts most of the true choice. Predicted experts are read when no demand
//! read is left, and cancelled once the true choice is known.
//!
//! Each layer's accuracy and its share of absent predictions are measured, and decide whether it
//! prefetches. The number of predictions is limited to the disk's idle time between the reads of
//! two layers.

use std::time::{Duration, Instant};

/// When to prefetch experts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PrefetchMode {
    /// In layers where it pays, as measured during the run.
    #[default]
    Auto,
    /// Always.
    On,
    /// Never.
    Off,
}

/// Maximum rows of a step with predictions. With more rows, nearly all experts
/// are needed.
pub(crate) const MAX_PREFETCH_ROWS: usize = 8;

/// Maximum predicted experts to read per layer, however fast the disk is.
const MAX_PREDICTIONS: usize = 16;

/// Accuracy from which on prefetching pays. A wrong prediction delays the waiting layer by its
/// reads in flight, a right one saves about as much.
const MIN_ACCURACY: f32 = 0.5;

/// Smoothing factor of the moving averages: accuracy per prediction, idle disk time per layer.
const SMOOTHING: f32 = 1.0 / 64.0;

/// Absent predictions per step from which on predicting pays: running a router takes a fiftieth of
/// the time of reading an expert.
const MIN_ABSENT: f32 = 1.0 / 32.0;

/// Smoothing factor of absent predictions per step. One step with absent experts is enough to
/// predict in the next ones.
const ABSENT_SMOOTHING: f32 = 1.0 / 16.0;

/// Where predicting does not pay, one step in this many predicts to measure again, and reads only
/// if the accuracy is good.
const TRIAL_INTERVAL: u32 = 16;

#[derive(Clone, Copy, Debug)]
struct LayerPredictions {
    /// Moving average of the share of right predictions.
    accuracy: f32,
    /// Moving average of predictions that were not in memory, per step.
    absent: f32,
    /// Steps until the next trial.
    trial_in: u32,
}

/// Decision about a layer's predictions in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PrefetchAction {
    /// Does not predict.
    Skip,
    /// Predicts to measure the accuracy.
    Predict,
    /// Predicts, and reads the predicted experts.
    Prefetch,
}

/// Decides which predictions to read, and measures their accuracy.
#[derive(Debug, Default)]
pub(crate) struct Prefetcher {
    mode: PrefetchMode,
    layers: Vec<LayerPredictions>,
    /// Predictions for one layer that were not in memory.
    predictions: Vec<u32>,
    predicted_layer: Option<usize>,
    idle: IdleTime,
}

/// Idle time of the disk between the reads of two layers with experts, one after the other.
#[derive(Debug, Default)]
struct IdleTime {
    /// The previous layer: index of the one after it, start, and duration of its reads.
    previous: Option<(usize, Instant, Duration)>,
    /// Moving average of experts that the disk could read in that time.
    experts: f32,
}

impl IdleTime {
    /// A layer starts, on a disk that reads `rate` experts per second. Only the time since the
    /// layer with experts before it counts.
    fn layer_started(&mut self, layer: usize, now: Instant, rate: f32) {
        let Some((next, started, reading)) = self.previous.take() else { return };
        if next == layer && rate.is_finite() {
            let unused = now.saturating_duration_since(started).saturating_sub(reading);
            self.experts += (unused.as_secs_f32() * rate - self.experts) * SMOOTHING;
        }
    }

    /// Number of predictions that keep the disk busy; the last one may take longer than the idle
    /// time.
    fn max_predictions(&self) -> usize {
        (self.experts.ceil() as usize).clamp(1, MAX_PREDICTIONS)
    }
}

impl Prefetcher {
    /// Prefetcher for `layers` layers with top-k routers.
    pub(crate) fn new(mode: PrefetchMode, layers: usize, k: usize) -> Self {
        let fresh = LayerPredictions { accuracy: MIN_ACCURACY, absent: 1.0, trial_in: 0 };
        let predictions = Vec::with_capacity(MAX_PREFETCH_ROWS * k);
        Self {
            mode,
            layers: vec![fresh; layers],
            predictions,
            predicted_layer: None,
            idle: IdleTime::default(),
        }
    }

    /// Bytes held for `layers` layers.
    pub(crate) fn bytes(layers: usize, k: usize) -> u64 {
        (layers * size_of::<LayerPredictions>() + MAX_PREFETCH_ROWS * k * size_of::<u32>()) as u64
    }

    /// Whether prefetching is enabled.
    pub(crate) fn is_on(&self) -> bool {
        self.mode != PrefetchMode::Off
    }

    /// A layer of a step with few rows starts, on a disk that reads `rate` experts per second.
    pub(crate) fn layer_started(&mut self, layer: usize, now: Instant, rate: f32) {
        self.idle.layer_started(layer, now, rate);
    }

    /// A layer that started at `started` has all its experts; its demand reads took `reading`.
    /// `next` is the next layer with experts.
    pub(crate) fn reads_finished(
        &mut self,
        next: Option<usize>,
        started: Instant,
        reading: Duration,
    ) {
        self.idle.previous = next.map(|next| (next, started, reading));
    }

    /// Decision about a layer's predictions in this step.
    pub(crate) fn action(&mut self, layer: usize) -> PrefetchAction {
        match (self.mode, self.layers.get_mut(layer)) {
            (PrefetchMode::Off, _) | (_, None) => PrefetchAction::Skip,
            (PrefetchMode::On, _) => PrefetchAction::Prefetch,
            (PrefetchMode::Auto, Some(layer)) => {
                let action = if layer.accuracy >= MIN_ACCURACY {
                    PrefetchAction::Prefetch
                } else {
                    PrefetchAction::Predict
                };
                if action == PrefetchAction::Prefetch && layer.absent >= MIN_ABSENT {
                    return action;
                }
                match layer.trial_in.checked_sub(1) {
                    Some(trial_in) => {
                        layer.trial_in = trial_in;
                        PrefetchAction::Skip
                    }
                    None => {
                        layer.trial_in = TRIAL_INTERVAL;
                        action
                    }
                }
            }
        }
    }

    /// Starts to collect predictions for a layer.
    pub(crate) fn start_predictions(&mut self, layer: usize) {
        self.predictions.clear();
        self.predicted_layer = Some(layer);
    }

    /// Adds a prediction that is not in memory. Returns whether to read it if the layer reads
    /// predictions.
    pub(crate) fn predict(&mut self, expert: u32) -> bool {
        if self.predictions.len() >= self.idle.max_predictions()
            || self.predictions.contains(&expert)
        {
            return false;
        }
        self.predictions.push(expert);
        true
    }

    /// Compares the predictions with the router's choice.
    pub(crate) fn score(&mut self, layer: usize, is_needed: impl Fn(u32) -> bool) {
        if self.predicted_layer.take() != Some(layer) {
            return;
        }
        if let Some(layer) = self.layers.get_mut(layer) {
            layer.absent += (self.predictions.len() as f32 - layer.absent) * ABSENT_SMOOTHING;
            for expert in &self.predictions {
                let right = if is_needed(*expert) { 1.0 } else { 0.0 };
                layer.accuracy += (right - layer.accuracy) * SMOOTHING;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(prefetcher: &mut Prefetcher, right: bool) -> PrefetchAction {
        let action = prefetcher.action(1);
        if action != PrefetchAction::Skip {
            prefetcher.start_predictions(1);
            assert!(prefetcher.predict(7) && !prefetcher.predict(7));
            prefetcher.score(1, |expert| right && expert == 7);
        }
        action
    }

    #[test]
    fn a_layer_with_wrong_predictions_pauses_until_they_are_right() {
        let mut prefetcher = Prefetcher::new(PrefetchMode::Auto, 2, 8);
        let actions: Vec<PrefetchAction> = (0..100).map(|_| step(&mut prefetcher, false)).collect();
        assert_eq!(actions[0], PrefetchAction::Prefetch);
        assert!(actions[1..].iter().all(|e| *e != PrefetchAction::Prefetch));
        assert_eq!(
            actions.iter().filter(|e| **e == PrefetchAction::Predict).count(),
            99usize.div_ceil(TRIAL_INTERVAL as usize + 1)
        );
        let later: Vec<PrefetchAction> = (0..2000).map(|_| step(&mut prefetcher, true)).collect();
        assert_eq!(later.last(), Some(&PrefetchAction::Prefetch));
    }

    #[test]
    fn a_layer_without_misses_predicts_rarely_until_it_misses() {
        let mut prefetcher = Prefetcher::new(PrefetchMode::Auto, 2, 4);
        let mut ask = |absent: bool| {
            let action = prefetcher.action(1);
            if action != PrefetchAction::Skip {
                prefetcher.start_predictions(1);
                assert!(!absent || prefetcher.predict(7));
                prefetcher.score(1, |_| true);
            }
            action
        };
        let asked = (0..400).filter(|_| ask(false) != PrefetchAction::Skip).count();
        assert!((60..100).contains(&asked), "{asked} of 400");
        let until = (0..=TRIAL_INTERVAL).position(|_| ask(true) == PrefetchAction::Prefetch);
        assert!(until.is_some(), "accurate predictions are always read");
        assert_eq!([(); 9].map(|()| ask(true)), [PrefetchAction::Prefetch; 9]);
    }

    #[test]
    fn predictions_are_limited_to_idle_disk_time() {
        let mut prefetcher = Prefetcher::new(PrefetchMode::Auto, 3, 8);
        let (start, ms) = (Instant::now(), Duration::from_millis);
        let taken = |prefetcher: &mut Prefetcher| {
            prefetcher.start_predictions(1);
            (0..40).filter(|expert| prefetcher.predict(*expert)).count()
        };
        assert_eq!(taken(&mut prefetcher), 1, "no idle time was measured yet");
        // Layers take 10 ms and read for 7 of them, which leaves 3, on a disk that takes 2 per
        // expert.
        for step in 0..300 {
            let started = start + ms(20 * step);
            prefetcher.layer_started(0, started, 500.0);
            prefetcher.reads_finished(Some(1), started, ms(7));
            prefetcher.layer_started(1, started + ms(10), 500.0);
            prefetcher.reads_finished(Some(2), started + ms(10), ms(7));
            // Time between layers that are not consecutive does not count.
            prefetcher.layer_started(0, started + ms(1_000), 500.0);
        }
        assert_eq!(taken(&mut prefetcher), 2);
        for step in 0..300 {
            let started = start + ms(20 * step);
            prefetcher.reads_finished(Some(1), started, ms(0));
            prefetcher.layer_started(1, started + ms(10), 1e6);
        }
        assert_eq!(taken(&mut prefetcher), MAX_PREDICTIONS);
    }

    #[test]
    fn predictions_for_another_layer_are_not_scored() {
        let mut prefetcher = Prefetcher::new(PrefetchMode::Auto, 2, 8);
        prefetcher.start_predictions(0);
        prefetcher.predict(3);
        prefetcher.score(1, |_| false);
        prefetcher.score(0, |_| false);
        assert_eq!([0, 1].map(|layer| prefetcher.action(layer)), [PrefetchAction::Prefetch; 2]);
    }

    #[test]
    fn off_never_predicts_and_on_always_prefetches() {
        for (mode, action) in [
            (PrefetchMode::Off, PrefetchAction::Skip),
            (PrefetchMode::On, PrefetchAction::Prefetch),
        ] {
            let mut prefetcher = Prefetcher::new(mode, 2, 8);
            assert!((0..20).all(|_| step(&mut prefetcher, false) == action));
        }
    }
}

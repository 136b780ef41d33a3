//! Division of a layer's experts in host memory: some are read over the bus by the card, the others
//! computed by the host's processor, so that both sides end together.
//!
//! It follows from measured times and expected uses, and is fixed while an answer is computed.

use serde::{Deserialize, Serialize};

/// Shares of a layer's experts in host memory that a division tries: multiples of 1 / 16. They are
/// coarse, so that two measurements of one machine mostly give the same division.
const SHARES: usize = 16;

/// Minimum gain in speed of computing any of a layer's experts on the host over reading all of
/// them, and of another plan over the current one. Measurements of one machine differ by as much.
pub(crate) const MIN_GAIN: f64 = 1.1;

/// Time of `n` experts of one layer, in seconds: `fixed + n * each`, and zero for none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ExpertTime {
    /// Seconds that do not depend on the number of experts.
    pub fixed: f64,
    /// Seconds per expert.
    pub each: f64,
}

impl ExpertTime {
    /// The line through two measurements, with no negative part.
    pub(crate) fn through(few: (usize, f64), many: (usize, f64)) -> Self {
        let ((few, short), (many, long)) = (few, many);
        let each = ((long - short) / (many - few).max(1) as f64).max(0.0);
        // A measurement of few that took longer than one of many is noise.
        let each = if each > 0.0 { each } else { long / many.max(1) as f64 };
        Self { fixed: (long - many as f64 * each).max(0.0), each }
    }

    /// Seconds of `count` experts.
    pub(crate) fn of(self, count: usize) -> f64 {
        if count == 0 { 0.0 } else { self.fixed + count as f64 * self.each }
    }

    /// The same line for experts of another size.
    fn scaled(self, factor: f64) -> Self {
        Self { each: self.each * factor, ..self }
    }
}

/// Measured times of one row through the experts of a layer, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ExpertTimes {
    /// Bytes of the experts that were measured.
    pub bytes: u64,
    /// Experts in the card's own memory, computed by the card.
    pub card: ExpertTime,
    /// Experts in host memory, read over the bus and computed by the card.
    pub bus: ExpertTime,
    /// Experts in host memory, computed by the host's processor.
    pub host: ExpertTime,
    /// Time that a layer takes longer where the host computes experts: the wait for the router's
    /// ids and the experts' inputs, the start of the processor, and the way of the results.
    pub wait: f64,
    /// One small op of the card after another.
    pub op: f64,
    /// Factor by which both sides are slower while they read host memory together: its bandwidth
    /// is one. At least 1.
    pub contention: f64,
}

impl ExpertTimes {
    /// Bytes per second that the card reads over the bus.
    pub fn bus_bytes_per_second(&self) -> f64 {
        self.bytes as f64 / self.bus.each
    }

    /// Bytes per second of experts that the host's processor computes.
    pub fn host_bytes_per_second(&self) -> f64 {
        self.bytes as f64 / self.host.each
    }

    /// Bytes per second of experts in the card's own memory.
    pub fn card_bytes_per_second(&self) -> f64 {
        self.bytes as f64 / self.card.each
    }

    /// Seconds of an expert in host memory where card and host share such experts.
    pub(crate) fn of_expert_on_both_sides(&self) -> f64 {
        self.contention.max(1.0) / (1.0 / self.bus.each + 1.0 / self.host.each)
    }

    /// Expected seconds of one row through a layer's experts if the host computes `computed` of
    /// those in its memory, and every expert is chosen equally often.
    pub(crate) fn of_layer(&self, layer: &LayerExpertCounts, computed: usize) -> f64 {
        let factor = layer.bytes as f64 / self.bytes.max(1) as f64;
        let [card, bus, host] = [self.card, self.bus, self.host].map(|time| time.scaled(factor));
        let on_host = layer.on_host();
        let mut expected = 0.0;
        for own in 0..=layer.top_k {
            let rest = layer.top_k - own;
            let share = hypergeometric(layer.count, layer.on_card, layer.top_k, own);
            for by_host in 0..=rest {
                let probability = share * hypergeometric(on_host, computed, rest, by_host);
                if probability > 0.0 {
                    let read = rest - by_host;
                    let both = if read > 0 && by_host > 0 { self.contention.max(1.0) } else { 1.0 };
                    let by_card = card.of(own) + bus.of(read) * both;
                    expected += probability * by_card.max(host.of(by_host) * both);
                }
            }
        }
        if computed > 0 { expected + self.wait } else { expected }
    }

    /// Number of a layer's experts in host memory that the host should compute; zero unless that
    /// gains 10 %.
    pub(crate) fn computed(&self, layer: &LayerExpertCounts) -> usize {
        let computed = self.best_division(layer);
        let gain = self.of_layer(layer, 0) / self.of_layer(layer, computed);
        if gain > MIN_GAIN { computed } else { 0 }
    }

    /// Number of a layer's experts in host memory, at least one of any, with which the layer takes
    /// the shortest time if the host computes that many.
    pub(crate) fn best_division(&self, layer: &LayerExpertCounts) -> usize {
        let of_share = |share: usize| (layer.on_host() * share).div_ceil(SHARES);
        let timed = (1..=SHARES).map(|share| {
            let computed = of_share(share);
            (computed, self.of_layer(layer, computed))
        });
        timed.min_by(|a, b| a.1.total_cmp(&b.1)).map_or(0, |(computed, _)| computed)
    }
}

/// Experts of a layer, and where they are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LayerExpertCounts {
    /// Number of experts.
    pub(crate) count: usize,
    /// Of these, experts in the card's own memory.
    pub(crate) on_card: usize,
    /// Experts per row.
    pub(crate) top_k: usize,
    /// Bytes of an expert.
    pub(crate) bytes: u64,
}

impl LayerExpertCounts {
    /// Number of experts in host memory.
    pub(crate) fn on_host(&self) -> usize {
        self.count - self.on_card
    }
}

/// Probability that `found` of `drawn` are among the `marked` of `all`.
fn hypergeometric(all: usize, marked: usize, drawn: usize, found: usize) -> f64 {
    if found > marked || drawn < found || drawn - found > all - marked {
        return 0.0;
    }
    binomial(marked, found) * binomial(all - marked, drawn - found) / binomial(all, drawn)
}

/// Binomial coefficient, with `k` at most `n`.
fn binomial(n: usize, k: usize) -> f64 {
    (0..k.min(n - k)).fold(1.0, |product, i| product * (n - i) as f64 / (i + 1) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Half of 128 experts on the card, in times per expert without fixed parts.
    const LAYER: LayerExpertCounts =
        LayerExpertCounts { count: 128, on_card: 64, top_k: 8, bytes: 100 };

    fn times(bus: f64, host: f64, wait: f64) -> ExpertTimes {
        let each = |each| ExpertTime { fixed: 0.0, each };
        let (bus, host) = (each(bus), each(host));
        ExpertTimes { bytes: 100, bus, host, wait, ..ExpertTimes::default() }
    }

    #[test]
    fn a_line_goes_through_both_measurements() {
        assert_eq!(ExpertTime::through((1, 3.0), (5, 11.0)), ExpertTime { fixed: 1.0, each: 2.0 });
        // Noise gives no negative time.
        assert_eq!(ExpertTime::through((1, 4.0), (4, 4.0)), ExpertTime { fixed: 0.0, each: 1.0 });
        assert_eq!(ExpertTime::through((1, 1.0), (3, 6.0)), ExpertTime { fixed: 0.0, each: 2.5 });
    }

    #[test]
    fn expectations_are_those_of_drawing_without_replacement() {
        let sum: f64 = (0..=8).map(|found| hypergeometric(128, 64, 8, found)).sum();
        assert!((sum - 1.0).abs() < 1e-12);
        assert_eq!(hypergeometric(4, 2, 4, 2), 1.0);
        assert_eq!(hypergeometric(4, 2, 2, 2), 1.0 / 6.0);
        assert_eq!(hypergeometric(0, 0, 0, 0), 1.0);
        // Reading all: four experts of eight are on the host on average.
        assert!((times(1.0, 1.0, 9.0).of_layer(&LAYER, 0) - 4.0).abs() < 1e-12);
        // Computing all, after a wait.
        assert!((times(9.0, 2.0, 0.5).of_layer(&LAYER, 64) - 8.5).abs() < 1e-12);
        // Experts of twice the size.
        let large = LayerExpertCounts { bytes: 200, ..LAYER };
        assert!((times(1.0, 1.0, 9.0).of_layer(&large, 0) - 8.0).abs() < 1e-12);
    }

    #[test]
    fn both_sides_of_a_division_end_together() {
        // Equally fast, so half each.
        assert_eq!(times(1.0, 1.0, 0.0).computed(&LAYER), 32);
        // The faster side gets more: at least what makes both sides end together on average.
        let slow_bus = times(3.0, 1.0, 0.0).computed(&LAYER);
        assert!((40..64).contains(&slow_bus), "{slow_bus}");
        let slow_host = times(1.0, 1.5, 0.0).computed(&LAYER);
        assert!((1..32).contains(&slow_host), "{slow_host}");
        // One side is left out where a wait, or the spread of choices, costs more than it gains.
        assert_eq!(times(1.0, 1.0, 2.0).computed(&LAYER), 0);
        assert_eq!(times(1.0, 1000.0, 0.0).computed(&LAYER), 0);
        assert_eq!(times(1000.0, 1.0, 0.0).computed(&LAYER), 64);
        // Nor does a division pay where both sides share a bandwidth that either can use up.
        let shared = ExpertTimes { contention: 2.0, ..times(1.0, 1.0, 0.0) };
        assert_eq!(shared.computed(&LAYER), 0);
        let contended = ExpertTimes { contention: 1.2, ..times(1.0, 1.0, 0.0) };
        assert_eq!(contended.computed(&LAYER), 32);
        // Nothing is on the host.
        assert_eq!(times(1.0, 1.0, 0.0).computed(&LayerExpertCounts { on_card: 128, ..LAYER }), 0);
    }

    #[test]
    fn a_division_is_no_slower_than_either_side_alone() {
        for (bus, host) in [(1.0, 1.0), (2.0, 1.0), (1.0, 2.0), (7.0, 1.0)] {
            for on_card in [0, 10, 64, 120, 127] {
                let (times, layer) =
                    (times(bus, host, 0.1), LayerExpertCounts { on_card, ..LAYER });
                let time = |computed| times.of_layer(&layer, computed);
                let all = layer.count - on_card;
                let found = time(times.computed(&layer));
                assert!(
                    found <= time(0) && found <= time(all) * MIN_GAIN,
                    "{bus} {host} {on_card}"
                );
            }
        }
    }

    /// Times that a machine measured, places of its experts, and the speeds of both ways to compute
    /// the ones in host memory.
    struct RecordedMachine {
        times: ExpertTimes,
        /// Layers with as many experts on the card, of 128.
        layers: [(usize, usize); 2],
        /// Measured tokens per second.
        read: f64,
        compute: f64,
    }

    const fn us(fixed: f64, each: f64) -> ExpertTime {
        ExpertTime { fixed: fixed * 1e-6, each: each * 1e-6 }
    }

    /// An H200 with 16 cores on 2026-11-30: Qwen3-30B-A3B with 10 and 3 GiB of the card, then 24
    /// layers whose experts are used unevenly, with 5 GiB.
    fn recorded_machines() -> [RecordedMachine; 3] {
        let times = |card, bus, host, wait: f64, contention| {
            let (op, wait) = (5e-6, wait * 1e-6);
            ExpertTimes { bytes: 2_654_208, card, bus, host, wait, op, contention }
        };
        [
            RecordedMachine {
                times: times(us(0.0, 1.7), us(10.1, 56.0), us(0.0, 22.8), 73.8, 1.17),
                layers: [(25, 128), (23, 0)],
                read: 81.8,
                compute: 120.6,
            },
            RecordedMachine {
                times: times(us(9.7, 1.0), us(7.9, 58.2), us(0.0, 22.5), 111.5, 1.06),
                layers: [(5, 128), (43, 0)],
                read: 47.6,
                compute: 74.8,
            },
            RecordedMachine {
                times: times(us(11.5, 0.8), us(10.9, 55.6), us(0.0, 24.5), 105.4, 1.0),
                layers: [(24, 115), (0, 0)],
                read: 370.1,
                compute: 341.6,
            },
        ]
    }

    #[test]
    fn divisions_of_recorded_machines_are_no_slower_than_either_side() {
        for machine in recorded_machines() {
            let RecordedMachine { times, layers, read, compute } = machine;
            let seconds = |computed: &dyn Fn(&LayerExpertCounts) -> usize| -> f64 {
                let of_layers = layers.iter().map(|(count, on_card)| {
                    let layer =
                        LayerExpertCounts { on_card: *on_card, bytes: times.bytes, ..LAYER };
                    *count as f64 * times.of_layer(&layer, computed(&layer))
                });
                of_layers.sum()
            };
            let [reads, computes] = [seconds(&|_| 0), seconds(&LayerExpertCounts::on_host)];
            let divided = seconds(&|layer| times.computed(layer));
            assert!(divided <= reads && divided <= computes * MIN_GAIN, "{times:?}");
            // The faster way is the one that was measured to be.
            assert_eq!(computes < reads, compute > read, "{times:?}");
            assert_eq!(divided < reads, compute > read, "{times:?}");
        }
    }
}

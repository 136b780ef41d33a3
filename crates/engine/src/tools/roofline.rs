//! Roofline of decoding: lower bound on the time of a step, from the bytes it reads from memory and
//! disk and the bandwidth of both.

use moeflux_compute::KvFormat;
use moeflux_model::{
    blueprint::{Blueprint, GqaIndexer, LayerBlueprint, MixerBlueprint},
    checkpoint::MatrixSource,
};

/// Peak bandwidth of a machine, in bytes per second.
#[derive(Clone, Copy, Debug)]
pub struct RooflineLimits {
    /// Reading memory.
    pub memory: f64,
    /// Reading experts from disk.
    pub disk: f64,
}

/// Bytes that decoding one token reads, layer by layer.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct TokenCosts {
    layers: Vec<LayerCosts>,
    /// Bytes of the head and the norm before it.
    head: u64,
}

#[derive(Clone, Debug)]
struct LayerCosts {
    /// Bytes of mixer, norms and router; of a layer without experts, all its bytes.
    dense: u64,
    /// Bytes of the shared expert, which like hits is computed while misses are read.
    shared: u64,
    /// Bytes of one routed expert.
    expert: u64,
    top_k: usize,
    state: StateCosts,
}

/// Bytes of a layer's state that a token reads: `fixed + per_position * position`, at most `max`.
#[derive(Clone, Copy, Debug)]
struct StateCosts {
    fixed: u64,
    per_position: u64,
    max: u64,
}

/// Distinct experts of one layer in one step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExpertDemand {
    /// Experts that any row of the step chose.
    pub needed: u64,
    /// Of these, experts that are in no slot.
    pub missed: u64,
}

/// Lower bounds on the time of a step, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct MinimumTime {
    /// All weights and states are read from memory.
    pub compute: f64,
    /// All misses are read from disk.
    pub read: f64,
    /// Sum over layers: the dense part, then the larger of reading the layer's misses and computing
    /// its experts.
    pub streamed: f64,
}

impl MinimumTime {
    /// Bound with perfect prefetching: routing of all layers is known before the step.
    pub fn ideal(&self) -> f64 {
        self.compute.max(self.read)
    }

    /// Adds another time, component by component.
    pub fn add(&mut self, other: MinimumTime) {
        self.compute += other.compute;
        self.read += other.read;
        self.streamed += other.streamed;
    }
}

impl TokenCosts {
    /// Costs of a model on a device whose KV cache has the format `kv_format`.
    pub fn new(blueprint: &Blueprint, kv_format: KvFormat) -> Self {
        let bytes = |m: &MatrixSource| m.file_bytes() as u64;
        let head = blueprint.head.as_ref().unwrap_or(&blueprint.embed);
        let layers = blueprint.layers.iter().map(|layer| {
            let total = layer.matrices().into_iter().map(bytes).sum::<u64>()
                + layer.vectors().iter().map(|v| v.segment.bytes as u64).sum::<u64>();
            let moe = layer.moe();
            let shared = moe
                .and_then(|m| m.shared.as_ref())
                .map_or(0, |s| s.mlp.matrices().map(bytes).sum());
            LayerCosts {
                dense: total - shared,
                shared,
                expert: moe.map_or(0, |m| m.experts.file_bytes as u64),
                top_k: moe.map_or(0, |m| m.router.top_k),
                state: StateCosts::new(layer, blueprint.max_positions, kv_format),
            }
        });
        let norm = blueprint.output.vectors();
        let norm: u64 = norm.iter().map(|v| v.segment.bytes as u64).sum();
        Self { layers: layers.collect(), head: bytes(head) + norm }
    }

    /// Bytes that a token at position 0 reads from memory if every expert is a hit.
    pub fn bytes(&self) -> u64 {
        let layer = |l: &LayerCosts| l.dense + l.shared + l.expert * l.top_k as u64;
        self.head + self.layers.iter().map(layer).sum::<u64>()
    }

    /// Bytes of weights other than routed experts; a step reads them once for all its rows.
    pub fn dense_bytes(&self) -> u64 {
        self.head + self.layers.iter().map(|l| l.dense + l.shared).sum::<u64>()
    }

    /// Bytes that a token at `position` reads besides routed experts.
    pub(crate) fn resident_bytes(&self, position: usize) -> u64 {
        self.dense_bytes() + self.layers.iter().map(|l| l.state.bytes(position)).sum::<u64>()
    }

    /// Lower bound for a batched decode step with one token at each position, each in its own
    /// session.
    ///
    /// `experts(layer)` gives the step's distinct experts and misses of a layer.
    pub fn step(
        &self,
        limits: RooflineLimits,
        positions: &[usize],
        experts: impl Fn(usize) -> ExpertDemand,
    ) -> MinimumTime {
        self.sum(limits, positions, |layer, layer_time| layer_time(experts(layer)))
    }

    /// Expected lower bound for a token at `position`, if each expert is a hit with probability
    /// `hit_rate(layer)`, independently of the others.
    pub fn expected(
        &self,
        limits: RooflineLimits,
        position: usize,
        hit_rate: impl Fn(usize) -> f64,
    ) -> MinimumTime {
        self.sum(limits, &[position], |layer, layer_time| {
            let (n, miss) = (self.layers[layer].top_k, 1.0 - hit_rate(layer).clamp(0.0, 1.0));
            let mut expected = MinimumTime::default();
            for (missed, probability) in binomial(n, miss).into_iter().enumerate() {
                let demand = ExpertDemand { needed: n as u64, missed: missed as u64 };
                let MinimumTime { compute, read, streamed } = layer_time(demand);
                expected.add(MinimumTime {
                    compute: compute * probability,
                    read: read * probability,
                    streamed: streamed * probability,
                });
            }
            expected
        })
    }

    /// Time of the head plus that of all layers; `time(layer, layer_time)` gets a function from a
    /// layer's experts to its time.
    fn sum(
        &self,
        limits: RooflineLimits,
        positions: &[usize],
        time: impl Fn(usize, &dyn Fn(ExpertDemand) -> MinimumTime) -> MinimumTime,
    ) -> MinimumTime {
        let head = self.head as f64 / limits.memory;
        let mut total = MinimumTime { compute: head, read: 0.0, streamed: head };
        for (i, layer) in self.layers.iter().enumerate() {
            let states = positions.iter().map(|position| layer.state.bytes(*position)).sum::<u64>();
            let first = (layer.dense + states) as f64 / limits.memory;
            total.add(time(i, &|ExpertDemand { needed, missed }| {
                let experts = (layer.shared + needed * layer.expert) as f64 / limits.memory;
                let read = (missed.min(needed) * layer.expert) as f64 / limits.disk;
                MinimumTime { compute: first + experts, read, streamed: first + experts.max(read) }
            }));
        }
        total
    }
}

impl StateCosts {
    fn new(layer: &LayerBlueprint, max_positions: usize, kv_format: KvFormat) -> Self {
        let bytes = |positions: usize| {
            layer.states(positions, 1).iter().map(|s| s.bytes(kv_format)).sum::<u64>()
        };
        let per_position = bytes(2) - bytes(1);
        // Sparse attention reads the chosen positions; the keys of its indexer are not counted.
        let window = match layer.mixer() {
            Some(MixerBlueprint::Mla(mla)) => mla.sparse.as_ref().map(|s| s.top_k),
            Some(MixerBlueprint::Gqa(gqa)) => gqa.indexer.as_ref().map(GqaIndexer::positions),
            Some(
                MixerBlueprint::Compressed(_)
                | MixerBlueprint::DeltaNet(_)
                | MixerBlueprint::Mamba2(_)
                | MixerBlueprint::ShortConv(_),
            )
            | None => None,
        };
        Self {
            fixed: bytes(1) - per_position,
            per_position,
            max: bytes(window.unwrap_or(max_positions).max(1)),
        }
    }

    fn bytes(&self, position: usize) -> u64 {
        (self.fixed + self.per_position.saturating_mul(position as u64)).min(self.max)
    }
}

/// Binomial distribution: probabilities of 0 to `n` successes.
fn binomial(n: usize, probability: f64) -> Vec<f64> {
    let mut distribution = vec![0.0; n + 1];
    distribution[0] = 1.0;
    for i in 0..n {
        for k in (0..=i + 1).rev() {
            let success = if k > 0 { distribution[k - 1] * probability } else { 0.0 };
            distribution[k] = distribution[k] * (1.0 - probability) + success;
        }
    }
    distribution
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: RooflineLimits = RooflineLimits { memory: 100.0, disk: 10.0 };

    /// Two layers with experts of 20 bytes, k = 4: dense weights take 1 s, the shared expert 0.2 s,
    /// the head 2 s.
    fn costs() -> TokenCosts {
        let layer = |per_position| LayerCosts {
            dense: 100,
            shared: 20,
            expert: 20,
            top_k: 4,
            state: StateCosts { fixed: 10, per_position, max: 60 },
        };
        TokenCosts { layers: vec![layer(0), layer(5)], head: 200 }
    }

    fn demand(needed: u64, missed: u64) -> ExpertDemand {
        ExpertDemand { needed, missed }
    }

    fn close(a: MinimumTime, b: [f64; 3]) {
        for (a, b) in [a.compute, a.read, a.streamed].into_iter().zip(b) {
            assert!((a - b).abs() < 1e-9, "{a} {b}");
        }
    }

    #[test]
    fn a_token_takes_its_layers_one_after_another() {
        // 2 + 2 * (1.1 + 0.2 + 0.8), no reads.
        close(costs().step(LIMITS, &[0], |_| demand(4, 0)), [6.2, 0.0, 6.2]);
        // The second layer has one miss: 2 s of reading hide 0.2 + 0.8 s of compute.
        close(
            costs().step(LIMITS, &[0], |layer| demand(4, layer as u64)),
            [6.2, 2.0, 2.0 + 2.1 + 1.1 + 2.0],
        );
        // The sum of maxima is not the maximum of the sums.
        let all_missed = costs().step(LIMITS, &[0], |_| demand(4, 9));
        close(all_missed, [6.2, 16.0, 2.0 + 2.2 + 16.0]);
        assert_eq!(all_missed.ideal(), 16.0);
        assert_eq!((costs().bytes(), costs().dense_bytes()), (200 + 2 * 200, 200 + 2 * 120));
    }

    #[test]
    fn a_longer_context_costs_its_state_up_to_the_window() {
        let compute = |position| costs().step(LIMITS, &[position], |_| demand(4, 0)).compute;
        assert!((compute(4) - compute(0) - 0.2).abs() < 1e-9);
        assert!((compute(1 << 20) - compute(0) - 0.5).abs() < 1e-9);
    }

    #[test]
    fn a_step_reads_weights_once_and_the_state_of_each_session() {
        // 2 + 2 * (1.0 + 0.2 + 7 * 0.2), and states of 10, 10, 10 and 20 bytes.
        close(costs().step(LIMITS, &[0, 2], |_| demand(7, 0)), [7.7, 0.0, 7.7]);
        // The second layer reads two of its seven experts: 4 s of reading hide 1.6 s.
        let missed = costs().step(LIMITS, &[0, 2], |layer| demand(7, 2 * layer as u64));
        close(missed, [7.7, 4.0, 7.7 + 4.0 - 1.6]);
    }

    #[test]
    fn an_expectation_is_taken_over_the_number_of_misses() {
        assert_eq!(binomial(0, 0.3), [1.0]);
        assert_eq!(binomial(2, 0.5), [0.25, 0.5, 0.25]);
        for (hit, missed) in [(1.0, 0), (0.0, 4)] {
            assert_eq!(
                costs().expected(LIMITS, 0, |_| hit),
                costs().step(LIMITS, &[0], |_| demand(4, missed))
            );
        }
        // With probability 1/16 there is no miss, and 0.2 + 0.8 s of compute are not hidden.
        let half = costs().expected(LIMITS, 0, |_| 0.5);
        close(half, [6.2, 8.0, 2.0 + 2.2 + 2.0 * (1.0 / 16.0 + 4.0)]);
    }

    #[test]
    fn the_built_in_model_reads_what_inspect_says() {
        let checkpoint =
            moeflux_model::checkpoint::Checkpoint::embedded(&moeflux_tales::FILES).unwrap();
        let blueprint = Blueprint::for_checkpoint(&checkpoint).unwrap();
        let costs = TokenCosts::new(&blueprint, KvFormat::F16);
        let dense: u64 = blueprint.matrices().map(|m| m.file_bytes() as u64).sum();
        let embed = blueprint.embed.file_bytes() as u64;
        let embed = if blueprint.head.is_some() { embed } else { 0 };
        let vectors: u64 = blueprint.vectors().map(|v| v.segment.bytes as u64).sum();
        assert_eq!(costs.bytes(), dense - embed + vectors + blueprint.experts_per_token_bytes());
        // Six of the eight layers are recurrent: their state has a fixed size.
        assert_eq!(costs.layers.iter().filter(|l| l.state.per_position == 0).count(), 6);
        let each = |keys| {
            TokenCosts::new(&blueprint, keys)
                .layers
                .iter()
                .map(|l| l.state.per_position)
                .sum::<u64>()
        };
        let [whole, half, bytes] = [KvFormat::F32, KvFormat::F16, KvFormat::Q8].map(each);
        assert_eq!((whole, half), (2 * half, 2 * bytes * 16 / 17));
    }
}

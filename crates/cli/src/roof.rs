//! The least time that a token can take: what must be read from memory and disk, at the speed of both.

use moeflux::{Blueprint, KvFormat, LayerBlueprint, MixerBlueprint};

/// Bytes per second that the machine gives at best.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) memory: f64,
    pub(crate) disk: f64,
}

/// What one token reads, layer by layer.
pub(crate) struct Costs {
    layers: Vec<Layer>,
    /// Bytes of the head and the norm before it.
    head: u64,
}

struct Layer {
    /// Bytes of mixer, norms and router, or of all that a layer without experts has.
    dense: u64,
    /// Bytes of the shared expert: like hits it can be computed while misses are read.
    shared: u64,
    /// Bytes of one routed expert.
    expert: u64,
    top_k: usize,
    state: State,
}

/// Bytes of a layer's state that a token reads: `fixed`, and `each` per position, at most `most`.
struct State {
    fixed: u64,
    each: u64,
    most: u64,
}

/// Seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Least {
    /// All weights and states read from memory.
    pub(crate) compute: f64,
    /// All misses read from disk.
    pub(crate) read: f64,
    /// Of each layer what must come first, then its misses read while shared expert, hits and arrivals are computed.
    pub(crate) streamed: f64,
}

impl Least {
    /// Reads that know the routers' choices of all layers beforehand.
    pub(crate) fn ideal(&self) -> f64 {
        self.compute.max(self.read)
    }

    pub(crate) fn add(&mut self, more: Least) {
        self.compute += more.compute;
        self.read += more.read;
        self.streamed += more.streamed;
    }
}

impl Costs {
    /// On a device that keeps keys and values as `keys`.
    pub(crate) fn of(blueprint: &Blueprint, keys: KvFormat) -> Self {
        let bytes =
            |m: &moeflux::MatrixSource| m.segments.iter().map(|s| s.bytes as u64).sum::<u64>();
        let head = blueprint.head.as_ref().unwrap_or(&blueprint.embed);
        let layers = blueprint.layers.iter().map(|layer| {
            let all = layer.matrices().into_iter().map(bytes).sum::<u64>()
                + layer.vectors().iter().map(|v| v.segment.bytes as u64).sum::<u64>();
            let moe = layer.moe();
            let shared = moe.and_then(|m| m.shared.as_ref()).map_or(0, |s| {
                [&s.mlp.gate_proj, &s.mlp.up_proj, &s.mlp.down_proj].into_iter().map(bytes).sum()
            });
            Layer {
                dense: all - shared,
                shared,
                expert: moe.map_or(0, |m| m.experts.bytes as u64),
                top_k: moe.map_or(0, |m| m.router.top_k),
                state: State::of(layer, blueprint.max_positions, keys),
            }
        });
        Self { layers: layers.collect(), head: bytes(head) + blueprint.norm.segment.bytes as u64 }
    }

    /// The bytes that a token without context reads from memory if no expert is missing.
    pub(crate) fn bytes(&self) -> u64 {
        let layer = |l: &Layer| l.dense + l.shared + l.expert * l.top_k as u64;
        self.head + self.layers.iter().map(layer).sum::<u64>()
    }

    /// Of these bytes, all that are not of routed experts, whatever else shares the step.
    pub(crate) fn dense(&self) -> u64 {
        self.head + self.layers.iter().map(|l| l.dense + l.shared).sum::<u64>()
    }

    /// The time of a step with a token at each of some positions, in sessions of their own, of whose layers `experts` tells how many
    /// experts they need, each counted once, and how many of these they miss.
    pub(crate) fn step(
        &self,
        limits: Limits,
        positions: &[usize],
        experts: impl Fn(usize) -> [u64; 2],
    ) -> Least {
        self.sum(limits, positions, |layer, of_layer| of_layer(experts(layer)))
    }

    /// The time of a token at `position` on average, where each expert is in memory with probability `hit(layer)`, whatever
    /// the others are.
    pub(crate) fn expected(
        &self,
        limits: Limits,
        position: usize,
        hit: impl Fn(usize) -> f64,
    ) -> Least {
        self.sum(limits, &[position], |layer, of_layer| {
            let (n, miss) = (self.layers[layer].top_k, 1.0 - hit(layer).clamp(0.0, 1.0));
            let mut all = Least::default();
            for (missed, probability) in binomial(n, miss).into_iter().enumerate() {
                let Least { compute, read, streamed } = of_layer([n as u64, missed as u64]);
                all.add(Least {
                    compute: compute * probability,
                    read: read * probability,
                    streamed: streamed * probability,
                });
            }
            all
        })
    }

    /// Head and all layers; `each` is told a layer and how long it takes with so many experts and misses.
    fn sum(
        &self,
        limits: Limits,
        positions: &[usize],
        each: impl Fn(usize, &dyn Fn([u64; 2]) -> Least) -> Least,
    ) -> Least {
        let head = self.head as f64 / limits.memory;
        let mut all = Least { compute: head, read: 0.0, streamed: head };
        for (i, layer) in self.layers.iter().enumerate() {
            let states = positions.iter().map(|position| layer.state.bytes(*position)).sum::<u64>();
            let first = (layer.dense + states) as f64 / limits.memory;
            all.add(each(i, &|[needed, missed]| {
                let experts = (layer.shared + needed * layer.expert) as f64 / limits.memory;
                let read = (missed.min(needed) * layer.expert) as f64 / limits.disk;
                Least { compute: first + experts, read, streamed: first + experts.max(read) }
            }));
        }
        all
    }
}

impl State {
    fn of(layer: &LayerBlueprint, max_positions: usize, keys: KvFormat) -> Self {
        let bytes = |positions: usize| {
            layer.states(positions, 1).iter().map(|s| s.bytes(keys)).sum::<u64>()
        };
        let each = bytes(2) - bytes(1);
        // Of sparse attention, what its indexer reads is left out.
        let most = match &layer.mixer {
            MixerBlueprint::Mla(mla) => mla.sparse.as_ref().map(|s| s.top_k),
            _ => None,
        };
        Self { fixed: bytes(1) - each, each, most: bytes(most.unwrap_or(max_positions).max(1)) }
    }

    fn bytes(&self, position: usize) -> u64 {
        (self.fixed + self.each.saturating_mul(position as u64)).min(self.most)
    }
}

/// The probability of 0 to `n` successes.
fn binomial(n: usize, probability: f64) -> Vec<f64> {
    let mut all = vec![0.0; n + 1];
    all[0] = 1.0;
    for i in 0..n {
        for k in (0..=i + 1).rev() {
            let one_more = if k > 0 { all[k - 1] * probability } else { 0.0 };
            all[k] = all[k] * (1.0 - probability) + one_more;
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { memory: 100.0, disk: 10.0 };

    /// Two layers with experts of 20 bytes, k = 4: 1 second of dense weights, 0.2 of shared expert; a head of 2 seconds.
    fn costs() -> Costs {
        let layer = |each| Layer {
            dense: 100,
            shared: 20,
            expert: 20,
            top_k: 4,
            state: State { fixed: 10, each, most: 60 },
        };
        Costs { layers: vec![layer(0), layer(5)], head: 200 }
    }

    fn close(a: Least, b: [f64; 3]) {
        for (a, b) in [a.compute, a.read, a.streamed].into_iter().zip(b) {
            assert!((a - b).abs() < 1e-9, "{a} {b}");
        }
    }

    #[test]
    fn a_token_takes_its_layers_one_after_another() {
        // 2 + 2 * (1.1 + 0.2 + 0.8), no reads.
        close(costs().step(LIMITS, &[0], |_| [4, 0]), [6.2, 0.0, 6.2]);
        // The second layer misses one: 2 seconds of reading hide 0.2 + 0.8 of computing.
        close(
            costs().step(LIMITS, &[0], |layer| [4, layer as u64]),
            [6.2, 2.0, 2.0 + 2.1 + 1.1 + 2.0],
        );
        // The sum of the larger is not the larger sum.
        let all_missed = costs().step(LIMITS, &[0], |_| [4, 9]);
        close(all_missed, [6.2, 16.0, 2.0 + 2.2 + 16.0]);
        assert_eq!(all_missed.ideal(), 16.0);
        assert_eq!((costs().bytes(), costs().dense()), (200 + 2 * 200, 200 + 2 * 120));
    }

    #[test]
    fn a_longer_context_costs_its_state_up_to_the_window() {
        let compute = |position| costs().step(LIMITS, &[position], |_| [4, 0]).compute;
        assert!((compute(4) - compute(0) - 0.2).abs() < 1e-9);
        assert!((compute(1 << 20) - compute(0) - 0.5).abs() < 1e-9);
    }

    #[test]
    fn a_step_reads_weights_once_and_the_state_of_each_session() {
        // 2 + 2 * (1.0 + 0.2 + 7 * 0.2), and states of 10, 10, 10 and 20 bytes.
        close(costs().step(LIMITS, &[0, 2], |_| [7, 0]), [7.7, 0.0, 7.7]);
        // The second layer reads two of its seven: 4 seconds hide 1.6.
        let missed = costs().step(LIMITS, &[0, 2], |layer| [7, 2 * layer as u64]);
        close(missed, [7.7, 4.0, 7.7 + 4.0 - 1.6]);
    }

    #[test]
    fn an_expectation_is_taken_over_the_number_of_misses() {
        assert_eq!(binomial(0, 0.3), [1.0]);
        assert_eq!(binomial(2, 0.5), [0.25, 0.5, 0.25]);
        for (hit, missed) in [(1.0, 0), (0.0, 4)] {
            assert_eq!(
                costs().expected(LIMITS, 0, |_| hit),
                costs().step(LIMITS, &[0], |_| [4, missed])
            );
        }
        // With probability 1/16 nothing is missed, and 0.2 + 0.8 of computing are not hidden by 0 of reading.
        let half = costs().expected(LIMITS, 0, |_| 0.5);
        close(half, [6.2, 8.0, 2.0 + 2.2 + 2.0 * (1.0 / 16.0 + 4.0)]);
    }

    #[test]
    fn the_built_in_model_reads_what_inspect_says() {
        let checkpoint = moeflux::Checkpoint::embedded().unwrap();
        let blueprint = Blueprint::for_checkpoint(&checkpoint).unwrap();
        let costs = Costs::of(&blueprint, KvFormat::F16);
        let dense: u64 =
            blueprint.matrices().flat_map(|m| &m.segments).map(|s| s.bytes as u64).sum();
        let embed: u64 = blueprint.embed.segments.iter().map(|s| s.bytes as u64).sum();
        let embed = if blueprint.head.is_some() { embed } else { 0 };
        let vectors: u64 = blueprint.vectors().map(|v| v.segment.bytes as u64).sum();
        assert_eq!(costs.bytes(), dense - embed + vectors + blueprint.experts_per_token_bytes());
        // Six of eight layers have a state of fixed size.
        assert_eq!(costs.layers.iter().filter(|l| l.state.each == 0).count(), 6);
        let each =
            |keys| Costs::of(&blueprint, keys).layers.iter().map(|l| l.state.each).sum::<u64>();
        let [whole, half, bytes] = [KvFormat::F32, KvFormat::F16, KvFormat::Q8].map(each);
        assert_eq!((whole, half), (2 * half, 2 * bytes * 16 / 17));
    }
}

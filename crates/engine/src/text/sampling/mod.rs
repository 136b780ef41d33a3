//! From logits to a token, and from tokens to the end of an answer.

mod generation;
mod rng;
mod stop;
#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};

pub use generation::{EndTokens, GenerationConfig};
pub use stop::{StopResult, StopStrings};

use moeflux_compute::{LogitTally, LogitWeights, MAX_TOP_LOGITS, logits_between, logits_extent};

use crate::base::error::Error;
use rng::Rng;

/// Numbers of candidates that are asked for. Few, because a device may compile a kernel for each.
const CANDIDATES: [usize; 4] = [1, 64, 256, MAX_TOP_LOGITS];

/// How many candidates there mostly are above a `min_p`.
const OFTEN_ABOVE: usize = 64;

/// How many more candidates are asked for than are needed, at most, because penalties may put them back. More are certain
/// to be enough, but so many nearly always are.
const OFTEN_PUT_BACK: usize = 128;

/// How a token is chosen. The default takes the model's own distribution: temperature 1, all else off.
///
/// Applied in this order, as in `transformers` and vLLM: repetition penalty, presence and frequency penalty, temperature,
/// top-k, top-p, min-p. Tokens are ranked by their logit; of equal logits the lower id comes first.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Sampling {
    /// Divides the logits; 0 or more. 0 always takes the first in rank (greedy). Default 1.
    pub temperature: f32,
    /// Only the first `top_k` in rank; 0 is all. Default 0.
    pub top_k: usize,
    /// Only the shortest run of ranks, of those that top-k left, whose probability reaches `top_p`; in (0, 1], 1 is all.
    /// Default 1.
    pub top_p: f32,
    /// Only tokens at least `min_p` times as probable as the first in rank; in [0, 1], 0 is all. Default 0.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens in the prompt or the answer so far; above 0. Default 1
    /// (none).
    pub repetition_penalty: f32,
    /// Is subtracted from the logits of tokens in the answer so far; in [-2, 2]. Default 0.
    pub presence_penalty: f32,
    /// Is subtracted for each time that the token is in the answer so far; in [-2, 2]. Default 0.
    pub frequency_penalty: f32,
    /// The same seed and the same logits choose the same tokens, on every platform. Default 0.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Sampling {
        Sampling {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            seed: 0,
        }
    }
}

impl Sampling {
    /// Always the most probable token.
    pub fn greedy() -> Sampling {
        Sampling { temperature: 0.0, ..Sampling::default() }
    }

    /// Whether all values are in their ranges.
    ///
    /// # Errors
    /// [`Error::Input`] names the first that is not.
    pub fn validate(&self) -> Result<(), Error> {
        let finite = f32::MIN..=f32::MAX;
        let checks = [
            (
                "temperature",
                self.temperature,
                self.temperature >= 0.0,
                "must be 0 (greedy) or more",
            ),
            (
                "top_p",
                self.top_p,
                self.top_p > 0.0 && self.top_p <= 1.0,
                "must be above 0 and at most 1 (off)",
            ),
            ("min_p", self.min_p, (0.0..=1.0).contains(&self.min_p), "must be from 0 (off) to 1"),
            (
                "repetition_penalty",
                self.repetition_penalty,
                self.repetition_penalty > 0.0,
                "must be above 0; 1 is off",
            ),
            (
                "presence_penalty",
                self.presence_penalty,
                (-2.0..=2.0).contains(&self.presence_penalty),
                "must be from -2 to 2; 0 is off",
            ),
            (
                "frequency_penalty",
                self.frequency_penalty,
                (-2.0..=2.0).contains(&self.frequency_penalty),
                "must be from -2 to 2; 0 is off",
            ),
        ];
        match checks.iter().find(|(_, value, legal, _)| !legal || !finite.contains(value)) {
            Some((name, value, _, rule)) => {
                Err(Error::Input(format!("{name} is {value}: it {rule}")))
            }
            None => Ok(()),
        }
    }

    /// Whether a penalty may put a token further to the front.
    fn rewards(&self) -> bool {
        self.repetition_penalty < 1.0 || self.presence_penalty < 0.0 || self.frequency_penalty < 0.0
    }

    fn penalises(&self) -> bool {
        self.repetition_penalty != 1.0
            || self.presence_penalty != 0.0
            || self.frequency_penalty != 0.0
    }
}

/// Chooses tokens for one answer. Allocates only when it is made.
#[derive(Clone, Debug)]
pub struct Sampler {
    sampling: Sampling,
    rng: Rng,
    vocab: usize,
    /// Of tokens that are looked at one by one: see [`rank_key`].
    keys: Vec<u64>,
    /// All logits after penalties, if there are any.
    penalised: Vec<f32>,
    /// What all tokens weigh, by how probable they are.
    tally: LogitTally,
    /// How often the answer has each id; empty when nothing is penalised.
    counts: Vec<u32>,
    /// Every id of prompt and answer, once, in order of appearance.
    seen: Vec<u32>,
    is_seen: Vec<bool>,
}

impl Sampler {
    /// A sampler for logits of `vocab` tokens.
    ///
    /// # Errors
    /// [`Error::Input`] when a value of `sampling` is out of its range, or there are no tokens.
    pub fn new(sampling: Sampling, vocab: usize) -> Result<Sampler, Error> {
        sampling.validate()?;
        if vocab == 0 || u32::try_from(vocab).is_err() {
            return Err(Error::Input(format!("cannot sample from a vocabulary of {vocab} tokens")));
        }
        let tracked = if sampling.penalises() { vocab } else { 0 };
        Ok(Sampler {
            rng: Rng::new(sampling.seed),
            sampling,
            vocab,
            keys: Vec::with_capacity(vocab),
            penalised: Vec::with_capacity(tracked),
            tally: LogitTally::new(),
            counts: vec![0; tracked],
            seen: Vec::with_capacity(tracked),
            is_seen: vec![false; tracked],
        })
    }

    /// Records the prompt, for the repetition penalty. Ids outside of the vocabulary are ignored.
    pub fn prompt(&mut self, ids: &[u32]) {
        ids.iter().for_each(|&id| self.see(id));
    }

    /// Records a token of the answer that was not chosen by [`sample`](Sampler::sample).
    pub fn accept(&mut self, id: u32) {
        self.see(id);
        if let Some(count) = self.counts.get_mut(id as usize) {
            *count = count.saturating_add(1);
        }
    }

    /// Chooses the next token of the answer from `logits`, one per token of the vocabulary, and records it. A logit of
    /// minus infinity bans its token.
    ///
    /// # Errors
    /// [`Error::Input`] when there are more or fewer logits than tokens, one is NaN or plus infinity, or all tokens
    /// are banned.
    pub fn sample(&mut self, logits: &[f32]) -> Result<u32, Error> {
        self.check_number(logits)?;
        if self.seen.is_empty() {
            let extent = extent(logits, logits)?;
            return Ok(self.choose_of_all(logits, extent));
        }
        let mut penalised = std::mem::take(&mut self.penalised);
        self.penalise(logits, &mut penalised);
        let id = extent(&penalised, logits).map(|extent| self.choose_of_all(&penalised, extent));
        self.penalised = penalised;
        id
    }

    /// How many of the first tokens in rank of `vocab`, before penalties, are likely to be all that
    /// [`choose_among`](Sampler::choose_among) looks at; `None` where that takes all logits, or they are of another number.
    ///
    /// Greedy and top-k look at as many as they keep, and at one more for each token that a penalty may put back. min-p
    /// without top-k ends early as a rule. All logits are looked at by top-p without top-k, which is a share of the whole,
    /// by sampling without a filter, and where a negative penalty may put any token to the front.
    pub(crate) fn candidates(&self, vocab: usize) -> Option<usize> {
        let Sampling { temperature, top_k, top_p, min_p, .. } = self.sampling;
        let needed = match top_k {
            _ if temperature == 0.0 => 1,
            0 if top_p == 1.0 && min_p > 0.0 => OFTEN_ABOVE,
            0 => return None,
            k => k,
        };
        if self.sampling.rewards() {
            return None;
        }
        let asked = needed.saturating_add(self.seen.len().min(OFTEN_PUT_BACK));
        let size = CANDIDATES.into_iter().find(|n| *n >= asked).unwrap_or(MAX_TOP_LOGITS);
        Some(size).filter(|n| needed <= *n && *n < vocab && vocab == self.vocab)
    }

    /// As [`Sampler::sample`] of all logits, which need not be known: `ids` and `logits` are the first tokens in rank, fewer
    /// than there are, as [`Op::TopLogits`](moeflux_compute::Op::TopLogits) names them. `None` where that depends on further
    /// ones; nothing has changed then.
    ///
    /// # Errors
    /// As [`Sampler::sample`].
    pub(crate) fn choose_among(
        &mut self,
        ids: &[f32],
        logits: &[f32],
    ) -> Result<Option<u32>, Error> {
        if self.sampling.rewards() {
            return Ok(None);
        }
        self.keys.clear();
        let Some(last) = ids.len().checked_sub(1) else { return Ok(None) };
        legal(ids[0] as usize, logits[0])?;
        if logits[0] == f32::NEG_INFINITY {
            return Err(all_banned());
        }
        // Of the others, and of those that a penalty has put behind, none is known to come next.
        let last = rank_key(logits[last], ids[last] as u32);
        for (&id, &logit) in ids.iter().zip(logits) {
            let at = id as usize;
            let seen = self.is_seen.get(at).is_some_and(|seen| *seen);
            let logit = if seen { self.penalised(logit, self.counts[at]) } else { logit };
            let key = rank_key(logit, id as u32);
            if key <= last {
                self.keys.push(key);
            }
        }
        Ok(self.choose())
    }

    /// Chooses among the tokens in `keys` and records the choice; `None` where it depends on others.
    fn choose(&mut self) -> Option<u32> {
        let id = match self.sampling.temperature {
            0.0 => id_of(self.keys.iter().copied().min()?),
            _ => {
                // What is drawn counts only once a token is chosen by it.
                let mut rng = self.rng.clone();
                let uniform = rng.uniform();
                let (mut ranked, mass) = self.filtered()?;
                let id = ranked.draw(part(mass, uniform));
                self.rng = rng;
                id
            }
        };
        self.accept(id);
        Some(id)
    }

    /// Chooses among all tokens, after penalties, and records the choice. `extent` is the largest logit and the least one.
    fn choose_of_all(&mut self, logits: &[f32], extent: [f32; 2]) -> u32 {
        let Sampling { temperature, top_k, .. } = self.sampling;
        let id = if temperature == 0.0 {
            logits.iter().position(|logit| *logit == extent[0]).unwrap_or_default() as u32
        } else if top_k > 0 {
            self.keys.clear();
            self.keys.extend(logits.iter().zip(0..).map(|(&logit, id)| rank_key(logit, id)));
            // Nothing is missing where all tokens are ranked.
            return self.choose().unwrap_or_default();
        } else {
            let weights = LogitWeights::new(extent[0], temperature);
            let mass = self.kept(logits, extent, weights);
            let target = part(mass, self.rng.uniform());
            self.reached(logits, weights, target + 1).0
        };
        self.accept(id);
        id
    }

    /// The weight of the tokens that top-p and min-p leave of all. They keep a run of ranks from the first on, so the shortest
    /// run wins.
    fn kept(&mut self, logits: &[f32], extent: [f32; 2], weights: LogitWeights) -> u128 {
        let (top_p, min_p) = (f64::from(self.sampling.top_p), f64::from(self.sampling.min_p));
        let least = weights.least(min_p);
        if top_p == 1.0 {
            self.tally.fill(weights, logits, extent, least);
            return self.tally.sum();
        }
        // A share of the whole, whatever min-p leaves of it.
        self.tally.fill(weights, logits, extent, f32::NEG_INFINITY);
        let enough = enough(self.tally.sum(), top_p);
        let (_, kept) = self.reached(logits, weights, enough);
        if min_p > 0.0 { kept.min(self.tally.sum_from(logits, least)) } else { kept }
    }

    /// The token with which the weights, in rank order, reach `target`, or else the last one that weighs anything; and their sum
    /// up to it.
    fn reached(&mut self, logits: &[f32], weights: LogitWeights, target: u128) -> (u32, u128) {
        let (range, mut mass) = self.tally.reaching(target);
        self.keys.clear();
        logits_between(logits, &range, |id, logit| self.keys.push(rank_key(logit, id as u32)));
        self.keys.sort_unstable();
        let (mut last, mut of_logit) = (0, (f32::NAN, 0));
        for key in &self.keys {
            let logit = logit_of(*key);
            if logit != of_logit.0 {
                of_logit = (logit, u128::from(weights.units(logit)));
            }
            last = id_of(*key);
            mass += of_logit.1;
            if mass >= target {
                break;
            }
        }
        (last, mass)
    }

    fn see(&mut self, id: u32) {
        if let Some(seen) = self.is_seen.get_mut(id as usize)
            && !*seen
        {
            *seen = true;
            self.seen.push(id);
        }
    }

    fn check_number(&self, logits: &[f32]) -> Result<(), Error> {
        if logits.len() == self.vocab {
            return Ok(());
        }
        let (vocab, given) = (self.vocab, logits.len());
        Err(Error::Input(format!("{given} logits for a vocabulary of {vocab} tokens")))
    }

    /// Fills `to` with the penalised logits; what is no number stays so.
    fn penalise(&self, logits: &[f32], to: &mut Vec<f32>) {
        to.clear();
        to.extend_from_slice(logits);
        for &id in &self.seen {
            let at = id as usize;
            to[at] = self.penalised(logits[at], self.counts[at]);
        }
    }

    fn penalised(&self, logit: f32, count: u32) -> f32 {
        let Sampling { repetition_penalty, presence_penalty, frequency_penalty, .. } =
            self.sampling;
        if logit.is_infinite() {
            return logit;
        }
        let mut logit =
            if logit > 0.0 { logit / repetition_penalty } else { logit * repetition_penalty };
        if count > 0 {
            logit -= presence_penalty + frequency_penalty * count as f32;
        }
        // Extreme penalties overflow, and must neither ban a token nor make NaN.
        logit.clamp(f32::MIN, f32::MAX)
    }

    /// The tokens in `keys` that the filters leave, and the sum of their weights; `None` where they leave some that are not in
    /// `keys`.
    fn filtered(&mut self) -> Option<(Ranked<'_>, u128)> {
        let Sampling { top_k, top_p, min_p, temperature, .. } = self.sampling;
        let (top_p, min_p) = (f64::from(top_p), f64::from(min_p));
        let mut ranked = Ranked::new(&mut self.keys, self.vocab, temperature);
        if top_k > 0 {
            ranked.len = ranked.len.min(top_k);
        }
        // All filters keep a run of ranks from the first on, so the shortest run wins.
        let mass = if top_p < 1.0 || min_p > 0.0 {
            let enough = if top_p < 1.0 { enough(ranked.mass()?, top_p) } else { u128::MAX };
            let least = ranked.weights.least(min_p);
            let (mass, len) = ranked.run(enough, least)?;
            ranked.len = len;
            mass
        } else {
            ranked.mass()?
        };
        Some((ranked, mass))
    }
}

/// Tokens in rank order, sorted only as far as they are looked at.
struct Ranked<'a> {
    /// Of all tokens, or of the first in rank.
    keys: &'a mut [u64],
    /// How many of `keys` are in their place.
    sorted: usize,
    /// How many are candidates.
    len: usize,
    weights: LogitWeights,
}

impl Ranked<'_> {
    fn new(keys: &mut [u64], vocab: usize, temperature: f32) -> Ranked<'_> {
        let largest = keys.iter().copied().min().map_or(0.0, logit_of);
        Ranked { keys, sorted: 0, len: vocab, weights: LogitWeights::new(largest, temperature) }
    }

    fn key(&mut self, rank: usize) -> Option<u64> {
        if rank >= self.keys.len() {
            return None;
        }
        while rank >= self.sorted {
            let rest = &mut self.keys[self.sorted..];
            let more = (3 * self.sorted).max(64).min(rest.len());
            if more < rest.len() {
                rest.select_nth_unstable(more);
            }
            rest[..more].sort_unstable();
            self.sorted += more;
        }
        Some(self.keys[rank])
    }

    /// The sum of all candidates' weights.
    fn mass(&mut self) -> Option<u128> {
        if self.len < self.keys.len() {
            self.key(self.len)?;
        }
        let candidates = self.keys.get(..self.len)?;
        Some(candidates.iter().map(|key| u128::from(self.weights.units(logit_of(*key)))).sum())
    }

    /// The longest run of candidates that ends where the weights reach `enough` or the logits fall below `least`: its mass
    /// and length.
    fn run(&mut self, enough: u128, least: f32) -> Option<(u128, usize)> {
        let mut mass = 0;
        for rank in 0..self.len {
            let logit = logit_of(self.key(rank)?);
            if logit < least {
                return Some((mass, rank));
            }
            mass += u128::from(self.weights.units(logit));
            if mass >= enough {
                return Some((mass, rank + 1));
            }
        }
        Some((mass, self.len))
    }

    /// The candidate at which the weights pass `target`.
    fn draw(&mut self, target: u128) -> u32 {
        let (mut id, mut mass) = (0, 0);
        for rank in 0..self.len {
            let Some(key) = self.key(rank) else { break };
            let units = u128::from(self.weights.units(logit_of(key)));
            // Rounding may leave `target` out of reach: then the last possible token is it.
            if units == 0 {
                break;
            }
            id = id_of(key);
            mass += units;
            if mass > target {
                break;
            }
        }
        id
    }
}

/// A part of a sum of weights.
fn part(mass: u128, share: f64) -> u128 {
    (mass as f64 * share) as u128
}

/// The least sum of weights that reaches a share of the whole.
fn enough(mass: u128, share: f64) -> u128 {
    (mass as f64 * share).ceil() as u128
}

/// The largest and the least of the logits that are chosen by, of which there are some. Those that are no numbers are named as
/// they were `given`.
fn extent(logits: &[f32], given: &[f32]) -> Result<[f32; 2], Error> {
    match logits_extent(logits) {
        Some([f32::NEG_INFINITY, _]) => Err(all_banned()),
        Some(extent) => Ok(extent),
        None => Err((0..)
            .zip(given)
            .find_map(|(id, logit)| legal(id, *logit).err())
            .unwrap_or_else(all_banned)),
    }
}

/// Refuses a logit that is no number or the largest of all.
fn legal(id: usize, logit: f32) -> Result<(), Error> {
    if logit < f32::INFINITY {
        return Ok(());
    }
    Err(Error::Input(format!(
        "the logit of token {id} is {logit}; the model's weights may be damaged"
    )))
}

fn all_banned() -> Error {
    Error::Input("all tokens are banned: every logit is minus infinity".into())
}

/// A token as a number whose order is the rank: larger logits first, then lower ids.
fn rank_key(logit: f32, id: u32) -> u64 {
    // Adding zero makes -0 equal to 0.
    let bits = (logit + 0.0).to_bits();
    let ascending = if bits >> 31 == 1 { !bits } else { bits | 1 << 31 };
    u64::from(!ascending) << 32 | u64::from(id)
}

fn logit_of(key: u64) -> f32 {
    let ascending = !((key >> 32) as u32);
    f32::from_bits(if ascending >> 31 == 1 { ascending & !(1 << 31) } else { !ascending })
}

fn id_of(key: u64) -> u32 {
    key as u32
}

//! From logits to a token.

use moeflux_base::{Error, SamplingError, SessionError, setters};
use moeflux_compute_cpu::{LogitTally, LogitWeights, logits_between, logits_extent};
use moeflux_ops::MAX_TOP_LOGITS;

use super::{bans::TokenBans, mask::TokenMask, sampling::Sampling, xoshiro::Xoshiro256};

/// Numbers of candidates that are requested. Few, as a device may compile a kernel for each.
const CANDIDATES: [usize; 4] = [1, 64, 256, MAX_TOP_LOGITS];

/// Numbers of candidates that most samplers request: greedy ones, and those with a top-k.
pub const USUAL_CANDIDATES: [usize; 2] = [CANDIDATES[0], CANDIDATES[1]];

/// Candidates requested for min-p without top-k. Usually fewer tokens pass.
const MIN_P_CANDIDATES: usize = 64;

/// Largest bias of a logit. In effect it forces a token, and its negative forbids it.
const MAX_BIAS: f32 = 100.0;

/// Maximum number of extra candidates in place of tokens that penalties may demote. One per seen
/// token always suffices; this many nearly always do.
const MAX_EXTRA_CANDIDATES: usize = 128;

setters!(Sampling {
    temperature: f32,
    top_k: usize,
    top_p: f32,
    min_p: f32,
    repetition_penalty: f32,
    presence_penalty: f32,
    frequency_penalty: f32,
    seed: u64,
});

/// Bias of a token's logit.
#[derive(Clone, Copy, Debug)]
struct TokenBias {
    token: u32,
    bias: f32,
}

/// A token that a [`Sampler`] has picked and not recorded.
#[derive(Debug)]
pub struct TokenPick {
    token: u32,
    /// The generator after the choice.
    rng: Xoshiro256,
}

/// Sampler of one answer. Allocates only on creation, and for the first token with a bias, mask or
/// ban.
#[derive(Clone, Debug)]
pub struct Sampler {
    sampling: Sampling,
    rng: Xoshiro256,
    vocab: usize,
    /// Rank keys of individually ranked tokens, see [`rank_key`].
    keys: Vec<u64>,
    /// All logits after bias, penalties, masks and bans, if there are any.
    adjusted: Vec<f32>,
    /// Added to the logits of tokens.
    bias: Vec<TokenBias>,
    bans: TokenBans,
    /// Histogram of the weights of all tokens, by logit.
    tally: LogitTally,
    /// Occurrences of each id in the answer; empty without penalties.
    counts: Vec<u32>,
    /// Distinct ids of prompt and answer, in order of appearance.
    seen: Vec<u32>,
    is_seen: Vec<bool>,
}

impl Sampler {
    /// A sampler for logits of `vocab` tokens.
    ///
    /// # Errors
    /// [`SamplingError`] if a value of `sampling` is out of range, or `vocab` is 0 or too large.
    pub fn new(sampling: Sampling, vocab: usize) -> Result<Sampler, Error> {
        sampling.validate()?;
        if vocab == 0 || u32::try_from(vocab).is_err() {
            return Err(SamplingError::Vocabulary { vocab }.into());
        }
        let tracked = if sampling.has_penalties() { vocab } else { 0 };
        Ok(Sampler {
            rng: Xoshiro256::new(sampling.seed),
            sampling,
            vocab,
            keys: Vec::with_capacity(vocab),
            adjusted: Vec::with_capacity(tracked),
            bias: Vec::new(),
            bans: TokenBans::default(),
            tally: LogitTally::new(),
            counts: vec![0; tracked],
            seen: Vec::with_capacity(tracked),
            is_seen: vec![false; tracked],
        })
    }

    /// Adds a bias to the logits of tokens before all else, from -100 to 100: pairs of token and
    /// bias. A token with several has their sum.
    ///
    /// # Errors
    /// A bias is out of range, or a token outside the vocabulary.
    pub fn set_logit_bias(&mut self, logit_bias: &[(u32, f32)]) -> Result<(), Error> {
        self.bias.clear();
        for &(token, bias) in logit_bias {
            if !(-MAX_BIAS..=MAX_BIAS).contains(&bias) {
                let (name, rule) = ("logit_bias", "must be from -100 to 100");
                return Err(SamplingError::Parameter { name, value: bias, rule }.into());
            }
            if token as usize >= self.vocab {
                return Err(SessionError::TokenId { id: token, vocab: self.vocab }.into());
            }
            self.bias.push(TokenBias { token, bias });
        }
        Ok(())
    }

    /// Bans tokens of the answer, which has none yet.
    #[doc(hidden)]
    pub fn set_bans(&mut self, bans: TokenBans) {
        self.bans = bans;
    }

    /// Records the prompt, for the repetition penalty. Ids outside the vocabulary are ignored.
    pub fn prompt(&mut self, ids: &[u32]) {
        ids.iter().for_each(|&id| self.record(id));
    }

    /// Records a token of the answer that was not chosen by [`sample`](Sampler::sample).
    pub fn accept(&mut self, id: u32) {
        self.record(id);
        if let Some(count) = self.counts.get_mut(id as usize) {
            *count = count.saturating_add(1);
        }
        self.bans.accept(id);
    }

    /// Chooses the next token of the answer from `logits`, one per token of the vocabulary, and
    /// records it. A logit of minus infinity bans its token.
    ///
    /// # Errors
    /// [`SamplingError`] if the number of logits differs from the vocabulary, a logit is NaN or
    /// plus infinity, or all tokens are banned.
    pub fn sample(&mut self, logits: &[f32]) -> Result<u32, Error> {
        self.sample_masked(logits, &mut [])
    }

    /// Like [`Sampler::sample`], among the tokens that all masks allow. They are applied in order,
    /// and take the chosen token.
    ///
    /// # Errors
    /// As [`Sampler::sample`], and those of the masks.
    pub fn sample_masked(
        &mut self,
        logits: &[f32],
        masks: &mut [Box<dyn TokenMask>],
    ) -> Result<u32, Error> {
        self.check_len(logits)?;
        let is_plain = self.seen.is_empty() && self.bias.is_empty() && self.bans.is_empty();
        if is_plain && masks.is_empty() {
            let range = logit_range(logits, logits)?;
            return Ok(self.choose_from_all(logits, range));
        }
        let mut adjusted = std::mem::take(&mut self.adjusted);
        self.adjust(logits, &mut adjusted);
        let masked = masks.iter_mut().try_for_each(|mask| mask.mask(&mut adjusted));
        let range = masked.and_then(|()| {
            self.bans.apply(&mut adjusted);
            logit_range(&adjusted, logits)
        });
        let id = range.map(|range| self.choose_from_all(&adjusted, range));
        self.adjusted = adjusted;
        let id = id?;
        masks.iter_mut().try_for_each(|mask| mask.accept(id))?;
        Ok(id)
    }

    /// Number of top logits, before penalties, that
    /// [`sample_candidates`](Sampler::sample_candidates) probably needs. `None` if it needs all
    /// logits, or if `vocab` is not the sampler's vocabulary.
    ///
    /// Greedy and top-k need as many as they keep, and one more for each token that a penalty may
    /// demote or that may be banned. min-p without top-k usually needs few. All logits are needed
    /// by top-p without top-k, which keeps a share of the total weight, by sampling without a
    /// filter, and if a bias or a negative penalty may promote any token.
    #[doc(hidden)]
    pub fn candidates(&self, vocab: usize) -> Option<usize> {
        let Sampling { top_k, top_p, min_p, .. } = self.sampling;
        let needed = match top_k {
            _ if self.sampling.is_greedy() => 1,
            0 if top_p == 1.0 && min_p > 0.0 => MIN_P_CANDIDATES,
            0 => return None,
            k => k,
        };
        if self.can_promote() {
            return None;
        }
        let demoted = self.seen.len().min(MAX_EXTRA_CANDIDATES);
        let asked = needed.saturating_add(demoted).saturating_add(self.bans.max_len());
        let size = CANDIDATES.into_iter().find(|n| *n >= asked).unwrap_or(MAX_TOP_LOGITS);
        Some(size).filter(|n| needed <= *n && *n < vocab && vocab == self.vocab)
    }

    /// Same result as [`Sampler::sample`] of all logits, from the top logits only: see
    /// [`Sampler::pick_candidate`]. `None`, without any change, if the result depends on other
    /// logits.
    ///
    /// # Errors
    /// As [`Sampler::sample`].
    #[doc(hidden)]
    pub fn sample_candidates(&mut self, ids: &[f32], logits: &[f32]) -> Result<Option<u32>, Error> {
        Ok(self.pick_candidate(ids, logits)?.map(|pick| self.take(pick)))
    }

    /// Picks a token as [`Sampler::sample`] does from all logits, from the top logits only: `ids`
    /// and `logits` of the first tokens in rank, as
    /// [`Op::TopLogits`](moeflux_ops::Op::TopLogits) returns them. [`Sampler::take`] records
    /// it. `None` if the result depends on other logits.
    ///
    /// # Errors
    /// As [`Sampler::sample`].
    #[doc(hidden)]
    pub fn pick_candidate(
        &mut self,
        ids: &[f32],
        logits: &[f32],
    ) -> Result<Option<TokenPick>, Error> {
        if self.can_promote() {
            return Ok(None);
        }
        self.keys.clear();
        let Some(last) = ids.len().checked_sub(1) else { return Ok(None) };
        check_logit(ids[0] as usize, logits[0])?;
        if logits[0] == f32::NEG_INFINITY {
            return Err(all_banned());
        }
        // Candidates that penalties move behind the last one are dropped, as unknown tokens may
        // rank before them.
        let last = rank_key(logits[last], ids[last] as u32);
        for (&id, &logit) in ids.iter().zip(logits) {
            let index = id as usize;
            if self.bans.contains(id as u32) {
                continue;
            }
            let seen = self.is_seen.get(index).is_some_and(|seen| *seen);
            let logit = if seen { self.penalised(logit, self.counts[index]) } else { logit };
            let key = rank_key(logit, id as u32);
            if key <= last {
                self.keys.push(key);
            }
        }
        Ok(self.pick())
    }

    /// Records a picked token and returns it.
    #[doc(hidden)]
    pub fn take(&mut self, pick: TokenPick) -> u32 {
        self.rng = pick.rng;
        self.accept(pick.token);
        pick.token
    }

    /// Picks among the tokens in `keys`; `None` if the choice depends on others.
    fn pick(&mut self) -> Option<TokenPick> {
        let mut rng = self.rng.clone();
        let token = if self.sampling.is_greedy() {
            key_id(self.keys.iter().copied().min()?)
        } else {
            let uniform = rng.uniform();
            let (mut ranked, mass) = self.filter()?;
            ranked.draw(fraction(mass, uniform))
        };
        Some(TokenPick { token, rng })
    }

    /// Chooses among all tokens, after all adjustments, and records the choice. `range` is the
    /// largest and the smallest logit.
    fn choose_from_all(&mut self, logits: &[f32], range: [f32; 2]) -> u32 {
        let Sampling { temperature, top_k, .. } = self.sampling;
        let id = if self.sampling.is_greedy() {
            logits.iter().position(|logit| *logit == range[0]).unwrap_or_default() as u32
        } else if top_k > 0 {
            self.keys.clear();
            self.keys.extend(logits.iter().zip(0..).map(|(&logit, id)| rank_key(logit, id)));
            // With all tokens ranked the choice never depends on others.
            return self.pick().map(|pick| self.take(pick)).unwrap_or_default();
        } else {
            let weights = LogitWeights::new(range[0], temperature);
            let mass = self.filtered_mass(logits, range, weights);
            let target = fraction(mass, self.rng.uniform());
            self.token_at_mass(logits, weights, target + 1).0
        };
        self.accept(id);
        id
    }

    /// Total weight of the tokens that top-p and min-p keep. Both keep a run of ranks from the
    /// first on, so the shorter run decides.
    fn filtered_mass(&mut self, logits: &[f32], range: [f32; 2], weights: LogitWeights) -> u128 {
        let (top_p, min_p) = (f64::from(self.sampling.top_p), f64::from(self.sampling.min_p));
        let min_logit = weights.least(min_p);
        if top_p == 1.0 {
            self.tally.fill(weights, logits, range, min_logit);
            return self.tally.sum();
        }
        // top-p is a share of the total weight, independent of min-p.
        self.tally.fill(weights, logits, range, f32::NEG_INFINITY);
        let target = mass_for_share(self.tally.sum(), top_p);
        let (_, kept) = self.token_at_mass(logits, weights, target);
        if min_p > 0.0 { kept.min(self.tally.sum_from(logits, min_logit)) } else { kept }
    }

    /// Token at which the cumulative weight in rank order reaches `target`, or else the last one
    /// with a weight; and the cumulative weight there.
    fn token_at_mass(
        &mut self,
        logits: &[f32],
        weights: LogitWeights,
        target: u128,
    ) -> (u32, u128) {
        let (range, mut mass) = self.tally.reaching(target);
        self.keys.clear();
        logits_between(logits, &range, |id, logit| self.keys.push(rank_key(logit, id as u32)));
        self.keys.sort_unstable();
        let (mut last, mut last_logit, mut units) = (0, f32::NAN, 0);
        for key in &self.keys {
            let logit = key_logit(*key);
            if logit != last_logit {
                (last_logit, units) = (logit, u128::from(weights.units(logit)));
            }
            last = key_id(*key);
            mass += units;
            if mass >= target {
                break;
            }
        }
        (last, mass)
    }

    /// Records a token of the prompt or the answer.
    fn record(&mut self, id: u32) {
        if let Some(seen) = self.is_seen.get_mut(id as usize)
            && !*seen
        {
            *seen = true;
            self.seen.push(id);
        }
    }

    fn check_len(&self, logits: &[f32]) -> Result<(), Error> {
        if logits.len() == self.vocab {
            return Ok(());
        }
        let (vocab, given) = (self.vocab, logits.len());
        Err(SamplingError::LogitCount { given, vocab }.into())
    }

    /// Whether a bias or a penalty may raise the rank of a token.
    fn can_promote(&self) -> bool {
        !self.bias.is_empty() || self.sampling.can_promote()
    }

    /// Fills `dst` with the logits after bias and penalties. NaN stays NaN.
    fn adjust(&self, logits: &[f32], dst: &mut Vec<f32>) {
        dst.clear();
        dst.extend_from_slice(logits);
        for &TokenBias { token, bias } in &self.bias {
            dst[token as usize] += bias;
        }
        for &id in &self.seen {
            let index = id as usize;
            dst[index] = self.penalised(dst[index], self.counts[index]);
        }
    }

    /// Penalised logit of a seen token with `count` occurrences in the answer.
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

    /// Tokens in `keys` that the filters keep, and their total weight; `None` if the filters keep
    /// tokens that are not in `keys`.
    fn filter(&mut self) -> Option<(RankedTokens<'_>, u128)> {
        let Sampling { top_k, top_p, min_p, temperature, .. } = self.sampling;
        let (top_p, min_p) = (f64::from(top_p), f64::from(min_p));
        let mut ranked = RankedTokens::new(&mut self.keys, self.vocab, temperature);
        if top_k > 0 {
            ranked.len = ranked.len.min(top_k);
        }
        // Each filter keeps a run of ranks from the first on, so the shortest run decides.
        let mass = if top_p < 1.0 || min_p > 0.0 {
            let target =
                if top_p < 1.0 { mass_for_share(ranked.mass()?, top_p) } else { u128::MAX };
            let min_logit = ranked.weights.least(min_p);
            let (mass, len) = ranked.run(target, min_logit)?;
            ranked.len = len;
            mass
        } else {
            ranked.mass()?
        };
        Some((ranked, mass))
    }
}

/// Tokens in rank order, sorted lazily.
struct RankedTokens<'a> {
    /// Keys of all tokens, or of the first ones in rank.
    keys: &'a mut [u64],
    /// Length of the sorted prefix of `keys`.
    sorted: usize,
    /// Number of tokens that filters have kept.
    len: usize,
    weights: LogitWeights,
}

impl RankedTokens<'_> {
    fn new(keys: &mut [u64], vocab: usize, temperature: f32) -> RankedTokens<'_> {
        let largest = keys.iter().copied().min().map_or(0.0, key_logit);
        let weights = LogitWeights::new(largest, temperature);
        RankedTokens { keys, sorted: 0, len: vocab, weights }
    }

    /// Key at `rank`; `None` if it is unknown.
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

    /// Total weight of the kept tokens; `None` if some are unknown.
    fn mass(&mut self) -> Option<u128> {
        if self.len < self.keys.len() {
            self.key(self.len)?;
        }
        let candidates = self.keys.get(..self.len)?;
        Some(candidates.iter().map(|key| u128::from(self.weights.units(key_logit(*key)))).sum())
    }

    /// Weight and length of the run of tokens that ends once the weight reaches `target`, or before
    /// the first logit below `min_logit`.
    fn run(&mut self, target: u128, min_logit: f32) -> Option<(u128, usize)> {
        let mut mass = 0;
        for rank in 0..self.len {
            let logit = key_logit(self.key(rank)?);
            if logit < min_logit {
                return Some((mass, rank));
            }
            mass += u128::from(self.weights.units(logit));
            if mass >= target {
                return Some((mass, rank + 1));
            }
        }
        Some((mass, self.len))
    }

    /// Token at which the cumulative weight exceeds `target`.
    fn draw(&mut self, target: u128) -> u32 {
        let (mut id, mut mass) = (0, 0);
        for rank in 0..self.len {
            let Some(key) = self.key(rank) else { break };
            let units = u128::from(self.weights.units(key_logit(key)));
            // If rounding makes `target` unreachable, the last token with a weight is chosen.
            if units == 0 {
                break;
            }
            id = key_id(key);
            mass += units;
            if mass > target {
                break;
            }
        }
        id
    }
}

/// Fraction of a total weight, rounded down.
fn fraction(mass: u128, share: f64) -> u128 {
    (mass as f64 * share) as u128
}

/// Smallest weight that reaches a share of the total weight.
fn mass_for_share(mass: u128, share: f64) -> u128 {
    (mass as f64 * share).ceil() as u128
}

/// Largest and smallest of the adjusted `logits`, which are not empty. An invalid logit is
/// reported with its value in `original`.
fn logit_range(logits: &[f32], original: &[f32]) -> Result<[f32; 2], Error> {
    match logits_extent(logits) {
        Some([f32::NEG_INFINITY, _]) => Err(all_banned()),
        Some(range) => Ok(range),
        None => Err((0..)
            .zip(original)
            .find_map(|(id, logit)| check_logit(id, *logit).err())
            .unwrap_or_else(all_banned)),
    }
}

/// Rejects NaN and plus infinity.
fn check_logit(id: usize, logit: f32) -> Result<(), Error> {
    if logit < f32::INFINITY {
        return Ok(());
    }
    Err(SamplingError::InvalidLogit { id, logit }.into())
}

fn all_banned() -> Error {
    SamplingError::AllBanned.into()
}

/// Sort key of a token: ascending keys are larger logits first, then lower ids.
pub(super) fn rank_key(logit: f32, id: u32) -> u64 {
    // Adding zero makes -0 equal to 0.
    let bits = (logit + 0.0).to_bits();
    let ascending = if bits >> 31 == 1 { !bits } else { bits | 1 << 31 };
    u64::from(!ascending) << 32 | u64::from(id)
}

/// Logit of a sort key.
fn key_logit(key: u64) -> f32 {
    let ascending = !((key >> 32) as u32);
    f32::from_bits(if ascending >> 31 == 1 { ascending & !(1 << 31) } else { !ascending })
}

/// Token id of a sort key.
pub(super) fn key_id(key: u64) -> u32 {
    key as u32
}
#[cfg(test)]
mod tests;

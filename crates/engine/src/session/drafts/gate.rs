//! The gate of drafts: how many a step may have so that it gets faster by them.
//!
//! A step with drafts takes longer than one without, and gives more tokens where they are right.
//! Both are measured: the time of steps by their numbers of sequences and drafts, for all answers
//! of an engine; the share of right drafts by their source and position, for each answer. The time
//! of a step includes the time in which the model's head makes its drafts. Drafts are checked where
//! the expected time per token falls by more than the measurements' spread. Where it does not, they
//! are tried again now and then, for [`TRIAL_SHARE`] of the time.
//!
//! The gate reads no clock: callers pass times.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::Serialize;

use crate::runtime::draft_head::MAX_DRAFTS;

/// Share of the decode time that trials may cost.
const TRIAL_SHARE: f64 = 0.01;
/// Steps whose time the first trials may cost.
const FIRST_TRIALS: f64 = 1.5;
/// Maximum loss of a step that counts, in steps: a longer one waited for something else.
const MAX_LOSS: f64 = 2.0;
/// Steps in which the head runs for the first time, whose loss does not count: its weights and
/// experts are on their way then.
const COLD_STEPS: u32 = 2;
/// Maximum number of sequences, and of drafts of all of them, whose steps are told apart.
const MAX_TIMED: usize = 8;
/// Weight of the newest time of a step.
const NEWEST: f64 = 0.1;
/// Steps of a kind before their time is known.
const MIN_STEPS: u32 = 3;
/// Weight of the trials so far when a draft is checked.
const REMEMBERED: f64 = 0.95;
/// Trials that an answer begins with: the share that earlier answers had.
const PRIOR_TRIALS: f64 = 2.0;
/// Steps with drafts after which one without them is measured again, at first and at most: the
/// interval doubles, for all answers of an engine.
const FIRST_PLAIN_INTERVAL: u32 = 4;
const PLAIN_INTERVAL: u32 = 128;
/// Steps of a kind that may be slower than later ones, as caches, clocks and threads warm up: a
/// time that is shorter by more than noise, as a share of the mean, weighs [`QUICK`].
const WARM_UP: u32 = 16;
const NOISE: f64 = 0.2;
const QUICK: f64 = 0.6;

/// Mean time of the steps of a kind.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct StepTime {
    /// Sequences of a step, each of which decodes.
    pub sequences: usize,
    /// Drafts of all of them.
    pub drafts: usize,
    /// Seconds; newer steps weigh more.
    pub seconds: f64,
    /// Steps that were measured.
    pub steps: u32,
}

/// Kind of a step, by its rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct StepKind {
    /// Sequences that decode.
    pub(crate) sequences: usize,
    /// Drafts of all of them.
    pub(crate) drafts: usize,
    /// Certain tokens of all of them: more than `sequences` where a grammar forces some.
    pub(crate) certain: usize,
    /// Whether it computes a prompt, too.
    pub(crate) has_prompt: bool,
}

impl StepKind {
    /// Whether it decodes one certain token of each sequence and does nothing else. Only the times
    /// of such steps are compared.
    pub(crate) fn is_plain(&self) -> bool {
        !self.has_prompt && self.certain == self.sequences
    }
}

/// Source of the drafts of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DraftSource {
    /// Tokens that followed the last ones before.
    Lookup,
    /// The model's head for multi-token prediction.
    Head,
}

/// Number of sources.
const SOURCES: usize = 2;

/// Drafts of an answer in a step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CheckedDrafts {
    pub(crate) source: DraftSource,
    pub(crate) count: usize,
    /// Number of them that were right.
    pub(crate) accepted: usize,
}

/// Running mean of the time of steps, in seconds, and its spread.
#[derive(Clone, Copy, Debug, Default)]
struct RunningTime {
    mean: f64,
    /// Mean distance from the mean.
    spread: f64,
    steps: u32,
    /// The first times, ascending.
    first: [f64; MIN_STEPS as usize],
}

impl RunningTime {
    fn add(&mut self, seconds: f64) {
        self.steps = self.steps.saturating_add(1);
        if self.steps <= MIN_STEPS {
            return self.begin(seconds);
        }
        let is_warmer = seconds < (1.0 - NOISE) * self.mean;
        let weight = match self.steps <= WARM_UP && is_warmer {
            true => QUICK,
            false => NEWEST.max(1.0 / f64::from(self.steps)),
        };
        // A step that waited for something else counts as one that took twice the time.
        let seconds = seconds.min(2.0 * self.mean);
        self.spread += weight * ((seconds - self.mean).abs() - self.spread);
        self.mean += weight * (seconds - self.mean);
    }

    /// Takes one of the first times. The first of all may include loads of weights, so the mean
    /// begins as their median.
    fn begin(&mut self, seconds: f64) {
        let count = self.steps as usize;
        self.first[count - 1] = seconds;
        let times = &mut self.first[..count];
        times.sort_by(f64::total_cmp);
        self.mean = times[(count - 1) / 2];
        let most = self.mean / 4.0;
        self.spread =
            if count > 1 { ((times[count - 1] - times[0]) / 2.0).min(most) } else { most };
    }

    /// Uncertainty of the mean.
    fn error(&self) -> f64 {
        self.spread / f64::from(self.steps).min(2.0 / NEWEST).sqrt()
    }
}

/// Share of drafts that were right, by position in a step, of those whose predecessors were right.
#[derive(Clone, Copy, Debug)]
struct Acceptance {
    right: [f64; MAX_DRAFTS],
    tried: [f64; MAX_DRAFTS],
}

impl Acceptance {
    /// Before the first trial.
    const UNKNOWN: Self = Self { right: [1.2; MAX_DRAFTS], tried: [2.0; MAX_DRAFTS] };

    /// The same shares, with the weight of a few trials.
    fn as_prior(self) -> Self {
        let shares = std::array::from_fn(|i| self.share(i) * PRIOR_TRIALS);
        Self { right: shares, tried: [PRIOR_TRIALS; MAX_DRAFTS] }
    }

    fn share(&self, position: usize) -> f64 {
        self.right[position] / self.tried[position]
    }

    fn add(&mut self, drafts: usize, accepted: usize) {
        for position in 0..drafts.min(accepted + 1).min(MAX_DRAFTS) {
            let is_right = f64::from(u8::from(position < accepted));
            self.right[position] = self.right[position] * REMEMBERED + is_right;
            self.tried[position] = self.tried[position] * REMEMBERED + 1.0;
        }
    }

    /// Expected tokens of a step with this number of drafts.
    fn expected_tokens(&self, drafts: usize) -> f64 {
        let right = (0..drafts).scan(1.0, |all, i| {
            *all *= self.share(i);
            Some(*all)
        });
        1.0 + right.sum::<f64>()
    }
}

/// Measurements of all answers of an engine.
#[derive(Debug)]
pub(crate) struct SharedTimes {
    /// By sequences, then by drafts.
    times: [[RunningTime; MAX_TIMED + 1]; MAX_TIMED],
    acceptance: [Acceptance; SOURCES],
    /// Seconds that trials may cost; `None` before the first step.
    credit: Option<f64>,
    /// Steps in which the head made drafts, up to [`COLD_STEPS`].
    head_steps: u32,
    /// Steps with drafts of an answer after which one without them is measured again.
    plain_interval: u32,
}

impl Default for SharedTimes {
    fn default() -> Self {
        let times = [[RunningTime::default(); MAX_TIMED + 1]; MAX_TIMED];
        Self {
            times,
            acceptance: [Acceptance::UNKNOWN; SOURCES],
            credit: None,
            head_steps: 0,
            plain_interval: FIRST_PLAIN_INTERVAL,
        }
    }
}

impl SharedTimes {
    /// All times that were measured.
    pub(crate) fn measured(&self) -> Vec<StepTime> {
        let rows = self.times.iter().zip(1..);
        let all = rows.flat_map(|(times, sequences)| {
            times.iter().enumerate().map(move |(drafts, time)| {
                let RunningTime { mean, steps, .. } = *time;
                StepTime { sequences, drafts, seconds: mean, steps }
            })
        });
        all.filter(|time| time.steps > 0).collect()
    }

    fn time(&self, kind: StepKind) -> Option<&RunningTime> {
        self.times.get(kind.sequences.checked_sub(1)?)?.get(kind.drafts)
    }

    /// The time of steps of a kind, if it is known.
    fn known(&self, kind: StepKind) -> Option<RunningTime> {
        self.time(kind).copied().filter(|time| time.steps >= MIN_STEPS)
    }

    fn add(&mut self, kind: StepKind, seconds: f64) {
        let of_kind = kind.sequences.checked_sub(1).and_then(|i| self.times.get_mut(i));
        of_kind
            .and_then(|times| times.get_mut(kind.drafts))
            .into_iter()
            .for_each(|t| t.add(seconds));
    }
}

/// The gate of one answer.
#[derive(Debug)]
pub(crate) struct Gate {
    shared: Arc<Mutex<SharedTimes>>,
    acceptance: [Acceptance; SOURCES],
    /// Steps with drafts since the time without them was measured.
    since_plain: u32,
    /// Kind of the last step.
    last: Option<StepKind>,
    /// Whether the first step of a kind may take longer than the next ones: a card records a step
    /// ahead that is like the current one.
    first_is_slow: bool,
}

impl Gate {
    pub(crate) fn new(shared: &Arc<Mutex<SharedTimes>>, first_is_slow: bool) -> Self {
        let acceptance = lock(shared).acceptance.map(Acceptance::as_prior);
        let shared = Arc::clone(shared);
        Self { shared, acceptance, since_plain: 0, last: None, first_is_slow }
    }

    /// Expected tokens of a step with this number of drafts.
    pub(crate) fn expected_tokens(&self, source: DraftSource, drafts: usize) -> f64 {
        self.acceptance[source as usize].expected_tokens(drafts)
    }

    /// Number of drafts for the next step, of the `available` ones of a source; `kind` is the step
    /// without them. A step that computes more than one certain token of each sequence has as many
    /// as if it did not: a further row costs no more there. It makes no trials.
    pub(crate) fn drafts(&self, kind: StepKind, source: DraftSource, available: usize) -> usize {
        let available = available.min(MAX_DRAFTS).min(MAX_TIMED.saturating_sub(kind.drafts));
        let shared = lock(&self.shared);
        let Some(plain) = shared.known(kind).filter(|_| available > 0) else { return 0 };
        let with = |drafts| StepKind { drafts: kind.drafts + drafts, ..kind };
        let mut best = (0, plain.mean);
        let mut unknown = None;
        for drafts in 1..=available {
            let Some(time) = shared.known(with(drafts)) else {
                unknown = unknown.or(Some(drafts));
                continue;
            };
            let tokens = self.expected_tokens(source, drafts);
            let per_token = time.mean / tokens;
            if per_token + plain.error() + time.error() / tokens < best.1.min(plain.mean)
                && per_token < best.1
            {
                best = (drafts, per_token);
            }
        }
        let most = FIRST_TRIALS * plain.mean;
        let credit = shared.credit.unwrap_or(most);
        let cost = |drafts| {
            let time = shared.known(with(drafts)).map_or(2.0 * plain.mean, |time| time.mean);
            (time - plain.mean).max(0.0)
        };
        let chosen = match (best, unknown) {
            ((drafts, _), _) if !kind.is_plain() => drafts,
            // A time that is not known yet.
            (_, Some(drafts)) if credit > 0.0 => drafts,
            // A trial: as many as the credit can ever pay, once it does.
            ((0, _), _) => {
                let drafts = (1..=available).rev().find(|drafts| cost(*drafts) <= most);
                drafts.filter(|drafts| cost(*drafts) <= credit).unwrap_or(0)
            }
            ((drafts, _), _) => drafts,
        };
        let is_measured = kind.is_plain() && self.since_plain >= shared.plain_interval;
        if is_measured { 0 } else { chosen }
    }

    /// Takes the outcome of a step: its kind, the answer's own drafts, and its time. Returns the
    /// time that its tokens would have taken without drafts, if it had or made some and that is
    /// known.
    pub(crate) fn record(
        &mut self,
        kind: StepKind,
        drafts: CheckedDrafts,
        seconds: f64,
    ) -> Option<f64> {
        let CheckedDrafts { source, count: own, accepted } = drafts;
        let mut shared = lock(&self.shared);
        if own > 0 {
            self.acceptance[source as usize].add(own, accepted);
            shared.acceptance[source as usize].add(own, accepted);
        }
        let is_steady = self.last.replace(kind) == Some(kind) || !self.first_is_slow;
        if !kind.is_plain() {
            return None;
        }
        if is_steady {
            shared.add(kind, seconds);
        }
        let undrafted = StepKind { drafts: kind.drafts - own, ..kind };
        let undrafted = shared.known(undrafted).map(|time| time.mean);
        if own > 0 || !is_steady {
            self.since_plain = self.since_plain.saturating_add(1);
        } else {
            if self.since_plain >= shared.plain_interval {
                shared.plain_interval = (2 * shared.plain_interval).min(PLAIN_INTERVAL);
            }
            self.since_plain = 0;
        }
        let plain = undrafted?;
        let undrafted = (own > 0).then_some(plain * (accepted + 1) as f64);
        let mut won = undrafted.map_or(0.0, |undrafted| undrafted - seconds).max(-MAX_LOSS * plain);
        if own > 0 && source == DraftSource::Head && shared.head_steps < COLD_STEPS {
            shared.head_steps += 1;
            won = won.max(0.0);
        }
        let credit = shared.credit.unwrap_or(FIRST_TRIALS * plain);
        shared.credit = Some((credit + TRIAL_SHARE * seconds + won).min(FIRST_TRIALS * plain));
        undrafted
    }
}

pub(crate) fn lock(shared: &Mutex<SharedTimes>) -> MutexGuard<'_, SharedTimes> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine: the time of a step with each number of drafts, and the drafts that are right.
    struct Machine {
        seconds: [f64; MAX_DRAFTS + 1],
        /// Added to the time of a step with another number of drafts than the last one.
        change: f64,
        /// Share by which the next step takes longer than a later one.
        cold: f64,
        acceptance: f64,
        /// Largest distance of a step's time from the mean, as a share.
        noise: f64,
        random: u64,
    }

    fn alone(drafts: usize) -> StepKind {
        StepKind { sequences: 1, drafts, certain: 1, has_prompt: false }
    }

    fn lookup(count: usize, accepted: usize) -> CheckedDrafts {
        CheckedDrafts { source: DraftSource::Lookup, count, accepted }
    }

    impl Machine {
        fn new(seconds: [f64; MAX_DRAFTS + 1], acceptance: f64) -> Self {
            Self { seconds, change: 0.0, cold: 0.0, acceptance, noise: 0.05, random: 7 }
        }

        fn uniform(&mut self) -> f64 {
            self.random =
                self.random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (self.random >> 40) as f64 / (1u64 << 24) as f64
        }

        /// Decodes tokens. Returns the mean time of a token, in plain steps, and the mean number of
        /// drafts.
        fn decode(&mut self, gate: &mut Gate, tokens: usize) -> (f64, f64) {
            let (mut done, mut seconds, mut drafts, mut steps) = (0, 0.0, 0, 0);
            let mut last = 0;
            while done < tokens {
                let own = gate.drafts(alone(0), DraftSource::Lookup, MAX_DRAFTS);
                let accepted = (0..own).take_while(|_| self.uniform() < self.acceptance).count();
                let noise = 1.0 + self.noise * (2.0 * self.uniform() - 1.0);
                let change = if own == last { 0.0 } else { self.change };
                let took = (self.seconds[own] + change) * noise * (1.0 + self.cold);
                self.cold *= 0.8;
                last = own;
                gate.record(alone(own), lookup(own, accepted), took);
                (done, seconds) = (done + 1 + accepted, seconds + took);
                (drafts, steps) = (drafts + own, steps + 1);
            }
            (seconds / done as f64 / self.seconds[0], drafts as f64 / f64::from(steps))
        }
    }

    #[test]
    fn drafts_are_checked_where_they_pay() {
        let shared = Arc::default();
        let mut machine = Machine::new([1.0, 1.2, 1.4, 1.6], 0.9);
        let (time, drafts) = machine.decode(&mut Gate::new(&shared, false), 400);
        assert!(time < 0.52 && drafts > 1.8, "{time}, {drafts}");
        // Where a row costs nearly a step, only the first draft pays.
        let shared = Arc::default();
        let mut machine = Machine::new([1.0, 1.5, 2.2, 3.2], 0.75);
        let (time, drafts) = machine.decode(&mut Gate::new(&shared, false), 800);
        assert!(time < 0.92 && (0.8..1.3).contains(&drafts), "{time}, {drafts}");
    }

    #[test]
    fn drafts_that_do_not_pay_cost_less_than_two_percent() {
        for (seconds, acceptance) in [
            ([1.0, 1.9, 2.8, 3.7], 0.5),
            ([1.0, 1.4, 1.8, 2.2], 0.0),
            ([1.0, 1.05, 1.1, 1.15], 0.0),
            ([1.0, 2.0, 3.0, 4.0], 0.95),
        ] {
            let shared = Arc::default();
            let mut machine = Machine::new(seconds, acceptance);
            let (time, _) = machine.decode(&mut Gate::new(&shared, false), 400);
            assert!(time < 1.02, "{seconds:?}, {acceptance}: {time}");
            // Later answers know the times.
            let (time, _) = machine.decode(&mut Gate::new(&shared, false), 400);
            assert!(time < 1.02, "{seconds:?}, {acceptance}: {time}");
        }
    }

    /// A card records a step ahead that is like the current one; others take longer.
    #[test]
    fn slow_changes_between_kinds_of_steps_are_not_their_time() {
        for (acceptance, limit) in [(0.8, 0.52), (0.0, 1.02)] {
            let mut gate = Gate::new(&Arc::default(), true);
            let mut machine = Machine::new([1.0, 1.1, 1.2, 1.3], acceptance);
            machine.change = 0.4;
            let (time, _) = machine.decode(&mut gate, 600);
            assert!(time < limit, "{acceptance}: {time}");
        }
    }

    #[test]
    fn noise_keeps_no_gate_closed() {
        let mut machine = Machine::new([1.0, 1.3, 1.6, 1.9], 0.9);
        machine.noise = 0.15;
        let shared = Arc::default();
        for _ in 0..3 {
            let (time, _) = machine.decode(&mut Gate::new(&shared, false), 120);
            assert!(time < 0.75, "{time}");
        }
    }

    /// Plain steps are measured first, while a process warms up.
    #[test]
    fn slow_first_steps_open_no_gate() {
        for acceptance in [0.9, 0.5] {
            let mut gate = Gate::new(&Arc::default(), false);
            let mut machine = Machine::new([1.0, 2.1, 3.2, 4.3], acceptance);
            machine.cold = 4.0;
            machine.decode(&mut gate, 40);
            let (time, drafts) = machine.decode(&mut gate, 200);
            assert!(time < 1.03 && drafts < 0.1, "{acceptance}: {time}, {drafts}");
        }
    }

    #[test]
    fn drafts_are_tried_again_when_the_text_changes() {
        let shared = Arc::default();
        let mut gate = Gate::new(&shared, false);
        let mut machine = Machine::new([1.0, 1.2, 1.4, 1.6], 0.02);
        assert!(machine.decode(&mut gate, 400).1 < 0.2);
        machine.acceptance = 0.95;
        machine.decode(&mut gate, 600);
        let (time, drafts) = machine.decode(&mut gate, 300);
        assert!(time < 0.6 && drafts > 2.0, "{time}, {drafts}");
    }

    #[test]
    fn a_first_step_has_no_drafts() {
        let mut gate = Gate::new(&Arc::default(), false);
        let drafts = |gate: &Gate, max| gate.drafts(alone(0), DraftSource::Lookup, max);
        assert_eq!(drafts(&gate, 3), 0);
        for _ in 0..MIN_STEPS + 1 {
            gate.record(alone(0), lookup(0, 0), 1.0);
        }
        assert!(drafts(&gate, 3) > 0);
        assert_eq!(drafts(&gate, 0), 0);
        let many = StepKind { sequences: 40, certain: 40, ..alone(0) };
        assert_eq!(gate.drafts(many, DraftSource::Lookup, 3), 0);
    }

    #[test]
    fn steps_with_prompts_and_forced_tokens_draft_without_trials() {
        let shared = Arc::default();
        let mut gate = Gate::new(&shared, false);
        let beside =
            [StepKind { has_prompt: true, ..alone(0) }, StepKind { certain: 5, ..alone(0) }];
        let drafts = |gate: &Gate| beside.map(|kind| gate.drafts(kind, DraftSource::Lookup, 3));
        // No time is known, and they teach none.
        for kind in beside.iter().cycle().take(20) {
            assert_eq!(gate.record(*kind, lookup(0, 0), 9.0), None);
        }
        assert!(lock(&shared).measured().is_empty());
        let mut machine = Machine::new([1.0, 1.2, 1.4, 1.6], 0.9);
        machine.decode(&mut gate, 400);
        assert!(drafts(&gate).iter().all(|drafts| *drafts > 1), "{:?}", drafts(&gate));
        // Their drafts count.
        for kind in beside.iter().cycle().take(60) {
            let own = StepKind { drafts: 2, ..*kind };
            assert_eq!(gate.record(own, lookup(2, 0), 9.0), None);
        }
        assert_eq!(drafts(&gate), [0, 0]);
    }
}

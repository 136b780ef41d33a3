//! Medians over repeats, per token.

use serde::{Deserialize, Serialize};

use super::measure::{Measured, Repeat};

/// Of all repeats.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(super) struct Spread {
    pub(super) median: f64,
    pub(super) min: f64,
    pub(super) max: f64,
}

/// One stretch over all repeats: medians, bytes and times per token.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Summary {
    pub(super) tokens: usize,
    pub(super) tokens_per_second: Spread,
    /// Of experts, read from disk.
    pub(super) bytes_per_token: f64,
    /// What the files gave for that, with what lies around it in aligned blocks.
    pub(super) file_bytes_per_token: f64,
    /// Of experts that were needed and in no slot: what had to be read.
    pub(super) missed_bytes_per_token: f64,
    /// Of all experts that were needed.
    pub(super) needed_bytes_per_token: f64,
    pub(super) hit_rate: f64,
    pub(super) hits_per_token: f64,
    pub(super) misses_per_token: f64,
    /// Misses that were being read, or had been, as they had been predicted.
    pub(super) predicted_per_token: f64,
    pub(super) prefetched_per_token: f64,
    pub(super) wasted_per_token: f64,
    /// While something was read.
    pub(super) disk_bytes_per_second: Option<f64>,
    /// Of the disk's best.
    pub(super) disk_share: Option<f64>,
    pub(super) time: Time,
    /// Of the reading that computing could have hidden, what it did.
    pub(super) hidden: Option<f64>,
    pub(super) token_ms: Option<TokenMs>,
    /// Between tokens.
    pub(super) memory_bytes_per_second: Option<f64>,
    pub(super) roof: Option<RoofReport>,
    /// Share of the time in which computing waited for reads.
    pub(super) stalled: f64,
    pub(super) dispatches_per_token: f64,
    pub(super) waits_per_token: f64,
    /// Share of the time in which the host waited for a GPU.
    pub(super) waited: f64,
}

/// Where the time goes.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(super) struct Time {
    pub(super) compute: Part,
    /// Exposed: nothing could be computed before a read was finished.
    pub(super) stalled: Part,
    pub(super) other: Part,
}

#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(super) struct Part {
    pub(super) ms_per_token: f64,
    /// From 0 to 1.
    pub(super) share: f64,
}

/// Milliseconds of single tokens, of all repeats together.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(super) struct TokenMs {
    pub(super) median: f64,
    pub(super) p90: f64,
    pub(super) p99: f64,
    pub(super) max: f64,
}

/// What these tokens could have reached on this machine, with the misses that they had.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(super) struct RoofReport {
    pub(super) tokens_per_second: f64,
    /// What was reached of it.
    pub(super) share: f64,
    /// If the choices of all routers were known beforehand.
    pub(super) ideal_tokens_per_second: f64,
    /// All that a token computes, if nothing is read.
    pub(super) compute_ms: f64,
    /// All that it reads, if nothing is computed.
    pub(super) read_ms: f64,
}

/// Prefill and decode with a prompt of so many tokens.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct AtContext {
    pub(super) context: usize,
    /// Where it was asked for several sessions in one step.
    #[serde(default)]
    pub(super) together: Option<Together>,
    pub(super) prefill: Option<Summary>,
    pub(super) decode: Option<Summary>,
}

/// What sessions that decode together share.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Together {
    pub(super) sessions: usize,
    /// Distinct experts that a step needs of a layer, on average.
    pub(super) experts_per_layer: f64,
    /// Of weights that a step needs: dense ones, and its experts once each.
    pub(super) bytes_per_step: f64,
    pub(super) against_one: Option<AgainstOne>,
}

/// Several sessions beside one.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct AgainstOne {
    /// The speed of all, of that of one.
    pub(super) times: f64,
    /// If a step's bytes took no longer than the one session takes for as many.
    pub(super) roof_tokens_per_second: f64,
    /// What was reached of it.
    pub(super) roof_share: f64,
}

/// What summaries are made with.
#[derive(Clone, Copy)]
pub(super) struct Scale {
    /// Bytes of an expert, on average.
    pub(super) expert: f64,
    /// Bytes per second.
    pub(super) disk: Option<f64>,
    /// Bytes of a step's weights that are not of routed experts.
    pub(super) dense: f64,
    /// Layers that have routed experts.
    pub(super) moe_layers: usize,
}

impl AtContext {
    pub(super) fn of((context, sessions): Setting, repeats: &[Repeat], scale: Scale) -> Self {
        let here = || repeats.iter().filter(|r| (r.context, r.sessions) == (context, sessions));
        let prefill =
            Summary::of(&here().filter_map(|r| r.prefill.as_ref()).collect::<Vec<_>>(), scale);
        let decode =
            Summary::of(&here().filter_map(|r| r.decode.as_ref()).collect::<Vec<_>>(), scale);
        let together =
            sessions.zip(decode.as_ref()).map(|(n, decode)| Together::of(n, decode, scale));
        Self { context, together, prefill, decode }
    }

    /// The same for all settings; those of several sessions are held against that of one.
    pub(super) fn all(settings: &[Setting], repeats: &[Repeat], scale: Scale) -> Vec<Self> {
        let mut all: Vec<_> = settings.iter().map(|s| Self::of(*s, repeats, scale)).collect();
        let ones: Vec<_> =
            all.iter().filter(|at| at.together.is_some_and(|t| t.sessions == 1)).cloned().collect();
        for at in &mut all {
            let one = ones.iter().find(|one| one.context == at.context);
            let speed = at.speed();
            if let (Some(together), Some(speed), Some(one)) = (&mut at.together, speed, one) {
                together.against_one = together.against(speed, one);
            }
        }
        all
    }

    fn speed(&self) -> Option<f64> {
        self.decode.as_ref().map(|decode| decode.tokens_per_second.median)
    }
}

/// Tokens of the prompt, and how many sessions share their steps, if any do.
pub(super) type Setting = (usize, Option<usize>);

impl Together {
    fn of(sessions: usize, decode: &Summary, scale: Scale) -> Self {
        let step = (decode.hits_per_token + decode.misses_per_token) * sessions as f64;
        Self {
            sessions,
            experts_per_layer: step / scale.moe_layers.max(1) as f64,
            bytes_per_step: scale.dense + step * scale.expert,
            against_one: None,
        }
    }

    /// `speed` in tokens per second.
    fn against(&self, speed: f64, one: &AtContext) -> Option<AgainstOne> {
        let of_one = one.speed()?;
        let rate = one.together?.bytes_per_step * of_one;
        let roof = self.sessions as f64 * rate / self.bytes_per_step;
        Some(AgainstOne {
            times: speed / of_one,
            roof_tokens_per_second: roof,
            roof_share: speed / roof,
        })
    }
}

impl Summary {
    /// A roof in tokens per second, and what is reached of it: the machine's, or else that which one session gives.
    pub(super) fn roof_of(&self, together: Option<Together>) -> Option<(f64, f64)> {
        let of_one =
            together.and_then(|t| t.against_one).map(|a| (a.roof_tokens_per_second, a.roof_share));
        self.roof.as_ref().map(|r| (r.tokens_per_second, r.share)).or(of_one)
    }

    /// `None` when nothing was measured.
    fn of(all: &[&Measured], scale: Scale) -> Option<Self> {
        let memory = all.iter().filter_map(|m| m.memory_bytes_per_second).collect();
        let memory = spread(memory).map(|speed| speed.median);
        let spread = |of: &dyn Fn(&Measured) -> f64| spread(all.iter().map(|m| of(m)).collect());
        let per_token =
            |of: &dyn Fn(&Measured) -> f64| Some(spread(&|m| of(m) / m.tokens as f64)?.median);
        let part = |of: &dyn Fn(&Measured) -> f64| {
            Some(Part {
                ms_per_token: per_token(&|m| of(m) * 1e3)?,
                share: spread(&|m| of(m) / m.seconds)?.median,
            })
        };
        let disk = spread(&|m| m.file_bytes as f64 / m.disk_seconds);
        let disk = disk.map(|d| d.median).filter(|d| d.is_finite() && *d > 0.0);
        let hidden = spread(&|m| m.stats.hidden_ns as f64 / m.stats.hideable_ns as f64);
        Some(Self {
            tokens: all.first()?.tokens as usize,
            tokens_per_second: spread(&|m| m.tokens_per_second)?,
            bytes_per_token: per_token(&|m| m.stats.bytes_read as f64)?,
            file_bytes_per_token: per_token(&|m| m.file_bytes as f64)?,
            missed_bytes_per_token: per_token(&|m| m.stats.bytes_missed as f64)?,
            needed_bytes_per_token: per_token(&|m| m.stats.experts_needed as f64 * scale.expert)?,
            hit_rate: spread(&|m| m.hit_rate)?.median,
            hits_per_token: per_token(&|m| m.stats.experts_hit as f64)?,
            misses_per_token: per_token(&|m| {
                (m.stats.experts_needed - m.stats.experts_hit) as f64
            })?,
            predicted_per_token: per_token(&|m| m.stats.experts_predicted as f64)?,
            prefetched_per_token: per_token(&|m| m.stats.experts_prefetched as f64)?,
            wasted_per_token: per_token(&|m| m.stats.experts_wasted as f64)?,
            disk_bytes_per_second: disk,
            disk_share: disk.zip(scale.disk).map(|(disk, best)| disk / best),
            time: Time {
                compute: part(&computing)?,
                stalled: part(&|m| m.stats.stalled_ns as f64 / 1e9)?,
                other: part(&|m| {
                    (m.seconds - computing(m) - m.stats.stalled_ns as f64 / 1e9).max(0.0)
                })?,
            },
            hidden: hidden.map(|h| h.median).filter(|h| h.is_finite()),
            token_ms: TokenMs::of(all),
            memory_bytes_per_second: memory,
            roof: RoofReport::of(all),
            stalled: spread(&|m| m.stats.stalled_ns as f64 / 1e9 / m.seconds)?.median,
            dispatches_per_token: per_token(&|m| m.stats.dispatches as f64)?,
            waits_per_token: per_token(&|m| m.stats.waits as f64)?,
            waited: spread(&|m| m.stats.waited_ns as f64 / 1e9 / m.seconds)?.median,
        })
    }
}

/// Seconds: while the host waits for an adapter, that computes.
fn computing(m: &Measured) -> f64 {
    (m.stats.computing_ns + m.stats.waited_ns) as f64 / 1e9
}

impl TokenMs {
    fn of(all: &[&Measured]) -> Option<Self> {
        let mut sorted: Vec<f64> =
            all.iter().flat_map(|m| m.token_seconds.iter().map(|s| s * 1e3)).collect();
        sorted.sort_by(f64::total_cmp);
        let last = sorted.len().checked_sub(1)?;
        // The nearest rank.
        let at = |share: f64| {
            sorted[((sorted.len() as f64 * share).ceil() as usize).saturating_sub(1).min(last)]
        };
        Some(Self { median: at(0.5), p90: at(0.9), p99: at(0.99), max: sorted[last] })
    }
}

impl RoofReport {
    fn of(all: &[&Measured]) -> Option<Self> {
        let least = |m: &Measured| m.least.map(|l| (l, m.tokens as f64, m.tokens_per_second));
        let all: Vec<_> = all.iter().filter_map(|m| least(m)).collect();
        let median = |of: &dyn Fn(&(crate::roof::Least, f64, f64)) -> f64| {
            spread(all.iter().map(of).collect()).map(|s| s.median)
        };
        Some(Self {
            tokens_per_second: median(&|(l, tokens, _)| tokens / l.streamed)?,
            share: median(&|(l, tokens, reached)| reached * l.streamed / tokens)?,
            ideal_tokens_per_second: median(&|(l, tokens, _)| tokens / l.ideal())?,
            compute_ms: median(&|(l, tokens, _)| l.compute * 1e3 / tokens)?,
            read_ms: median(&|(l, tokens, _)| l.read * 1e3 / tokens)?,
        })
    }
}

/// Median, least and most; `None` of nothing.
fn spread(mut values: Vec<f64>) -> Option<Spread> {
    values.sort_by(f64::total_cmp);
    let (min, max) = (*values.first()?, *values.last()?);
    let middle = values.len() / 2;
    let median = match values.len() % 2 {
        0 => (values[middle - 1] + values[middle]) / 2.0,
        _ => values[middle],
    };
    Some(Spread { median, min, max })
}

#[cfg(test)]
mod tests {
    use moeflux::Stats;

    use super::*;
    use crate::roof::Least;

    const SCALE: Scale =
        Scale { expert: 1000.0, disk: Some(50_000.0), dense: 6000.0, moe_layers: 2 };

    fn measured(seconds: f64) -> Measured {
        let stats = Stats {
            tokens: 4,
            experts_needed: 32,
            experts_hit: 24,
            experts_read: 10,
            bytes_read: 10_000,
            bytes_missed: 8_000,
            computing_ns: 500_000_000,
            stalled_ns: 300_000_000,
            hideable_ns: 200_000_000,
            hidden_ns: 100_000_000,
            ..Stats::default()
        };
        Measured {
            tokens: 4,
            seconds,
            tokens_per_second: 4.0 / seconds,
            bytes_per_token: 2500.0,
            hit_rate: stats.hit_rate(),
            stats,
            file_bytes: 11_000,
            disk_seconds: 0.44,
            retries: 0,
            token_seconds: vec![seconds / 8.0, seconds / 8.0, seconds / 4.0, seconds / 2.0],
            memory_bytes_per_second: Some(seconds * 1e9),
            least: Some(Least { compute: 0.25, read: 0.4, streamed: 0.5 }),
        }
    }

    #[test]
    fn a_summary_is_of_medians_per_token() {
        let (one, two, three) = (measured(1.0), measured(2.0), measured(4.0));
        let s = Summary::of(&[&three, &one, &two], SCALE).unwrap();
        let speed = s.tokens_per_second;
        assert_eq!([speed.min, speed.median, speed.max], [1.0, 2.0, 4.0]);
        assert_eq!(
            [s.bytes_per_token, s.missed_bytes_per_token, s.needed_bytes_per_token],
            [2500.0, 2000.0, 8000.0]
        );
        assert_eq!([s.hits_per_token, s.misses_per_token, s.hit_rate], [6.0, 2.0, 0.75]);
        assert_eq!(
            (s.disk_bytes_per_second, s.disk_share, s.hidden),
            (Some(25_000.0), Some(0.5), Some(0.5))
        );
        let roof = s.roof.unwrap();
        assert_eq!(
            [roof.tokens_per_second, roof.share, roof.ideal_tokens_per_second],
            [8.0, 0.25, 10.0]
        );
        assert_eq!([roof.compute_ms, roof.read_ms], [62.5, 100.0]);
        assert_eq!(s.memory_bytes_per_second, Some(2e9));
        assert!(
            (s.time.compute.share - 0.25).abs() < 1e-9
                && (s.time.stalled.ms_per_token - 75.0).abs() < 1e-9
        );
        assert!((s.time.other.ms_per_token - 300.0).abs() < 1e-9);
        let token = s.token_ms.unwrap();
        assert_eq!([token.median, token.p90, token.max], [500.0, 1000.0, 2000.0]);
        assert!(Summary::of(&[], SCALE).is_none());
    }

    #[test]
    fn sessions_together_are_held_against_one() {
        let repeat = |sessions, seconds, needed| {
            let stats = Stats { experts_needed: needed, ..measured(seconds).stats };
            let decode = Measured { stats, ..measured(seconds) };
            Repeat { context: 3, sessions, prefill: None, decode: Some(decode) }
        };
        // Four steps of one session, eight experts in each; two steps of two sessions, with twelve.
        let repeats = [repeat(Some(1), 4.0, 32), repeat(Some(2), 2.0, 24), repeat(None, 1.0, 32)];
        let all = AtContext::all(&[(3, Some(1)), (3, Some(2)), (3, None)], &repeats, SCALE);
        let [one, two, alone] = &all[..] else { panic!("{all:?}") };
        assert!(alone.together.is_none());
        let (one, two) = (one.together.unwrap(), two.together.unwrap());
        assert_eq!([one.experts_per_layer, one.bytes_per_step], [4.0, 14_000.0]);
        assert_eq!([two.experts_per_layer, two.bytes_per_step], [6.0, 18_000.0]);
        let against = one.against_one.unwrap();
        assert_eq!(
            [against.times, against.roof_tokens_per_second, against.roof_share],
            [1.0, 1.0, 1.0]
        );
        // 14,000 bytes a second: 18,000 of them for two tokens.
        let against = two.against_one.unwrap();
        let roof = 2.0 * 14.0 / 18.0;
        assert_eq!([against.times, against.roof_tokens_per_second], [2.0, roof]);
        assert!((against.roof_share - 2.0 / roof).abs() < 1e-9);
        let without = AtContext::all(&[(3, Some(2))], &repeats, SCALE);
        assert!(without[0].together.unwrap().against_one.is_none());
    }

    #[test]
    fn what_was_not_measured_is_not_claimed() {
        let resident = Measured {
            stats: Stats { tokens: 4, ..Stats::default() },
            file_bytes: 0,
            disk_seconds: 0.0,
            memory_bytes_per_second: None,
            least: None,
            ..measured(1.0)
        };
        let s = Summary::of(&[&resident], SCALE).unwrap();
        assert!(
            s.disk_bytes_per_second.is_none()
                && s.disk_share.is_none()
                && s.hidden.is_none()
                && s.roof.is_none()
                && s.memory_bytes_per_second.is_none()
        );
    }
}

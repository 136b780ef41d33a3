//! Medians over repeats, as figures per token.

use moeflux::tools::MinimumTime;
use serde::{Deserialize, Serialize};

use super::{
    measure::{PhaseMeasurement, RepeatMeasurement},
    setting::BenchSetting,
};

/// Median and range over all repeats.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(super) struct Spread {
    pub(super) median: f64,
    pub(super) min: f64,
    pub(super) max: f64,
}

/// One phase over all repeats: medians of rates, bytes and times per token.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct PhaseSummary {
    pub(super) tokens: usize,
    pub(super) tokens_per_second: Spread,
    /// Bytes of experts read from disk.
    pub(super) bytes_per_token: f64,
    /// Bytes read from files for them, including the padding of aligned blocks.
    pub(super) file_bytes_per_token: f64,
    /// Bytes of needed experts that were in no slot and had to be read.
    pub(super) missed_bytes_per_token: f64,
    /// Bytes of all needed experts.
    pub(super) needed_bytes_per_token: f64,
    pub(super) hit_rate: f64,
    pub(super) hits_per_token: f64,
    pub(super) misses_per_token: f64,
    /// Misses whose prefetch was in flight or done, as the prediction was right.
    pub(super) predicted_per_token: f64,
    pub(super) prefetched_per_token: f64,
    pub(super) wasted_per_token: f64,
    /// Bandwidth while at least one read was in flight.
    pub(super) disk_bytes_per_second: Option<f64>,
    /// That bandwidth, as a share of the disk's peak.
    pub(super) disk_share: Option<f64>,
    pub(super) time: TimeSplit,
    /// Share of the hideable read time that compute did hide.
    pub(super) hidden: Option<f64>,
    /// Rows read from tables on disk.
    pub(super) rows_per_token: f64,
    /// Bytes of their reads.
    pub(super) row_bytes_per_token: f64,
    /// Share of the time of these reads that was not waited for.
    pub(super) rows_hidden: Option<f64>,
    /// Share of uses of experts that a GPU's own memory had, where it lacks slots for some.
    pub(super) card_hit_rate: Option<f64>,
    pub(super) token_ms: Option<TokenLatency>,
    /// Memory bandwidth, measured between tokens.
    pub(super) memory_bytes_per_second: Option<f64>,
    pub(super) roof: Option<RooflineSummary>,
    /// Share of the time in which compute stalled on reads.
    pub(super) stalled: f64,
    pub(super) dispatches_per_token: f64,
    pub(super) waits_per_token: f64,
    /// Share of the time in which the host waited for a GPU.
    pub(super) waited: f64,
}

/// Breakdown of the time per token.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(super) struct TimeSplit {
    pub(super) compute: TimeShare,
    /// Exposed read time: no compute was possible before a read completed.
    pub(super) stalled: TimeShare,
    pub(super) other: TimeShare,
}

#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(super) struct TimeShare {
    pub(super) ms_per_token: f64,
    /// Share of the total, 0 to 1.
    pub(super) share: f64,
}

/// Latency of single tokens over all repeats, in milliseconds.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(super) struct TokenLatency {
    pub(super) median: f64,
    pub(super) p90: f64,
    pub(super) p99: f64,
    pub(super) max: f64,
}

/// Roofline of these tokens on this machine, with their actual misses.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(super) struct RooflineSummary {
    pub(super) tokens_per_second: f64,
    /// Share of the roofline that was reached.
    pub(super) share: f64,
    /// Roofline with perfect prefetching.
    pub(super) ideal_tokens_per_second: f64,
    /// Compute time per token without any read.
    pub(super) compute_ms: f64,
    /// Read time per token without any compute.
    pub(super) read_ms: f64,
}

/// Prefill and decode of one prompt length and number of sessions.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ContextSummary {
    pub(super) context: usize,
    /// Figures of batched decode, if several sessions were asked for.
    #[serde(default)]
    pub(super) together: Option<BatchedSteps>,
    pub(super) prefill: Option<PhaseSummary>,
    pub(super) decode: Option<PhaseSummary>,
}

/// Batched decode of several sessions.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct BatchedSteps {
    pub(super) sessions: usize,
    /// Mean number of distinct experts that a step needs per layer.
    pub(super) experts_per_layer: f64,
    /// Bytes of weights per step: the dense ones, and each distinct expert once.
    pub(super) bytes_per_step: f64,
    pub(super) against_one: Option<SpeedupOverOne>,
}

/// Batched decode relative to one session.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct SpeedupOverOne {
    /// Speed of all sessions together over that of one session.
    pub(super) times: f64,
    /// Roofline from one session: a step reads its bytes at the rate at which one session does.
    pub(super) roof_tokens_per_second: f64,
    /// Share of that roofline that was reached.
    pub(super) roof_share: f64,
}

/// Constants of the model and machine that summaries are scaled by.
#[derive(Clone, Copy)]
pub(super) struct SummaryScale {
    /// Mean bytes of an expert.
    pub(super) expert: f64,
    /// Peak bandwidth of the disk in bytes per second.
    pub(super) disk: Option<f64>,
    /// Bytes of a step's weights other than routed experts.
    pub(super) dense: f64,
    /// Layers with routed experts.
    pub(super) moe_layers: usize,
}

impl ContextSummary {
    fn new(setting: BenchSetting, repeats: &[RepeatMeasurement], scale: SummaryScale) -> Self {
        let BenchSetting { prompt: context, sessions } = setting;
        let here = || repeats.iter().filter(|r| (r.context, r.sessions) == (context, sessions));
        let prefill = PhaseSummary::new(
            &here().filter_map(|r| r.prefill.as_ref()).collect::<Vec<_>>(),
            scale,
        );
        let decode =
            PhaseSummary::new(&here().filter_map(|r| r.decode.as_ref()).collect::<Vec<_>>(), scale);
        let together =
            sessions.zip(decode.as_ref()).map(|(n, decode)| BatchedSteps::new(n, decode, scale));
        Self { context, together, prefill, decode }
    }

    /// Summaries of all settings; batched decode is related to one session of the same prompt
    /// length.
    pub(super) fn all(
        settings: &[BenchSetting],
        repeats: &[RepeatMeasurement],
        scale: SummaryScale,
    ) -> Vec<Self> {
        let mut all: Vec<_> = settings.iter().map(|s| Self::new(*s, repeats, scale)).collect();
        let ones: Vec<_> =
            all.iter().filter(|at| at.together.is_some_and(|t| t.sessions == 1)).cloned().collect();
        for at in &mut all {
            let one = ones.iter().find(|one| one.context == at.context);
            let speed = at.speed();
            if let (Some(together), Some(speed), Some(one)) = (&mut at.together, speed, one) {
                together.against_one = together.relative_to(speed, one);
            }
        }
        all
    }

    fn speed(&self) -> Option<f64> {
        self.decode.as_ref().map(|decode| decode.tokens_per_second.median)
    }
}

impl BatchedSteps {
    fn new(sessions: usize, decode: &PhaseSummary, scale: SummaryScale) -> Self {
        let step = (decode.hits_per_token + decode.misses_per_token) * sessions as f64;
        Self {
            sessions,
            experts_per_layer: step / scale.moe_layers.max(1) as f64,
            bytes_per_step: scale.dense + step * scale.expert,
            against_one: None,
        }
    }

    /// Relates `speed`, in tokens per second, to that of one session.
    fn relative_to(&self, speed: f64, one: &ContextSummary) -> Option<SpeedupOverOne> {
        let of_one = one.speed()?;
        let rate = one.together?.bytes_per_step * of_one;
        let roof = self.sessions as f64 * rate / self.bytes_per_step;
        Some(SpeedupOverOne {
            times: speed / of_one,
            roof_tokens_per_second: roof,
            roof_share: speed / roof,
        })
    }
}

/// A roofline, and the share of it that was reached.
#[derive(Clone, Copy, Debug)]
pub(super) struct RooflineReached {
    pub(super) tokens_per_second: f64,
    pub(super) share: f64,
}

impl PhaseSummary {
    /// Roofline of the machine, or else that derived from one session.
    pub(super) fn roofline(&self, together: Option<BatchedSteps>) -> Option<RooflineReached> {
        let from_one = together.and_then(|t| t.against_one).map(|a| RooflineReached {
            tokens_per_second: a.roof_tokens_per_second,
            share: a.roof_share,
        });
        let from_machine = self
            .roof
            .as_ref()
            .map(|r| RooflineReached { tokens_per_second: r.tokens_per_second, share: r.share });
        from_machine.or(from_one)
    }

    /// Summary of a phase; `None` without measurements.
    fn new(all: &[&PhaseMeasurement], scale: SummaryScale) -> Option<Self> {
        let memory = all.iter().filter_map(|m| m.memory_bytes_per_second).collect();
        let memory = spread(memory).map(|speed| speed.median);
        let spread = |figure: &dyn Fn(&PhaseMeasurement) -> f64| {
            spread(all.iter().map(|m| figure(m)).collect())
        };
        let per_token = |figure: &dyn Fn(&PhaseMeasurement) -> f64| {
            Some(spread(&|m| figure(m) / m.tokens as f64)?.median)
        };
        let part = |figure: &dyn Fn(&PhaseMeasurement) -> f64| {
            Some(TimeShare {
                ms_per_token: per_token(&|m| figure(m) * 1e3)?,
                share: spread(&|m| figure(m) / m.seconds)?.median,
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
            time: TimeSplit {
                compute: part(&computing)?,
                stalled: part(&|m| m.stats.stalled_ns as f64 / 1e9)?,
                other: part(&|m| {
                    (m.seconds - computing(m) - m.stats.stalled_ns as f64 / 1e9).max(0.0)
                })?,
            },
            hidden: hidden.map(|h| h.median).filter(|h| h.is_finite()),
            rows_per_token: per_token(&|m| m.stats.rows_read as f64)?,
            row_bytes_per_token: per_token(&|m| m.stats.row_bytes_read as f64)?,
            rows_hidden: spread(&|m| m.stats.rows_hidden().unwrap_or(f64::NAN))
                .map(|share| share.median)
                .filter(|share| share.is_finite()),
            card_hit_rate: spread(&|m| m.stats.card_hit_rate().unwrap_or(f64::NAN))
                .map(|share| share.median)
                .filter(|share| *share > 0.0 && *share < 1.0),
            token_ms: TokenLatency::new(all),
            memory_bytes_per_second: memory,
            roof: RooflineSummary::new(all),
            stalled: spread(&|m| m.stats.stalled_ns as f64 / 1e9 / m.seconds)?.median,
            dispatches_per_token: per_token(&|m| m.stats.dispatches as f64)?,
            waits_per_token: per_token(&|m| m.stats.waits as f64)?,
            waited: spread(&|m| m.stats.waited_ns as f64 / 1e9 / m.seconds)?.median,
        })
    }
}

/// Seconds of compute. While the host waits for a GPU, the GPU computes.
fn computing(m: &PhaseMeasurement) -> f64 {
    (m.stats.computing_ns + m.stats.waited_ns) as f64 / 1e9
}

impl TokenLatency {
    fn new(all: &[&PhaseMeasurement]) -> Option<Self> {
        let mut sorted: Vec<f64> =
            all.iter().flat_map(|m| m.token_seconds.iter().map(|s| s * 1e3)).collect();
        sorted.sort_by(f64::total_cmp);
        let last = sorted.len().checked_sub(1)?;
        // Nearest-rank percentile.
        let percentile = |share: f64| {
            sorted[((sorted.len() as f64 * share).ceil() as usize).saturating_sub(1).min(last)]
        };
        Some(Self {
            median: percentile(0.5),
            p90: percentile(0.9),
            p99: percentile(0.99),
            max: sorted[last],
        })
    }
}

impl RooflineSummary {
    fn new(all: &[&PhaseMeasurement]) -> Option<Self> {
        let least =
            |m: &PhaseMeasurement| m.least.map(|l| (l, m.tokens as f64, m.tokens_per_second));
        let all: Vec<_> = all.iter().filter_map(|m| least(m)).collect();
        let median = |figure: &dyn Fn(&(MinimumTime, f64, f64)) -> f64| {
            spread(all.iter().map(figure).collect()).map(|s| s.median)
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

/// Median, minimum and maximum; `None` of an empty list.
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
    use moeflux::base::Stats;

    use super::*;

    const SCALE: SummaryScale =
        SummaryScale { expert: 1000.0, disk: Some(50_000.0), dense: 6000.0, moe_layers: 2 };

    /// A prompt of 3 tokens; 0 sessions stand for none asked for.
    fn setting(sessions: usize) -> BenchSetting {
        BenchSetting { prompt: 3, sessions: (sessions > 0).then_some(sessions) }
    }

    fn measured(seconds: f64) -> PhaseMeasurement {
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
        PhaseMeasurement {
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
            least: Some(MinimumTime { compute: 0.25, read: 0.4, streamed: 0.5 }),
        }
    }

    #[test]
    fn a_summary_is_of_medians_per_token() {
        let (one, two, three) = (measured(1.0), measured(2.0), measured(4.0));
        let s = PhaseSummary::new(&[&three, &one, &two], SCALE).unwrap();
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
        assert!(PhaseSummary::new(&[], SCALE).is_none());
    }

    #[test]
    fn sessions_together_are_held_against_one() {
        let repeat = |sessions, seconds, needed| {
            let stats = Stats { experts_needed: needed, ..measured(seconds).stats };
            let decode = PhaseMeasurement { stats, ..measured(seconds) };
            RepeatMeasurement { context: 3, sessions, prefill: None, decode: Some(decode) }
        };
        // Four steps of one session with eight experts each; two steps of two sessions with twelve.
        let repeats = [repeat(Some(1), 4.0, 32), repeat(Some(2), 2.0, 24), repeat(None, 1.0, 32)];
        let all = ContextSummary::all(&[1, 2, 0].map(setting), &repeats, SCALE);
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
        // One session reads 14,000 bytes per second; two tokens take 18,000 bytes.
        let against = two.against_one.unwrap();
        let roof = 2.0 * 14.0 / 18.0;
        assert_eq!([against.times, against.roof_tokens_per_second], [2.0, roof]);
        assert!((against.roof_share - 2.0 / roof).abs() < 1e-9);
        let without = ContextSummary::all(&[setting(2)], &repeats, SCALE);
        assert!(without[0].together.unwrap().against_one.is_none());
    }

    #[test]
    fn what_was_not_measured_is_not_claimed() {
        let resident = PhaseMeasurement {
            stats: Stats { tokens: 4, ..Stats::default() },
            file_bytes: 0,
            disk_seconds: 0.0,
            memory_bytes_per_second: None,
            least: None,
            ..measured(1.0)
        };
        let s = PhaseSummary::new(&[&resident], SCALE).unwrap();
        assert!(
            s.disk_bytes_per_second.is_none()
                && s.disk_share.is_none()
                && s.hidden.is_none()
                && s.roof.is_none()
                && s.memory_bytes_per_second.is_none()
        );
    }
}

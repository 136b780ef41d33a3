//! Decode steps that the device records while the current one runs: one for each outcome of the
//! current step's drafts, as far as the device keeps them.

use std::ops::Range;

use moeflux_base::Error;
use moeflux_compute::{Commit, Device, MAX_RECORDED_STEPS, RecordedStep, Span, State};

use super::{
    control::StepControl,
    forward::{LogitsRow, Model, StepContext},
    host_experts::HostExperts,
    kept_rows::{Keep, KeptRows, MAX_KEPT},
    logits_request::LogitsRequest,
    spans::{HeadSpan, LayerStates, RowKinds, SeqSpan},
};
use crate::experts::{cache::ExpertCache, stats::Stats};

/// Maximum number of tokens that the host gives to a step for a sequence.
const MAX_PLACES: usize = 2 * MAX_KEPT;

/// A decode step whose first parts the device has recorded ahead.
pub(super) struct StepAhead {
    number: RecordedStep,
    spans: Vec<SpanAhead>,
}

/// Share of a sequence in a step recorded ahead.
#[derive(PartialEq)]
struct SpanAhead {
    states: Vec<LayerStates>,
    position: usize,
    tokens: usize,
    drafts: usize,
    head: Option<HeadAhead>,
    keep: Option<Keep>,
    logits: LogitsRequest,
}

/// Share of the drafter.
#[derive(PartialEq)]
struct HeadAhead {
    position: usize,
    kept: Range<usize>,
    drafts: usize,
    are_rows: bool,
}

impl SpanAhead {
    fn new(span: &SeqSpan<'_>) -> Self {
        let &SeqSpan { states, position, tokens, drafts, keep, logits, .. } = span;
        let head = span.head.as_ref().map(|head| HeadAhead {
            position: head.position,
            kept: head.kept.clone(),
            drafts: head.drafts,
            are_rows: head.are_rows,
        });
        let (states, tokens) = (states.to_vec(), tokens.len());
        Self { states, position, tokens, drafts, head, keep, logits }
    }
}

/// Tokens that the host gives to a step, in the order of their spans: those after rows of the
/// drafter, then those of the rows.
fn given_tokens(spans: &[SeqSpan<'_>]) -> Vec<u32> {
    let of_span = |span: &SeqSpan<'_>| {
        let next = span.head.as_ref().map_or(&[][..], |head| head.next);
        [next, span.tokens].concat()
    };
    spans.iter().flat_map(of_span).collect()
}

/// Which outcomes of a step are recorded: the likeliest, and as many as the host has time for while
/// the device computes.
#[derive(Clone, Copy, Debug)]
pub(super) struct RecordPace {
    /// Maximum number of outcomes.
    limit: usize,
    /// Share of steps whose drafts were all right; newer ones weigh more.
    all_right: f64,
}

impl Default for RecordPace {
    fn default() -> Self {
        Self { limit: MAX_RECORDED_STEPS, all_right: 1.0 }
    }
}

impl RecordPace {
    /// Weight of the newest step.
    const NEWEST: f64 = 0.1;

    /// Takes whether all drafts of a step were right.
    pub(super) fn note_drafts(&mut self, were_right: bool) {
        let newest = f64::from(u8::from(were_right));
        self.all_right += Self::NEWEST * (newest - self.all_right);
    }

    /// Takes the time in which some of several outcomes were recorded, and the time in which the
    /// host waited for the device afterwards.
    pub(super) fn note_times(&mut self, recorded: usize, recording: f64, waited: f64) {
        let each = recording / recorded.max(1) as f64;
        if waited < each / 4.0 {
            self.limit = recorded.saturating_sub(1).max(1);
        } else if waited > each * 1.5 && recorded == self.limit {
            self.limit = (self.limit + 1).min(MAX_RECORDED_STEPS);
        }
    }

    /// Numbers of accepted rows of each span, the likeliest first.
    fn outcomes<'s>(self, spans: &'s [SeqSpan<'_>]) -> impl Iterator<Item = Vec<usize>> + 's {
        let count = spans.iter().map(|span| span.drafts + 1).product::<usize>();
        let is_right = self.all_right >= 0.5;
        let of_index = move |mut index: usize| {
            let accepted = spans.iter().map(|span| {
                let rows = span.drafts + 1;
                let place = index % rows;
                index /= rows;
                match (is_right, place) {
                    (true, 0) => rows,
                    // Wrong at the first draft, then at the second.
                    (true, place) => place,
                    (false, 1) => rows,
                    (false, place) => place.max(1),
                }
            });
            accepted.collect()
        };
        (0..count).map(of_index).take(self.limit)
    }
}

impl Model {
    /// Submits the step that was recorded for these spans and the tokens of the current step.
    pub(super) fn submit_ahead(
        &mut self,
        ctx: &mut StepContext<'_>,
        ahead: &[StepAhead],
        spans: &[SeqSpan<'_>],
    ) -> Result<bool, Error> {
        if ahead.is_empty() {
            return Ok(false);
        }
        let wanted: Vec<_> = spans.iter().map(SpanAhead::new).collect();
        let Some(step) = ahead.iter().find(|step| step.spans == wanted) else { return Ok(false) };
        self.write_table_rows(ctx)?;
        let submitted = ctx.device.submit_recorded(step.number, &given_tokens(spans));
        if !submitted.map_err(Error::at(|| "embedding"))? {
            return Ok(false);
        }
        let (parts, rows) = (self.first_card_parts(), self.tokens.len());
        for (i, layer) in self.layers().iter().enumerate().take(parts.end) {
            let experts = layer.moe().map_or(0, |(moe, _)| moe.most_needed(rows));
            let of_layer =
                Stats { experts_needed: experts, experts_hit: experts, ..Stats::default() };
            self.moe_state.counters.add_stats(i, &of_layer);
            ctx.stats.add_recorded(of_layer);
        }
        ctx.stats.tokens += if parts.contains(&self.own_layers()) { rows as u64 } else { 0 };
        Ok(true)
    }

    /// Takes whether all drafts of a step were right.
    pub(crate) fn note_drafts(&mut self, were_right: bool) {
        self.pace.note_drafts(were_right);
    }

    /// Records decode steps that may follow a step with one certain token per span, unless some
    /// layer has to read router ids back, or the host computes experts in it. Errors are ignored
    /// here, as the actual step reports them.
    pub(super) fn record_next(
        &mut self,
        device: &mut dyn Device,
        cache: &mut ExpertCache,
        host: Option<&HostExperts>,
        spans: &[SeqSpan<'_>],
    ) {
        let rows = spans.iter().map(SeqSpan::rows).sum();
        if host.is_some_and(|host| host.computes(rows))
            || spans.iter().any(|span| span.rows() != span.drafts + 1)
            || self.moe_state.ids_were_read
        {
            return;
        }
        // Only a step that is submitted counts.
        let counters = std::mem::take(&mut self.moe_state.counters);
        for accepted in self.pace.outcomes(spans) {
            if !self.record_after(device, cache, spans, &accepted) {
                break;
            }
        }
        self.moe_state.counters = counters;
    }

    /// Records the step after one outcome, with as many drafts as the current one. Returns whether
    /// it is recorded.
    fn record_after(
        &mut self,
        device: &mut dyn Device,
        cache: &mut ExpertCache,
        spans: &[SeqSpan<'_>],
        accepted: &[usize],
    ) -> bool {
        // On several cards, `device` is the first one.
        let parts = self.first_card_parts();
        let of_spans = || spans.iter().zip(accepted);
        let commits = |(span, accepted): (&SeqSpan<'_>, &usize)| {
            let (position, rows, drafts) = (span.position, span.rows(), span.drafts);
            let accepted = *accepted;
            let states = span.states.iter().take(parts.end).flatten().flatten();
            let of_state = move |state: &State| Commit {
                span: Span { drafts, ..Span::new(*state, position, rows) },
                accepted,
            };
            states.map(of_state).collect::<Vec<_>>()
        };
        let outcome: Vec<Commit> = of_spans().flat_map(commits).collect();
        // Tokens are places in the list that is given at submission.
        let places: Vec<u32> = (0..).take(MAX_PLACES * spans.len()).collect();
        let mut given = 0;
        let mut take_places = |count: usize| {
            given += count;
            places.get(given - count..given)
        };
        let mut next = Vec::with_capacity(spans.len());
        for (span, accepted) in of_spans() {
            let position = span.position + accepted;
            let kept = span.keep.map(|keep| keep.after(position, span.rows() - accepted));
            let head = match &span.head {
                None => None,
                Some(head) => {
                    let Some(kept) = kept.filter(|kept| kept.reach(position)) else { return false };
                    let Some(next) = take_places(kept.count) else { return false };
                    let position = head.position + head.next.len();
                    Some(HeadSpan { position, kept: kept.rows(), next, ..head.clone() })
                }
            };
            let Some(tokens) = take_places(span.tokens.len()) else { return false };
            let kept = match (&head, kept) {
                (Some(_), Some(kept)) => Some(KeptRows { count: 0, ..kept }),
                (_, kept) => kept,
            };
            let keep = kept.and_then(|kept| kept.keep(span.rows()));
            next.push(SeqSpan { position, tokens, head, keep, ..span.clone() });
        }
        let recorded = device.record_ahead(&outcome, given, &mut |device| {
            self.record_step(device, cache, &next, parts.clone())
        });
        let Ok(Some(number)) = recorded else { return false };
        let spans = next.iter().map(SpanAhead::new).collect();
        self.ahead.push(StepAhead { number, spans });
        true
    }

    /// Runs the ops of a step's parts. Returns whether they can be recorded.
    fn record_step(
        &mut self,
        device: &mut dyn Device,
        cache: &mut ExpertCache,
        spans: &[SeqSpan<'_>],
        parts: Range<usize>,
    ) -> bool {
        self.set_tokens(spans);
        let has_head = parts.contains(&self.own_layers());
        if !has_head && spans.iter().any(|span| span.head.is_some()) {
            return false;
        }
        let (host, row_store, stats) = (None, None, &mut Stats::default());
        let mut ctx = StepContext { device, cache, host, row_store, stats };
        let run = || {
            self.make_drafts(&mut ctx, spans, None)?;
            self.run_layers(&mut ctx, spans, &mut StepControl::default(), parts)?;
            if !has_head {
                return Ok(());
            }
            self.keep_rows(ctx.device, spans)?;
            let logit_rows: Vec<_> = LogitsRow::of_spans(spans).collect();
            let RowKinds { answers, .. } = RowKinds::of(spans);
            self.run_head(ctx.device, &logit_rows, answers).map_err(Error::at(|| "head"))
        };
        run().is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::spans::SpanKind;

    #[test]
    fn as_many_outcomes_are_recorded_as_the_host_has_time_for() {
        let mut pace = RecordPace::default();
        // Recording each takes longer than the device computes.
        pace.note_times(4, 8.0, 0.0);
        pace.note_times(3, 6.0, 0.0);
        pace.note_times(2, 4.0, 0.0);
        pace.note_times(1, 2.0, 0.0);
        assert_eq!(pace.limit, 1);
        // Steps without drafts have one outcome.
        pace.note_times(1, 2.0, 1.0);
        assert_eq!(pace.limit, 1);
        (0..9).for_each(|_| pace.note_times(pace.limit, 2.0, 40.0));
        assert_eq!(pace.limit, MAX_RECORDED_STEPS);
    }

    #[test]
    fn outcomes_begin_with_the_likeliest() {
        let tokens = [0; 4];
        let span = |drafts| SeqSpan {
            states: &[],
            position: 0,
            before: &[],
            tokens: &tokens[..drafts + 1],
            drafts,
            head: None,
            keep: None,
            logits: LogitsRequest::None,
            kind: SpanKind::Answer,
        };
        let mut pace = RecordPace::default();
        let all = |pace: RecordPace, drafts: &[usize]| -> Vec<Vec<usize>> {
            let spans: Vec<_> = drafts.iter().copied().map(span).collect();
            pace.outcomes(&spans).collect()
        };
        assert_eq!(all(pace, &[0, 0]), [[1, 1]]);
        assert_eq!(all(pace, &[3]), [[4], [1], [2], [3]]);
        assert_eq!(all(pace, &[1, 1]), [[2, 2], [1, 2], [2, 1], [1, 1]]);
        (0..9).for_each(|_| pace.note_drafts(false));
        assert_eq!(all(pace, &[3]), [[1], [4], [2], [3]]);
        assert_eq!(all(pace, &[0]), [[1]]);
    }
}

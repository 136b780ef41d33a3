//! Recording of decode steps that may follow the current one, and their submission.

use std::ops::Range;

use moeflux_base::Error;
use moeflux_compute::{Commit, Device, Span, State};

use super::{
    control::StepControl,
    forward::{LogitsRow, Model, StepContext},
    host_experts::HostExperts,
    kept_rows::{KeptRows, MAX_KEPT},
    spans::{HeadSpan, RowKinds, SeqSpan},
    steps_ahead::{SpanAhead, StepAhead, given_tokens},
};
use crate::experts::{cache::ExpertCache, stats::Stats};

/// Maximum number of tokens that the host gives to a step for a sequence.
const MAX_PLACES: usize = 2 * MAX_KEPT;

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

//! Decode steps that the device records while the current one runs: one for each outcome of the
//! current step's drafts, as far as the device keeps them.

use std::ops::Range;

use moeflux_base::Error;
use moeflux_compute::{Commit, Device, MAX_RECORDED_STEPS, RecordedStep, Span};

use super::{
    control::StepControl,
    draft_head::MAX_DRAFTS,
    forward::{LogitsRow, Model, StepContext},
    host_experts::HostExperts,
    logits_request::LogitsRequest,
    spans::{LayerStates, RowKinds, SeqSpan},
};
use crate::experts::{cache::ExpertCache, stats::Stats};

/// Tokens of a step before they are known.
const PLACEHOLDERS: [u32; MAX_DRAFTS + 1] = [0; MAX_DRAFTS + 1];

/// A decode step whose first parts the device has recorded ahead.
pub(super) struct StepAhead {
    number: RecordedStep,
    spans: Vec<SpanAhead>,
}

/// Share of a sequence in a step recorded ahead.
struct SpanAhead {
    states: Vec<LayerStates>,
    position: usize,
    drafts: usize,
    next_drafts: usize,
    /// Rows that the states of the drafter hold, if the step drafts.
    drafter_rows: Option<usize>,
    logits: LogitsRequest,
}

impl SpanAhead {
    fn new(span: &SeqSpan<'_>) -> Self {
        let SeqSpan { states, position, drafts, next_drafts, logits, .. } = *span;
        let drafter_rows = (next_drafts > 0).then_some(span.drafter_rows);
        Self { states: states.to_vec(), position, drafts, next_drafts, drafter_rows, logits }
    }

    fn matches(&self, span: &SeqSpan<'_>) -> bool {
        (self.position, self.drafts, self.next_drafts, self.logits)
            == (span.position, span.drafts, span.next_drafts, span.logits)
            && self.drafter_rows.is_none_or(|rows| rows == span.drafter_rows)
            && span.tokens.len() == self.drafts + 1
            && self.states == span.states
    }
}

impl StepAhead {
    fn matches(&self, spans: &[SeqSpan<'_>]) -> bool {
        self.spans.len() == spans.len()
            && self.spans.iter().zip(spans).all(|(ahead, span)| ahead.matches(span))
    }
}

/// Numbers of accepted rows of each span after a step, all of them in the first outcome.
fn outcomes(spans: &[SeqSpan<'_>]) -> impl Iterator<Item = Vec<usize>> {
    let count = spans.iter().map(|span| span.drafts + 1).product();
    let of_index = |mut index: usize| {
        let accepted = spans.iter().map(|span| {
            let rows = span.drafts + 1;
            let rejected = index % rows;
            index /= rows;
            // Rejected at the first draft, then at the second.
            if rejected == 0 { rows } else { rejected }
        });
        accepted.collect()
    };
    (0..count).map(of_index)
}

impl Model {
    /// Submits the step that was recorded for these spans and the tokens of the current step.
    pub(super) fn submit_ahead(
        &mut self,
        ctx: &mut StepContext<'_>,
        ahead: &[StepAhead],
        spans: &[SeqSpan<'_>],
    ) -> Result<bool, Error> {
        let Some(step) = ahead.iter().find(|step| step.matches(spans)) else { return Ok(false) };
        self.write_table_rows(ctx)?;
        let submitted = ctx.device.submit_recorded(step.number, &self.tokens);
        if !submitted.map_err(Error::at(|| "embedding"))? {
            return Ok(false);
        }
        let (parts, rows) = (self.first_card_parts(), self.tokens.len());
        let head = self.draft_head.as_ref().filter(|_| spans[0].next_drafts > 0);
        let layers = self.layers().iter().take(parts.end).chain(head.map(|head| &head.layer));
        for (i, layer) in layers.enumerate() {
            let experts = layer.moe().map_or(0, |(moe, _)| moe.most_needed(rows));
            let of_layer =
                Stats { experts_needed: experts, experts_hit: experts, ..Stats::default() };
            self.moe_state.counters.add_stats(i, &of_layer);
            ctx.stats.add_recorded(of_layer);
        }
        ctx.stats.tokens += if parts.contains(&self.own_layers()) { rows as u64 } else { 0 };
        Ok(true)
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
        let rows = spans.iter().map(|span| span.tokens.len()).sum();
        if spans.is_empty()
            || host.is_some_and(|host| host.computes(rows))
            || spans.iter().any(|span| span.tokens.len() != span.drafts + 1)
            || self.moe_state.ids_were_read
        {
            return;
        }
        // Only a step that is submitted counts.
        let counters = std::mem::take(&mut self.moe_state.counters);
        for accepted in outcomes(spans).take(MAX_RECORDED_STEPS) {
            if !self.record_after(device, cache, spans, &accepted) {
                break;
            }
        }
        self.moe_state.counters = counters;
    }

    /// Records the step after one outcome, with as many drafts as the current one has or makes. Returns whether
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
        let of_spans = spans.iter().zip(accepted);
        let outcome: Vec<Commit> = of_spans
            .clone()
            .flat_map(|(span, accepted)| {
                let states = span.states.iter().take(parts.end).flatten().flatten();
                states.map(|state| {
                    let rows = Span::new(*state, span.position, span.tokens.len());
                    Commit { span: Span { drafts: span.drafts, ..rows }, accepted: *accepted }
                })
            })
            .collect();
        let next: Vec<_> = of_spans
            .map(|(span, accepted)| {
                // After a wrong draft the head makes one.
                let drafts = match span.next_drafts {
                    0 => span.drafts,
                    made if *accepted == span.tokens.len() => made,
                    _ => 1,
                };
                SeqSpan {
                    position: span.position + accepted,
                    drafter_rows: span.drafter_rows + accepted,
                    tokens: &PLACEHOLDERS[..drafts + 1],
                    drafts,
                    ..*span
                }
            })
            .collect();
        let rows = next.iter().map(|span| span.tokens.len()).sum();
        let recorded = device.record_ahead(&outcome, rows, &mut |device| {
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
        self.tokens.clear();
        spans.iter().for_each(|span| self.tokens.extend_from_slice(span.tokens));
        let has_head = parts.contains(&self.own_layers());
        let mut stats = Stats::default();
        let mut ctx = StepContext {
            device: &mut *device,
            cache,
            host: None,
            row_store: None,
            stats: &mut stats,
        };
        if self.run_layers(&mut ctx, spans, &mut StepControl::default(), parts).is_err() {
            return false;
        }
        let logit_rows: Vec<_> = LogitsRow::of_spans(spans).collect();
        let RowKinds { answers, .. } = RowKinds::of(spans);
        let mut ctx = StepContext { device, cache, host: None, row_store: None, stats: &mut stats };
        !has_head
            || self.run_head(ctx.device, &logit_rows, answers).is_ok() && {
                let drafts = spans.iter().any(|span| span.next_drafts > 0);
                !drafts
                    || self.can_draft_in_step(&mut ctx, spans)
                        && self.draft_in_step(&mut ctx, spans).is_ok()
            }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::spans::SpanKind;

    #[test]
    fn outcomes_begin_with_the_likeliest() {
        let span = |drafts| SeqSpan {
            states: &[],
            position: 0,
            before: &[],
            tokens: &PLACEHOLDERS[..drafts + 1],
            drafts,
            next_drafts: 0,
            drafter_rows: 0,
            logits: LogitsRequest::None,
            kind: SpanKind::Answer,
        };
        let all = |drafts: &[usize]| -> Vec<Vec<usize>> {
            let spans: Vec<_> = drafts.iter().copied().map(span).collect();
            outcomes(&spans).collect()
        };
        assert_eq!(all(&[0, 0]), [[1, 1]]);
        assert_eq!(all(&[3]), [[4], [1], [2], [3]]);
        assert_eq!(all(&[1, 1]), [[2, 2], [1, 2], [2, 1], [1, 1]]);
    }
}

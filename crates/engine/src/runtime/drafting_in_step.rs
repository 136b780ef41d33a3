//! Runs of the drafter in the submission of a step, before the host has chosen tokens.
//!
//! The device takes the likeliest token after each row as the next one, and drafts after every row,
//! as it does not know which drafts of the step are right. The host uses what belongs to the tokens
//! that it chooses. A card thus computes step and drafts without a wait in between, and can record
//! both ahead.

use moeflux_base::Error;
use moeflux_compute::{Device, Error as ComputeError, Op, View};

use super::{
    draft_head::{DraftHead, DraftList, DraftSpan, MAX_DRAFTS},
    drafting::{HeadRun, HeadSpan, HeadTokens},
    forward::{Model, StepContext},
    logits_request::TOP_CANDIDATES,
    spans::{RowKinds, SeqSpan, SpanKind},
};

/// Maximum number of rows of a step that drafts.
pub(super) const MAX_ROWS: usize = 16;
/// Values of a row of [`Model::drafted_view`]: a token and its logit.
const DRAFT_VALUES: usize = 2;
/// Maximum number of values of [`Model::drafted_view`].
pub(super) const DRAFTED_VALUES: usize = (2 * MAX_ROWS + MAX_DRAFTS) * DRAFT_VALUES;

/// Drafts that were made in a step.
#[derive(Debug)]
pub(crate) struct StepDrafts {
    rows: usize,
    /// The likeliest token after each row, the draft after each of these, then further drafts after
    /// the last one.
    tokens: Vec<u32>,
}

impl StepDrafts {
    /// Drafts after the rows of a span; `None` if other tokens than the likeliest follow them.
    pub(crate) fn of_span(&self, span: &DraftSpan<'_>) -> Option<DraftList> {
        let end = span.row + span.next.len();
        let is_likeliest = span.held.is_empty()
            && self.tokens[..self.rows].get(span.row..end) == Some(&span.next[..]);
        let further = if end == self.rows { &self.tokens[2 * self.rows..] } else { &[] };
        let mut drafts = DraftList::default();
        let after = [self.tokens[self.rows + end - 1]];
        after.iter().chain(further).take(span.wanted).for_each(|token| drafts.push(*token));
        is_likeliest.then_some(drafts)
    }
}

impl Model {
    /// Whether a step over these spans drafts, too: where all experts are resident on a device that
    /// records steps ahead.
    pub(super) fn can_draft_in_step(
        &self,
        ctx: &mut StepContext<'_>,
        spans: &[SeqSpan<'_>],
    ) -> bool {
        let Some(head) = self.draft_head.as_ref().filter(|head| head.runs_in_step) else {
            return false;
        };
        let rows: usize = spans.iter().map(|span| span.tokens.len()).sum();
        let drafts = |span: &SeqSpan<'_>| {
            let drafts = span.next_drafts;
            (1..=if spans.len() == 1 { MAX_DRAFTS } else { 1 }).contains(&drafts)
                && span.kind == SpanKind::Answer
                && span.tokens.len() == span.drafts + 1
                && span.drafter_rows + span.tokens.len() + drafts <= head.context
        };
        let layer = self.own_layers();
        let has_table = |ctx: &mut StepContext<'_>| {
            matches!(ctx.cache.resident_table(&mut *ctx.device, layer), Ok(Some(_)))
        };
        ctx.device.records_steps()
            && self.streams() == 1
            && 2 * rows <= self.head_rows.min(2 * MAX_ROWS)
            && spans.iter().all(drafts)
            && !self.moe_state.ids_were_read
            && self.moe_state.recorder.is_none()
            && ctx.host.as_ref().is_none_or(|host| !host.computes(rows))
            && (head.layer.moe().is_none() || has_table(ctx))
    }

    /// Drafts after each row of a step, whose hidden states are [`Model::normed`] and whose logits
    /// are [`Model::logits`]. Results stay on the device, in [`Model::drafted_view`].
    pub(super) fn draft_in_step(
        &mut self,
        ctx: &mut StepContext<'_>,
        spans: &[SeqSpan<'_>],
    ) -> Result<(), Error> {
        let Some(mut head) = self.draft_head.take() else { return Ok(()) };
        let drafted = self.run_in_step(&mut head, ctx, spans);
        self.draft_head = Some(head);
        drafted
    }

    fn run_in_step(
        &mut self,
        head: &mut DraftHead,
        ctx: &mut StepContext<'_>,
        spans: &[SeqSpan<'_>],
    ) -> Result<(), Error> {
        let rows: usize = spans.iter().map(|span| span.tokens.len()).sum();
        let (normed, drafted) = (self.normed(rows), self.drafted_view(spans));
        let logits = self.logits(2 * rows);
        let best = drafted.slice(0, rows);
        let choose = |device: &mut dyn Device, logits: View, best: View| {
            device.run(&Op::TopLogits { logits, best })
        };
        choose(&mut *ctx.device, logits.slice(0, rows), best).map_err(Error::at(|| "drafter"))?;
        let own_layers = self.own_layers();
        let head_spans = |earlier: usize| -> Vec<HeadSpan> {
            let of_span = |span: &SeqSpan<'_>| HeadSpan {
                states: span.states[own_layers],
                position: span.drafter_rows + earlier,
                rows: if earlier == 0 { span.tokens.len() } else { 1 },
            };
            spans.iter().map(of_span).collect()
        };
        // The residual of the step stays, for a run of the head after other tokens.
        let mut run =
            |model: &mut Self, spans: &[HeadSpan], ids: View, hidden: View, best: View| {
                let count = hidden.rows;
                let tokens = HeadTokens::Chosen(ids.columns(0, 1));
                let kinds = RowKinds { answers: count, long: 0 };
                let rows_of_head =
                    HeadRun { tokens, hidden, first_row: rows, kinds, needed: 0..count };
                model.run_head_layer(head, ctx, spans, rows_of_head)?;
                let device = &mut *ctx.device;
                let x = model.residual(rows + count).slice(rows, count);
                let logits = logits.slice(rows, count);
                device
                    .run(&head.norm.op(x, model.eps, hidden))
                    .and_then(|()| model.project_logits(device, hidden, logits, count))
                    .and_then(|()| choose(device, logits, best))
                    .map_err(Error::at(|| "drafter"))
            };
        run(self, &head_spans(0), best, normed, drafted.slice(rows, rows))?;
        // Further drafts follow the last row only.
        for i in 2 * rows..drafted.rows {
            let (ids, hidden) = (drafted.slice(i - 1, 1), normed.slice(rows - 1, 1));
            let earlier = rows + i - 2 * rows;
            run(self, &head_spans(earlier), ids, hidden, drafted.slice(i, 1))?;
        }
        Ok(())
    }

    /// Whether an error of the current step may be the drafter's, which then runs in no step again:
    /// values that are not finite fail a step, but not the drafts after one.
    pub(super) fn is_of_drafter(&mut self, error: &Error) -> bool {
        let is_nan = |source: &ComputeError| {
            matches!(source, ComputeError::RouterNan { .. } | ComputeError::LogitsNan { .. })
        };
        let may_be =
            self.drafts_in_step && matches!(error, Error::Compute { source, .. } if is_nan(source));
        if let Some(head) = self.draft_head.as_mut().filter(|_| may_be) {
            head.runs_in_step = false;
        }
        may_be
    }

    /// Tokens and logits of a step that drafts, in the order of [`StepDrafts::tokens`].
    pub(super) fn drafted_view(&self, spans: &[SeqSpan<'_>]) -> View {
        let rows: usize = spans.iter().map(|span| span.tokens.len()).sum();
        let further = spans.first().map_or(0, |span| span.next_drafts.saturating_sub(1));
        // After the candidates of the step.
        let offset = rows * TOP_CANDIDATES;
        View { offset, ..View::rows(self.top_logits, 2 * rows + further, DRAFT_VALUES) }
    }

    /// Takes the drafts that the current step has made.
    pub(crate) fn take_step_drafts(&mut self) -> Option<StepDrafts> {
        self.step_drafts.take()
    }

    /// Takes the values of [`Model::drafted_view`] of a step of `rows` rows. None if one is not
    /// finite.
    pub(super) fn take_drafted(&mut self, rows: usize, values: &[f32]) {
        let is_finite = values.iter().all(|value| value.is_finite());
        let tokens = || values.chunks_exact(DRAFT_VALUES).map(|pair| pair[0] as u32).collect();
        self.step_drafts = is_finite.then(|| StepDrafts { rows, tokens: tokens() });
    }
}

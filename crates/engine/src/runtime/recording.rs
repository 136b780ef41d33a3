//! Recording of decode steps that may follow the current one, and their submission.

use std::{ops::Range, sync::Arc};

use moeflux_base::Error;
use moeflux_compute::{Commit, Device, Span, State};

use super::{
    contents::PromptImages,
    control::StepControl,
    forward::{Model, StepContext},
    host_experts::HostExperts,
    kept_rows::{KeptRows, MAX_KEPT},
    logits_row::LogitsRow,
    served_step::ServedStep,
    spans::{HeadSpan, RowKinds, SeqSpan},
    steps_ahead::{SpanAhead, StepAhead, given_tokens},
};
use crate::experts::{cache::ExpertCache, stats::Stats};

/// List of places of tokens, of which some have been taken.
struct Places<'a> {
    list: &'a [u32],
    given: usize,
}

impl<'a> Places<'a> {
    /// The next places; `None` if there are fewer.
    fn take(&mut self, count: usize) -> Option<&'a [u32]> {
        self.given += count;
        self.list.get(self.given - count..self.given)
    }
}

/// Steps that hand nothing over after one that could not be recorded: lending experts and returning
/// them takes time.
const PAUSE: u32 = 32;

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

    /// Forgets steps recorded ahead: the division of experts changes.
    pub(crate) fn forget_recorded(&mut self) {
        self.ahead.clear();
    }

    /// Lets the next step hand work over, also after one that could not be recorded.
    pub(crate) fn retry_hand_overs(&mut self) {
        self.hand_over_pause = 0;
    }

    /// Takes whether all drafts of a step were right.
    pub(crate) fn note_drafts(&mut self, were_right: bool) {
        self.pace.note_drafts(were_right);
    }

    /// Records decode steps that may follow a step with one certain token per span, unless some
    /// layer has to read router ids back, or the host computes experts that are not handed over.
    /// Errors are ignored here, as the actual step reports them.
    pub(super) fn record_next(
        &mut self,
        device: &mut dyn Device,
        cache: &mut ExpertCache,
        mut host: Option<&mut HostExperts>,
        spans: &[SeqSpan<'_>],
    ) {
        let rows = spans.iter().map(SeqSpan::rows).sum();
        let waits =
            |host: &HostExperts| host.computes(rows) && !self.may_hand_over(host, cache, spans);
        if host.as_deref().is_some_and(waits)
            || spans.iter().any(|span| span.rows() != span.drafts + 1)
            || self.moe_state.ids_were_read
        {
            return;
        }
        // Only a step that is submitted counts.
        let counters = std::mem::take(&mut self.moe_state.counters);
        for accepted in self.pace.outcomes(spans) {
            let host = host.as_deref_mut();
            if !self.record_after(device, cache, host, spans, &accepted) {
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
        host: Option<&mut HostExperts>,
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
        // Without one, the step would follow the committed states.
        if outcome.is_empty() {
            return false;
        }
        // Tokens are places in the list that is given at submission.
        let list: Vec<u32> = (0..).take(MAX_PLACES * spans.len()).collect();
        let mut places = Places { list: &list, given: 0 };
        let mut next = Vec::with_capacity(spans.len());
        for (span, accepted) in of_spans() {
            let position = span.position + accepted;
            let kept = span.keep.map(|keep| keep.after(position, span.rows() - accepted));
            let head = match &span.head {
                None => None,
                Some(head) => {
                    let Some(kept) = kept.filter(|kept| kept.reach(position)) else { return false };
                    let Some(next) = places.take(kept.count) else { return false };
                    let position = head.position + head.next.len();
                    Some(HeadSpan { position, kept: kept.rows(), next, ..head.clone() })
                }
            };
            let Some(tokens) = places.take(span.tokens.len()) else { return false };
            let kept = match (&head, kept) {
                (Some(_), Some(kept)) => Some(KeptRows { count: 0, ..kept }),
                (_, kept) => kept,
            };
            let keep = kept.and_then(|kept| kept.keep(span.rows()));
            let images = PromptImages::NONE;
            next.push(SeqSpan { position, tokens, images, head, keep, ..span.clone() });
        }
        let recorded = self.record_spans(device, cache, host, &outcome, &next, places.given);
        let is_recorded = recorded.is_some();
        self.ahead.extend(recorded);
        is_recorded
    }

    /// Records the step of these spans after an outcome of the current one. Their tokens are places
    /// in a list of `given` tokens.
    fn record_spans(
        &mut self,
        device: &mut dyn Device,
        cache: &mut ExpertCache,
        mut host: Option<&mut HostExperts>,
        outcome: &[Commit],
        spans: &[SeqSpan<'_>],
        given: usize,
    ) -> Option<StepAhead> {
        let parts = self.first_card_parts();
        let recorded = device.record_ahead(outcome, given, &mut |device| {
            self.record_step(device, cache, host.as_deref_mut(), spans, parts.clone())
        });
        let number = recorded.ok().flatten()?;
        Some(StepAhead { number, spans: spans.iter().map(SpanAhead::new).collect() })
    }

    /// Records the current step, to be submitted at once. `None` if something in it cannot be
    /// recorded.
    pub(super) fn record_now(
        &mut self,
        ctx: &mut StepContext<'_>,
        spans: &[SeqSpan<'_>],
    ) -> Option<StepAhead> {
        let rows = self.tokens.len();
        let list: Vec<u32> = (0..rows as u32).collect();
        let mut places = Places { list: &list, given: 0 };
        let spans = spans.iter().map(|span| {
            let tokens = places.take(span.tokens.len())?;
            Some(SeqSpan { tokens, ..span.clone() })
        });
        let spans = spans.collect::<Option<Vec<_>>>()?;
        // Memory of states cannot move while a step is recorded.
        let states = spans.iter().flat_map(|span| {
            let of_layers = span.states.iter().take(self.own_layers()).flatten().flatten();
            of_layers.map(|state| Span::new(*state, span.position, span.rows()))
        });
        ctx.device.grow_states(&mut { states }).ok()?;
        let tokens = std::mem::take(&mut self.tokens);
        // Only a step that is submitted counts.
        let counters = std::mem::take(&mut self.moe_state.counters);
        let StepContext { device, cache, host, .. } = ctx;
        let host = host.as_deref_mut();
        let recorded = self.record_spans(*device, cache, host, &[], &spans, places.given);
        (self.tokens, self.moe_state.counters) = (tokens, counters);
        recorded
    }

    /// Whether the card hands the host's experts of a step over.
    pub(super) fn hands_over(&mut self, ctx: &StepContext<'_>, spans: &[SeqSpan<'_>]) -> bool {
        if self.hand_over_pause > 0 {
            self.hand_over_pause -= 1;
            return false;
        }
        let may = |host: &HostExperts| self.may_hand_over(host, ctx.cache, spans);
        ctx.host.as_deref().is_some_and(may)
    }

    /// Whether the card hands the host's experts of a step over: all commands are recorded at once,
    /// and no one else wants the router's ids.
    fn may_hand_over(
        &self,
        host: &HostExperts,
        cache: &ExpertCache,
        spans: &[SeqSpan<'_>],
    ) -> bool {
        let rows = spans.iter().map(SeqSpan::rows).sum();
        let logit_rows = || LogitsRow::of_spans(spans);
        let is_one_run = logit_rows().count() <= self.head_rows
            && (logit_rows().all(|row| row.is_hidden) || logit_rows().all(|row| !row.is_hidden));
        host.hands_over(rows)
            && cache.has_fixed_slots()
            && self.moe_state.recorder.is_none()
            && is_one_run
            && spans.iter().all(|span| span.head.is_none())
            && self.first_card_parts().contains(&self.own_layers())
    }

    /// Submits a step that hands work over, recorded ahead or now, while the host serves it.
    /// Returns false if it cannot be recorded.
    pub(super) fn submit_handing_over(
        &mut self,
        ctx: &mut StepContext<'_>,
        ahead: Vec<StepAhead>,
        spans: &[SeqSpan<'_>],
    ) -> Result<bool, Error> {
        let rows = self.tokens.len();
        let Some(host) = ctx.host.as_deref_mut() else { return Ok(false) };
        let layers = self.layers().iter().enumerate().filter_map(|(i, layer)| {
            host.placement()
                .computes_in(i, rows)
                .then(|| layer.moe())?
                .map(|(moe, _)| moe.served_layer(i))
        });
        let layers: Vec<_> = layers.collect();
        // Without memory for that, layers wait for the host.
        if host.borrow_all(ctx.device, ctx.cache, &layers).is_err() {
            return Ok(false);
        }
        let wanted: Vec<_> = spans.iter().map(SpanAhead::new).collect();
        let steps = match ahead.iter().any(|step| step.spans == wanted) {
            true => ahead,
            false => self.record_now(ctx, spans).into_iter().collect(),
        };
        if steps.is_empty() {
            self.hand_over_pause = PAUSE;
            return Ok(false);
        }
        let RowKinds { answers, .. } = RowKinds::of(spans);
        let counters = Arc::clone(&self.moe_state.counters);
        layers.iter().for_each(|layer| self.moe_state.see_ids(layer.layer));
        if let Some(host) = ctx.host.as_deref_mut() {
            let placement = Arc::clone(host.placement());
            host.start_serving(ServedStep { layers, rows, answers, counters, placement });
        }
        let submitted = self.submit_ahead(ctx, &steps, spans);
        if !matches!(submitted, Ok(true)) {
            ctx.device.abandon_hand_overs();
            if let Some(host) = ctx.host.as_deref_mut() {
                host.abandon(ctx.device);
            }
        }
        submitted
    }

    /// Runs the ops of a step's parts. Returns whether they can be recorded.
    fn record_step(
        &mut self,
        device: &mut dyn Device,
        cache: &mut ExpertCache,
        host: Option<&mut HostExperts>,
        spans: &[SeqSpan<'_>],
        parts: Range<usize>,
    ) -> bool {
        self.set_tokens(spans);
        let has_head = parts.contains(&self.own_layers());
        if !has_head && spans.iter().any(|span| span.head.is_some()) {
            return false;
        }
        let (row_store, stats) = (None, &mut Stats::default());
        let hands_over = host.as_deref().is_some_and(|host| self.may_hand_over(host, cache, spans));
        let host = host.filter(|_| hands_over);
        let mut ctx = StepContext { device, cache, host, hands_over, row_store, stats };
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

//! Runs of the drafter: its drafts at the start of a step, from rows that wait for it, and the rows
//! of prompts.
//!
//! Drafts stay on the device, where the step looks them up: a card computes drafts and step without
//! a wait in between, and can record both ahead.

use std::ops::Range;

use moeflux_base::Error;
use moeflux_compute::{Device, Op, Span, View};

use super::{
    draft_head::DraftHead,
    forward::{Model, StepContext},
    kept_rows::{DRAFT_VALUES, MAX_DRAFTS, SEQUENCE_DRAFTS},
    layer::{FUSED_INPUT, ResidualRows, RowPositions, Step, StepObserver},
    spans::{LayerStates, RowKinds, SeqSpan, SpanKind},
};

/// Token after each row of the drafter.
#[derive(Clone, Copy)]
enum NextTokens<'a> {
    Given(&'a [u32]),
    /// `(rows, 1)`: chosen by the device.
    Drafted(View),
}

/// Rows of one sequence that the drafter takes.
struct DrafterRows<'a> {
    states: &'a LayerStates,
    /// Rows that the states hold.
    position: usize,
    /// Hidden states, `(rows, hidden)`.
    hidden: View,
    next: NextTokens<'a>,
}

/// Rows of a prompt that the drafter takes after the step.
pub(crate) struct PromptRows<'a> {
    pub(crate) states: &'a LayerStates,
    /// Rows that the states hold.
    pub(crate) position: usize,
    /// Rows of the step.
    pub(crate) rows: Range<usize>,
    /// Token after each row.
    pub(crate) next: &'a [u32],
    pub(crate) kind: SpanKind,
}

impl PromptRows<'_> {
    /// Rows that are appended to states.
    pub(crate) fn appended(&self) -> impl Iterator<Item = Span> {
        let (position, rows) = (self.position, self.next.len());
        self.states.iter().flatten().map(move |state| Span::new(*state, position, rows))
    }
}

impl Model {
    /// Whether a drafter is loaded.
    pub(crate) fn has_drafter(&self) -> bool {
        self.draft_head.is_some()
    }

    /// Makes the drafts of a step from rows that wait, whose states they enter. Rows of drafts stay
    /// in the states until the rows of the tokens themselves take their place.
    pub(super) fn make_drafts(
        &mut self,
        ctx: &mut StepContext<'_>,
        spans: &[SeqSpan<'_>],
        observer: Option<&mut (dyn StepObserver + '_)>,
    ) -> Result<(), Error> {
        if spans.iter().all(|span| span.head.is_none()) {
            return Ok(());
        }
        self.with_head(|model, head| model.run_drafts(head, ctx, spans, observer))
    }

    /// Has the drafter take rows of prompts of the step that has just ended.
    pub(crate) fn take_prompts(
        &mut self,
        mut ctx: StepContext<'_>,
        prompts: &[PromptRows<'_>],
        observer: Option<&mut (dyn StepObserver + '_)>,
    ) -> Result<(), Error> {
        let taken =
            self.with_head(|model, head| model.run_prompts(head, &mut ctx, prompts, observer));
        if taken.is_err() {
            if let Some(host) = &mut ctx.host {
                host.abandon(ctx.device);
            }
            ctx.cache.recover(ctx.device);
        }
        taken
    }

    fn with_head(
        &mut self,
        run: impl FnOnce(&mut Self, &mut DraftHead) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let Some(mut head) = self.draft_head.take() else { return Ok(()) };
        // Traces are of the model's own layers.
        let recorder = self.moe_state.recorder.take();
        let result = run(self, &mut head);
        self.moe_state.recorder = recorder;
        self.draft_head = Some(head);
        result
    }

    fn run_drafts(
        &mut self,
        head: &mut DraftHead,
        ctx: &mut StepContext<'_>,
        spans: &[SeqSpan<'_>],
        mut observer: Option<&mut (dyn StepObserver + '_)>,
    ) -> Result<(), Error> {
        ctx.device.enter_layer(self.own_layers(), None).map_err(Error::at(|| "drafter"))?;
        let all: Vec<_> = spans.iter().filter_map(|span| span.head.as_ref()).enumerate().collect();
        // Index of each sequence that has drafted before, by the row of its hidden state.
        let mut rows_before: Vec<usize> = Vec::new();
        for draft in 0..MAX_DRAFTS {
            let drafting = || all.iter().filter(|(_, span)| span.drafts > draft);
            let rows = drafting().map(|(i, span)| match draft.checked_sub(1) {
                None => DrafterRows {
                    states: span.states,
                    position: span.position,
                    hidden: head.kept_view(span.kept.clone(), self.hidden),
                    next: NextTokens::Given(span.next),
                },
                Some(before) => {
                    let row = rows_before.iter().position(|of_row| of_row == i).unwrap_or(0);
                    DrafterRows {
                        states: span.states,
                        position: span.position + span.next.len() + before,
                        hidden: self.normed(row + 1).slice(row, 1),
                        next: NextTokens::Drafted(head.drafts_view(*i, before..draft)),
                    }
                }
            });
            let rows: Vec<_> = rows.collect();
            if rows.is_empty() {
                break;
            }
            let last_rows = rows.iter().scan(0, |end, rows| {
                *end += rows.hidden.rows;
                Some(*end - 1)
            });
            let last_rows: Vec<usize> = last_rows.collect();
            let count = last_rows[last_rows.len() - 1] + 1;
            let needed = if observer.is_some() { 0..count } else { last_rows[0]..count };
            let kinds = RowKinds { answers: count, long: 0 };
            self.run_head_layer(head, ctx, &rows, kinds, needed)?;
            let device = &mut *ctx.device;
            if let Some(observer) = &mut observer {
                self.show_logits(head, device, count, &mut **observer)?;
            }
            rows_before = drafting().map(|(i, _)| *i).collect();
            self.choose_drafts(head, device, &last_rows, &rows_before, draft)
                .map_err(Error::at(|| "drafter"))?;
        }
        Ok(())
    }

    fn run_prompts(
        &mut self,
        head: &mut DraftHead,
        ctx: &mut StepContext<'_>,
        prompts: &[PromptRows<'_>],
        observer: Option<&mut (dyn StepObserver + '_)>,
    ) -> Result<(), Error> {
        ctx.device.enter_layer(self.own_layers(), None).map_err(Error::at(|| "drafter"))?;
        let count = prompts.iter().map(|prompt| prompt.next.len()).sum();
        let mut rows = Vec::with_capacity(prompts.len());
        let mut done = 0;
        for PromptRows { states, position, rows: of_step, next, .. } in prompts {
            let hidden = self.normed(count).slice(done, next.len());
            done += next.len();
            self.hidden_states(&mut *ctx.device, of_step.clone(), 0, hidden)
                .map_err(Error::at(|| "drafter"))?;
            rows.push(DrafterRows {
                states,
                position: *position,
                hidden,
                next: NextTokens::Given(next),
            });
        }
        let of_prompt = |prompt: &PromptRows<'_>| (prompt.kind, prompt.next.len());
        let kinds = RowKinds::count(prompts.iter().map(of_prompt));
        let needed = if observer.is_some() { 0..count } else { 0..0 };
        self.run_head_layer(head, ctx, &rows, kinds, needed)?;
        match observer {
            Some(observer) => self.show_logits(head, &mut *ctx.device, count, observer),
            None => Ok(()),
        }
    }

    /// Keeps hidden states of rows of the step for the drafter.
    pub(super) fn keep_rows(
        &self,
        device: &mut dyn Device,
        spans: &[SeqSpan<'_>],
    ) -> Result<(), Error> {
        let Some(head) = &self.draft_head else { return Ok(()) };
        let mut end = 0;
        for span in spans {
            end += span.rows();
            let Some(keep) = span.keep else { continue };
            let out = head.kept_view(keep.place(), self.hidden);
            let answers = if span.kind == SpanKind::Answer { keep.rows } else { 0 };
            self.hidden_states(device, end - keep.rows..end, answers, out)
                .map_err(Error::at(|| "drafter"))?;
        }
        Ok(())
    }

    /// Hidden states after the final norm of rows of the step, of which the first `answers` belong
    /// to an answer.
    fn hidden_states(
        &self,
        device: &mut dyn Device,
        rows: Range<usize>,
        answers: usize,
        out: View,
    ) -> Result<(), moeflux_compute::Error> {
        let x = self.residual(rows.end).slice(rows.start, rows.len());
        let of_rows = ResidualRows { x, answers, eps: self.eps };
        self.output.read(self.scratch.shared(), of_rows, out, &mut |op| device.run(op))
    }

    /// Runs the head's layer over rows. Its output, for the rows that need one, is the residual.
    fn run_head_layer(
        &mut self,
        head: &mut DraftHead,
        ctx: &mut StepContext<'_>,
        sequences: &[DrafterRows<'_>],
        kinds: RowKinds,
        needed: Range<usize>,
    ) -> Result<(), Error> {
        let StepContext { device, cache, host, hands_over, stats, .. } = ctx;
        let (hidden, eps, layer) = (self.hidden, self.eps, self.own_layers());
        let rows = sequences.iter().map(|sequence| sequence.hidden.rows).sum();
        let x = self.residual(rows);
        let fused = self.scratch.shared().view(FUSED_INPUT, rows, 2 * hidden);
        let [embedding, state] = [fused.columns(0, hidden), fused.columns(hidden, hidden)];
        let norm =
            |x, weight, out| Op::RmsNorm { x, weight: Some(weight), per_head: false, eps, out };
        let mut row = 0;
        head.tokens.clear();
        for spans in &mut head.spans {
            spans.clear();
        }
        let mut inputs = |device: &mut dyn Device| {
            for DrafterRows { states, position, hidden, next } in sequences {
                let count = hidden.rows;
                let (of_rows, table) = (x.slice(row, count), head.embed);
                device.run(&norm(*hidden, head.hidden_norm, state.slice(row, count)))?;
                match *next {
                    NextTokens::Given(tokens) => {
                        device.run(&Op::Embed { table, tokens, out: of_rows })?;
                        head.tokens.extend_from_slice(tokens);
                    }
                    NextTokens::Drafted(ids) => {
                        device.run(&Op::EmbedChosen { table, ids, out: of_rows })?;
                        head.tokens.resize(head.tokens.len() + count, 0);
                    }
                }
                for (spans, state) in head.spans.iter_mut().zip(*states) {
                    spans.extend(state.map(|state| Span::new(state, *position, count)));
                }
                row += count;
            }
            if self.embed_scale != 1.0 {
                device.run(&Op::Scale { x, factor: self.embed_scale })?;
            }
            device.run(&norm(x, head.embed_norm, embedding))?;
            let (weight, bias, answers) = (head.fuse, None, kinds.answers);
            device.run(&Op::MatMul { x: fused, weight, bias, exact: false, answers, out: x })
        };
        inputs(&mut **device).map_err(Error::at(|| "drafter"))?;
        let before = **stats;
        let mut step = Step {
            device: &mut **device,
            cache,
            host: host.as_deref_mut(),
            hands_over: *hands_over,
            moe_state: &mut self.moe_state,
            scratch: &self.scratch,
            stats,
            observer: None,
            row_store: None,
            spans: &head.spans,
            // Rows of the drafter have positions of their own.
            positions: RowPositions::Indices,
            tokens: &head.tokens,
            layer,
            next: None,
            rows,
            first_row: 0,
            kinds,
            hidden,
            streams: 1,
            eps,
            gathered: None,
        };
        head.layer.run_for(&mut step, needed)?;
        self.moe_state.counters.add_stats(layer, &stats.since(&before));
        match host {
            Some(host) => {
                let collected = host.collect(&mut **device, cache);
                collected.map(drop).map_err(Error::at(|| "experts on the host"))
            }
            None => Ok(()),
        }
    }

    /// Chooses the likeliest token after each of some rows of the residual, as a draft of as many
    /// sequences. Hidden states of the rows are [`Model::normed`] then.
    fn choose_drafts(
        &self,
        head: &DraftHead,
        device: &mut dyn Device,
        rows: &[usize],
        sequences: &[usize],
        draft: usize,
    ) -> Result<(), moeflux_compute::Error> {
        let logits = self.draft_logits(head, device, rows)?;
        let mut first = 0;
        for run in sequences.chunk_by(|a, b| a + 1 == *b) {
            let best = View {
                rows: run.len(),
                row_stride: SEQUENCE_DRAFTS,
                ..head.drafts_view(run[0], draft..draft + 1)
            };
            let best = View { width: DRAFT_VALUES, ..best };
            device.run(&Op::TopLogits { logits: logits.slice(first, run.len()), best })?;
            first += run.len();
        }
        Ok(())
    }

    /// Logits after some rows of the residual, whose hidden states are [`Model::normed`] then.
    fn draft_logits(
        &self,
        head: &DraftHead,
        device: &mut dyn Device,
        rows: &[usize],
    ) -> Result<View, moeflux_compute::Error> {
        let x = self.normed(rows.len());
        for (i, row) in rows.iter().enumerate() {
            let row = self.residual(row + 1).slice(*row, 1);
            device.run(&head.norm.op(row, self.eps, x.slice(i, 1)))?;
        }
        let logits = self.logits(rows.len());
        self.project_logits(device, x, logits, rows.len()).map(|()| logits)
    }

    /// Shows an observer the logits after the first `rows` rows of the residual.
    fn show_logits(
        &self,
        head: &DraftHead,
        device: &mut dyn Device,
        rows: usize,
        observer: &mut (dyn StepObserver + '_),
    ) -> Result<(), Error> {
        let mut all = Vec::new();
        for row in 0..rows {
            let logits =
                self.draft_logits(head, device, &[row]).map_err(Error::at(|| "drafter"))?;
            let done = all.len();
            all.resize(done + logits.width, 0.0);
            device.read(logits, &mut all[done..]).map_err(Error::at(|| "drafter"))?;
        }
        observer.drafter(&all);
        Ok(())
    }
}

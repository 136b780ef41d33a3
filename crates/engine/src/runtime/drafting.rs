//! Runs of the drafter after a step: its rows enter the states of the head, and the drafts of the
//! next step are made.

use std::ops::Range;

use moeflux_base::Error;
use moeflux_compute::{Device, Op, Span, View};

use super::{
    draft_head::{DraftHead, DraftSpan},
    drafting_in_step::MAX_ROWS,
    forward::{Model, StepContext},
    layer::{FUSED_INPUT, ResidualRows, Step, StepObserver},
    spans::{LayerStates, RowKinds, SpanKind},
};

/// Rows of one run of the head.
struct HeadRows {
    /// Index of the span, and number of its rows.
    spans: Vec<(usize, usize)>,
    /// Number of earlier runs. Each but the first appended one row to the states of a span.
    earlier: usize,
    tokens: Vec<u32>,
    kinds: RowKinds,
}

/// Rows of one sequence that the head's layer appends to its states.
pub(super) struct HeadSpan {
    pub(super) states: LayerStates,
    pub(super) position: usize,
    pub(super) rows: usize,
}

/// Token after each row of the head.
#[derive(Clone, Copy)]
pub(super) enum HeadTokens<'a> {
    Given(&'a [u32]),
    /// `(rows, 1)`: chosen by the device.
    Chosen(View),
}

/// Rows that the head's layer runs over.
pub(super) struct HeadRun<'a> {
    pub(super) tokens: HeadTokens<'a>,
    /// Hidden states of the rows, `(rows, hidden)`.
    pub(super) hidden: View,
    /// Row of the residual that is the first one.
    pub(super) first_row: usize,
    pub(super) kinds: RowKinds,
    /// Rows whose output is needed.
    pub(super) needed: Range<usize>,
}

impl Model {
    /// Whether a drafter is loaded.
    pub(crate) fn has_drafter(&self) -> bool {
        self.draft_head.is_some()
    }

    /// Runs the drafter over rows of the step that has just ended: appends them to the states of
    /// its layer, and makes the drafts that are wanted. Rows of drafts after the first stay in the
    /// states until the rows of the tokens themselves take their place.
    pub(crate) fn draft(
        &mut self,
        mut ctx: StepContext<'_>,
        spans: &mut [DraftSpan<'_>],
        observer: Option<&mut (dyn StepObserver + '_)>,
    ) -> Result<(), Error> {
        let Some(mut head) = self.draft_head.take() else { return Ok(()) };
        // Traces are of the model's own layers.
        let recorder = self.moe_state.recorder.take();
        let drafted = self.run_drafter(&mut head, &mut ctx, spans, observer);
        self.moe_state.recorder = recorder;
        self.draft_head = Some(head);
        if drafted.is_err() {
            if let Some(host) = &mut ctx.host {
                host.abandon(ctx.device);
            }
            ctx.cache.recover(ctx.device);
        }
        drafted
    }

    fn run_drafter(
        &mut self,
        head: &mut DraftHead,
        ctx: &mut StepContext<'_>,
        spans: &mut [DraftSpan<'_>],
        mut observer: Option<&mut (dyn StepObserver + '_)>,
    ) -> Result<(), Error> {
        let kinds = RowKinds::count(spans.iter().map(|span| (span.kind, span.next.len())));
        let rows: usize = spans.iter().map(|span| span.next.len()).sum();
        let layer = self.own_layers();
        ctx.device.enter_layer(layer, None).map_err(Error::at(|| "drafter"))?;
        let mut done = 0;
        for span in &*spans {
            let held = span.held.len() / self.hidden;
            let count = span.next.len() - held;
            let out = self.normed(rows);
            let device = &mut *ctx.device;
            if held > 0 {
                device
                    .write_view(out.slice(done, held), span.held)
                    .map_err(Error::at(|| "drafter"))?;
            }
            let answers = if span.kind == SpanKind::Answer { count } else { 0 };
            done += held + count;
            if count == 0 {
                continue;
            }
            self.hidden_states(
                device,
                span.row..span.row + count,
                answers,
                out.slice(done - count, count),
            )
            .map_err(Error::at(|| "drafter"))?;
        }
        let wants =
            |spans: &[DraftSpan<'_>], i: usize| spans[i].wanted > spans[i].drafts.as_slice().len();
        let mut run = HeadRows {
            spans: spans.iter().enumerate().map(|(i, span)| (i, span.next.len())).collect(),
            earlier: 0,
            tokens: spans.iter().flat_map(|span| span.next.iter().copied()).collect(),
            kinds,
        };
        loop {
            let last_rows = run.spans.iter().scan(0, |end, (i, count)| {
                *end += count;
                Some((*i, *end - 1))
            });
            let drafting: Vec<_> = last_rows.filter(|(i, _)| wants(spans, *i)).collect();
            let needed = match (&observer, drafting.first(), drafting.last()) {
                // Only answers draft, and they are before prompts.
                (None, Some((_, first)), Some((_, last))) => *first..last + 1,
                (None, ..) => 0..0,
                (Some(_), ..) => 0..run.tokens.len(),
            };
            let of_span = |(i, count): &(usize, usize)| {
                let DraftSpan { states, position, next, .. } = &spans[*i];
                let before = run.earlier.checked_sub(1).map_or(0, |more| next.len() + more);
                HeadSpan { states: **states, position: position + before, rows: *count }
            };
            let head_spans: Vec<_> = run.spans.iter().map(of_span).collect();
            let rows_of_head = HeadRun {
                tokens: HeadTokens::Given(&run.tokens),
                hidden: self.normed(run.tokens.len()),
                first_row: 0,
                kinds: run.kinds,
                needed,
            };
            self.run_head_layer(head, ctx, &head_spans, rows_of_head)?;
            if let Some(observer) = &mut observer {
                let read = self.read_all_logits(head, &mut *ctx.device, run.tokens.len());
                observer.drafter(&read.map_err(Error::at(|| "drafter"))?);
            }
            if drafting.is_empty() {
                return Ok(());
            }
            let tokens = self.choose_drafts(head, &mut *ctx.device, &drafting);
            let tokens = tokens.map_err(Error::at(|| "drafter"))?;
            // All spans of later runs have one row.
            (run.spans, run.tokens) = (Vec::new(), Vec::new());
            for ((i, _), token) in drafting.into_iter().zip(tokens) {
                spans[i].drafts.push(token);
                if wants(spans, i) {
                    run.spans.push((i, 1));
                    run.tokens.push(token);
                }
            }
            if run.spans.is_empty() {
                return Ok(());
            }
            run.earlier += 1;
            run.kinds = RowKinds { answers: run.tokens.len(), long: 0 };
        }
    }

    /// Hidden states after the final norm of rows of the step that has just ended, of which the
    /// first `answers` belong to an answer.
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

    /// Appends the hidden states of rows of the step that has just ended to `held`: the drafter
    /// takes them with a later step.
    pub(crate) fn hold(
        &self,
        device: &mut dyn Device,
        rows: Range<usize>,
        held: &mut Vec<f32>,
    ) -> Result<(), Error> {
        let (count, out) = (rows.len(), self.normed(rows.len()));
        let first = held.len();
        held.resize(first + count * self.hidden, 0.0);
        self.hidden_states(device, rows, count, out)
            .and_then(|()| device.read(out, &mut held[first..]))
            .map_err(Error::at(|| "drafter"))
    }

    /// Runs the head's layer over rows. Its output, for the rows that need one, is the residual.
    pub(super) fn run_head_layer(
        &mut self,
        head: &mut DraftHead,
        ctx: &mut StepContext<'_>,
        spans: &[HeadSpan],
        run: HeadRun<'_>,
    ) -> Result<(), Error> {
        let StepContext { device, cache, host, stats, .. } = ctx;
        let (eps, layer) = (self.eps, self.own_layers());
        let (hidden, rows, first_row) = (run.hidden, run.hidden.rows, run.first_row);
        let x = self.residual(first_row + rows).slice(first_row, rows);
        let fused = self.scratch.shared().view(FUSED_INPUT, rows, 2 * self.hidden);
        let [embedding, state] =
            [fused.columns(0, self.hidden), fused.columns(self.hidden, self.hidden)];
        let norm =
            |x, weight, out| Op::RmsNorm { x, weight: Some(weight), per_head: false, eps, out };
        let embed = match run.tokens {
            HeadTokens::Given(tokens) => Op::Embed { table: head.embed, tokens, out: x },
            HeadTokens::Chosen(ids) => Op::EmbedChosen { table: head.embed, ids, out: x },
        };
        let fuse = |device: &mut dyn Device| {
            device.run(&embed)?;
            if self.embed_scale != 1.0 {
                device.run(&Op::Scale { x, factor: self.embed_scale })?;
            }
            device.run(&norm(x, head.embed_norm, embedding))?;
            device.run(&norm(hidden, head.hidden_norm, state))?;
            let answers = run.kinds.answers;
            let (weight, bias) = (head.fuse, None);
            device.run(&Op::MatMul { x: fused, weight, bias, exact: false, answers, out: x })
        };
        fuse(&mut **device).map_err(Error::at(|| "drafter"))?;
        for (which, layer_spans) in head.spans.iter_mut().enumerate() {
            let appended = |HeadSpan { states, position, rows }: &HeadSpan| {
                Some(Span::new(states[which]?, *position, *rows))
            };
            layer_spans.clear();
            layer_spans.extend(spans.iter().filter_map(appended));
        }
        let before = **stats;
        let unknown = [0; MAX_ROWS];
        let mut step = Step {
            device: &mut **device,
            cache,
            host: host.as_deref_mut(),
            moe_state: &mut self.moe_state,
            scratch: &self.scratch,
            stats,
            observer: None,
            row_store: None,
            spans: &head.spans,
            tokens: match run.tokens {
                HeadTokens::Given(tokens) => tokens,
                HeadTokens::Chosen(_) => &unknown[..rows],
            },
            layer,
            next: None,
            rows,
            first_row,
            kinds: run.kinds,
            hidden: self.hidden,
            streams: 1,
            eps,
            gathered: None,
        };
        head.layer.run_for(&mut step, run.needed)?;
        self.moe_state.counters.add_stats(layer, &stats.since(&before));
        match host {
            Some(host) => {
                let collected = host.collect(&mut **device, cache);
                collected.map(drop).map_err(Error::at(|| "experts on the host"))
            }
            None => Ok(()),
        }
    }

    /// Chooses the most likely token after some rows of the residual, given with the index of their
    /// span. Their hidden states are [`Model::normed`] then.
    fn choose_drafts(
        &self,
        head: &DraftHead,
        device: &mut dyn Device,
        rows: &[(usize, usize)],
    ) -> Result<Vec<u32>, moeflux_compute::Error> {
        let rows: Vec<usize> = rows.iter().map(|(_, row)| *row).collect();
        let logits = self.draft_logits(head, device, &rows)?;
        let best = View::rows(self.top_logits, logits.rows, 2);
        device.run(&Op::TopLogits { logits, best })?;
        let mut values = vec![0.0; 2 * logits.rows];
        device.read(best, &mut values)?;
        Ok(values.chunks_exact(2).map(|id_and_logit| id_and_logit[0] as u32).collect())
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

    /// The logits after the first `rows` rows of the residual, for an observer.
    fn read_all_logits(
        &self,
        head: &DraftHead,
        device: &mut dyn Device,
        rows: usize,
    ) -> Result<Vec<f32>, moeflux_compute::Error> {
        let mut all = Vec::new();
        for row in 0..rows {
            let logits = self.draft_logits(head, device, &[row])?;
            let done = all.len();
            all.resize(done + logits.width, 0.0);
            device.read(logits, &mut all[done..])?;
        }
        Ok(all)
    }
}

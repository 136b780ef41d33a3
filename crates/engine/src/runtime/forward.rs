//! Forward pass: embedding -> layers -> final norm -> LM head -> logits. Prefill, decode and
//! batches are one function over rows.
//!
//! [`Model::run_layers`] looks token ids up in the embedding table, [`Model::run_head`] computes
//! logits, and [`Model::read_logits`] reads them back.

use std::{
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::Arc,
    time::Instant,
};

use moeflux_base::Error;
use moeflux_compute::{Buffer, Device, Op, Span, View, ViewRead, Weight};
use moeflux_model::{blueprint::Blueprint, seam::MAX_STATES};
use moeflux_sampling::seam::USUAL_CANDIDATES;

use super::{
    logits_request::{
        LogitsOutput, LogitsRequest, LogitsSink, TOP_CANDIDATES, host_values, logit_rows,
    },
    logits_row::LogitsRow,
};
use crate::{
    experts::{
        cache::ExpertCache,
        counters::ExpertCounters,
        prefetch::PrefetchMode,
        row_store::{NgramSpan, RowStore},
        stats::Stats,
        trace::TraceRecorder,
    },
    runtime::{
        contents::PromptImages,
        control::StepControl,
        draft_head::{DraftHead, drafts_of},
        host_experts::HostExperts,
        layer::{
            Input, Layer, Loader, MoeState, NextExperts, ResidualRows, RowPositions, Scratch, Step,
        },
        plan::MemoryPlan,
        spans::{HeadSpan, LayerStates, RowKinds, SeqSpan, SpanKind},
        step_images::StepImages,
        steps_ahead::{RecordPace, StepAhead},
    },
};

/// Rows of a step and the position of the first one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StepSize {
    pub(crate) position: usize,
    pub(crate) rows: usize,
}

/// Device and cache that a step runs on.
pub(crate) struct StepContext<'a> {
    pub(crate) device: &'a mut dyn Device,
    pub(crate) cache: &'a mut ExpertCache,
    /// The processor as a second device for experts, beside a card.
    pub(crate) host: Option<&'a mut HostExperts>,
    /// Whether the step is recorded as a whole, and the card hands the host's experts over.
    pub(crate) hands_over: bool,
    /// Rows of tables on disk.
    pub(crate) row_store: Option<&'a mut RowStore>,
    pub(crate) stats: &'a mut Stats,
}

/// A loaded model: dense weights, buffers, and the state of a step.
pub(crate) struct Model {
    pub(super) hidden: usize,
    /// Residual streams.
    streams: usize,
    vocab: usize,
    pub(super) eps: f32,
    pub(super) embed_scale: f32,
    logit_cap: Option<f32>,
    embed: Weight,
    /// Layers of the model, without the drafter's.
    layers: Vec<Layer>,
    /// Input of the head.
    pub(super) output: Input,
    pub(super) head: Weight,
    pub(super) head_bias: Option<Buffer>,
    logit_scale: f32,
    /// Drafts the tokens after a step.
    pub(super) draft_head: Option<DraftHead>,
    pub(super) scratch: Scratch,
    images: Option<StepImages>,
    /// Rows per run of the head.
    pub(super) head_rows: usize,
    /// `(head_rows, vocab)`.
    logits: Buffer,
    /// Up to `(head_rows, TOP_CANDIDATES)`: ids and values of the top k.
    pub(super) top_logits: Buffer,
    spans: [Vec<Span>; MAX_STATES],
    pub(super) moe_state: MoeState,
    /// Results on the host: [`host_values`].
    host_logits: Vec<f32>,
    /// Tokens of the current step, and its rows with requested logits.
    pub(super) tokens: Vec<u32>,
    logit_rows: Vec<LogitsRow>,
    /// Whether results of the current step have been read.
    has_results: bool,
    /// Steps that may follow the current one.
    pub(super) ahead: Vec<StepAhead>,
    pub(super) pace: RecordPace,
    /// Steps that hand nothing over.
    pub(super) hand_over_pause: u32,
    /// By card: parts of a step that it computes. The part after the last layer is the head.
    card_parts: Vec<Range<usize>>,
}

impl Model {
    /// Loads the dense weights and allocates buffers for the steps of a plan.
    pub(crate) fn load(
        blueprint: &Blueprint,
        loader: &mut Loader<'_>,
        plan: &MemoryPlan,
        prefetch: PrefetchMode,
    ) -> Result<Self, Error> {
        let &MemoryPlan { chunk: rows, context, sessions, .. } = plan;
        let head_rows = logit_rows(rows, sessions);
        let last = blueprint.own_layers();
        loader.enter_layer(0)?;
        let embed = loader.matrix(&blueprint.embed)?;
        let first_parts = (0..=last)
            .filter(|part| *part == 0 || !loader.device.is_same_card(part - 1, *part))
            .chain([last + 1])
            .collect::<Vec<_>>();
        let layers = blueprint.layers[..last].iter().enumerate().map(|(i, layer)| {
            loader.enter_layer(i)?;
            Layer::load(layer, blueprint.streams, loader)
        });
        let layers = layers.collect::<Result<_, _>>()?;
        loader.enter_layer(last)?;
        let embed_at_end = match loader.device.is_same_card(0, last) {
            false if blueprint.reads_embed_at_end() => loader.matrix(&blueprint.embed)?,
            _ => embed,
        };
        let draft_head = DraftHead::load(blueprint, embed_at_end, plan, loader)?;
        let mut scratch = Scratch::new(blueprint, rows, context, loader.device)?;
        // Uses of experts that all have a place on the card decide nothing.
        scratch.routed.take_if(|_| plan.slots() >= blueprint.experts());
        Ok(Self {
            hidden: blueprint.hidden,
            streams: blueprint.streams,
            vocab: blueprint.vocab,
            eps: blueprint.eps,
            embed_scale: blueprint.embed_scale,
            logit_cap: blueprint.logit_cap,
            embed,
            layers,
            output: Input::load(&blueprint.output, blueprint.streams, loader)?,
            head: match &blueprint.head {
                Some(head) => loader.matrix(head)?,
                None => embed_at_end,
            },
            draft_head,
            card_parts: first_parts.windows(2).map(|ends| ends[0]..ends[1]).collect(),
            head_bias: loader.optional_vector(blueprint.head_bias.as_ref())?,
            logit_scale: blueprint.logit_scale,
            scratch,
            images: StepImages::new(blueprint, rows, loader.device)?,
            head_rows,
            logits: loader
                .device
                .buffer(head_rows * blueprint.vocab)
                .map_err(Error::at(|| "logits"))?,
            top_logits: loader
                .device
                .buffer(head_rows * TOP_CANDIDATES)
                .map_err(Error::at(|| "logits"))?,
            spans: std::array::from_fn(|_| Vec::with_capacity(1)),
            moe_state: MoeState::new(blueprint, rows, prefetch),
            host_logits: vec![0.0; host_values(head_rows, blueprint.vocab, blueprint.hidden)],
            tokens: Vec::with_capacity(rows),
            logit_rows: Vec::with_capacity(head_rows),
            has_results: false,
            ahead: Vec::new(),
            pace: RecordPace::default(),
            hand_over_pause: 0,
        })
    }

    /// Layers of the model, without the drafter's.
    pub(super) fn layers(&self) -> &[Layer] {
        &self.layers
    }

    /// Whether results of the current step have been read.
    pub(crate) fn has_results(&self) -> bool {
        self.has_results
    }

    /// Number of layers without the drafter's.
    pub(super) fn own_layers(&self) -> usize {
        self.layers.len()
    }

    /// Uses and hits of experts, of all sessions together.
    pub(crate) fn expert_counters(&self) -> &Arc<ExpertCounters> {
        &self.moe_state.counters
    }

    /// Replaces the counters of experts' uses.
    pub(crate) fn replace_counters(&mut self, new: Arc<ExpertCounters>) -> Arc<ExpertCounters> {
        std::mem::replace(&mut self.moe_state.counters, new)
    }

    /// Sets or removes the recorder of routing traces, from the next step on.
    pub(crate) fn set_trace_recorder(&mut self, recorder: Option<TraceRecorder>) {
        self.moe_state.recorder = recorder;
        // A step recorded ahead looks experts up on the device, where the host cannot record their
        // ids.
        self.ahead.clear();
    }

    /// Starts to compile the kernels of steps of one session with these states, from each position
    /// and with as many rows. The cache must have a table of each layer's experts, and no session
    /// may exist.
    pub(crate) fn compile_ahead(
        &mut self,
        device: &mut dyn Device,
        cache: &mut ExpertCache,
        states: &[LayerStates],
        steps: &[StepSize],
    ) -> Result<(), Error> {
        // These steps are not counted.
        let counters = std::mem::take(&mut self.moe_state.counters);
        let compiled = self.card_parts.clone().into_iter().try_for_each(|parts| {
            device.enter_layer(parts.start, None)?;
            device.compile_ahead(&mut |device| {
                for step in steps {
                    // An error recurs in the first step, which reports it.
                    let _ = self.run_step_of_card(device, cache, states, *step, parts.clone());
                }
            })
        });
        self.moe_state.counters = counters;
        compiled.map_err(Error::at(|| "compiling kernels"))
    }

    /// Runs the parts of a step that a card computes, with usual numbers of top logits.
    fn run_step_of_card(
        &mut self,
        device: &mut dyn Device,
        cache: &mut ExpertCache,
        states: &[LayerStates],
        StepSize { position, rows }: StepSize,
        parts: Range<usize>,
    ) -> Result<(), Error> {
        let tokens = vec![0; rows];
        let logits = LogitsRequest::None;
        let kind = match rows {
            1 => SpanKind::Answer,
            _ => SpanKind::of_prompt(rows, rows),
        };
        let (before, tokens) = (&[][..], &tokens[..]);
        let (drafts, head, keep) = (0, None, None);
        let (contents, images) = (&[][..], PromptImages::NONE);
        let span = SeqSpan {
            states,
            position,
            before,
            tokens,
            contents,
            images,
            drafts,
            head,
            keep,
            logits,
            kind,
        };
        self.tokens.clear();
        self.tokens.extend_from_slice(tokens);
        let mut stats = Stats::default();
        let mut ctx = StepContext {
            device,
            cache,
            host: None,
            hands_over: false,
            row_store: None,
            stats: &mut stats,
        };
        let has_head = parts.contains(&self.layers.len());
        self.run_layers(&mut ctx, &[span], &mut StepControl::default(), parts)?;
        for n in USUAL_CANDIDATES.iter().filter(|_| has_head) {
            let wanted = LogitsRow::for_span(LogitsRequest::TopK(*n), 0..rows, 0);
            let wanted: Vec<_> = wanted.collect();
            let answers = usize::from(kind == SpanKind::Answer);
            self.run_head(device, &wanted, answers).map_err(Error::at(|| "head"))?;
        }
        Ok(())
    }

    /// Runs a step over the spans' tokens. `sink` receives the requested logits with the row of the
    /// step.
    ///
    /// On success, recurrent states are ready to be committed. On failure, nothing that the
    /// sessions rely on has changed.
    pub(crate) fn step(
        &mut self,
        mut ctx: StepContext<'_>,
        spans: &[SeqSpan<'_>],
        control: &mut StepControl<'_>,
        sink: &mut LogitsSink<'_>,
    ) -> Result<(), Error> {
        if let Some(recorder) = &mut self.moe_state.recorder {
            recorder.start_step(spans.iter().map(SeqSpan::rows).sum());
        }
        // Callbacks may panic, but other sessions must be able to use the engine afterwards.
        let result = catch_unwind(AssertUnwindSafe(|| {
            self.run(&mut ctx, spans, control, sink)?;
            self.moe_state.recorder.as_mut().map_or(Ok(()), TraceRecorder::finish_step)
        }));
        if !matches!(result, Ok(Ok(()))) {
            ctx.device.abandon_hand_overs();
            if let Some(host) = &mut ctx.host {
                host.abandon(ctx.device);
            }
            ctx.cache.recover(ctx.device);
            self.host_logits.resize(host_values(self.head_rows, self.vocab, self.hidden), 0.0);
        }
        result.unwrap_or_else(|cause| resume_unwind(cause))
    }

    fn run(
        &mut self,
        ctx: &mut StepContext<'_>,
        spans: &[SeqSpan<'_>],
        control: &mut StepControl<'_>,
        sink: &mut LogitsSink<'_>,
    ) -> Result<(), Error> {
        self.moe_state.start_step();
        self.has_results = false;
        self.set_tokens(spans);
        if let Some(store) = ctx.row_store.as_deref_mut() {
            let spans = spans.iter().map(|s| NgramSpan { before: s.before, tokens: s.tokens });
            store.start(spans, ctx.stats)?;
        }
        let ahead = std::mem::take(&mut self.ahead);
        let can_submit = control.observer.is_none()
            && !control.is_cancelled()
            && !spans.iter().any(SeqSpan::has_images);
        let has_submitted = match can_submit && self.hands_over(ctx, spans) {
            true => self.submit_handing_over(ctx, ahead, spans)?,
            false => can_submit && self.submit_ahead(ctx, &ahead, spans)?,
        };
        let parts = 0..self.layers.len() + 1;
        let mut rest = parts.clone();
        if has_submitted {
            rest.start = self.first_card_parts().end;
            if let Some(progress) = &mut control.progress {
                progress(rest.start as f64 / parts.end as f64);
            }
        }
        if !has_submitted {
            if let Some(host) = ctx.host.as_deref_mut() {
                host.return_all(ctx.device)?;
            }
            self.make_drafts(ctx, spans, control.observer.as_deref_mut())?;
        }
        self.run_layers(ctx, spans, control, rest.clone())?;
        if !rest.is_empty() {
            self.keep_rows(&mut *ctx.device, spans)?;
        }
        let mut logit_rows = std::mem::take(&mut self.logit_rows);
        logit_rows.clear();
        logit_rows.extend(LogitsRow::of_spans(spans));
        // The head does not run for hidden states.
        let head_rows = self.head_rows;
        let runs = logit_rows.chunk_by(|a, b| a.is_hidden == b.is_hidden);
        let mut runs = runs.flat_map(|run| run.chunks(head_rows));
        let result = runs.try_for_each(|logit_rows| {
            let since = Instant::now();
            if !rest.is_empty() {
                let RowKinds { answers, .. } = RowKinds::of(spans);
                let run = self.run_head(&mut *ctx.device, logit_rows, answers);
                run.map_err(Error::at(|| "head"))?;
            }
            ctx.stats.computing_ns += since.elapsed().as_nanos() as u64;
            // A request for all tokens evaluates a given text, so no decode step follows. Between
            // two runs of the head nothing can be recorded.
            let continues = logit_rows.len() == spans.iter().map(SeqSpan::rows).sum::<usize>()
                && control.observer.is_none()
                && !spans.iter().any(|span| span.logits.is_of_all_tokens());
            self.read_logits(ctx, logit_rows, spans, continues, sink)
        });
        self.logit_rows = logit_rows;
        result?;
        // Without logits, nothing has waited for the host.
        if let Some(host) = ctx.host.as_deref_mut() {
            *ctx.stats = ctx.stats.plus(&host.finish_serving()?);
        }
        Ok(())
    }

    /// Writes the rows that layers of the first card read in a step that was recorded ahead.
    pub(super) fn write_table_rows(&self, ctx: &mut StepContext<'_>) -> Result<(), Error> {
        let StepContext { device, row_store: Some(store), stats, .. } = ctx else { return Ok(()) };
        let layers = self.layers.iter().enumerate().take(self.first_card_parts().end);
        for (i, layer) in layers {
            let Some(rows) = layer.table_rows(self.tokens.len()) else { continue };
            let Some(values) = store.wait(i, stats)? else { continue };
            device
                .enter_layer(i, None)
                .and_then(|()| device.write_view(rows, values))
                .map_err(Error::at(|| format!("layer {i}, rows of tokens")))?;
        }
        Ok(())
    }

    /// Parts of a step that can be recorded ahead: those of the first card.
    pub(super) fn first_card_parts(&self) -> Range<usize> {
        self.card_parts.first().cloned().unwrap_or_default()
    }

    /// Sets [`Model::tokens`]. Drafts that the step makes have placeholders.
    pub(super) fn set_tokens(&mut self, spans: &[SeqSpan<'_>]) {
        self.tokens.clear();
        for span in spans {
            let end = self.tokens.len() + span.rows();
            self.tokens.extend_from_slice(span.tokens);
            self.tokens.resize(end, 0);
        }
    }

    /// Records the embedding of the step's tokens, or of places in a list of tokens in a step
    /// recorded ahead.
    fn run_embed(
        &mut self,
        device: &mut dyn Device,
        spans: &[SeqSpan<'_>],
        x: View,
    ) -> Result<(), Error> {
        let embed = |device: &mut dyn Device| {
            let drafts =
                self.draft_head.as_ref().filter(|_| spans.iter().any(SeqSpan::drafts_rows));
            match drafts {
                Some(head) => {
                    device.enter_layer(0, Some(head.all_drafts(spans.len())))?;
                    self.embed_with_drafts(head, device, spans, x)?;
                }
                None => {
                    device.enter_layer(0, None)?;
                    let out = x.split(self.streams);
                    device.run(&Op::Embed { table: self.embed, tokens: &self.tokens, out })?;
                }
            }
            match self.embed_scale {
                1.0 => Ok(()),
                factor => device.run(&Op::Scale { x, factor }),
            }
        };
        embed(device).map_err(Error::at(|| "embedding"))
    }

    fn embed_with_drafts(
        &self,
        head: &DraftHead,
        device: &mut dyn Device,
        spans: &[SeqSpan<'_>],
        x: View,
    ) -> Result<(), moeflux_compute::Error> {
        let (table, mut row, mut sequence) = (self.embed, 0, 0);
        for span in spans {
            let tokens = span.tokens;
            let out = x.slice(row, tokens.len()).split(self.streams);
            device.run(&Op::Embed { table, tokens, out })?;
            if let Some(HeadSpan { drafts, .. }) = span.head.as_ref().filter(|head| head.are_rows) {
                let ids = head.drafts_view(sequence, 0..*drafts);
                let out = x.slice(row + tokens.len(), *drafts);
                device.run(&Op::EmbedChosen { table, ids, out })?;
            }
            sequence += usize::from(span.head.is_some());
            row += span.rows();
        }
        Ok(())
    }

    /// Records parts of a step, up to the residual stream after them. Layer 0 includes the
    /// embedding. The part after the last layer is what precedes the head.
    pub(super) fn run_layers(
        &mut self,
        ctx: &mut StepContext<'_>,
        spans: &[SeqSpan<'_>],
        control: &mut StepControl<'_>,
        parts: Range<usize>,
    ) -> Result<(), Error> {
        let StepContext { device, cache, host, hands_over, row_store, stats } = ctx;
        let rows = spans.iter().map(SeqSpan::rows).sum();
        let (x, kinds) = (self.residual(rows), RowKinds::of(spans));
        if let Some(images) = &mut self.images {
            images.start(spans);
        }
        if parts.start == 0 {
            self.run_embed(&mut **device, spans, x)?;
            self.images.as_ref().map_or(Ok(()), |images| images.insert(&mut **device, spans, x))?;
        }
        let positions = self.images.as_ref().map_or(RowPositions::Indices, StepImages::positions);
        let layers = self.layers.iter().enumerate();
        for (i, layer) in layers.take(parts.end).skip(parts.start) {
            if control.is_cancelled() {
                return Err(Error::Cancelled);
            }
            device.enter_layer(i, Some(x)).map_err(Error::at(|| format!("layer {i}")))?;
            for (which, layer_spans) in self.spans.iter_mut().enumerate() {
                layer_spans.clear();
                layer_spans.extend(spans.iter().filter_map(|s| {
                    let span = Span::new(s.states[i][which]?, s.position, s.rows());
                    Some(Span { drafts: s.drafts, ..span })
                }));
            }
            let before = **stats;
            // The router of a layer on another card cannot run here.
            let next = NextExperts::find(&self.layers, i + 1);
            let next = next.filter(|next| device.is_same_card(i, next.index));
            let mut step = Step {
                device: &mut **device,
                cache,
                host: host.as_deref_mut(),
                hands_over: *hands_over,
                moe_state: &mut self.moe_state,
                scratch: &self.scratch,
                stats,
                observer: match &mut control.observer {
                    Some(observer) => Some(&mut **observer),
                    None => None,
                },
                row_store: row_store.as_deref_mut(),
                spans: &self.spans,
                positions,
                tokens: &self.tokens,
                layer: i,
                next,
                rows,
                first_row: 0,
                kinds,
                hidden: self.hidden,
                streams: self.streams,
                eps: self.eps,
                gathered: None,
            };
            layer.run(&mut step)?;
            if let Some(images) = &self.images {
                images.add_after(i, &mut **device, spans, x)?;
            }
            self.moe_state.counters.add_stats(i, &stats.since(&before));
            if let Some(observer) = &mut control.observer {
                let mut hidden = vec![0.0; rows * x.width];
                device.read(x, &mut hidden).map_err(Error::at(|| format!("layer {i}")))?;
                observer.hidden(i, &hidden);
            }
            if let Some(progress) = &mut control.progress {
                progress((i + 1) as f64 / self.layers.len() as f64);
            }
        }
        if parts.contains(&self.layers.len()) {
            if let Some(host) = host {
                host.collect(&mut **device, cache).map_err(Error::at(|| "experts on the host"))?;
            }
            device.enter_layer(self.layers.len(), Some(x)).map_err(Error::at(|| "head"))?;
            stats.tokens += rows as u64;
        }
        Ok(())
    }

    /// Final norm and head for at most [`Model::head_rows`] rows of the residual stream, then the
    /// top k where requested. Results stay on the device, in [`Model::logits`] and
    /// [`Model::top_logits`].
    /// The head does not run for hidden states, which are [`Model::normed`].
    pub(super) fn run_head(
        &self,
        device: &mut dyn Device,
        logit_rows: &[LogitsRow],
        answers: usize,
    ) -> Result<(), moeflux_compute::Error> {
        // Of the requested rows.
        let answers = logit_rows.partition_point(|wanted| wanted.row < answers);
        let rows = logit_rows.iter().map(|wanted| wanted.row + 1).max().unwrap_or(0);
        let x = self.residual(rows);
        let normed = self.normed(logit_rows.len());
        let mut row = 0;
        for run in logit_rows.chunk_by(|a, b| a.row + 1 == b.row) {
            let (x, out) = (x.slice(run[0].row, run.len()), normed.slice(row, run.len()));
            let buffers = self.scratch.shared();
            let answers = answers.saturating_sub(row).min(run.len());
            let rows = ResidualRows { x, answers, eps: self.eps };
            self.output.read(buffers, rows, out, &mut |op| device.run(op))?;
            row += run.len();
        }
        if logit_rows.iter().all(|wanted| wanted.is_hidden) {
            return Ok(());
        }
        let logits = self.logits(logit_rows.len());
        self.project_logits(device, normed, logits, answers)?;
        if self.logit_scale != 1.0 {
            device.run(&Op::Scale { x: logits, factor: self.logit_scale })?;
        }
        if let Some(cap) = self.logit_cap {
            device.run(&Op::SoftCap { x: logits, cap })?;
        }
        match self.top_logits(logit_rows) {
            Some(best) => device.run(&Op::TopLogits { logits, best }),
            None => Ok(()),
        }
    }

    /// Logits of rows after the final norm, neither scaled nor capped. The first `answers` rows
    /// belong to answers.
    pub(super) fn project_logits(
        &self,
        device: &mut dyn Device,
        x: View,
        out: View,
        answers: usize,
    ) -> Result<(), moeflux_compute::Error> {
        let (weight, bias) = (self.head, self.head_bias);
        device.run(&Op::MatMul { x, weight, bias, exact: false, answers, out })
    }

    /// The residual, `(rows, streams * hidden)`.
    pub(super) fn residual(&self, rows: usize) -> View {
        View::rows(self.scratch.x, rows, self.streams * self.hidden)
    }

    /// View of the first `n` requested rows after the final norm.
    pub(super) fn normed(&self, n: usize) -> View {
        View::rows(self.scratch.normed, n, self.hidden)
    }

    /// View of the logits of the first `n` requested rows.
    pub(super) fn logits(&self, n: usize) -> View {
        View::rows(self.logits, n, self.vocab)
    }

    /// View of the top n of the requested rows, n ids, then n logits, for the largest requested n;
    /// `None` if no row has one.
    fn top_logits(&self, logit_rows: &[LogitsRow]) -> Option<View> {
        let n = logit_rows.iter().filter_map(|wanted| wanted.top_k).max()?;
        Some(View::rows(self.top_logits, logit_rows.len(), 2 * n))
    }

    /// Reads requested logits back from the device: the top k, and full logits if those do not
    /// suffice; before them, what the step has drafted. While the device computes, records the next
    /// decode step where the answers continue.
    fn read_logits(
        &mut self,
        ctx: &mut StepContext<'_>,
        logit_rows: &[LogitsRow],
        spans: &[SeqSpan<'_>],
        continues: bool,
        sink: &mut LogitsSink<'_>,
    ) -> Result<(), Error> {
        let mut host_logits = std::mem::take(&mut self.host_logits);
        let StepContext { device, cache, host, stats, .. } = ctx;
        let at_head = || Error::at(|| "head");
        let rows = spans.iter().map(SeqSpan::rows).sum();
        let is_one_card = self.first_card_parts().contains(&self.layers.len());
        let all = self.logits(logit_rows.len());
        let top = self.top_logits(logit_rows);
        let mut read_run = |first: usize, run: &[LogitsRow]| {
            let view = match (run[0].is_hidden, top.filter(|_| run[0].top_k.is_some())) {
                (true, _) => self.normed(logit_rows.len()),
                (false, Some(top)) => top,
                (false, None) => all,
            };
            let view = view.slice(first, run.len());
            let (values, rest) = host_logits.split_at_mut(view.rows * view.width);
            let is_first = !std::mem::replace(&mut self.has_results, true);
            let drafting = spans.iter().filter(|span| span.head.is_some()).count();
            let of_drafts = self.draft_head.as_ref().filter(|_| is_first && drafting > 0);
            let of_drafts = of_drafts.map(|head| head.all_drafts(drafting));
            let mut drafted = vec![0.0; of_drafts.map_or(0, |view| view.width)];
            let routed = self.scratch.routed.as_ref().filter(|_| is_first && is_one_card);
            let of_routers = routed.and_then(|routed| routed.all(rows));
            let mut ids = std::mem::take(&mut self.moe_state.routed_ids);
            ids.resize(of_routers.map_or(0, |view| view.width), 0.0);
            let count = 1 + usize::from(of_drafts.is_some()) + usize::from(of_routers.is_some());
            let drafts = ViewRead { view: of_drafts.unwrap_or(view), out: &mut drafted };
            let routers = ViewRead { view: of_routers.unwrap_or(view), out: &mut ids };
            let logits = ViewRead { view, out: &mut *values };
            let mut reads = match of_drafts {
                Some(_) => [logits, drafts, routers],
                None => [logits, routers, drafts],
            };
            let (waited, mut recording) = (device.counters().waited_ns, 0.0);
            let read = device.read_while(&mut reads[..count], &mut |device| {
                if first == 0 && continues {
                    let since = Instant::now();
                    self.record_next(device, cache, host.as_deref_mut(), spans);
                    recording = since.elapsed().as_secs_f64();
                }
            });
            // The results are worth nothing if the host has failed.
            if let Some(host) = host.as_deref_mut() {
                **stats = stats.plus(&host.finish_serving()?);
            }
            read.map_err(at_head())?;
            if let Some(routed) = self.scratch.routed.as_ref().filter(|_| of_routers.is_some()) {
                routed.count(&ids, rows, &self.moe_state, cache, stats);
            }
            self.moe_state.routed_ids = ids;
            let waited = (device.counters().waited_ns - waited) as f64 / 1e9;
            if !self.ahead.is_empty() && first == 0 {
                self.pace.note_times(self.ahead.len(), recording, waited);
            }
            if of_drafts.is_some() {
                show_drafts(spans, &drafted, sink);
            }
            for (i, (wanted, row)) in run.iter().zip(values.chunks_exact(view.width)).enumerate() {
                let Some(n) = wanted.top_k else {
                    if !wanted.check(row).map_err(at_head())? {
                        continue;
                    }
                    let output = match wanted.is_hidden {
                        true => LogitsOutput::Hidden(row),
                        false => LogitsOutput::Logits(row),
                    };
                    sink(wanted.row, output);
                    continue;
                };
                let (ids, logits) = row.split_at(view.width / 2);
                if !wanted.check(&logits[..1]).map_err(at_head())? {
                    continue;
                }
                if !sink(wanted.row, LogitsOutput::TopK { ids: &ids[..n], logits: &logits[..n] }) {
                    let row = &mut rest[..self.vocab];
                    device.read(all.slice(first + i, 1), row).map_err(at_head())?;
                    sink(wanted.row, LogitsOutput::Logits(row));
                }
            }
            Ok(())
        };
        let mut first = 0;
        let runs = logit_rows.chunk_by(|a, b| a.top_k.is_some() == b.top_k.is_some());
        let result = runs.into_iter().try_for_each(|run| {
            first += run.len();
            read_run(first - run.len(), run)
        });
        self.host_logits = host_logits;
        result
    }
}

/// Passes the drafts of a step on, with the first row of each sequence.
fn show_drafts(spans: &[SeqSpan<'_>], values: &[f32], sink: &mut LogitsSink<'_>) {
    let (mut row, mut sequence) = (0, 0);
    for span in spans {
        if let Some(HeadSpan { drafts, are_rows, .. }) = span.head {
            if are_rows {
                let tokens = drafts_of(values, sequence, drafts);
                sink(row, LogitsOutput::Drafts(&tokens[..drafts]));
            }
            sequence += 1;
        }
        row += span.rows();
    }
}

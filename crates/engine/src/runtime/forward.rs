//! The forward pass: embed, layers, norm, head. Prefill, decode and batches are one function over rows.

use std::{
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::atomic::{AtomicBool, Ordering},
    time::Instant,
};

use moeflux_compute::{Buffer, Device, MAX_TOP_LOGITS, Op, Span, State, View, Weight};

use crate::{
    base::{
        error::Error,
        stats::{LayerStats, Stats},
    },
    experts::{cache::ExpertCache, prefetch::PrefetchMode, trace::Recorder},
    model::blueprint::Blueprint,
    runtime::layer::{Layer, Loader, Routing, Scratch, Step, StepObserver},
};

/// Rows whose logits are computed at once.
pub(crate) const LOGIT_ROWS: usize = 8;

/// Of which tokens of a span the logits are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logits {
    /// Of the last one.
    Last,
    /// Of every one.
    All,
}

/// What is wanted of a span's logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LogitsRequest {
    /// Nothing: the head does not run.
    Nothing,
    /// All logits of some tokens.
    Logits(Logits),
    /// Of the last token so many that come first in rank.
    First(usize),
}

/// What a step found for one of its rows.
pub(crate) enum LogitsOutput<'a> {
    /// One logit per entry of the vocabulary.
    Logits(&'a [f32]),
    /// The tokens that come first in rank, and their logits.
    First { ids: &'a [f32], logits: &'a [f32] },
}

/// Takes what was found for a row of the step. Told the first in rank, it says whether they are enough; if not, all logits of
/// the row follow.
pub(crate) type LogitsSink<'a> = dyn FnMut(usize, LogitsOutput<'_>) -> bool + 'a;

/// Numbers of the buffer for what comes first in rank.
pub(crate) const TOP_CANDIDATES: usize = 2 * MAX_TOP_LOGITS;

/// What a caller may want to see of a step, and how it stops one.
///
/// What is called here, or with logits, runs in the middle of a step, while all other sessions of the engine wait: it must not
/// call the engine or any of its sessions, not even drop one, or it waits for ever. If it panics, the step has failed.
#[derive(Default)]
pub struct StepControl<'a> {
    /// Set by anyone to stop at the next layer; the session then stands at its last good token.
    pub cancel: Option<&'a AtomicBool>,
    /// Called with the share of the work that is done, from 0 to 1.
    pub progress: Option<&'a mut dyn FnMut(f64)>,
    /// Sees hidden states and chosen experts.
    pub observer: Option<&'a mut (dyn StepObserver + 'a)>,
}

impl StepControl<'_> {
    /// Whether somebody asked to stop.
    pub fn is_cancelled(&self) -> bool {
        self.cancel.is_some_and(|c| c.load(Ordering::Relaxed))
    }

    /// Watches a part of the work: so much comes before it, and so much it is of all.
    pub(crate) fn part<T>(
        &mut self,
        before: f64,
        share: f64,
        f: impl FnOnce(&mut StepControl<'_>) -> T,
    ) -> T {
        let mut inner =
            self.progress.as_mut().map(|p| move |of_part: f64| p(before + share * of_part));
        f(&mut StepControl {
            cancel: self.cancel,
            progress: inner.as_mut().map(|p| p as &mut dyn FnMut(f64)),
            observer: match &mut self.observer {
                Some(observer) => Some(&mut **observer),
                None => None,
            },
        })
    }
}

/// The states of one session for one layer.
pub(crate) type LayerStates = [Option<State>; 2];

/// Some tokens of one session.
#[derive(Clone, Copy)]
pub(crate) struct SeqSpan<'a> {
    pub(crate) states: &'a [LayerStates],
    pub(crate) position: usize,
    pub(crate) tokens: &'a [u32],
    pub(crate) wanted: LogitsRequest,
}

/// What a step runs on.
pub(crate) struct On<'a> {
    pub(crate) device: &'a mut dyn Device,
    pub(crate) cache: &'a mut ExpertCache,
    pub(crate) stats: &'a mut Stats,
}

/// A loaded model.
pub(crate) struct Model {
    hidden: usize,
    vocab: usize,
    eps: f32,
    embed_scale: f32,
    logit_cap: Option<f32>,
    embed: Weight,
    layers: Vec<Layer>,
    norm: Buffer,
    head: Weight,
    scratch: Scratch,
    /// `(LOGIT_ROWS, vocab)`.
    logits: Buffer,
    /// `(LOGIT_ROWS, TOP_CANDIDATES)`: what comes first in rank.
    first: Buffer,
    spans: [Vec<Span>; 2],
    routing: Routing,
    /// What each layer asked its experts for, of all sessions together.
    layer_stats: Vec<LayerStats>,
    /// `(LOGIT_ROWS, vocab)` on the host.
    read: Vec<f32>,
    /// The tokens of the step at hand, and what it is asked for.
    tokens: Vec<u32>,
    asked: Vec<Asked>,
    ahead: Option<Ahead>,
}

impl Model {
    /// Loads the dense weights and allocates the buffers for steps of up to `rows` rows of sessions of `context`
    /// positions.
    pub(crate) fn load(
        blueprint: &Blueprint,
        loader: &mut Loader<'_>,
        rows: usize,
        context: usize,
        prefetch: PrefetchMode,
    ) -> Result<Self, Error> {
        let embed = loader.matrix(&blueprint.embed)?;
        Ok(Self {
            hidden: blueprint.hidden,
            vocab: blueprint.vocab,
            eps: blueprint.eps,
            embed_scale: blueprint.embed_scale,
            logit_cap: blueprint.logit_cap,
            embed,
            layers: blueprint
                .layers
                .iter()
                .map(|l| Layer::load(l, loader))
                .collect::<Result<_, _>>()?,
            norm: loader.vector(&blueprint.norm)?,
            head: match &blueprint.head {
                Some(head) => loader.matrix(head)?,
                None => embed,
            },
            scratch: Scratch::new(blueprint, rows, context, loader.device)?,
            logits: loader
                .device
                .buffer(LOGIT_ROWS * blueprint.vocab)
                .map_err(Error::at(|| "logits"))?,
            first: loader
                .device
                .buffer(LOGIT_ROWS * TOP_CANDIDATES)
                .map_err(Error::at(|| "logits"))?,
            spans: [Vec::with_capacity(1), Vec::with_capacity(1)],
            routing: Routing::new(blueprint, rows, prefetch),
            layer_stats: vec![LayerStats::default(); blueprint.layers.len()],
            read: vec![0.0; LOGIT_ROWS * blueprint.vocab],
            tokens: Vec::with_capacity(rows),
            asked: Vec::with_capacity(LOGIT_ROWS),
            ahead: None,
        })
    }

    pub(crate) fn layer_stats(&self) -> &[LayerStats] {
        &self.layer_stats
    }

    /// Writes down the experts of all steps from now on, or no longer.
    pub(crate) fn record(&mut self, recorder: Option<Recorder>) {
        self.routing.recorder = recorder;
        // A step that was recorded ahead looks experts up by itself.
        self.ahead = None;
    }

    /// Feeds the spans' tokens. `sink` gets what is wanted, with the row of the step.
    ///
    /// On success the recurrent states are ready to be committed; on failure nothing that the sessions rely on
    /// has changed.
    pub(crate) fn step(
        &mut self,
        mut on: On<'_>,
        spans: &[SeqSpan<'_>],
        watch: &mut StepControl<'_>,
        sink: &mut LogitsSink<'_>,
    ) -> Result<(), Error> {
        if let Some(recorder) = &mut self.routing.recorder {
            recorder.begin(spans.iter().map(|s| s.tokens.len()).sum());
        }
        // What callers have called may panic; the engine is everybody's.
        let result = catch_unwind(AssertUnwindSafe(|| {
            self.run(&mut on, spans, watch, sink)?;
            self.routing.recorder.as_mut().map_or(Ok(()), Recorder::end)
        }));
        if !matches!(result, Ok(Ok(()))) {
            on.cache.recover(on.device);
            self.read.resize(LOGIT_ROWS * self.vocab, 0.0);
        }
        result.unwrap_or_else(|cause| resume_unwind(cause))
    }

    fn run(
        &mut self,
        on: &mut On<'_>,
        spans: &[SeqSpan<'_>],
        watch: &mut StepControl<'_>,
        sink: &mut LogitsSink<'_>,
    ) -> Result<(), Error> {
        self.routing.waited = false;
        self.tokens.clear();
        spans.iter().for_each(|span| self.tokens.extend_from_slice(span.tokens));
        let begun = match self.ahead.take() {
            Some(ahead) if watch.observer.is_none() && !watch.is_cancelled() && ahead.is(spans) => {
                let begun =
                    on.device.submit_recorded(&self.tokens).map_err(Error::at(|| "embedding"))?;
                begun.then_some(ahead)
            }
            _ => None,
        };
        match &begun {
            Some(ahead) => {
                on.stats.add_recorded(ahead.stats);
                if let Some(progress) = &mut watch.progress {
                    progress(1.0);
                }
            }
            None => self.layers(on, spans, watch)?,
        }
        let mut asked = std::mem::take(&mut self.asked);
        asked.clear();
        asked.extend(
            spans
                .iter()
                .scan(0, |end, span| {
                    *end += span.tokens.len();
                    Some(Asked::of(span.wanted, *end - span.tokens.len()..*end))
                })
                .flatten(),
        );
        let result = asked.chunks(LOGIT_ROWS).try_for_each(|asked| {
            let since = Instant::now();
            if begun.is_none() {
                self.head(&mut *on.device, asked).map_err(Error::at(|| "head"))?;
            }
            on.stats.computing_ns += since.elapsed().as_nanos() as u64;
            // Whoever wants all logits reads a text that is there, and between two parts of the head nothing is recorded.
            let goes_on = asked.len() == spans.len()
                && watch.observer.is_none()
                && spans.iter().all(|span| span.wanted != LogitsRequest::Logits(Logits::All));
            let next = if goes_on { spans } else { &[] };
            self.read_asked(on, asked, next, sink).map_err(Error::at(|| "head"))
        });
        self.asked = asked;
        result
    }

    /// Records what leads from the step's tokens, which [`Model::run`] has collected, to the residual stream after the last layer. A
    /// step that is recorded ahead has as many of them.
    fn layers(
        &mut self,
        on: &mut On<'_>,
        spans: &[SeqSpan<'_>],
        watch: &mut StepControl<'_>,
    ) -> Result<(), Error> {
        let On { device, cache, stats } = on;
        let rows = spans.iter().map(|s| s.tokens.len()).sum();
        let x = View::rows(self.scratch.x, rows, self.hidden);
        device
            .run(&Op::Embed { table: self.embed, tokens: &self.tokens, out: x })
            .map_err(Error::at(|| "embedding"))?;
        if self.embed_scale != 1.0 {
            device
                .run(&Op::Scale { x, factor: self.embed_scale })
                .map_err(Error::at(|| "embedding"))?;
        }
        for (i, layer) in self.layers.iter().enumerate() {
            if watch.is_cancelled() {
                return Err(Error::Cancelled);
            }
            for (which, of_layer) in self.spans.iter_mut().enumerate() {
                of_layer.clear();
                of_layer.extend(spans.iter().filter_map(|s| {
                    Some(Span {
                        state: s.states[i][which]?,
                        position: s.position,
                        rows: s.tokens.len(),
                    })
                }));
            }
            let before = **stats;
            let mut step = Step {
                device: &mut **device,
                cache,
                routing: &mut self.routing,
                scratch: &self.scratch,
                stats,
                observer: match &mut watch.observer {
                    Some(observer) => Some(&mut **observer),
                    None => None,
                },
                spans: &self.spans,
                layer: i,
                next: self.layers.get(i + 1),
                rows,
                hidden: self.hidden,
                eps: self.eps,
            };
            layer.run(&mut step)?;
            self.layer_stats[i].add(&stats.since(&before));
            if let Some(observer) = &mut watch.observer {
                let mut hidden = vec![0.0; rows * self.hidden];
                device.read(x, &mut hidden).map_err(Error::at(|| format!("layer {i}")))?;
                observer.hidden(i, &hidden);
            }
            if let Some(progress) = &mut watch.progress {
                progress((i + 1) as f64 / self.layers.len() as f64);
            }
        }
        stats.tokens += rows as u64;
        Ok(())
    }

    /// Norm and head for rows of the residual stream, at most [`LOGIT_ROWS`], and what comes first in rank where that is asked
    /// for. All of it stays on the device, where [`Model::logits`] and [`Model::best`] say.
    fn head(&self, device: &mut dyn Device, asked: &[Asked]) -> Result<(), moeflux_compute::Error> {
        let most = asked.iter().map(|asked| asked.row + 1).max().unwrap_or(0);
        let x = View::rows(self.scratch.x, most, self.hidden);
        let normed = View::rows(self.scratch.normed, asked.len(), self.hidden);
        let mut at = 0;
        for run in asked.chunk_by(|a, b| a.row + 1 == b.row) {
            let (x, out) = (x.slice(run[0].row, run.len()), normed.slice(at, run.len()));
            device.run(&Op::RmsNorm { x, weight: Some(self.norm), eps: self.eps, out })?;
            at += run.len();
        }
        let logits = self.logits(asked.len());
        device.run(&Op::MatMul {
            x: normed,
            weight: self.head,
            bias: None,
            exact: false,
            out: logits,
        })?;
        if let Some(cap) = self.logit_cap {
            device.run(&Op::SoftCap { x: logits, cap })?;
        }
        for (i, asked) in asked.iter().enumerate() {
            if let Some(n) = asked.first {
                device.run(&Op::TopLogits { logits: logits.slice(i, 1), best: self.best(i, n) })?;
            }
        }
        Ok(())
    }

    /// Where logits of the first `n` rows that were asked for are.
    fn logits(&self, n: usize) -> View {
        View::rows(self.logits, n, self.vocab)
    }

    /// Where the `n` logits are that come first in rank, and before them their tokens, of one of the rows that were asked for.
    fn best(&self, i: usize, n: usize) -> View {
        View { width: 2 * n, ..View::rows(self.first, LOGIT_ROWS, TOP_CANDIDATES).slice(i, 1) }
    }

    /// Reads what was asked for: the first in rank, and all logits if these are not enough. While the device is at work on it,
    /// the step after it is recorded, if `next` are the spans that will go on token by token.
    fn read_asked(
        &mut self,
        on: &mut On<'_>,
        asked: &[Asked],
        next: &[SeqSpan<'_>],
        sink: &mut LogitsSink<'_>,
    ) -> Result<(), moeflux_compute::Error> {
        let mut read = std::mem::take(&mut self.read);
        let On { device, cache, .. } = on;
        let at_once = if asked.iter().all(|asked| asked.first.is_none()) { LOGIT_ROWS } else { 1 };
        let mut read_some = |i: usize, some: &[Asked]| {
            let logits = self.logits(asked.len()).slice(i, some.len());
            let view = some[0].first.map_or(logits, |n| self.best(i, n));
            let numbers = &mut read[..view.rows * view.width];
            device.read_while(view, numbers, &mut |device| {
                if i == 0 {
                    self.record_next(device, cache, next);
                }
            })?;
            let Some(n) = some[0].first else {
                for (asked, row) in some.iter().zip(numbers.chunks_exact(self.vocab)) {
                    sink(asked.row, LogitsOutput::Logits(row));
                }
                return Ok(());
            };
            let (ids, of_ids) = numbers.split_at(n);
            if !sink(some[0].row, LogitsOutput::First { ids, logits: of_ids }) {
                let all = &mut read[..self.vocab];
                device.read(logits, all)?;
                sink(some[0].row, LogitsOutput::Logits(all));
            }
            Ok(())
        };
        let result = asked
            .chunks(at_once)
            .enumerate()
            .try_for_each(|(i, some)| read_some(i * at_once, some));
        self.read = read;
        result
    }

    /// Records the step that comes after one with a token of each span, where no layer makes the host wait. What fails here will
    /// fail again where somebody is told.
    fn record_next(
        &mut self,
        device: &mut dyn Device,
        cache: &mut ExpertCache,
        spans: &[SeqSpan<'_>],
    ) {
        if spans.is_empty()
            || spans.iter().any(|span| span.tokens.len() != 1)
            || self.routing.waited
        {
            return;
        }
        let states: Vec<State> =
            spans.iter().flat_map(|span| span.states.iter().flatten().flatten().copied()).collect();
        let next: Vec<_> =
            spans.iter().map(|span| SeqSpan { position: span.position + 1, ..*span }).collect();
        let asked: Vec<_> =
            (0..).zip(&next).flat_map(|(row, span)| Asked::of(span.wanted, row..row + 1)).collect();
        let mut stats = Stats::default();
        let recorded = device.record_ahead(&states, &mut |device| {
            let mut on = On { device: &mut *device, cache, stats: &mut stats };
            let layers = self.layers(&mut on, &next, &mut StepControl::default());
            layers.and_then(|()| self.head(device, &asked).map_err(Error::at(|| "head"))).is_ok()
        });
        if recorded.is_ok() {
            let spans = next
                .iter()
                .map(|span| (span.states.to_vec(), span.position, span.wanted))
                .collect();
            self.ahead = Some(Ahead { spans, stats });
        }
    }
}

/// A row of a step whose logits are wanted: so many that come first in rank, or all.
#[derive(Clone, Copy)]
struct Asked {
    row: usize,
    first: Option<usize>,
}

impl Asked {
    /// What is wanted of a span with these rows.
    fn of(wanted: LogitsRequest, rows: Range<usize>) -> impl Iterator<Item = Self> {
        let (rows, first) = match wanted {
            LogitsRequest::Nothing => (rows.end..rows.end, None),
            LogitsRequest::Logits(Logits::All) => (rows, None),
            LogitsRequest::Logits(Logits::Last) => (rows.end - 1..rows.end, None),
            LogitsRequest::First(n) => (rows.end - 1..rows.end, Some(n)),
        };
        rows.map(move |row| Self { row, first })
    }
}

/// A step with a token of each of some spans that a device may have recorded.
struct Ahead {
    /// States, positions, and what is wanted.
    spans: Vec<(Vec<LayerStates>, usize, LogitsRequest)>,
    stats: Stats,
}

impl Ahead {
    fn is(&self, spans: &[SeqSpan<'_>]) -> bool {
        let recorded = self
            .spans
            .iter()
            .map(|(states, position, wanted)| (states.as_slice(), *position, *wanted));
        recorded.eq(spans.iter().map(|span| (span.states, span.position, span.wanted)))
            && spans.iter().all(|span| span.tokens.len() == 1)
    }
}

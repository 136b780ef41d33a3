//! Every op at the row counts of decode and prefill: several rows of one sequence, one row of
//! several sequences, and sequences of mixed lengths.

use std::iter::zip;

use moeflux_compute::{
    Activation, BlockType, ExpertShape, ExpertUses, Format, GateFunction, HeadMatrix, HeadRows,
    IndexList, IndexQueries, KeySharing, LogDecay, MatrixShape, NormGate, Op, RopePairs,
    RopePositions, Router, Shared, Slot, Span, StateShape, StepLimits, View,
};

use crate::{
    experts::{Experts, routed_ids, uses},
    harness::{AFFINE4, DevicePair, ROW_COUNTS, Random},
};

/// Rows of the sequences of a step that decodes and prefills.
const MIXED: [usize; 5] = [1, 3, 17, 1, 64];

/// Positions of the sequences before the tested step, in turn.
const PREFIXES: [usize; 4] = [5, 2, 19, 1];

/// Positions of a state: at least the longest prefix and the longest chunk.
const POSITIONS: usize = 128;

/// Declares a test for each op, by a method of [`Tested`]. An op without one does not compile.
macro_rules! tests_of_ops {
    (
        without spans { $($op:ident { $view:ident } => $test:ident,)* }
        with spans { $($span_op:ident { $spans:ident } => $span_test:ident,)* }
    ) => {
        /// Rows of each sequence of an op; of an op without spans, its number of rows.
        fn row_counts(op: &Op<'_>) -> Vec<usize> {
            match op {
                $(Op::$op { $view, .. } => vec![$view.rows],)*
                $(Op::$span_op { $spans, .. } => $spans.sequence_rows(),)*
            }
        }

        $(#[test]
        fn $test() {
            let steps = ROW_COUNTS.map(|rows| vec![rows]);
            run(stringify!($op), &steps, |tested| tested.$test());
        })*

        $(#[test]
        fn $span_test() {
            let chunks = ROW_COUNTS.map(|rows| vec![rows]);
            let batches = ROW_COUNTS.map(|sequences| vec![1; sequences]);
            let steps = [&chunks[..], &batches[1..], &[MIXED.to_vec()]].concat();
            run(stringify!($span_op), &steps, |tested| tested.$span_test());
        })*
    };
}

/// Rows of each sequence, by spans or by positions of RoPE.
trait SequenceRows {
    fn sequence_rows(&self) -> Vec<usize>;
}

impl SequenceRows for &[Span] {
    fn sequence_rows(&self) -> Vec<usize> {
        self.iter().map(|span| span.rows).collect()
    }
}

impl SequenceRows for &[usize] {
    fn sequence_rows(&self) -> Vec<usize> {
        self.to_vec()
    }
}

impl SequenceRows for RopePositions<'_> {
    fn sequence_rows(&self) -> Vec<usize> {
        match self {
            RopePositions::Spans(spans) => spans.sequence_rows(),
            RopePositions::Axes { ids, .. } => vec![ids.len()],
        }
    }
}

tests_of_ops! {
    without spans {
        Embed { out } => embed,
        EmbedChosen { ids } => embed_chosen,
        RmsNorm { x } => rms_norm,
        LayerNorm { x } => layer_norm,
        GatedRmsNorm { x } => gated_rms_norm,
        MatMul { x } => mat_mul,
        HeadMatMul { x } => head_mat_mul,
        Glu { out } => glu,
        HeadGate { x } => head_gate,
        KeyedGate { v } => keyed_gate,
        Add { x } => add,
        ScatterRows { x } => scatter_rows,
        Scale { x } => scale,
        Silu { x } => silu,
        StreamWeights { logits } => stream_weights,
        Collapse { out } => collapse,
        Expand { y } => expand,
        GatherColumns { x } => gather_columns,
        SoftCap { x } => soft_cap,
        TopK { logits } => top_k,
        TopLogits { logits } => top_logits,
        Experts { x } => routed_experts,
        Combine { out } => combine,
    }
    with spans {
        Rope { positions } => rope,
        Attention { spans } => attention,
        LatentAttention { spans } => latent_attention,
        SegmentAttention { segments } => segment_attention,
        Append { spans } => append,
        TopPositions { spans } => top_positions,
        TopBlocks { spans } => top_blocks,
        Conv1d { spans } => conv1d,
        Compress { spans } => compress,
        DeltaNet { spans } => delta_net,
        Mamba2 { spans } => mamba2,
    }
}

/// Tests an op on every device, in steps of the given rows of each sequence.
fn run(name: &'static str, steps: &[Vec<usize>], test: fn(&mut Tested<'_>)) {
    let mut random = Random::new(19);
    DevicePair::for_each(|pair, is_exact| {
        for lens in steps {
            let random = &mut random;
            let mut tested = Tested { pair, random, is_exact, name, lens, runs: 0 };
            test(&mut tested);
            assert!(tested.runs > 0, "{name} did not run with {lens:?} rows");
        }
    });
}

/// An op under test.
struct Tested<'a> {
    pair: &'a mut DevicePair,
    random: &'a mut Random,
    is_exact: bool,
    name: &'static str,
    /// Rows of each sequence.
    lens: &'a [usize],
    /// Runs of the op with these rows.
    runs: usize,
}

impl Tested<'_> {
    fn rows(&self) -> usize {
        self.lens.iter().sum()
    }

    fn run(&mut self, op: &Op<'_>) {
        assert_eq!(op.name(), self.name);
        self.runs += usize::from(row_counts(op) == self.lens);
        self.pair.run(op);
    }

    fn agree(&mut self, view: View, tolerance: f32) {
        self.pair.agree(&format!("{}, {:?} rows", self.name, self.lens), view, tolerance);
    }

    fn agree_in_norm(&mut self, view: View, tolerance: f64) {
        self.pair.agree_in_norm(&format!("{}, {:?} rows", self.name, self.lens), view, tolerance);
    }

    fn random(&mut self, rows: usize, width: usize) -> View {
        self.pair.random(self.random, rows, width)
    }

    fn f16_values(&mut self, rows: usize, width: usize) -> View {
        self.pair.f16_values(self.random, rows, width)
    }

    /// Small integers: products are exact on every device.
    fn integers(&mut self, rows: usize, width: usize) -> View {
        let values: Vec<f32> =
            (0..rows * width).map(|_| self.random.below(7) as f32 - 3.0).collect();
        self.pair.dense(rows, &values)
    }

    /// Runs a step of a prefix of each sequence, then the step under test.
    fn after_prefixes(&mut self, shape: StateShape, mut step: impl FnMut(&mut Self, &[Span])) {
        let prefixes = PREFIXES.iter().cycle().take(self.lens.len());
        let mut spans: Vec<Span> =
            prefixes.map(|rows| Span::new(self.pair.state(shape), 0, *rows)).collect();
        step(self, &spans);
        for (span, rows) in zip(&mut spans, self.lens) {
            self.pair.commit(*span);
            *span = Span { position: span.rows, rows: *rows, ..*span };
        }
        step(self, &spans);
    }

    fn embed(&mut self) {
        let shape = MatrixShape { rows: 11, cols: 64, format: AFFINE4 };
        let table = self.pair.weight(self.random, shape);
        let tokens: Vec<u32> = (0..self.rows() as u32).map(|row| row * 7 % 11).collect();
        let out = self.pair.nan_filled(tokens.len(), shape.cols);
        self.run(&Op::Embed { table, tokens: &tokens, out });
        self.agree(out, 0.0);
    }

    fn embed_chosen(&mut self) {
        let shape = MatrixShape { rows: 11, cols: 64, format: AFFINE4 };
        let table = self.pair.weight(self.random, shape);
        let ids: Vec<f32> = (0..3 * self.rows()).map(|i| (i * 5 % 13) as f32 - 1.0).collect();
        let ids = self.pair.dense(self.rows(), &ids).columns(1, 1);
        let out = self.pair.nan_filled(self.rows(), shape.cols);
        self.run(&Op::EmbedChosen { table, ids, out });
        self.agree(out, 0.0);
    }

    /// Two views of three heads of 33 elements, norm weights, and an output.
    fn norm_operands(&mut self) -> ([View; 2], moeflux_compute::Buffer, View) {
        let (rows, width) = (self.rows(), 33);
        let inputs = [0; 2].map(|_| self.random(rows, 3 * width).split(3));
        let weight = self.pair.buffer(&self.random.values(3 * width));
        (inputs, weight, self.pair.nan_filled(rows, 3 * width).split(3))
    }

    fn rms_norm(&mut self) {
        let ([x, _], weight, out) = self.norm_operands();
        self.run(&Op::RmsNorm { x, weight: Some(weight), per_head: false, eps: 1e-6, out });
        self.agree(out, 1e-5);
    }

    fn layer_norm(&mut self) {
        let ([x, _], weight, out) = self.norm_operands();
        let bias = Some(self.pair.buffer(&self.random.values(x.width)));
        self.run(&Op::LayerNorm { x, weight, bias, eps: 1e-3, out });
        self.agree(out, 1e-5);
    }

    fn gated_rms_norm(&mut self) {
        for function in [NormGate::Silu, NormGate::Sigmoid, NormGate::SiluBeforeNorm] {
            let ([x, gate], weight, out) = self.norm_operands();
            self.run(&Op::GatedRmsNorm { x, gate, function, weight, eps: 1e-6, out });
            self.agree(out, 1e-5);
        }
    }

    fn mat_mul(&mut self) {
        let (rows, outputs, cols) = (self.rows(), 40, 256);
        let q4_k = Format::Blocks(BlockType::Q4K);
        for (format, exact) in [(AFFINE4, false), (AFFINE4, true), (q4_k, false)] {
            let shape = MatrixShape { rows: outputs, cols, format };
            let weight = self.pair.weight(self.random, shape);
            let bias = Some(self.pair.buffer(&self.random.values(outputs)));
            let (x, out) = (self.random(rows, cols), self.pair.nan_filled(rows, outputs));
            self.run(&Op::MatMul { x, weight, bias, exact, answers: x.few(), out });
            if exact || self.is_exact {
                self.agree(out, 1e-5);
            } else {
                self.agree_in_norm(out, 1e-2);
            }
        }
    }

    fn head_mat_mul(&mut self) {
        let (rows, heads, cols) = (self.rows(), 3, 64);
        let head_rows = HeadRows { stride: 20, first: 2, count: 18 };
        let shape = MatrixShape { rows: heads * head_rows.stride, cols, format: AFFINE4 };
        let weight = self.pair.weight(self.random, shape);
        for (transposed, inputs, outputs) in
            [(false, cols, head_rows.count), (true, head_rows.count, cols)]
        {
            let x = self.random(rows, heads * inputs).split(heads);
            let out = self.pair.nan_filled(rows, heads * outputs).split(heads);
            let matrix = HeadMatrix { weight, head_rows, transposed };
            self.run(&Op::HeadMatMul { x, matrix, out });
            self.agree(out, 1e-5);
        }
    }

    fn glu(&mut self) {
        let rows = self.rows();
        let [gate, up] = [0; 2].map(|_| self.random(rows, 33));
        let out = self.pair.nan_filled(rows, 33);
        self.run(&Op::Glu { activation: Activation::SwiGlu, gate, up, out });
        self.agree(out, 1e-5);
    }

    fn head_gate(&mut self) {
        let rows = self.rows();
        for gate_width in [1, 33] {
            let x = self.random(rows, 3 * 33).split(3);
            let gate = self.random(rows, 3 * gate_width).split(3);
            self.run(&Op::HeadGate { x, gate, function: GateFunction::Sigmoid });
            self.agree(x, 1e-5);
        }
    }

    fn add(&mut self) {
        let rows = self.rows();
        let [x, y] = [0; 2].map(|_| self.random(rows, 33));
        self.run(&Op::Add { x, y });
        self.agree(x, 0.0);
    }

    fn scatter_rows(&mut self) {
        for add in [false, true] {
            let rows: Vec<u32> = (0..self.rows() as u32).map(|row| row / 3 * 5 + row % 3).collect();
            let (x, out) = (self.random(rows.len(), 33), self.random(5 * rows.len() + 1, 33));
            self.run(&Op::ScatterRows { x, rows: &rows, add, out });
            self.agree(out, 0.0);
        }
    }

    fn scale(&mut self) {
        let x = self.random(self.rows(), 33);
        self.run(&Op::Scale { x, factor: 71.3 });
        self.agree(x, 0.0);
    }

    fn silu(&mut self) {
        let x = self.random(self.rows(), 33);
        self.run(&Op::Silu { x });
        self.agree(x, 1e-5);
    }

    fn stream_weights(&mut self) {
        let streams = 4;
        let logits = self.random(self.rows(), streams * (streams + 2));
        let scale = self.pair.buffer(&self.random.values(3));
        let base = self.pair.buffer(&self.random.values(logits.width));
        let (eps, iterations) = (1e-6, 20);
        self.run(&Op::StreamWeights { logits, streams, scale, base, eps, iterations });
        self.agree(logits, 1e-5);
    }

    fn collapse(&mut self) {
        let (rows, width, function) = (self.rows(), 33, GateFunction::Sigmoid);
        for weights in [None, Some(1), Some(width)] {
            let x = self.random(rows, 4 * width).split(4);
            let weights = weights.map(|width| self.random(rows, 4 * width).split(4));
            let out = self.pair.nan_filled(rows, width);
            self.run(&Op::Collapse { x, weights, function, out });
            self.agree(out, 1e-5);
        }
    }

    fn expand(&mut self) {
        let (rows, width, function) = (self.rows(), 33, GateFunction::DoubleSigmoid);
        for is_mixed in [false, true] {
            let x = self.random(rows, 4 * width).split(4);
            let (y, gate) = (self.random(rows, width), self.random(rows, 4));
            let mixing = is_mixed.then(|| self.random(rows, 16).split(4));
            self.run(&Op::Expand { x, y, gate, function, mixing });
            self.agree(x, 1e-5);
        }
    }

    fn keyed_gate(&mut self) {
        let (rows, width) = (self.rows(), 33);
        let [q, k] = [0; 2].map(|_| self.random(rows, 4 * width).split(4));
        let v = self.random(rows, width);
        let out = self.pair.nan_filled(rows, 4 * width).split(4);
        self.run(&Op::KeyedGate { q, k, v, scale: 3.0, out });
        self.agree(out, 1e-5);
    }

    fn soft_cap(&mut self) {
        let x = self.random(self.rows(), 33);
        self.run(&Op::SoftCap { x, cap: 0.7 });
        self.agree(x, 1e-5);
    }

    fn gather_columns(&mut self) {
        let (rows, width, experts, k) = (self.rows(), 33, 5, 3);
        let x = self.random(rows, width);
        let [orders, ids] =
            [(experts, width, width), (rows, k, experts)].map(|(n, cols, below)| {
                let values: Vec<f32> =
                    (0..n * cols).map(|_| self.random.below(below) as f32).collect();
                self.pair.dense(n, &values)
            });
        for (ids, parts) in [(None, 1), (Some(ids), k)] {
            let out = self.pair.nan_filled(rows * parts, width);
            self.run(&Op::GatherColumns { x, orders, ids, out });
            self.agree(out, 0.0);
        }
    }

    fn top_k(&mut self) {
        let (rows, k) = (self.rows(), 6);
        let logits = self.random(rows, 40);
        let [ids, weights] = [0; 2].map(|_| self.pair.nan_filled(rows, k));
        self.run(&Op::TopK { logits, router: Router::softmax(true), ids, weights });
        self.agree(ids, 0.0);
        self.agree(weights, 1e-5);
    }

    fn top_logits(&mut self) {
        let rows = self.rows();
        let (logits, best) = (self.random(rows, 300), self.pair.nan_filled(rows, 2 * 5));
        self.run(&Op::TopLogits { logits, best });
        self.agree(best, 0.0);
    }

    fn routed_experts(&mut self) {
        let (rows, width, experts, k) = (self.rows(), 64, 5, 2);
        let matrix = MatrixShape { rows: width, cols: width, format: AFFINE4 };
        let all = Experts::new(ExpertShape::new(matrix, matrix, matrix), experts);
        let bank = all.fill(self.pair, self.random, experts);
        let slots: Vec<Slot> = (0..experts as u32).map(|index| Slot { bank, index }).collect();
        let table = self.pair.slot_table(&slots);
        let listed = uses(self.random, bank, rows, k, experts);
        let ids = routed_ids(self.pair, rows, &listed);
        for uses in [ExpertUses::Listed(&listed), ExpertUses::Routed { ids, table }] {
            let x = self.random(rows, width);
            let views = all.outputs(self.pair, rows * k);
            self.run(&all.op(x, x.few(), uses, views));
            self.agree_in_norm(views[1], if self.is_exact { 1e-5 } else { 2e-2 });
        }
    }

    fn combine(&mut self) {
        let (rows, width, k) = (self.rows(), 33, 5);
        let (parts, weights) = (self.random(rows * k, width), self.random(rows, k));
        let (shared, gate) = (self.random(rows, width), Some(self.random(rows, 1)));
        let shared = Some(Shared { out: shared, gate });
        for (add, shared) in [(true, None), (true, shared), (false, shared)] {
            let out = self.random(rows, width);
            self.run(&Op::Combine { parts, weights, shared, add, out });
            self.agree(out, 1e-6);
        }
    }

    fn rope(&mut self) {
        let frequencies = &[1.0, 0.3, 0.1, 0.03];
        for pairs in [RopePairs::Halves, RopePairs::Interleaved, RopePairs::SplitHalves] {
            self.after_prefixes(StateShape::Recurrent { len: 0 }, |tested, spans| {
                let rows = row_sum(spans);
                let x = tested.random(rows, 3 * 16).split(3);
                let out = tested.pair.nan_filled(rows, 3 * 16).split(3);
                let positions = RopePositions::Spans(spans);
                tested.run(&Op::Rope { x, frequencies, pairs, scale: 1.2, positions, out });
                tested.agree(out, 1e-5);
                let ids: Vec<[u32; 3]> =
                    (0..rows as u32).map(|row| [7, row / 3, row % 3]).collect();
                let positions = RopePositions::Axes { axes: &[1, 2, 0, 1], ids: &ids };
                tested.run(&Op::Rope { x, frequencies, pairs, scale: 1.2, positions, out });
                tested.agree(out, 1e-5);
            });
        }
    }

    fn attention(&mut self) {
        let (heads, key_width) = (4, 16);
        // With values, or with values that are prefixes of the keys; all positions, the last four,
        // or two listed ones.
        for (kv_heads, value_width, window, is_listed) in
            [(2, 16, None, false), (2, 16, Some(4), false), (1, 0, None, false), (1, 0, None, true)]
        {
            let shape =
                StateShape::KeyValue { kv_heads, key_width, value_width, positions: POSITIONS };
            let sinks = window.is_some().then(|| self.pair.buffer(&self.random.values(heads)));
            self.after_prefixes(shape, |tested, spans| {
                let rows = row_sum(spans);
                let has_values = value_width > 0;
                let out_width = if has_values { value_width } else { 8 };
                let listed: Vec<f32> = spans
                    .iter()
                    .flat_map(|span| span.position..span.position + span.rows)
                    .flat_map(|p| if p == 0 { [0.0, -1.0] } else { [(p / 2) as f32, p as f32] })
                    .collect();
                let q = tested.random(rows, heads * key_width).split(heads);
                let k = tested.f16_values(rows, kv_heads * key_width).split(kv_heads);
                let v = has_values.then(|| tested.f16_values(rows, kv_heads * value_width));
                let gate = window.map(|_| tested.random(rows, heads * out_width).split(heads));
                let positions = is_listed.then(|| tested.pair.dense(rows, &listed));
                let out = tested.pair.nan_filled(rows, heads * out_width).split(heads);
                tested.run(&Op::Attention {
                    q,
                    k,
                    v: v.map(|v| v.split(kv_heads)),
                    gate,
                    scale: 0.7,
                    window,
                    sinks,
                    positions,
                    spans,
                    out,
                });
                tested.agree(out, tested.pair.attention_tolerance(rows));
            });
        }
    }

    fn latent_attention(&mut self) {
        let (heads, latent, nope, rope, value) = (2, 64, 10, 4, 12);
        let stride = nope + value;
        let matrix = MatrixShape { rows: heads * stride, cols: latent, format: AFFINE4 };
        let weight = self.pair.weight(self.random, matrix);
        let [keys, values] = [(0, nope), (nope, value)].map(|(first, count)| {
            let head_rows = HeadRows { stride, first, count };
            HeadMatrix { weight, head_rows, transposed: false }
        });
        let key_width = latent + rope;
        self.after_prefixes(cache_of_keys(key_width), |tested, spans| {
            let rows = row_sum(spans);
            let q = tested.random(rows, heads * (nope + rope)).split(heads);
            let k = tested.f16_values(rows, key_width);
            let out = tested.pair.nan_filled(rows, heads * value).split(heads);
            tested.run(&Op::LatentAttention { q, k, keys, values, scale: 0.03, spans, out });
            tested.agree(out, 1e-5);
        });
    }

    fn segment_attention(&mut self) {
        for (heads, kv_heads, width) in [(2, 2, 18), (4, 2, 16)] {
            let rows = self.rows();
            let q = self.random(rows, heads * width).split(heads);
            let [k, v] = [0; 2].map(|_| self.random(rows, kv_heads * width).split(kv_heads));
            let out = self.pair.nan_filled(rows, heads * width).split(heads);
            let segments = self.lens;
            self.run(&Op::SegmentAttention { q, k, v, scale: 0.7, segments, out });
            let tolerance = self.pair.segment_tolerance(width, width);
            self.agree(out, tolerance);
        }
    }

    fn top_positions(&mut self) {
        let (heads, width) = (3, 8);
        let scores = self.pair.nan_filled(3, POSITIONS);
        self.after_prefixes(cache_of_keys(width), |tested, spans| {
            let rows = row_sum(spans);
            let q = tested.integers(rows, heads * width).split(heads);
            let (k, weights) = (tested.integers(rows, width), tested.integers(rows, heads));
            let out = tested.pair.nan_filled(rows, 6);
            tested.run(&Op::TopPositions {
                queries: Some(IndexQueries { q, weights, scores }),
                k: Some(k),
                ratio: 1,
                list: IndexList::Positions,
                spans,
                out,
            });
            tested.agree(out, 0.0);
        });
    }

    fn append(&mut self) {
        let (kv_heads, key_width, value_width) = (2, 12, 8);
        let shape = StateShape::KeyValue { kv_heads, key_width, value_width, positions: POSITIONS };
        self.after_prefixes(shape, |tested, spans| {
            let rows = row_sum(spans);
            let k = tested.f16_values(rows, kv_heads * key_width).split(kv_heads);
            let v = tested.f16_values(rows, kv_heads * value_width).split(kv_heads);
            tested.run(&Op::Append { k, v: Some(v), spans });
            // Attention of the last rows, which it appends again.
            let q = tested.random(rows, 4 * key_width).split(4);
            let out = tested.pair.nan_filled(rows, 4 * value_width).split(4);
            let mut first = 0;
            for span in spans {
                let last = first + span.rows - 1;
                let span = Span { position: span.position + span.rows - 1, rows: 1, ..*span };
                let row = |view: View| view.slice(last, 1);
                tested.pair.run(&Op::Attention {
                    q: row(q),
                    k: row(k),
                    v: Some(row(v)),
                    gate: None,
                    scale: 0.7,
                    window: None,
                    sinks: None,
                    positions: None,
                    spans: &[span],
                    out: row(out),
                });
                tested.agree(row(out), 1e-5);
                first = last + 1;
            }
        });
    }

    fn top_blocks(&mut self) {
        let (heads, width, block, chosen) = (2, 8, 4, 2);
        let scores = self.pair.nan_filled(3 * heads, POSITIONS / block);
        self.after_prefixes(cache_of_keys(width), |tested, spans| {
            let rows = row_sum(spans);
            let q = tested.integers(rows, heads * width).split(heads);
            let k = tested.integers(rows, width);
            let out = tested.pair.nan_filled(rows, heads * chosen * block).split(heads);
            tested.run(&Op::TopBlocks { q, k, block, local: 1, spans, scores, out });
            tested.agree(out, 0.0);
        });
    }

    fn conv1d(&mut self) {
        let (channels, width) = (37, 4);
        let weight = self.pair.buffer(&self.random.values(channels * width));
        let bias = self.pair.buffer(&self.random.values(channels));
        for (dilation, bias) in [(1, None), (1, Some(bias)), (3, None)] {
            let state = StateShape::Recurrent { len: (width - 1) * dilation * channels };
            self.after_prefixes(state, |tested, spans| {
                let rows = row_sum(spans);
                let x = tested.random(rows, channels);
                let out = tested.pair.nan_filled(rows, channels);
                tested.run(&Op::Conv1d {
                    x,
                    weight,
                    bias,
                    width,
                    dilation,
                    silu: true,
                    spans,
                    out,
                });
                tested.agree(out, 1e-5);
            });
        }
    }

    fn compress(&mut self) {
        let (width, ratio) = (20, 4);
        let ape = self.pair.buffer(&self.random.values(ratio * 2 * width));
        let state = StateShape::Recurrent { len: 2 * ratio * 4 * width };
        self.after_prefixes(state, |tested, spans| {
            let rows = row_sum(spans);
            let [x, gate] = [0; 2].map(|_| tested.random(rows, 2 * width));
            let blocks = |span: &Span| (span.position + span.rows) / ratio - span.position / ratio;
            let entries: usize = spans.iter().map(blocks).sum();
            let out = tested.pair.nan_filled(entries + 1, width).slice(0, entries);
            let (gate, ape) = (Some(gate), Some(ape));
            tested.run(&Op::Compress { x, gate, ape, ratio, overlap: true, spans, out });
            tested.agree(out, 1e-5);
        });
    }

    fn delta_net(&mut self) {
        let (key_heads, heads, width) = (2, 4, 16);
        let a_log = self.pair.buffer(&self.random.values(heads));
        let dt_bias = self.pair.buffer(&self.random.values(heads * width));
        let state = StateShape::Recurrent { len: heads * width * width };
        let by_key = (width, LogDecay::Bounded { bound: -5.0 });
        for (decays, decay) in [(1, LogDecay::Softplus), by_key] {
            self.after_prefixes(state, |tested, spans| {
                let (rows, sharing) = (row_sum(spans), KeySharing::Adjacent);
                let [q, k] =
                    [0; 2].map(|_| tested.random(rows, key_heads * width).split(key_heads));
                let v = tested.random(rows, heads * width).split(heads);
                let a = tested.random(rows, heads * decays).split(heads);
                let b = tested.random(rows, heads);
                let out = tested.pair.nan_filled(rows, heads * width).split(heads);
                tested.run(&Op::DeltaNet {
                    q,
                    k,
                    v,
                    a,
                    b,
                    a_log,
                    dt_bias,
                    decay,
                    sharing,
                    spans,
                    out,
                });
                tested.agree(out, 1e-5);
            });
        }
    }

    fn mamba2(&mut self) {
        let (groups, heads, state_width, width) = (2, 4, 24, 40);
        let [a_log, d, dt_bias] = [0; 3].map(|_| self.pair.buffer(&self.random.values(heads)));
        let state = StateShape::Recurrent { len: heads * width * state_width };
        self.after_prefixes(state, |tested, spans| {
            let (rows, limits) = (row_sum(spans), StepLimits::default());
            let x = tested.random(rows, heads * width).split(heads);
            let [b, c] = [0; 2].map(|_| tested.random(rows, groups * state_width).split(groups));
            let dt = tested.random(rows, heads);
            let out = tested.pair.nan_filled(rows, heads * width).split(heads);
            tested.run(&Op::Mamba2 { x, b, c, dt, a_log, d, dt_bias, limits, spans, out });
            tested.agree(out, 1e-5);
        });
    }
}

fn row_sum(spans: &[Span]) -> usize {
    spans.iter().map(|span| span.rows).sum()
}

/// A KV cache of one head without values.
const fn cache_of_keys(key_width: usize) -> StateShape {
    StateShape::KeyValue { kv_heads: 1, key_width, value_width: 0, positions: POSITIONS }
}

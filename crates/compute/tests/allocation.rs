//! Ops of the CPU device allocate nothing once its scratch is reserved.
//!
//! This test has its own binary, as it replaces the global allocator. It counts the allocations of
//! all threads but the first, on which the test harness allocates meanwhile.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    alloc::{GlobalAlloc, Layout, System},
    hint::black_box,
    ptr,
    sync::atomic::{AtomicPtr, AtomicUsize, Ordering::SeqCst},
    thread,
};

use moeflux_compute::{
    Activation, Affine, BankPlace, Buffer, Bytes, Commit, Device, DeviceOptions, ExpertGroups,
    ExpertShape, ExpertUse, ExpertUses, Format, GateFunction, GroupScore, HeadMatrix, HeadRows,
    IndexList, IndexQueries, KeySharing, LogDecay, MatrixShape, NormGate, Op, RopePairs,
    RopePositions, Router, Scalar, Scoring, ScratchShape, Shared, SharedChoice, Slot, Span,
    StateShape, StepLimits, View, open,
};

/// The system allocator with a counter.
struct CountingAllocator;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);
/// Address of [`MARKER`] in the program's first thread, which is the first to allocate.
static FIRST_THREAD: AtomicPtr<u8> = AtomicPtr::new(ptr::null_mut());

thread_local! {
    /// Its address identifies the thread.
    static MARKER: u8 = const { 0 };
}

// SAFETY: every call is forwarded to the system allocator.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let marker = MARKER.with(|marker| ptr::from_ref(marker).cast_mut());
        match FIRST_THREAD.compare_exchange(ptr::null_mut(), marker, SeqCst, SeqCst) {
            Err(first) if first != marker => _ = ALLOCATIONS.fetch_add(1, SeqCst),
            _ => {}
        }
        // SAFETY: the caller upholds the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller upholds the contract of `dealloc`; `alloc` got `ptr` from `System`.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const HIDDEN: usize = 256;
const INNER: usize = 512;
const EXPERTS: usize = 8;
const K: usize = 4;
const AFFINE4: Format = Format::Affine(Affine { bits: 4, group: 64, scale: Scalar::BF16 });

/// Allocates zeroed buffers of a device.
struct Allocator(Box<dyn Device>);

impl Allocator {
    fn buffer(&mut self, len: usize) -> Buffer {
        self.0.buffer(len).unwrap()
    }

    fn view(&mut self, rows: usize, width: usize) -> View {
        View::rows(self.buffer(rows * width), rows, width)
    }
}

#[test]
fn ops_allocate_nothing() {
    // On a separate thread, as the harness may run tests on the first one.
    let steps = thread::spawn(|| {
        let before = ALLOCATIONS.load(SeqCst);
        drop(black_box(Box::new(1)));
        assert_eq!(ALLOCATIONS.load(SeqCst) - before, 1, "allocations are counted");
        for (exact, rows) in [(true, 1), (false, 1), (false, 5)] {
            step(exact, rows);
        }
    });
    steps.join().unwrap();
}

/// Runs every op on `rows` rows.
fn step(exact: bool, rows: usize) {
    let options = DeviceOptions::default().name("cpu").threads(2).exact(exact);
    let mut device = Allocator(open(&options).unwrap());
    let scratch = ScratchShape {
        rows,
        cols: INNER,
        latent_head: 2 * HIDDEN + 64,
        wide_kv: 0,
        segment_head: 128,
    };
    assert!(device.0.scratch_bytes(scratch).unwrap() > 0);
    device.0.reserve_scratch(scratch).unwrap();
    let matrix = |rows, cols, format| MatrixShape { rows, cols, format };
    let mut weight = |shape: MatrixShape| {
        let bytes = Bytes::zeroed(shape.plane_bytes().unwrap().total()).unwrap();
        device.0.weight(shape, bytes).unwrap()
    };
    let (table, square) =
        (weight(matrix(100, HIDDEN, AFFINE4)), weight(matrix(HIDDEN, HIDDEN, AFFINE4)));
    let small = weight(matrix(HIDDEN, 64, AFFINE4));
    let (wide, router) = (
        weight(matrix(HIDDEN, INNER, Format::Plain(Scalar::BF16))),
        weight(matrix(
            EXPERTS,
            HIDDEN,
            Format::Affine(Affine { bits: 8, group: 64, scale: Scalar::BF16 }),
        )),
    );
    let wide_shape = matrix(INNER, HIDDEN, AFFINE4);
    let shape = ExpertShape {
        output_bias: Some(Scalar::BF16),
        ..ExpertShape::new(wide_shape, wide_shape, matrix(HIDDEN, INNER, AFFINE4))
    };
    let bank = device.0.bank(EXPERTS, shape.bytes().unwrap(), BankPlace::Host).unwrap();
    let uses: Vec<ExpertUse> = (0..rows * K)
        .map(|i| ExpertUse {
            slot: Slot { bank, index: (i % EXPERTS) as u32 },
            row: i / K,
            out_row: i,
        })
        .collect();
    let mut kv = |kv_heads, key_width, value_width, positions| {
        device
            .0
            .state(StateShape::KeyValue { kv_heads, key_width, value_width, positions })
            .unwrap()
    };
    let span = |state| [Span::new(state, 290, rows)];
    let kv_spans = span(kv(2, 64, 64, 300));
    let (ring, latent, indexed) =
        (span(kv(2, 64, 64, 256)), span(kv(1, 128, 0, 300)), span(kv(1, 128, 0, 300)));
    let mut recurrent = |len| device.0.state(StateShape::Recurrent { len }).unwrap();
    let (conv, delta) = (recurrent(3 * HIDDEN), recurrent(4 * 64 * 64));
    let conv_spans = [Span::new(conv, 0, rows)];
    let pooled_spans = [Span::new(recurrent(2 * 2 * HIDDEN), 0, rows)];
    let delta_spans = [Span::new(delta, 0, rows)];
    let (x, y, z) =
        (device.view(rows, HIDDEN), device.view(rows, HIDDEN), device.view(rows, HIDDEN));
    let (k, v) = (device.view(rows, 128).split(2), device.view(rows, 128).split(2));
    let (gate, up) = (device.view(rows, INNER), device.view(rows, INNER));
    let (logits, ids, shares) =
        (device.view(rows, EXPERTS), device.view(rows, K), device.view(rows, K));
    let (inner, parts) = (device.view(rows * K, INNER), device.view(rows * K, HIDDEN));
    let (one, taps) = (device.view(rows, 1), device.buffer(4 * HIDDEN));
    let tokens = vec![7; rows];
    let (flat, scores, listed) =
        (device.view(rows, 128), device.view(2, 300), device.view(rows, 33));
    let block_lists = device.view(rows, 66).split(2);
    let head_rows = HeadRows { stride: HIDDEN, first: 64, count: 64 };
    let noaux = Router {
        scoring: Scoring::Sigmoid,
        correction: Some(taps),
        groups: Some(ExpertGroups { count: 4, chosen: 2, score: GroupScore::BestTwo }),
        shared: Some(SharedChoice { gate: Some(one) }),
        ..Router::softmax(true)
    };
    let (heads, ab) = (|view: View| view.split(4), device.view(rows, 8));
    let (all_rows, places): (Vec<u32>, _) = ((0..rows as u32).collect(), vec![[3, 5, 7]; rows]);
    let ops = [
        Op::Embed { table, tokens: &tokens, out: x },
        Op::EmbedChosen { table, ids: y.columns(0, 1), out: x },
        Op::RmsNorm { x, weight: Some(taps), per_head: false, eps: 1e-6, out: y },
        Op::LayerNorm { x, weight: taps, bias: Some(taps), eps: 1e-6, out: y },
        Op::MatMul {
            x: y,
            weight: square,
            bias: Some(taps),
            exact: false,
            answers: y.few(),
            out: z,
        },
        Op::MatMul { x: gate, weight: wide, bias: None, exact: false, answers: gate.few(), out: y },
        Op::Rope {
            x: heads(z),
            frequencies: &[0.1; 8],
            pairs: RopePairs::Halves,
            scale: 1.0,
            positions: RopePositions::Spans(&kv_spans),
            out: heads(z),
        },
        Op::Rope {
            x: heads(z),
            frequencies: &[0.1; 8],
            pairs: RopePairs::Halves,
            scale: 1.0,
            positions: RopePositions::Axes { axes: &[0, 1, 2, 0, 1, 2, 0, 1], ids: &places },
            out: heads(z),
        },
        Op::SegmentAttention { q: heads(z), k, v, scale: 0.1, segments: &[rows], out: heads(y) },
        Op::ScatterRows { x: z, rows: &all_rows, add: true, out: y },
        Op::Glu { activation: Activation::Gelu, gate: up, up, out: up },
        Op::Attention {
            q: heads(z),
            k,
            v: Some(v),
            gate: Some(heads(x)),
            scale: 0.1,
            window: None,
            sinks: None,
            positions: None,
            spans: &kv_spans,
            out: heads(y),
        },
        Op::Attention {
            q: heads(z),
            k,
            v: Some(v),
            gate: None,
            scale: 0.1,
            window: Some(100),
            sinks: Some(taps),
            positions: None,
            spans: &ring,
            out: heads(y),
        },
        Op::TopBlocks {
            q: z.split(2),
            k: flat,
            block: 1,
            local: 1,
            spans: &indexed,
            scores,
            out: block_lists,
        },
        Op::TopPositions {
            queries: Some(IndexQueries { q: z.split(2), weights: ab.columns(0, 2), scores }),
            k: Some(flat),
            ratio: 1,
            list: IndexList::Positions,
            spans: &indexed,
            out: listed,
        },
        Op::Append { k: flat, v: None, spans: &indexed },
        Op::Attention {
            q: z.split(2),
            k: flat,
            v: None,
            gate: None,
            scale: 0.1,
            window: None,
            sinks: None,
            positions: Some(listed),
            spans: &latent,
            out: gate.columns(0, 256).split(2),
        },
        Op::HeadMatMul {
            x: z.split(1),
            matrix: HeadMatrix { weight: square, head_rows, transposed: false },
            out: y.columns(0, 64),
        },
        Op::HeadMatMul {
            x: y.columns(0, 64),
            matrix: HeadMatrix { weight: square, head_rows, transposed: true },
            out: z.split(1),
        },
        Op::LatentAttention {
            q: gate.columns(0, HIDDEN + 64),
            k: flat,
            keys: HeadMatrix { weight: square, head_rows, transposed: true },
            values: HeadMatrix { weight: small, head_rows, transposed: false },
            scale: 0.1,
            spans: &latent,
            out: y.columns(0, 64),
        },
        Op::Conv1d {
            x,
            weight: taps,
            bias: None,
            width: 4,
            dilation: 1,
            silu: true,
            spans: &conv_spans,
            out: y,
        },
        Op::Compress {
            x,
            gate: Some(z),
            ape: None,
            ratio: 2,
            overlap: false,
            spans: &pooled_spans,
            out: y.slice(0, rows / 2),
        },
        Op::DeltaNet {
            q: k,
            k: v,
            v: heads(x),
            a: heads(ab.columns(0, 4)),
            b: ab.columns(4, 4),
            a_log: taps,
            dt_bias: taps,
            decay: LogDecay::Softplus,
            sharing: KeySharing::Adjacent,
            spans: &delta_spans,
            out: heads(y),
        },
        Op::DeltaNet {
            q: k,
            k: v,
            v: heads(x),
            a: heads(z),
            b: ab.columns(4, 4),
            a_log: taps,
            dt_bias: taps,
            decay: LogDecay::Bounded { bound: -5.0 },
            sharing: KeySharing::Adjacent,
            spans: &delta_spans,
            out: heads(y),
        },
        Op::Mamba2 {
            x: heads(x),
            b: k,
            c: v,
            dt: ab.columns(0, 4),
            a_log: taps,
            d: taps,
            dt_bias: taps,
            limits: StepLimits::default(),
            spans: &delta_spans,
            out: heads(y),
        },
        Op::GatedRmsNorm {
            x: heads(y),
            gate: heads(z),
            function: NormGate::Sigmoid,
            weight: taps,
            eps: 1e-6,
            out: heads(y),
        },
        Op::Add { x, y },
        Op::MatMul { x: y, weight: router, bias: None, exact: true, answers: y.few(), out: logits },
        Op::TopK { logits, router: Router::softmax(true), ids, weights: shares },
        Op::TopK { logits, router: noaux, ids, weights: shares },
        Op::Glu { activation: Activation::GeGlu, gate, up, out: up },
        Op::HeadGate { x, gate: one, function: GateFunction::Softplus },
        Op::KeyedGate { q: x.split(1), k: z.split(1), v: z, scale: 0.1, out: y.split(1) },
        Op::Scale { x, factor: 2.0 },
        Op::SoftCap { x, cap: 30.0 },
        Op::GatherColumns { x, orders: y, ids: None, out: z },
        Op::Experts {
            x,
            shape: &shape,
            activation: Activation::SwiGlu,
            experts: 4,
            answers: x.few(),
            uses: ExpertUses::Listed(&uses),
            inner,
            out: parts,
        },
        Op::Combine {
            parts,
            weights: shares,
            shared: Some(Shared { out: y, gate: Some(one) }),
            add: true,
            out: x,
        },
    ];
    for op in &ops {
        let held = device.0.states_held();
        let mut before = ALLOCATIONS.load(SeqCst);
        device.0.run(op).unwrap();
        if device.0.states_held() > held {
            // The first run took pages, or a second buffer of a recurrent state, for later steps.
            before = ALLOCATIONS.load(SeqCst);
            device.0.run(op).unwrap();
        }
        assert_eq!(ALLOCATIONS.load(SeqCst) - before, 0, "{} on {rows} rows", op.name());
    }
    let before = ALLOCATIONS.load(SeqCst);
    device.0.commit(&[Commit::all(delta_spans[0])]).unwrap();
    let ticket = device.0.submit().unwrap();
    assert!(device.0.done(ticket).unwrap());
    device.0.read(one, &mut [0.0; 5][..rows]).unwrap();
    assert_eq!(ALLOCATIONS.load(SeqCst) - before, 0);
}

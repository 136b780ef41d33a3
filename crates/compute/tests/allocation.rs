//! After its scratch is reserved, the CPU device allocates nothing per op. Alone in its program, because it counts
//! the allocations of all threads but the first, on which the harness keeps its lists meanwhile.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    alloc::{GlobalAlloc, Layout, System},
    hint::black_box,
    ptr,
    sync::atomic::{AtomicPtr, AtomicUsize, Ordering::SeqCst},
    thread,
};

use moeflux_compute::{
    Activation, BankPlace, Buffer, Bytes, Device, DeviceOptions, ExpertGroups, ExpertShape,
    ExpertUse, ExpertUses, Format, HeadMatrix, HeadRows, MatrixShape, Op, RopePairs, Router,
    Scalar, Scoring, ScratchShape, Shared, SharedChoice, Slot, Span, StateShape, View, open,
};

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);
/// What the program's first thread, the first to allocate, calls [`HERE`].
static FIRST: AtomicPtr<u8> = AtomicPtr::new(ptr::null_mut());

thread_local! {
    /// Every thread has its own, so its place tells them apart.
    static HERE: u8 = const { 0 };
}

// SAFETY: the system's allocator does the work.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let here = HERE.with(|here| ptr::from_ref(here).cast_mut());
        match FIRST.compare_exchange(ptr::null_mut(), here, SeqCst, SeqCst) {
            Err(first) if first != here => _ = ALLOCATIONS.fetch_add(1, SeqCst),
            _ => {}
        }
        // SAFETY: the caller's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

const HIDDEN: usize = 256;
const INNER: usize = 512;
const EXPERTS: usize = 8;
const K: usize = 4;
const FOUR: Format = Format::Affine { bits: 4, group: 64, scale: Scalar::BF16 };

/// Makes zeroed things.
struct Maker(Box<dyn Device>);

impl Maker {
    fn buffer(&mut self, len: usize) -> Buffer {
        self.0.buffer(len).unwrap()
    }

    fn view(&mut self, rows: usize, width: usize) -> View {
        View::rows(self.buffer(rows * width), rows, width)
    }
}

#[test]
fn a_step_allocates_nothing() {
    // A thread of its own: the harness may call tests on the first one.
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

/// All ops there are, on `rows` rows.
fn step(exact: bool, rows: usize) {
    let options = DeviceOptions {
        name: Some("cpu".into()),
        threads: Some(2),
        exact,
        kv_format: None,
        isa: None,
    };
    let mut make = Maker(open(&options).unwrap());
    let scratch = ScratchShape { rows, cols: INNER, latent_head: 2 * HIDDEN + 64, wide_kv: 0 };
    assert!(make.0.scratch_bytes(scratch).unwrap() > 0);
    make.0.reserve_scratch(scratch).unwrap();
    let matrix = |rows, cols, format| MatrixShape { rows, cols, format };
    let mut weight = |shape: MatrixShape| {
        let bytes = Bytes::zeroed(shape.plane_bytes().unwrap().total()).unwrap();
        make.0.weight(shape, bytes).unwrap()
    };
    let (table, square) = (weight(matrix(100, HIDDEN, FOUR)), weight(matrix(HIDDEN, HIDDEN, FOUR)));
    let small = weight(matrix(HIDDEN, 64, FOUR));
    let (wide, router) = (
        weight(matrix(HIDDEN, INNER, Format::Plain(Scalar::BF16))),
        weight(matrix(EXPERTS, HIDDEN, Format::Affine { bits: 8, group: 64, scale: Scalar::BF16 })),
    );
    let wide_shape = matrix(INNER, HIDDEN, FOUR);
    let shape = ExpertShape {
        output_bias: Some(Scalar::BF16),
        ..ExpertShape::new(wide_shape, wide_shape, matrix(HIDDEN, INNER, FOUR))
    };
    let bank = make.0.bank(EXPERTS, shape.bytes().unwrap(), BankPlace::Host).unwrap();
    let uses: Vec<ExpertUse> = (0..rows * K)
        .map(|part| ExpertUse {
            slot: Slot { bank, index: (part % EXPERTS) as u32 },
            row: part / K,
            out_row: part,
        })
        .collect();
    let mut kv = |kv_heads, key_width, value_width, positions| {
        make.0.state(StateShape::KeyValue { kv_heads, key_width, value_width, positions }).unwrap()
    };
    let at = |state| [Span { state, position: 290, rows }];
    let attended = at(kv(2, 64, 64, 300));
    let (ring, latent, indexed) =
        (at(kv(2, 64, 64, 256)), at(kv(1, 128, 0, 300)), at(kv(1, 128, 0, 300)));
    let mut recurrent = |len| make.0.state(StateShape::Recurrent { len }).unwrap();
    let (conv, delta) = (recurrent(3 * HIDDEN), recurrent(4 * 64 * 64));
    let convolved = [Span { state: conv, position: 0, rows }];
    let ruled = [Span { state: delta, position: 0, rows }];
    let (x, y, z) = (make.view(rows, HIDDEN), make.view(rows, HIDDEN), make.view(rows, HIDDEN));
    let (k, v) = (make.view(rows, 128).split(2), make.view(rows, 128).split(2));
    let (gate, up) = (make.view(rows, INNER), make.view(rows, INNER));
    let (logits, ids, shares) = (make.view(rows, EXPERTS), make.view(rows, K), make.view(rows, K));
    let (inner, parts) = (make.view(rows * K, INNER), make.view(rows * K, HIDDEN));
    let (one, taps) = (make.view(rows, 1), make.buffer(4 * HIDDEN));
    let tokens = vec![7; rows];
    let (flat, scores, named) = (make.view(rows, 128), make.view(2, 300), make.view(rows, 33));
    let of_head = HeadRows { stride: HIDDEN, first: 64, count: 64 };
    let noaux = Router {
        scoring: Scoring::Sigmoid,
        correction: Some(taps),
        groups: Some(ExpertGroups { count: 4, chosen: 2 }),
        shared: Some(SharedChoice { gate: Some(one) }),
        ..Router::softmax(true)
    };
    let (heads, ab) = (|view: View| view.split(4), make.view(rows, 8));
    let ops = [
        Op::Embed { table, tokens: &tokens, out: x },
        Op::RmsNorm { x, weight: Some(taps), eps: 1e-6, out: y },
        Op::LayerNorm { x, weight: taps, bias: taps, eps: 1e-6, out: y },
        Op::MatMul { x: y, weight: square, bias: Some(taps), exact: false, out: z },
        Op::MatMul { x: gate, weight: wide, bias: None, exact: false, out: y },
        Op::Rope {
            x: heads(z),
            frequencies: &[0.1; 8],
            pairs: RopePairs::Halves,
            scale: 1.0,
            spans: &attended,
            out: heads(z),
        },
        Op::Attention {
            q: heads(z),
            k,
            v: Some(v),
            gate: Some(heads(x)),
            scale: 0.1,
            window: None,
            sinks: None,
            positions: None,
            spans: &attended,
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
        Op::TopPositions {
            q: z.split(2),
            k: flat,
            weights: ab.columns(0, 2),
            spans: &indexed,
            scores,
            out: named,
        },
        Op::Attention {
            q: z.split(2),
            k: flat,
            v: None,
            gate: None,
            scale: 0.1,
            window: None,
            sinks: None,
            positions: Some(named),
            spans: &latent,
            out: gate.columns(0, 256).split(2),
        },
        Op::HeadMatMul {
            x: z.split(1),
            matrix: HeadMatrix { weight: square, head_rows: of_head, transposed: false },
            out: y.columns(0, 64),
        },
        Op::HeadMatMul {
            x: y.columns(0, 64),
            matrix: HeadMatrix { weight: square, head_rows: of_head, transposed: true },
            out: z.split(1),
        },
        Op::LatentAttention {
            q: gate.columns(0, HIDDEN + 64),
            k: flat,
            keys: HeadMatrix { weight: square, head_rows: of_head, transposed: true },
            values: HeadMatrix { weight: small, head_rows: of_head, transposed: false },
            scale: 0.1,
            spans: &latent,
            out: y.columns(0, 64),
        },
        Op::Conv1d { x, weight: taps, width: 4, spans: &convolved, out: y },
        Op::DeltaNet {
            q: k,
            k: v,
            v: heads(x),
            a: ab.columns(0, 4),
            b: ab.columns(4, 4),
            a_log: taps,
            dt_bias: taps,
            spans: &ruled,
            out: heads(y),
        },
        Op::GatedRmsNorm { x: heads(y), gate: heads(z), weight: taps, eps: 1e-6, out: heads(y) },
        Op::Add { x, y },
        Op::MatMul { x: y, weight: router, bias: None, exact: true, out: logits },
        Op::TopK { logits, router: Router::softmax(true), ids, weights: shares },
        Op::TopK { logits, router: noaux, ids, weights: shares },
        Op::Glu { activation: Activation::GeGlu, gate, up, out: up },
        Op::Scale { x, factor: 2.0 },
        Op::SoftCap { x, cap: 30.0 },
        Op::Experts {
            x,
            shape: &shape,
            activation: Activation::SwiGlu,
            experts: 4,
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
        let held = make.0.states_held();
        let mut before = ALLOCATIONS.load(SeqCst);
        make.0.run(op).unwrap();
        if make.0.states_held() > held {
            // It has taken pages, or room for the next numbers, for steps to come.
            before = ALLOCATIONS.load(SeqCst);
            make.0.run(op).unwrap();
        }
        assert_eq!(ALLOCATIONS.load(SeqCst) - before, 0, "{} on {rows} rows", op.name());
    }
    let before = ALLOCATIONS.load(SeqCst);
    make.0.commit(&[delta]).unwrap();
    let ticket = make.0.submit().unwrap();
    assert!(make.0.done(ticket).unwrap());
    make.0.read(one, &mut [0.0; 5][..rows]).unwrap();
    assert_eq!(ALLOCATIONS.load(SeqCst) - before, 0);
}

//! After its scratch is reserved, the CPU device allocates nothing per op. Alone in its program, because it counts
//! the allocations of all threads.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::atomic::{AtomicUsize, Ordering::SeqCst},
};

use moeflux_compute::{
    Buffer, Bytes, Device, DeviceOptions, ExpertShape, ExpertUse, Format, MatrixShape, Op, RopePairs, Scalar,
    Shared, Slot, Span, StateShape, View, open,
};

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: the system's allocator does the work.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, SeqCst);
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
    for (exact, rows) in [(true, 1), (false, 1), (false, 5)] {
        step(exact, rows);
    }
}

/// All ops there are, on `rows` rows.
fn step(exact: bool, rows: usize) {
    let options = DeviceOptions { name: Some("cpu".into()), threads: Some(2), exact, isa: None };
    let mut make = Maker(open(&options).unwrap());
    assert!(make.0.scratch_bytes(rows, INNER).unwrap() > 0);
    make.0.reserve_scratch(rows, INNER).unwrap();
    let matrix = |rows, cols, format| MatrixShape { rows, cols, format };
    let mut weight = |shape: MatrixShape| {
        let bytes = Bytes::zeroed(shape.parts().unwrap().total()).unwrap();
        make.0.weight(shape, bytes).unwrap()
    };
    let (table, square) = (weight(matrix(100, HIDDEN, FOUR)), weight(matrix(HIDDEN, HIDDEN, FOUR)));
    let (wide, router) = (
        weight(matrix(HIDDEN, INNER, Format::Plain(Scalar::BF16))),
        weight(matrix(EXPERTS, HIDDEN, Format::Affine { bits: 8, group: 64, scale: Scalar::BF16 })),
    );
    let shape = ExpertShape {
        gate: matrix(INNER, HIDDEN, FOUR),
        up: matrix(INNER, HIDDEN, FOUR),
        down: matrix(HIDDEN, INNER, FOUR),
    };
    let bank = make.0.bank(EXPERTS, shape.bytes().unwrap()).unwrap();
    let uses: Vec<ExpertUse> = (0..rows * K)
        .map(|part| ExpertUse { slot: Slot { bank, index: (part % EXPERTS) as u32 }, row: part / K, part })
        .collect();
    let mut kv = || {
        let shape = StateShape::KeyValue { kv_heads: 2, key_width: 64, value_width: 64, positions: 300 };
        make.0.state(shape).unwrap()
    };
    let attended = [Span { state: kv(), position: 290, rows }];
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
    let (heads, ab) = (|view: View| view.split(4), make.view(rows, 8));
    let ops = [
        Op::Embed { table, tokens: &tokens, out: x },
        Op::RmsNorm { x, weight: taps, eps: 1e-6, out: y },
        Op::MatMul { x: y, weight: square, bias: Some(taps), exact: false, out: z },
        Op::MatMul { x: gate, weight: wide, bias: None, exact: false, out: y },
        Op::Rope {
            x: heads(z),
            frequencies: &[0.1; 8],
            pairs: RopePairs::Halves,
            scale: 1.0,
            spans: &attended,
        },
        Op::Attention {
            q: heads(z),
            k,
            v,
            gate: Some(heads(x)),
            scale: 0.1,
            spans: &attended,
            out: heads(y),
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
        Op::TopK { logits, normalize: true, ids, weights: shares },
        Op::SwiGlu { gate, up, out: up },
        Op::Experts { x, shape: &shape, uses: &uses, inner, out: parts },
        Op::Combine { x, parts, weights: shares, shared: Some(Shared { out: y, gate: Some(one) }) },
    ];
    for op in &ops {
        let before = ALLOCATIONS.load(SeqCst);
        make.0.run(op).unwrap();
        assert_eq!(ALLOCATIONS.load(SeqCst) - before, 0, "{} on {rows} rows", op.name());
    }
    let before = ALLOCATIONS.load(SeqCst);
    make.0.commit(delta).unwrap();
    let ticket = make.0.submit().unwrap();
    assert!(make.0.done(ticket).unwrap());
    make.0.read(one, &mut [0.0; 5][..rows]).unwrap();
    assert_eq!(ALLOCATIONS.load(SeqCst) - before, 0);
}

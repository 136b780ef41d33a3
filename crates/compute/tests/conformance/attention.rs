//! Attention and Rope.

use moeflux_compute::{Isa, Op, RopePairs, Span, State, StateShape, View};

use crate::harness::{Both, Random, bits, device, read};

/// Heads, heads of keys and values, widths.
const SHAPES: [(usize, usize, usize, usize); 5] =
    [(1, 1, 1, 1), (4, 4, 16, 16), (6, 2, 33, 17), (8, 1, 64, 128), (5, 1, 256, 256)];

struct Case {
    q: View,
    k: View,
    v: View,
    gate: Option<View>,
    out: View,
}

impl Case {
    /// Rows whose queries and gates lie interleaved per head, as the Qwen3.5 projection leaves them.
    fn new(
        both: &mut Both,
        random: &mut Random,
        rows: usize,
        shape: (usize, usize, usize, usize),
        gated: bool,
    ) -> Self {
        let (heads, kv_heads, key, value) = shape;
        let gated = gated && key == value;
        let both_widths = if gated { 2 * key } else { key };
        let qg = both.random(random, rows, heads * both_widths);
        let q = View { heads, width: key, head_stride: both_widths, ..qg };
        Self {
            q,
            k: both.halves(random, rows, kv_heads * key).split(kv_heads),
            v: both.halves(random, rows, kv_heads * value).split(kv_heads),
            gate: gated.then_some(View { offset: key, ..q }),
            out: both.poisoned(rows, heads * value).split(heads),
        }
    }

    fn run(&self, both: &mut Both, first: usize, spans: &[Span]) {
        let rows = spans.iter().map(|s| s.rows).sum();
        let part = |view: View| view.slice(first, rows);
        both.run(&Op::Attention {
            q: part(self.q),
            k: part(self.k),
            v: Some(part(self.v)),
            gate: self.gate.map(part),
            scale: 3.0 / (self.q.width as f32).sqrt(),
            window: None,
            sinks: None,
            positions: None,
            spans,
            out: part(self.out),
        });
    }
}

fn state(
    both: &mut Both,
    (_, kv_heads, key_width, value_width): (usize, usize, usize, usize),
    n: usize,
) -> State {
    both.state(StateShape::KeyValue { kv_heads, key_width, value_width, positions: n })
}

#[test]
fn prefill_at_once() {
    let mut random = Random::new(11);
    Both::each(|both, _| {
        for shape in SHAPES {
            for (rows, gated) in [(1, false), (3, true), (11, true)] {
                let case = Case::new(both, &mut random, rows, shape, gated);
                let state = state(both, shape, rows);
                case.run(both, 0, &[Span { state, position: 0, rows }]);
                both.agree(&format!("{shape:?}, {rows} rows"), case.out, 1e-5);
            }
        }
    });
}

#[test]
fn beyond_a_block_of_positions() {
    let mut random = Random::new(12);
    Both::each_exact(|both| {
        let shape = (4, 2, 24, 20);
        let state = state(both, shape, 600);
        let case = Case::new(both, &mut random, 600, shape, false);
        case.run(both, 0, &[Span { state, position: 0, rows: 600 }]);
        both.agree("600 rows", case.out, 1e-5);
        // Rows on both sides of where blocks begin, alone and together: the same bits.
        let together = bits(&both.read(case.out));
        for (first, rows) in [(254, 1), (255, 1), (256, 1), (255, 3), (509, 7)] {
            case.run(both, first, &[Span { state, position: first, rows }]);
        }
        assert!(bits(&both.read(case.out)) == together);
    });
}

#[test]
fn many_rows_of_widths_that_are_whole_matrices() {
    let mut random = Random::new(16);
    Both::each(|both, _| {
        for (shape, gated) in
            [((8, 1, 128, 128), true), ((4, 2, 48, 64), false), ((3, 1, 64, 16), false)]
        {
            let case = Case::new(both, &mut random, 90, shape, gated);
            let state = state(both, shape, 90);
            case.run(both, 0, &[Span { state, position: 0, rows: 40 }]);
            case.run(both, 40, &[Span { state, position: 40, rows: 50 }]);
            both.agree(&format!("{shape:?}"), case.out, both.of_attention(50));
        }
    });
}

#[test]
fn decode_after_prefill_is_prefill() {
    let mut random = Random::new(13);
    Both::each(|both, _| {
        let shape = (6, 3, 32, 32);
        let case = Case::new(both, &mut random, 9, shape, true);
        let (one, other) = (state(both, shape, 9), state(both, shape, 12));
        case.run(both, 0, &[Span { state: one, position: 0, rows: 9 }]);
        let at_once = bits(&both.read(case.out));
        case.run(both, 0, &[Span { state: other, position: 0, rows: 4 }]);
        for row in 4..9 {
            case.run(both, row, &[Span { state: other, position: row, rows: 1 }]);
        }
        both.agree("step by step", case.out, 1e-5);
        assert!(bits(&both.read(case.out)) == at_once);
    });
}

#[test]
fn several_sessions_in_one_op() {
    let mut random = Random::new(14);
    Both::each(|both, _| {
        let shape = (4, 2, 16, 16);
        let case = Case::new(both, &mut random, 8, shape, false);
        let (one, other) = (state(both, shape, 8), state(both, shape, 8));
        case.run(
            both,
            0,
            &[
                Span { state: one, position: 0, rows: 2 },
                Span { state: other, position: 0, rows: 3 },
            ],
        );
        let spans = [
            Span { state: other, position: 3, rows: 1 },
            Span { state: other, position: 4, rows: 0 },
            Span { state: one, position: 1, rows: 2 },
        ];
        case.run(both, 5, &spans[..1]);
        // As many spans as rows, of which one has none.
        case.run(both, 6, &spans[1..]);
        both.agree("two sessions", case.out, 1e-5);
    });
}

#[test]
fn sessions_that_decode_together_do_as_they_would_alone() {
    let mut random = Random::new(17);
    Both::each(|both, _| {
        let shape = (8, 2, 32, 32);
        // Few short ones, many of all lengths, and one that is much longer than the others.
        for lens in [&[3, 3][..], &[1, 2, 40, 255, 256, 300, 120, 64, 33], &[5, 7, 900]] {
            let (before, n) = (lens.iter().sum::<usize>(), lens.len());
            let case = Case::new(both, &mut random, before + n, shape, true);
            let mut first = 0;
            let mut spans = Vec::new();
            for &len in lens {
                let state = state(both, shape, len + 1);
                case.run(both, first, &[Span { state, position: 0, rows: len }]);
                spans.push(Span { state, position: len, rows: 1 });
                first += len;
            }
            case.run(both, before, &spans);
            both.agree(&format!("after {lens:?}"), case.out.slice(before, n), 1e-5);
            let together = bits(&both.read(case.out));
            for (i, span) in spans.iter().enumerate() {
                case.run(both, before + i, &[*span]);
            }
            assert!(bits(&both.read(case.out)) == together, "{}: {lens:?}", both.device.describe());
        }
    });
}

#[test]
fn large_scores_do_not_overflow() {
    let mut random = Random::new(15);
    Both::each(|both, _| {
        let shape = (2, 1, 16, 16);
        let state = state(both, shape, 300);
        let case = Case::new(both, &mut random, 300, shape, false);
        // Numbers that f16 holds.
        let large = |x: &f32| half::f16::from_f32(x * 300.0).to_f32();
        let numbers: Vec<f32> = random.numbers(300 * 32).iter().map(large).collect();
        both.reference.write(case.q.buffer, &numbers).unwrap();
        both.device.write(case.q.buffer, &numbers).unwrap();
        case.run(both, 0, &[Span { state, position: 0, rows: 300 }]);
        // A score of some thousand has an error of its own last bits, which the softmax passes on.
        both.agree("large scores", case.out, both.of_attention(300).max(1e-3));
    });
}

#[test]
fn threads_change_no_bit() {
    let mut random = Random::new(16);
    let numbers = random.numbers(40 * 8 * 24);
    let outs: Vec<Vec<u32>> = (1..4)
        .map(|threads| {
            let mut device = device(Isa::detect(), false, threads);
            let mut view = |heads: usize| {
                let buffer = device.buffer(40 * heads * 24).unwrap();
                device.write(buffer, &numbers[..40 * heads * 24]).unwrap();
                View::rows(buffer, 40, heads * 24).split(heads)
            };
            let (q, k, v, out) = (view(8), view(2), view(2), view(8));
            let shape =
                StateShape::KeyValue { kv_heads: 2, key_width: 24, value_width: 24, positions: 40 };
            let state = device.state(shape).unwrap();
            let spans = [Span { state, position: 0, rows: 40 }];
            let op = Op::Attention {
                q,
                k,
                v: Some(v),
                gate: None,
                scale: 0.3,
                window: None,
                sinks: None,
                positions: None,
                spans: &spans,
                out,
            };
            device.run(&op).unwrap();
            bits(&read(&mut *device, out))
        })
        .collect();
    assert!(outs.windows(2).all(|pair| pair[0] == pair[1]));
}

#[test]
fn states_are_half_as_large_off_the_exact_path() {
    let bytes = |exact, shape| device(Isa::detect(), exact, 1).state_bytes(shape);
    // Pages of so many bytes take no more than these.
    let kv = StateShape::KeyValue { kv_heads: 2, key_width: 24, value_width: 8, positions: 512 };
    assert_eq!([true, false].map(|exact| bytes(exact, kv)), [2 * 32 * 512 * 4, 2 * 32 * 512 * 2]);
    let recurrent = StateShape::Recurrent { len: 2048 };
    assert_eq!([true, false].map(|exact| bytes(exact, recurrent)), [2 * 2048 * 4; 2]);
}

#[test]
fn rope_at_any_position() {
    let mut random = Random::new(17);
    Both::each(|both, _| {
        let state = both.state(StateShape::Recurrent { len: 0 });
        for (width, rotated) in [(2, 2), (16, 16), (80, 20), (300, 260), (7, 0)] {
            let frequencies: Vec<f32> =
                (0..rotated / 2).map(|i| 1e6f32.powf(-2.0 * i as f32 / rotated as f32)).collect();
            for pairs in [RopePairs::Halves, RopePairs::Interleaved] {
                let all = both.random(&mut random, 5, 3 * (width + 3) + 1);
                let x = View { offset: 1, heads: 3, width, head_stride: width + 3, ..all };
                let spans = [
                    Span { state, position: 1_000_003, rows: 2 },
                    Span {
                        state: both.state(StateShape::Recurrent { len: 0 }),
                        position: 0,
                        rows: 3,
                    },
                ];
                let (frequencies, spans) = (&*frequencies, &spans);
                let out = View { heads: 3, ..both.poisoned(5, 4 * width).split(4) };
                both.run(&Op::Rope { x, frequencies, pairs, scale: 1.2, spans, out });
                both.agree(&format!("{width}, {rotated}, {pairs:?}"), out, 1e-5);
                both.run(&Op::Rope { x, frequencies, pairs, scale: 1.2, spans, out: x });
                both.agree(&format!("{width}, {rotated}, {pairs:?}, in place"), all, 1e-5);
            }
        }
    });
}

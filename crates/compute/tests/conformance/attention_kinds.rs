//! Attention with windows, sinks and named positions, and latent attention.

use moeflux_compute::{Buffer, Isa, KV_BLOCK, Op, Span, State, StateShape, View};

use crate::harness::{Both, Random, bits, device};

/// Heads, heads of keys, key width, value width; no value width of their own where values are in the keys.
#[derive(Clone, Copy, Debug)]
struct Shape {
    heads: usize,
    kv_heads: usize,
    key: usize,
    value: usize,
    latent: bool,
}

const fn grouped(heads: usize, kv_heads: usize, key: usize, value: usize) -> Shape {
    Shape { heads, kv_heads, key, value, latent: false }
}

const fn latent(heads: usize, key: usize, value: usize) -> Shape {
    Shape { heads, kv_heads: 1, key, value, latent: true }
}

#[derive(Clone, Copy)]
struct Case {
    shape: Shape,
    q: View,
    k: View,
    v: Option<View>,
    gate: Option<View>,
    window: Option<usize>,
    sinks: Option<Buffer>,
    positions: Option<View>,
    out: View,
}

impl Case {
    fn new(both: &mut Both, random: &mut Random, rows: usize, shape: Shape) -> Self {
        let Shape { heads, kv_heads, key, value, latent } = shape;
        Self {
            shape,
            q: both.random(random, rows, heads * key).split(heads),
            k: both.halves(random, rows, kv_heads * key).split(kv_heads),
            v: (!latent).then(|| both.halves(random, rows, kv_heads * value).split(kv_heads)),
            gate: None,
            window: None,
            sinks: None,
            positions: None,
            out: both.poisoned(rows, heads * value).split(heads),
        }
    }

    fn with_sinks(self, both: &mut Both, random: &mut Random) -> Self {
        let sinks: Vec<f32> = random.numbers(self.shape.heads).iter().map(|x| x * 4.0).collect();
        Self { sinks: Some(both.numbers(&sinks)), ..self }
    }

    fn state(&self, both: &mut Both, positions: usize) -> State {
        let Shape { kv_heads, key, value, latent, .. } = self.shape;
        let value_width = if latent { 0 } else { value };
        both.state(StateShape::KeyValue { kv_heads, key_width: key, value_width, positions })
    }

    fn run(&self, both: &mut Both, first: usize, spans: &[Span]) {
        let rows = spans.iter().map(|s| s.rows).sum();
        let part = |view: View| view.slice(first, rows);
        both.run(&Op::Attention {
            q: part(self.q),
            k: part(self.k),
            v: self.v.map(part),
            gate: self.gate.map(part),
            scale: 3.0 / (self.q.width as f32).sqrt(),
            window: self.window,
            sinks: self.sinks,
            positions: self.positions.map(part),
            spans,
            out: part(self.out),
        });
    }

    /// Runs all rows in chunks of given sizes, which are repeated, from a position on, and returns the output's bits.
    fn in_chunks(&self, both: &mut Both, state: State, from: usize, chunks: &[usize]) -> Vec<u32> {
        let mut first = 0;
        for rows in chunks.iter().cycle() {
            let rows = *rows.min(&(self.q.rows - first));
            if rows == 0 {
                break;
            }
            self.run(both, first, &[Span { state, position: from + first, rows }]);
            first += rows;
        }
        let tolerance =
            both.of_attention(chunks.iter().copied().max().unwrap_or(0).min(self.q.rows));
        both.agree(&format!("{:?}, chunks of {chunks:?}", self.shape), self.out, tolerance);
        bits(&both.read(self.out))
    }
}

#[test]
fn latent_attention_of_any_number_of_heads() {
    let mut random = Random::new(71);
    Both::each(|both, _| {
        for shape in [
            latent(1, 1, 1),
            latent(3, 20, 20),
            latent(5, 72, 64),
            latent(16, 40, 33),
            latent(128, 48, 32),
        ] {
            let case = Case::new(both, &mut random, 9, shape);
            let (one, other) = (case.state(both, 9), case.state(both, 300));
            let at_once = case.in_chunks(both, one, 0, &[9]);
            assert!(case.in_chunks(both, other, 0, &[4, 1]) == at_once, "{shape:?}");
        }
        let published = Case::new(both, &mut random, 2, latent(128, 576, 512));
        let state = published.state(both, 2);
        published.in_chunks(both, state, 0, &[2]);
    });
}

#[test]
fn sinks_take_weight() {
    let mut random = Random::new(72);
    Both::each(|both, _| {
        for shape in [grouped(8, 2, 16, 24), grouped(3, 3, 33, 17), latent(6, 24, 16)] {
            let case = Case::new(both, &mut random, 11, shape).with_sinks(both, &mut random);
            let gate =
                Some(both.random(&mut random, 11, shape.heads * shape.value).split(shape.heads));
            let case = Case { gate, ..case };
            let (one, other) = (case.state(both, 11), case.state(both, 11));
            let at_once = case.in_chunks(both, one, 0, &[11]);
            assert!(case.in_chunks(both, other, 0, &[1, 3]) == at_once, "{shape:?}");
        }
        // A sink far above all scores takes all weight; one of minus infinity none.
        let case = Case::new(both, &mut random, 3, grouped(2, 1, 8, 8));
        let case = Case { sinks: Some(both.numbers(&[500.0, f32::NEG_INFINITY])), ..case };
        let state = case.state(both, 3);
        case.in_chunks(both, state, 0, &[3]);
        assert!(both.read(case.out.head(0)).iter().all(|x| x.abs() < 1e-30));
        let with = both.read(case.out.head(1));
        let case = Case { sinks: None, ..case };
        case.in_chunks(both, state, 0, &[3]);
        assert!(both.read(case.out.head(1)) == with);
    });
}

#[test]
fn windows_of_any_length() {
    let mut random = Random::new(73);
    Both::each(|both, _| {
        for (shape, window) in [
            (grouped(4, 2, 16, 16), 1),
            (grouped(4, 2, 16, 16), 4),
            (grouped(2, 1, 33, 17), 7),
            (grouped(2, 2, 16, 16), 19),
            (latent(5, 24, 16), 6),
            (grouped(2, 2, 16, 16), usize::MAX),
        ] {
            let case = Case::new(both, &mut random, 19, shape);
            let case = Case { window: Some(window), ..case }.with_sinks(both, &mut random);
            let (one, other) = (case.state(both, 19), case.state(both, 19));
            let at_once = case.in_chunks(both, one, 0, &[19]);
            let apart = case.in_chunks(both, other, 0, &[5, 1, 2]);
            assert!(apart == at_once || both.fast_gpu(), "{shape:?}, {window}");
        }
    });
}

#[test]
fn a_ring_that_wraps_around_several_times() {
    let mut random = Random::new(74);
    Both::each_exact(|both| {
        for (window, ring, chunks) in [
            // Exactly the window and the rows of a step.
            (KV_BLOCK - 7, KV_BLOCK, &[7][..]),
            (KV_BLOCK - 5, KV_BLOCK, &[5, 1, 3]),
            (40, KV_BLOCK, &[216, 1, 100]),
            (KV_BLOCK + 100, 2 * KV_BLOCK, &[156, 1]),
            (1, KV_BLOCK, &[255, 1]),
        ] {
            let case = Case::new(both, &mut random, 700, grouped(2, 1, 8, 5));
            let case = Case { window: Some(window), ..case };
            let (all, wraps) = (case.state(both, 700), case.state(both, ring));
            let at_once = case.in_chunks(both, all, 0, &[700]);
            let got = case.in_chunks(both, wraps, 0, chunks);
            assert!(got == at_once, "window {window}, ring of {ring}, {chunks:?}");
        }
        // Far into a session, beyond a window that was filled before.
        let case = Case::new(both, &mut random, 300, grouped(2, 1, 8, 5));
        let case = Case { window: Some(50), ..case };
        let state = case.state(both, KV_BLOCK);
        let first = case.in_chunks(both, state, 0, &[100]);
        assert!(first.len() == 300 * 10);
        case.in_chunks(both, state, 1_000_000 * KV_BLOCK + 300, &[100, 6]);
    });
}

/// `n` positions of each row, ascending, then negative ones.
fn named(random: &mut Random, first: usize, rows: usize, n: usize) -> Vec<f32> {
    let mut all = Vec::new();
    for position in first..first + rows {
        let mut of_row: Vec<usize> = (0..=position).collect();
        while of_row.len() > n.min(1 + random.below(n)) {
            of_row.remove(random.below(of_row.len()));
        }
        all.extend((0..n).map(|i| of_row.get(i).map_or(-1.0, |p| *p as f32)));
    }
    all
}

#[test]
fn named_positions() {
    let mut random = Random::new(75);
    Both::each(|both, _| {
        for (shape, n) in [
            (grouped(4, 2, 16, 16), 1),
            (grouped(6, 1, 16, 20), 5),
            (latent(20, 40, 33), 4),
            (latent(3, 24, 16), 40),
        ] {
            let case = Case::new(both, &mut random, 13, shape).with_sinks(both, &mut random);
            let case =
                Case { positions: Some(both.dense(13, &named(&mut random, 0, 13, n))), ..case };
            let (one, other) = (case.state(both, 13), case.state(both, 20));
            let at_once = case.in_chunks(both, one, 0, &[13]);
            assert!(case.in_chunks(both, other, 0, &[1, 4]) == at_once, "{shape:?}, {n}");
        }
    });
}

#[test]
fn more_named_positions_than_a_block() {
    let mut random = Random::new(76);
    Both::each_exact(|both| {
        let case = Case::new(both, &mut random, 600, latent(3, 12, 8));
        let names: Vec<f32> = named(&mut random, 0, 600, 300);
        let case = Case { positions: Some(both.dense(600, &names)), ..case };
        let (one, other) = (case.state(both, 600), case.state(both, 600));
        let at_once = case.in_chunks(both, one, 0, &[600]);
        assert!(case.in_chunks(both, other, 0, &[255, 1, 30]) == at_once);
        // All positions by name are all positions.
        let all: Vec<f32> = (0..600)
            .flat_map(|p| (0..600).map(move |t| if t > p { -1.0 } else { t as f32 }))
            .collect();
        let case = Case { positions: Some(both.dense(600, &all)), ..case };
        let by_name = case.in_chunks(both, one, 0, &[600]);
        let case = Case { positions: None, ..case };
        assert!(case.in_chunks(both, other, 0, &[600]) == by_name);
    });
}

#[test]
fn no_list_of_positions_panics() {
    let mut random = Random::new(77);
    Both::each(|both, _| {
        let case = Case::new(both, &mut random, 5, grouped(2, 1, 8, 8));
        let state = case.state(both, 5);
        let wild = [f32::NAN, -1.0, 1e30, f32::INFINITY, 0.5, 7.0, -0.0, 3.0, -1.0, -1.0];
        let case = Case { positions: Some(both.dense(5, &wild)), ..case };
        case.run(both, 0, &[Span { state, position: 0, rows: 5 }]);
        // A row without positions sees nothing.
        assert!(both.read(case.out.slice(4, 1)).iter().all(|x| *x == 0.0));
    });
}

#[test]
fn neither_threads_nor_sessions_change_a_bit() {
    let mut outs = Vec::new();
    for threads in [1, 2, 3, 7] {
        let mut random = Random::new(78);
        let mut both = Both::new(device(Isa::detect(), false, threads));
        let mut of_kinds = Vec::new();
        for (shape, kind) in [
            (latent(128, 40, 32), 0),
            (latent(12, 40, 32), 2),
            (grouped(8, 2, 16, 16), 1),
            (grouped(5, 5, 16, 16), 0),
        ] {
            let case =
                Case::new(&mut both, &mut random, 12, shape).with_sinks(&mut both, &mut random);
            let case = match kind {
                0 => case,
                1 => Case { window: Some(5), ..case },
                _ => {
                    let mut names = named(&mut random, 0, 7, 4);
                    names.extend(named(&mut random, 0, 5, 4));
                    Case { positions: Some(both.dense(12, &names)), ..case }
                }
            };
            let (one, other) = (case.state(&mut both, 12), case.state(&mut both, 12));
            let spans = [
                Span { state: one, position: 0, rows: 7 },
                Span { state: other, position: 0, rows: 5 },
            ];
            case.run(&mut both, 0, &spans);
            both.agree(&format!("{shape:?}"), case.out, 1e-5);
            let together = bits(&both.read(case.out));
            case.run(&mut both, 7, &[Span { state: one, position: 0, rows: 5 }]);
            assert!(bits(&both.read(case.out)) == together);
            of_kinds.push(together);
        }
        outs.push(of_kinds);
    }
    assert!(outs.windows(2).all(|pair| pair[0] == pair[1]));
}

#[test]
fn long_contexts_in_several_parts() {
    let mut random = Random::new(79);
    Both::each(|both, _| {
        for (shape, window) in [
            (grouped(8, 1, 40, 24), usize::MAX),
            (grouped(3, 3, 33, 17), 290),
            (latent(20, 24, 13), usize::MAX),
        ] {
            let case = Case::new(both, &mut random, 330, shape).with_sinks(both, &mut random);
            let gate =
                Some(both.random(&mut random, 330, shape.heads * shape.value).split(shape.heads));
            let case = Case { gate, ..case };
            let (one, other) = (case.state(both, 330), case.state(both, 512));
            let mut outs = Vec::new();
            for (state, last) in [(one, 3), (other, 3), (other, 1)] {
                // Rows that see themselves alone fill the state in no time.
                let fills = Case { window: Some(1), sinks: None, gate: None, ..case };
                fills.run(both, 0, &[Span { state, position: 0, rows: 327 }]);
                let case = Case { window: Some(window), ..case };
                for first in (327..330).step_by(last) {
                    case.run(both, first, &[Span { state, position: first, rows: last }]);
                }
                both.agree(&format!("{shape:?}"), case.out.slice(327, 3), 1e-5);
                outs.push(bits(&both.read(case.out)));
            }
            // Neither what a state held before nor the rows beside one change a bit.
            assert!(outs.windows(2).all(|pair| pair[0] == pair[1]), "{shape:?}");
        }
    });
}

#[test]
fn values_beyond_f16_end_at_its_largest() {
    let mut random = Random::new(82);
    Both::each(|both, exact| {
        let case = Case::new(both, &mut random, 2, grouped(1, 1, 8, 4));
        let v = both.dense(2, &[1e6, -1e6, 65_519.0, f32::INFINITY].repeat(2)).split(1);
        let case = Case { v: Some(v), ..case };
        let state = case.state(both, 2);
        case.run(both, 0, &[Span { state, position: 0, rows: 2 }]);
        let expected = if exact { [1e6, -1e6, 65_519.0] } else { [65_504.0, -65_504.0, 65_504.0] };
        for row in both.read(case.out).chunks(4) {
            crate::harness::close(&both.device.describe(), &row[..3], &expected, 1e-5);
            assert_eq!(row[3].is_finite(), !exact, "{}", both.device.describe());
        }
    });
}

#[test]
fn many_heads_of_wide_values_over_many_blocks() {
    // So many numbers that there is no room for the parts of all blocks at once, and rows that are tiles enough together.
    let (shape, positions, rows) = (grouped(128, 1, 8, 1024), 4 * KV_BLOCK, 4);
    for exact in [true, false] {
        let outs: Vec<_> = [(1, 1), (2, 1), (5, 1), (3, rows)]
            .into_iter()
            .map(|(threads, together)| {
                let mut random = Random::new(83);
                let mut device = device(Isa::detect(), exact, threads);
                let mut view = |rows: usize, heads: usize, width: usize| {
                    let buffer = device.buffer(rows * heads * width).unwrap();
                    device.write(buffer, &random.numbers(rows * heads * width)).unwrap();
                    View::rows(buffer, rows, heads * width).split(heads)
                };
                let (k, v) = (view(positions, 1, shape.key), view(positions, 1, shape.value));
                let (fill, filled) =
                    (view(positions, 1, shape.key), view(positions, 1, shape.value));
                let (q, out) =
                    (view(rows, shape.heads, shape.key), view(rows, shape.heads, shape.value));
                let state = StateShape::KeyValue {
                    kv_heads: 1,
                    key_width: shape.key,
                    value_width: shape.value,
                    positions,
                };
                let state = device.state(state).unwrap();
                let mut run = |[q, k, v, out]: [View; 4], position, window| {
                    let spans = &[Span { state, position, rows: q.rows }];
                    let (v, gate, scale, sinks, positions) = (Some(v), None, 0.3, None, None);
                    let op = Op::Attention {
                        q,
                        k,
                        v,
                        gate,
                        scale,
                        window,
                        sinks,
                        positions,
                        spans,
                        out,
                    };
                    device.run(&op).unwrap();
                };
                run([fill, k, v, filled], 0, Some(1));
                for row in (0..rows).step_by(together) {
                    let position = positions - rows + row;
                    let [k, v] = [k, v].map(|view| view.slice(position, together));
                    let [q, out] = [q, out].map(|view| view.slice(row, together));
                    run([q, k, v, out], position, None);
                }
                bits(&crate::harness::read(&mut *device, out))
            })
            .collect();
        assert!(outs.windows(2).all(|pair| pair[0] == pair[1]), "exact {exact}");
    }
}

#[test]
fn keys_and_values_that_f16_does_not_hold() {
    let mut random = Random::new(80);
    Both::each(|both, _| {
        let tolerance = both.of_attention(40).max(if both.keeps_halves() { 2e-3 } else { 0.0 });
        for shape in [grouped(6, 2, 33, 20), latent(20, 24, 16)] {
            let case = Case::new(both, &mut random, 40, shape);
            let k = both.random(&mut random, 40, shape.kv_heads * shape.key).split(shape.kv_heads);
            let v = case
                .v
                .map(|v| both.random(&mut random, 40, shape.kv_heads * shape.value).split(v.heads));
            let case = Case { k, v, ..case };
            let state = case.state(both, 40);
            case.run(both, 0, &[Span { state, position: 0, rows: 40 }]);
            both.agree("keys rounded to f16", case.out, tolerance);
        }
    });
}

#[test]
fn many_rows_in_chunks_that_are_not_small() {
    let mut random = Random::new(81);
    Both::each(|both, _| {
        for (shape, window, ring) in [
            (grouped(6, 2, 33, 17), usize::MAX, 83),
            (grouped(5, 5, 72, 130), 30, KV_BLOCK),
            (grouped(16, 1, 24, 8), 230, KV_BLOCK),
            (latent(70, 48, 39), usize::MAX, 100),
        ] {
            let case = Case::new(both, &mut random, 83, shape).with_sinks(both, &mut random);
            let gate =
                Some(both.random(&mut random, 83, shape.heads * shape.value).split(shape.heads));
            let case = Case { gate, window: Some(window), ..case };
            let from = if ring == KV_BLOCK { 2 * KV_BLOCK - 50 } else { 0 };
            let (one, other) = (case.state(both, ring), case.state(both, ring + KV_BLOCK));
            let chunks = case.in_chunks(both, one, from, &[26, 16, 25]);
            assert!(
                case.in_chunks(both, other, from, &[20, 26, 17]) == chunks,
                "{shape:?}, {window}"
            );
        }
    });
}

//! Conv1d, DeltaNet and Mamba2: ops with a recurrent state.

use moeflux_compute::{
    Buffer, Isa, KeySharing, LogDecay, Op, Span, State, StateShape, StepLimits, View,
};

use crate::harness::{DevicePair, Random, bits, device};

/// Runs rows in chunks of the given sizes and commits each. Returns the output's bit patterns.
fn in_chunks(
    pair: &mut DevicePair,
    state: State,
    out: View,
    chunks: &[usize],
    run: impl Fn(&mut DevicePair, usize, &[Span]),
) -> Vec<u32> {
    let mut first = 0;
    for rows in chunks {
        let span = Span::new(state, first, *rows);
        run(pair, first, &[span]);
        pair.commit(span);
        first += rows;
    }
    pair.agree(&format!("chunks of {chunks:?}"), out, 1e-5);
    bits(&pair.read(out))
}

#[test]
fn conv1d_in_one_chunk_and_step_by_step() {
    let mut random = Random::new(21);
    DevicePair::for_each(|pair, _| {
        for (channels, width, dilation, silu) in [
            (1, 4, 1, true),
            (37, 4, 1, true),
            (300, 4, 1, true),
            (20, 1, 1, true),
            (20, 2, 1, false),
            (37, 4, 1, false),
            (300, 3, 1, false),
            (19, 7, 1, true),
            (300, 4, 3, true),
            (37, 2, 12, false),
        ] {
            let x = pair.random(&mut random, 9, channels + 5).columns(3, channels);
            let out = pair.nan_filled(9, channels);
            let weight = pair.buffer(&random.values(channels * width));
            let bias = (channels % 2 == 1).then(|| pair.buffer(&random.values(channels)));
            let run = |pair: &mut DevicePair, first: usize, spans: &[Span]| {
                let rows = spans[0].rows;
                pair.run(&Op::Conv1d {
                    x: x.slice(first, rows),
                    weight,
                    bias,
                    width,
                    dilation,
                    silu,
                    spans,
                    out: out.slice(first, rows),
                });
            };
            let mut last = None;
            for chunks in [&[9][..], &[4, 1, 1, 3], &[1; 9]] {
                let len = (width - 1) * dilation * channels;
                let state = pair.state(StateShape::Recurrent { len });
                let got = in_chunks(pair, state, out, chunks, run);
                assert!(last.is_none_or(|last| last == got), "{chunks:?}");
                last = Some(got);
            }
        }
    });
}

/// Key heads, value heads, key width, value width.
type Shape = (usize, usize, usize, usize);

struct Delta {
    q: View,
    k: View,
    v: View,
    a: View,
    b: View,
    a_log: Buffer,
    dt_bias: Buffer,
    decay: LogDecay,
    sharing: KeySharing,
    out: View,
    len: usize,
}

impl Delta {
    /// Queries, keys and values are columns of one buffer, as the convolution writes them.
    fn new(
        pair: &mut DevicePair,
        random: &mut Random,
        rows: usize,
        (key_heads, heads, kw, vw): Shape,
    ) -> Self {
        let qkv = pair.random(random, rows, 2 * key_heads * kw + heads * vw);
        Self {
            q: qkv.columns(0, key_heads * kw).split(key_heads),
            k: qkv.columns(key_heads * kw, key_heads * kw).split(key_heads),
            v: qkv.columns(2 * key_heads * kw, heads * vw).split(heads),
            a: pair.random(random, rows, heads + 3).columns(2, heads).split(heads),
            b: pair.random(random, rows, heads + 1).columns(1, heads),
            a_log: pair.buffer(&random.values(heads)),
            dt_bias: pair.buffer(&random.values(heads)),
            decay: LogDecay::Softplus,
            sharing: KeySharing::Adjacent,
            out: pair.nan_filled(rows, heads * vw).split(heads),
            len: heads * kw * vw,
        }
    }

    /// The same with a decay for each element of a key.
    fn with_key_decays(self, pair: &mut DevicePair, random: &mut Random, decay: LogDecay) -> Self {
        let (rows, heads, width) = (self.k.rows, self.v.heads, self.k.width);
        Self {
            a: pair.random(random, rows, heads * width + 1).columns(1, heads * width).split(heads),
            dt_bias: pair.buffer(&random.values(heads * width)),
            decay,
            ..self
        }
    }

    fn run(&self, pair: &mut DevicePair, first: usize, spans: &[Span]) {
        let rows = spans.iter().map(|s| s.rows).sum();
        let slice = |view: View| view.slice(first, rows);
        pair.run(&Op::DeltaNet {
            q: slice(self.q),
            k: slice(self.k),
            v: slice(self.v),
            a: slice(self.a),
            b: slice(self.b),
            a_log: self.a_log,
            dt_bias: self.dt_bias,
            decay: self.decay,
            sharing: self.sharing,
            spans,
            out: slice(self.out),
        });
    }
}

#[test]
fn delta_net_in_one_chunk_and_step_by_step() {
    let mut random = Random::new(22);
    DevicePair::for_each(|pair, _| {
        for (i, shape) in
            [(1, 1, 1, 1), (2, 4, 16, 16), (2, 4, 16, 16), (1, 3, 19, 45), (2, 2, 128, 70)]
                .into_iter()
                .enumerate()
        {
            let sharing = [KeySharing::Adjacent, KeySharing::Strided][i / 2 % 2];
            let delta = Delta { sharing, ..Delta::new(pair, &mut random, 8, shape) };
            let mut last = None;
            for chunks in [&[8][..], &[3, 1, 1, 3], &[1; 8]] {
                let state = pair.state(StateShape::Recurrent { len: delta.len });
                let got = in_chunks(pair, state, delta.out, chunks, |pair, first, spans| {
                    delta.run(pair, first, spans)
                });
                assert!(last.is_none_or(|last| last == got), "{shape:?} {chunks:?}");
                last = Some(got);
            }
        }
    });
}

/// The safe gate of Ling-3.0 and GLM-5.3.
const BOUNDED: LogDecay = LogDecay::Bounded { bound: -5.0 };

#[test]
fn a_decay_for_each_element_of_a_key() {
    let mut random = Random::new(29);
    DevicePair::for_each(|pair, _| {
        for (i, shape) in
            [(1, 1, 1, 1), (2, 4, 16, 16), (4, 4, 16, 16), (1, 3, 19, 45), (2, 2, 128, 70)]
                .into_iter()
                .enumerate()
        {
            let decay = [LogDecay::Softplus, BOUNDED][i % 2];
            let delta = Delta::new(pair, &mut random, 19, shape);
            let delta = delta.with_key_decays(pair, &mut random, decay);
            let mut last = None;
            for chunks in [&[19][..], &[3, 1, 1, 14], &[1; 19]] {
                let state = pair.state(StateShape::Recurrent { len: delta.len });
                let got = in_chunks(pair, state, delta.out, chunks, |pair, first, spans| {
                    delta.run(pair, first, spans)
                });
                assert!(last.is_none_or(|last| last == got), "{shape:?} {chunks:?}");
                last = Some(got);
            }
        }
    });
}

/// Decays of a chunk multiply to numbers that f32 does not have, and those of other elements stay
/// near 1.
#[test]
fn decays_of_elements_from_none_to_all() {
    let mut random = Random::new(30);
    DevicePair::for_each(|pair, _| {
        for (decay, range) in [(LogDecay::Softplus, 100.0), (BOUNDED, 30.0)] {
            let shape = (1, 2, 64, 40);
            let delta = Delta::new(pair, &mut random, 200, shape);
            let delta = delta.with_key_decays(pair, &mut random, decay);
            let biases: Vec<f32> = (0..128).map(|i| range * (i as f32 / 64.0 - 1.0)).collect();
            let delta = Delta { dt_bias: pair.buffer(&biases), ..delta };
            let mut last = None;
            for chunks in [&[200][..], &[1, 31, 64, 104]] {
                let state = pair.state(StateShape::Recurrent { len: delta.len });
                let got = in_chunks(pair, state, delta.out, chunks, |pair, first, spans| {
                    delta.run(pair, first, spans)
                });
                assert!(last.is_none_or(|last| last == got), "{decay:?} {chunks:?}");
                last = Some(got);
            }
        }
    });
}

#[test]
fn a_bounded_decay_for_each_head() {
    let mut random = Random::new(31);
    DevicePair::for_each(|pair, _| {
        let delta = Delta { decay: BOUNDED, ..Delta::new(pair, &mut random, 6, (2, 4, 24, 40)) };
        let state = pair.state(StateShape::Recurrent { len: delta.len });
        delta.run(pair, 0, &[Span::new(state, 0, 6)]);
        pair.agree("bounded decays", delta.out, 1e-5);
    });
}

/// Operands of a recurrence of Mamba-2.
struct StateSpace {
    x: View,
    b: View,
    c: View,
    dt: View,
    a_log: Buffer,
    d: Buffer,
    dt_bias: Buffer,
    limits: StepLimits,
    out: View,
    len: usize,
}

impl StateSpace {
    /// `shape`: groups, heads, state width, width of a head.
    fn new(pair: &mut DevicePair, random: &mut Random, rows: usize, shape: Shape) -> Self {
        let (groups, heads, state, width) = shape;
        // The output of one convolution, and gaps around it.
        let (inner, shared) = (heads * width, groups * state);
        let xbc = pair.random(random, rows, inner + 2 * shared + 3).columns(2, inner + 2 * shared);
        Self {
            x: xbc.columns(0, inner).split(heads),
            b: xbc.columns(inner, shared).split(groups),
            c: xbc.columns(inner + shared, shared).split(groups),
            dt: pair.random(random, rows, heads + 1).columns(1, heads),
            a_log: pair.buffer(&random.values(heads)),
            d: pair.buffer(&random.values(heads)),
            dt_bias: pair.buffer(&random.values(heads)),
            limits: StepLimits::default(),
            out: pair.nan_filled(rows, inner).split(heads),
            len: inner * state,
        }
    }

    fn run(&self, pair: &mut DevicePair, first: usize, spans: &[Span]) {
        let rows = spans.iter().map(|s| s.rows).sum();
        let slice = |view: View| view.slice(first, rows);
        pair.run(&Op::Mamba2 {
            x: slice(self.x),
            b: slice(self.b),
            c: slice(self.c),
            dt: slice(self.dt),
            a_log: self.a_log,
            d: self.d,
            dt_bias: self.dt_bias,
            limits: self.limits,
            spans,
            out: slice(self.out),
        });
    }
}

#[test]
fn mamba2_in_one_chunk_and_step_by_step() {
    let mut random = Random::new(33);
    DevicePair::for_each(|pair, _| {
        for (i, shape) in
            [(1, 1, 1, 1), (2, 4, 16, 16), (4, 4, 16, 16), (1, 3, 19, 45), (2, 4, 128, 70)]
                .into_iter()
                .enumerate()
        {
            let limits = [StepLimits::default(), StepLimits { min: 0.5, max: 0.9 }][i % 2];
            let rule = StateSpace::new(pair, &mut random, 37, shape);
            let rule = StateSpace { limits, ..rule };
            let mut last = None;
            for chunks in [&[37][..], &[3, 1, 17, 16], &[1; 37]] {
                let state = pair.state(StateShape::Recurrent { len: rule.len });
                let got = in_chunks(pair, state, rule.out, chunks, |pair, first, spans| {
                    rule.run(pair, first, spans)
                });
                assert!(last.is_none_or(|last| last == got), "{shape:?} {chunks:?}");
                last = Some(got);
            }
        }
    });
}

/// Steps from almost zero to large ones, whose decays are zero.
#[test]
fn mamba2_remembers_everything_or_nothing() {
    let mut random = Random::new(34);
    DevicePair::for_each(|pair, _| {
        let rule = StateSpace::new(pair, &mut random, 6, (1, 4, 24, 40));
        let rule = StateSpace {
            dt_bias: pair.buffer(&[-100.0, -5.0, 5.0, 100.0]),
            a_log: pair.buffer(&[2.0, -5.0, 0.0, 3.0]),
            ..rule
        };
        let state = pair.state(StateShape::Recurrent { len: rule.len });
        rule.run(pair, 0, &[Span::new(state, 0, 6)]);
        for head in 0..4 {
            pair.agree(&format!("head {head}"), rule.out.head(head), 1e-5);
        }
    });
}

#[test]
fn mamba2_of_independent_sequences() {
    let mut random = Random::new(35);
    DevicePair::for_each(|pair, _| {
        let rule = StateSpace::new(pair, &mut random, 7, (2, 4, 24, 40));
        let spans = |pair: &mut DevicePair| {
            [(0, 3), (5, 4)].map(|(position, rows)| {
                let state = pair.state(StateShape::Recurrent { len: rule.len });
                Span::new(state, position, rows)
            })
        };
        let together = spans(pair);
        rule.run(pair, 0, &together);
        pair.agree("two sequences", rule.out, 1e-5);
        let first = bits(&pair.read(rule.out));
        let alone = spans(pair);
        rule.run(pair, 0, &alone[..1]);
        rule.run(pair, 3, &alone[1..]);
        assert!(bits(&pair.read(rule.out)) == first);
    });
}

/// A device may fuse a convolution, with its state, into the delta rule that follows.
#[test]
fn conv1d_followed_by_a_delta_rule() {
    let mut random = Random::new(27);
    DevicePair::for_each(|pair, _| {
        for (shape, width) in
            [((2, 4, 16, 16), 4), ((1, 3, 19, 45), 2), ((2, 2, 128, 70), 4), ((1, 1, 140, 33), 3)]
        {
            let mut delta = Delta::new(pair, &mut random, 8, shape);
            // Shapes with a narrow convolution also have decays for each element.
            if width < 4 {
                delta = delta.with_key_decays(pair, &mut random, BOUNDED);
            }
            let channels = 2 * shape.0 * shape.2 + shape.1 * shape.3;
            let x = pair.random(&mut random, 8, channels + 3).columns(2, channels);
            let qkv = View::rows(delta.q.buffer, 8, channels);
            let weight = pair.buffer(&random.values(channels * width));
            for chunks in [&[8][..], &[3, 1, 1, 3], &[1; 8]] {
                let conv_state = pair.state(StateShape::Recurrent { len: (width - 1) * channels });
                let state = pair.state(StateShape::Recurrent { len: delta.len });
                in_chunks(pair, state, delta.out, chunks, |pair, first, spans| {
                    let rows = spans[0].rows;
                    let (x, out) = (x.slice(first, rows), qkv.slice(first, rows));
                    let conv_spans = &[Span { state: conv_state, ..spans[0] }];
                    pair.run(&Op::Conv1d {
                        x,
                        weight,
                        bias: None,
                        width,
                        dilation: 1,
                        silu: true,
                        spans: conv_spans,
                        out,
                    });
                    // A read between them prevents the fusion.
                    if first == 4 {
                        pair.agree("the convolution", out, 1e-5);
                    }
                    delta.run(pair, first, spans);
                    pair.commit(conv_spans[0]);
                });
            }
        }
    });
}

#[test]
fn delta_net_over_long_spans() {
    let mut random = Random::new(25);
    DevicePair::for_each(|pair, _| {
        let mut delta = Delta::new(pair, &mut random, 600, (1, 2, 64, 40));
        // The decay is slow: half of the state remains after hundreds of rows.
        delta.a_log = pair.buffer(&[-6.0, -4.5]);
        let mut last = None;
        for chunks in [&[600][..], &[1, 31, 64, 504]] {
            let state = pair.state(StateShape::Recurrent { len: delta.len });
            let got = in_chunks(pair, state, delta.out, chunks, |pair, first, spans| {
                delta.run(pair, first, spans)
            });
            assert!(last.is_none_or(|last| last == got), "{chunks:?}");
            last = Some(got);
        }
    });
}

#[test]
fn sequences_of_one_op_are_independent() {
    let mut random = Random::new(26);
    DevicePair::for_each(|pair, _| {
        let delta = Delta::new(pair, &mut random, 7, (2, 4, 24, 40));
        let by_key = Delta::new(pair, &mut random, 7, (2, 4, 24, 40));
        for delta in [delta, by_key.with_key_decays(pair, &mut random, BOUNDED)] {
            let conv = (
                pair.random(&mut random, 7, 30),
                pair.nan_filled(7, 30),
                pair.buffer(&random.values(120)),
            );
            let run_ops = |pair: &mut DevicePair,
                           first: usize,
                           rows: usize,
                           spans: &[Span],
                           convs: &[Span]| {
                delta.run(pair, first, spans);
                let (x, out, weight) =
                    (conv.0.slice(first, rows), conv.1.slice(first, rows), conv.2);
                pair.run(&Op::Conv1d {
                    x,
                    weight,
                    bias: None,
                    width: 4,
                    dilation: 1,
                    silu: true,
                    spans: convs,
                    out,
                });
            };
            let states = |pair: &mut DevicePair, len: usize| {
                [(); 2].map(|()| pair.state(StateShape::Recurrent { len }))
            };
            let spans = |[one, other]: [State; 2]| [Span::new(one, 0, 3), Span::new(other, 0, 4)];
            let (together, convs) = (spans(states(pair, delta.len)), spans(states(pair, 90)));
            run_ops(pair, 0, 7, &together, &convs);
            pair.agree("delta-net of two sequences", delta.out, 1e-5);
            pair.agree("convolution of two sequences", conv.1, 1e-5);
            let first = [bits(&pair.read(delta.out)), bits(&pair.read(conv.1))];
            let (alone, convs) = (spans(states(pair, delta.len)), spans(states(pair, 90)));
            run_ops(pair, 0, 3, &alone[..1], &convs[..1]);
            run_ops(pair, 3, 4, &alone[1..], &convs[1..]);
            assert!([bits(&pair.read(delta.out)), bits(&pair.read(conv.1))] == first);
        }
    });
}

#[test]
fn an_uncommitted_step_leaves_the_state_unchanged() {
    let mut random = Random::new(23);
    DevicePair::for_each(|pair, _| {
        let delta = Delta::new(pair, &mut random, 6, (1, 2, 8, 8));
        let state = pair.state(StateShape::Recurrent { len: delta.len });
        let span = |position, rows| Span::new(state, position, rows);
        delta.run(pair, 0, &[span(0, 3)]);
        pair.commit(span(0, 3));
        delta.run(pair, 3, &[span(3, 3)]);
        let first = bits(&pair.read(delta.out));
        delta.run(pair, 3, &[span(3, 3)]);
        assert!(bits(&pair.read(delta.out)) == first);
        pair.agree("again", delta.out, 1e-5);
        // An empty span leaves the state unchanged.
        delta.run(pair, 3, &[span(3, 0)]);
        pair.commit(span(3, 0));
        delta.run(pair, 3, &[span(3, 3)]);
        assert!(bits(&pair.read(delta.out)) == first);
        pair.device.reset(state).unwrap();
        delta.run(pair, 0, &[span(0, 1)]);
    });
}

#[test]
fn several_sequences_with_any_thread_count() {
    let mut random = Random::new(24);
    let seed = random.next();
    let mut outs = Vec::new();
    for threads in 1..4 {
        let mut random = Random::new(seed);
        let mut pair = DevicePair::new(device(Isa::detect(), true, threads));
        let delta = Delta::new(&mut pair, &mut random, 7, (2, 4, 24, 40));
        let one = pair.state(StateShape::Recurrent { len: delta.len });
        let other = pair.state(StateShape::Recurrent { len: delta.len });
        let spans = [Span::new(one, 0, 3), Span::new(other, 0, 4)];
        delta.run(&mut pair, 0, &spans);
        pair.agree("two sequences", delta.out, 1e-5);
        outs.push(bits(&pair.read(delta.out)));
    }
    assert!(outs.windows(2).all(|pair| pair[0] == pair[1]));
}

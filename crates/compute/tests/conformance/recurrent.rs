//! Conv1d and DeltaNet: ops with a recurrent state.

use moeflux_compute::{Isa, Op, Span, State, StateShape, View};

use crate::harness::{Both, Random, bits, device};

/// Runs rows in chunks of given sizes, each committed, and returns the output's bits.
fn in_chunks(
    both: &mut Both,
    state: State,
    out: View,
    chunks: &[usize],
    run: impl Fn(&mut Both, usize, &[Span]),
) -> Vec<u32> {
    let mut first = 0;
    for rows in chunks {
        run(both, first, &[Span { state, position: first, rows: *rows }]);
        both.commit(state);
        first += rows;
    }
    both.agree(&format!("chunks of {chunks:?}"), out, 1e-5);
    bits(&both.read(out))
}

#[test]
fn conv1d_at_once_and_step_by_step() {
    let mut random = Random::new(21);
    Both::each(|both, _| {
        for (channels, width) in [(1, 4), (37, 4), (300, 4), (20, 1), (20, 2), (19, 7)] {
            let x = both.random(&mut random, 9, channels + 5).columns(3, channels);
            let out = both.poisoned(9, channels);
            let weight = both.numbers(&random.numbers(channels * width));
            let run = |both: &mut Both, first: usize, spans: &[Span]| {
                let rows = spans[0].rows;
                both.run(&Op::Conv1d {
                    x: x.slice(first, rows),
                    weight,
                    width,
                    spans,
                    out: out.slice(first, rows),
                });
            };
            let mut last = None;
            for chunks in [&[9][..], &[4, 1, 1, 3], &[1; 9]] {
                let state = both.state(StateShape::Recurrent { len: (width - 1) * channels });
                let got = in_chunks(both, state, out, chunks, run);
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
    ab: View,
    a_log: moeflux_compute::Buffer,
    dt_bias: moeflux_compute::Buffer,
    out: View,
    len: usize,
}

impl Delta {
    /// Queries, keys and values as columns of one buffer, as the convolution leaves them.
    fn new(
        both: &mut Both,
        random: &mut Random,
        rows: usize,
        (key_heads, heads, kw, vw): Shape,
    ) -> Self {
        let qkv = both.random(random, rows, 2 * key_heads * kw + heads * vw);
        Self {
            q: qkv.columns(0, key_heads * kw).split(key_heads),
            k: qkv.columns(key_heads * kw, key_heads * kw).split(key_heads),
            v: qkv.columns(2 * key_heads * kw, heads * vw).split(heads),
            ab: both.random(random, rows, 2 * heads),
            a_log: both.numbers(&random.numbers(heads)),
            dt_bias: both.numbers(&random.numbers(heads)),
            out: both.poisoned(rows, heads * vw).split(heads),
            len: heads * kw * vw,
        }
    }

    fn run(&self, both: &mut Both, first: usize, spans: &[Span]) {
        let rows = spans.iter().map(|s| s.rows).sum();
        let (part, heads) = (|view: View| view.slice(first, rows), self.out.heads);
        both.run(&Op::DeltaNet {
            q: part(self.q),
            k: part(self.k),
            v: part(self.v),
            a: part(self.ab.columns(0, heads)),
            b: part(self.ab.columns(heads, heads)),
            a_log: self.a_log,
            dt_bias: self.dt_bias,
            spans,
            out: part(self.out),
        });
    }
}

#[test]
fn delta_net_at_once_and_step_by_step() {
    let mut random = Random::new(22);
    Both::each(|both, _| {
        for shape in [(1, 1, 1, 1), (2, 4, 16, 16), (1, 3, 19, 45), (2, 2, 128, 70)] {
            let delta = Delta::new(both, &mut random, 8, shape);
            let mut last = None;
            for chunks in [&[8][..], &[3, 1, 1, 3], &[1; 8]] {
                let state = both.state(StateShape::Recurrent { len: delta.len });
                let got = in_chunks(both, state, delta.out, chunks, |both, first, spans| {
                    delta.run(both, first, spans)
                });
                assert!(last.is_none_or(|last| last == got), "{shape:?} {chunks:?}");
                last = Some(got);
            }
        }
    });
}

/// A device may take a convolution into the delta rule that comes right behind it, and its state with it.
#[test]
fn a_convolution_and_the_delta_rule_behind_it() {
    let mut random = Random::new(27);
    Both::each(|both, _| {
        for (shape, width) in
            [((2, 4, 16, 16), 4), ((1, 3, 19, 45), 2), ((2, 2, 128, 70), 4), ((1, 1, 140, 33), 3)]
        {
            let delta = Delta::new(both, &mut random, 8, shape);
            let channels = 2 * shape.0 * shape.2 + shape.1 * shape.3;
            let x = both.random(&mut random, 8, channels + 3).columns(2, channels);
            let qkv = View::rows(delta.q.buffer, 8, channels);
            let weight = both.numbers(&random.numbers(channels * width));
            for chunks in [&[8][..], &[3, 1, 1, 3], &[1; 8]] {
                let convolved = both.state(StateShape::Recurrent { len: (width - 1) * channels });
                let state = both.state(StateShape::Recurrent { len: delta.len });
                in_chunks(both, state, delta.out, chunks, |both, first, spans| {
                    let rows = spans[0].rows;
                    let (x, out) = (x.slice(first, rows), qkv.slice(first, rows));
                    let spans_of = &[Span { state: convolved, ..spans[0] }];
                    both.run(&Op::Conv1d { x, weight, width, spans: spans_of, out });
                    // Something else may come between them.
                    if first == 4 {
                        both.agree("what is convolved", out, 1e-5);
                    }
                    delta.run(both, first, spans);
                    both.commit(convolved);
                });
            }
        }
    });
}

#[test]
fn delta_net_remembers_over_long_spans() {
    let mut random = Random::new(25);
    Both::each(|both, _| {
        let mut delta = Delta::new(both, &mut random, 600, (1, 2, 64, 40));
        // Half of what is in the state lasts for hundreds of rows.
        delta.a_log = both.numbers(&[-6.0, -4.5]);
        let mut last = None;
        for chunks in [&[600][..], &[1, 31, 64, 504]] {
            let state = both.state(StateShape::Recurrent { len: delta.len });
            let got = in_chunks(both, state, delta.out, chunks, |both, first, spans| {
                delta.run(both, first, spans)
            });
            assert!(last.is_none_or(|last| last == got), "{chunks:?}");
            last = Some(got);
        }
    });
}

#[test]
fn sessions_of_one_op_know_nothing_of_each_other() {
    let mut random = Random::new(26);
    Both::each(|both, _| {
        let delta = Delta::new(both, &mut random, 7, (2, 4, 24, 40));
        let conv = (
            both.random(&mut random, 7, 30),
            both.poisoned(7, 30),
            both.numbers(&random.numbers(120)),
        );
        let both_ops =
            |both: &mut Both, first: usize, rows: usize, spans: &[Span], convs: &[Span]| {
                delta.run(both, first, spans);
                let (x, out, weight) =
                    (conv.0.slice(first, rows), conv.1.slice(first, rows), conv.2);
                both.run(&Op::Conv1d { x, weight, width: 4, spans: convs, out });
            };
        let states = |both: &mut Both, len: usize| {
            [(); 2].map(|()| both.state(StateShape::Recurrent { len }))
        };
        let of = |[one, other]: [State; 2]| {
            [Span { state: one, position: 0, rows: 3 }, Span { state: other, position: 0, rows: 4 }]
        };
        let (together, convs) = (of(states(both, delta.len)), of(states(both, 90)));
        both_ops(both, 0, 7, &together, &convs);
        both.agree("delta-net of two sessions", delta.out, 1e-5);
        both.agree("convolution of two sessions", conv.1, 1e-5);
        let first = [bits(&both.read(delta.out)), bits(&both.read(conv.1))];
        let (alone, convs) = (of(states(both, delta.len)), of(states(both, 90)));
        both_ops(both, 0, 3, &alone[..1], &convs[..1]);
        both_ops(both, 3, 4, &alone[1..], &convs[1..]);
        assert!([bits(&both.read(delta.out)), bits(&both.read(conv.1))] == first);
    });
}

#[test]
fn a_step_that_is_not_committed_leaves_no_trace() {
    let mut random = Random::new(23);
    Both::each(|both, _| {
        let delta = Delta::new(both, &mut random, 6, (1, 2, 8, 8));
        let state = both.state(StateShape::Recurrent { len: delta.len });
        delta.run(both, 0, &[Span { state, position: 0, rows: 3 }]);
        both.commit(state);
        delta.run(both, 3, &[Span { state, position: 3, rows: 3 }]);
        let first = bits(&both.read(delta.out));
        delta.run(both, 3, &[Span { state, position: 3, rows: 3 }]);
        assert!(bits(&both.read(delta.out)) == first);
        both.agree("again", delta.out, 1e-5);
        // A span without rows keeps the state.
        delta.run(both, 3, &[Span { state, position: 3, rows: 0 }]);
        both.commit(state);
        delta.run(both, 3, &[Span { state, position: 3, rows: 3 }]);
        assert!(bits(&both.read(delta.out)) == first);
        both.device.reset(state).unwrap();
        delta.run(both, 0, &[Span { state, position: 0, rows: 1 }]);
    });
}

#[test]
fn several_sessions_in_one_op_and_any_threads() {
    let mut random = Random::new(24);
    let numbers = random.next();
    let mut outs = Vec::new();
    for threads in 1..4 {
        let mut random = Random::new(numbers);
        let mut both = Both::new(device(Isa::detect(), true, threads));
        let delta = Delta::new(&mut both, &mut random, 7, (2, 4, 24, 40));
        let one = both.state(StateShape::Recurrent { len: delta.len });
        let other = both.state(StateShape::Recurrent { len: delta.len });
        let spans = [
            Span { state: one, position: 0, rows: 3 },
            Span { state: other, position: 0, rows: 4 },
        ];
        delta.run(&mut both, 0, &spans);
        both.agree("two sessions", delta.out, 1e-5);
        outs.push(bits(&both.read(delta.out)));
    }
    assert!(outs.windows(2).all(|pair| pair[0] == pair[1]));
}

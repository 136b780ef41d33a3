//! TopPositions.

use moeflux_compute::{Isa, Op, Span, State, StateShape, View};

use crate::harness::{Both, Random, bits, device};

/// Queries, keys and weights with scores that are whole numbers: exact on every device, and often equal.
struct Case {
    q: View,
    k: View,
    weights: View,
    scores: View,
    out: View,
}

impl Case {
    fn new(
        both: &mut Both,
        random: &mut Random,
        (rows, heads, width): (usize, usize, usize),
        n: usize,
    ) -> Self {
        Self::of(both, (rows, heads, width), n, |_| random.below(7) as f32 - 3.0)
    }

    fn of(
        both: &mut Both,
        (rows, heads, width): (usize, usize, usize),
        n: usize,
        mut number: impl FnMut(usize) -> f32,
    ) -> Self {
        let mut view = |len: usize| {
            let numbers: Vec<f32> = (0..rows * len).map(&mut number).collect();
            both.dense(rows, &numbers)
        };
        let (q, k, weights) = (view(heads * width).split(heads), view(width), view(heads));
        Self { q, k, weights, scores: both.poisoned(3, rows + 2), out: both.poisoned(rows, n) }
    }

    fn state(&self, both: &mut Both) -> State {
        let (key_width, positions) = (self.k.width, self.k.rows);
        both.state(StateShape::KeyValue { kv_heads: 1, key_width, value_width: 0, positions })
    }

    fn run(&self, both: &mut Both, first: usize, spans: &[Span]) {
        let rows = spans.iter().map(|s| s.rows).sum();
        let part = |view: View| view.slice(first, rows);
        both.run(&Op::TopPositions {
            q: part(self.q),
            k: part(self.k),
            weights: part(self.weights),
            spans,
            scores: self.scores,
            out: part(self.out),
        });
    }

    fn in_chunks(&self, both: &mut Both, chunks: &[usize]) -> Vec<u32> {
        let (state, mut first) = (self.state(both), 0);
        for rows in chunks.iter().cycle() {
            let rows = *rows.min(&(self.q.rows - first));
            if rows == 0 {
                break;
            }
            self.run(both, first, &[Span { state, position: first, rows }]);
            first += rows;
        }
        both.agree(&format!("{:?}, chunks of {chunks:?}", self.q), self.out, 0.0);
        bits(&both.read(self.out))
    }
}

#[test]
fn fewer_and_more_than_there_are() {
    let mut random = Random::new(91);
    Both::each(|both, _| {
        for (rows, heads, width, n) in [
            (1, 1, 1, 1),
            (9, 2, 3, 4),
            (9, 5, 17, 20),
            (12, 16, 8, 12),
            (30, 17, 16, 7),
            (30, 40, 33, 1),
        ] {
            let case = Case::new(both, &mut random, (rows, heads, width), n);
            let at_once = case.in_chunks(both, &[rows]);
            assert!(case.in_chunks(both, &[4, 1]) == at_once);
        }
    });
}

#[test]
fn beyond_a_block_of_positions() {
    let mut random = Random::new(92);
    Both::each(|both, _| {
        for n in [1, 60, 256, 599, 600] {
            let case = Case::new(both, &mut random, (600, 3, 5), n);
            let at_once = case.in_chunks(both, &[600]);
            assert!(case.in_chunks(both, &[255, 1, 40]) == at_once);
        }
    });
}

#[test]
fn of_equal_scores_the_later_position_is_taken_first() {
    Both::each(|both, _| {
        // Negative products count as nothing, so most scores are zero; some weights make it a negative zero.
        let case =
            Case::of(
                both,
                (40, 2, 3),
                5,
                |i| if i % 11 == 0 { -1.0 } else { 1.0 - (i % 3) as f32 },
            );
        case.in_chunks(both, &[40]);
        let zeros = Case::of(both, (40, 2, 3), 5, |_| 0.0);
        zeros.in_chunks(both, &[40]);
        assert_eq!(both.read(zeros.out.slice(39, 1)), [35.0, 36.0, 37.0, 38.0, 39.0]);
        assert_eq!(both.read(zeros.out.slice(2, 1)), [0.0, 1.0, 2.0, -1.0, -1.0]);
    });
}

#[test]
fn scores_of_any_size_and_sign() {
    Both::each(|both, _| {
        // One head of one number, far apart, within what f16 holds: the score at t is the weight times a power of
        // two, times either sign.
        let rows = 60;
        let powers: Vec<f32> =
            (0..rows).map(|t| ((((t * 37) % 60) as f32 - 30.0) / 2.0).exp2()).collect();
        let ones = vec![1.0; rows];
        for sign in [1.0, -1.0] {
            let (q, k) = (both.dense(rows, &ones), both.dense(rows, &powers));
            let weights = both.dense(rows, &vec![sign; rows]);
            let (scores, out) = (both.poisoned(7, rows), both.poisoned(rows, 9));
            Case { q, k, weights, scores, out }.in_chunks(both, &[rows]);
        }
    });
}

#[test]
fn several_sessions_and_any_threads() {
    let mut outs = Vec::new();
    for threads in [1, 2, 3, 7] {
        let mut random = Random::new(93);
        let mut both = Both::new(device(Isa::detect(), false, threads));
        let case = Case::of(&mut both, (40, 20, 16), 6, |_| random.number());
        let (one, other) = (case.state(&mut both), case.state(&mut both));
        let spans = [
            Span { state: one, position: 0, rows: 25 },
            Span { state: other, position: 0, rows: 15 },
        ];
        case.run(&mut both, 0, &spans);
        both.agree("two sessions", case.out, 0.0);
        outs.push(bits(&both.read(case.out)));
    }
    assert!(outs.windows(2).all(|pair| pair[0] == pair[1]));
}

#[test]
fn what_is_not_finite_names_positions_all_the_same() {
    Both::each(|both, _| {
        let bad = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1.0];
        let case = Case::of(both, (20, 2, 3), 4, |i| bad[i % 4]);
        let state = case.state(both);
        case.run(both, 0, &[Span { state, position: 0, rows: 20 }]);
        for row in both.read(case.out).chunks(4).skip(3) {
            assert!(
                row.windows(2).all(|pair| pair[0] < pair[1]) && (0.0..20.0).contains(&row[0]),
                "{row:?}"
            );
        }
    });
}

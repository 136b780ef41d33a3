//! TopPositions: the indexer of sparse attention.

use moeflux_compute::{IndexList, IndexQueries, Isa, Op, Span, State, StateShape, View};

use crate::harness::{DevicePair, Random, bits, device, row_chunks};

/// Queries, keys and weights. Small integers make the scores exact on every device, and often
/// equal.
struct Case {
    q: View,
    k: View,
    weights: View,
    scores: View,
    out: View,
}

impl Case {
    fn new(
        pair: &mut DevicePair,
        random: &mut Random,
        (rows, heads, width): (usize, usize, usize),
        n: usize,
    ) -> Self {
        Self::with_values(pair, (rows, heads, width), n, |_| random.below(7) as f32 - 3.0)
    }

    fn with_values(
        pair: &mut DevicePair,
        (rows, heads, width): (usize, usize, usize),
        n: usize,
        mut value: impl FnMut(usize) -> f32,
    ) -> Self {
        let mut view = |len: usize| {
            let values: Vec<f32> = (0..rows * len).map(&mut value).collect();
            pair.dense(rows, &values)
        };
        let (q, k, weights) = (view(heads * width).split(heads), view(width), view(heads));
        Self { q, k, weights, scores: pair.nan_filled(3, rows + 2), out: pair.nan_filled(rows, n) }
    }

    fn state(&self, pair: &mut DevicePair) -> State {
        let (key_width, positions) = (self.k.width, self.k.rows);
        pair.state(StateShape::KeyValue { kv_heads: 1, key_width, value_width: 0, positions })
    }

    fn run(&self, pair: &mut DevicePair, first: usize, spans: &[Span]) {
        let rows = spans.iter().map(|s| s.rows).sum();
        let slice = |view: View| view.slice(first, rows);
        let (q, weights, scores) = (slice(self.q), slice(self.weights), self.scores);
        pair.run(&Op::TopPositions {
            queries: Some(IndexQueries { q, weights, scores }),
            k: Some(slice(self.k)),
            ratio: 1,
            list: IndexList::Positions,
            spans,
            out: slice(self.out),
        });
    }

    fn in_chunks(&self, pair: &mut DevicePair, chunks: &[usize]) -> Vec<u32> {
        let state = self.state(pair);
        for rows in row_chunks(self.q.rows, chunks) {
            let span = Span::new(state, rows.start, rows.len());
            self.run(pair, rows.start, &[span]);
        }
        pair.agree(&format!("{:?}, chunks of {chunks:?}", self.q), self.out, 0.0);
        bits(&pair.read(self.out))
    }
}

#[test]
fn n_below_and_above_the_number_of_positions() {
    let mut random = Random::new(91);
    DevicePair::for_each(|pair, _| {
        for (rows, heads, width, n) in [
            (1, 1, 1, 1),
            (9, 2, 3, 4),
            (9, 5, 17, 20),
            (12, 16, 8, 12),
            (30, 17, 16, 7),
            (30, 40, 33, 1),
        ] {
            let case = Case::new(pair, &mut random, (rows, heads, width), n);
            let at_once = case.in_chunks(pair, &[rows]);
            assert!(case.in_chunks(pair, &[4, 1]) == at_once);
        }
    });
}

#[test]
fn more_positions_than_a_kv_block() {
    let mut random = Random::new(92);
    DevicePair::for_each(|pair, _| {
        for n in [1, 60, 256, 599, 600] {
            let case = Case::new(pair, &mut random, (600, 3, 5), n);
            let at_once = case.in_chunks(pair, &[600]);
            assert!(case.in_chunks(pair, &[255, 1, 40]) == at_once);
        }
    });
}

#[test]
fn ties_are_broken_by_the_later_position() {
    DevicePair::for_each(|pair, _| {
        // ReLU makes most scores zero; negative weights make some of them a negative zero.
        let case = Case::with_values(pair, (40, 2, 3), 5, |i| {
            if i % 11 == 0 { -1.0 } else { 1.0 - (i % 3) as f32 }
        });
        case.in_chunks(pair, &[40]);
        let zeros = Case::with_values(pair, (40, 2, 3), 5, |_| 0.0);
        zeros.in_chunks(pair, &[40]);
        assert_eq!(pair.read(zeros.out.slice(39, 1)), [35.0, 36.0, 37.0, 38.0, 39.0]);
        assert_eq!(pair.read(zeros.out.slice(2, 1)), [0.0, 1.0, 2.0, -1.0, -1.0]);
    });
}

#[test]
fn scores_of_any_magnitude_and_sign() {
    DevicePair::for_each(|pair, _| {
        // One head of width 1 with keys over the range of f16: the score at t is the weight, 1 or
        // -1, times a power of two.
        let rows = 60;
        let powers: Vec<f32> =
            (0..rows).map(|t| ((((t * 37) % 60) as f32 - 30.0) / 2.0).exp2()).collect();
        let ones = vec![1.0; rows];
        for sign in [1.0, -1.0] {
            let (q, k) = (pair.dense(rows, &ones), pair.dense(rows, &powers));
            let weights = pair.dense(rows, &vec![sign; rows]);
            let (scores, out) = (pair.nan_filled(7, rows), pair.nan_filled(rows, 9));
            Case { q, k, weights, scores, out }.in_chunks(pair, &[rows]);
        }
    });
}

#[test]
fn several_sequences_with_any_thread_count() {
    let mut outs = Vec::new();
    for threads in [1, 2, 3, 7] {
        let mut random = Random::new(93);
        let mut pair = DevicePair::new(device(Isa::detect(), false, threads));
        let case = Case::with_values(&mut pair, (40, 20, 16), 6, |_| random.value());
        let (one, other) = (case.state(&mut pair), case.state(&mut pair));
        let spans = [Span::new(one, 0, 25), Span::new(other, 0, 15)];
        case.run(&mut pair, 0, &spans);
        pair.agree("two sequences", case.out, 0.0);
        outs.push(bits(&pair.read(case.out)));
    }
    assert!(outs.windows(2).all(|pair| pair[0] == pair[1]));
}

#[test]
fn non_finite_scores_still_give_valid_positions() {
    DevicePair::for_each(|pair, _| {
        let bad = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1.0];
        let case = Case::with_values(pair, (20, 2, 3), 4, |i| bad[i % 4]);
        let state = case.state(pair);
        case.run(pair, 0, &[Span::new(state, 0, 20)]);
        for row in pair.read(case.out).chunks(4).skip(3) {
            assert!(
                row.windows(2).all(|pair| pair[0] < pair[1]) && (0.0..20.0).contains(&row[0]),
                "{row:?}"
            );
        }
    });
}

/// Positions of an entry, number of listed entries, form of the list.
type EntryLists = (usize, usize, IndexList);

/// Lists of `rows` positions of a sequence, in chunks. Entries are appended once they are complete.
fn entry_lists(
    pair: &mut DevicePair,
    case: &Case,
    (ratio, n, list): EntryLists,
    chunks: &[usize],
    with_queries: bool,
) -> Vec<u32> {
    let rows = case.q.rows;
    let width = match list {
        IndexList::Positions => n * ratio + ratio - 1,
        IndexList::Window { window, .. } => window + n,
    };
    let out = pair.nan_filled(rows, width);
    let state = case.state(pair);
    for rows in row_chunks(rows, chunks) {
        let slice = |view: View| view.slice(rows.start, rows.len());
        let entries = rows.start / ratio..rows.end / ratio;
        let spans = &[Span::new(state, entries.start, entries.len())];
        let k = case.k.slice(entries.start, entries.len());
        pair.run(&Op::Append { k, v: None, spans });
        let (q, weights, scores) = (slice(case.q), slice(case.weights), case.scores);
        pair.run(&Op::TopPositions {
            queries: with_queries.then_some(IndexQueries { q, weights, scores }),
            k: None,
            ratio,
            list,
            spans: &[Span::new(state, rows.start, rows.len())],
            out: slice(out),
        });
    }
    pair.agree(&format!("{ratio}, {n}, {list:?}, chunks of {chunks:?}"), out, 0.0);
    bits(&pair.read(out))
}

#[test]
fn entries_of_several_positions() {
    let mut random = Random::new(97);
    let window = |window, ring| IndexList::Window { window, ring };
    DevicePair::for_each(|pair, _| {
        for lists in [
            (4, 3, IndexList::Positions),
            (4, 20, IndexList::Positions),
            (3, 5, IndexList::Positions),
            (1, 4, window(6, 10)),
            (4, 3, window(8, 256)),
            (2, 30, window(5, 5)),
            (32, 1, window(16, 20)),
        ] {
            let case = Case::new(pair, &mut random, (70, 3, 8), 1);
            let at_once = entry_lists(pair, &case, lists, &[70], true);
            let apart = entry_lists(pair, &case, lists, &[1, 2, 3, 5, 7], true);
            assert!(at_once == apart, "{lists:?}");
            let (ratio, _, list) = lists;
            let all = (ratio, 70 / ratio, list);
            let at_once = entry_lists(pair, &case, all, &[70], false);
            assert!(entry_lists(pair, &case, all, &[70], true) == at_once, "{all:?}");
        }
    });
}

#[test]
fn forms_of_lists() {
    DevicePair::for_each(|pair, _| {
        // All scores are equal: the last entries win.
        let case = Case::with_values(pair, (12, 1, 1), 1, |_| 0.0);
        let positions = entry_lists(pair, &case, (4, 1, IndexList::Positions), &[5], true);
        let row = |list: &[u32], row: usize, width: usize| -> Vec<f32> {
            list[row * width..][..width].iter().map(|x| f32::from_bits(*x)).collect()
        };
        assert_eq!(row(&positions, 1, 7), [0.0, 1.0, -1.0, -1.0, -1.0, -1.0, -1.0]);
        assert_eq!(row(&positions, 3, 7), [0.0, 1.0, 2.0, 3.0, -1.0, -1.0, -1.0]);
        assert_eq!(row(&positions, 10, 7), [4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0]);
        let form = IndexList::Window { window: 3, ring: 8 };
        let window = entry_lists(pair, &case, (4, 2, form), &[5], true);
        assert_eq!(row(&window, 1, 5), [0.0, 1.0, -1.0, -1.0, -1.0]);
        assert_eq!(row(&window, 8, 5), [6.0, 7.0, 0.0, 8.0, 9.0]);
        assert_eq!(row(&window, 11, 5), [1.0, 2.0, 3.0, 9.0, 10.0]);
    });
}

#[test]
fn more_entries_than_a_kv_block() {
    let mut random = Random::new(98);
    DevicePair::for_each(|pair, _| {
        let case = Case::new(pair, &mut random, (1300, 2, 4), 1);
        let lists = (2, 300, IndexList::Window { window: 100, ring: 128 });
        let at_once = entry_lists(pair, &case, lists, &[1300], true);
        assert!(entry_lists(pair, &case, lists, &[511, 40], true) == at_once);
        // Every entry, without scores.
        entry_lists(pair, &case, (1, 1300, IndexList::Positions), &[1300], false);
    });
}

#[test]
fn entries_that_were_never_appended_are_rejected() {
    let mut pair = DevicePair::new(device(Isa::detect(), true, 2));
    let case = Case::with_values(&mut pair, (9, 1, 4), 2, |_| 1.0);
    let state = case.state(&mut pair);
    let (q, weights, scores) = (case.q, case.weights, case.scores);
    let error = pair.device.run(&Op::TopPositions {
        queries: Some(IndexQueries { q, weights, scores }),
        k: None,
        ratio: 1,
        list: IndexList::Positions,
        spans: &[Span::new(state, 0, 9)],
        out: case.out,
    });
    assert!(error.unwrap_err().to_string().contains("appended"));
}

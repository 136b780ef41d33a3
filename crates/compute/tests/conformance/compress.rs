//! Compress: weighted means of blocks of positions.

use moeflux_compute::{Buffer, Op, Span, StateShape, View};

use crate::harness::{DevicePair, Random, bits, row_chunks};

/// Width, positions of a block, whether blocks overlap, whether there are logits and an `ape`.
type Shape = (usize, usize, bool, [bool; 2]);

struct Case {
    x: View,
    gate: Option<View>,
    ape: Option<Buffer>,
    ratio: usize,
    overlap: bool,
    out: View,
}

impl Case {
    fn new(
        pair: &mut DevicePair,
        random: &mut Random,
        rows: usize,
        (width, ratio, overlap, [gated, has_ape]): Shape,
    ) -> Self {
        let columns = width * (1 + usize::from(overlap));
        let x = pair.random(random, rows, columns + 3).columns(2, columns);
        let gate = gated.then(|| {
            // Weights from equal to nearly one position.
            let logits: Vec<f32> =
                random.values(rows * columns).iter().map(|x| 12.0 * x * x * x).collect();
            pair.dense(rows, &logits)
        });
        let ape = has_ape.then(|| pair.buffer(&random.values(ratio * columns)));
        let out = pair.nan_filled(rows / ratio, width + 1).columns(1, width);
        Self { x, gate, ape, ratio, overlap, out }
    }

    fn state(&self) -> StateShape {
        let slots = self.ratio * (1 + usize::from(self.overlap));
        StateShape::Recurrent { len: slots * self.x.width * (1 + usize::from(self.gate.is_some())) }
    }

    /// Runs rows from `first` on. The entries are those of one sequence.
    fn run(&self, pair: &mut DevicePair, first: usize, spans: &[Span]) {
        let rows = spans.iter().map(|span| span.rows).sum();
        let entries = first / self.ratio..(first + rows) / self.ratio;
        pair.run(&Op::Compress {
            x: self.x.slice(first, rows),
            gate: self.gate.map(|gate| gate.slice(first, rows)),
            ape: self.ape,
            ratio: self.ratio,
            overlap: self.overlap,
            spans,
            out: self.out.slice(entries.start, entries.len()),
        });
    }
}

#[test]
fn entries_do_not_depend_on_the_steps() {
    let mut random = Random::new(111);
    DevicePair::for_each(|pair, _| {
        for shape in [
            (128, 4, true, [true, true]),
            (37, 4, false, [true, true]),
            (70, 4, false, [false, false]),
            (19, 3, true, [true, false]),
            (9, 5, true, [false, false]),
            (33, 2, true, [true, true]),
        ] {
            let case = Case::new(pair, &mut random, 31, shape);
            let mut last = None;
            for chunks in [&[31][..], &[1], &[2], &[3], &[5], &[7], &[4, 1, 9]] {
                let state = pair.state(case.state());
                for rows in row_chunks(31, chunks) {
                    let span = Span::new(state, rows.start, rows.len());
                    case.run(pair, rows.start, &[span]);
                    pair.commit(span);
                }
                pair.agree(&format!("{shape:?}, chunks of {chunks:?}"), case.out, 1e-5);
                let got = bits(&pair.read(case.out));
                assert!(last.is_none_or(|last| last == got), "{shape:?}, {chunks:?}");
                last = Some(got);
            }
        }
    });
}

#[test]
fn long_blocks() {
    let mut random = Random::new(112);
    DevicePair::for_each(|pair, _| {
        for shape in [(130, 128, false, [true, true]), (20, 100, true, [true, true])] {
            let case = Case::new(pair, &mut random, 400, shape);
            let mut last = None;
            for chunks in [&[400][..], &[127, 1, 2, 70]] {
                let state = pair.state(case.state());
                for rows in row_chunks(400, chunks) {
                    let span = Span::new(state, rows.start, rows.len());
                    case.run(pair, rows.start, &[span]);
                    pair.commit(span);
                }
                pair.agree(&format!("{shape:?}, chunks of {chunks:?}"), case.out, 1e-5);
                let got = bits(&pair.read(case.out));
                assert!(last.is_none_or(|last| last == got), "{shape:?}, {chunks:?}");
                last = Some(got);
            }
        }
    });
}

#[test]
fn an_overlap_is_part_a_of_the_block_before() {
    DevicePair::for_each(|pair, _| {
        let x: Vec<f32> = (0..6u8).flat_map(|p| [10.0 * f32::from(p), f32::from(p)]).collect();
        let (x, out) = (pair.dense(6, &x), pair.nan_filled(3, 1));
        let case = Case { x, gate: None, ape: None, ratio: 2, overlap: true, out };
        let state = pair.state(case.state());
        // A state that is not zero: nothing is before position 0.
        case.run(pair, 2, &[Span::new(state, 2, 3)]);
        pair.commit(Span::new(state, 2, 3));
        case.run(pair, 0, &[Span::new(state, 0, 6)]);
        // Positions 0 and 1 in part b; then the two before in part a, and two in part b.
        assert_eq!(pair.read(out), [0.5, 3.75, 14.75]);
    });
}

#[test]
fn spans_that_complete_no_block() {
    let mut random = Random::new(113);
    DevicePair::for_each(|pair, _| {
        let case = Case::new(pair, &mut random, 8, (5, 4, true, [true, true]));
        let state = pair.state(case.state());
        let span = |position, rows| Span::new(state, position, rows);
        // A step without rows keeps the state; one that is not committed is repeated.
        for (step, commits) in [((0, 3), true), ((3, 0), true), ((3, 4), false), ((3, 4), true)] {
            let (position, rows) = step;
            case.run(pair, position, &[span(position, rows)]);
            if commits {
                pair.commit(span(position, rows));
            }
        }
        case.run(pair, 7, &[span(7, 1)]);
        pair.agree("entries", case.out, 1e-5);
    });
}

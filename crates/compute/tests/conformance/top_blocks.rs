//! TopBlocks: the block indexer of sparse attention.

use moeflux_compute::{Op, Span, State, StateShape, View};

use crate::harness::{DevicePair, Random, bits, row_chunks};

/// Heads, their width, positions of a block, last blocks, chosen blocks.
#[derive(Clone, Copy, Debug)]
struct Shape {
    heads: usize,
    width: usize,
    block: usize,
    local: usize,
    chosen: usize,
}

/// Queries and keys. Small integers make the scores exact on every device, and often equal.
struct Case {
    shape: Shape,
    q: View,
    k: View,
    scores: View,
    out: View,
}

impl Case {
    fn new(pair: &mut DevicePair, random: &mut Random, rows: usize, shape: Shape) -> Self {
        let Shape { heads, width, block, chosen, .. } = shape;
        let mut view = |len: usize| {
            let values: Vec<f32> = (0..rows * len).map(|_| random.below(7) as f32 - 3.0).collect();
            pair.dense(rows, &values)
        };
        let (q, k) = (view(heads * width).split(heads), view(width));
        // Room for some rows only.
        let scores = pair.nan_filled(3 * heads + heads / 2, rows.div_ceil(block) + 2);
        let out = pair.nan_filled(rows, heads * chosen * block).split(heads);
        Self { shape, q, k, scores, out }
    }

    fn state(&self, pair: &mut DevicePair) -> State {
        let (key_width, positions) = (self.k.width, self.k.rows);
        pair.state(StateShape::KeyValue { kv_heads: 1, key_width, value_width: 0, positions })
    }

    fn run(&self, pair: &mut DevicePair, first: usize, spans: &[Span]) {
        let rows = spans.iter().map(|s| s.rows).sum();
        pair.run(&Op::TopBlocks {
            q: self.q.slice(first, rows),
            k: self.k.slice(first, rows),
            block: self.shape.block,
            local: self.shape.local,
            spans,
            scores: self.scores,
            out: self.out.slice(first, rows),
        });
    }

    fn in_chunks(&self, pair: &mut DevicePair, chunks: &[usize]) -> Vec<u32> {
        let state = self.state(pair);
        for rows in row_chunks(self.q.rows, chunks) {
            let span = Span::new(state, rows.start, rows.len());
            self.run(pair, rows.start, &[span]);
        }
        pair.agree(&format!("{:?}, chunks of {chunks:?}", self.shape), self.out, 0.0);
        bits(&pair.read(self.out))
    }
}

#[test]
fn blocks_of_any_size() {
    let mut random = Random::new(95);
    DevicePair::for_each(|pair, _| {
        for (rows, heads, width, block, local, chosen) in [
            (9, 1, 1, 1, 1, 1),
            (30, 2, 16, 4, 1, 3),
            (40, 3, 17, 2, 2, 5),
            (40, 17, 8, 8, 1, 2),
            (200, 4, 33, 64, 1, 2),
            (600, 2, 12, 128, 2, 3),
            (600, 5, 4, 256, 1, 1),
        ] {
            let shape = Shape { heads, width, block, local, chosen };
            let case = Case::new(pair, &mut random, rows, shape);
            let at_once = case.in_chunks(pair, &[rows]);
            assert!(case.in_chunks(pair, &[1, 2, 3, 8, 17]) == at_once);
        }
    });
}

#[test]
fn several_sequences_and_the_own_block() {
    let mut random = Random::new(96);
    DevicePair::for_each(|pair, _| {
        let shape = Shape { heads: 2, width: 8, block: 4, local: 1, chosen: 2 };
        let case = Case::new(pair, &mut random, 40, shape);
        let (one, other) = (case.state(pair), case.state(pair));
        let spans = [Span::new(one, 0, 25), Span::new(other, 0, 15)];
        case.run(pair, 0, &spans);
        pair.agree("two sequences", case.out, 0.0);
        // Row 24 is the first of its block, row 2 sees no other block.
        let mut row = |row: usize| pair.read(case.out.slice(row, 1).head(0));
        assert_eq!(row(24)[4..], [24.0, -1.0, -1.0, -1.0]);
        assert_eq!(row(2), [0.0, 1.0, 2.0, -1.0, -1.0, -1.0, -1.0, -1.0]);
    });
}

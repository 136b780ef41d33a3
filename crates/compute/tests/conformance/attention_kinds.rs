//! Attention with sliding windows, sinks and listed positions, and absorbed latent attention (MLA).

use moeflux_compute::{IndexList, Isa, KV_BLOCK, Op, Span, State, View};

use crate::{
    harness::{DevicePair, Random, bits, close, device, read, row_chunks},
    ops::{Attention, cache_of_keys},
};

/// Head counts and widths.
#[derive(Clone, Copy, Debug)]
struct Shape {
    heads: usize,
    kv_heads: usize,
    key: usize,
    value: usize,
    /// Values are a prefix of the keys, as in absorbed MLA.
    latent: bool,
}

const fn grouped(heads: usize, kv_heads: usize, key: usize, value: usize) -> Shape {
    Shape { heads, kv_heads, key, value, latent: false }
}

const fn latent(heads: usize, key: usize, value: usize) -> Shape {
    Shape { heads, kv_heads: 1, key, value, latent: true }
}

impl Shape {
    fn case(self, pair: &mut DevicePair, random: &mut Random, rows: usize) -> Attention {
        let Shape { heads, kv_heads, key, value, latent } = self;
        let q = pair.random(random, rows, heads * key).split(heads);
        let k = pair.f16_values(random, rows, kv_heads * key).split(kv_heads);
        let v = (!latent).then(|| pair.f16_values(random, rows, kv_heads * value).split(kv_heads));
        let out = pair.nan_filled(rows, heads * value).split(heads);
        Attention::new([q, k, out], v, 3.0 / (key as f32).sqrt())
    }

    fn case_with_sinks(self, pair: &mut DevicePair, random: &mut Random, rows: usize) -> Attention {
        let case = self.case(pair, random, rows);
        let sinks: Vec<f32> = random.values(self.heads).iter().map(|x| x * 4.0).collect();
        Attention { sinks: Some(pair.buffer(&sinks)), ..case }
    }

    fn case_with_sinks_and_gate(
        self,
        pair: &mut DevicePair,
        random: &mut Random,
        rows: usize,
    ) -> Attention {
        let case = self.case_with_sinks(pair, random, rows);
        let gate = pair.random(random, rows, self.heads * self.value).split(self.heads);
        Attention { gate: Some(gate), ..case }
    }

    /// Runs all rows from position `start` on in chunks of the given sizes, repeated as needed.
    /// Returns the output's bit patterns.
    fn in_chunks(
        self,
        pair: &mut DevicePair,
        case: &Attention,
        state: State,
        start: usize,
        sizes: &[usize],
    ) -> Vec<u32> {
        for rows in row_chunks(case.q.rows, sizes) {
            case.run(pair, rows.start, &[Span::new(state, start + rows.start, rows.len())]);
        }
        let largest = sizes.iter().copied().max().unwrap_or(0).min(case.q.rows);
        let tolerance = pair.attention_tolerance(largest);
        pair.agree(&format!("{self:?}, chunks of {sizes:?}"), case.out, tolerance);
        bits(&pair.read(case.out))
    }

    /// Whether chunks, with a state for some number of positions, give the bits of all rows at
    /// once.
    fn is_same_in_chunks(
        self,
        pair: &mut DevicePair,
        case: &Attention,
        positions: usize,
        sizes: &[usize],
    ) -> bool {
        let rows = case.q.rows;
        let [one, other] = [rows, positions].map(|positions| pair.state(case.state(positions)));
        let at_once = self.in_chunks(pair, case, one, 0, &[rows]);
        self.in_chunks(pair, case, other, 0, sizes) == at_once
    }
}

#[test]
fn latent_attention_of_any_number_of_heads() {
    let mut random = Random::new(71);
    DevicePair::for_each(|pair, _| {
        for shape in [
            latent(1, 1, 1),
            latent(3, 20, 20),
            latent(5, 72, 64),
            latent(16, 40, 33),
            latent(128, 48, 32),
        ] {
            let case = shape.case(pair, &mut random, 9);
            assert!(shape.is_same_in_chunks(pair, &case, 300, &[4, 1]), "{shape:?}");
        }
        let published = latent(128, 576, 512);
        let case = published.case(pair, &mut random, 2);
        let state = pair.state(case.state(2));
        published.in_chunks(pair, &case, state, 0, &[2]);
    });
}

#[test]
fn attention_sinks_take_weight() {
    let mut random = Random::new(72);
    DevicePair::for_each(|pair, _| {
        for shape in [
            grouped(8, 2, 16, 24),
            grouped(3, 3, 33, 17),
            grouped(4, 1, 192, 128),
            latent(6, 24, 16),
        ] {
            let case = shape.case_with_sinks_and_gate(pair, &mut random, 11);
            assert!(shape.is_same_in_chunks(pair, &case, 11, &[1, 3]), "{shape:?}");
        }
        // A sink far above all scores takes all weight, a sink of minus infinity none.
        let shape = grouped(2, 1, 8, 8);
        let case = shape.case(pair, &mut random, 3);
        let case = Attention { sinks: Some(pair.buffer(&[500.0, f32::NEG_INFINITY])), ..case };
        let state = pair.state(case.state(3));
        shape.in_chunks(pair, &case, state, 0, &[3]);
        assert!(pair.read(case.out.head(0)).iter().all(|x| x.abs() < 1e-30));
        let with = pair.read(case.out.head(1));
        let case = Attention { sinks: None, ..case };
        shape.in_chunks(pair, &case, state, 0, &[3]);
        assert!(pair.read(case.out.head(1)) == with);
    });
}

#[test]
fn sliding_windows_of_any_length() {
    let mut random = Random::new(73);
    DevicePair::for_each(|pair, _| {
        for (shape, window) in [
            (grouped(4, 2, 16, 16), 1),
            (grouped(4, 2, 16, 16), 4),
            (grouped(2, 1, 33, 17), 7),
            (grouped(4, 1, 192, 128), 7),
            (grouped(2, 2, 16, 16), 19),
            (latent(5, 24, 16), 6),
            // A window layer of DeepSeek-V4.
            (latent(64, 512, 512), 9),
            (grouped(2, 2, 16, 16), usize::MAX),
        ] {
            let case = shape.case_with_sinks(pair, &mut random, 19);
            let case = Attention { window: Some(window), ..case };
            let is_same = shape.is_same_in_chunks(pair, &case, 19, &[5, 1, 2]);
            assert!(is_same || pair.is_fast_gpu(), "{shape:?}, {window}");
        }
    });
}

#[test]
fn ring_buffer_that_wraps_several_times() {
    let mut random = Random::new(74);
    let shape = grouped(2, 1, 8, 5);
    DevicePair::for_each_exact(|pair| {
        for (window, ring, chunks) in [
            // The ring holds exactly the window and the rows of one step.
            (KV_BLOCK - 7, KV_BLOCK, &[7][..]),
            (KV_BLOCK - 5, KV_BLOCK, &[5, 1, 3]),
            (40, KV_BLOCK, &[216, 1, 100]),
            (KV_BLOCK + 100, 2 * KV_BLOCK, &[156, 1]),
            (1, KV_BLOCK, &[255, 1]),
        ] {
            let case = Attention { window: Some(window), ..shape.case(pair, &mut random, 700) };
            let is_same = shape.is_same_in_chunks(pair, &case, ring, chunks);
            assert!(is_same, "window {window}, ring of {ring}, {chunks:?}");
        }
        // At a far position, the entries of an earlier window are out of sight.
        let case = Attention { window: Some(50), ..shape.case(pair, &mut random, 300) };
        let state = pair.state(case.state(KV_BLOCK));
        let first = shape.in_chunks(pair, &case, state, 0, &[100]);
        assert!(first.len() == 300 * 10);
        shape.in_chunks(pair, &case, state, 1_000_000 * KV_BLOCK + 300, &[100, 6]);
    });
}

/// Per row, up to `n` random visible positions in ascending order, padded with -1.
fn position_lists(random: &mut Random, first: usize, rows: usize, n: usize) -> Vec<f32> {
    let mut all = Vec::new();
    for position in first..first + rows {
        let mut visible: Vec<usize> = (0..=position).collect();
        while visible.len() > n.min(1 + random.below(n)) {
            visible.remove(random.below(visible.len()));
        }
        all.extend((0..n).map(|i| visible.get(i).map_or(-1.0, |p| *p as f32)));
    }
    all
}

#[test]
fn sparse_positions() {
    let mut random = Random::new(75);
    DevicePair::for_each(|pair, _| {
        for (shape, n) in [
            (grouped(4, 2, 16, 16), 1),
            (grouped(6, 1, 16, 20), 5),
            (latent(20, 40, 33), 4),
            (latent(3, 24, 16), 40),
        ] {
            let case = shape.case_with_sinks(pair, &mut random, 13);
            let positions = Some(pair.dense(13, &position_lists(&mut random, 0, 13, n)));
            let case = Attention { positions, ..case };
            assert!(shape.is_same_in_chunks(pair, &case, 20, &[1, 4]), "{shape:?}, {n}");
        }
    });
}

#[test]
fn sparse_positions_for_each_kv_head() {
    let mut random = Random::new(79);
    DevicePair::for_each(|pair, _| {
        for (rows, shape, n) in [
            (31, grouped(4, 2, 16, 16), 3),
            (31, grouped(9, 3, 40, 24), 8),
            (620, grouped(2, 2, 8, 8), 300),
        ] {
            let case = shape.case(pair, &mut random, rows);
            // As many positions in all lists of a row.
            let list = |position: usize, head: usize| {
                let count = n.min(1 + position / 2);
                let first = if head == 1 { 0 } else { position + 1 - count };
                (0..n).map(move |i| if i < count { (first + i) as f32 } else { -1.0 })
            };
            let heads = (0..rows).flat_map(|p| (0..shape.kv_heads).map(move |h| (p, h)));
            let lists: Vec<f32> = heads.flat_map(|(position, head)| list(position, head)).collect();
            let lists = pair.dense(rows, &lists).split(shape.kv_heads);
            let case = Attention { positions: Some(lists), ..case };
            let is_same = shape.is_same_in_chunks(pair, &case, rows + 7, &[1, 2, 3, 8, 17]);
            assert!(is_same, "{shape:?}, {n}");
        }
    });
}

#[test]
fn more_sparse_positions_than_a_kv_block() {
    let mut random = Random::new(76);
    DevicePair::for_each_exact(|pair| {
        let shape = latent(3, 12, 8);
        let case = shape.case(pair, &mut random, 600);
        let names: Vec<f32> = position_lists(&mut random, 0, 600, 300);
        let case = Attention { positions: Some(pair.dense(600, &names)), ..case };
        let [one, other] = [0; 2].map(|_| pair.state(case.state(600)));
        let at_once = shape.in_chunks(pair, &case, one, 0, &[600]);
        assert!(shape.in_chunks(pair, &case, other, 0, &[255, 1, 30]) == at_once);
        // A list of all positions gives the same bits as no list.
        let all: Vec<f32> = (0..600)
            .flat_map(|p| (0..600).map(move |t| if t > p { -1.0 } else { t as f32 }))
            .collect();
        let case = Attention { positions: Some(pair.dense(600, &all)), ..case };
        let listed = shape.in_chunks(pair, &case, one, 0, &[600]);
        let case = Attention { positions: None, ..case };
        assert!(shape.in_chunks(pair, &case, other, 0, &[600]) == listed);
    });
}

/// Attention of DeepSeek-V4 in one KV cache: a ring of the last positions, then an entry for every
/// `ratio` positions. Values are keys.
struct RingAndEntries {
    heads: usize,
    width: usize,
    window: usize,
    ring: usize,
    ratio: usize,
}

/// A sequence of [`RingAndEntries`].
struct RingSequence {
    state: State,
    position: usize,
    /// Keys of all positions, then of all entries.
    keys: Vec<f32>,
    entries: Vec<f32>,
}

impl RingAndEntries {
    fn sequence(&self, pair: &mut DevicePair, random: &mut Random, len: usize) -> RingSequence {
        let &Self { width, ring, ratio, .. } = self;
        let positions = ring + len / ratio;
        let state = pair.state(cache_of_keys(width, positions));
        let [keys, entries] = [len, len / ratio].map(|rows| random.f16_values(rows * width));
        RingSequence { state, position: 0, keys, entries }
    }

    /// Output of a head of a row at `position`.
    fn expected(&self, sequence: &RingSequence, position: usize, q: &[f32], sink: f32) -> Vec<f32> {
        let row = |rows: &[f32], i: usize| rows[i * self.width..][..self.width].to_vec();
        let recent = (position + 1).saturating_sub(self.window)..=position;
        let entries = 0..(position + 1) / self.ratio;
        let visible: Vec<Vec<f32>> = recent
            .map(|t| row(&sequence.keys, t))
            .chain(entries.map(|t| row(&sequence.entries, t)))
            .collect();
        let (mut total, mut y) = (f64::from(sink).exp(), vec![0.0; self.width]);
        for key in visible {
            let score: f64 = q.iter().zip(&key).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
            let weight = (score * f64::from(self.scale())).exp();
            total += weight;
            y.iter_mut().zip(&key).for_each(|(y, k)| *y += weight * f64::from(*k));
        }
        y.into_iter().map(|y| (y / total) as f32).collect()
    }

    fn scale(&self) -> f32 {
        2.0 / (self.width as f32).sqrt()
    }

    /// Runs a step of `rows` rows of each sequence, and checks it.
    fn step(
        &self,
        pair: &mut DevicePair,
        random: &mut Random,
        sequences: &mut [RingSequence],
        rows: &[usize],
    ) {
        let &Self { heads, width, window, ring, ratio } = self;
        let (mut positions, mut spans, mut entry_spans) = (Vec::new(), Vec::new(), Vec::new());
        let (mut keys, mut entries) = (Vec::new(), Vec::new());
        for (sequence, rows) in sequences.iter().zip(rows) {
            let RingSequence { state, position, .. } = *sequence;
            positions.push(Span::new(state, position, *rows));
            spans.push(Span::new(state, position % ring, *rows));
            keys.extend(&sequence.keys[position * width..(position + rows) * width]);
            let new = position / ratio..(position + rows) / ratio;
            entry_spans.push(Span::new(state, ring + new.start, new.len()));
            entries.extend(&sequence.entries[new.start * width..new.end * width]);
        }
        let all: usize = rows.iter().sum();
        if !entries.is_empty() {
            let k = pair.dense(entries.len() / width, &entries);
            pair.run(&Op::Append { k, v: None, spans: &entry_spans });
        }
        let room = positions.iter().map(|s| (s.position + s.rows) / ratio).max().unwrap() + 3;
        let list = pair.nan_filled(all, window + room);
        pair.run(&Op::TopPositions {
            queries: None,
            k: None,
            ratio,
            list: IndexList::Window { window, ring },
            spans: &positions,
            out: list,
        });
        let sink_values = random.values(heads);
        let q = pair.random(random, all, heads * width).split(heads);
        let out = pair.nan_filled(all, heads * width).split(heads);
        let k = pair.dense(all, &keys);
        let sinks = Some(pair.buffer(&sink_values));
        let all_positions = Attention::new([q, k, out], None, self.scale());
        let attention = Attention { sinks, positions: Some(list), ..all_positions };
        pair.run(&attention.op(&spans));
        let what = format!("{rows:?} rows at {positions:?}");
        pair.agree(&what, out, 1e-5);
        let queries = pair.read(q);
        let mut queries = queries.chunks(width);
        let mut expected = Vec::new();
        for (sequence, rows) in sequences.iter_mut().zip(rows) {
            for position in sequence.position..sequence.position + rows {
                for sink in &sink_values {
                    let q = queries.next().unwrap();
                    expected.extend(self.expected(sequence, position, q, *sink));
                }
            }
            sequence.position += rows;
        }
        close(&what, &pair.read(out), &expected, 1e-5);
    }
}

#[test]
fn lists_of_a_ring_and_of_entries_after_it() {
    let mut random = Random::new(80);
    DevicePair::for_each(|pair, _| {
        let random = &mut random;
        // Lists of a row have larger numbers than its place in the ring.
        let small = RingAndEntries { heads: 5, width: 512, window: 8, ring: 16, ratio: 4 };
        let mut sequences = [40, 30].map(|len| small.sequence(pair, random, len));
        for rows in [[8, 3], [8, 5], [1, 1], [1, 1], [6, 6], [8, 0], [1, 1], [5, 7]] {
            small.step(pair, random, &mut sequences, &rows);
        }
        // Entries in several pages, from the middle of one on.
        let large = RingAndEntries { heads: 3, width: 16, window: 300, ring: 600, ratio: 2 };
        let mut sequences = [620, 20].map(|len| large.sequence(pair, random, len));
        for rows in [[590, 8], [1, 1], [9, 7], [1, 1], [17, 2]] {
            large.step(pair, random, &mut sequences, &rows);
        }
    });
}

#[test]
fn invalid_position_lists_do_not_panic() {
    let mut random = Random::new(77);
    DevicePair::for_each(|pair, _| {
        let case = grouped(2, 1, 8, 8).case(pair, &mut random, 5);
        let state = pair.state(case.state(5));
        let wild = [f32::NAN, -1.0, 1e30, f32::INFINITY, 0.5, 7.0, -0.0, 3.0, -1.0, -1.0];
        let case = Attention { positions: Some(pair.dense(5, &wild)), ..case };
        case.run(pair, 0, &[Span::new(state, 0, 5)]);
        // A row with an empty list has a zero output.
        assert!(pair.read(case.out.slice(4, 1)).iter().all(|x| *x == 0.0));
    });
}

#[test]
fn results_do_not_depend_on_threads_or_batching() {
    let mut outs = Vec::new();
    for threads in [1, 2, 3, 7] {
        let mut random = Random::new(78);
        let mut pair = DevicePair::new(device(Isa::detect(), false, threads));
        let mut shape_outputs = Vec::new();
        for (shape, kind) in [
            (latent(128, 40, 32), 0),
            (latent(12, 40, 32), 2),
            (grouped(8, 2, 16, 16), 1),
            (grouped(5, 5, 16, 16), 0),
        ] {
            let case = shape.case_with_sinks(&mut pair, &mut random, 12);
            let case = match kind {
                0 => case,
                1 => Attention { window: Some(5), ..case },
                _ => {
                    let mut names = position_lists(&mut random, 0, 7, 4);
                    names.extend(position_lists(&mut random, 0, 5, 4));
                    Attention { positions: Some(pair.dense(12, &names)), ..case }
                }
            };
            let [one, other] = [0; 2].map(|_| pair.state(case.state(12)));
            let spans = [Span::new(one, 0, 7), Span::new(other, 0, 5)];
            case.run(&mut pair, 0, &spans);
            pair.agree(&format!("{shape:?}"), case.out, 1e-5);
            let together = bits(&pair.read(case.out));
            case.run(&mut pair, 7, &[Span::new(one, 0, 5)]);
            assert!(bits(&pair.read(case.out)) == together);
            shape_outputs.push(together);
        }
        outs.push(shape_outputs);
    }
    assert!(outs.windows(2).all(|pair| pair[0] == pair[1]));
}

/// Steps of answers and prompts: each row has the bits that its sequence has alone.
#[test]
fn sequences_of_a_step_have_the_bits_of_each_alone() {
    const LENS: [[usize; 2]; 5] = [[40, 1], [3, 1], [0, 17], [290, 5], [64, 1]];
    let rows: usize = LENS.iter().map(|[before, now]| before + now).sum();
    let mut random = Random::new(80);
    DevicePair::for_each(|pair, is_exact| {
        // Kernels of a card depend on the rows of a step.
        if pair.is_gpu() {
            return;
        }
        for (shape, n, window) in [
            (latent(16, 40, 33), None, None),
            (latent(16, 40, 33), Some(9), None),
            (grouped(8, 2, 32, 16), None, None),
            (grouped(8, 2, 32, 16), Some(30), None),
            (grouped(6, 1, 16, 20), None, Some(20)),
        ] {
            let case = shape.case_with_sinks(pair, &mut random, rows);
            let lists: Option<Vec<f32>> = n.map(|n| {
                let all = |[before, now]: [usize; 2]| [(0, before), (before, now)];
                let lens = LENS.iter().copied().map(all);
                let [earlier, later] =
                    [0, 1].map(|i| lens.clone().map(move |parts| parts[i]).collect::<Vec<_>>());
                let parts = [earlier, later].concat().into_iter();
                parts.flat_map(|(at, rows)| position_lists(&mut random, at, rows, n)).collect()
            });
            let positions = lists.map(|lists| pair.dense(rows, &lists));
            let case = Attention { window, positions, ..case };
            let (mut first, mut spans) = (0, Vec::new());
            for [before, now] in LENS {
                let state = pair.state(case.state(before + now));
                if before > 0 {
                    case.run(pair, first, &[Span::new(state, 0, before)]);
                }
                first += before;
                spans.push(Span::new(state, before, now));
            }
            case.run(pair, first, &spans);
            let together = bits(&pair.read(case.out));
            let mut row = first;
            for span in spans {
                case.run(pair, row, &[span]);
                row += span.rows;
            }
            assert!(bits(&pair.read(case.out)) == together, "{shape:?}, {n:?}, exact: {is_exact}");
        }
    });
}

#[test]
fn long_contexts_with_split_kv() {
    let mut random = Random::new(79);
    DevicePair::for_each(|pair, _| {
        for (shape, window) in [
            (grouped(8, 1, 40, 24), usize::MAX),
            (grouped(3, 3, 33, 17), 290),
            (latent(20, 24, 13), usize::MAX),
        ] {
            let case = shape.case_with_sinks_and_gate(pair, &mut random, 330);
            let [one, other] = [330, 512].map(|positions| pair.state(case.state(positions)));
            let mut outs = Vec::new();
            for (state, last) in [(one, 3), (other, 3), (other, 1)] {
                // A window of 1 fills the KV cache at little cost.
                let prefill = Attention { window: Some(1), sinks: None, gate: None, ..case };
                prefill.run(pair, 0, &[Span::new(state, 0, 327)]);
                let case = Attention { window: Some(window), ..case };
                for first in (327..330).step_by(last) {
                    case.run(pair, first, &[Span::new(state, first, last)]);
                }
                pair.agree(&format!("{shape:?}"), case.out.slice(327, 3), 1e-5);
                outs.push(bits(&pair.read(case.out)));
            }
            // Neither earlier contents of the state nor the other rows of the op change a bit.
            assert!(outs.windows(2).all(|pair| pair[0] == pair[1]), "{shape:?}");
        }
    });
}

#[test]
fn values_beyond_f16_saturate() {
    let mut random = Random::new(82);
    DevicePair::for_each(|pair, exact| {
        let case = grouped(1, 1, 8, 4).case(pair, &mut random, 2);
        let v = pair.dense(2, &[1e6, -1e6, 65_519.0, f32::INFINITY].repeat(2)).split(1);
        let case = Attention { v: Some(v), ..case };
        let state = pair.state(case.state(2));
        case.run(pair, 0, &[Span::new(state, 0, 2)]);
        let expected = if exact { [1e6, -1e6, 65_519.0] } else { [65_504.0, -65_504.0, 65_504.0] };
        for row in pair.read(case.out).chunks(4) {
            close(&pair.device.describe(), &row[..3], &expected, 1e-5);
            assert_eq!(row[3].is_finite(), !exact, "{}", pair.device.describe());
        }
    });
}

#[test]
fn many_heads_with_wide_values_over_many_kv_blocks() {
    // Scratch does not hold the partial results of all KV blocks at once. Together, the rows are
    // enough tiles for all threads.
    let (shape, positions, rows) = (grouped(128, 1, 8, 1024), 4 * KV_BLOCK, 4);
    for exact in [true, false] {
        let outs: Vec<_> = [(1, 1), (2, 1), (5, 1), (3, rows)]
            .into_iter()
            .map(|(threads, together)| {
                let mut random = Random::new(83);
                let mut device = device(Isa::detect(), exact, threads);
                let mut view = |rows: usize, heads: usize, width: usize| {
                    let buffer = device.buffer(rows * heads * width).unwrap();
                    device.write(buffer, &random.values(rows * heads * width)).unwrap();
                    View::rows(buffer, rows, heads * width).split(heads)
                };
                let (k, v) = (view(positions, 1, shape.key), view(positions, 1, shape.value));
                let (fill, filled) =
                    (view(positions, 1, shape.key), view(positions, 1, shape.value));
                let (q, out) =
                    (view(rows, shape.heads, shape.key), view(rows, shape.heads, shape.value));
                let attention =
                    |[q, k, v, out]: [View; 4]| Attention::new([q, k, out], Some(v), 0.3);
                let state = device.state(attention([q, k, v, out]).state(positions)).unwrap();
                let mut run = |views: [View; 4], position, window| {
                    let span = Span::new(state, position, views[0].rows);
                    let attention = Attention { window, ..attention(views) };
                    device.run(&attention.op(&[span])).unwrap();
                };
                run([fill, k, v, filled], 0, Some(1));
                for row in (0..rows).step_by(together) {
                    let position = positions - rows + row;
                    let [k, v] = [k, v].map(|view| view.slice(position, together));
                    let [q, out] = [q, out].map(|view| view.slice(row, together));
                    run([q, k, v, out], position, None);
                }
                bits(&read(&mut *device, out))
            })
            .collect();
        assert!(outs.windows(2).all(|pair| pair[0] == pair[1]), "exact {exact}");
    }
}

#[test]
fn kv_rounded_to_f16() {
    let mut random = Random::new(80);
    DevicePair::for_each(|pair, _| {
        let tolerance =
            pair.attention_tolerance(40).max(if pair.keeps_f16_kv() { 2e-3 } else { 0.0 });
        for shape in [grouped(6, 2, 33, 20), latent(20, 24, 16)] {
            let case = shape.case(pair, &mut random, 40);
            let k = pair.random(&mut random, 40, shape.kv_heads * shape.key).split(shape.kv_heads);
            let v = case
                .v
                .map(|v| pair.random(&mut random, 40, shape.kv_heads * shape.value).split(v.heads));
            let case = Attention { k, v, ..case };
            let state = pair.state(case.state(40));
            case.run(pair, 0, &[Span::new(state, 0, 40)]);
            pair.agree("KV rounded to f16", case.out, tolerance);
        }
    });
}

#[test]
fn many_rows_in_large_chunks() {
    let mut random = Random::new(81);
    DevicePair::for_each(|pair, _| {
        for (shape, window, ring) in [
            (grouped(6, 2, 33, 17), usize::MAX, 83),
            (grouped(5, 5, 72, 130), 30, KV_BLOCK),
            (grouped(16, 1, 24, 8), 230, KV_BLOCK),
            (latent(70, 48, 39), usize::MAX, 100),
        ] {
            let case = shape.case_with_sinks_and_gate(pair, &mut random, 83);
            let case = Attention { window: Some(window), ..case };
            let start = if ring == KV_BLOCK { 2 * KV_BLOCK - 50 } else { 0 };
            let [one, other] =
                [ring, ring + KV_BLOCK].map(|positions| pair.state(case.state(positions)));
            let chunks = shape.in_chunks(pair, &case, one, start, &[26, 16, 25]);
            let others = shape.in_chunks(pair, &case, other, start, &[20, 26, 17]);
            assert!(others == chunks, "{shape:?}, {window}");
        }
    });
}

//! Attention within segments of rows: towers of images.

use moeflux_compute::{Isa, Op, View};

use crate::harness::{DevicePair, Random, bits, device, read};

/// Heads and their width, as queries, keys and values of one matrix.
#[derive(Clone, Copy)]
struct Heads {
    heads: usize,
    kv_heads: usize,
    key: usize,
    value: usize,
}

impl Heads {
    const fn same(heads: usize, width: usize) -> Self {
        Self { heads, kv_heads: heads, key: width, value: width }
    }

    /// Columns of queries, keys and values together, with a gap after the queries.
    const fn columns(&self) -> usize {
        self.heads * self.key + 1 + self.kv_heads * (self.key + self.value)
    }

    /// Queries, keys and values.
    fn split(&self, all: View) -> [View; 3] {
        let Self { heads, kv_heads, key, value } = *self;
        let k = heads * key + 1;
        [
            all.columns(0, heads * key).split(heads),
            all.columns(k, kv_heads * key).split(kv_heads),
            all.columns(k + kv_heads * key, kv_heads * value).split(kv_heads),
        ]
    }
}

/// Heads of towers: Qwen3-VL, Kimi and Gemma 4; GLM-4V; small tests; fewer key heads; values of
/// another width than keys; around vectors of all instruction sets; wide ones; columns of zeros in
/// tiles of cooperative matrices.
const HEADS: [Heads; 12] = [
    Heads::same(2, 72),
    Heads::same(2, 128),
    Heads::same(3, 64),
    Heads::same(3, 16),
    Heads::same(2, 12),
    Heads::same(1, 1),
    Heads { heads: 6, kv_heads: 2, key: 40, value: 40 },
    Heads { heads: 4, kv_heads: 1, key: 33, value: 7 },
    Heads { heads: 1, kv_heads: 1, key: 5, value: 130 },
    Heads { heads: 1, kv_heads: 1, key: 300, value: 512 },
    Heads { heads: 2, kv_heads: 1, key: 16, value: 112 },
    Heads { heads: 2, kv_heads: 2, key: 100, value: 4 },
];

/// Segments of one row, and around the blocks of devices.
const SEGMENTS: [&[usize]; 5] =
    [&[1], &[1, 1, 5, 2], &[64, 65], &[127, 3, 129], &[48, 1, 7, 257, 5]];

#[test]
fn segments_of_any_length_and_heads_of_any_width() {
    let mut random = Random::new(211);
    DevicePair::for_each(|pair, _| {
        for heads in HEADS {
            for segments in SEGMENTS {
                let rows = segments.iter().sum();
                let all = pair.random(&mut random, rows, heads.columns());
                let [q, k, v] = heads.split(all);
                let Heads { heads, kv_heads, key, value } = heads;
                let out = pair.nan_filled(rows, heads * (value + 3));
                let out = View { width: value, ..out.split(heads) };
                let scale = 1.0 / (key as f32).sqrt();
                pair.run(&Op::SegmentAttention { q, k, v, scale, segments, out });
                let what = format!("{heads}/{kv_heads} heads of {key}, {value}; {segments:?}");
                // Rows of short segments are larger than rows of long ones.
                let mut first = 0;
                for rows in segments {
                    let tolerance = pair.segment_tolerance(key, value);
                    pair.agree(&what, out.slice(first, *rows), tolerance);
                    first += rows;
                }
            }
        }
    });
}

/// Weights of a few keys, and maxima that grow from block to block.
#[test]
fn scores_of_any_size() {
    let mut random = Random::new(212);
    DevicePair::for_each(|pair, _| {
        // No heads of cooperative matrices: f16 changes large scores beyond use.
        let (rows, heads) = (300, Heads::same(2, 22));
        let mut values = random.values(rows * heads.columns());
        for (i, x) in values.iter_mut().enumerate() {
            *x *= 1.0 + (i / heads.columns()) as f32 / 100.0;
        }
        let all = pair.dense(rows, &values);
        let [q, k, v] = heads.split(all);
        for scale in [1.0, 8.0, -1.0, 0.0] {
            let out = pair.nan_filled(rows, 2 * 22).split(2);
            pair.run(&Op::SegmentAttention { q, k, v, scale, segments: &[280, 20], out });
            // Large scores magnify the rounding of their products.
            let tolerance = if scale == 8.0 { 1e-4 } else { 1e-5 };
            pair.agree(&format!("scale {scale}"), out, tolerance);
        }
    });
}

#[test]
fn a_segment_has_the_bits_that_it_has_alone() {
    let mut random = Random::new(213);
    DevicePair::for_each(|pair, _| {
        for heads in [Heads::same(2, 72), HEADS[6]] {
            let segments = [3, 200, 1, 77, 300];
            let rows = segments.iter().sum();
            let all = pair.random(&mut random, rows, heads.columns());
            let [q, k, v] = heads.split(all);
            let mut run = |views: [View; 3], segments: &[usize]| {
                let [q, k, v] = views;
                let out = pair.nan_filled(q.rows, heads.heads * heads.value).split(heads.heads);
                pair.run(&Op::SegmentAttention { q, k, v, scale: 0.3, segments, out });
                bits(&pair.read(out))
            };
            let together = run([q, k, v], &segments);
            let mut alone = Vec::new();
            for len in segments {
                let first = alone.len() / (heads.heads * heads.value);
                alone.extend(run([q, k, v].map(|view| view.slice(first, len)), &[len]));
            }
            assert_eq!(together, alone);
        }
    });
}

#[test]
fn segments_do_not_depend_on_the_number_of_threads() {
    let heads = Heads { heads: 4, kv_heads: 2, key: 72, value: 72 };
    let (rows, segments) = (500, &[130, 369, 1]);
    let values = Random::new(214).values(rows * heads.columns());
    let outs: Vec<_> = [1, 2, 3, 8]
        .into_iter()
        .map(|threads| {
            let mut device = device(Isa::detect(), true, threads);
            let buffer = device.buffer(values.len()).unwrap();
            device.write(buffer, &values).unwrap();
            let [q, k, v] = heads.split(View::rows(buffer, rows, heads.columns()));
            let out = device.buffer(rows * 4 * 72).unwrap();
            let out = View::rows(out, rows, 4 * 72).split(4);
            device.run(&Op::SegmentAttention { q, k, v, scale: 0.1, segments, out }).unwrap();
            bits(&read(&mut *device, out))
        })
        .collect();
    assert!(outs.windows(2).all(|pair| pair[0] == pair[1]));
}

/// A NaN in one segment stays there.
#[test]
fn non_finite_values_stay_in_their_segment() {
    let mut random = Random::new(215);
    DevicePair::for_each(|pair, _| {
        let heads = Heads::same(1, 20);
        let mut values = random.values(90 * heads.columns());
        values[75 * heads.columns()..].fill(f32::NAN);
        let all = pair.dense(90, &values);
        let [q, k, v] = heads.split(all);
        let out = pair.nan_filled(90, 20);
        pair.run(&Op::SegmentAttention { q, k, v, scale: 0.3, segments: &[75, 15], out });
        let tolerance = pair.segment_tolerance(20, 20);
        pair.agree("rows before", out.slice(0, 75), tolerance);
    });
}

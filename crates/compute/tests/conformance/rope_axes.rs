//! RoPE with positions of several axes: towers of images, and text with images.

use moeflux_compute::{Op, ROPE_AXES, RopePairs, RopePositions, Span, StateShape, View};

use crate::harness::{DevicePair, Random, bits};

/// All layouts of pairs.
const LAYOUTS: [RopePairs; 3] = [RopePairs::Halves, RopePairs::Interleaved, RopePairs::SplitHalves];

/// Frequencies of `count` pairs.
fn frequencies(count: usize) -> Vec<f32> {
    (0..count).map(|i| 1e4f32.powf(-(i as f32) / count as f32)).collect()
}

/// Position ids of some rows below a bound.
fn ids(random: &mut Random, rows: usize, bound: usize) -> Vec<[u32; ROPE_AXES]> {
    (0..rows).map(|_| [0; ROPE_AXES].map(|_| random.below(bound) as u32)).collect()
}

/// Axes of pairs in Qwen3-VL's tower, in Kimi's tower, in interleaved M-RoPE and in M-RoPE by
/// sections.
fn axes(count: usize) -> [Vec<u8>; 4] {
    [
        (0..count).map(|i| 1 + u8::from(i >= count / 2)).collect(),
        (0..count).map(|i| 2 - (i % 2) as u8).collect(),
        (0..count).map(|i| (i % 3) as u8).collect(),
        (0..count).map(|i| (3 * i / count) as u8).collect(),
    ]
}

#[test]
fn rope_of_axes_in_every_layout() {
    let mut random = Random::new(117);
    DevicePair::for_each(|pair, _| {
        // Heads of 72 and 64 of towers, of 256 with 64 rotated elements; more angles than a block.
        for (width, rotated) in [(4, 4), (72, 72), (64, 64), (256, 64), (300, 260)] {
            let frequencies = frequencies(rotated / 2);
            for (axes, pairs) in
                axes(rotated / 2).iter().flat_map(|axes| LAYOUTS.map(|pairs| (axes, pairs)))
            {
                let all = pair.random(&mut random, 5, 3 * (width + 3) + 1);
                let x = View { offset: 1, heads: 3, width, head_stride: width + 3, ..all };
                let ids = ids(&mut random, 5, 1_000_000);
                let (frequencies, scale) = (&*frequencies, 1.2);
                let positions = RopePositions::Axes { axes, ids: &ids };
                let out = View { heads: 3, ..pair.nan_filled(5, 4 * width).split(4) };
                let what = format!("{width}, {rotated}, {pairs:?}, {axes:?}");
                pair.run(&Op::Rope { x, frequencies, pairs, scale, positions, out });
                pair.agree(&what, out, 1e-5);
                pair.run(&Op::Rope { x, frequencies, pairs, scale, positions, out: x });
                pair.agree(&format!("{what}, in place"), all, 1e-5);
            }
        }
    });
}

#[test]
fn equal_ids_have_the_bits_of_plain_positions() {
    let mut random = Random::new(118);
    DevicePair::for_each(|pair, _| {
        let state = pair.state(StateShape::Recurrent { len: 0 });
        let frequencies = &*frequencies(36);
        for (axes, pairs) in axes(36).iter().flat_map(|axes| LAYOUTS.map(|pairs| (axes, pairs))) {
            let x = pair.random(&mut random, 7, 3 * 80).split(3);
            let spans = [Span::new(state, 1_000_003, 7)];
            let ids: Vec<_> = (0..7).map(|row| [1_000_003 + row; ROPE_AXES]).collect();
            let forms = [RopePositions::Spans(&spans), RopePositions::Axes { axes, ids: &ids }];
            let [plain, by_axis] = forms.map(|positions| {
                let out = pair.nan_filled(7, 3 * 80).split(3);
                pair.run(&Op::Rope { x, frequencies, pairs, scale: 1.2, positions, out });
                bits(&pair.read(out))
            });
            assert_eq!(plain, by_axis, "{pairs:?}, {axes:?}");
        }
    });
}

/// Gemma's tower: the first half of a head turns by columns, the second by rows.
#[test]
fn split_halves_are_halves_of_each_half() {
    let mut random = Random::new(119);
    DevicePair::for_each(|pair, _| {
        let (frequencies, scale) = (&*frequencies(18), 1.0);
        let both = [frequencies, frequencies].concat();
        let x = pair.random(&mut random, 6, 2 * 72).split(2);
        let ids = &*ids(&mut random, 6, 100);
        let axes: Vec<u8> = (0..36).map(|i| 2 - u8::from(i >= 18)).collect();
        let positions = RopePositions::Axes { axes: &axes, ids };
        let whole = pair.nan_filled(6, 2 * 72).split(2);
        let pairs = RopePairs::SplitHalves;
        pair.run(&Op::Rope { x, frequencies: &both, pairs, scale, positions, out: whole });
        let halves = pair.nan_filled(6, 2 * 72).split(2);
        for (first, axis) in [(0, 2), (36, 1)] {
            let [x, out] = [x, halves].map(|view| view.slice_width(first, 36));
            let positions = RopePositions::Axes { axes: &[axis; 18], ids };
            pair.run(&Op::Rope { x, frequencies, pairs: RopePairs::Halves, scale, positions, out });
        }
        assert_eq!(bits(&pair.read(whole)), bits(&pair.read(halves)));
    });
}

/// More angles than a GPU uploads at once.
#[test]
fn rope_of_many_patches() {
    let mut random = Random::new(120);
    DevicePair::for_each(|pair, _| {
        let (rows, frequencies) = (17_000, &*frequencies(36));
        let x = pair.random(&mut random, rows, 72);
        let ids: Vec<_> = (0..rows as u32).map(|row| [0, row / 128, row % 128]).collect();
        let [axes, ..] = &axes(36);
        let positions = RopePositions::Axes { axes, ids: &ids };
        for pairs in LAYOUTS {
            pair.run(&Op::Rope { x, frequencies, pairs, scale: 1.0, positions, out: x });
            pair.agree(&format!("{rows} rows, {pairs:?}"), x, 1e-5);
        }
    });
}

/// Norm, M-RoPE and attention, which a device may fuse. Positions repeat and fall; the KV cache
/// goes by index.
#[test]
fn attention_after_rope_of_axes() {
    let mut random = Random::new(121);
    DevicePair::for_each(|pair, is_exact| {
        let (heads, kv_heads, width) = (6, 2, 32);
        let frequencies = &*frequencies(12);
        let axes: Vec<u8> = (0..12).map(|i| (i % 3) as u8).collect();
        for pairs in LAYOUTS {
            let state = pair.state(StateShape::KeyValue {
                kv_heads,
                key_width: width,
                value_width: width,
                positions: 64,
            });
            let mut position = 0;
            for rows in [5, 1, 19, 1, 2] {
                let q = pair.random(&mut random, rows, heads * width).split(heads);
                let k = pair.random(&mut random, rows, kv_heads * width).split(kv_heads);
                let v = Some(pair.f16_values(&mut random, rows, kv_heads * width).split(kv_heads));
                let ids = ids(&mut random, rows, 30);
                let positions = RopePositions::Axes { axes: &axes, ids: &ids };
                let eps = 1e-6;
                for x in [q, k] {
                    pair.run(&Op::RmsNorm { x, weight: None, per_head: false, eps, out: x });
                }
                for x in [q, k] {
                    pair.run(&Op::Rope { x, frequencies, pairs, scale: 1.0, positions, out: x });
                }
                let out = pair.nan_filled(rows, heads * width).split(heads);
                let span = Span::new(state, position, rows);
                pair.run(&Op::Attention {
                    q,
                    k,
                    v,
                    gate: None,
                    scale: 0.2,
                    window: None,
                    sinks: None,
                    positions: None,
                    spans: &[span],
                    out,
                });
                pair.commit(span);
                position += rows;
                let tolerance = if is_exact { 1e-5 } else { 4e-3 };
                pair.agree(&format!("{rows} rows, {pairs:?}"), out, tolerance);
            }
        }
    });
}

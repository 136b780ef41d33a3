//! Attention with a full KV cache, and Rope.

use moeflux_compute::{Isa, Op, RopePairs, RopePositions, Span, StateShape, View};

use crate::{
    harness::{DevicePair, Random, bits, device, read},
    ops::Attention,
};

/// Query heads, KV heads, key width, value width.
const SHAPES: [(usize, usize, usize, usize); 6] = [
    (1, 1, 1, 1),
    (4, 4, 16, 16),
    (6, 2, 33, 17),
    (8, 1, 64, 128),
    (5, 1, 256, 256),
    NARROW_VALUES,
];

/// Values narrower than keys, as in MiMo-V2-Flash.
const NARROW_VALUES: (usize, usize, usize, usize) = (8, 2, 192, 128);

/// Queries and gates are interleaved per head, as in the projection of Qwen3.5.
fn case(
    pair: &mut DevicePair,
    random: &mut Random,
    rows: usize,
    shape: (usize, usize, usize, usize),
    gated: bool,
) -> Attention {
    let (heads, kv_heads, key, value) = shape;
    let gated = gated && key == value;
    let qg_width = if gated { 2 * key } else { key };
    let qg = pair.random(random, rows, heads * qg_width);
    let q = View { heads, width: key, head_stride: qg_width, ..qg };
    let k = pair.f16_values(random, rows, kv_heads * key).split(kv_heads);
    let v = pair.f16_values(random, rows, kv_heads * value).split(kv_heads);
    let out = pair.nan_filled(rows, heads * value).split(heads);
    let gate = gated.then_some(View { offset: key, ..q });
    Attention { gate, ..Attention::new([q, k, out], Some(v), 3.0 / (key as f32).sqrt()) }
}

#[test]
fn prefill_in_one_chunk() {
    let mut random = Random::new(11);
    DevicePair::for_each(|pair, _| {
        for shape in SHAPES {
            for (rows, gated) in [(1, false), (3, true), (11, true)] {
                let case = case(pair, &mut random, rows, shape, gated);
                let state = pair.state(case.state(rows));
                case.run(pair, 0, &[Span::new(state, 0, rows)]);
                pair.agree(&format!("{shape:?}, {rows} rows"), case.out, 1e-5);
            }
        }
    });
}

#[test]
fn more_positions_than_a_kv_block() {
    let mut random = Random::new(12);
    DevicePair::for_each_exact(|pair| {
        let case = case(pair, &mut random, 600, (4, 2, 24, 20), false);
        let state = pair.state(case.state(600));
        case.run(pair, 0, &[Span::new(state, 0, 600)]);
        pair.agree("600 rows", case.out, 1e-5);
        // Rows at KV block boundaries have the same bits when they run again in other chunks.
        let together = bits(&pair.read(case.out));
        for (first, rows) in [(254, 1), (255, 1), (256, 1), (255, 3), (509, 7)] {
            case.run(pair, first, &[Span::new(state, first, rows)]);
        }
        assert!(bits(&pair.read(case.out)) == together);
    });
}

#[test]
fn many_rows_with_head_widths_of_whole_tiles() {
    let mut random = Random::new(16);
    DevicePair::for_each(|pair, _| {
        for (shape, gated) in [
            ((8, 1, 128, 128), true),
            ((4, 2, 48, 64), false),
            ((3, 1, 64, 16), false),
            (NARROW_VALUES, false),
        ] {
            let case = case(pair, &mut random, 90, shape, gated);
            let state = pair.state(case.state(90));
            case.run(pair, 0, &[Span::new(state, 0, 40)]);
            case.run(pair, 40, &[Span::new(state, 40, 50)]);
            pair.agree(&format!("{shape:?}"), case.out, pair.attention_tolerance(50));
        }
    });
}

#[test]
fn decode_gives_the_same_bits_as_prefill() {
    let mut random = Random::new(13);
    DevicePair::for_each(|pair, _| {
        for shape in [(6, 3, 32, 32), NARROW_VALUES] {
            let case = case(pair, &mut random, 9, shape, true);
            let (one, other) = (pair.state(case.state(9)), pair.state(case.state(12)));
            case.run(pair, 0, &[Span::new(one, 0, 9)]);
            let at_once = bits(&pair.read(case.out));
            case.run(pair, 0, &[Span::new(other, 0, 4)]);
            for row in 4..9 {
                case.run(pair, row, &[Span::new(other, row, 1)]);
            }
            pair.agree(&format!("decode, {shape:?}"), case.out, 1e-5);
            assert!(bits(&pair.read(case.out)) == at_once, "{shape:?}");
        }
    });
}

#[test]
fn several_sequences_in_one_op() {
    let mut random = Random::new(14);
    DevicePair::for_each(|pair, _| {
        let case = case(pair, &mut random, 8, (4, 2, 16, 16), false);
        let [one, other] = [0; 2].map(|_| pair.state(case.state(8)));
        case.run(pair, 0, &[Span::new(one, 0, 2), Span::new(other, 0, 3)]);
        let spans = [Span::new(other, 3, 1), Span::new(other, 4, 0), Span::new(one, 1, 2)];
        case.run(pair, 5, &spans[..1]);
        // As many spans as rows; one span is empty.
        case.run(pair, 6, &spans[1..]);
        pair.agree("two sequences", case.out, 1e-5);
    });
}

#[test]
fn batched_decode_gives_the_same_bits_as_single_decode() {
    let mut random = Random::new(17);
    DevicePair::for_each(|pair, _| {
        let shape = (8, 2, 32, 32);
        // Two short prefixes, many of mixed lengths, and one much longer than the others.
        for lens in [&[3, 3][..], &[1, 2, 40, 255, 256, 300, 120, 64, 33], &[5, 7, 900]] {
            let (before, n) = (lens.iter().sum::<usize>(), lens.len());
            let case = case(pair, &mut random, before + n, shape, true);
            let mut first = 0;
            let mut spans = Vec::new();
            for &len in lens {
                let state = pair.state(case.state(len + 1));
                case.run(pair, first, &[Span::new(state, 0, len)]);
                spans.push(Span::new(state, len, 1));
                first += len;
            }
            case.run(pair, before, &spans);
            pair.agree(&format!("after {lens:?}"), case.out.slice(before, n), 1e-5);
            let together = bits(&pair.read(case.out));
            for (i, span) in spans.iter().enumerate() {
                case.run(pair, before + i, &[*span]);
            }
            assert!(bits(&pair.read(case.out)) == together, "{}: {lens:?}", pair.device.describe());
        }
    });
}

#[test]
fn large_scores_do_not_overflow() {
    let mut random = Random::new(15);
    DevicePair::for_each(|pair, _| {
        let case = case(pair, &mut random, 300, (2, 1, 16, 16), false);
        let state = pair.state(case.state(300));
        // Values that f16 represents exactly.
        let large = |x: &f32| half::f16::from_f32(x * 300.0).to_f32();
        let values: Vec<f32> = random.values(300 * 32).iter().map(large).collect();
        pair.reference.write(case.q.buffer, &values).unwrap();
        pair.device.write(case.q.buffer, &values).unwrap();
        case.run(pair, 0, &[Span::new(state, 0, 300)]);
        // The rounding error of a score in the thousands reaches the softmax.
        pair.agree("large scores", case.out, pair.attention_tolerance(300).max(1e-3));
    });
}

#[test]
fn results_do_not_depend_on_threads() {
    let mut random = Random::new(16);
    let values = random.values(40 * 8 * 24);
    let outs: Vec<Vec<u32>> = (1..4)
        .map(|threads| {
            let mut device = device(Isa::detect(), false, threads);
            let mut view = |heads: usize| {
                let buffer = device.buffer(40 * heads * 24).unwrap();
                device.write(buffer, &values[..40 * heads * 24]).unwrap();
                View::rows(buffer, 40, heads * 24).split(heads)
            };
            let (q, k, v, out) = (view(8), view(2), view(2), view(8));
            let attention = Attention::new([q, k, out], Some(v), 0.3);
            let state = device.state(attention.state(40)).unwrap();
            device.run(&attention.op(&[Span::new(state, 0, 40)])).unwrap();
            bits(&read(&mut *device, out))
        })
        .collect();
    assert!(outs.windows(2).all(|pair| pair[0] == pair[1]));
}

#[test]
fn kv_cache_takes_half_the_bytes_on_the_fast_path() {
    let bytes = |exact, shape| device(Isa::detect(), exact, 1).state_bytes(shape);
    // The shapes are whole pages, so there is no padding.
    let kv = StateShape::KeyValue { kv_heads: 2, key_width: 24, value_width: 8, positions: 512 };
    assert_eq!([true, false].map(|exact| bytes(exact, kv)), [2 * 32 * 512 * 4, 2 * 32 * 512 * 2]);
    let recurrent = StateShape::Recurrent { len: 2048 };
    assert_eq!([true, false].map(|exact| bytes(exact, recurrent)), [2 * 2048 * 4; 2]);
}

#[test]
fn rope_at_any_position() {
    let mut random = Random::new(17);
    DevicePair::for_each(|pair, _| {
        let state = pair.state(StateShape::Recurrent { len: 0 });
        for (width, rotated) in [(2, 2), (16, 16), (80, 20), (300, 260), (7, 0)] {
            let frequencies: Vec<f32> =
                (0..rotated / 2).map(|i| 1e6f32.powf(-2.0 * i as f32 / rotated as f32)).collect();
            for pairs in [RopePairs::Halves, RopePairs::Interleaved] {
                let all = pair.random(&mut random, 5, 3 * (width + 3) + 1);
                let x = View { offset: 1, heads: 3, width, head_stride: width + 3, ..all };
                let spans = [
                    Span::new(state, 1_000_003, 2),
                    Span::new(pair.state(StateShape::Recurrent { len: 0 }), 0, 3),
                ];
                let (frequencies, positions) = (&*frequencies, RopePositions::Spans(&spans));
                let out = View { heads: 3, ..pair.nan_filled(5, 4 * width).split(4) };
                pair.run(&Op::Rope { x, frequencies, pairs, scale: 1.2, positions, out });
                pair.agree(&format!("{width}, {rotated}, {pairs:?}"), out, 1e-5);
                pair.run(&Op::Rope { x, frequencies, pairs, scale: 1.2, positions, out: x });
                pair.agree(&format!("{width}, {rotated}, {pairs:?}, in place"), all, 1e-5);
            }
        }
    });
}

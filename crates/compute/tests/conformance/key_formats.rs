//! What keys and values are kept as.

use moeflux_compute::{DeviceOptions, Isa, KvFormat, Op, Span, StateShape, View, open};

use crate::harness::{Both, Random, device, device_that_keeps, gpu, gpu_that_keeps, read};

fn options(name: &str, keys: Option<KvFormat>, exact: bool) -> DeviceOptions {
    DeviceOptions { name: Some(name.into()), kv_format: keys, exact, ..DeviceOptions::default() }
}

#[test]
fn the_format_is_chosen_or_refused() {
    for keys in [KvFormat::F16, KvFormat::Q8] {
        for (name, exact) in [("cpu", true), ("gpu", true), ("reference", false)] {
            assert!(open(&options(name, Some(keys), exact)).is_err(), "{name} {keys:?}");
        }
    }
    let refused = open(&options("gpu", Some(KvFormat::Q8), false)).err().unwrap().to_string();
    assert!(refused.contains("f16") && refused.contains("cpu"), "{refused}");
    assert_eq!(open(&options("reference", None, false)).unwrap().kv_format(), KvFormat::F32);
    for keys in KvFormat::ALL {
        assert_eq!(open(&options("cpu", Some(keys), false)).unwrap().kv_format(), keys);
        assert_eq!(KvFormat::by_name(keys.name()).unwrap(), keys);
    }
    assert!(KvFormat::by_name("q4").is_err());
    for (exact, format) in [(true, KvFormat::F32), (false, KvFormat::F16)] {
        assert_eq!(device(Isa::detect(), exact, 1).kv_format(), format);
        assert!(gpu(exact).is_none_or(|gpu| gpu.kv_format() == format));
    }
    assert!(
        gpu_that_keeps(Some(KvFormat::F32), false)
            .is_none_or(|gpu| gpu.kv_format() == KvFormat::F32)
    );
}

/// The devices of the fast path that keep a format.
fn that_keep(keys: KvFormat) -> impl Iterator<Item = Both> {
    let cpus =
        Isa::available().into_iter().map(move |isa| device_that_keeps(Some(keys), isa, false, 2));
    let gpu = if keys == KvFormat::Q8 { None } else { gpu_that_keeps(Some(keys), false) };
    cpus.chain(gpu).map(Both::new)
}

/// How attention differs among its kinds.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Plain,
    Ring,
    Latent,
    Named,
}

/// The largest difference to the reference of a number, and of a row by its rms, in parts of the row's rms.
fn attention_is_off_by(both: &mut Both, kind: Kind, (key, value): (usize, usize)) -> [f32; 2] {
    let mut random = Random::new(41);
    let (heads, kv_heads) = if kind == Kind::Latent { (6, 1) } else { (6, 2) };
    let (rows, positions) = (600, if kind == Kind::Ring { 512 } else { 600 });
    let q = both.random(&mut random, rows, heads * key).split(heads);
    let k = both.random(&mut random, rows, kv_heads * key).split(kv_heads);
    let v = both.random(&mut random, rows, kv_heads * value).split(kv_heads);
    let out = both.poisoned(rows, heads * value).split(heads);
    let list: Vec<f32> = (0..rows)
        .flat_map(|row| {
            (0..30).map(move |i| if i <= row { (i * (row / 30).max(1)) as f32 } else { -1.0 })
        })
        .collect();
    let positions_named = (kind == Kind::Named).then(|| both.dense(rows, &list));
    let value_width = if kind == Kind::Latent { 0 } else { value };
    let state =
        both.state(StateShape::KeyValue { kv_heads, key_width: key, value_width, positions });
    let mut at = 0;
    for rows in [250, 1, 9, 300, 1, 39] {
        let part = |view: View| view.slice(at, rows);
        both.run(&Op::Attention {
            q: part(q),
            k: part(k),
            v: (kind != Kind::Latent).then(|| part(v)),
            gate: None,
            scale: 1.0 / (key as f32).sqrt(),
            window: (kind == Kind::Ring).then_some(70),
            sinks: None,
            positions: positions_named.map(part),
            spans: &[Span { state, position: at, rows }],
            out: part(out),
        });
        at += rows;
    }
    let (expected, got) = (read(&mut *both.reference, out), both.read(out));
    // Rows that see more differ less, and are smaller.
    let of_row =
        got.chunks(heads * value).zip(expected.chunks(heads * value)).map(|(got, expected)| {
            let rms = |x: &mut dyn Iterator<Item = f32>| {
                (x.map(|x| x * x).sum::<f32>() / expected.len() as f32).sqrt()
            };
            let off = || got.iter().zip(expected).map(|(a, b)| (a - b).abs());
            let of = rms(&mut expected.iter().copied());
            [off().fold(0.0, f32::max) / of, rms(&mut off()) / of]
        });
    of_row.fold([0.0; 2], |[number, row], of| [of[0].max(number), of[1].max(row)])
}

const KINDS: [Kind; 4] = [Kind::Plain, Kind::Ring, Kind::Latent, Kind::Named];

fn check(keys: KvFormat, [of_number, of_row]: [f32; 2]) {
    for mut both in that_keep(keys) {
        for kind in KINDS {
            for widths in [(64, 64), (33, 17), (128, 96)] {
                let [number, row] = attention_is_off_by(&mut both, kind, widths);
                let what =
                    format!("{}: {kind:?} {widths:?}: {number:e} {row:e}", both.device.describe());
                assert!(number <= of_number && row <= of_row, "{what}");
            }
        }
    }
}

#[test]
fn attention_to_keys_of_8_bits() {
    check(KvFormat::Q8, [2.5e-2, 1e-2]);
}

#[test]
fn attention_to_keys_that_lose_nothing() {
    check(KvFormat::F32, [1e-5, 1e-5]);
}

#[test]
fn positions_that_keys_of_8_bits_find_are_good_ones() {
    let (rows, heads, width, n) = (400, 4, 64, 20);
    for mut both in that_keep(KvFormat::Q8) {
        let mut random = Random::new(42);
        let [of_q, of_k, of_weights] =
            [heads * width, width, heads].map(|of| random.numbers(rows * of));
        let [q, k, weights] = [&of_q, &of_k, &of_weights].map(|numbers| both.dense(rows, numbers));
        let (scores, out) = (both.poisoned(3, rows), both.poisoned(rows, n));
        let shape =
            StateShape::KeyValue { kv_heads: 1, key_width: width, value_width: 0, positions: rows };
        let spans = &[Span { state: both.state(shape), position: 0, rows }];
        both.run(&Op::TopPositions { q: q.split(heads), k, weights, spans, scores, out });
        let found = both.read(out);
        let mut worst = 0.0f32;
        for row in n..rows {
            let product = |head: usize, t: usize| -> f32 {
                let q = &of_q[(row * heads + head) * width..][..width];
                q.iter().zip(&of_k[t * width..]).map(|(q, k)| q * k).sum()
            };
            let score = |t: usize| -> f32 {
                (0..heads)
                    .map(|head| of_weights[row * heads + head] * product(head, t).max(0.0))
                    .sum()
            };
            let mut all: Vec<f32> = (0..=row).map(score).collect();
            let rms = (all.iter().map(|x| x * x).sum::<f32>() / all.len() as f32).sqrt();
            let least =
                found[row * n..][..n].iter().map(|t| all[*t as usize]).fold(f32::MAX, f32::min);
            all.sort_unstable_by(|a, b| b.total_cmp(a));
            worst = worst.max((all[n - 1] - least) / rms);
        }
        assert!(worst <= 3e-2, "{}: {worst:e}", both.device.describe());
    }
}

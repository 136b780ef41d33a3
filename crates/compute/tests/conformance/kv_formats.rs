//! Element formats of the KV cache: selection, and the error of attention and top positions.

use moeflux_compute::{DeviceOptions, IndexQueries, Isa, KvFormat, Span, open};

use crate::{
    harness::{DevicePair, Random, device, device_with_kv, gpu, gpu_with_kv, is_full, read},
    ops::{Attention, cache_of_keys, top_positions},
};

fn options(name: &str, kv_format: Option<KvFormat>, exact: bool) -> DeviceOptions {
    DeviceOptions::default().name(name).kv_format(kv_format).exact(exact)
}

#[test]
fn kv_format_is_selected_or_rejected() {
    for kv_format in [KvFormat::F16, KvFormat::Q8] {
        for (name, exact) in [("cpu", true), ("gpu", true), ("reference", false)] {
            assert!(open(&options(name, Some(kv_format), exact)).is_err(), "{name} {kv_format:?}");
        }
    }
    let error = open(&options("gpu", Some(KvFormat::Q8), false)).err().unwrap().to_string();
    assert!(error.contains("f16") && error.contains("cpu"), "{error}");
    assert_eq!(open(&options("reference", None, false)).unwrap().kv_format(), KvFormat::F32);
    for kv_format in KvFormat::ALL {
        assert_eq!(open(&options("cpu", Some(kv_format), false)).unwrap().kv_format(), kv_format);
        assert_eq!(KvFormat::by_name(kv_format.name()).unwrap(), kv_format);
    }
    assert!(KvFormat::by_name("q4").is_err());
    for (exact, format) in [(true, KvFormat::F32), (false, KvFormat::F16)] {
        assert_eq!(device(Isa::detect(), exact, 1).kv_format(), format);
        assert!(gpu(exact).is_none_or(|gpu| gpu.kv_format() == format));
    }
    assert!(
        gpu_with_kv(Some(KvFormat::F32), false).is_none_or(|gpu| gpu.kv_format() == KvFormat::F32)
    );
}

/// The fast-path devices that support a KV format.
fn devices_with(kv_format: KvFormat) -> impl Iterator<Item = DevicePair> {
    let cpus =
        Isa::available().into_iter().map(move |isa| device_with_kv(Some(kv_format), isa, false, 2));
    let gpu = if kv_format == KvFormat::Q8 { None } else { gpu_with_kv(Some(kv_format), false) };
    cpus.chain(gpu).map(DevicePair::new)
}

/// Kind of attention.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Plain,
    Ring,
    Latent,
    Listed,
}

/// Errors of attention against the reference, relative to the rms of the expected row: the maximum
/// of a single element, and the maximum rms of a row.
fn attention_error(pair: &mut DevicePair, kind: Kind, (key, value): (usize, usize)) -> [f32; 2] {
    let mut random = Random::new(41);
    let (heads, kv_heads) = if kind == Kind::Latent { (6, 1) } else { (6, 2) };
    let (rows, positions) = (600, if kind == Kind::Ring { 512 } else { 600 });
    let q = pair.random(&mut random, rows, heads * key).split(heads);
    let k = pair.random(&mut random, rows, kv_heads * key).split(kv_heads);
    let v = pair.random(&mut random, rows, kv_heads * value).split(kv_heads);
    let out = pair.nan_filled(rows, heads * value).split(heads);
    let listed: Vec<f32> = (0..rows)
        .flat_map(|row| {
            (0..30).map(move |i| if i <= row { (i * (row / 30).max(1)) as f32 } else { -1.0 })
        })
        .collect();
    let position_list = (kind == Kind::Listed).then(|| pair.dense(rows, &listed));
    let v = (kind != Kind::Latent).then_some(v);
    let window = (kind == Kind::Ring).then_some(70);
    let all_positions = Attention::new([q, k, out], v, 1.0 / (key as f32).sqrt());
    let attention = Attention { window, positions: position_list, ..all_positions };
    let state = pair.state(attention.state(positions));
    let mut position = 0;
    for rows in [250, 1, 9, 300, 1, 39] {
        attention.run(pair, position, &[Span::new(state, position, rows)]);
        position += rows;
    }
    let (expected, got) = (read(&mut *pair.reference, out), pair.read(out));
    // Outputs of later rows average more positions: their rms and their error are smaller.
    let errors =
        got.chunks(heads * value).zip(expected.chunks(heads * value)).map(|(got, expected)| {
            let rms = |x: &mut dyn Iterator<Item = f32>| {
                (x.map(|x| x * x).sum::<f32>() / expected.len() as f32).sqrt()
            };
            let error = || got.iter().zip(expected).map(|(a, b)| (a - b).abs());
            let scale = rms(&mut expected.iter().copied());
            [error().fold(0.0, f32::max) / scale, rms(&mut error()) / scale]
        });
    errors.fold([0.0; 2], |[element, row], error| [error[0].max(element), error[1].max(row)])
}

const KINDS: [Kind; 4] = [Kind::Plain, Kind::Ring, Kind::Latent, Kind::Listed];

fn check(kv_format: KvFormat, [max_element, max_row]: [f32; 2]) {
    for mut pair in devices_with(kv_format) {
        let is_gpu = pair.device.describe().starts_with("gpu");
        for (i, kind) in KINDS.into_iter().enumerate() {
            for (j, widths) in [(64, 64), (33, 17), (128, 96), (192, 128)].into_iter().enumerate() {
                // A GPU compiles kernels per width: each kind and each width in half of the pairs.
                if is_gpu && !is_full() && (i + j) % 2 == 1 {
                    continue;
                }
                let [element, row] = attention_error(&mut pair, kind, widths);
                let what =
                    format!("{}: {kind:?} {widths:?}: {element:e} {row:e}", pair.device.describe());
                assert!(element <= max_element && row <= max_row, "{what}");
            }
        }
    }
}

#[test]
fn attention_with_a_q8_kv_cache() {
    check(KvFormat::Q8, [2.5e-2, 1e-2]);
}

#[test]
fn attention_with_an_f32_kv_cache() {
    check(KvFormat::F32, [1e-5, 1e-5]);
}

#[test]
fn top_positions_with_a_q8_kv_cache_score_near_the_best() {
    let (rows, heads, width, n) = (400, 4, 64, 20);
    for mut pair in devices_with(KvFormat::Q8) {
        let mut random = Random::new(42);
        let [q_values, k_values, weight_values] =
            [heads * width, width, heads].map(|cols| random.values(rows * cols));
        let [q, k, weights] =
            [&q_values, &k_values, &weight_values].map(|values| pair.dense(rows, values));
        let (scores, out) = (pair.nan_filled(3, rows), pair.nan_filled(rows, n));
        let spans = &[Span::new(pair.state(cache_of_keys(width, rows)), 0, rows)];
        let queries = IndexQueries { q: q.split(heads), weights, scores };
        pair.run(&top_positions(queries, k, spans, out));
        let found = pair.read(out);
        let mut worst = 0.0f32;
        for row in n..rows {
            let product = |head: usize, t: usize| -> f32 {
                let q = &q_values[(row * heads + head) * width..][..width];
                q.iter().zip(&k_values[t * width..]).map(|(q, k)| q * k).sum()
            };
            let score = |t: usize| -> f32 {
                (0..heads)
                    .map(|head| weight_values[row * heads + head] * product(head, t).max(0.0))
                    .sum()
            };
            let mut all: Vec<f32> = (0..=row).map(score).collect();
            let rms = (all.iter().map(|x| x * x).sum::<f32>() / all.len() as f32).sqrt();
            let least =
                found[row * n..][..n].iter().map(|t| all[*t as usize]).fold(f32::MAX, f32::min);
            all.sort_unstable_by(|a, b| b.total_cmp(a));
            worst = worst.max((all[n - 1] - least) / rms);
        }
        assert!(worst <= 3e-2, "{}: {worst:e}", pair.device.describe());
    }
}

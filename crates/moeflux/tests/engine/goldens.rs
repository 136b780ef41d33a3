//! Goldens: logits, hidden states and chosen experts against mlx-lm, layer by layer, for prefill at
//! once, prefill in chunks, and decode.

use std::path::Path;

use moeflux::{MemoryRequest, runtime::DeviceOptions};
use moeflux_compute::SplitMix64;
use safetensors::Dtype;

use crate::common::{
    Golden, Seen, TensorData, asked, copy_golden, difference, engine, exact, feed, goldens, gpu,
    is_full, read_tensors, sets, write_tensors,
};

/// `max |a - b| <= BAR * rms(b)`.
const BAR: f64 = 1e-4;
/// The same for long prompts, over which rounding adds up.
const LONG_BAR: f64 = 1e-3;
/// `|a - b| <= FAST_BAR * |b|` on the fast path.
const FAST_BAR: f64 = 0.1;
/// Prompts from this length on run only once.
const LONG: usize = 100;

fn matches(golden: &Golden, device: &DeviceOptions, chunk: Option<usize>) {
    let at = format!("{} on {device:?}, chunk {chunk:?}", golden.name);
    let engine = engine(&golden.folder, device.clone(), MemoryRequest::default().chunk(chunk));
    let mut session = engine.session().unwrap();
    let mut seen = Seen::default();
    let (prompt, generated) = (golden.prompt(), golden.generated());
    let bar = if prompt.len() < LONG { BAR } else { LONG_BAR };

    let logits = feed(&mut session, &prompt, Some(&mut seen));
    let wanted = golden.floats("prefill_logits_f32").unwrap();
    // The golden stores only the last rows of a long prompt.
    let logits = &logits[logits.len() - wanted.numbers.len()..];
    let d = difference(logits, &wanted.numbers);
    assert!(d <= bar, "{at}: prefill logits differ by {d:e} of the rms");
    for (layer, hidden) in seen.hidden.iter().enumerate() {
        // Goldens of heads for multi-token prediction have no hidden states.
        let Some(wanted) = golden.floats(&format!("hidden_f32.{layer}")) else { continue };
        let d = difference(&hidden[hidden.len() - wanted.numbers.len()..], &wanted.numbers);
        assert!(d <= bar, "{at}: hidden states of layer {layer} differ by {d:e} of the rms");
    }

    let wanted = golden.floats("decode_logits_f32").unwrap();
    for (i, token) in generated.iter().enumerate() {
        let logits = feed(&mut session, &[*token], Some(&mut seen));
        let d = difference(&logits, wanted.row(i));
        assert!(d <= bar, "{at}: logits of decode step {i} differ by {d:e} of the rms");
    }
    let mut compared = 0;
    for layer in 0..seen.hidden.len() {
        let Some((k, wanted)) = golden.ints(&format!("experts_f32.{layer}")) else { continue };
        let seen = &seen.experts[layer];
        let seen = &seen[seen.len() - wanted.len()..];
        assert_eq!(sets(k, seen), sets(k, &wanted), "{at}: experts of layer {layer}");
        compared += 1;
    }
    assert!(compared > 0, "{at}: no layer's experts were compared");
}

/// The goldens to compare.
fn compared() -> impl Iterator<Item = Golden> {
    let start = asked().unwrap_or_default();
    goldens().into_iter().filter(move |golden| golden.name.starts_with(&start))
}

#[test]
fn the_reference_device_matches_mlx() {
    // Far too slow for long prompts.
    for golden in compared().filter(|g| g.prompt().len() < LONG) {
        for chunk in [None, Some(3)] {
            matches(&golden, &exact("reference"), chunk);
        }
    }
}

#[test]
fn the_cpu_device_matches_mlx() {
    for golden in compared() {
        let chunks: &[Option<usize>] = match golden.prompt().len() < LONG {
            true => &[None, Some(1), Some(3), Some(8)],
            false => &[None],
        };
        for chunk in chunks {
            matches(&golden, &exact("cpu"), *chunk);
        }
    }
}

/// One golden for each kind of mixer and router, with integer weights where there is one.
pub(crate) const KINDS: [&str; 31] = [
    "qwen3_moe",
    "qwen3_5_moe",
    "qwen3_next",
    "deepseek_v3",
    "glm_moe_dsa",
    "gpt_oss",
    "gemma4",
    "glm4_moe",
    "minimax_m2",
    "ernie4_5_moe_hub",
    "exaone_moe_hub",
    "laguna_hub",
    "lfm2_moe_hub",
    "step3p7_hub",
    "mimo_v2_flash_hub",
    "deepseek_v2_hub",
    "hunyuan_v1_moe_hub",
    "cohere2_moe_hub",
    "phimoe_hub",
    "minimax_m3_vl_hub",
    "kimi_linear_hub",
    "bailing_hybrid_hub",
    "deepseek_v4_hub",
    "glm5_next_hub",
    "qwen4_exp_hub",
    "granitemoehybrid_hub",
    "nemotron_h_hub",
    "nemotron_h_latent_hub",
    "kolibri1_hub",
    "qwen3_moe_ragged_hub",
    "flex_olmo_hub",
];

/// Goldens whose weights are laid out anew where they land.
const LAID_OUT: [&str; 3] =
    ["qwen3_moe_gptq", "glm4_moe_gptq_act_order", "qwen3_moe_nvfp4_modelopt"];

/// Runs the goldens selected by name on the GPU. Software drivers take a second to compile a
/// multi-row kernel for a format, and a minute for thousands of tokens. Without
/// `MOEFLUX_TEST_FULL`, only one golden of each kind runs, those of `LAID_OUT`, and one with a long
/// prompt; or those of `MOEFLUX_TEST_GOLDENS`.
fn gpu_matches(takes: impl Fn(&str) -> bool) {
    let Some(gpu) = gpu(true) else { return };
    let (mut taken, is_asked) = (0, asked().is_some());
    for golden in compared().filter(|g| takes(&g.name)) {
        let in_sample = [&KINDS[..], &LAID_OUT, &["glm_moe_dsa_long"]].concat();
        let in_sample = is_asked || in_sample.contains(&&*golden.name);
        let chunks: &[Option<usize>] = match golden.prompt().len() < LONG {
            _ if !is_full() && !in_sample => continue,
            true if is_full() => &[None, Some(1), Some(3), Some(8)],
            true => &[None, Some(3)],
            false => &[None],
        };
        chunks.iter().for_each(|chunk| matches(&golden, &gpu, *chunk));
        taken += 1;
    }
    assert!(taken > 0 || is_asked, "no golden has such a name");
}

fn is_qwen(name: &str) -> bool {
    name.starts_with("qwen")
}

fn is_latent(name: &str) -> bool {
    ["deepseek", "kimi", "glm_moe_dsa"].iter().any(|family| name.starts_with(family))
}

#[test]
fn the_gpu_device_matches_mlx_with_delta_nets_and_every_format() {
    gpu_matches(is_qwen);
}

#[test]
fn the_gpu_device_matches_mlx_with_latent_and_sparse_attention() {
    gpu_matches(is_latent);
}

#[test]
fn the_gpu_device_matches_mlx_with_sinks_windows_and_other_routers() {
    gpu_matches(|name| !is_qwen(name) && !is_latent(name));
}

/// `|a - b| / |b|`.
pub(crate) fn distance(a: &[f32], b: &[f32]) -> f64 {
    let norm =
        |x: &mut dyn Iterator<Item = f32>| x.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt();
    assert_eq!(a.len(), b.len());
    norm(&mut a.iter().zip(b).map(|(a, b)| a - b)) / norm(&mut b.iter().copied())
}

/// Draws of [`near_ties`], and the relative change of embeddings in each: as much as the fast path
/// rounds.
const DRAWS: u64 = 24;
const NOISE: f64 = 5e-4;

/// Whether each row of a golden's prompt and of the tokens after it depends on a choice of a router
/// or of an indexer that is nearly a tie, so that the rounding of the fast path decides it: on the
/// exact path, some draw of [`NOISE`] moves its logits by more than `bar`.
fn near_ties(golden: &Golden, bar: f64) -> Vec<bool> {
    let tokens = [golden.prompt(), golden.generated()].concat();
    let logits = |folder: &Path| {
        let engine = engine(folder, exact("cpu"), MemoryRequest::default());
        feed(&mut engine.session().unwrap(), &tokens, None)
    };
    let base = logits(&golden.folder);
    let width = base.len() / tokens.len();
    let folder = tempfile::tempdir().unwrap();
    copy_golden(&golden.name, folder.path());
    let file = folder.path().join("model.safetensors");
    let tensors = read_tensors(&file);
    let is_embedding = |name: &str| name.contains("embed") && name.ends_with(".weight");
    let name = tensors.keys().find(|name| is_embedding(name)).unwrap();
    let mut tied = vec![false; tokens.len()];
    for seed in 0..DRAWS {
        let (mut random, mut tensors) = (SplitMix64::new(seed), tensors.clone());
        let embedding = tensors.get_mut(name).unwrap();
        assert_eq!(embedding.dtype, Dtype::BF16, "{name}");
        let (values, _) = embedding.bytes.as_chunks();
        let noisy = values.iter().map(|bytes| {
            let factor = 1.0 + NOISE * (random.next_u64() as i64 as f64 / 2f64.powi(63));
            half::bf16::from_le_bytes(*bytes).to_f32() * factor as f32
        });
        let bytes = noisy.flat_map(f32::to_le_bytes).collect();
        *embedding = TensorData { dtype: Dtype::F32, bytes, ..embedding.clone() };
        write_tensors(&file, &tensors);
        let moved = logits(folder.path());
        for (i, (moved, base)) in moved.chunks(width).zip(base.chunks(width)).enumerate() {
            tied[i] |= distance(moved, base) > bar;
        }
    }
    tied
}

/// Most weights in the Hub's layout are floats, so their products do not quantize activations to 8
/// bits. Where activations are quantized, random weights may choose another expert; the fables test
/// the effect on a whole model.
#[test]
fn the_fast_path_of_the_gpu_is_near_mlx() {
    let Some(gpu) = gpu(false) else { return };
    let runs_all = is_full() || asked().is_some();
    for golden in compared() {
        let bar = match golden.name.as_str() {
            // Its experts are MXFP4, which quantizes activations.
            "gpt_oss_hub" => FAST_BAR,
            "qwen3_5_moe_hub" => 5e-3,
            name if name.contains("_hub") && runs_all => 5e-3,
            "qwen3_5_moe" | "deepseek_v3" => 5.0 * FAST_BAR,
            name if KINDS.contains(&name) && runs_all => 5.0 * FAST_BAR,
            _ => continue,
        };
        let engine = engine(&golden.folder, gpu.clone(), MemoryRequest::default());
        let mut session = engine.session().unwrap();
        let mut logits = feed(&mut session, &golden.prompt(), None);
        for token in golden.generated() {
            logits.extend(feed(&mut session, &[token], None));
        }
        let parts = ["prefill_logits_f32", "decode_logits_f32"];
        let wanted = parts.map(|part| golden.floats(part).unwrap());
        let (prompt, width) = (golden.prompt().len(), wanted[0].width);
        let starts = [prompt - wanted[0].numbers.len() / width, prompt];
        let mut tied: Option<Vec<bool>> = None;
        for ((part, wanted), start) in parts.iter().zip(&wanted).zip(starts) {
            let (wanted, logits) =
                (&wanted.numbers, &logits[start * width..][..wanted.numbers.len()]);
            let far = distance(logits, wanted);
            if far <= bar {
                continue;
            }
            let tied = &tied.get_or_insert_with(|| near_ties(&golden, bar))[start..];
            let untied = |logits: &[f32]| -> Vec<f32> {
                let rows = logits.chunks(width).zip(tied).filter(|(_, tied)| !**tied);
                rows.flat_map(|(row, _)| row).copied().collect()
            };
            let (near, left) = (distance(&untied(logits), &untied(wanted)), untied(wanted).len());
            let what = format!("{}, {part}: {far:e}, {near:e} without near ties", golden.name);
            assert!(near <= bar && 2 * left >= wanted.len(), "{what}: {tied:?}");
        }
    }
}

/// On the fast path a chunk of many rows takes the expanded form of latent attention. Its rounding
/// differs from the absorbed form, is then quantized to 8 bits, and may choose another expert. So
/// the two agree no better than each agrees with mlx-lm.
#[test]
fn both_forms_of_latent_attention_are_near_mlx_on_the_fast_path() {
    let golden = Golden::read("deepseek_v3_long");
    let wanted = golden.floats("prefill_logits_f32").unwrap().numbers;
    let [expanded, absorbed] = [512, 64].map(|chunk| {
        let device = exact("cpu").exact(false);
        let memory = MemoryRequest::default().chunk(chunk);
        let engine = engine(&golden.folder, device, memory);
        let logits = feed(&mut engine.session().unwrap(), &golden.prompt(), None);
        logits[logits.len() - wanted.len()..].to_vec()
    });
    let (e, a, between) = (
        distance(&expanded, &wanted),
        distance(&absorbed, &wanted),
        distance(&expanded, &absorbed),
    );
    assert!(expanded != absorbed, "both took the same form");
    assert!(e <= FAST_BAR && a <= FAST_BAR, "{e:e} expanded, {a:e} absorbed");
    assert!(between <= FAST_BAR, "{between:e} between the forms");
}

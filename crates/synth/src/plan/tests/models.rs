//! Presets: the written checkpoints match what the engine reads, and behave like a model.

use moeflux_model::{
    blueprint::{Blueprint, MixerBlueprint, MoeBlueprint},
    checkpoint::Checkpoint,
    seam::{TensorSource, supported, text_config_mut},
};

use super::*;

fn planned(config: Value) -> Checkpoint {
    plan(&Options::new(config)).unwrap().checkpoint().unwrap()
}

fn preset(name: &str) -> Value {
    Preset::by_name(name).unwrap().config()
}

/// All segments that a model reads, in file order.
fn segments(blueprint: &Blueprint) -> Vec<(u64, u64)> {
    let matrices = blueprint.matrices().flat_map(|m| m.segments.iter().copied());
    let vectors = blueprint.vectors().map(|v| v.segment);
    let experts = blueprint
        .moe_layers()
        .flat_map(|(_, m)| (0..m.experts.count).flat_map(|e| m.experts.segments(e)));
    let shards = blueprint.memories().flat_map(|(_, m)| &m.table.shards);
    let shards = shards.map(|s| (s.first.offset, s.rows * s.row_bytes() as u64));
    let all = matrices.chain(vectors).chain(experts).chain(blueprint.integers().copied());
    let mut all: Vec<_> = all.map(|s| (s.offset, s.bytes as u64)).chain(shards).collect();
    all.sort_unstable();
    all
}

#[test]
fn a_model_reads_every_byte_once() {
    for preset in presets() {
        let checkpoint = planned(preset.config());
        let mut end = 0;
        for (offset, bytes) in segments(&Blueprint::for_checkpoint(&checkpoint).unwrap()) {
            assert_eq!(offset, end, "{}: a gap, or something is read twice", preset.name);
            end += bytes;
        }
        assert_eq!(end, checkpoint.total_bytes(), "{}", preset.name);
    }
}

#[test]
fn tensors_match_checkpoints_written_by_mlx() {
    let goldens = moeflux_goldens::names();
    // A golden with the name of an architecture has MLX's layout. In `gpt_oss` experts are affine.
    let of_architecture =
        supported().filter(|name| *name != "gpt_oss" && goldens.iter().any(|g| g == name));
    for name in of_architecture.chain(["deepseek_v3_kv_b_4bit", "gpt_oss_mxfp4"]) {
        let published = Checkpoint::open(&moeflux_goldens::golden(name)).unwrap();
        let mut config = published.config().clone();
        config[KV_B_PROJ] = published.has("model.layers.0.self_attn.kv_b_proj.weight").into();
        let written = planned(config);
        let tensors = |checkpoint: &Checkpoint| -> BTreeMap<String, (String, Vec<usize>)> {
            let of = |name: &str| {
                checkpoint.tensor(name).map(|t| (t.dtype.clone(), t.shape.clone())).unwrap()
            };
            checkpoint.tensor_bytes().map(|(name, _)| (name.to_owned(), of(name))).collect()
        };
        let (left, right) = (tensors(&written), tensors(&published));
        // Some exports have corrections in bf16.
        let same = |name: &str, ours: &(String, Vec<usize>)| {
            right.get(name).is_some_and(|t| {
                t == ours || (name.ends_with("correction_bias") && t.0 == "BF16" && t.1 == ours.1)
            })
        };
        let other = left.iter().filter(|(name, t)| !same(name, t)).collect::<Vec<_>>();
        assert!(left.len() == right.len() && other.is_empty(), "{name}: {other:?}");
        // A bool stands for the quantization settings of all matrices in the fixture.
        let settings = |checkpoint: &Checkpoint| -> BTreeMap<String, (Value, Value)> {
            let map = checkpoint.config()["quantization"].as_object().unwrap();
            let named = map.iter().filter(|(_, value)| value.is_object());
            named.map(|(k, v)| (k.clone(), (v["bits"].clone(), v["group_size"].clone()))).collect()
        };
        assert_eq!(settings(&written), settings(&published), "{name}");
    }
}

fn expert_parameters(moe: &MoeBlueprint) -> u64 {
    let shape = &moe.experts.shape;
    shape.matrices().map(|m| m.rows as u64 * m.cols as u64).sum()
}

#[test]
fn presets_have_the_published_parameters() {
    let mut last = 0;
    for preset in presets() {
        let (name, sizes) = (preset.name, preset.sizes);
        let checkpoint = planned(preset.config());
        let blueprint = Blueprint::for_checkpoint(&checkpoint).unwrap();
        let mut total: u64 =
            blueprint.matrices().map(|m| (m.shape.rows * m.shape.cols) as u64).sum();
        let embedding = (blueprint.vocab * blueprint.hidden) as u64;
        let mut of_token = if blueprint.head.is_some() { total - embedding } else { total };
        for (_, moe) in blueprint.moe_layers() {
            total += expert_parameters(moe) * moe.experts.count as u64;
            of_token += expert_parameters(moe) * moe.router.top_k as u64;
        }
        let near = |a: f64, b: f64, share: f64| (a / b - 1.0).abs() < share;
        assert!(near(total as f64 / 1e9, sizes.parameters, 0.01), "{name}: {total} parameters");
        assert!(
            near(of_token as f64 / 1e9, sizes.active, 0.03),
            "{name}: {of_token} parameters of a token"
        );
        let bytes = blueprint.slot_bytes();
        assert!(
            near(bytes as f64 / 1e6, sizes.expert_mb, 0.003),
            "{name}: {bytes} bytes of an expert"
        );

        let size = format!("{:.0} GB", checkpoint.total_bytes() as f64 / 1e9);
        assert!(preset.description.ends_with(&format!("; {size}")), "{name}: {size}");
        // They are in the order of their parameters; some exports leave more matrices in bf16.
        let bytes = checkpoint.total_bytes();
        assert!(bytes >= last / 100 * 97, "{name} is smaller than the one before");
        last = bytes;
    }
}

#[test]
fn truncated_models_keep_the_kinds_of_the_first_layers() {
    for preset in presets() {
        let mut config = preset.config();
        let whole = planned(config.clone());
        let all = text_config_mut(&mut config).unwrap()["num_hidden_layers"].as_u64().unwrap();
        for layers in [1, 4, 7] {
            let cut =
                plan(&Options { layers: Some(layers), ..Options::new(config.clone()) }).unwrap();
            let beyond =
                |name: &str| (layers as u64..all).any(|l| name.contains(&format!("layers.{l}.")));
            let names: BTreeMap<_, _> = cut.tensors().map(|t| (t.name, t.bytes)).collect();
            let kept: BTreeMap<_, _> =
                whole.tensor_bytes().filter(|(name, _)| !beyond(name)).collect();
            let differ = names.iter().filter(|(name, bytes)| kept.get(*name) != Some(*bytes));
            let differ: Vec<_> = differ.map(|(name, _)| name).collect();
            assert!(differ.is_empty(), "{} with {layers} layers: {differ:?}", preset.name);
            assert_eq!(kept.len(), cut.tensors().count(), "{} with {layers} layers", preset.name);
            Blueprint::for_checkpoint(&cut.checkpoint().unwrap()).unwrap();
            assert!(cut.config().get(KV_B_PROJ).is_none());
        }
    }
}

#[test]
fn bounds_of_time_steps_reach_the_layers() {
    let mixers = |config: Value| -> Vec<_> {
        let blueprint = Blueprint::for_checkpoint(&planned(config)).unwrap();
        let minimum = |mixer: &MixerBlueprint| match mixer {
            MixerBlueprint::Mamba2(mamba) => Some(mamba.limits.min),
            _ => None,
        };
        blueprint.layers.iter().filter_map(|layer| minimum(layer.mixer()?)).collect()
    };
    // Time steps are bounded by both keys, or by transformers' default.
    let minima = |limit: Option<Value>, min: Option<f64>| {
        let mut config = preset("nemotron-3-nano");
        config.as_object_mut().unwrap().retain(|key, _| !key.starts_with("time_step"));
        for (key, value) in [("time_step_limit", limit), ("time_step_min", min.map(|m| json!(m)))] {
            value.into_iter().for_each(|value| config[key] = value);
        }
        let found = mixers(config);
        assert!(!found.is_empty() && found.iter().all(|min| *min == found[0]), "{found:?}");
        found[0]
    };
    let from = |least: f64| Some(json!([least, "Infinity"]));
    assert_eq!(minima(None, None), 0.001);
    assert_eq!(minima(None, Some(0.25)), 0.25);
    assert_eq!(minima(from(0.0), None), 0.0);
    assert_eq!(minima(from(0.0), Some(0.25)), 0.25);
    assert_eq!(minima(from(0.5), Some(0.25)), 0.5);
}

//! Synthetic GGUF files: they are the models of the presets, and run.

use std::{
    fs::File,
    io::{Seek, SeekFrom},
};

use moeflux_compute::DeviceOptions;

use super::*;
use crate::{
    checkpoint::Checkpoint,
    model::blueprint::Blueprint,
    runtime::{control::StepControl, plan::MemoryRequest},
    session::engine::{Engine, EngineOptions},
    tools::synth::gguf::{
        GgufRecipe,
        plan::{GgufPlan, plan_gguf},
        write_gguf,
    },
};

fn recipe(name: &str) -> GgufRecipe {
    name.parse().unwrap()
}

/// The sizes of all matrices, vectors and experts, sorted.
fn sizes(blueprint: &Blueprint) -> Vec<String> {
    let matrices = blueprint.matrices().map(|m| format!("{} x {}", m.shape.rows, m.shape.cols));
    let vectors = blueprint.vectors().map(|v| v.len.to_string());
    let experts = blueprint.moe_layers().map(|(layer, moe)| {
        let shape = &moe.experts.shape;
        let matrices: Vec<_> = shape.matrices().map(|m| (m.rows, m.cols)).collect();
        format!("{layer}: {} of {}: {matrices:?}", moe.router.top_k, moe.experts.count)
    });
    let mut all: Vec<_> = matrices.chain(vectors).chain(experts).collect();
    all.sort_unstable();
    all
}

/// The file of a plan without the bytes of random weights.
fn sparse(plan: &GgufPlan, path: &Path) {
    let mut file = File::create(path).unwrap();
    for (place, bytes) in plan.fixed_parts() {
        file.seek(SeekFrom::Start(place)).unwrap();
        file.write_all(&bytes).unwrap();
    }
    file.set_len(plan.file_bytes()).unwrap();
}

#[test]
fn files_have_the_shapes_of_presets() {
    let temp = tempfile::tempdir().unwrap();
    let path = temp.path().join("model.gguf");
    let mut unwritten = Vec::new();
    for preset in presets() {
        let options = Options::new(preset.config());
        let Ok(planned) = plan_gguf(&options, recipe("q4_k_m")) else {
            unwritten.push(preset.name);
            continue;
        };
        sparse(&planned, &path);
        let checkpoint = Checkpoint::open(&path).unwrap();
        let blueprint = Blueprint::for_checkpoint(&checkpoint).unwrap();
        let mut config = preset.config();
        config[KV_B_PROJ] = false.into();
        let hub = plan(&Options::new(config)).unwrap().checkpoint().unwrap();
        let hub = Blueprint::for_checkpoint(&hub).unwrap();
        let name = preset.name;
        assert_eq!(sizes(&blueprint), sizes(&hub), "{name}");
        let limits = |b: &Blueprint| (b.vocab, b.hidden, b.max_positions, b.layers.len(), b.eps);
        assert_eq!(limits(&blueprint), limits(&hub), "{name}");
        let routers = |b: &Blueprint| -> Vec<_> {
            let router = |(_, m): (usize, &crate::model::blueprint::MoeBlueprint)| {
                (m.router.scoring, m.router.normalize, m.router.scale, m.router.groups)
            };
            b.moe_layers().map(router).map(|router| format!("{router:?}")).collect()
        };
        assert_eq!(routers(&blueprint), routers(&hub), "{name}");
    }
    assert_eq!(unwritten, ["minimax-m3"]);
}

/// A small model whose rows are whole blocks of every type.
fn small(model_type: &str) -> Value {
    let mut config = config(model_type);
    let text =
        if config.get("text_config").is_some() { &mut config["text_config"] } else { &mut config };
    text["linear_conv_kernel_dim"] = 4.into();
    for (key, value) in [
        ("num_hidden_layers", 8),
        ("num_experts", 8),
        ("moe_intermediate_size", 256),
        ("shared_expert_intermediate_size", 256),
        ("linear_value_head_dim", 64),
    ] {
        if text.get(key).is_some() {
            text[key] = value.into();
        }
    }
    config
}

fn engine(path: &Path, memory: MemoryRequest) -> Engine {
    let device = DeviceOptions::default().name("cpu").exact(true).threads(2);
    let options = EngineOptions::default().device(device).memory(memory);
    Engine::open(Checkpoint::open(path).unwrap(), options, &mut |_, _| {}).unwrap()
}

fn logits(engine: &Engine) -> Vec<f32> {
    let mut session = engine.session().unwrap();
    let prompt = engine.text().unwrap().encode("The fox ").unwrap();
    session.sync(&prompt, &mut StepControl::default()).unwrap();
    session.logits().to_vec()
}

#[test]
fn every_type_runs() {
    for (i, name) in GgufRecipe::names().into_iter().enumerate() {
        let temp = tempfile::tempdir().unwrap();
        let model = ["qwen3_moe", "qwen3_5_moe", "qwen3_next"][i % 3];
        let options = Options::new(small(model)).layers(2).seed(3);
        let summary = write_gguf(&options, recipe(&name), temp.path(), |_, _| go_on()).unwrap();
        let path = temp.path().join("model.gguf");
        assert_eq!(fs::metadata(&path).unwrap().len(), summary.bytes, "{name}");
        let logits = logits(&engine(&path, MemoryRequest::default()));
        let size = (logits.iter().map(|x| x * x).sum::<f32>() / logits.len() as f32).sqrt();
        assert!((0.01..100.0).contains(&size), "{name} of {model}: {size}");
    }
}

/// The types of experts differ between layers, and so do the sizes of slots.
#[test]
fn slots_have_the_sizes_of_experts() {
    let temp = tempfile::tempdir().unwrap();
    let options = Options::new(small("qwen3_moe"));
    write_gguf(&options, recipe("q4_k_m"), temp.path(), |_, _| go_on()).unwrap();
    let all = engine(temp.path(), MemoryRequest::default());
    let expected = logits(&all);
    let slots = |engine: &Engine| engine.plan().host().slots_by_size();
    let [large, small] = slots(&all)[..] else { panic!("{:?}", slots(&all)) };
    assert_eq!(large + small, 64);
    let sizes: u64 = all
        .blueprint()
        .moe_layers()
        .map(|(_, m)| m.experts.count as u64 * (m.experts.slot_bytes as u64).next_multiple_of(4096))
        .sum();
    let line = crate::runtime::pools::LineName::Slots;
    assert_eq!(all.plan().bytes(line), sizes);
    for count in [40, 20, 9] {
        let few = engine(temp.path(), MemoryRequest::default().slots(count));
        assert_eq!(slots(&few).iter().sum::<usize>(), count);
        assert!(slots(&few).len() == 2, "{:?}", slots(&few));
        assert!(logits(&few) == expected, "{count} slots");
    }
    // With too few for a layer of either size, all have the larger one.
    let least = engine(temp.path(), MemoryRequest::default().slots(4));
    assert_eq!(slots(&least), [4]);
    assert!(logits(&least) == expected);
}

/// Opening reads headers only, however large the files are.
#[test]
fn a_split_set_of_400_gb_opens_at_once() {
    let preset = Preset::by_name("deepseek-v3").unwrap();
    let whole = plan_gguf(&Options::new(preset.config()), recipe("q4_k_m")).unwrap();
    let temp = tempfile::tempdir().unwrap();
    let parts = whole.split(9);
    let mut total = 0;
    for (i, part) in parts.iter().enumerate() {
        let path = temp.path().join(format!("m-{:05}-of-{:05}.gguf", i + 1, parts.len()));
        let mut file = File::create(&path).unwrap();
        file.write_all(&part.header()).unwrap();
        // Sparse: only the header takes room on the disk.
        file.set_len(part.file_bytes()).unwrap();
        total += part.file_bytes();
    }
    assert!(total > 400_000_000_000, "{total} bytes");
    let start = std::time::Instant::now();
    let checkpoint = Checkpoint::open(temp.path()).unwrap();
    let opened = start.elapsed();
    assert_eq!(checkpoint.total_bytes(), total);
    assert_eq!(Blueprint::for_checkpoint(&checkpoint).unwrap().layers.len(), 61);
    assert!(opened.as_secs() < 5, "{opened:?}");
}

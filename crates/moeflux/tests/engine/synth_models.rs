//! Synthetic checkpoints run: small models of every preset's kind, and GGUF files of every type.

use std::{collections::BTreeMap, fs, ops::ControlFlow, path::Path};

use moeflux::{
    Checkpoint, Engine, EngineOptions, MemoryRequest, StepControl,
    runtime::{DeviceOptions, LineName, Logits, StepObserver},
    tools::synth::{GgufRecipe, Options, Preset, plan, presets, write, write_gguf},
};
use serde_json::{Value, json};

fn go_on() -> ControlFlow<()> {
    ControlFlow::Continue(())
}

fn recipe(name: &str) -> GgufRecipe {
    name.parse().unwrap()
}

fn preset(name: &str) -> Value {
    Preset::by_name(name).unwrap().config()
}

fn text(config: &mut Value) -> &mut Value {
    let places = ["/thinker_config/text_config", "/text_config"];
    let place = places.into_iter().find(|place| config.pointer(place).is_some());
    config.pointer_mut(place.unwrap_or("")).unwrap()
}

/// A small model of an architecture.
fn config(model_type: &str) -> Value {
    let mut text = json!({
        "hidden_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_experts": 64,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 64,
        "intermediate_size": 128,
        "shared_expert_intermediate_size": 64,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "full_attention_interval": 2,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "vocab_size": 320,
        "max_position_embeddings": 512
    });
    if model_type == "qwen3_5_moe" {
        return json!({ "model_type": model_type, "text_config": text });
    }
    if model_type == "qwen3_moe" {
        text.as_object_mut().unwrap().remove("shared_expert_intermediate_size");
    }
    text["model_type"] = model_type.into();
    text
}

/// A small model whose rows are whole blocks of every type.
fn small_blocks(model_type: &str) -> Value {
    let mut config = config(model_type);
    let text = text(&mut config);
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
        let options = Options::new(small_blocks(model)).layers(2).seed(3);
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
    let options = Options::new(small_blocks("qwen3_moe"));
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
    let line = LineName::Slots;
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

/// A model of a preset's kind with a hidden size of a few hundred.
fn small(name: &str) -> Value {
    let mut config = preset(name);
    let sizes = json!({
        "global_head_dim": 128,
        "head_dim": 64,
        "hidden_size": 512,
        "index_head_dim": 64,
        "index_n_heads": 4,
        "index_topk": 8,
        "intermediate_size": 128,
        "kv_lora_rank": 64,
        "linear_key_head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 32,
        "attention_other_setting":
            { "head_dim": 64, "num_attention_groups": 4, "num_attention_heads": 8 },
        "dense_intermediate_size": 128,
        "moe_intermediate_size": 64,
        "moe_num_experts": 64,
        "moe_shared_expert_intermediate_size": 64,
        "n_routed_experts": 64,
        "num_attention_groups": 4,
        "num_attention_heads": 4,
        "num_attention_heads_per_layer": [4, 8, 8, 8, 4, 8],
        "num_experts": 64,
        "num_key_value_heads": 4,
        "num_local_experts": 64,
        "partial_rotary_factor": 0.5,
        "q_lora_rank": 128,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "rotary_dim": 32,
        "shared_expert_intermediate_size": 64,
        "share_expert_dim": 64,
        "sliding_window": 8,
        "sliding_window_size": 8,
        "swa_head_dim": 64,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_v_head_dim": 32,
        "v_head_dim": 64,
        "vocab_size": 4096
    });
    let others = json!({
        "mamba_n_heads": 16,
        "mamba_num_heads": 8,
        "o_groups": 2,
        "o_lora_rank": 64,
        "shared_intermediate_size": 64
    });
    let text = text(&mut config);
    for (key, size) in [sizes, others].iter().flat_map(|sizes| sizes.as_object().unwrap()) {
        // Zero means that there is no such part.
        if text.get(key).is_some_and(|given| *given != 0) {
            text[key] = size.clone();
        }
    }
    config
}

/// Root mean squares of the residual stream after each layer, and the experts of each token.
#[derive(Default)]
struct Seen {
    sizes: Vec<f32>,
    experts: BTreeMap<usize, Vec<u32>>,
}

impl StepObserver for Seen {
    fn experts(&mut self, layer: usize, _: usize, ids: &[u32]) {
        self.experts.entry(layer).or_default().extend(ids);
    }

    fn hidden(&mut self, _: usize, rows: &[f32]) {
        self.sizes.push((rows.iter().map(|x| x * x).sum::<f32>() / rows.len() as f32).sqrt());
    }
}

#[test]
fn small_models_of_all_kinds_run() {
    const PROMPT: &[u8] = b"The quick brown fox jumps over the lazy dog, and 7 others watch it.\n";
    let mut kinds = Vec::new();
    for preset in presets() {
        let name = preset.name;
        // The first full-attention layer of the longest pattern is the sixth.
        let options = Options::new(small(name)).layers(6);
        let kind = plan(&options).unwrap().config().clone();
        // Presets that differ only in sizes are the same when small.
        if kinds.contains(&kind) {
            continue;
        }
        kinds.push(kind);
        let folder = tempfile::tempdir().unwrap();
        write(&options, folder.path(), |_, _| go_on()).unwrap();
        let device = DeviceOptions::default().threads(2);
        let memory = MemoryRequest::default().context(128);
        let options = EngineOptions::default().memory(memory).device(device);
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let engine = Engine::open(checkpoint, options, &mut |_, _| {}).unwrap();
        let tokens: Vec<u32> = PROMPT.iter().map(|b| u32::from(*b)).collect();
        let (mut seen, mut logits) = (Seen::default(), Vec::new());
        let mut watch = StepControl::default().observer(&mut seen);
        let mut session = engine.session().unwrap();
        session
            .feed(&tokens, Logits::Last, &mut watch, &mut |_, row| logits.extend_from_slice(row))
            .unwrap();

        assert_eq!(logits.len(), 4096);
        let weights: Vec<f32> = logits.iter().map(|l| l.exp()).collect();
        let printable = weights[0x20..0x7f].iter().sum::<f32>() / weights.iter().sum::<f32>();
        assert!(printable > 0.9, "{name}: {printable} of the next token are printable");
        assert!(
            seen.sizes.iter().all(|size| (0.3..3.0).contains(size)),
            "{name}: {:?}",
            seen.sizes
        );
        assert!(!seen.experts.is_empty());
        for (layer, experts) in &seen.experts {
            let mut counts = vec![0; 64];
            experts.iter().for_each(|e| counts[*e as usize] += 1);
            let distinct = counts.iter().filter(|n| **n > 0).count();
            let most = counts.into_iter().max().unwrap_or(0);
            assert!(distinct > 32, "{name}: layer {layer} uses {distinct} experts");
            assert!(
                most < tokens.len() * 9 / 10,
                "{name}: layer {layer} has an expert for {most} tokens"
            );
        }
    }
}

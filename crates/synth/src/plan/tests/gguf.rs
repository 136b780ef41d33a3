//! Synthetic GGUF files: they are the models of the presets, and run.

use std::{
    fs::File,
    io::{Seek, SeekFrom},
};

use moeflux_model::{
    blueprint::Blueprint,
    checkpoint::Checkpoint,
    seam::{GgufArchitecture, text_config},
};

use super::*;
use crate::gguf::{
    GgufRecipe,
    plan::{GgufPlan, plan_gguf},
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
    let mut written = 0;
    for preset in presets() {
        let options = Options::new(preset.config());
        let planned = plan_gguf(&options, recipe("q4_k_m"));
        let config = preset.config();
        let model_type = config["model_type"].as_str().unwrap();
        if GgufArchitecture::for_config(model_type, text_config(&config)).is_none() {
            // llama.cpp does not have it.
            assert!(planned.is_err(), "{}", preset.name);
            continue;
        }
        written += 1;
        let planned = planned.unwrap();
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
            let router = |(_, m): (usize, &moeflux_model::blueprint::MoeBlueprint)| {
                let router = &m.router;
                let choice = (router.scoring, router.by_logit, router.groups);
                (choice, router.normalize, router.scale)
            };
            b.moe_layers().map(router).map(|router| format!("{router:?}")).collect()
        };
        assert_eq!(routers(&blueprint), routers(&hub), "{name}");
    }
    assert!(written > 50, "{written}");
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

//! Goldens of many families as GGUF files: names, config and changes of tensors.
//!
//! Each file has the keys and names of tensors that llama.cpp's converter writes for the golden,
//! copied from its files, and the golden's weights, changed as the converter changes them.

use std::fs;

use moeflux::MemoryRequest;

use super::{
    BAR, GgufParts,
    converted::{Family, tensors},
    distance, refusal,
};
use crate::common::{Golden, engine, exact, feed};

/// A key of a golden's file with another value, or without one, and a part of the error.
const WRONG: [(&str, &str, &str, &str); 12] = [
    ("bailing_hybrid_hub", "attention.head_count_kv", "[1,0,0,1]", "head_count_kv"),
    ("bailing_hybrid_hub", "kda.gate_lower_bound", "", "kda.gate_lower_bound"),
    ("bailing_hybrid_hub", "kda.head_dim", "0", "kda.head_dim"),
    ("deepseek_v4_hub", "attention.compress_ratios", "[0,0,4]", "compress_ratios"),
    ("deepseek_v4_hub", "swiglu_clamp_exp", "[1.0,2.0,2.0,2.0,2.0]", "swiglu_clamp_exp"),
    ("glm5_next_hub", "attention.indexer.types", "[true,true,true,false]", "indexer_types"),
    ("granitemoehybrid_hub", "expert_count", "0", "expert_count"),
    ("kimi_linear_hub", "attention.head_count_kv", "[0,0,1]", "3 values for 4 layers"),
    ("nemotron_h_hub", "ssm.time_step_rank", "0", "ssm.time_step_rank"),
    ("qwen4_exp_hub", "ple.layers", "[1,2]", "ple.layers"),
    ("qwen4_exp_hub", "ple.head_offsets", "[0,101]", "2 offsets"),
    ("qwen4_exp_hub", "ple.eos_token_id", "", "ple.eos_token_id"),
];

#[test]
fn families_have_the_logits_of_their_goldens() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let mut failed = Vec::new();
    for family in Family::all() {
        let golden = Golden::read(&family.golden);
        let tensors = tensors(&family, &golden);
        let parts = GgufParts { pairs: family.pairs(), tensors, ..GgufParts::EMPTY };
        fs::write(&path, parts.write()).unwrap();
        let run = || {
            let engine = engine(&path, exact("cpu"), MemoryRequest::default());
            let mut session = engine.session().unwrap();
            let prefilled = feed(&mut session, &golden.prompt(), None);
            let decoded: Vec<f32> = golden
                .generated()
                .iter()
                .flat_map(|token| feed(&mut session, &[*token], None))
                .collect();
            let wanted = golden.floats("prefill_logits_f32").unwrap();
            let last = &prefilled[prefilled.len() - wanted.numbers.len()..];
            let d = distance(last, &wanted.numbers, wanted.width);
            let wanted = golden.floats("decode_logits_f32").unwrap();
            let d = d.max(distance(&decoded, &wanted.numbers, wanted.width));
            println!("{}: {d:e}", family.golden);
            // The state of Kimi Delta Attention adds up the rounding of all positions.
            let bar = if family.keys.contains_key("kda.head_dim") { 1e-4 } else { BAR };
            assert!(d <= bar, "{}: off by {d:e}", family.golden);
        };
        if std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).is_err() {
            failed.push(family.golden);
        }
    }
    assert!(failed.is_empty(), "{failed:?}");
}

#[test]
fn wrong_keys_of_hybrids_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    for (golden, key, value, part) in WRONG {
        let family = Family::read(golden);
        let tensors = tensors(&family, &Golden::read(golden));
        let pairs = family.with(key, value).pairs();
        fs::write(&path, GgufParts { pairs, tensors, ..GgufParts::EMPTY }.write()).unwrap();
        let said = refusal(&path);
        assert!(said.contains(part), "{golden}, {key}: {said}");
    }
}

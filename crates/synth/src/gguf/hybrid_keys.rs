//! Metadata of recurrent layers and of memories of n-grams, from their blueprints.

use moeflux_model::blueprint::{Blueprint, DeltaNetBlueprint, Mamba2Shape, MixerBlueprint};
use moeflux_ops::LogDecay;

use super::metadata::{KeyValue, ModelKeys};

/// Key of the KV heads by layer, of which recurrent layers have none.
const KV_HEADS: &str = "attention.head_count_kv";

/// The mixer of each layer.
fn mixers(blueprint: &Blueprint) -> impl Iterator<Item = Option<&MixerBlueprint>> {
    blueprint.layers.iter().map(|layer| layer.mixer())
}

impl ModelKeys<'_> {
    /// Sizes of recurrent layers, and KV heads by layer.
    pub(super) fn recurrent_layers(&mut self) {
        for mixer in mixers(self.blueprint).flatten() {
            match mixer {
                MixerBlueprint::DeltaNet(net) if net.shape.decays > 1 => return self.kda(net),
                MixerBlueprint::Mamba2(mixer) => return self.mamba2(mixer.shape),
                _ => {}
            }
        }
    }

    /// The memory of n-grams, and the blocks of the indexer beside it.
    pub(super) fn ngram_memory(&mut self) {
        let Some((layer, memory)) = self.blueprint.memories().next() else { return };
        let ratio = self.config["indexer_compress_ratio"].as_u64().unwrap_or(0) as i32;
        let of_layer = |mixer| match mixer {
            Some(&MixerBlueprint::Gqa(_)) => ratio,
            _ => 0,
        };
        let ratios = mixers(self.blueprint).map(of_layer).collect();
        self.push("attention.compress_ratios", KeyValue::I32s(ratios));
        self.push("ple.layers", KeyValue::I32s(vec![layer as i32]));
        for (config, key) in [
            ("ngram_size", "ple.ngram_size"),
            ("heads_per_ngram", "ple.heads_per_ngram"),
            ("ple_conv_kernel_size", "ple.conv_kernel"),
            ("eos_token_id", "ple.eos_token_id"),
        ] {
            let n = self.config[config].as_u64().unwrap_or(0) as u32;
            self.push(key, KeyValue::U32(n));
        }
        let width = memory.table.width as u32;
        self.push("embedding_length_per_layer_input", KeyValue::U32(width));
        for (key, numbers) in [
            ("ple.layer_multipliers", memory.hash.multipliers()),
            ("ple.head_offsets", memory.hash.offsets()),
            ("ple.head_vocab_sizes", memory.hash.sizes()),
        ] {
            let numbers = numbers.into_iter().map(i64::cast_unsigned).collect();
            self.push(key, KeyValue::U64s(numbers));
        }
    }

    /// Kimi Delta Attention beside latent attention, which counts as one KV head.
    fn kda(&mut self, net: &DeltaNetBlueprint) {
        let is_latent = |mixer: Option<&_>| !matches!(mixer, Some(MixerBlueprint::DeltaNet(_)));
        let heads = mixers(self.blueprint).map(|mixer| i32::from(is_latent(mixer))).collect();
        self.set(KV_HEADS, KeyValue::I32s(heads));
        self.push("kda.head_dim", KeyValue::U32(net.shape.key_width as u32));
        self.push("ssm.conv_kernel", KeyValue::U32(net.shape.conv_width as u32));
        if self.is(&["bailingmoe3"]) {
            self.push("kda.safe_gate", KeyValue::Bool(true));
        }
        if let LogDecay::Bounded { bound } = net.decay {
            self.push("kda.gate_lower_bound", KeyValue::F32(bound));
        }
    }

    /// Mamba-2 beside grouped-query attention without positions.
    fn mamba2(&mut self, shape: Mamba2Shape) {
        let kv_heads = |mixer: Option<&MixerBlueprint>| match mixer {
            Some(MixerBlueprint::Gqa(gqa)) => gqa.shape.kv_heads as i32,
            _ => 0,
        };
        let heads = mixers(self.blueprint).map(kv_heads).collect();
        self.set(KV_HEADS, KeyValue::I32s(heads));
        for (key, n) in [
            ("ssm.conv_kernel", shape.conv_width),
            ("ssm.state_size", shape.state_width),
            ("ssm.group_count", shape.groups),
            ("ssm.inner_size", shape.inner()),
            ("ssm.time_step_rank", shape.heads),
        ] {
            self.push(key, KeyValue::U32(n as u32));
        }
        let has_rope = self.config["position_embedding_type"] == "rope";
        self.push("rope.scaling.finetuned", KeyValue::Bool(has_rope));
        // Layers of one part each.
        if self.is(&["nemotron_h_moe"]) {
            let mut widths = vec![0; self.blueprint.layers.len()];
            for (layer, moe) in self.blueprint.moe_layers() {
                widths[layer] = moe.experts.shape.up.rows as i32;
            }
            self.set("feed_forward_length", KeyValue::I32s(widths));
        }
    }
}

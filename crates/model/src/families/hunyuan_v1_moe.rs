//! `hunyuan_v1_moe`: Hunyuan-A13B.
//!
//! Attention with QK-norm after RoPE; a softmax router beside a shared expert in every layer.
//! Sources: Tencent, "Hunyuan-A13B Technical Report", 2025; the published `config.json` and
//! `hunyuan.py`.

mod gguf;

use super::prelude::*;
use crate::parts::{
    config::PerLayer,
    expert_sizes::{ExpertKeys, ExpertSizes},
    expert_tensors::experts,
};

pub(super) const FAMILY: Family = Family {
    models: &[ModelRow {
        names: &["hunyuan_v1_moe"],
        checkpoints: "Hunyuan-A13B",
        special: "QK-norm after RoPE",
        checked: "transformers",
    }],
    // The model of huggingface.co/tencent/Hunyuan-A13B-Instruct, not compared with its config.json.
    presets: &[Preset {
        name: "hunyuan-a13b",
        description: "Hunyuan-A13B: 32 layers of attention, 64 experts, 8 per token; 45 GB",
        sizes: PresetSizes { parameters: 80.4, active: 12.75, expert_mb: 21.23 },
        config: published!("hunyuan_v1_moe/hunyuan-a13b.json"),
    }],
    gguf: gguf::ARCHITECTURES,
    ..Family::new(blueprint)
};

#[derive(Deserialize)]
struct HunyuanMoeConfig {
    #[serde(flatten)]
    body: Body,
    #[serde(flatten)]
    gqa: GqaKeys,
    /// Of a dense layer, of the shared expert, and of the others unless a list says otherwise.
    intermediate_size: usize,
    moe_intermediate_size: Option<PerLayer<usize>>,
    num_experts: PerLayer<usize>,
    moe_topk: PerLayer<usize>,
    num_shared_expert: Option<PerLayer<usize>>,
    /// Dense layers before the first one with experts.
    #[serde(default)]
    moe_layer_num_skipped: usize,
    use_qk_norm: Option<bool>,
    /// Whether layers share keys and values.
    #[serde(default)]
    use_cla: bool,
    #[serde(default)]
    group_limited_greedy: bool,
}

pub(super) fn blueprint(source: &dyn TensorSource) -> Result<Blueprint, Error> {
    let config: HunyuanMoeConfig = parse_config(source)?;
    Require(source).unset(&[
        ("use_cla", config.use_cla),
        ("group_limited_greedy", config.group_limited_greedy),
    ])?;
    let body = &config.body;
    let (enabled, names) = (config.use_qk_norm, ["query_layernorm", "key_layernorm"]);
    let qk_norm = QkNorm { enabled, names, ..QkNorm::PER_HEAD };
    let style = GqaStyle { qk_norm, ..GqaStyle::default() };
    body.blueprint(source, NormWeights::Plain, |i, layer| {
        let gqa = config.gqa.attention(&layer.child("self_attn"), body.hidden_size, style)?;
        let attention = GqaBlueprint { norms_rotated: true, ..gqa };
        body.layer(layer, attention, feed_forward(&config, &layer.child("mlp"), i)?)
    })
}

fn feed_forward(
    config: &HunyuanMoeConfig,
    mlp: &Scope<'_>,
    layer: usize,
) -> Result<FeedForwardBlueprint, Error> {
    let (source, hidden, width) = (mlp.source, config.body.hidden_size, config.intermediate_size);
    Require(source).sizes(&[("intermediate_size", width)])?;
    if layer < config.moe_layer_num_skipped {
        return Ok(mlp.mlp(hidden, width)?.into());
    }
    let keys = ExpertKeys {
        count: "num_experts",
        top_k: "moe_topk",
        intermediate: "moe_intermediate_size",
    };
    let own = config.moe_intermediate_size.as_ref();
    let sizes = ExpertSizes {
        count: config.num_experts.of(source, keys.count, layer)?,
        hidden,
        intermediate: own.map_or(Ok(width), |own| own.of(source, keys.intermediate, layer))?,
    };
    let top_k = config.moe_topk.of(source, keys.top_k, layer)?;
    let sizes = sizes.of_router(mlp, "gate.wg", top_k, &keys)?;
    let shared = mlp.child("shared_mlp");
    let shared = shared.has_matrix("gate_proj").then(|| -> Result<_, Error> {
        let key = "num_shared_expert";
        let count = config.num_shared_expert.as_ref().map_or(Ok(1), |n| n.of(source, key, layer));
        let size = count?.saturating_mul(width);
        Require(source).sizes(&[(key, size)])?;
        Ok(SharedBlueprint::new(shared.mlp(hidden, size)?))
    });
    let router = mlp.linear("gate.wg", sizes.count, hidden)?;
    let router = RouterBlueprint { normalize: true, ..RouterBlueprint::softmax(router, top_k) };
    let experts = experts(&ExpertTensors::in_block(mlp), sizes)?;
    Ok(MoeBlueprint { shared: shared.transpose()?, ..MoeBlueprint::new(router, experts) }.into())
}

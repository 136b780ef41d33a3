//! Names of tensors: from GGUF's to those of the Hub or of MLX, which architectures ask for.

/// A tensor's name in a layer: in GGUF and on the Hub. Without `.weight` and `.bias` it stands for
/// both. Names of tensors outside of layers are whole.
pub(crate) struct NameRow {
    gguf: &'static str,
    hub: &'static str,
}

pub(crate) const fn row(gguf: &'static str, hub: &'static str) -> NameRow {
    NameRow { gguf, hub }
}

/// Tensors outside of layers.
const MODEL: [NameRow; 6] = [
    row("token_embd.weight", "model.embed_tokens.weight"),
    row("output_norm.weight", "model.norm.weight"),
    row("output_norm.bias", "model.norm.bias"),
    row("token_embd_norm.weight", "model.embedding_norm.weight"),
    row("output.weight", "lm_head.weight"),
    row("output.bias", "lm_head.bias"),
];

/// Tensors of layers that most architectures have.
const LAYER: [NameRow; 23] = [
    row("attn_norm", "input_layernorm"),
    row("attn_q", "self_attn.q_proj"),
    row("attn_k", "self_attn.k_proj"),
    row("attn_v", "self_attn.v_proj"),
    row("attn_output", "self_attn.o_proj"),
    row("attn_q_norm", "self_attn.q_norm"),
    row("attn_k_norm", "self_attn.k_norm"),
    row("ffn_norm", "post_attention_layernorm"),
    row("post_attention_norm", "post_attention_layernorm"),
    row("ffn_gate", "mlp.gate_proj"),
    row("ffn_up", "mlp.up_proj"),
    row("ffn_down", "mlp.down_proj"),
    row("ffn_gate_inp", "mlp.gate"),
    row("exp_probs_b.bias", "mlp.gate.e_score_correction_bias"),
    row("ffn_gate_exps", "mlp.switch_mlp.gate_proj"),
    row("ffn_up_exps", "mlp.switch_mlp.up_proj"),
    row("ffn_down_exps", "mlp.switch_mlp.down_proj"),
    row("ffn_gate_up_exps.weight", FUSED),
    row("ffn_gate_inp_shexp", "mlp.shared_expert_gate"),
    row("nextn.eh_proj", "eh_proj"),
    row("nextn.enorm", "enorm"),
    row("nextn.hnorm", "hnorm"),
    row("nextn.shared_head_norm", "shared_head.norm"),
];

/// Name of the experts' fused gate and up.
const FUSED: &str = "mlp.experts.gate_up_proj";

/// The down projections that are beside fused gate and up.
const FUSED_DOWN: NameRow = row("ffn_down_exps.weight", "mlp.experts.down_proj");

/// A name in GGUF, in its parts.
struct LayerName<'a> {
    layer: &'a str,
    /// `attn_q.weight`.
    tensor: &'a str,
}

impl<'a> LayerName<'a> {
    fn of(name: &'a str) -> Option<Self> {
        let (layer, tensor) = name.strip_prefix("blk.")?.split_once('.')?;
        Some(Self { layer, tensor })
    }

    /// The name by a row of the table, if it is that of this tensor.
    fn renamed(&self, row: &NameRow) -> Option<String> {
        let ending = self.tensor.strip_prefix(row.gguf)?;
        let fits = matches!(ending, "" | ".weight" | ".bias");
        fits.then(|| format!("model.layers.{}.{}{ending}", self.layer, row.hub))
    }
}

/// Ending of a tensor that has a factor for each matrix of the weights beside it.
pub(super) const FACTOR: &str = ".scale";

/// Name of a tensor on the Hub; `None` if it is unknown. `rows` are those of the architecture, and
/// `has` says whether a tensor exists in the file.
pub(super) fn hub_name(
    name: &str,
    rows: &[&[NameRow]],
    has: impl Fn(&str) -> bool,
) -> Option<String> {
    let named = |name: &str| {
        let Some(parts) = LayerName::of(name) else {
            let mut rows = rows.iter().copied().flatten().chain(&MODEL);
            return rows.find(|row| row.gguf == name).map(|row| row.hub.into());
        };
        let is_fused = has(&format!("blk.{}.ffn_gate_up_exps.weight", parts.layer));
        let rows = rows.iter().copied().flatten();
        let mut rows = rows.chain(is_fused.then_some(&FUSED_DOWN)).chain(&LAYER);
        rows.find_map(|row| parts.renamed(row))
    };
    named(name).or_else(|| {
        let hub = named(&format!("{}.weight", name.strip_suffix(FACTOR)?))?;
        Some(format!("{}{FACTOR}", hub.strip_suffix(".weight").unwrap_or(&hub)))
    })
}

/// Name in GGUF of a tensor with a name on the Hub: the opposite of [`hub_name`].
pub(crate) fn gguf_name(hub: &str, rows: &[&[NameRow]]) -> Option<String> {
    let Some((layer, tensor)) =
        hub.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'))
    else {
        let mut rows = rows.iter().copied().flatten().chain(&MODEL);
        return rows.find(|row| row.hub == hub).map(|row| row.gguf.into());
    };
    let name = |row: &NameRow| {
        let ending = tensor.strip_prefix(row.hub)?;
        let is_whole = [".weight", ".bias"].iter().any(|ending| row.gguf.ends_with(ending));
        let fits = ending.is_empty() || !is_whole && matches!(ending, ".weight" | ".bias");
        fits.then(|| format!("blk.{layer}.{}{ending}", row.gguf))
    };
    rows.iter().copied().flatten().chain(&LAYER).find_map(name)
}

/// Names in GGUF of queries, keys and values, if a tensor has all three.
pub(super) fn fused_projections(name: &str, has: impl Fn(&str) -> bool) -> Option<[String; 3]> {
    let LayerName { layer, tensor } = LayerName::of(name)?;
    let ending = tensor.strip_prefix("attn_qkv.")?;
    // Delta-nets have a tensor of the same name.
    let is_attention = !has(&format!("blk.{layer}.ssm_conv1d.weight"));
    is_attention.then(|| ["q", "k", "v"].map(|part| format!("blk.{layer}.attn_{part}.{ending}")))
}

/// Whether a tensor of a layer is beside the convolutions of Kimi Delta Attention.
pub(super) fn is_beside_kda(name: &str, has: impl Fn(&str) -> bool) -> bool {
    let parts = LayerName::of(name);
    parts.is_some_and(|parts| has(&format!("blk.{}.ssm_conv1d_q.weight", parts.layer)))
}

//! Keys of GGUF that are read and written by functions, after the architecture's prefix.

pub(crate) const HIDDEN: &str = "embedding_length";
pub(crate) const HEADS: &str = "attention.head_count";
pub(crate) const KV_HEADS: &str = "attention.head_count_kv";
pub(crate) const KEY_WIDTH: &str = "attention.key_length";
pub(crate) const VALUE_WIDTH: &str = "attention.value_length";
pub(crate) const WINDOW: &str = "attention.sliding_window";

/// A flag for each layer, or the number of layers of which one has no window.
pub(crate) const WINDOW_PATTERN: &str = "attention.sliding_window_pattern";
pub(crate) const COMPRESS_RATIOS: &str = "attention.compress_ratios";

/// Elements of a head that RoPE rotates, in all layers or in layers of full attention.
pub(crate) const ROTATED: &str = "rope.dimension_count";

/// The same in layers with windows.
pub(crate) const SLIDING_ROTATED: &str = "rope.dimension_count_swa";
pub(crate) const ROPE_BASE: &str = "rope.freq_base";
pub(crate) const SLIDING_ROPE_BASE: &str = "rope.freq_base_swa";
pub(crate) const ROPE_SECTIONS: &str = "rope.dimension_sections";

pub(crate) const EXPERTS: &str = "expert_count";
pub(crate) const EXPERT_WIDTH: &str = "expert_feed_forward_length";
pub(crate) const SHARED_WIDTH: &str = "expert_shared_feed_forward_length";
pub(crate) const MLP_WIDTH: &str = "feed_forward_length";
pub(crate) const DENSE_LAYERS: &str = "leading_dense_block_count";
pub(crate) const NORMALIZED: &str = "expert_weights_norm";

/// Bounds of gated linear units of routed and of shared experts, by layer.
pub(crate) const CLAMPS: [&str; 2] = ["swiglu_clamp_exp", "swiglu_clamp_shexp"];

/// Taps of convolutions.
pub(crate) const TAPS: &str = "ssm.conv_kernel";
pub(crate) const STATE_WIDTH: &str = "ssm.state_size";
pub(crate) const STATE_GROUPS: &str = "ssm.group_count";
pub(crate) const STATE_HEADS: &str = "ssm.time_step_rank";

/// Elements of all heads of a recurrent layer.
pub(crate) const STATE_INNER: &str = "ssm.inner_size";
pub(crate) const KDA_WIDTH: &str = "kda.head_dim";

/// Bound of the logarithm of decays.
pub(crate) const LOWER_BOUND: &str = "kda.gate_lower_bound";
pub(crate) const PER_LAYER_INPUT: &str = "embedding_length_per_layer_input";

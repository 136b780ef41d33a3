//! WGSL sources of all kernels, and the headers by which they name their needs and constants.

macro_rules! files {
    ($($name:literal),* $(,)?) => {
        &[$(($name, include_str!(concat!("kernels/", $name, ".wgsl")))),*]
    };
}

/// All WGSL files: names and texts.
pub(super) const FILES: &[(&str, &str)] = files![
    "attention/append_kv",
    "attention/attention_cooperative",
    "attention/attention_decode",
    "attention/attention_split",
    "attention/attention_tiled",
    "attention/block_indexer_scores",
    "attention/block_indexer_top",
    "attention/block_scores",
    "attention/indexer_scores",
    "attention/indexer_top_positions",
    "attention/kv_cache",
    "attention/kv_of_rows",
    "attention/kv_of_sequence",
    "attention/merge_splits",
    "attention/positions_in_order",
    "attention/positions_in_table",
    "attention/qk_norm_rope",
    "attention/rope",
    "attention/row_table",
    "attention/softmax",
    "attention/span_tiles",
    "attention/sum8_memory",
    "attention/sum8_subgroup",
    "attention/visible_splits",
    "codec/any_block",
    "codec/any_format",
    "codec/block_scales",
    "codec/block_types",
    "codec/codebooks",
    "codec/e2m1",
    "codec/e4m3",
    "codec/few_bits",
    "codec/grids",
    "codec/k_quants",
    "codec/load_blocks",
    "codec/packed_bytes",
    "codec/plain",
    "codec/q4",
    "codec/q8",
    "codec/quants",
    "codec/scales_in_blocks",
    "codec/scales_in_planes",
    "codec/simple_blocks",
    "common/common",
    "common/exp_log",
    "common/f16_range",
    "common/gate_function",
    "common/gated_activation",
    "common/segments",
    "common/sort_key",
    "common/team_memory",
    "common/team_subgroup",
    "elementwise/embed",
    "elementwise/gather_columns",
    "elementwise/glu",
    "elementwise/head_gate",
    "elementwise/keyed_gate",
    "elementwise/map",
    "elementwise/norm",
    "experts/assignments",
    "experts/assignments_given",
    "experts/assignments_routed",
    "experts/combine",
    "experts/experts_down_sum",
    "experts/experts_gemv",
    "experts/experts_gemv_any",
    "experts/slot_matrix",
    "gemm/activations_f16",
    "gemm/cooperative_types",
    "gemm/dequantize_blocks",
    "gemm/dequantize_f16",
    "gemm/dequantize_minifloat",
    "gemm/dequantize_plain",
    "gemm/dequantize_q4",
    "gemm/dequantize_q8",
    "gemm/dequantize_quants",
    "gemm/gemm_cooperative",
    "gemm/gemm_few_rows",
    "gemm/gemm_registers",
    "gemm/gemm_tile",
    "gemm/sort_assignments",
    "gemm/weights_any",
    "gemm/weights_blocks",
    "gemv/activations_f32",
    "gemv/activations_int",
    "gemv/gemv",
    "gemv/gemv_any",
    "gemv/head_gemv",
    "gemv/head_gemv_transposed",
    "gemv/head_gemv_transposed_any",
    "gemv/matrices_fused",
    "gemv/matrix_single",
    "gemv/row_products",
    "gemv/row_sums_memory",
    "gemv/row_sums_subgroup",
    "gemv/stage_x",
    "probe/read_bandwidth",
    "probe/subgroup_probe",
    "recurrent/compress",
    "recurrent/conv1d",
    "recurrent/delta_conv",
    "recurrent/delta_net",
    "recurrent/delta_no_conv",
    "recurrent/inputs_of_sequence",
    "recurrent/mamba2",
    "recurrent/pair_sum_memory",
    "recurrent/pair_sum_subgroup",
    "recurrent/states_of_rows",
    "recurrent/states_of_sequence",
    "recurrent/states_of_spans",
    "router/rank_experts",
    "router/router_topk",
    "router/routing",
    "router/scratch_storage",
    "router/scratch_workgroup",
    "sampling/top_logit",
    "sampling/top_logits",
    "streams/collapse",
    "streams/expand",
    "streams/stream_weights",
];

/// The text of a file of `kernels/`.
pub(super) fn file(name: &str) -> Option<&'static str> {
    FILES.iter().find(|(file, _)| *file == name).map(|(_, text)| *text)
}

/// Entries of the lines `// key: a, b` of a file's leading comment.
pub(super) fn header<'a>(text: &'a str, key: &'a str) -> impl Iterator<Item = &'a str> {
    let comment = text.lines().map_while(|line| line.strip_prefix("//"));
    let lines =
        comment.filter_map(move |line| line.trim_start().strip_prefix(key)?.strip_prefix(':'));
    lines.flat_map(|line| line.split(',')).map(str::trim)
}

/// Names of the constants that a file defines itself.
pub(super) fn defined(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter_map(|line| line.strip_prefix("const ")?.split([':', ' ']).next())
}

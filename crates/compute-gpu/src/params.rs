//! Parameters of kernels, their immediates: one struct for each `struct Params` in WGSL, with the
//! same fields in the same order.
//!
//! Offsets are in elements of the activations, if nothing else is said. The WGSL file of a kernel
//! says what its parameters mean.

use bytemuck::{Pod, Zeroable};
use moeflux_ops::{Error, MatrixShape, PerPlane, View};

use super::store::Store;

/// Words of parameters: 128 bytes, the immediates that every adapter of WebGPU has.
const MAX_WORDS: usize = 32;

/// Name, size and fields of a type of parameters.
#[derive(Debug)]
pub(super) struct ParamsLayout {
    /// Name of the Rust type.
    pub(super) name: &'static str,
    #[cfg_attr(not(test), expect(dead_code, reason = "compared with WGSL by a test"))]
    pub(super) bytes: usize,
    /// Fields of a struct; none of `u32` and `f32`.
    #[cfg_attr(not(test), expect(dead_code, reason = "compared with WGSL by a test"))]
    pub(super) fields: &'static [ParamsField],
}

/// Field of a struct of parameters.
#[derive(Debug)]
#[cfg_attr(not(test), expect(dead_code, reason = "compared with WGSL by a test"))]
pub(super) struct ParamsField {
    pub(super) name: &'static str,
    pub(super) offset: usize,
    pub(super) layout: &'static ParamsLayout,
}

/// A struct of parameters, or the type of one of its fields.
pub(super) trait KernelParams: Pod {
    const LAYOUT: &'static ParamsLayout;
}

impl KernelParams for u32 {
    const LAYOUT: &'static ParamsLayout = &ParamsLayout { name: "u32", bytes: 4, fields: &[] };
}

impl KernelParams for f32 {
    const LAYOUT: &'static ParamsLayout = &ParamsLayout { name: "f32", bytes: 4, fields: &[] };
}

/// Parameters of any kernel, as a dispatch takes them.
#[derive(Clone, Copy, Debug)]
pub(super) struct PackedParams {
    words: [u32; MAX_WORDS],
}

impl PackedParams {
    pub(super) fn new<P: KernelParams>(params: &P) -> Self {
        const { assert!(size_of::<P>() <= 4 * MAX_WORDS, "more than 128 bytes of parameters") };
        let mut words = [0; MAX_WORDS];
        let bytes = bytemuck::bytes_of(params);
        bytemuck::bytes_of_mut(&mut words)[..bytes.len()].copy_from_slice(bytes);
        Self { words }
    }

    pub(super) fn bytes(&self) -> &[u8] {
        bytemuck::bytes_of(&self.words)
    }
}

/// Declares structs of parameters and their layouts.
macro_rules! params {
    ($($(#[$meta:meta])* struct $name:ident { $($field:ident: $type:ty,)* })*) => {$(
        $(#[$meta])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
        pub(in crate) struct $name {
            $(pub(in crate) $field: $type,)*
        }

        impl KernelParams for $name {
            const LAYOUT: &'static ParamsLayout = &ParamsLayout {
                name: stringify!($name),
                bytes: size_of::<Self>(),
                fields: &[$(ParamsField {
                    name: stringify!($field),
                    offset: std::mem::offset_of!(Self, $field),
                    layout: <$type as KernelParams>::LAYOUT,
                }),*],
            };
        }
    )*};
}

params! {
    /// Of kernels without parameters.
    struct NoParams {}

    /// View of the activations: offset and strides in elements.
    struct ViewParams {
        offset: u32,
        row_stride: u32,
        head_stride: u32,
    }

    /// Matrix of any format: offsets of its planes, bytes of a row of weights and of scales.
    struct MatrixParams {
        weights: u32,
        scales: u32,
        biases: u32,
        row_bytes: u32,
        scale_bytes: u32,
    }

    /// KV splits of the rows of a dispatch.
    struct SplitParams {
        position: u32,
        window: u32,
        max_unsplit: u32,
        min_split: u32,
        max_splits: u32,
        count: u32,
    }

    /// Expert assignments: list or ids, and the bank of the dispatch.
    struct AssignmentParams {
        list: u32,
        row_stride: u32,
        k: u32,
        bank: u32,
    }

    /// Matrix in the slots of experts: weights in load units, the others in bytes.
    struct SlotMatrixParams {
        weights: u32,
        scales: u32,
        biases: u32,
        bias: u32,
    }

    /// Router of one row, fused with the expert GEMV; zeros if it is not.
    struct RoutingParams {
        logits: u32,
        ids: u32,
        weights: u32,
        gate: u32,
        correction: u32,
        expert_scale: u32,
        scale: f32,
    }

    /// Heads that are normalized and rotated in place.
    struct HeadSetParams {
        view: ViewParams,
        heads: u32,
        width: u32,
        weight: u32,
        eps: f32,
        pairs: u32,
        table: u32,
    }

    /// The matrix of a GEMV.
    struct GemvMatrixParams {
        weights: u32,
        scales: u32,
        biases: u32,
        out: u32,
        out_row_stride: u32,
        bias: u32,
        rows: u32,
    }

    /// One of several matrices of a GEMV.
    struct GemvFusedMatrixParams {
        weights: u32,
        scales: u32,
        biases: u32,
        out: u32,
        end_row: u32,
        bias_or_row_stride: u32,
    }

    /// `gemv/matrix_single.wgsl`.
    struct GemvParams {
        x: u32,
        x_row_stride: u32,
        normed: u32,
        rows: u32,
        workgroups: u32,
        steps: u32,
        matrix: GemvMatrixParams,
        norm_weight: u32,
        eps: f32,
        residual: u32,
        residual_row_stride: u32,
        squares: u32,
        squares_row_stride: u32,
    }

    /// `gemv/matrices_fused.wgsl`.
    struct GemvFusedParams {
        x: u32,
        x_row_stride: u32,
        normed: u32,
        rows: u32,
        workgroups: u32,
        steps: u32,
        m0: GemvFusedMatrixParams,
        m1: GemvFusedMatrixParams,
        m2: GemvFusedMatrixParams,
        m3: GemvFusedMatrixParams,
        norm_weight: u32,
        eps: f32,
    }

    /// `gemv/gemv_any.wgsl`.
    struct GemvAnyParams {
        x: ViewParams,
        out: ViewParams,
        m: MatrixParams,
        first_row: u32,
        outputs: u32,
        cols: u32,
        rows: u32,
        heads: u32,
        head_row_stride: u32,
        bias: u32,
    }

    /// `gemv/head_gemv.wgsl` and `gemv/head_gemv_transposed.wgsl`.
    struct HeadGemvParams {
        x: ViewParams,
        out: ViewParams,
        weights: u32,
        scales: u32,
        biases: u32,
        first_row: u32,
        head_rows: u32,
        head_row_stride: u32,
        rows: u32,
        heads: u32,
    }

    /// `gemv/head_gemv_transposed_any.wgsl`.
    struct HeadGemvTransposedAnyParams {
        x: ViewParams,
        out: ViewParams,
        m: MatrixParams,
        first_row: u32,
        head_rows: u32,
        cols: u32,
        rows: u32,
        heads: u32,
        head_row_stride: u32,
    }

    /// `experts/experts_gemv.wgsl`.
    struct ExpertsGemvParams {
        x: u32,
        x_row_stride: u32,
        out: u32,
        out_row_stride: u32,
        assignments: AssignmentParams,
        count: u32,
        workgroups: u32,
        steps: u32,
        outputs: u32,
        matrix: SlotMatrixParams,
        up: SlotMatrixParams,
        up_first: u32,
        alpha: f32,
        limit: f32,
        routing: RoutingParams,
    }

    /// `experts/experts_gemv_any.wgsl`.
    struct ExpertsGemvAnyParams {
        x: ViewParams,
        out: ViewParams,
        m: MatrixParams,
        assignments: AssignmentParams,
        count: u32,
        first_row: u32,
        row_step: u32,
        outputs: u32,
        cols: u32,
        bias: u32,
        alpha: f32,
        limit: f32,
    }

    /// `experts/experts_down_sum.wgsl`.
    struct ExpertsDownSumParams {
        x: u32,
        assignments: AssignmentParams,
        outputs: u32,
        down: SlotMatrixParams,
        expert_out: u32,
        expert_out_row_stride: u32,
        weights: u32,
        shared_out: u32,
        gate: u32,
        out: u32,
        rows: u32,
        row_groups: u32,
        x_stride: u32,
        weights_stride: u32,
        shared_stride: u32,
        gate_stride: u32,
        out_stride: u32,
    }

    /// `experts/hand_over.wgsl`.
    struct HandOverParams {
        ids: ViewParams,
        input: ViewParams,
        k: u32,
        ids_count: u32,
        width: u32,
        count: u32,
        input_at: u32,
    }

    /// `experts/take_results.wgsl`.
    struct TakeResultsParams {
        ids: ViewParams,
        out: ViewParams,
        k: u32,
        width: u32,
        count: u32,
    }

    /// `experts/combine.wgsl`.
    struct CombineParams {
        expert_out: ViewParams,
        weights: ViewParams,
        shared_out: ViewParams,
        gate: ViewParams,
        out: ViewParams,
        count: u32,
        width: u32,
        k: u32,
    }

    /// `router/router_topk.wgsl`.
    struct RouterTopKParams {
        logits: ViewParams,
        ids: ViewParams,
        weights: ViewParams,
        gate: ViewParams,
        correction: u32,
        expert_scale: u32,
        rows: u32,
        scale: f32,
    }

    /// `gemm/gemm_tile.wgsl`.
    struct GemmParams {
        out: ViewParams,
        m: MatrixParams,
        up_weights: u32,
        up_scales: u32,
        up_biases: u32,
        x: u32,
        x_row_vecs: u32,
        factors: u32,
        rows: u32,
        outputs: u32,
        cols: u32,
        table: u32,
        list: u32,
        bank: u32,
        row_step: u32,
        up_first: u32,
        bias: u32,
        up_bias: u32,
        alpha: f32,
        limit: f32,
    }

    /// `gemm/activations_f16.wgsl`.
    struct ActivationsF16Params {
        x: ViewParams,
        rows: u32,
        width: u32,
        factors: u32,
        x_f16: u32,
        words: u32,
        normed: u32,
        norm_weight: u32,
        eps: f32,
    }

    /// `gemm/sort_assignments.wgsl`.
    struct SortAssignmentsParams {
        ids: u32,
        ids_row_stride: u32,
        k: u32,
        assignments: u32,
        list: u32,
        table: u32,
        experts: u32,
    }

    /// `attention/append_kv.wgsl`.
    struct AppendKvParams {
        k: ViewParams,
        v: ViewParams,
        heads: u32,
        k_width: u32,
        v_width: u32,
        table: u32,
        segments: u32,
    }

    /// `attention/attention_split.wgsl`.
    struct AttentionSplitParams {
        q: ViewParams,
        out: ViewParams,
        gate: ViewParams,
        list: ViewParams,
        rows: u32,
        splits: SplitParams,
        heads: u32,
        group: u32,
        tiles: u32,
        sinks: u32,
        gated: u32,
        scale: f32,
    }

    /// `attention/attention_tiled.wgsl` and `attention/attention_cooperative.wgsl`.
    struct AttentionTiledParams {
        q: ViewParams,
        out: ViewParams,
        gate: ViewParams,
        table: u32,
        window: u32,
        heads: u32,
        group: u32,
        sinks: u32,
        gated: u32,
        scale: f32,
        tiles: u32,
    }

    /// `attention/attention_decode.wgsl`.
    struct AttentionDecodeParams {
        q: ViewParams,
        out: ViewParams,
        gate: ViewParams,
        k: u32,
        k_head_stride: u32,
        v: u32,
        v_head_stride: u32,
        rows: u32,
        splits: SplitParams,
        capacity: u32,
        v_offset: u32,
        sinks: u32,
        gated: u32,
        scale: f32,
        q_weight: u32,
        q_eps: f32,
        k_weight: u32,
        k_eps: f32,
        table: u32,
    }

    /// `attention/merge_splits.wgsl`.
    struct MergeSplitsParams {
        out: ViewParams,
        gate: ViewParams,
        rows: u32,
        splits: SplitParams,
        heads: u32,
        v_width: u32,
        column_groups: u32,
        sinks: u32,
        gated: u32,
    }

    /// `attention/qk_norm_rope.wgsl`.
    struct QkNormRopeParams {
        q: HeadSetParams,
        k: HeadSetParams,
        v: ViewParams,
        rows: u32,
        position: u32,
        capacity: u32,
        v_offset: u32,
        v_width: u32,
    }

    /// `attention/rope.wgsl`.
    struct RopeParams {
        x: ViewParams,
        out: ViewParams,
        vectors: u32,
        heads: u32,
        width: u32,
        pairs: u32,
        table: u32,
        pair_layout: u32,
    }

    /// `attention/indexer_scores.wgsl`.
    struct IndexerScoresParams {
        q: ViewParams,
        weights: ViewParams,
        scores: ViewParams,
        rows: u32,
        table: u32,
        heads: u32,
        ratio: u32,
        top_k: u32,
        blocks: u32,
    }

    /// `attention/block_indexer_scores.wgsl`.
    struct BlockIndexerScoresParams {
        q: ViewParams,
        scores: ViewParams,
        rows: u32,
        table: u32,
        heads: u32,
        local: u32,
        tiles: u32,
    }

    /// `attention/block_indexer_top.wgsl`.
    struct BlockIndexerTopParams {
        scores: ViewParams,
        out: ViewParams,
        rows: u32,
        table: u32,
        heads: u32,
    }

    /// `attention/indexer_top_positions.wgsl`.
    struct IndexerTopPositionsParams {
        scores: ViewParams,
        out: ViewParams,
        rows: u32,
        table: u32,
        width: u32,
        ratio: u32,
        top_k: u32,
        window: u32,
        ring: u32,
    }

    /// `streams/stream_weights.wgsl`.
    struct StreamWeightsParams {
        logits: ViewParams,
        scale: u32,
        base: u32,
        rows: u32,
        iterations: u32,
        eps: f32,
    }

    /// `streams/collapse.wgsl`.
    struct CollapseParams {
        x: ViewParams,
        weights: ViewParams,
        out: ViewParams,
        count: u32,
        width: u32,
    }

    /// `streams/expand.wgsl`.
    struct ExpandParams {
        x: ViewParams,
        y: ViewParams,
        gate: ViewParams,
        mixing: ViewParams,
        count: u32,
        width: u32,
    }

    /// `elementwise/embed.wgsl`.
    struct EmbedParams {
        out: ViewParams,
        m: MatrixParams,
        first_id: u32,
        id_stride: u32,
        count: u32,
        last_id: u32,
        first_row: u32,
        rows: u32,
        zero: u32,
    }

    /// `attention/segment_attention.wgsl` and `attention/segment_cooperative.wgsl`.
    struct SegmentAttentionParams {
        q: ViewParams,
        k: ViewParams,
        v: ViewParams,
        out: ViewParams,
        table: u32,
        tiles: u32,
        heads: u32,
        group: u32,
        scale: f32,
    }

    /// `attention/segment_f16.wgsl`.
    struct SegmentF16Params {
        k: ViewParams,
        v: ViewParams,
        heads: u32,
        words: u32,
    }

    /// `elementwise/scatter_rows.wgsl`.
    struct ScatterRowsParams {
        x: ViewParams,
        out: ViewParams,
        count: u32,
        width: u32,
        list: u32,
    }

    /// `elementwise/glu.wgsl`.
    struct GluParams {
        gate: ViewParams,
        up: ViewParams,
        out: ViewParams,
        count: u32,
        width: u32,
        alpha: f32,
        limit: f32,
    }

    /// `elementwise/head_gate.wgsl`.
    struct HeadGateParams {
        x: ViewParams,
        gate: ViewParams,
        count: u32,
        heads: u32,
        width: u32,
    }

    /// `elementwise/gather_columns.wgsl`.
    struct GatherColumnsParams {
        x: ViewParams,
        orders: ViewParams,
        ids: ViewParams,
        out: ViewParams,
        count: u32,
        width: u32,
        k: u32,
        orders_count: u32,
    }

    /// `elementwise/map.wgsl`.
    struct MapParams {
        x: ViewParams,
        y: ViewParams,
        count: u32,
        width: u32,
        factor: f32,
    }

    /// `elementwise/norm.wgsl`.
    struct NormParams {
        x: ViewParams,
        out: ViewParams,
        other: ViewParams,
        weight: u32,
        bias: u32,
        vectors: u32,
        heads: u32,
        width: u32,
        eps: f32,
    }

    /// `elementwise/keyed_gate.wgsl`.
    struct KeyedGateParams {
        q: ViewParams,
        k: ViewParams,
        v: ViewParams,
        out: ViewParams,
        vectors: u32,
        heads: u32,
        width: u32,
        scale: f32,
    }

    /// `recurrent/conv1d.wgsl`.
    struct Conv1dParams {
        x: ViewParams,
        out: ViewParams,
        weight: u32,
        bias: u32,
        channels: u32,
        table: u32,
        sequences: u32,
    }

    /// `recurrent/compress.wgsl`.
    struct CompressParams {
        x: ViewParams,
        gate: ViewParams,
        out: ViewParams,
        ape: u32,
        width: u32,
        table: u32,
        sequences: u32,
    }

    /// `recurrent/delta_net.wgsl`.
    struct DeltaNetParams {
        q: ViewParams,
        k: ViewParams,
        v: ViewParams,
        alpha: ViewParams,
        beta: ViewParams,
        out: ViewParams,
        a_log: u32,
        dt_bias: u32,
        rows: u32,
        bound: f32,
        table: u32,
        q_scale: f32,
        conv_x: u32,
        conv_weight: u32,
        channels: u32,
        gate: u32,
        gate_row_stride: u32,
        norm_weight: u32,
        squares: u32,
        squares_row_stride: u32,
    }

    /// `recurrent/mamba2.wgsl`.
    struct Mamba2Params {
        x: ViewParams,
        b: ViewParams,
        c: ViewParams,
        dt: ViewParams,
        out: ViewParams,
        a_log: u32,
        d: u32,
        dt_bias: u32,
        rows: u32,
        table: u32,
        min_step: f32,
        max_step: f32,
    }

    /// `sampling/top_logits.wgsl` and `sampling/top_logit.wgsl`.
    struct TopLogitsParams {
        logits: ViewParams,
        best: ViewParams,
        rows: u32,
        width: u32,
        count: u32,
        segments: u32,
        src: u32,
        dst: u32,
    }

    /// `probe/read_bandwidth.wgsl`.
    struct ReadBandwidthParams {
        blocks: u32,
        groups: u32,
    }
}

impl ViewParams {
    pub(crate) fn new(store: &Store, view: &View) -> Result<Self, Error> {
        Ok(Self {
            offset: store.view_offset(view)?,
            row_stride: view.row_stride as u32,
            head_stride: view.head_stride as u32,
        })
    }
}

impl MatrixParams {
    /// `planes`: byte offsets of the planes.
    pub(crate) fn new(planes: PerPlane<u32>, shape: MatrixShape) -> Self {
        let [weights, scales, biases] = planes;
        let layouts = shape.format.planes(shape.cols);
        Self {
            weights,
            scales,
            biases,
            row_bytes: layouts[0].row_bytes as u32,
            scale_bytes: layouts[1].row_bytes as u32,
        }
    }
}

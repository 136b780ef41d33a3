//! Operands of weight kernels: shards of resident matrices, expert uses by bank, GLU activations.

use super::super::{
    params::AssignmentParams,
    store::{DeviceBuffer, Store},
};
use crate::{
    error::Error,
    gpu::store::weights::WeightShard,
    handle::Weight,
    matrix::MatrixShape,
    operands::{Activation, GateFunction},
};

/// Shards of a weight matrix, each with its arena.
pub(in crate::gpu) struct WeightShards {
    pub(in crate::gpu) shape: MatrixShape,
    pub(in crate::gpu) shards: Vec<(DeviceBuffer, WeightShard)>,
}

impl WeightShards {
    pub(in crate::gpu) fn new(store: &Store, weight: Weight) -> Result<Self, Error> {
        let matrix = store.matrix(weight)?;
        let shards = matrix.shards.iter().map(|shard| (store.arena(shard), *shard)).collect();
        Ok(Self { shape: matrix.shape, shards })
    }
}

/// `ASSIGNMENTS` of kernels: how they find the slot and the row of a use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::gpu) enum UsesKind {
    /// Row `i` uses the only matrix.
    Single = 0,
    /// A list of slot, row of `x` and row of `out`.
    Listed = 1,
    /// Expert ids of a router, and a table of slots.
    Routed = 2,
}

/// Expert uses of an op in one bank.
#[derive(Clone)]
pub(in crate::gpu) struct BankUses {
    pub(in crate::gpu) bank: DeviceBuffer,
    pub(in crate::gpu) count: usize,
    /// Row of `inner` of the first use.
    pub(in crate::gpu) first_row: usize,
    pub(in crate::gpu) kind: UsesKind,
    /// Buffer with the list or the table of slots.
    pub(in crate::gpu) words: DeviceBuffer,
    pub(in crate::gpu) params: AssignmentParams,
    /// Experts of the slot table if all of them are in this bank, else 0.
    pub(in crate::gpu) table_entries: usize,
    /// Whether all uses are of one row.
    pub(in crate::gpu) one_row: bool,
}

impl BankUses {
    /// `count` rows and a matrix in an arena, not in a slot. Kernels bind `words` but do not read
    /// it.
    pub(in crate::gpu) const fn of_matrix(
        arena: DeviceBuffer,
        words: DeviceBuffer,
        count: usize,
    ) -> Self {
        Self {
            bank: arena,
            count,
            first_row: 0,
            kind: UsesKind::Single,
            words,
            params: AssignmentParams { list: 0, row_stride: 0, k: 1, bank: 0 },
            table_entries: 0,
            one_row: count == 1,
        }
    }
}

/// `FUNCTION` of `common/gate_function.wgsl`.
pub(in crate::gpu) const fn gate_code(function: GateFunction) -> u32 {
    match function {
        GateFunction::Sigmoid => 0,
        GateFunction::Softplus => 1,
        GateFunction::Identity => 2,
        GateFunction::DoubleSigmoid => 3,
    }
}

/// `ACTIVATION` of kernels and its two parameters.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::gpu) struct GluCode {
    pub(in crate::gpu) kind: u32,
    pub(in crate::gpu) alpha: f32,
    pub(in crate::gpu) limit: f32,
}

impl From<Activation> for GluCode {
    fn from(activation: Activation) -> Self {
        match activation {
            Activation::SwiGlu => Self { kind: 0, alpha: 0.0, limit: 0.0 },
            Activation::GeGlu => Self { kind: 1, alpha: 0.0, limit: 0.0 },
            Activation::ClampedSwiGlu { alpha, limit } => Self { kind: 2, alpha, limit },
            Activation::ClippedSwiGlu { limit } => Self { kind: 3, alpha: 0.0, limit },
            Activation::LimitedSwiGlu { limit } => Self { kind: 4, alpha: 0.0, limit },
            Activation::Relu2 => Self { kind: 5, alpha: 0.0, limit: 0.0 },
        }
    }
}

//! Operands of weight kernels: shards of resident matrices, expert uses by bank, GLU activations.

use moeflux_ops::{Activation, Error, GateFunction, MatrixShape, Weight};

use super::super::{
    params::AssignmentParams,
    store::{DeviceBuffer, Store},
};
use crate::store::weights::WeightShard;

/// Shards of a weight matrix, each with its arena.
pub(crate) struct WeightShards {
    pub(crate) shape: MatrixShape,
    pub(crate) shards: Vec<(DeviceBuffer, WeightShard)>,
}

impl WeightShards {
    pub(crate) fn new(store: &Store, weight: Weight) -> Result<Self, Error> {
        let matrix = store.matrix(weight)?;
        let shards = matrix.shards.iter().map(|shard| (store.arena(shard), *shard)).collect();
        Ok(Self { shape: matrix.shape, shards })
    }
}

/// `ASSIGNMENTS` of kernels: how they find the slot and the row of a use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UsesKind {
    /// Row `i` uses the only matrix.
    Single = 0,
    /// A list of slot, row of `x` and row of `out`.
    Listed = 1,
    /// Expert ids of a router, and a table of slots.
    Routed = 2,
}

/// Expert uses of an op in one bank.
#[derive(Clone)]
pub(crate) struct BankUses {
    pub(crate) bank: DeviceBuffer,
    pub(crate) count: usize,
    /// Row of `inner` of the first use.
    pub(crate) first_row: usize,
    pub(crate) kind: UsesKind,
    /// Buffer with the list or the table of slots.
    pub(crate) words: DeviceBuffer,
    pub(crate) params: AssignmentParams,
    /// Experts of the slot table if all of them are in this bank, else 0.
    pub(crate) table_entries: usize,
    /// Whether all uses are of one row.
    pub(crate) one_row: bool,
}

impl BankUses {
    /// `count` rows and a matrix in an arena, not in a slot. Kernels bind `words` but do not read
    /// it.
    pub(crate) const fn of_matrix(arena: DeviceBuffer, words: DeviceBuffer, count: usize) -> Self {
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
pub(crate) const fn gate_code(function: GateFunction) -> u32 {
    match function {
        GateFunction::Sigmoid => 0,
        GateFunction::Softplus => 1,
        GateFunction::Identity => 2,
        GateFunction::DoubleSigmoid => 3,
    }
}

/// `ACTIVATION` of kernels and its two parameters.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct GluCode {
    pub(crate) kind: u32,
    pub(crate) alpha: f32,
    pub(crate) limit: f32,
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
            Activation::Gelu => Self { kind: 6, alpha: 0.0, limit: 0.0 },
            Activation::GeluTanh => Self { kind: 7, alpha: 0.0, limit: 0.0 },
            Activation::QuickGelu => Self { kind: 8, alpha: 0.0, limit: 0.0 },
        }
    }
}

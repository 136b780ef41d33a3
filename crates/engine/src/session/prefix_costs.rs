//! Costs of cached prefixes: the time to compute them again, and the bytes that they hold.

use std::mem::size_of;

use moeflux_compute::{Device, KV_BLOCK, StateShape};
use moeflux_model::seam::LayerState;

use crate::runtime::{prefill_cost::PrefillCost, spans::LayerStates};

/// Bytes of a state's handle and of its allocation.
const STATE_HANDLE: u64 = 160;
/// Bytes of the handle of a page of a KV cache, and of the reference to it.
const PAGE_HANDLE: u64 = 64;
const PAGE_REFERENCE: u64 = 8;

/// A state of a session, and the bytes of one of its entries.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StateSize {
    pub(crate) state: LayerState,
    pub(crate) entry_bytes: u64,
}

/// Costs of the prefixes of a model on a device.
#[derive(Debug, Default)]
pub(crate) struct PrefixCosts {
    pub(crate) prefill: PrefillCost,
    pub(crate) states: Vec<StateSize>,
    /// Number of layers.
    pub(crate) layers: usize,
}

impl PrefixCosts {
    pub(crate) fn new(
        prefill: PrefillCost,
        layer_states: &[Vec<LayerState>],
        device: &dyn Device,
    ) -> Self {
        let states = layer_states.iter().flatten().map(|state| {
            let entry_bytes = device.entry_bytes(state.shape) as u64;
            StateSize { state: *state, entry_bytes }
        });
        Self { prefill, states: states.collect(), layers: layer_states.len() }
    }

    /// Approximate bytes of states that a prefix adds, if `tokens` of its tokens are not shared
    /// with another one.
    pub(crate) fn state_bytes(&self, tokens: usize) -> u64 {
        let bytes = self.states.iter().map(|StateSize { state, entry_bytes }| {
            (state.filled(tokens, tokens) as u64).saturating_mul(*entry_bytes)
        });
        bytes.fold(0, u64::saturating_add)
    }

    /// Host memory of the handles of a prefix's states.
    pub(crate) fn handle_bytes(&self, tokens: usize) -> u64 {
        let states = self.states.iter().map(|StateSize { state, .. }| match state.shape {
            StateShape::Recurrent { .. } => STATE_HANDLE,
            StateShape::KeyValue { positions, .. } => {
                let references = positions.div_ceil(KV_BLOCK) as u64 * PAGE_REFERENCE;
                let pages = tokens.min(positions).div_ceil(KV_BLOCK) as u64 * PAGE_HANDLE;
                STATE_HANDLE + references + pages
            }
        });
        states.sum::<u64>() + (self.layers * size_of::<LayerStates>()) as u64
    }
}

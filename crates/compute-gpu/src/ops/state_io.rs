//! State transfers: KV cache growth, zeroing, saving and loading, ordered among the ops.

use std::{ops::Range, sync::Arc};

use moeflux_ops::{Error, State, StateShape};

use super::super::{
    recorder::{BufferRef, Recorder},
    store::{DeviceBuffer, Store},
};
use crate::store::states::{GpuState, KvEnd};

/// Bytes that are saved or loaded at a time.
const CHUNK_BYTES: usize = 16 << 20;

/// Prepares a KV cache for a write of `rows` rows from `position` on: makes its allocation
/// exclusive and large enough.
pub(crate) fn reserve_kv(
    recorder: &mut Recorder,
    store: &mut Store,
    state: State,
    position: usize,
    rows: usize,
) -> Result<(), Error> {
    let kv = store.states.kv(state)?;
    let end = kv.end_after(position, rows);
    if let Some(growth) = store.states.growth(kv, end) {
        recorder.refuse_while_recording(
            "a step that is recorded ahead cannot move states to other memory",
        )?;
        let old = kv.clone();
        let new = store.allocate_kv(&old, growth)?;
        if !new.is_zero {
            // Of other states before: rows past the last one may be loaded, and are then ignored.
            recorder.zero(&new.buffer);
        }
        let copied = growth.of_forks.unwrap_or(old.used);
        if let Some(old_allocation) = &old.allocation {
            let element = store.states.kv_format.bytes(1) as u64;
            let src = &*old_allocation.buffer;
            let offsets = [
                [0, 0],
                [old_allocation.values, new.values].map(|values| u64::from(values) * element),
            ];
            for (row_bytes, [src_offset, dst_offset]) in old.row_bytes.into_iter().zip(offsets) {
                let src = BufferRef { buffer: src, offset: src_offset };
                let dst = BufferRef { buffer: &new.buffer, offset: dst_offset };
                recorder.copy(src, dst, row_bytes as u64 * copied as u64);
            }
        }
        // Its references go first: the old allocation may be free then.
        drop(old);
        store.states.replace_kv(state, new, growth.of_forks.is_some())?;
        recorder.forget_bindings(store.states.take_freed());
    }
    let written = KvEnd { state, end };
    match recorder.recorded_kv_ends() {
        Some(of_step) => of_step.push(written),
        None => store.states.mark_written(&[], &[written])?,
    }
    Ok(())
}

/// Makes the committed contents of a recurrent state exclusive, by a copy if a fork shares them.
/// Discards writes since the commit.
fn unshare_committed(
    recorder: &mut Recorder,
    store: &mut Store,
    state: State,
) -> Result<DeviceBuffer, Error> {
    if !store.states.recurrent(state)?.is_exclusive() {
        let recurrent = store.writable(state, 0)?;
        recurrent.swap(0);
        let own = DeviceBuffer::clone(&recurrent.committed);
        if let Some(shared) = recurrent.take_shared(0) {
            let src = BufferRef { buffer: &shared, offset: 0 };
            recorder.copy(src, BufferRef { buffer: &own, offset: 0 }, own.size);
            store.states.release([shared]);
        }
    }
    let recurrent = store.states.recurrent(state)?;
    recurrent.written = 0;
    Ok(DeviceBuffer::clone(&recurrent.committed))
}

/// Zeroes a recurrent state. A KV cache needs no zeroing: only written positions are read.
pub(crate) fn zero(recorder: &mut Recorder, store: &mut Store, state: State) -> Result<(), Error> {
    if let GpuState::Recurrent(_) = store.states.get(state)? {
        let committed = unshare_committed(recorder, store, state)?;
        recorder.zero(&committed);
    }
    Ok(())
}

/// Saves positions: see [`StateStore::save_state`](moeflux_ops::StateStore::save_state).
pub(crate) fn save(
    recorder: &mut Recorder,
    store: &Store,
    state: State,
    positions: Range<usize>,
    out: &mut [u8],
) -> Result<(), Error> {
    let format = store.states.kv_format;
    let position_bytes = store.states.position_bytes(state, &positions, out.len())?;
    let kv = match store.states.get(state)? {
        GpuState::Recurrent(recurrent) => {
            let committed = Arc::clone(&recurrent.committed);
            return out
                .chunks_mut(CHUNK_BYTES)
                .zip((positions.start * 4..).step_by(CHUNK_BYTES))
                .try_for_each(|(out, offset)| recorder.read_bytes(&committed, offset, out));
        }
        GpuState::Kv(kv) => kv,
    };
    // Positions that were never written are zero.
    let written = positions.end.min(kv.used).saturating_sub(positions.start) * position_bytes;
    let (out, rest) = out.split_at_mut(written);
    rest.fill(0);
    let Some(allocation) = &kv.allocation else { return Ok(()) };
    let position_bytes = position_bytes.max(1);
    let values_offset = allocation.values as usize * format.bytes(1);
    let step = (CHUNK_BYTES / position_bytes).max(1);
    let [key_bytes, value_bytes] = kv.row_bytes;
    let (mut keys, mut values) = (Vec::new(), Vec::new());
    for (out, first) in out.chunks_mut(step * position_bytes).zip((positions.start..).step_by(step))
    {
        let count = out.len() / position_bytes;
        keys.resize(count * key_bytes, 0);
        recorder.read_bytes(&allocation.buffer, first * key_bytes, &mut keys)?;
        values.resize(count * value_bytes, 0);
        let offset = values_offset + first * value_bytes;
        recorder.read_bytes(&allocation.buffer, offset, &mut values)?;
        for (i, out) in out.chunks_exact_mut(position_bytes).enumerate() {
            let (k, v) = out.split_at_mut(key_bytes);
            k.copy_from_slice(&keys[i * key_bytes..][..key_bytes]);
            v.copy_from_slice(&values[i * value_bytes..][..value_bytes]);
        }
    }
    Ok(())
}

/// Loads positions: see [`StateStore::load_state`](moeflux_ops::StateStore::load_state).
pub(crate) fn load(
    recorder: &mut Recorder,
    store: &mut Store,
    state: State,
    positions: Range<usize>,
    bytes: &[u8],
) -> Result<(), Error> {
    let (shape, format) = (store.states.shape(state)?, store.states.kv_format);
    let position_bytes = store.states.position_bytes(state, &positions, bytes.len())?.max(1);
    if let StateShape::Recurrent { .. } = shape {
        let committed = unshare_committed(recorder, store, state)?;
        recorder.submit();
        return bytes
            .chunks(CHUNK_BYTES)
            .zip((positions.start * 4..).step_by(CHUNK_BYTES))
            .try_for_each(|(bytes, offset)| recorder.write_bytes(&committed, offset, bytes));
    }
    reserve_kv(recorder, store, state, positions.start, positions.len())?;
    recorder.submit();
    let kv = store.states.kv(state)?;
    let Some(allocation) = &kv.allocation else { return Ok(()) };
    let values_offset = allocation.values as usize * format.bytes(1);
    let step = (CHUNK_BYTES / position_bytes).max(1);
    let [key_bytes, value_bytes] = kv.row_bytes;
    let regions = [(0..key_bytes, 0), (key_bytes..key_bytes + value_bytes, values_offset)];
    let mut region_bytes = Vec::new();
    for (bytes, first) in bytes.chunks(step * position_bytes).zip((positions.start..).step_by(step))
    {
        for (range, offset) in &regions {
            region_bytes.clear();
            let position = |bytes: &[u8]| region_bytes.extend_from_slice(&bytes[range.clone()]);
            bytes.chunks_exact(position_bytes).for_each(position);
            let offset = offset + first * range.len();
            recorder.write_bytes(&allocation.buffer, offset, &region_bytes)?;
        }
    }
    Ok(())
}

//! Tests of slots that the host fills, with every kind of memory sharing that the driver has.

#![allow(clippy::unwrap_used)]

use moeflux_ops::{BankPlace, DeviceOptions, Slot, SlotStore, StateShape, StateStore};

use crate::{
    card::{adapter::is_unified, native::Sharing},
    device::GpuDevice,
};

/// The best adapter, opened; `None` if there is none to test, or `MOEFLUX_TEST_GPU` is `none`.
pub(crate) fn gpu_with(options: &DeviceOptions) -> Option<GpuDevice> {
    let requested = std::env::var_os("MOEFLUX_TEST_GPU");
    if requested.as_deref().is_some_and(|name| name == "none") {
        return None;
    }
    match GpuDevice::new(None, options) {
        Ok(gpu) => Some(gpu),
        Err(error) => {
            assert!(requested.is_none(), "{error}");
            eprintln!("no GPU is tested: {error}");
            None
        }
    }
}

fn gpu() -> Option<GpuDevice> {
    gpu_with(&DeviceOptions::default().exact(true))
}

/// A state that reuses the range of another one is zero, and states of a limit share an arena.
#[test]
fn states_share_an_arena_and_begin_with_zeros() {
    let Some(mut gpu) = gpu() else { return };
    gpu.limit_states(8 << 10);
    let shape = StateShape::Recurrent { len: 128 };
    let first = gpu.state(shape).unwrap();
    gpu.load_state(first, 0..128, &[7; 512]).unwrap();
    let others = [0; 2].map(|_| gpu.state(shape).unwrap());
    gpu.drop_state(first);
    let reused = gpu.state(shape).unwrap();
    let mut bytes = [1; 512];
    gpu.save_state(reused, 0..128, &mut bytes).unwrap();
    assert_eq!(bytes, [0; 512]);
    let raws = [reused, others[0], others[1]].map(|state| {
        let [committed, next] = gpu.store.write_recurrent(state, 0).unwrap();
        assert_eq!(committed.raw, next.raw);
        committed.raw
    });
    assert!(raws.iter().all(|raw| *raw == raws[0]));
}

/// Where a limit needs several arenas, each has whole layers.
#[test]
fn states_of_a_layer_share_an_arena() {
    const LAYERS: usize = 8;
    let Some(mut gpu) = gpu() else { return };
    gpu.store.max_bytes = 16 << 10;
    gpu.limit_states(64 << 10);
    gpu.reserve_whole_states(true);
    // 2 KiB each, committed and next contents.
    let shape = StateShape::Recurrent { len: 256 };
    let mut arenas: Vec<Vec<_>> = vec![Vec::new(); LAYERS];
    for _ in 0..4 {
        for (layer, arenas) in arenas.iter_mut().enumerate() {
            let state = gpu.layer_state(shape, layer).unwrap();
            let contents = gpu.store.write_recurrent(state, 0).unwrap();
            arenas.extend(contents.map(|contents| contents.raw));
        }
    }
    for arenas in &arenas {
        assert!(arenas.iter().all(|arena| *arena == arenas[0]));
    }
    let layers_with = |arena: &wgpu::Buffer| arenas.iter().filter(|a| a[0] == *arena).count();
    assert!(arenas.iter().all(|arenas| layers_with(&arenas[0]) == LAYERS / 4));
}

/// Bytes of a slot as kernels read them.
fn seen(gpu: &mut GpuDevice, slot: Slot, len: usize) -> Vec<u8> {
    let buffer = gpu.store.bank_buffer(slot.bank.index).unwrap();
    let mut words = vec![0; len.div_ceil(4)];
    let offset = gpu.store.slot_offset(slot).into();
    gpu.recorder.read_words(&buffer.raw, offset, &mut words).unwrap();
    bytemuck::cast_slice(&words)[..len].to_vec()
}

#[test]
fn the_card_reads_and_copies_slots_that_the_host_wrote() {
    const LEN: usize = 1003;
    let Some(mut gpu) = gpu() else { return };
    let software = is_unified(&gpu.card.adapter);
    assert!(!software || gpu.store.sharing() == Sharing::Mapped, "{:?}", gpu.store.sharing());
    let slot = |bank, index| Slot { bank, index };
    for sharing in [Sharing::Mapped, Sharing::Imported, Sharing::Refused] {
        if sharing != Sharing::Refused && sharing.buffer(&gpu.card.device, 4096).is_err() {
            eprintln!("{sharing:?} memory is not tested: the driver has none");
            continue;
        }
        gpu.store.set_sharing(sharing);
        let card = gpu.bank(3, LEN, BankPlace::Card).unwrap();
        let host = gpu.bank(3, LEN, BankPlace::Host).unwrap();
        let contents = |index: u32, round: u32| -> Vec<u8> {
            (0..LEN as u32).map(|i| (i * 7 + index * 31 + round * 5) as u8).collect()
        };
        for round in 0..3 {
            for index in 0..3 {
                let mut memory = gpu.take_slot(slot(host, index)).unwrap();
                assert!(gpu.copy_slot(slot(host, index), slot(card, index)).is_err());
                // Filled by another thread, as the reader does.
                let memory = std::thread::scope(|scope| {
                    let fill = move || {
                        memory.copy_from_slice(&contents(index, round));
                        memory
                    };
                    scope.spawn(fill).join().unwrap()
                });
                gpu.put_slot(slot(host, index), memory).unwrap();
                // Copied to the next slot.
                gpu.copy_slot(slot(host, index), slot(card, (index + 1) % 3)).unwrap();
            }
            for index in 0..3 {
                let copied = seen(&mut gpu, slot(card, (index + 1) % 3), LEN);
                assert!(copied == contents(index, round), "{sharing:?}, slot {index}");
                match sharing {
                    Sharing::Refused => {
                        assert!(gpu.slot_table(&[Some(slot(host, index))]).is_err())
                    }
                    _ => assert!(seen(&mut gpu, slot(host, index), LEN) == contents(index, round)),
                }
            }
        }
        assert!(gpu.take_slot(slot(card, 0)).is_err());
        let first = gpu.take_slot(slot(host, 0)).unwrap();
        assert!(gpu.take_slot(slot(host, 0)).is_err());
        assert!(gpu.put_slot(slot(host, 1), first).is_err());
    }
    assert!(gpu.bank(usize::MAX, 1 << 20, BankPlace::Host).is_err());
}

#[test]
fn slot_memory_that_is_taken_out_outlives_its_device() {
    let Some(mut gpu) = gpu() else { return };
    let bank = gpu.bank(2, 5000, BankPlace::Host).unwrap();
    let mut memory = gpu.take_slot(Slot { bank, index: 1 }).unwrap();
    drop(gpu);
    memory.fill(3);
    assert!(memory.iter().all(|byte| *byte == 3));
    // Another device opens.
    assert!(self::gpu().is_some());
}

//! Experts that the host's processor computes beside a card.

use std::path::Path;

use moeflux::{
    Checkpoint, Engine, EngineOptions, Error, MemoryRequest,
    experts::ExpertsOnHost,
    runtime::{DeviceOptions, LineName},
};
use moeflux_compute::DeviceMemory;

use crate::common::{
    EXPERT_LAYERS, Golden, exact, feed, gpu,
    simulated_gpu::{Asked, Call, Card, Fault},
    tales,
};

/// Experts of the embedded model: 32 in each of 8 layers.
const EXPERTS: usize = 256;

fn card(in_place: bool) -> Card {
    let memory = DeviceMemory { total: Some(1 << 30), unified: false, in_place };
    Card { memory: Some(memory), ..Card::OWN }
}

fn request(slots: usize, host_slots: Option<usize>, how: ExpertsOnHost) -> MemoryRequest {
    MemoryRequest::default().slots(slots).host_slots(host_slots).experts_on_host(how)
}

/// The fast path of a device, with its memory as a card's own.
fn open(
    folder: &Path,
    device: DeviceOptions,
    card: Card,
    memory: MemoryRequest,
) -> (Engine, std::sync::Arc<std::sync::Mutex<Asked>>) {
    let (wrap, asked) = card.wrap();
    let options = EngineOptions::default().memory(memory).device(device).wrap_device(wrap);
    let engine = Engine::open(Checkpoint::open(folder).unwrap(), options, &mut |_, _| {});
    (engine.unwrap(), asked)
}

fn cpu() -> DeviceOptions {
    DeviceOptions::default().name("cpu").threads(2).f32_expert_inputs(true)
}

fn tokens(count: u32) -> Vec<u32> {
    (0..count).map(|i| (i * 97 + 13) % 4000).collect()
}

/// Bits of all logits, with these numbers of tokens per step.
fn bits(engine: &Engine, prompt: &[u32], steps: &[usize]) -> Vec<u32> {
    let (mut session, mut rest, mut bits) = (engine.session().unwrap(), prompt, Vec::new());
    for rows in steps {
        let (now, later) = rest.split_at(*rows);
        bits.extend(feed(&mut session, now, None).into_iter().map(f32::to_bits));
        rest = later;
    }
    bits
}

/// A simulated card has the kernels of the processor beside it, so the division changes no bit.
#[test]
fn experts_on_the_host_have_the_bits_of_the_processor() {
    let (prompt, steps) = (tokens(60), [20, 1, 36, 1, 1, 1]);
    let (read, _) = open(&tales(), cpu(), card(true), request(100, None, ExpertsOnHost::Read));
    let expected = bits(&read, &prompt, &steps);
    assert_eq!(read.plan().computed_on_host(), 0);
    let all = |slots| (slots, None);
    for (in_place, (slots, host_slots)) in [
        (true, all(100)),
        (false, all(100)),
        (true, all(4)),
        (false, all(255)),
        // Experts come from the disk.
        (true, (100, Some(40))),
        (false, (100, Some(40))),
        (false, (4, Some(16))),
    ] {
        let memory = request(slots, host_slots, ExpertsOnHost::Compute);
        let (engine, asked) = open(&tales(), cpu(), card(in_place), memory);
        let what = format!("{slots} slots, {host_slots:?} on the host, in place: {in_place}");
        assert_eq!(engine.plan().holds_all, host_slots.is_none(), "{what}");
        assert_eq!(engine.plan().computed_on_host(), EXPERTS - slots, "{what}");
        assert!(engine.plan().host().bytes(LineName::Scratch) > 0, "{what}");
        assert!(bits(&engine, &prompt, &steps) == expected, "{what}: other bits");
        let asked = *asked.lock().unwrap();
        assert!(asked.written > 0, "{what}: {asked:?}");
        // A card that cannot read host memory computes none of these experts.
        assert_eq!(asked.in_place > 0, in_place, "{what}: {asked:?}");
    }
}

#[test]
fn the_host_computes_the_same_experts_whatever_is_cached() {
    let Some(gpu) = gpu(false) else { return };
    let (prompt, steps) = (tokens(20), [16, 1, 1, 2]);
    let on_gpu = |slots, host_slots| {
        let memory = request(slots, host_slots, ExpertsOnHost::Compute);
        let (engine, _) = open(&tales(), gpu.clone(), card(true), memory);
        bits(&engine, &prompt, &steps)
    };
    let expected = on_gpu(96, None);
    for host_slots in [20, 100] {
        assert!(on_gpu(96, Some(host_slots)) == expected, "{host_slots} host slots: other bits");
    }
    // Another division rounds differently.
    assert!(on_gpu(32, None) != expected);
}

#[test]
fn every_kind_of_expert_layer_is_computed_on_the_host() {
    for name in EXPERT_LAYERS {
        let golden = Golden::read(name);
        let (prompt, steps) = (golden.prompt(), [golden.prompt().len() - 2, 1, 1]);
        let run = |how| {
            let memory = request(8, None, how);
            let (engine, asked) = open(&golden.folder, cpu(), card(true), memory);
            let bits = bits(&engine, &prompt, &steps);
            let written = asked.lock().unwrap().written;
            (bits, written)
        };
        let (expected, written) = run(ExpertsOnHost::Read);
        assert_eq!(written, 0, "{name}");
        let (bits, written) = run(ExpertsOnHost::Compute);
        assert!(bits == expected && written > 0, "{name}: other bits, {written} results written");
    }
}

#[test]
fn a_fault_leaves_sessions_and_borrowed_experts_as_they_were() {
    let prompt = tokens(12);
    let memory = request(60, None, ExpertsOnHost::Compute);
    let (whole, _) = open(&tales(), cpu(), card(true), memory);
    let expected = bits(&whole, &prompt, &[10, 1, 1]);
    let (engine, asked) = open(&tales(), cpu(), card(true), memory);
    let mut session = engine.session().unwrap();
    let mut all = feed(&mut session, &prompt[..10], None);
    for (call, after) in [(Call::Read, 3), (Call::Submit, 5), (Call::Run, 40)] {
        asked.lock().unwrap().fault = Some(Fault { call, after, is_loss: false });
        let mut control = moeflux::StepControl::default();
        let failed = session.sync(&[&prompt[..10], &[7]].concat(), &mut control);
        assert!(failed.is_err(), "{call:?}");
        assert_eq!(session.tokens(), &prompt[..10], "{call:?}");
    }
    prompt[10..].iter().for_each(|token| all.extend(feed(&mut session, &[*token], None)));
    assert!(all.into_iter().map(f32::to_bits).eq(expected), "other bits");
}

#[test]
fn the_exact_path_refuses_experts_on_the_host() {
    let memory = request(100, None, ExpertsOnHost::Compute);
    let options = EngineOptions::default().memory(memory).device(exact("cpu"));
    let opened = Engine::open(Checkpoint::open(&tales()).unwrap(), options, &mut |_, _| {});
    let error: Error = opened.map(drop).unwrap_err();
    assert!(error.to_string().contains("--experts-on-host read"), "{error}");
    // Without a card nothing changes.
    let options = EngineOptions::default().memory(memory).device(cpu());
    let engine = Engine::open(Checkpoint::open(&tales()).unwrap(), options, &mut |_, _| {});
    assert_eq!(engine.unwrap().plan().computed_on_host(), 0);
}

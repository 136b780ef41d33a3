//! Devices with separate memory: planning, residency of experts, and bit-equal results.

use std::path::Path;

use moeflux::{
    Checkpoint, Engine, EngineOptions, Error, MemoryPlan, MemoryRequest, StepControl,
    base::Stats,
    model::blueprint::Blueprint,
    runtime::{BankPlace, LineName},
    session::SnapshotOptions,
};
use moeflux_compute::DeviceMemory;

use crate::{
    common::{
        self, EXPERT_LAYERS, Golden, Seen, engine, exact, feed, few_slots, gpu, in_own_process,
        readers::every_nth,
        simulated_gpu::{Asked, Card},
        tales,
    },
    determinism::ON_A_GPU,
};

/// Reads in flight: one per reader thread, and the same number of finished ones.
const MIN_HOST_SLOTS: usize = 16;

fn open(folder: &Path, card: Card, memory: MemoryRequest) -> (Result<Engine, Error>, Asked) {
    let (wrap, asked) = card.wrap();
    let options = EngineOptions::default().memory(memory).device(exact("cpu")).wrap_device(wrap);
    let engine = Engine::open(Checkpoint::open(folder).unwrap(), options, &mut |_, _| {});
    let asked = *asked.lock().unwrap();
    (engine, asked)
}

/// Bits of the logits of a prompt and of four tokens after it on a simulated GPU, its calls, and
/// the cost of the four tokens.
fn on_card(
    folder: &Path,
    prompt: &[u32],
    card: Card,
    slots: Option<usize>,
) -> (Vec<u32>, Asked, Stats) {
    // The host has one slot too few for the experts that the device does not hold.
    let all = Blueprint::for_checkpoint(&Checkpoint::open(folder).unwrap()).unwrap().experts();
    let host_slots = slots.map(|slots| (all - slots).saturating_sub(1).max(1));
    with_slots("cpu", folder, prompt, card, [slots, host_slots])
}

/// The same with given numbers of slots in device and host memory.
fn with_slots(
    device: &str,
    folder: &Path,
    prompt: &[u32],
    card: Card,
    [slots, host_slots]: [Option<usize>; 2],
) -> (Vec<u32>, Asked, Stats) {
    let (wrap, asked) = card.wrap();
    let memory = MemoryRequest::default().slots(slots).host_slots(host_slots);
    let options = EngineOptions::default().memory(memory).device(exact(device)).wrap_device(wrap);
    let engine = Engine::open(Checkpoint::open(folder).unwrap(), options, &mut |_, _| {}).unwrap();
    let mut session = engine.session().unwrap();
    let (first, rest) = prompt.split_at(prompt.len() - 4);
    let mut logits = feed(&mut session, first, None);
    let before = session.stats();
    for token in rest {
        logits.extend(feed(&mut session, &[*token], None));
    }
    let stats = session.stats().since(&before);
    let asked = *asked.lock().unwrap();
    (logits.into_iter().map(f32::to_bits).collect(), asked, stats)
}

/// Bits of the same tokens on the CPU.
fn on_cpu(folder: &Path, prompt: &[u32]) -> Vec<u32> {
    let engine = common::engine(folder, exact("cpu"), MemoryRequest::default());
    let mut session = engine.session().unwrap();
    let (first, rest) = prompt.split_at(prompt.len() - 4);
    let mut logits = feed(&mut session, first, None);
    rest.iter().for_each(|token| logits.extend(feed(&mut session, &[*token], None)));
    logits.into_iter().map(f32::to_bits).collect()
}

#[test]
fn a_fully_resident_model_is_never_waited_for() {
    let prompt: Vec<u32> = (0..40).map(|i| (i * 97 + 13) % 4000).collect();
    let expected = on_cpu(&tales(), &prompt);
    // Banks hold whole layers of 32 experts if one fits.
    for (bank, banks) in [(77, 4), (31, 9), (32, 8), (usize::MAX, 1)] {
        let (bits, asked, stats) = on_card(&tales(), &prompt, Card { bank, ..Card::OWN }, None);
        assert!(bits == expected, "banks of {bank}: other bits");
        // 8 layers in 5 steps. Only logits are read back: of 36 rows in rounds of 32, then of one
        // row each.
        assert_eq!((asked.routed, asked.listed, asked.reads), (8 * 5, 0, 2 + 4), "{asked:?}");
        assert_eq!(asked.tables, 8);
        assert!(0 < asked.most_filled && asked.most_filled <= MIN_HOST_SLOTS, "{asked:?}");
        assert_eq!(asked.banks, banks);
        assert_eq!((stats.experts_needed, stats.experts_hit), (4 * 8 * 4, 4 * 8 * 4));
        assert_eq!((stats.experts_read, stats.waits), (0, 4));
        assert!(stats.dispatches > 4 * 8);
    }
}

#[test]
fn resident_and_streamed_layers_mix() {
    let prompt: Vec<u32> = (0..120).map(|i| (i * 97 + 13) % 4000).collect();
    let expected = on_cpu(&tales(), &prompt);
    let (bits, asked, stats) = on_card(&tales(), &prompt, Card::OWN, Some(200));
    assert!(bits == expected, "other bits");
    assert!(asked.routed > 0 && asked.listed > 8, "{asked:?}");
    assert!(stats.experts_hit < stats.experts_needed, "{stats:?}");
    let (bits, asked, _) = on_card(&tales(), &prompt, Card { bank: 3, ..Card::OWN }, Some(4));
    assert!(bits == expected && asked.routed == 0 && asked.banks == 2, "{asked:?}");
}

#[test]
fn every_kind_of_expert_layer_is_bit_equal_on_a_gpu() {
    for name in EXPERT_LAYERS {
        let golden = Golden::read(name);
        let blueprint =
            Blueprint::for_checkpoint(&Checkpoint::open(&golden.folder).unwrap()).unwrap();
        let expected = on_cpu(&golden.folder, &golden.prompt());
        let (bits, asked, _) =
            on_card(&golden.folder, &golden.prompt(), Card { bank: 5, ..Card::OWN }, None);
        assert!(bits == expected, "{name}: other bits");
        assert!(asked.routed > 0 && asked.listed == 0, "{name}: {asked:?}");
        let some = Some((blueprint.experts() * 3 / 4).max(blueprint.max_top_k()));
        let (bits, ..) =
            on_card(&golden.folder, &golden.prompt(), Card { bank: 5, ..Card::OWN }, some);
        assert!(bits == expected, "{name}: other bits with few slots");
    }
}

#[test]
fn a_fused_shared_expert_is_in_the_bank_of_its_layer() {
    // 4 layers of 16 experts and a shared expert of the same shape.
    let golden = Golden::read("qwen3_5_moe");
    let expected = on_cpu(&golden.folder, &golden.prompt());
    for (bank, banks) in [(17, 4), (35, 2), (50, 2), (67, 2), (68, 1)] {
        let (bits, asked, _) =
            on_card(&golden.folder, &golden.prompt(), Card { bank, ..Card::OWN }, None);
        assert!(bits == expected, "banks of {bank}: other bits");
        assert_eq!((asked.tables, asked.scattered, asked.banks), (4, 0, banks), "banks of {bank}");
        assert_eq!(asked.copies, 4 * 17);
    }
    // If a layer does not fit a bank, the shared expert is with the layer's first experts.
    for (bank, banks) in [(16, 5), (7, 11), (2, 64)] {
        let (bits, asked, _) =
            on_card(&golden.folder, &golden.prompt(), Card { bank, ..Card::OWN }, None);
        assert!(bits == expected, "banks of {bank}: other bits");
        assert_eq!((asked.scattered, asked.banks), (4, banks), "banks of {bank}");
    }
}

/// A discrete GPU that can or cannot read host memory in place.
const fn card(in_place: bool) -> Card {
    Card {
        memory: Some(DeviceMemory { total: Some(1 << 30), unified: false, in_place }),
        ..Card::OWN
    }
}

#[test]
fn experts_in_host_memory_are_read_in_place() {
    let prompt: Vec<u32> = (0..60).map(|i| (i * 97 + 13) % 4000).collect();
    let expected = on_cpu(&tales(), &prompt);
    for (slots, on_host) in [(0, 256), (1, 255), (100, 156), (240, 16)] {
        let slots_of = [Some(slots), None];
        let (bits, asked, stats) = with_slots("cpu", &tales(), &prompt, card(true), slots_of);
        assert!(bits == expected, "{slots} slots: other bits");
        // Nothing is waited for, read or copied after loading.
        assert_eq!((asked.routed, asked.listed, asked.copies), (8 * 5, 0, slots), "{asked:?}");
        assert_eq!(
            (stats.experts_read, stats.waits, stats.experts_hit),
            (0, 4, stats.experts_needed)
        );
        assert!(asked.in_place >= 256 - slots && asked.in_place <= on_host, "{asked:?}");
    }
}

/// Compares the logits with several slot counts of device and host.
fn tiers(device: &str, folder: &Path, prompt: &[u32], expected: &[u32]) {
    let blueprint = Blueprint::for_checkpoint(&Checkpoint::open(folder).unwrap()).unwrap();
    let (all, k) = (blueprint.experts(), blueprint.max_top_k());
    let sizes = [
        (all / 3, all - all / 3, true),
        (all, 1, false),
        (all / 3, all - all / 3, false),
        (0, all, true),
        (all / 2, all / 4, true),
        (all / 2, all / 4, false),
        (k, 1, false),
        (all / 4, all / 2, false),
        (k, 1, true),
        (k, k, true),
        (k + 1, 2, false),
    ];
    // Pipelines take long to compile.
    for (slots, host_slots, in_place) in
        sizes.into_iter().step_by(if device == "gpu" { 2 } else { 1 })
    {
        // Experts read in place need no device slots, but a cache that does not hold all of them
        // needs some.
        let slots = if host_slots < all { slots.max(k) } else { slots };
        let asked = [Some(slots), Some(host_slots)];
        let (bits, ..) = with_slots(device, folder, prompt, card(in_place), asked);
        let (name, how) = (folder.display(), if in_place { "in place" } else { "by copies" });
        assert!(bits == expected, "{name}: other bits with {slots} and {host_slots} slots, {how}");
    }
}

#[test]
fn no_size_of_a_tier_changes_a_bit() {
    let prompt: Vec<u32> = (0..70).map(|i| (i * 97 + 13) % 4000).collect();
    tiers("cpu", &tales(), &prompt, &on_cpu(&tales(), &prompt));
    for name in ["qwen3_5_moe", "gemma4", "gpt_oss_mxfp4"] {
        let golden = Golden::read(name);
        tiers("cpu", &golden.folder, &golden.prompt(), &on_cpu(&golden.folder, &golden.prompt()));
    }
}

#[test]
fn no_size_of_a_tier_changes_a_bit_on_a_gpu() {
    if let Err(error) = moeflux_compute::open(&exact("gpu")) {
        eprintln!("no GPU is tested: {error}");
        return;
    }
    let golden = Golden::read("qwen3_5_moe");
    let (folder, prompt) = (&golden.folder, golden.prompt());
    let (expected, ..) = with_slots("gpu", folder, &prompt, card(true), [None; 2]);
    tiers("gpu", folder, &prompt, &expected);
    // Unified memory with all slots, and with few.
    let unified = DeviceMemory { total: Some(1 << 30), unified: true, in_place: true };
    let unified = Card { memory: Some(unified), ..Card::OWN };
    let k = Blueprint::for_checkpoint(&Checkpoint::open(folder).unwrap()).unwrap().max_top_k();
    for slots in [None, Some(k), Some(k + 3)] {
        let (bits, asked, _) = with_slots("gpu", folder, &prompt, unified, [slots, None]);
        assert!(bits == expected, "other bits with {slots:?} slots in unified memory");
        assert_eq!((asked.copies, asked.banks), (0, 0));
    }
}

#[test]
fn observers_see_the_experts_on_a_gpu() {
    let (wrap, asked) = Card::OWN.wrap();
    let options = EngineOptions::default().device(exact("cpu")).wrap_device(wrap);
    let engine =
        Engine::open(Checkpoint::open(&tales()).unwrap(), options, &mut |_, _| {}).unwrap();
    let plain = common::engine(&tales(), exact("cpu"), MemoryRequest::default());
    let (mut seen, mut expected) = (Seen::default(), Seen::default());
    let on_card = feed(&mut engine.session().unwrap(), &[5, 600, 7], Some(&mut seen));
    assert!(on_card == feed(&mut plain.session().unwrap(), &[5, 600, 7], Some(&mut expected)));
    assert!(seen.experts == expected.experts && seen.hidden == expected.hidden);
    assert_eq!(asked.lock().unwrap().routed, 0);
}

#[test]
fn loading_reports_progress() {
    // One model with shared experts as dense weights, and one with shared experts in slots.
    for folder in [tales(), moeflux_goldens::golden("qwen3_5_moe")] {
        check_loading_progress(&folder);
    }
}

fn check_loading_progress(folder: &Path) {
    let open = |card: Option<Card>| {
        let mut options = EngineOptions::default().device(exact("cpu"));
        options.wrap_device = card.map(|c| c.wrap().0);
        let mut said = Vec::new();
        let checkpoint = Checkpoint::open(folder).unwrap();
        Engine::open(checkpoint, options, &mut |done, total| said.push((done, total))).unwrap();
        assert!(
            said.is_sorted() && said.last().is_some_and(|(done, total)| done == total),
            "{said:?}"
        );
        said.last().unwrap().1
    };
    let experts =
        Blueprint::for_checkpoint(&Checkpoint::open(folder).unwrap()).unwrap().experts_bytes();
    assert_eq!(open(Some(Card::OWN)), open(None) + experts);
    // The same in host memory, for a device that manages its weights.
    let unified = Card {
        memory: Some(DeviceMemory { total: None, unified: true, in_place: true }),
        ..Card::OWN
    };
    assert_eq!(open(Some(unified)), open(None) + experts);
}

/// Tests on a GPU limit the slots, so that experts are read whatever memory it has.
#[test]
fn few_slots_leave_experts_on_disk_beside_a_card() {
    let goldens = ON_A_GPU.map(moeflux_goldens::golden);
    for folder in goldens.into_iter().chain([tales()]) {
        let model = Blueprint::for_checkpoint(&Checkpoint::open(&folder).unwrap()).unwrap();
        let (engine, _) = open(&folder, Card::OWN, few_slots(model.max_top_k()));
        assert!(!engine.unwrap().plan().holds_all, "{}", folder.display());
    }
}

/// The plan of tales-18m for a simulated GPU.
fn plan(card: Card, memory: MemoryRequest) -> Result<MemoryPlan, String> {
    open(&tales(), card, memory).0.map(|e| MemoryPlan::clone(&e.plan())).map_err(|e| e.to_string())
}

/// Budget of the card's own memory.
fn card_budget(plan: &MemoryPlan) -> Option<u64> {
    plan.card().map(|card| card.budget)
}

/// Slots by pool, in order of speed.
fn slots(plan: &MemoryPlan) -> Vec<usize> {
    plan.pools().iter().map(|pool| pool.slots()).collect()
}

#[test]
fn a_gpu_has_a_separate_budget() {
    // Plans count the resident memory of the process, other tests included.
    if !in_own_process("residency::a_gpu_has_a_separate_budget") {
        return;
    }
    let host = common::engine(&tales(), exact("cpu"), MemoryRequest::default()).plan().to_owned();
    let of = |memory: Option<DeviceMemory>, request| plan(Card { memory, ..Card::OWN }, request);
    let own = |total| Some(DeviceMemory { total, unified: false, in_place: true });

    // 90% of its memory less 512 MiB.
    let chunk = Some(host.chunk);
    let card = of(own(Some(1 << 30)), MemoryRequest::default().chunk(chunk)).unwrap();
    assert_eq!(card_budget(&card), Some((1 << 30) / 10 * 9 - (512 << 20)));
    let [dense, state, scratch] = [LineName::Dense, LineName::State, LineName::Scratch];
    for line in [dense, state, scratch] {
        assert_eq!(card.bytes(line), host.bytes(line), "{line:?}");
    }
    let marks = card.bytes(LineName::Marks);
    let slot = card.slot_bytes();
    let others = card.bytes(dense) + card.bytes(state) + card.bytes(scratch) + 256 * slot;
    assert_eq!(card.fastest().total(), others + marks);
    let budget = card.fastest().budget;
    assert_eq!(marks, (budget - others) / 4096 * 4096, "all that slots leave");
    // The host holds only experts in flight.
    assert_eq!((slots(&card), card.holds_all), (vec![256, MIN_HOST_SLOTS], true));
    let [process, staging] = [LineName::Process, LineName::Staging].map(|line| card.bytes(line));
    let index = card.bytes(LineName::PrefixIndex);
    assert!((marks / 64..marks / 64 + 4096).contains(&index));
    assert_eq!(card.host().total(), process + staging + index + MIN_HOST_SLOTS as u64 * slot);
    assert!(staging > host.bytes(LineName::Staging));
    assert!(card.host().total() <= card.host().budget);

    // The requested budget, and as many slots as fit.
    let marks = 1 << 20;
    let small = others - 156 * slot + marks + 5;
    let context = Some(card.context);
    let request =
        MemoryRequest::default().device_budget(small).context(context).chunk(chunk).marks(marks);
    let planned = of(own(Some(1 << 30)), request).unwrap();
    assert_eq!(card_budget(&planned), Some(small));
    // The host holds the rest, or as much as its budget allows, and has an empty slot for
    // exchanges.
    assert_eq!((slots(&planned), planned.holds_all), (vec![100, 157], true));
    // A GPU that cannot read host memory uses its slots as a cache.
    let copies = Some(DeviceMemory { total: Some(1 << 30), unified: false, in_place: false });
    let planned = of(copies, request).unwrap();
    assert_eq!((slots(&planned), planned.holds_all), (vec![100, 256], false));
    let none = of(copies, request.host_slots(0)).unwrap_err();
    assert!(none.contains("0 slots on the host were asked for"), "{none}");
    // Unknown size: the same as the host's budget.
    let request = MemoryRequest::default().budget(300 << 20);
    assert_eq!(card_budget(&of(own(None), request).unwrap()), Some(300 << 20));

    // Unified memory: one budget.
    let unified =
        of(Some(DeviceMemory { total: Some(1 << 30), unified: true, in_place: true }), request)
            .unwrap();
    assert_eq!((card_budget(&unified), unified.host().budget), (None, 300 << 20));
    let pool = unified.fastest();
    assert_eq!((unified.pools().len(), pool.place), (1, BankPlace::Host));
    let on_host = pool.bytes(LineName::Process) + pool.bytes(LineName::Staging);
    assert!(pool.total() <= pool.budget && pool.fixed() > on_host);
}

#[test]
fn chunks_are_limited_by_the_buffer_size() {
    let chunk = |buffers, chunk| {
        let memory = MemoryRequest::default().chunk(chunk).context(2048);
        let plan = plan(Card { buffers, ..Card::OWN }, memory).unwrap();
        (plan.chunk, plan.bytes(LineName::Scratch))
    };
    let (whole, bytes) = chunk(None, None);
    assert_eq!(whole, moeflux::runtime::CARD_CHUNK);
    // The model's vectors count too.
    assert_eq!(chunk(Some(2 * bytes), None).0, whole);
    assert_eq!(chunk(Some(bytes), None).0, whole / 2);
    let (least, _) = chunk(Some(1), None);
    assert_eq!(least, 64);
    // An explicit chunk is used as is, or the device reports its error.
    assert_eq!(chunk(Some(bytes), Some(whole)).0, whole);
}

#[test]
fn errors_distinguish_device_and_host_budgets() {
    let tiny = MemoryRequest::default().device_budget(1 << 20);
    let error = plan(Card::OWN, tiny).unwrap_err();
    for part in ["device's own memory of 1 MiB is below the floor", "--gpu-memory", "--device cpu"]
    {
        assert!(error.contains(part), "{error}");
    }
    assert!(!error.contains("for the program"), "{error}");
    let tiny = MemoryRequest::default().budget(1 << 20);
    let error = plan(Card::OWN, tiny).unwrap_err();
    for part in ["a budget of 1 MiB is below the floor", "for the program", "give --memory"] {
        assert!(error.contains(part), "{error}");
    }
    // A budget above the device's memory is refused.
    let huge = MemoryRequest::default().device_budget((1 << 30) + (1 << 20));
    let error = plan(Card::OWN, huge).unwrap_err();
    for part in ["1025 MiB is more than the 1024 MiB that it has", "--gpu-memory"] {
        assert!(error.contains(part), "{error}");
    }
    let all = MemoryRequest::default().device_budget(1 << 30);
    assert_eq!(card_budget(&plan(Card::OWN, all).unwrap()), Some(1 << 30));
    // Kernels cannot address a bank of one expert.
    let error = plan(Card { bank: 0, ..Card::OWN }, MemoryRequest::default()).unwrap_err();
    assert!(error.contains("--device cpu"), "{error}");
}

#[test]
fn opening_fails_if_an_expert_cannot_be_loaded() {
    let options =
        EngineOptions::default().wrap_device(Card::OWN.wrap().0).wrap_reader(every_nth(1));
    let error =
        Engine::open(Checkpoint::open(&tales()).unwrap(), options, &mut |_, _| {}).err().unwrap();
    assert!(error.to_string().contains("injected"), "{error}");
}

/// Layers whose states grow first leave room for the others, in steps and in a restore.
#[test]
fn states_can_use_all_planned_memory() {
    let folder = moeflux_goldens::golden("qwen3_moe");
    let blueprint = Blueprint::for_checkpoint(&Checkpoint::open(&folder).unwrap()).unwrap();
    let (context, vocab) = (blueprint.max_positions, blueprint.vocab);
    let tokens: Vec<u32> = (0..601).map(|i| (i * i % vocab) as u32).collect();
    let temp = tempfile::tempdir().unwrap();
    let (path, mut control) = (temp.path().join("saved"), StepControl::default());
    for device in [Some(exact("cpu")), gpu(true)].into_iter().flatten() {
        let memory = MemoryRequest::default().context(context).marks(0).chunk(200);
        let full = engine(&folder, device.clone(), memory).plan().bytes(LineName::State);
        // Room for the pages of 600 tokens, but not for 1.5 times as many in every layer.
        let state = Some(full / context as u64 * 800);
        let engine = engine(&folder, device, memory.state(state));
        let mut session = engine.session().unwrap();
        session.sync(&tokens[..600], &mut control).unwrap();
        session.snapshot(&path, SnapshotOptions::default()).unwrap();
        let expected =
            session.sync(&tokens, &mut control).map(|_| session.logits().to_vec()).unwrap();
        session.reset().unwrap();
        session.restore(&path).unwrap();
        assert_eq!(session.sync(&tokens, &mut control).unwrap().computed, 1);
        assert!(session.logits() == expected);
    }
}

//! Experts that the host's processor computes beside a card.

use std::{
    path::Path,
    sync::{Arc, Mutex, mpsc::sync_channel},
    time::{Duration, Instant},
};

use moeflux::{
    Checkpoint, Engine, EngineOptions, Error, GenerateRequest, MemoryRequest,
    base::Stats,
    experts::{
        ExpertPlan, ExpertTime, ExpertTimes, ExpertsOnHost, PlacementOptions, UseCountsFolder,
    },
    model::blueprint::Blueprint,
    runtime::{DeviceOptions, LineName},
    serve::{RequestEvent, ServingCore, ServingOptions},
    session::SnapshotOptions,
    tools::Planner,
};
use moeflux_compute::DeviceMemory;

use crate::common::{
    EXPERT_LAYERS, Golden, exact, feed, gpu,
    readers::faulty,
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

/// A card that the host reads ids from, and writes results to, layer by layer.
fn card_without_hand_over() -> Card {
    Card { hands_over: false, ..card(true) }
}

/// The fast path of a device, with its memory as a card's own.
fn open(
    folder: &Path,
    device: DeviceOptions,
    card: Card,
    memory: MemoryRequest,
) -> (Engine, Arc<Mutex<Asked>>) {
    let (engine, asked) = try_open(folder, device, card, memory, PlacementOptions::default());
    (engine.unwrap(), asked)
}

fn try_open(
    folder: &Path,
    device: DeviceOptions,
    card: Card,
    memory: MemoryRequest,
    placement: PlacementOptions,
) -> (Result<Engine, Error>, Arc<Mutex<Asked>>) {
    let (wrap, asked) = card.wrap();
    let options = EngineOptions::default().memory(memory).device(device).wrap_device(wrap);
    let checkpoint = Checkpoint::open(folder).unwrap();
    (Engine::open(checkpoint, options.placement(placement), &mut |_, _| {}), asked)
}

fn cpu() -> DeviceOptions {
    DeviceOptions::default().name("cpu").threads(2).fine_expert_inputs(true)
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
fn handed_over_layers_have_the_bits_of_layers_that_wait() {
    let Some(gpu) = gpu(false) else { return };
    // The last steps follow a recorded one, or have other numbers of rows.
    let (prompt, steps) = (tokens(80), [12, 1, 1, 1, 1, 5, 1, 1, 40, 1, 1]);
    let compute = |slots| (slots, request(slots, None, ExpertsOnHost::Compute));
    let divided = |slots| (slots, auto(slots, None, times(1.0, 1.0)));
    for (slots, memory) in [compute(96), compute(4), compute(250), divided(96), divided(4)] {
        let run = |card: Card| {
            let (engine, asked) = open(&tales(), gpu.clone(), card, memory);
            let bits = bits(&engine, &prompt, &steps);
            (bits, *asked.lock().unwrap())
        };
        let (expected, waiting) = run(card_without_hand_over());
        let (bits, asked) = run(card(true));
        assert_eq!(waiting.handed_over, 0);
        assert!(bits == expected, "{slots} slots: other bits");
        // Layers with experts on the host, of all steps but one, which has more than 32 rows.
        let layers = 8 - slots / 32;
        assert_eq!(asked.handed_over, layers * (steps.len() - 1), "{slots} slots");
    }
}

#[test]
fn a_host_that_fails_leaves_sessions_at_their_last_token() {
    let Some(gpu) = gpu(false) else { return };
    let prompt = tokens(20);
    // The card has one of eight layers, and some experts of another one.
    let memory = request(60, None, ExpertsOnHost::Compute);
    let (whole, _) = open(&tales(), gpu.clone(), card(true), memory);
    let expected = bits(&whole, &prompt, &[16, 1, 1, 1, 1]);
    let (engine, asked) = open(&tales(), gpu, card(true), memory);
    let mut session = engine.session().unwrap();
    let mut all = feed(&mut session, &prompt[..16], None);
    all.extend(feed(&mut session, &prompt[16..17], None));
    // At the first layer, in the middle, and at the last one.
    for (call, after) in [
        (Call::HandOver, 0),
        (Call::Results, 0),
        (Call::HandOver, 4),
        (Call::Results, 4),
        (Call::HandOver, 6),
        (Call::Results, 6),
        (Call::SubmitRecorded, 0),
    ] {
        asked.lock().unwrap().fault = Some(Fault { call, after, is_loss: false });
        let mut control = moeflux::StepControl::default();
        let failed = session.sync(&[&prompt[..17], &[7]].concat(), &mut control);
        let error = failed.map(|_| (call, after)).unwrap_err().to_string();
        assert!(error.contains("an injected fault"), "{call:?} {after}: {error}");
        assert_eq!(session.tokens(), &prompt[..17], "{call:?} {after}");
    }
    prompt[17..].iter().for_each(|token| all.extend(feed(&mut session, &[*token], None)));
    let all: Vec<_> = all.into_iter().map(f32::to_bits).collect();
    let differs = all.iter().zip(&expected).position(|(a, b)| a != b);
    assert!(all == expected, "other bits from {differs:?} of {} on", expected.len());
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

/// Times of experts on a bus and a processor of these speeds.
fn times(bus: f64, host: f64) -> ExpertTimes {
    let each = |each| ExpertTime { fixed: 0.0, each };
    ExpertTimes { bytes: 1, bus: each(bus), host: each(host), ..ExpertTimes::default() }
}

fn auto(slots: usize, host_slots: Option<usize>, times: ExpertTimes) -> MemoryRequest {
    request(slots, host_slots, ExpertsOnHost::Auto).expert_times(times)
}

#[test]
fn experts_are_divided_by_the_speeds_of_both_sides() {
    let (prompt, steps) = (tokens(60), [20, 1, 36, 1, 1, 1]);
    let (read, _) = open(&tales(), cpu(), card(true), request(100, None, ExpertsOnHost::Read));
    let expected = bits(&read, &prompt, &steps);
    let mut computed = Vec::new();
    for (bus, host, in_place, host_slots) in [
        (1.0, 1.0, true, None),
        (1.0, 1.5, true, None),
        (1.0, 1.0, true, Some(40)),
        (1e-3, 1.0, true, None),
        (1.0, 1e-3, true, None),
        // A card that cannot read host memory leaves all to the host.
        (1.0, 1.0, false, None),
    ] {
        let memory = auto(100, host_slots, times(bus, host));
        let (engine, asked) = open(&tales(), cpu(), card(in_place), memory);
        let what = format!("{bus} {host}, {host_slots:?} on the host, in place: {in_place}");
        assert!(bits(&engine, &prompt, &steps) == expected, "{what}: other bits");
        let on_host = engine.plan().computed_on_host();
        assert_eq!(asked.lock().unwrap().written > 0, on_host > 0, "{what}");
        computed.push(on_host);
    }
    let on_host = EXPERTS - 100;
    let [same, slow_host, from_disk, fast_bus, fast_host, copies] = computed[..] else { panic!() };
    assert!((on_host / 3..2 * on_host / 3).contains(&same), "{same} of {on_host}");
    assert!(0 < slow_host && slow_host < same && from_disk == same, "{slow_host} {same}");
    assert_eq!((fast_bus, fast_host, copies), (0, on_host, on_host));
}

#[test]
fn speeds_are_measured_when_a_model_is_opened() {
    let (prompt, steps) = (tokens(30), [26, 1, 1, 1, 1]);
    let (read, _) = open(&tales(), cpu(), card(true), request(100, None, ExpertsOnHost::Read));
    let expected = bits(&read, &prompt, &steps);
    for host_slots in [None, Some(40)] {
        let memory = request(100, host_slots, ExpertsOnHost::Auto);
        let (engine, _) = open(&tales(), cpu(), card(true), memory);
        let times = *engine.plan().expert_times().unwrap();
        let measured = [times.card, times.bus, times.host];
        assert!(measured.iter().all(|time| time.each > 0.0), "{times:?}");
        assert!(engine.plan().computed_on_host() <= EXPERTS - 100);
        assert!(bits(&engine, &prompt, &steps) == expected, "{times:?}: other bits");
    }
}

#[test]
fn speeds_of_a_gpu_are_measured_too() {
    let Some(gpu) = gpu(false) else { return };
    let prompt = tokens(20);
    let measured = request(96, None, ExpertsOnHost::Auto);
    let (engine, _) = open(&tales(), gpu.clone(), card(true), measured);
    let times = *engine.plan().expert_times().unwrap();
    let each = [times.card, times.bus, times.host].map(|time| time.each);
    assert!(each.iter().all(|seconds| *seconds > 0.0) && times.wait >= 0.0, "{times:?}");
    let expected = bits(&engine, &prompt, &[16, 1, 1, 2]);
    // The same times give the same division, and the same bits.
    let (again, _) = open(&tales(), gpu, card(true), measured.expert_times(times));
    assert_eq!(again.plan().computed_on_host(), engine.plan().computed_on_host());
    assert!(bits(&again, &prompt, &[16, 1, 1, 2]) == expected, "other bits");
}

#[test]
fn all_ways_to_compute_experts_in_host_memory_are_predicted() {
    let checkpoint = Checkpoint::open(&tales()).unwrap();
    let blueprint = Blueprint::for_checkpoint(&checkpoint).unwrap();
    let forecast = |in_place, slots| {
        let (wrap, _) = card(in_place).wrap();
        let mut planner = Planner::open(&checkpoint, &blueprint, &cpu(), Some(&wrap)).unwrap();
        let request = MemoryRequest::default().slots(slots);
        let placement = PlacementOptions::default();
        let model = Some(checkpoint.identity().unwrap());
        planner.forecast_host(&request, 100, &placement, model).unwrap()
    };
    let of_100 = forecast(true, 100).unwrap();
    let computed: Vec<_> = of_100.ways.iter().map(|way| way.computed).collect();
    let speed = |way: usize| of_100.ways[way].tokens_per_second;
    assert_eq!((of_100.on_card, of_100.on_disk), (100, 0));
    assert_eq!(computed[..2], [0, EXPERTS - 100]);
    let numbers: Vec<_> = of_100.ways.iter().map(|way| way.number.is_some()).collect();
    assert_eq!(numbers, [false, true, computed[2] > 0]);
    let plan = of_100.plan.as_ref().filter(|_| computed[2] > 0);
    assert_eq!(plan.map(ExpertPlan::number), of_100.ways[2].number.as_deref());
    assert!(computed[2] <= EXPERTS - 100);
    assert!((0..3).all(|way| speed(way) > 1.0), "{of_100:?}");
    assert!(speed(2) >= speed(0), "{of_100:?}");
    // Without experts in host memory, or a card that reads them, there is no choice.
    assert!(forecast(true, EXPERTS).is_none());
    assert!(forecast(false, 100).is_none());
}

#[test]
fn a_saved_session_knows_the_experts_that_the_host_computed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.moeflux-session");
    let open = |memory: MemoryRequest| open(&tales(), cpu(), card(true), memory.sessions(2)).0;
    let divided = auto(100, None, times(1.0, 1.0));
    let engine = open(divided);
    let mut session = engine.session().unwrap();
    feed(&mut session, &tokens(12), None);
    session.snapshot(&path, SnapshotOptions::default()).unwrap();
    for (memory, is_other) in [
        (divided, false),
        (auto(100, None, times(1.0, 2.0)), true),
        (request(100, None, ExpertsOnHost::Read), true),
    ] {
        let engine = open(memory);
        let mut session = engine.session().unwrap();
        session.restore(&path).unwrap();
        assert_eq!(session.has_other_placement(), is_other, "{memory:?}");
        assert_eq!(session.fork().unwrap().has_other_placement(), is_other, "{memory:?}");
        session.reset().unwrap();
        assert!(!session.has_other_placement());
    }
}

/// Two engines with one recorded plan, but other caches, speeds, uses and histories.
#[test]
fn a_recorded_plan_gives_the_same_bits_in_another_engine() {
    let Some(gpu) = gpu(false) else { return };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("plan.json");
    let (prompt, steps) = (tokens(40), [16, 1, 1, 2, 1, 1]);
    let run = |memory, placement: PlacementOptions, history: u32| {
        let (engine, _) = try_open(&tales(), gpu.clone(), card(true), memory, placement);
        let engine = engine.unwrap();
        (history > 0).then(|| bits(&engine, &tokens(history), &[history as usize]));
        (bits(&engine, &prompt, &steps), engine)
    };
    let first = auto(96, None, times(1.0, 1.0));
    let (expected, engine) = run(first, PlacementOptions::default(), 0);
    let plan = engine.expert_plan().unwrap();
    assert_eq!(Some(plan.number()), engine.plan().experts_number().as_deref());
    plan.write(&file).unwrap();
    let recorded = || Arc::new(ExpertPlan::read(&file).unwrap().unwrap());
    let uses = UseCountsFolder::new(folder.path().join("uses"));
    for (memory, history) in [
        (auto(96, None, times(1.0, 3.0)), 30),
        (request(60, None, ExpertsOnHost::Auto), 7),
        (auto(96, Some(100), times(3.0, 1.0)), 50),
    ] {
        let placement = PlacementOptions::default().recorded(recorded()).use_counts(uses.clone());
        let (bits, engine) = run(memory, placement, history);
        assert!(bits == expected, "{memory:?}: other bits");
        assert_eq!(engine.plan().experts_number().as_deref(), Some(plan.number()));
        assert_eq!(engine.expert_plan().unwrap().number(), plan.number());
    }
    // Another plan rounds differently.
    assert!(run(auto(96, None, times(1.0, 2.0)), PlacementOptions::default(), 0).0 != expected);
}

#[test]
fn a_recorded_plan_is_an_error_where_it_cannot_be_followed() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("plan.json");
    let (engine, _) = open(&tales(), cpu(), card(true), auto(96, None, times(1.0, 1.0)));
    engine.expert_plan().unwrap().write(&file).unwrap();
    let recorded = || Arc::new(ExpertPlan::read(&file).unwrap().unwrap());
    // On a card that cannot follow it, it is an error.
    let placement = || PlacementOptions::default().recorded(recorded());
    for (card, slots, problem) in [
        (card(true), 256, "holds every expert"),
        (card(false), 96, "cannot read"),
        (Card { memory: None, ..Card::OWN }, 96, "no own memory"),
    ] {
        let memory = request(slots, None, ExpertsOnHost::Auto);
        let (opened, _) = try_open(&tales(), cpu(), card, memory, placement());
        let error = opened.err().unwrap().to_string();
        assert!(error.contains("plan.json") && error.contains(problem), "{error}");
    }
    // The exact path has the same bits with any plan, and takes none.
    let memory = request(96, None, ExpertsOnHost::Auto);
    for placement in [placement(), PlacementOptions::default()] {
        let device = DeviceOptions::default().name("cpu").exact(true);
        let (opened, _) = try_open(&tales(), device, card(true), memory, placement);
        let engine = opened.unwrap();
        assert_eq!(engine.plan().experts_on_host(), ExpertsOnHost::Read);
        assert_eq!((engine.plan().experts_number(), engine.expert_plan()), (None, None));
    }
}

/// Bits of all logits and statistics of a text of three tokens, `rows` at a time.
fn bits_of_few_tokens(engine: &Engine, tokens: usize, rows: usize) -> (Vec<u32>, Stats) {
    bits_of_repeated(engine, &[7, 900, 31], tokens, rows)
}

/// The same for a text of other tokens.
fn bits_of_repeated(
    engine: &Engine,
    words: &[u32],
    tokens: usize,
    rows: usize,
) -> (Vec<u32>, Stats) {
    let prompt: Vec<u32> = words.iter().copied().cycle().take(tokens).collect();
    let mut session = engine.session().unwrap();
    let logits = prompt.chunks(rows).flat_map(|now| feed(&mut session, now, None));
    (logits.map(f32::to_bits).collect(), session.stats())
}

#[test]
fn a_card_gets_the_experts_that_earlier_runs_used_most() {
    let folder = tempfile::tempdir().unwrap();
    let uses = || UseCountsFolder::new(folder.path().join("uses"));
    let memory = request(100, None, ExpertsOnHost::Read);
    let run = |placement: PlacementOptions| {
        let (engine, _) = try_open(&tales(), cpu(), card(true), memory, placement);
        let (bits, stats) = bits_of_few_tokens(&engine.unwrap(), 400, 20);
        (bits, stats.card_hit_rate().unwrap())
    };
    let (expected, first) = run(PlacementOptions::default().use_counts(uses()));
    let (bits, later) = run(PlacementOptions::default().use_counts(uses()));
    assert!(bits == expected, "other bits");
    // The card has 100 of 256 experts. Experts are small, so that it has whole layers, too.
    assert!((0.3..0.5).contains(&first) && later > first + 0.05, "{first} {later}");
    let (_, without) = run(PlacementOptions::default());
    assert_eq!(without, first);
}

#[test]
fn experts_that_are_used_more_come_to_the_card_and_change_no_bit() {
    let devices = [(Some(cpu()), 900), (gpu(false), 210)];
    for (device, tokens) in devices.into_iter().filter_map(|(d, tokens)| Some((d?, tokens))) {
        let run = |slots| {
            let memory = request(slots, None, ExpertsOnHost::Read).context(1024);
            let (engine, _) = open(&tales(), device.clone(), card(true), memory);
            bits_of_few_tokens(&engine, tokens, 3)
        };
        let (expected, all) = run(EXPERTS);
        assert_eq!(all.experts_exchanged, 0);
        let (bits, stats) = run(100);
        assert!(bits == expected, "{device:?}: other bits");
        assert!(stats.experts_exchanged >= 4, "{device:?}: {stats:?}");
        // 100 of 256 experts have 39 % of uses at first.
        let rate = stats.card_hit_rate().unwrap();
        assert!(tokens < 900 || rate > 0.45, "{rate} {stats:?}");
    }
}

/// A plan that is made without known uses is corrected between answers. The new one is as any
/// other: an engine that follows it from the start has the same bits.
#[test]
fn a_plan_is_corrected_between_answers_by_uses() {
    let divided = || auto(100, None, times(1.0, 1.0)).context(1024).sessions(3);
    for device in [Some(cpu()), gpu(false)].into_iter().flatten() {
        let open = |placement| {
            let (engine, _) = try_open(&tales(), device.clone(), card(true), divided(), placement);
            engine.unwrap()
        };
        let answer = |engine: &Engine| bits_of_repeated(engine, &tokens(15), 18, 6);
        let hit_rate = |stats: &Stats| stats.card_hit_rate().unwrap();
        let engine = open(PlacementOptions::default());
        let mut session = engine.session().unwrap();
        feed(&mut session, &[7, 900], None);
        assert!(!engine.correct_plan().unwrap(), "few uses are no reason");
        let first = engine.plan().experts_number().unwrap();
        let (before, stats) = answer(&engine);
        bits_of_repeated(&engine, &tokens(15), 260, 26);
        assert!(engine.correct_plan().unwrap());
        let corrected = engine.plan().experts_number().unwrap();
        assert_ne!(corrected, first);
        assert_eq!(engine.plan().slots(), 100);
        let (after, later) = answer(&engine);
        assert!(hit_rate(&later) > hit_rate(&stats) + 0.1, "{stats:?} {later:?}");
        assert!(later.experts_on_host > 0, "{later:?}");
        // The same uses again are no reason, and a session goes on.
        assert!(!engine.correct_plan().unwrap());
        feed(&mut session, &[31], None);
        // Its rows are of two divisions, and a snapshot says so.
        let (saved, mut fresh) = (tempfile::tempdir().unwrap(), engine.session().unwrap());
        let saved = saved.path().join("a.moeflux-session");
        for (own, is_other) in [(true, true), (false, false)] {
            let session = if own { &session } else { &fresh };
            session.snapshot(&saved, SnapshotOptions::default()).unwrap();
            let mut restored = engine.session().unwrap();
            restored.restore(&saved).unwrap();
            assert_eq!(restored.has_other_placement(), is_other);
            drop(restored);
            feed(&mut fresh, &[7], None);
        }
        // Other experts are on the processor, which has the same kernels as the simulated card.
        assert_eq!(before == after, device.name == cpu().name);
        let plan = engine.expert_plan().unwrap();
        assert_eq!(plan.number(), corrected);
        let fixed = open(PlacementOptions::default().recorded(Arc::new(plan)));
        assert!(answer(&fixed).0 == after, "{device:?}: other bits");
        assert!(!fixed.correct_plan().unwrap(), "a recorded plan stays");
    }
    let fixed = PlacementOptions::default().is_fixed(true);
    let (engine, _) = try_open(&tales(), cpu(), card(true), divided(), fixed);
    let engine = engine.unwrap();
    bits_of_few_tokens(&engine, 300, 3);
    assert!(!engine.correct_plan().unwrap());
    // The card reads the few other experts of such a text, and the processor computes none.
    let (engine, _) = open(&tales(), cpu(), card(true), divided());
    let (before, _) = bits_of_few_tokens(&engine, 300, 3);
    assert!(engine.correct_plan().unwrap());
    assert_eq!((engine.plan().experts_number(), engine.plan().computed_on_host()), (None, 0));
    let (after, stats) = bits_of_few_tokens(&engine, 300, 3);
    assert!(after == before && stats.experts_on_host == 0, "{stats:?}");
}

#[test]
fn a_serving_core_corrects_the_plan_between_answers() {
    let memory = auto(100, None, times(1.0, 1.0)).context(256);
    let (engine, _) = open(&tales(), cpu(), card(true), memory);
    let core = ServingCore::start(&engine, ServingOptions::default()).unwrap();
    let number = || engine.plan().experts_number();
    let (first, since) = (number(), Instant::now());
    while number() == first {
        assert!(since.elapsed() < Duration::from_secs(60), "{:?}", core.stats());
        let (sink, events) = sync_channel(256);
        let request = GenerateRequest::default().max_tokens(100);
        let _handle = core.submit(tokens(5), request, Box::new(sink)).unwrap();
        while !matches!(events.recv().unwrap(), RequestEvent::Finished(_)) {}
    }
    core.join();
}

/// Answers do not wait for it: a fresh process reads the experts that earlier runs used most while
/// no step runs.
#[test]
fn the_hottest_experts_are_read_while_no_step_runs() {
    let folder = tempfile::tempdir().unwrap();
    let open = || {
        let placement = PlacementOptions::default().use_counts(UseCountsFolder::new(folder.path()));
        let memory = MemoryRequest::default().slots(60);
        let options = EngineOptions::default().memory(memory).placement(placement);
        Engine::open(Checkpoint::open(&tales()).unwrap(), options, &mut |_, _| {}).unwrap()
    };
    let prompt: Vec<u32> = (0..60).map(|i| [7, 900, 31][i % 3]).collect();
    let first_hits = |engine: &Engine| {
        let mut session = engine.session().unwrap();
        feed(&mut session, &prompt[..1], None);
        session.stats().experts_hit
    };
    let engine = open();
    std::thread::sleep(Duration::from_millis(120));
    assert_eq!(engine.read_counters().bytes, 0, "nothing is known of uses");
    assert_eq!(first_hits(&engine), 0);
    bits(&engine, &prompt, &[20, 20, 20]);
    drop(engine);
    let engine = open();
    let since = Instant::now();
    while engine.read_counters().bytes == 0 && since.elapsed() < Duration::from_secs(20) {
        std::thread::sleep(Duration::from_millis(20));
    }
    let hits = first_hits(&engine);
    assert!(hits > 4, "{hits} hits");
}

/// A layer waits for the disk, then the host computes; nothing times out.
#[test]
fn a_slow_disk_delays_experts_on_the_host() {
    let Some(gpu) = gpu(false) else { return };
    let (prompt, steps) = (tokens(14), [12, 1, 1]);
    let run = |host_slots, delay: Option<Duration>| {
        let (wrap, _) = card(true).wrap();
        // The first read takes so long.
        let delay = Arc::new(Mutex::new(delay));
        let wrap_reader = faulty(move || {
            delay.lock().unwrap().take().into_iter().for_each(std::thread::sleep);
            false
        });
        let options = EngineOptions::default()
            .memory(request(60, host_slots, ExpertsOnHost::Compute))
            .device(gpu.clone())
            .wrap_device(wrap)
            .wrap_reader(wrap_reader);
        let checkpoint = Checkpoint::open(&tales()).unwrap();
        let engine = Engine::open(checkpoint, options, &mut |_, _| {}).unwrap();
        let since = Instant::now();
        (bits(&engine, &prompt, &steps), since.elapsed())
    };
    let (expected, _) = run(None, None);
    let delay = Duration::from_secs(5);
    let (bits, took) = run(Some(40), Some(delay));
    assert!(bits == expected, "other bits");
    assert!(took >= delay, "{took:?}");
}

//! Models whose layers are divided among several cards. On the exact path they have the bits of a
//! single one.

use std::{
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

use moeflux::{
    Checkpoint, Engine, EngineOptions, Error, GenerateRequest, MemoryRequest, Session, StepControl,
    experts::ExpertsOnHost,
    runtime::{BankPlace, CardBudgets, DeviceOptions, LineName, Pool, WrapDevice},
    session::{BatchEntry, DraftMode, SnapshotOptions},
};
use moeflux_compute::DeviceMemory;

use crate::common::{
    Golden, Seen, engine, exact, feed, gpu, in_own_process,
    simulated_gpu::{Asked, Call, Card, Fault},
    tales,
};

/// Experts of the embedded model: 32 in each of 8 layers.
const EXPERTS: usize = 256;

/// Its layers on each card of [`request`]. Scratch takes most of the smaller one.
const LAYERS: [usize; 2] = [6, 2];

const MIB: u64 = 1 << 20;

/// Calls of each card.
type Cards = Vec<Arc<Mutex<Asked>>>;

/// Wraps each opened card as the next of `cards`.
fn wrap(cards: &[Card]) -> (WrapDevice, Cards) {
    let (wraps, asked): (Vec<WrapDevice>, Cards) = cards.iter().map(|card| card.wrap()).unzip();
    let opened = AtomicUsize::new(0);
    (Arc::new(move |card| wraps[opened.fetch_add(1, Relaxed) % wraps.len()](card)), asked)
}

fn copies() -> Card {
    let memory = DeviceMemory { total: Some(1 << 30), unified: false, in_place: false };
    Card { memory: Some(memory), ..Card::OWN }
}

fn unified() -> Card {
    let memory = DeviceMemory { total: Some(1 << 30), unified: true, in_place: true };
    Card { memory: Some(memory), ..Card::OWN }
}

fn try_open(
    folder: &Path,
    device: DeviceOptions,
    cards: &[Card],
    memory: MemoryRequest,
) -> (Result<Engine, Error>, Cards) {
    let (wrap, asked) = wrap(cards);
    let options = EngineOptions::default().memory(memory).device(device).wrap_device(wrap);
    (Engine::open(Checkpoint::open(folder).unwrap(), options, &mut |_, _| {}), asked)
}

fn open(folder: &Path, cards: &[Card], memory: MemoryRequest) -> (Engine, Cards) {
    let name = vec!["cpu"; cards.len()].join(",");
    let (engine, asked) = try_open(folder, exact(&name), cards, memory);
    (engine.unwrap(), asked)
}

fn budgets(mib: &[u64]) -> CardBudgets {
    CardBudgets::new(&mib.iter().map(|mib| mib * MIB).collect::<Vec<_>>()).unwrap()
}

/// Two cards, of which the second has half the memory.
fn request() -> MemoryRequest {
    MemoryRequest::default().chunk(64).context(256).sessions(3).card_budgets(budgets(&[400, 200]))
}

fn prompt(len: u32) -> Vec<u32> {
    (0..len).map(|i| (i * 97 + 13) % 500).collect()
}

fn bits(logits: &[f32]) -> impl Iterator<Item = u32> {
    logits.iter().map(|logit| logit.to_bits())
}

/// Bits of all logits of a prompt in two parts and of single tokens; then of steps of this session,
/// a fork of it, and another one.
fn all_bits(engine: &Engine, prompt: &[u32]) -> Vec<u32> {
    let mut session = engine.session().unwrap();
    let mut all = Vec::new();
    let (first, rest) = prompt.split_at(prompt.len() - 4);
    let (one, two) = first.split_at(first.len() / 3);
    for part in [one, two].into_iter().chain(rest.chunks(1)) {
        all.extend(bits(&feed(&mut session, part, None)));
    }
    let (mut fork, mut other) = (session.fork().unwrap(), engine.session().unwrap());
    // Devices may record the last step ahead.
    for step in [[&[5][..], &[6, 7], &[8, 9, 3]], [&[4], &[2], &[1]], [&[3], &[1], &[2]]] {
        let mut tokens = step.into_iter();
        let mut entries = [&mut session, &mut fork, &mut other]
            .map(|session| BatchEntry::new(session, tokens.next().unwrap()).logits(true));
        engine.step(&mut entries, &mut StepControl::default()).unwrap();
        for session in [&session, &fork, &other] {
            all.extend(bits(session.logits()));
        }
    }
    all
}

/// The same on one processor.
fn expected(folder: &Path, prompt: &[u32]) -> Vec<u32> {
    let memory = MemoryRequest::default().sessions(3);
    all_bits(&engine(folder, exact("cpu"), memory), prompt)
}

/// Number of layers of each card.
fn layers(engine: &Engine) -> Vec<usize> {
    let plan = engine.plan();
    let cards = plan.card_of_layer();
    assert!(cards.is_sorted(), "{cards:?}");
    let last = cards.last().unwrap();
    (0..=*last).map(|card| cards.iter().filter(|of_layer| **of_layer == card).count()).collect()
}

#[test]
fn two_cards_have_the_bits_of_one() {
    let prompt = prompt(60);
    let expected = expected(&tales(), &prompt);
    let (engine, asked) = open(&tales(), &[Card::OWN; 2], request());
    let plan = engine.plan();
    assert_eq!((plan.holds_all, plan.slots(), layers(&engine)), (true, EXPERTS, LAYERS.to_vec()));
    assert!(all_bits(&engine, &prompt) == expected, "other bits");
    for (asked, layers) in asked.iter().zip(LAYERS) {
        let asked = *asked.lock().unwrap();
        // Tables of the other card have placeholders.
        assert_eq!((asked.routed % layers, asked.listed, asked.tables), (0, 0, 8));
        assert!(asked.routed > 0 && asked.banks > 0, "{asked:?}");
    }
}

#[test]
fn experts_may_be_on_the_cards_in_host_memory_or_on_the_disk() {
    let prompt = prompt(60);
    let expected = expected(&tales(), &prompt);
    for (slots, host_slots, cards, holds_all) in [
        (100, None, [Card::OWN; 2], true),
        (100, Some(40), [Card::OWN; 2], false),
        (100, Some(40), [copies(); 2], false),
        (100, None, [Card::OWN, copies()], false),
        (8, Some(4), [Card::OWN; 2], false),
        (255, None, [Card { bank: 3, ..Card::OWN }, Card::OWN], true),
    ] {
        let what = format!("{slots} slots, {host_slots:?} on the host");
        let (engine, asked) = open(&tales(), &cards, request().slots(slots).host_slots(host_slots));
        let plan = engine.plan();
        assert_eq!((plan.slots(), plan.holds_all), (slots, holds_all), "{what}");
        assert!(all_bits(&engine, &prompt) == expected, "{what}: other bits");
        let in_place = asked.iter().any(|asked| asked.lock().unwrap().in_place > 0);
        assert!(!in_place || cards[1].memory.unwrap().in_place, "{what}");
    }
}

#[test]
fn cards_in_host_memory_share_its_budget() {
    let prompt = prompt(60);
    let expected = expected(&tales(), &prompt);
    for slots in [None, Some(100)] {
        let (engine, _) = open(&tales(), &[unified(); 2], request().slots(slots));
        let plan = engine.plan();
        assert_eq!((plan.pools().len(), plan.cards().len(), layers(&engine)), (1, 0, vec![4, 4]));
        assert_eq!(plan.slots(), slots.unwrap_or(EXPERTS));
        assert!(all_bits(&engine, &prompt) == expected, "{slots:?}: other bits");
    }
    let (engine, _) = try_open(&tales(), exact("cpu,cpu"), &[Card::OWN, unified()], request());
    let error = engine.map(drop).unwrap_err().to_string();
    assert!(error.contains("some share the host's memory"), "{error}");
}

/// Recurrent states, latent attention, positions that layers share, a head that is the embedding,
/// rows of a table on disk.
#[test]
fn every_kind_of_layer_runs_on_several_cards() {
    for (name, cards) in [
        ("qwen3_5_moe", 3),
        ("deepseek_v3", 2),
        ("glm_moe_dsa_shared", 2),
        ("qwen3_5_moe_flat_tied", 2),
        ("gpt_oss_mxfp4", 2),
        ("gemma4", 2),
        ("qwen4_exp_hub", 3),
    ] {
        let golden = Golden::read(name);
        let expected = expected(&golden.folder, &golden.prompt());
        let mut few = None;
        for _ in 0..2 {
            let memory = request().card_budgets(budgets(&[400])).slots(few).host_slots(few);
            let (engine, _) = open(&golden.folder, &vec![Card::OWN; cards], memory);
            assert_eq!(layers(&engine).len(), cards, "{name}");
            assert!(all_bits(&engine, &golden.prompt()) == expected, "{name}, {few:?}: other bits");
            few = Some(engine.plan().slots() * 2 / 3);
        }
    }
}

#[test]
fn layers_that_read_the_positions_of_another_are_on_its_card() {
    let golden = Golden::read("glm_moe_dsa_shared");
    let cards = [Card::OWN; 16];
    let name = ["cpu"; 16].join(",");
    let (engine, _) = try_open(&golden.folder, exact(&name), &cards, request().card_budgets(None));
    let error = engine.map(drop).unwrap_err().to_string();
    let (whole, _) = open(&golden.folder, &[Card::OWN], request().card_budgets(None));
    let layers = whole.blueprint().layers.len();
    assert!(error.contains("divided among 16 cards"), "{error}");
    assert!(!error.contains(&format!("at most {layers} parts")), "{error}");
}

#[test]
fn a_real_card_computes_as_two() {
    let Some(device) = gpu(true) else { return };
    let name = match &*device.name.clone().unwrap() {
        "gpu" => "gpu:0".to_owned(),
        name => name.to_owned(),
    };
    let software = moeflux_compute::adapters().into_iter();
    let mut software = software.filter(|a| a.kind == moeflux_compute::AdapterKind::Software);
    if !software.any(|adapter| name == format!("gpu:{}", adapter.index)) {
        // Hardware is not named twice.
        return;
    }
    let prompt = prompt(40);
    let two = device.clone().name(format!("{name},{name}"));
    // Some of the experts are in host memory.
    let memory = request().slots(100);
    let whole = memory.card_budgets(budgets(&[600]));
    let (one, _) = try_open(&tales(), device.clone(), &[Card::OWN], whole);
    let expected = all_bits(&one.unwrap(), &prompt);
    let (engine, _) = try_open(&tales(), two.clone(), &[Card::OWN; 2], memory);
    let engine = engine.unwrap();
    assert_eq!(layers(&engine), LAYERS);
    assert!(all_bits(&engine, &prompt) == expected, "other bits");
    // As it is, in host memory or its own. Rows of the golden's table are for the first card.
    let golden = Golden::read("qwen4_exp_hub");
    for (folder, prompt) in [(tales(), prompt), (golden.folder.clone(), golden.prompt())] {
        let (one, two) = (device.clone(), two.clone());
        let (one, _) = try_open(&folder, one, &[Card::REAL], request().card_budgets(None));
        let (engine, asked) =
            try_open(&folder, two, &[Card::REAL; 2], request().card_budgets(None));
        let (one, engine) = (one.unwrap(), engine.unwrap());
        assert!(layers(&engine)[0] > 1, "{:?}", layers(&engine));
        assert!(all_bits(&engine, &prompt) == all_bits(&one, &prompt), "other bits");
        // The first card's layers of decode steps are recorded while the second one computes.
        let recorded = asked.iter().map(|asked| asked.lock().unwrap().recorded);
        assert!(recorded.eq([1, 0]), "{}: {asked:?}", folder.display());
    }
}

#[test]
fn the_host_computes_experts_beside_several_cards() {
    let prompt = prompt(40);
    let cpu = |name: &str| DeviceOptions::default().name(name).threads(2).fine_expert_inputs(true);
    let memory = |how| request().slots(100).experts_on_host(how);
    let open = |name: &str, cards: &[Card], memory| {
        let (engine, asked) = try_open(&tales(), cpu(name), cards, memory);
        (engine.unwrap(), asked)
    };
    let one = memory(ExpertsOnHost::Read).card_budgets(budgets(&[600]));
    let expected = all_bits(&open("cpu", &[Card::OWN], one).0, &prompt);
    for cards in [[Card::OWN; 2], [copies(); 2]] {
        let (engine, asked) = open("cpu,cpu", &cards, memory(ExpertsOnHost::Compute));
        assert_eq!(engine.plan().computed_on_host(), EXPERTS - 100);
        assert!(all_bits(&engine, &prompt) == expected, "other bits");
        assert!(asked.iter().all(|asked| asked.lock().unwrap().written > 0));
    }
    let (engine, _) = open("cpu,cpu", &[Card::OWN; 2], memory(ExpertsOnHost::Auto));
    assert!(engine.plan().expert_times().unwrap().host.each > 0.0);
    assert!(all_bits(&engine, &prompt) == expected, "other bits");
}

#[test]
fn observers_see_the_layers_of_all_cards() {
    let tokens = prompt(12);
    let seen = |engine: &Engine| {
        let mut seen = Seen::default();
        feed(&mut engine.session().unwrap(), &tokens, Some(&mut seen));
        (seen.hidden, seen.experts)
    };
    let one = engine(&tales(), exact("cpu"), MemoryRequest::default());
    let (two, _) = open(&tales(), &[Card::OWN; 2], request());
    assert!(seen(&two) == seen(&one));
}

#[test]
fn sessions_are_truncated_saved_and_restored() {
    let folder = tempfile::tempdir().unwrap();
    for model in [tales(), Golden::read("qwen3_5_moe").folder] {
        let path = folder.path().join("a.moeflux-session");
        let one = engine(&model, exact("cpu"), MemoryRequest::default().sessions(3));
        let (two, _) = open(&model, &[Card::OWN; 2], request());
        let after =
            |session: &mut Session| -> Vec<u32> { bits(&feed(session, &[7, 9], None)).collect() };
        let saved = |engine: &Engine| {
            let mut session = engine.session().unwrap();
            feed(&mut session, &prompt(20)[..19], None);
            session.truncate(10, &mut StepControl::default()).unwrap();
            feed(&mut session, &[11], None);
            session.snapshot(&path, SnapshotOptions::default()).unwrap();
            after(&mut session)
        };
        let restored = |engine: &Engine| {
            let mut session = engine.session().unwrap();
            session.restore(&path).unwrap();
            let mark = session.mark().unwrap();
            let first = after(&mut session);
            session.rewind(&mark).unwrap();
            assert!(after(&mut session) == first);
            first
        };
        // Files of one card are restored on two, and back.
        let expected = saved(&one);
        assert!(restored(&two) == expected);
        assert!(saved(&two) == expected);
        assert!(restored(&one) == expected);
        assert!(restored(&two) == expected);
    }
}

#[test]
fn a_failed_card_is_named_and_leaves_sessions_at_their_last_tokens() {
    let tokens = prompt(12);
    let folder = Golden::read("qwen3_5_moe").folder;
    let one = engine(&folder, exact("cpu"), MemoryRequest::default());
    let expected = feed(&mut one.session().unwrap(), &tokens, None);
    for card in [0, 1] {
        for is_loss in [false, true] {
            let (engine, asked) = open(&folder, &[Card::OWN; 2], request());
            let mut session = engine.session().unwrap();
            let mut all = feed(&mut session, &tokens[..10], None);
            let call = |after| Fault { call: Call::Run, after, is_loss };
            for (after, of_attempt) in [(3, "an injected fault"), (0, "the device was lost")] {
                asked[card].lock().unwrap().fault = Some(call(after));
                let failed = session.sync(&tokens, &mut StepControl::default());
                let error = failed.map(drop).unwrap_err().to_string();
                let cause = if is_loss { of_attempt } else { "an injected fault" };
                assert!(error.contains(&format!("card {card}: {cause}")), "{error}");
                assert_eq!(session.tokens(), &tokens[..10]);
            }
            if !is_loss {
                tokens[10..]
                    .iter()
                    .for_each(|token| all.extend(feed(&mut session, &[*token], None)));
                assert!(all == expected, "other logits");
            }
        }
    }
    // Without a copy of the residual stream.
    let (engine, asked) = open(&folder, &[Card::OWN; 2], request());
    let mut session = engine.session().unwrap();
    feed(&mut session, &tokens[..10], None);
    for call in [Call::Read, Call::Commit] {
        asked[0].lock().unwrap().fault = Some(Fault { call, after: 0, is_loss: false });
        let failed = session.sync(&tokens, &mut StepControl::default());
        let error = failed.map(drop).unwrap_err().to_string();
        assert!(error.contains("card 0: an injected fault"), "{error}");
        assert_eq!(session.tokens(), &tokens[..10]);
    }
}

#[test]
fn wrong_lists_of_cards_are_refused() {
    let error = |name: &str, cards: &[Card], memory| {
        try_open(&tales(), exact(name), cards, memory).0.map(drop).unwrap_err().to_string()
    };
    let nine = ["cpu"; 9].join(",");
    let no_budgets = request().card_budgets(None);
    let many = error(&nine, &[Card::OWN; 9], no_budgets);
    assert!(many.contains("divided among 9 cards") && many.contains("at most 8 parts"), "{many}");
    let options = EngineOptions::default().device(exact("cpu,cpu"));
    let opened = Engine::open(Checkpoint::open(&tales()).unwrap(), options, &mut |_, _| {});
    let plain = opened.map(drop).unwrap_err().to_string();
    assert!(plain.contains("\"cpu\" in a list of devices is no card"), "{plain}");
    let three = error("cpu,cpu,cpu", &[Card::OWN; 3], request());
    assert!(three.contains("2 budgets of cards were given"), "{three}");
    let twice = error("gpu:7,gpu:7", &[Card::OWN; 2], request());
    assert!(twice.contains("gpu:7 is named twice"), "{twice}");
    let small = error("cpu,cpu", &[Card::OWN; 2], request().card_budgets(budgets(&[400, 1])));
    assert!(small.contains("is below the floor") && small.contains("of card 1"), "{small}");
    let huge = error("cpu,cpu", &[Card::OWN; 2], request().card_budgets(budgets(&[400, 1025])));
    assert!(huge.contains("1025 MiB is more than the 1024 MiB"), "{huge}");
    let slots = error("cpu,cpu", &[Card::OWN; 2], request().slots(257));
    assert!(slots.contains("257 slots were asked for"), "{slots}");
    assert!(CardBudgets::new(&[]).is_err() && CardBudgets::new(&[1; 17]).is_err());
}

#[test]
fn a_plan_has_a_pool_for_each_card() {
    // Plans count the resident memory of the process, other tests included.
    if !in_own_process("several_cards::a_plan_has_a_pool_for_each_card") {
        return;
    }
    let (one, _) = open(&tales(), &[Card::OWN], request().card_budgets(budgets(&[600])));
    let (two, _) = open(&tales(), &[Card::OWN; 2], request());
    let (one, two) = (one.plan(), two.plan());
    let places: Vec<_> = two.pools().iter().map(|pool| pool.place).collect();
    assert_eq!(places, [BankPlace::Card, BankPlace::Card, BankPlace::Host]);
    let budgets: Vec<_> = two.cards().iter().map(|card| card.budget).collect();
    assert_eq!(budgets, [400 * MIB, 200 * MIB]);
    // States and slots are divided; each card has all of the scratch.
    assert_eq!(two.bytes(LineName::State), one.bytes(LineName::State));
    assert_eq!(two.slots(), one.slots());
    for card in two.cards() {
        assert_eq!(card.bytes(LineName::Scratch), one.bytes(LineName::Scratch));
        assert!(card.total() <= card.budget && card.slots() > 0);
        assert!(card.bytes(LineName::Dense) < one.bytes(LineName::Dense));
        assert!(card.bytes(LineName::Marks) > 0);
    }
    // Vectors are on both.
    assert!(two.bytes(LineName::Dense) > one.bytes(LineName::Dense));
    let limits: u64 = two.cards().iter().map(|card| card.bytes(LineName::State)).sum();
    assert_eq!(limits, two.bytes(LineName::State));
    // A requested limit of states and marks is divided.
    let limited = request().state(MIB).marks(MIB);
    let (limited, _) = open(&tales(), &[Card::OWN; 2], limited);
    let page = 64 << 10;
    for line in [LineName::State, LineName::Marks] {
        assert!(limited.plan().bytes(line).abs_diff(MIB) <= page, "{line:?}");
    }
    // Where the cards are too small, no card has all of its experts.
    let fixed = |card: &Pool| card.fixed() - card.bytes(LineName::Marks);
    let fixed: Vec<u64> = two.cards().iter().map(fixed).collect();
    let slot = two.slot_bytes();
    let memory = CardBudgets::new(&[fixed[0] + 60 * slot, fixed[1] + 36 * slot]).unwrap();
    let (small, _) = open(&tales(), &[Card::OWN; 2], request().card_budgets(memory));
    assert!(!small.plan().cards().iter().any(|card| card.total() > card.budget));
    let layers = layers(&small);
    for (card, layers) in small.plan().cards().iter().zip(&layers) {
        assert!((1..32 * layers).contains(&card.slots()), "{} slots", card.slots());
    }
    let json = serde_json::to_value(small.plan()).unwrap();
    assert_eq!(json["cards"].as_array().unwrap().len(), 2);
    assert_eq!(json["slots"], small.plan().slots());
    let json = serde_json::to_value(one).unwrap();
    assert!(json.get("cards").is_none());
}

#[test]
fn a_head_drafts_on_the_last_card() {
    let folder = moeflux_goldens::golden("qwen3_5_moe_mtp_hub");
    let answer = |engine: &Engine| {
        let request = GenerateRequest::default().max_tokens(20).ignore_eos(true);
        let mut session = engine.session().unwrap();
        let prompt: Vec<u32> = (1..30).collect();
        let tokens = session.generate(&prompt, &request, &mut StepControl::default()).unwrap();
        let tokens: Vec<u32> = tokens.map(Result::unwrap).collect();
        (tokens, session.stats().drafted)
    };
    let memory = MemoryRequest::default().context(96).chunk(24);
    let single = engine(&folder, exact("cpu"), memory);
    for card in [copies(), unified()] {
        let (wrap, _) = wrap(&[card, card]);
        let options = EngineOptions::default().memory(memory).device(exact("cpu,cpu"));
        let options = options.wrap_device(wrap).draft(DraftMode::Always(2));
        let checkpoint = Checkpoint::open(&folder).unwrap();
        let cards = Engine::open(checkpoint, options, &mut |_, _| {}).unwrap();
        let (tokens, drafted) = answer(&cards);
        assert!(tokens == answer(&single).0 && drafted > 10, "{drafted} drafted: {tokens:?}");
    }
}

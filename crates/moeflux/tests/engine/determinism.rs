//! Determinism: logits depend on the tokens alone, not on the cache, the threads, the order of
//! reads, or the copy of the model that is read.

use std::{
    fs,
    ops::ControlFlow,
    path::{Path, PathBuf},
};

use moeflux::{
    Checkpoint, Engine, EngineOptions, MemoryRequest,
    checkpoint::CheckpointOptions,
    experts::{Access, FilePages, PolicyKind, PrefetchMode, ReadOptions, ReaderKind},
    runtime::DeviceOptions,
    tools::pack,
};

use crate::common::{
    self, Golden, feed, few_slots, gpu, is_full, readers::shuffled, split_golden, tales,
};

const READS: (ReaderKind, Access) = (ReaderKind::Threads, Access::Buffered);

#[derive(Clone, Copy)]
struct Run<'a> {
    slots: Option<usize>,
    threads: usize,
    chunk: usize,
    shuffle: Option<u64>,
    policy: PolicyKind,
    reads: (ReaderKind, Access),
    prefetch: PrefetchMode,
    /// Folders with copies of some files.
    mirrors: &'a [PathBuf],
    budget: Option<u64>,
    /// `threads` above overrides its threads.
    device: &'a DeviceOptions,
}

impl<'a> Run<'a> {
    fn plain(device: &'a DeviceOptions) -> Self {
        Self {
            slots: None,
            threads: 1,
            chunk: 512,
            shuffle: None,
            policy: PolicyKind::Lru,
            reads: READS,
            prefetch: PrefetchMode::Off,
            mirrors: &[],
            budget: None,
            device,
        }
    }
}

/// Bits of the logits of a prompt and four more tokens, and the hit rate.
fn bits(folder: &Path, prompt: &[u32], run: Run<'_>) -> (Vec<u32>, f64) {
    let mut options = EngineOptions::default()
        .memory(few_slots(run.slots).chunk(run.chunk).budget(run.budget))
        .device(run.device.clone().threads(run.threads))
        .reads(ReadOptions::default().kind(run.reads.0).access(run.reads.1))
        .prefetch(run.prefetch)
        .policy(run.policy);
    options.wrap_reader = run.shuffle.map(shuffled);
    let mirrors = CheckpointOptions::default().mirrors(run.mirrors.to_vec());
    let checkpoint = Checkpoint::open_with(folder, &mirrors).unwrap();
    let engine = Engine::open(checkpoint, options, &mut |_, _| {}).unwrap();
    let mut session = engine.session().unwrap();
    let (first, rest) = prompt.split_at(prompt.len() - 4);
    let mut logits = feed(&mut session, first, None);
    for token in rest {
        logits.extend(feed(&mut session, &[*token], None));
    }
    (logits.into_iter().map(f32::to_bits).collect(), session.stats().hit_rate())
}

fn smallest(folder: &Path) -> usize {
    moeflux::model::blueprint::Blueprint::for_checkpoint(&Checkpoint::open(folder).unwrap())
        .unwrap()
        .max_top_k()
}

fn check(folder: &Path, prompt: &[u32]) {
    for exact in [false, true] {
        let device = &common::exact("cpu").exact(exact);
        let all = Run::plain(device);
        let small = Run { slots: Some(smallest(folder)), ..all };
        let (expected, hit_rate) = bits(folder, prompt, all);
        assert!(hit_rate > 0.0, "a cache that holds all hits sometimes");
        for run in [
            small,
            Run { threads: 2, ..all },
            Run { threads: 2, ..small },
            Run { budget: Some(1 << 30), threads: 3, ..all },
            Run { prefetch: PrefetchMode::On, slots: Some(2 * smallest(folder)), ..small },
            Run {
                prefetch: PrefetchMode::On,
                shuffle: Some(0xC0FF_EE00),
                slots: Some(3 * smallest(folder)),
                ..small
            },
            Run { prefetch: PrefetchMode::Auto, shuffle: Some(0xBAD_CAFE), ..small },
            Run { shuffle: Some(0x9E37_79B9), threads: 2, ..all },
            Run { shuffle: Some(0xDEAD_BEEF), threads: 2, ..small },
            Run { reads: (ReaderKind::Threads, Access::Direct), ..small },
            Run { reads: (ReaderKind::Uring, Access::Direct), ..small },
            Run { reads: (ReaderKind::Uring, Access::Buffered), ..small },
        ] {
            assert!(expected == bits(folder, prompt, run).0, "{}: other bits", folder.display());
        }
        for policy in PolicyKind::ALL {
            for slots in [smallest(folder), 3 * smallest(folder)] {
                let run = Run { slots: Some(slots), policy, threads: 2, ..all };
                assert!(
                    expected == bits(folder, prompt, run).0,
                    "{}: other bits by {policy}",
                    folder.display()
                );
            }
        }
        if exact {
            for chunk in [1, 5] {
                let run = Run { chunk, ..small };
                assert!(
                    expected == bits(folder, prompt, run).0,
                    "{}: other bits by chunk",
                    folder.display()
                );
            }
        }
    }
}

#[test]
fn the_embedded_model_is_bit_equal_for_any_cache() {
    let prompt: Vec<u32> = (0..40).map(|i| (i * 97 + 13) % 4000).collect();
    check(&tales(), &prompt);
}

/// Every way to read.
const ALL_READS: [(ReaderKind, Access); 4] = [
    (ReaderKind::Threads, Access::Buffered),
    (ReaderKind::Threads, Access::Direct),
    (ReaderKind::Uring, Access::Buffered),
    (ReaderKind::Uring, Access::Direct),
];

/// A model with a table of rows, whose rows are in one of two files, with its packed copy, and with
/// mirrors of all files or of one.
#[test]
fn a_table_of_rows_is_bit_equal_for_any_cache_and_copy() {
    const NAME: &str = "qwen4_exp_hub";
    let golden = Golden::read(NAME);
    let prompt = golden.prompt();
    check(&golden.folder, &prompt);

    let folder = tempfile::tempdir().unwrap();
    let [own, packed, mirrors] = ["own", "packed", "mirrors"].map(|name| folder.path().join(name));
    fs::create_dir(&own).unwrap();
    // Half of the table is in each file.
    split_golden(NAME, &own, |name| {
        name.contains(".ple.") && !["shard_1", "shard_3"].iter().any(|shard| name.contains(shard))
    });
    let mut go = |_, _| ControlFlow::Continue(());
    pack(&Checkpoint::open(&own).unwrap(), &packed, &mut go).unwrap();
    let slots = smallest(&own);
    for exact in [false, true] {
        let device = &common::exact("cpu").exact(exact);
        let plain = Run::plain(device);
        let expected = bits(&golden.folder, &prompt, plain).0;
        let ahead = PrefetchMode::On;
        let runs = [
            Run { slots: Some(slots), ..plain },
            Run { slots: Some(3 * slots), prefetch: ahead, threads: 2, ..plain },
            Run { slots: Some(2 * slots), prefetch: ahead, shuffle: Some(0xC0FF_EE00), ..plain },
            Run { threads: 2, budget: Some(1 << 30), ..plain },
        ];
        for model in [&own, &packed] {
            let files = fs::read_dir(model).unwrap().map(|entry| entry.unwrap().file_name());
            let files = files.map(|name| name.into_string().unwrap());
            let files: Vec<_> = files
                .filter(|name| name.ends_with(".safetensors") || name.ends_with(".moeflux"))
                .collect();
            assert_eq!(files.len(), 2, "{files:?}");
            let parts = [&[][..], &files[..1], &files[1..], &files[..]];
            for (i, copied) in parts.into_iter().enumerate() {
                let _ = fs::remove_dir_all(&mirrors);
                fs::create_dir(&mirrors).unwrap();
                for name in copied {
                    fs::copy(model.join(name), mirrors.join(name)).unwrap();
                }
                let mirrors = std::slice::from_ref(&mirrors);
                let mirrors = if copied.is_empty() { &[] } else { mirrors };
                for (j, run) in runs.into_iter().enumerate() {
                    let run = Run { mirrors, reads: ALL_READS[(i + j) % 4], ..run };
                    let got = bits(model, &prompt, run).0;
                    assert!(expected == got, "{}: other bits with {copied:?}", model.display());
                }
            }
        }
    }
}

#[test]
fn the_page_cache_selects_the_access_and_changes_no_bit() {
    let folder = tempfile::tempdir().unwrap();
    for file in fs::read_dir(tales()).unwrap() {
        let path = file.unwrap().path();
        fs::copy(&path, folder.path().join(path.file_name().unwrap())).unwrap();
    }
    let (folder, device) = (folder.path(), &common::exact("cpu"));
    let open = || Checkpoint::open(folder).unwrap();
    let pages = FilePages::for_checkpoint(&open());
    let memory = MemoryRequest::default().slots(smallest(folder));
    let said = || {
        let options = EngineOptions::default().memory(memory).device(device.clone());
        Engine::open(open(), options, &mut |_, _| {}).unwrap().reads().to_owned()
    };
    // The files were just written, so they are in the page cache.
    if pages.cached().is_some_and(|share| share > 0.9) {
        assert!(
            said().starts_with("16 threads, buffered") && !said().contains("direct"),
            "{}",
            said()
        );
    }
    let forgets = || pages.forget().is_ok() && pages.cached().is_some_and(|share| share < 0.1);
    if forgets() {
        let ways = ["direct, buffered what is read again", "the file system has no direct reads"];
        assert!(ways.iter().any(|way| said().contains(way)), "{}", said());
    }
    let prompt: Vec<u32> = (0..40).map(|i| (i * 97 + 13) % 4000).collect();
    let expected = bits(folder, &prompt, Run::plain(device)).0;
    for kind in [ReaderKind::Threads, ReaderKind::Uring] {
        forgets();
        let run = Run {
            slots: memory.slots,
            reads: (kind, Access::Auto),
            prefetch: PrefetchMode::On,
            ..Run::plain(device)
        };
        assert!(expected == bits(folder, &prompt, run).0, "other bits by {kind:?}");
    }
}

#[test]
fn a_ring_that_wraps_twice_is_bit_equal_for_any_chunk() {
    let golden = Golden::read("gpt_oss_long");
    let prompt: Vec<u32> = golden.prompt().iter().copied().cycle().take(800).collect();
    let device = &common::exact("cpu");
    let run = |chunk, slots| {
        bits(&golden.folder, &prompt, Run { slots, threads: 2, chunk, ..Run::plain(device) }).0
    };
    let expected = run(800, None);
    for (chunk, slots) in [(64, None), (200, None), (7, Some(smallest(&golden.folder)))] {
        assert!(expected == run(chunk, slots), "other bits by chunks of {chunk}");
    }
}

/// Logits of a GPU do not depend on where experts are stored or when they arrive, nor, on the exact
/// path, on the other rows of a chunk.
fn check_gpu(folder: &Path, prompt: &[u32]) {
    for exact in [false, true] {
        let Some(device) = &gpu(exact) else { return };
        let all = Run::plain(device);
        let small = Run { slots: Some(smallest(folder)), ..all };
        let (expected, _) = bits(folder, prompt, all);
        let mut runs = vec![
            ("the same", all),
            ("few slots", small),
            ("reads in another order", Run { shuffle: Some(0x9E37_79B9), ..small }),
        ];
        if exact {
            runs.extend([1, 3, 8].map(|chunk| ("in chunks", Run { chunk, ..all })));
            runs.push(("in chunks with few slots", Run { chunk: 5, ..small }));
        }
        for (what, run) in runs {
            let (got, hit_rate) = bits(folder, prompt, run);
            let at = format!("{}, exact {exact}, {what}, {} rows", folder.display(), run.chunk);
            assert!(run.slots.is_none() || hit_rate < 1.0, "{at}: nothing was read");
            assert!(expected == got, "{at}: other bits");
        }
    }
}

#[test]
fn the_embedded_model_is_bit_equal_for_any_cache_on_a_gpu() {
    let prompt: Vec<u32> = (0..40).map(|i| (i * 97 + 13) % 4000).collect();
    check_gpu(&tales(), &prompt);
}

/// Goldens for GPUs; the first three run always.
pub(crate) const ON_A_GPU: [&str; 6] = [
    "qwen3_5_moe",
    "gpt_oss_mxfp4",
    "glm4_moe_gptq_act_order",
    "gemma4",
    "deepseek_v3_kv_b_4bit",
    "glm_moe_dsa_shared",
];

#[test]
fn goldens_are_bit_equal_for_any_cache_on_a_gpu() {
    for name in &ON_A_GPU[..if is_full() { ON_A_GPU.len() } else { 3 }] {
        let golden = Golden::read(name);
        check_gpu(&golden.folder, &golden.prompt());
    }
}

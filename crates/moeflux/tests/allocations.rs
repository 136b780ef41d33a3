//! Decode steps do not allocate. A separate binary, because it counts allocations with a global
//! allocator.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::atomic::{AtomicUsize, Ordering},
};

use common::{feed, tales};
use moeflux::{
    Checkpoint, Engine, EngineOptions, MemoryRequest, Sampling, StepControl,
    experts::{Access, ReadOptions, ReaderKind},
    runtime::DeviceOptions,
    text::Sampler,
};
use moeflux_goldens::golden;

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: all calls are forwarded unchanged to the system allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn decode_steps_do_not_allocate() {
    let folders = [
        tales(),
        golden("deepseek_v3_kv_b_4bit"),
        golden("glm_moe_dsa_shared"),
        golden("gpt_oss_mxfp4"),
        golden("gemma4"),
        golden("qwen3_next_hub"),
    ];
    for folder in &folders {
        for exact in [true, false] {
            let device = DeviceOptions::default().exact(exact).threads(2);
            // Few slots, so that decode steps read experts too.
            let memory = MemoryRequest::default().slots(10);
            // Covers both reader backends.
            let reads = match exact {
                true => ReadOptions::default(),
                false => ReadOptions::default().kind(ReaderKind::Uring).access(Access::Direct),
            };
            let options = EngineOptions::default().memory(memory).device(device).reads(reads);
            let checkpoint = Checkpoint::open(folder).unwrap();
            let engine = Engine::open(checkpoint, options, &mut |_, _| {}).unwrap();
            let mut session = engine.session().unwrap();
            feed(&mut session, &[5, 6, 7], None);
            for token in 10..14 {
                session.decode(token).unwrap();
            }
            let sampling = Sampling::default().top_k(20);
            let mut sampler = Sampler::new(sampling, engine.blueprint().vocab).unwrap();
            // Threads that start or end may allocate once meanwhile; an allocation per token would
            // occur in every run.
            let least = (0..3).map(|_| {
                let before = ALLOCATIONS.load(Ordering::Relaxed);
                for token in 20..30 {
                    session.decode(token).unwrap();
                    session.next(&[token], &mut sampler, &mut StepControl::default()).unwrap();
                }
                ALLOCATIONS.load(Ordering::Relaxed) - before
            });
            assert_eq!(least.min(), Some(0), "{}, exact: {exact}", folder.display());
        }
    }
}

//! Memory that a plan takes, by the bytes that are allocated at once.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

#[allow(dead_code, reason = "other tests use the rest")]
#[path = "../hub/fake_hub.rs"]
mod fake_hub;

use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use fake_hub::{COMMIT, FakeHub, Faults};
use moeflux_hub::{Proxies, Pull, Settings};

/// Files of the list.
const FILES: usize = 10_000;

/// Bytes of a field that nothing needs.
const UNNEEDED: usize = 4 << 20;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

struct Counting;

// SAFETY: all calls go to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let live = LIVE.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(live, Ordering::Relaxed);
        // SAFETY: the caller's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn a_list_takes_less_memory_than_four_times_its_useful_text() {
    let files = (0..FILES).map(|index| {
        format!(
            r#"{{"rfilename": "model-{index:05}.safetensors", "size": 134, "blobId": "{COMMIT}",
                 "lfs": {{"sha256": "{index:064x}", "size": {index}, "pointerSize": 134}}}}"#
        )
    });
    let files = files.collect::<Vec<_>>().join(",");
    let unneeded = "x".repeat(UNNEEDED);
    let list = format!(r#"{{"sha": "{COMMIT}", "card": "{unneeded}", "siblings": [{files}]}}"#);
    let useful = files.len();
    let hub = FakeHub::start(&[]);
    hub.set(Faults { list: Some(Arc::new(list.into_bytes())), ..Faults::default() });
    let settings = Settings {
        endpoint: format!("http://{}", hub.address),
        token: None,
        cache: tempfile::tempdir().unwrap().path().join("hub"),
        offline: false,
        proxies: Proxies::default(),
    };
    drop((files, unneeded));
    let before = LIVE.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    let plan = Pull::new(settings, "org/model".parse().unwrap()).plan(&|| false).unwrap();
    let peak = PEAK.load(Ordering::Relaxed) - before;
    assert_eq!(plan.file_count(), FILES);
    assert!(peak < 4 * useful, "{peak} bytes for {useful}");
}

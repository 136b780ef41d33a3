//! Pipeline cache: compiled kernels, kept between processes by a [`PipelineStore`].
//!
//! Vulkan only; wgpu has no such cache on Metal and DX12, whose drivers keep their own. The stored
//! contents are a [`frame`] around the bytes that wgpu writes, which begin with the adapter
//! and the version of its driver.

use std::{
    hash::Hasher,
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

use moeflux_ops::PipelineStore;

use super::card::{Card, native};

/// Time without a new pipeline after which the cache is saved: a process that is killed later has
/// lost nothing.
const QUIET: Duration = Duration::from_millis(500);
/// Maximum bytes of the contents. Kernels of earlier models stay in the cache, so once it is larger
/// it starts over.
const MAX_BYTES: usize = 32 << 20;

/// Start of the contents. The last byte is the version of the frame.
const MAGIC: [u8; 8] = *b"MFLXPIP\x01";
/// Bytes of the frame: [`MAGIC`], the length of the cache and its hash, little-endian.
const FRAME: usize = 24;

/// Hash of a cache. It covers the program's version, whose kernels are not those of another one.
fn hash(cache: &[u8]) -> u64 {
    let mut hasher = FastHasher::default();
    hasher.write(env!("CARGO_PKG_VERSION").as_bytes());
    hasher.write(cache);
    hasher.finish()
}

/// Start of the contents with this cache.
fn frame(cache: &[u8]) -> [u8; FRAME] {
    let (len, hash) = ((cache.len() as u64).to_le_bytes(), hash(cache).to_le_bytes());
    let mut frame = [0; FRAME];
    let fields = MAGIC.iter().chain(&len).chain(&hash);
    frame.iter_mut().zip(fields).for_each(|(dst, byte)| *dst = *byte);
    frame
}

/// The cache in stored contents; `None` if they are damaged or of another version.
fn unframed(contents: &[u8]) -> Option<&[u8]> {
    let (start, cache) = contents.split_at_checked(FRAME)?;
    (*start == frame(cache)).then_some(cache)
}

/// A driver's pipeline cache, as compiler threads use it.
#[derive(Clone)]
pub(super) struct CompilerCache {
    pub(super) raw: wgpu::PipelineCache,
    compiled: mpsc::Sender<()>,
}

impl CompilerCache {
    /// Reports a pipeline that was compiled with the cache.
    pub(super) fn report(&self) {
        // There is no receiver if the thread that saves could not be spawned.
        let _ = self.compiled.send(());
    }
}

/// A driver's pipeline cache and the thread that saves it.
pub(super) struct PipelineCache {
    /// `None` once this is dropped.
    cache: Option<CompilerCache>,
    saver: Option<thread::JoinHandle<()>>,
}

impl PipelineCache {
    /// Cache of a card, with the contents that the store has for it. `None` if the driver has no
    /// pipeline cache.
    pub(super) fn open(card: &Card, store: &Arc<dyn PipelineStore>) -> Option<Self> {
        if !card.device.features().contains(wgpu::Features::PIPELINE_CACHE) {
            return None;
        }
        let name = wgpu::util::pipeline_cache_key(&card.device.adapter_info())?;
        let stored = store.load(&name, MAX_BYTES);
        let loaded = stored.as_deref().and_then(unframed).and_then(|cache| {
            Some((cache.len(), native::pipeline_cache(&card.device, Some(cache))?))
        });
        let empty = || Some((0, native::pipeline_cache(&card.device, None)?));
        let (saved, raw) = loaded.or_else(empty)?;
        let (compiled, reports) = mpsc::channel();
        let (cache, store) = (raw.clone(), Arc::clone(store));
        let saver = thread::Builder::new()
            .name("kernel-cache".into())
            .stack_size(COMPILER_STACK)
            .spawn(move || save_when_quiet(&reports, &cache, saved, |b| store.save(&name, b)))
            .ok();
        Some(Self { cache: Some(CompilerCache { raw, compiled }), saver })
    }

    /// The cache for a compiler thread.
    pub(super) fn for_compiler(&self) -> Option<CompilerCache> {
        self.cache.clone()
    }
}

impl Drop for PipelineCache {
    fn drop(&mut self) {
        self.cache = None;
        self.saver.take().map(thread::JoinHandle::join);
    }
}

/// Saves the cache whenever no pipeline was reported for a while, and at the end. `saved` is the
/// length of the cache in the store: caches only grow, so one of the same length is the same.
fn save_when_quiet(
    reports: &mpsc::Receiver<()>,
    cache: &wgpu::PipelineCache,
    mut saved: usize,
    save: impl Fn(&[u8]),
) {
    while reports.recv().is_ok() {
        while reports.recv_timeout(QUIET).is_ok() {}
        if let Some(bytes) = cache.get_data().filter(|bytes| bytes.len() != saved) {
            save(&[&frame(&bytes)[..], &bytes].concat());
            saved = bytes.len();
        }
    }
}

/// Fast hash of a few words: every dispatch looks up a pipeline and a bind group.
#[derive(Clone, Copy, Default)]
pub(super) struct FastHasher(u64);

/// Extends a hash by a word.
pub(super) const fn extend_hash(hash: u64, word: u64) -> u64 {
    (hash.rotate_left(5) ^ word).wrapping_mul(0x517c_c1b7_2722_0a95)
}

impl std::hash::Hasher for FastHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        let (words, rest) = bytes.as_chunks();
        words.iter().for_each(|word| self.write_u64(u64::from_le_bytes(*word)));
        if !rest.is_empty() {
            let mut padded = [0; 8];
            padded[..rest.len()].copy_from_slice(rest);
            self.write_u64(u64::from_le_bytes(padded));
        }
    }

    fn write_u64(&mut self, word: u64) {
        self.0 = extend_hash(self.0, word);
    }

    fn write_usize(&mut self, word: usize) {
        self.write_u64(word as u64);
    }
}
/// Stack of a compiler thread: the usual size of a main thread, which drivers rely on.
pub(super) const COMPILER_STACK: usize = 8 << 20;

#[cfg(test)]
mod tests {
    use std::{
        sync::{Mutex, PoisonError},
        time::Instant,
    };

    use super::*;
    use crate::{device::GpuDevice, store::store::tests::gpu_with};
    use moeflux_ops::{Device, DeviceOptions, Op, Profiler, RecordAhead, View};

    /// Store in memory for one adapter.
    #[derive(Debug, Default)]
    struct MemoryStore {
        contents: Mutex<Option<Vec<u8>>>,
        saves: Mutex<usize>,
    }

    impl MemoryStore {
        fn contents(&self) -> Option<Vec<u8>> {
            self.contents.lock().unwrap_or_else(PoisonError::into_inner).clone()
        }

        fn saves(&self) -> usize {
            *self.saves.lock().unwrap()
        }
    }

    impl PipelineStore for MemoryStore {
        fn load(&self, _: &str, limit: usize) -> Option<Vec<u8>> {
            self.contents().filter(|contents| contents.len() <= limit)
        }

        fn save(&self, name: &str, contents: &[u8]) {
            assert!(name.bytes().all(|b| b.is_ascii_alphanumeric() || b"_-".contains(&b)));
            *self.contents.lock().unwrap() = Some(contents.to_vec());
            *self.saves.lock().unwrap() += 1;
        }
    }

    /// A device with a pipeline cache, which has compiled its first kernel.
    fn gpu(store: &Arc<MemoryStore>) -> Option<GpuDevice> {
        let store = Arc::clone(store) as Arc<dyn PipelineStore>;
        let gpu = gpu_with(&DeviceOptions::default().pipelines(store))?;
        if gpu.card.device.features().contains(wgpu::Features::PIPELINE_CACHE) {
            return Some(gpu);
        }
        eprintln!("no pipeline cache is tested: {} has none", gpu.card.adapter.name);
        None
    }

    #[test]
    fn damaged_contents_are_refused() {
        let contents = [&frame(b"kernels")[..], b"kernels"].concat();
        assert_eq!(unframed(&contents), Some(&b"kernels"[..]));
        for end in 0..contents.len() {
            assert_eq!(unframed(&contents[..end]), None, "{end} bytes");
        }
        for i in 0..contents.len() {
            let mut damaged = contents.clone();
            damaged[i] ^= 4;
            assert_eq!(unframed(&damaged), None, "byte {i}");
        }
        assert_eq!(unframed(&[&contents[..], &[0]].concat()), None);
    }

    #[test]
    fn a_second_device_starts_with_the_kernels_of_the_first() {
        let store = Arc::new(MemoryStore::default());
        let Some(first) = gpu(&store) else { return };
        drop(first);
        let saved = unframed(&store.contents().unwrap()).unwrap().len();
        // wgpu's header has 64 bytes, Vulkan's 32. Old software drivers write no kernels.
        assert!(saved >= 96, "{saved} bytes hold no headers");
        assert_eq!(store.saves(), 1);
        let second = gpu(&store).unwrap();
        let dyn_store = Arc::clone(&store) as Arc<dyn PipelineStore>;
        let loaded = PipelineCache::open(&second.card, &dyn_store).unwrap();
        let loaded = loaded.for_compiler().unwrap().raw.get_data();
        assert_eq!(loaded.map(|cache| cache.len()), Some(saved));
        drop(second);
        assert_eq!(store.saves(), 1, "nothing new was compiled");
    }

    #[test]
    fn the_cache_is_saved_while_the_device_is_open() {
        let store = Arc::new(MemoryStore::default());
        let Some(_gpu) = gpu(&store) else { return };
        let since = Instant::now();
        while store.contents().is_none() {
            assert!(since.elapsed() < Duration::from_secs(60), "nothing is saved");
            thread::sleep(Duration::from_millis(10));
        }
    }

    #[test]
    fn damaged_and_foreign_contents_are_replaced() {
        let store = Arc::new(MemoryStore::default());
        let Some(first) = gpu(&store) else { return };
        drop(first);
        let good = store.contents().unwrap();
        let cache = unframed(&good).unwrap();
        let in_frame = |cache: &[u8]| [&frame(cache)[..], cache].concat();
        // The id of the adapter in wgpu's header, and the version of its driver.
        let [other_adapter, other_driver] = [24, 32].map(|i| {
            let mut other = cache.to_vec();
            other[i] ^= 1;
            in_frame(&other)
        });
        let mut flipped = good.clone();
        flipped[good.len() / 2] ^= 1;
        for bad in [
            Vec::new(),
            good[..good.len() / 2].to_vec(),
            flipped,
            in_frame(b"no cache"),
            other_adapter,
            other_driver,
        ] {
            *store.contents.lock().unwrap() = Some(bad);
            let gpu = gpu(&store).unwrap();
            gpu.card.fault.check().unwrap();
            drop(gpu);
            assert_eq!(unframed(&store.contents().unwrap()).map(<[u8]>::len), Some(cache.len()));
        }
    }

    #[test]
    fn kernels_compile_ahead_of_their_ops() {
        let store = Arc::new(MemoryStore::default());
        let Some(mut gpu) = gpu(&store) else { return };
        let [x, out] = [0; 2].map(|_| View::rows(gpu.buffer(64).unwrap(), 1, 64));
        gpu.write(x.buffer, &[2.0; 64]).unwrap();
        let op = Op::RmsNorm { x, weight: None, per_head: false, eps: 0.0, out };
        let before = gpu.counters();
        let mut read = Ok(());
        gpu.compile_ahead(&mut |device| {
            device.run(&op).unwrap();
            read = device.read(out, &mut [0.0; 64]);
        })
        .unwrap();
        assert!(read.is_err(), "an op that only compiles has no result");
        let ahead = gpu.counters();
        assert_eq!((ahead.dispatches, ahead.kernels), (before.dispatches, before.kernels + 1));
        gpu.run(&op).unwrap();
        let mut values = [0.0; 64];
        gpu.read(out, &mut values).unwrap();
        assert_eq!(values, [1.0; 64]);
        assert_eq!(gpu.counters().kernels, ahead.kernels);
    }
}

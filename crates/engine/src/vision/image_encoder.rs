//! Images of a model: from the bytes of a file to rows, with a cache, for all threads of a program.

use std::{
    collections::{HashMap, hash_map::Entry},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use moeflux_base::{Error, SessionError};
use moeflux_model::checkpoint::Checkpoint;
use moeflux_vision::{ImageData, ImageLimits, PixelValues, Processor};

use super::{
    image_options::ImageOptions,
    prepared_image::{ImageDetail, PreparedImage},
    row_cache::{ImageDigest, RowCache},
    tower::{PatchForm, VisionTower},
    vision_memory::VisionMemory,
};
use crate::runtime::{ImageMemory, ImageRows, control::StepControl};

/// Defaults that depend on the device of the tower.
struct DeviceDefaults {
    max_tokens: u32,
    cache_bytes: u64,
}

const ON_PROCESSOR: DeviceDefaults = DeviceDefaults { max_tokens: 256, cache_bytes: 64 << 20 };
const ON_CARD: DeviceDefaults = DeviceDefaults { max_tokens: 4_096, cache_bytes: 256 << 20 };

/// Default of [`ImageOptions::row_bytes`], unless an image needs more.
const ROW_BYTES: u64 = 256 << 20;

/// Time after which a call that waits for the tower looks whether it is cancelled.
const POLL: Duration = Duration::from_millis(50);

/// Reads the images of a model: file, processor, vision tower and embedding cache. Threads share
/// it; one of them at a time computes.
pub struct ImageEncoder {
    /// The checkpoint's processor, without a limit.
    processor: Processor,
    form: PatchForm,
    max_tokens: u32,
    memory: VisionMemory,
    planned: ImageMemory,
    state: Mutex<EncoderState>,
    /// Signalled when a call has stopped computing.
    idle: Condvar,
}

struct EncoderState {
    /// `None` while a call computes.
    tower: Option<VisionTower>,
    cache: RowCache,
    /// Images of calls that are not finished.
    awaited: HashMap<ImageDigest, AwaitedImage>,
    stats: ImageStats,
}

struct AwaitedImage {
    /// Calls with the image.
    calls: usize,
    rows: Option<Arc<ImageRows>>,
}

/// Counters of images.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ImageStats {
    /// Images that the tower computed.
    pub computed: u64,
    /// Images whose rows were in the cache, or that another call or the same one computed.
    pub hits: u64,
}

impl ImageEncoder {
    /// Opens the processor and the vision tower of a checkpoint. `None` if the checkpoint has no
    /// tower. No weights are read.
    ///
    /// # Errors
    /// The processor's file or the tower is not supported or damaged, or the device cannot be
    /// opened.
    pub fn open(
        checkpoint: &Arc<Checkpoint>,
        options: ImageOptions,
    ) -> Result<Option<Self>, Error> {
        let ImageOptions { max_tokens, cache_bytes, row_bytes, resident: is_resident, .. } =
            options;
        let Some(mut tower) = VisionTower::open(checkpoint, options)? else {
            return Ok(None);
        };
        let processor = Processor::open(checkpoint.folder())?;
        let defaults = if tower.is_on_card() { ON_CARD } else { ON_PROCESSOR };
        let max_tokens = max_tokens.unwrap_or(defaults.max_tokens).min(processor.max_tokens());
        let cache_bytes = cache_bytes.unwrap_or(defaults.cache_bytes);
        let form = tower.patch_form();
        let patches = (max_tokens as usize).saturating_mul(form.merge * form.merge);
        tower.reserve(patches);
        // A decoder's memory, or two copies of a picture that is rotated; then the values of the
        // image that the tower computes and of the next one.
        let limits = ImageLimits::default();
        let pictures = limits.max_alloc.max(2 * 3 * limits.max_pixels);
        let values = patches.saturating_mul(form.width * size_of::<f32>()) as u64;
        let decoded = pictures.saturating_add(values.saturating_mul(2));
        let token_rows = tower.token_rows();
        let of_image = token_rows.saturating_mul(max_tokens.into());
        let max_rows = row_bytes.unwrap_or(ROW_BYTES.max(of_image));
        let of_tower = tower.memory(patches)?;
        let memory = VisionMemory { cache: cache_bytes, token_rows, max_rows, decoded, ..of_tower };
        let planned = memory.planned(is_resident, tower.is_on_card());
        let state = EncoderState {
            tower: Some(tower),
            cache: RowCache::new(cache_bytes),
            awaited: HashMap::new(),
            stats: ImageStats::default(),
        };
        let (state, idle) = (Mutex::new(state), Condvar::new());
        Ok(Some(Self { processor, form, max_tokens, memory, planned, state, idle }))
    }

    /// Maximum tokens of an image.
    pub fn max_tokens(&self) -> u32 {
        self.max_tokens
    }

    /// Memory that images take.
    pub fn memory(&self) -> VisionMemory {
        self.memory
    }

    /// The same as the memory plan has it.
    pub(crate) fn planned(&self) -> ImageMemory {
        self.planned
    }

    /// Bytes of rows of images of prompts that wait or whose images are not computed yet, for which
    /// the plan of an engine with `context` positions has room.
    pub fn row_room(&self, context: usize) -> u64 {
        self.planned.rows(context)
    }

    /// Bytes of the rows of images of a prompt, where equal ones share theirs: digest and tokens of
    /// each.
    ///
    /// # Errors
    /// [`SessionError::ImageRows`] if they are more than [`ImageEncoder::row_room`] for `context`.
    pub fn row_bytes(
        &self,
        images: impl IntoIterator<Item = ([u8; 32], usize)>,
        context: usize,
    ) -> Result<u64, Error> {
        let tokens: HashMap<[u8; 32], usize> = images.into_iter().collect();
        let tokens = tokens.into_values().fold(0, usize::saturating_add);
        let (bytes, room) =
            (self.memory.token_rows.saturating_mul(tokens as u64), self.row_room(context));
        match bytes <= room {
            true => Ok(bytes),
            false => Err(SessionError::ImageRows { bytes, room }.into()),
        }
    }

    /// Counters since the encoder was opened.
    pub fn stats(&self) -> ImageStats {
        self.lock().stats
    }

    /// Decodes an image file, and scales the image to the size of its tokens.
    ///
    /// # Errors
    /// [`Error::Image`] if the file is not an image that is read, or exceeds a limit.
    /// [`Error::Checkpoint`] if the processor is of another model than the tower.
    pub fn read(&self, bytes: &[u8], detail: ImageDetail) -> Result<Arc<PreparedImage>, Error> {
        self.prepare(&ImageData::decode(bytes, &ImageLimits::default())?, detail)
    }

    /// Scales an image to the size of its tokens.
    ///
    /// # Errors
    /// [`Error::Image`] if the processor refuses its size. [`Error::Checkpoint`] if the processor
    /// is of another model than the tower.
    pub fn prepare(
        &self,
        image: &ImageData,
        detail: ImageDetail,
    ) -> Result<Arc<PreparedImage>, Error> {
        let size = image.size();
        let of_detail = detail.max_tokens();
        let most = of_detail.map_or(self.max_tokens, |most| most.min(self.max_tokens));
        let processor = self.processor.clone().with_max_tokens(most);
        let (resized, pixels) = (processor.layout(size)?.resized, processor.process(image)?);
        self.form.check(&pixels)?;
        let unlimited = processor.with_max_tokens(of_detail).layout(size);
        let is_limited = unlimited.map_or(true, |layout| layout.tokens > pixels.tokens);
        let [_, rows, columns] = pixels.grid.map(|side| side as usize / self.form.merge);
        let grid = [rows, columns];
        Ok(Arc::new(PreparedImage { size, resized, grid, is_limited, pixels }))
    }

    /// Rows of an image, if the cache has them.
    pub fn cached(&self, digest: &[u8; 32]) -> Option<Arc<ImageRows>> {
        self.lock().cache.get(digest)
    }

    /// Rows of an image. The same as [`ImageEncoder::rows_of`] for one.
    ///
    /// # Errors
    /// As for [`ImageEncoder::rows_of`].
    pub fn rows(
        &self,
        image: &PreparedImage,
        control: &mut StepControl<'_>,
    ) -> Result<Arc<ImageRows>, Error> {
        let mut rows = self.rows_of(&[image], control)?;
        rows.pop().ok_or_else(|| Error::internal("an image without rows"))
    }

    /// Rows of images, in their order: from the cache, from another call that computes them at this
    /// moment, or from the tower, which one call at a time uses.
    ///
    /// # Errors
    /// [`Error::Cancelled`] if `control` was cancelled, while it waited or between blocks. A file
    /// cannot be read, or the device failed; the next call tries again.
    pub fn rows_of(
        &self,
        images: &[&PreparedImage],
        control: &mut StepControl<'_>,
    ) -> Result<Vec<Arc<ImageRows>>, Error> {
        let mut call = EncoderCall::new(self, images);
        loop {
            let mut state = self.lock();
            let missing = call.missing(&state);
            if missing.is_empty() {
                return call.rows(&mut state);
            }
            if control.is_cancelled() {
                return Err(Error::Cancelled);
            }
            let Some(tower) = state.tower.take() else {
                let waited = self.idle.wait_timeout(state, POLL);
                drop(waited.unwrap_or_else(PoisonError::into_inner));
                continue;
            };
            drop(state);
            let mut tower = TakenTower { encoder: self, tower: Some(tower) };
            tower.compute(&missing, control)?;
            call.computed += missing.len();
        }
    }

    fn lock(&self) -> MutexGuard<'_, EncoderState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Images of a call, in `awaited` until it ends.
struct EncoderCall<'a> {
    encoder: &'a ImageEncoder,
    images: &'a [&'a PreparedImage],
    computed: usize,
}

impl<'a> EncoderCall<'a> {
    fn new(encoder: &'a ImageEncoder, images: &'a [&'a PreparedImage]) -> Self {
        let mut state = encoder.lock();
        let EncoderState { cache, awaited, .. } = &mut *state;
        for image in images {
            let digest = *image.digest();
            let entry = awaited.entry(digest);
            let new = || AwaitedImage { calls: 0, rows: None };
            let image = entry.or_insert_with(new);
            image.calls += 1;
            image.rows = image.rows.take().or_else(|| cache.get(&digest));
        }
        Self { encoder, images, computed: 0 }
    }

    /// Images without rows, each once.
    fn missing(&self, state: &EncoderState) -> Vec<&'a PixelValues> {
        let mut missing: Vec<&PixelValues> = Vec::new();
        for PreparedImage { pixels, .. } in self.images {
            let awaited = state.awaited.get(&pixels.digest);
            let is_known = awaited.is_some_and(|image| image.rows.is_some());
            if !is_known && !missing.iter().any(|other| other.digest == pixels.digest) {
                missing.push(pixels);
            }
        }
        missing
    }

    /// Rows of all images.
    fn rows(&self, state: &mut EncoderState) -> Result<Vec<Arc<ImageRows>>, Error> {
        let awaited = |image: &&PreparedImage| state.awaited.get(image.digest())?.rows.clone();
        let rows: Option<Vec<_>> = self.images.iter().map(awaited).collect();
        state.stats.hits += (self.images.len() - self.computed) as u64;
        rows.ok_or_else(|| Error::internal("an image without rows"))
    }
}

impl Drop for EncoderCall<'_> {
    fn drop(&mut self) {
        let mut state = self.encoder.lock();
        for image in self.images {
            if let Entry::Occupied(mut entry) = state.awaited.entry(*image.digest()) {
                entry.get_mut().calls -= 1;
                if entry.get().calls == 0 {
                    entry.remove();
                }
            }
        }
    }
}

/// The tower of a call that computes. Dropped, it is the next call's, also after a panic.
struct TakenTower<'a> {
    encoder: &'a ImageEncoder,
    tower: Option<VisionTower>,
}

impl TakenTower<'_> {
    /// Computes images, which calls that await them find.
    fn compute(
        &mut self,
        images: &[&PixelValues],
        control: &mut StepControl<'_>,
    ) -> Result<(), Error> {
        let Some(tower) = &mut self.tower else { return Ok(()) };
        let rows = tower.rows(images, control)?;
        let mut state = self.encoder.lock();
        let EncoderState { cache, awaited, stats, .. } = &mut *state;
        stats.computed += images.len() as u64;
        for (image, rows) in images.iter().zip(rows) {
            let rows = Arc::new(rows);
            if let Some(image) = awaited.get_mut(&image.digest) {
                image.rows = Some(Arc::clone(&rows));
            }
            cache.insert(image.digest, rows);
        }
        Ok(())
    }
}

impl Drop for TakenTower<'_> {
    fn drop(&mut self) {
        self.encoder.lock().tower = self.tower.take();
        self.encoder.idle.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use moeflux_vision::ImageSize;

    use super::*;

    #[test]
    fn equal_images_of_a_prompt_have_their_rows_once() {
        let folder =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../moeflux/tests/data/vision/qwen3_5_moe");
        let checkpoint = Arc::new(Checkpoint::open(&folder).unwrap());
        let open =
            |options: ImageOptions| ImageEncoder::open(&checkpoint, options).unwrap().unwrap();
        let encoder = open(ImageOptions::default().row_bytes(100_000));
        let of_token = encoder.memory().token_rows;
        assert!(of_token > 0 && encoder.row_room(2) == 2 * of_token);
        assert_eq!(encoder.row_room(usize::MAX), 100_000);
        let images = [([1; 32], 7), ([2; 32], 5), ([1; 32], 7)];
        assert_eq!(encoder.row_bytes(images, 12).unwrap(), 12 * of_token);
        let error = encoder.row_bytes(images, 11).unwrap_err();
        let (bytes, room) = (12 * of_token, 11 * of_token);
        assert!(matches!(error, Error::Session(e) if e == SessionError::ImageRows { bytes, room }));
        // By default there is room for an image of the maximum size.
        let encoder = open(ImageOptions::default().max_tokens(u32::MAX));
        assert!(encoder.row_room(usize::MAX) >= of_token * u64::from(encoder.max_tokens()));
    }

    /// Without a cache, rows are still there for calls that began before they were computed.
    #[test]
    fn an_image_of_two_calls_is_computed_once() {
        let folder =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../moeflux/tests/data/vision/qwen3_5_moe");
        let checkpoint = Arc::new(Checkpoint::open(&folder).unwrap());
        let encoder = ImageEncoder::open(&checkpoint, ImageOptions::default().cache_bytes(0));
        let encoder = encoder.unwrap().unwrap();
        let size = ImageSize { width: 32, height: 32 };
        let image = ImageData::from_rgb(size, vec![7; 3 * 32 * 32]).unwrap();
        let image = encoder.prepare(&image, ImageDetail::Auto).unwrap();
        let images = [&*image];
        let waiting = EncoderCall::new(&encoder, &images);
        let rows = encoder.rows(&image, &mut StepControl::default()).unwrap();
        let found = waiting.rows(&mut encoder.lock()).unwrap();
        assert!(Arc::ptr_eq(&found[0], &rows));
        drop(waiting);
        assert!(encoder.lock().awaited.is_empty());
        encoder.rows(&image, &mut StepControl::default()).unwrap();
        assert_eq!(encoder.stats(), ImageStats { computed: 2, hits: 1 });
    }
}

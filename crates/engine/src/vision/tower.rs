//! Vision tower on devices that are dropped with all of their memory.
//!
//! A device returns no weight and no buffer while it exists. So a processor computes each stage of
//! a tower on a new device, which costs it the start of some threads, and has the weights of one
//! stage at a time. A card, whose devices are costly to open, has all weights during a run.

use std::{path::PathBuf, sync::Arc};

use moeflux_base::{Error, seam::physical_cores};
use moeflux_compute::{Device, DeviceOptions};
use moeflux_model::{
    blueprint::VisionBlueprint,
    checkpoint::{Checkpoint, MatrixSource},
    seam::ReadAhead,
};
use moeflux_vision::PixelValues;

use super::{
    image_options::ImageOptions,
    tower_buffers::TowerBuffers,
    tower_part::{BlockProgress, LoadedPart, PartPlace},
    tower_run::{PatchRope, TowerImage},
    tower_weights::{TowerStage, f32_bytes},
    vision_memory::VisionMemory,
};
use crate::runtime::{ImageRows, WrapDevice, control::StepControl, layer::Loader};

/// Maximum patches of images whose residual streams the host has at once, unless one image has
/// more. The weights are read once for them.
const PASS_PATCHES: usize = 8_192;

/// A vision tower. Images are computed one by one, so that the rows of one do not depend on others.
///
/// Unless the options say that it is resident, weights are read during a run and dropped. Only a
/// resident tower has memory between runs.
pub struct VisionTower {
    checkpoint: Arc<Checkpoint>,
    blueprint: VisionBlueprint,
    rope: PatchRope,
    options: DeviceOptions,
    wrap_device: Option<WrapDevice>,
    /// Whether a graphics adapter computes.
    is_on_card: bool,
    is_resident: bool,
    /// Patches for which a resident tower allocates buffers.
    reserved_patches: usize,
    /// All stages of a resident tower, from the first run on.
    resident: Option<LoadedPart>,
}

impl VisionTower {
    /// Opens the tower of a checkpoint. `None` if the checkpoint has none. No weights are read.
    ///
    /// # Errors
    /// The tower is not supported or damaged, or the device cannot be opened.
    pub fn open(
        checkpoint: &Arc<Checkpoint>,
        options: ImageOptions,
    ) -> Result<Option<Self>, Error> {
        let Some(blueprint) = VisionBlueprint::for_checkpoint(checkpoint)? else {
            return Ok(None);
        };
        let ImageOptions { device, resident, wrap_device, .. } = options;
        let threads = device.threads.or_else(|| Some(physical_cores()));
        let mut tower = Self {
            checkpoint: Arc::clone(checkpoint),
            rope: PatchRope::new(&blueprint),
            blueprint,
            options: device.threads(threads),
            wrap_device,
            is_on_card: false,
            is_resident: resident,
            reserved_patches: 0,
            resident: None,
        };
        tower.is_on_card = tower.open_device()?.memory().is_some();
        // A card has all weights during a run anyway.
        tower.is_resident |= tower.is_on_card;
        Ok(Some(tower))
    }

    /// The tower as data.
    pub fn blueprint(&self) -> &VisionBlueprint {
        &self.blueprint
    }

    /// Whether a graphics adapter computes.
    pub fn is_on_card(&self) -> bool {
        self.is_on_card
    }

    /// Has a resident tower allocate buffers for images of up to `patches` patches.
    pub(super) fn reserve(&mut self, patches: usize) {
        self.reserved_patches = patches;
    }

    /// Bytes of the rows of a token.
    pub(super) fn token_rows(&self) -> u64 {
        let VisionBlueprint { out, deepstack, .. } = &self.blueprint;
        f32_bytes(out.saturating_mul(1 + deepstack.len()))
    }

    /// Form of the images that the tower takes.
    pub(super) fn patch_form(&self) -> PatchForm {
        let VisionBlueprint { patch, merge, ref embedding, .. } = self.blueprint;
        let width = 3 * embedding.frames * patch * patch;
        PatchForm { width, merge, folder: self.checkpoint.folder().to_owned() }
    }

    /// Memory of a run with images of up to `patches` patches.
    pub(super) fn memory(&self, patches: usize) -> Result<VisionMemory, Error> {
        let device = self.open_device()?;
        let of_stages = TowerStage::of(&self.blueprint).into_iter().map(TowerStage::bytes);
        let weights = of_stages.clone().fold(0, u64::saturating_add);
        let (held, carried) = match self.is_streamed() {
            true => (of_stages.max().unwrap_or(0), patches.max(PASS_PATCHES)),
            false => (weights, 0),
        };
        let buffers = TowerBuffers::bytes(&*device, &self.blueprint, patches)?;
        let carried = f32_bytes(carried.saturating_mul(self.blueprint.hidden));
        let of_host = TowerImage::bytes(&self.blueprint, patches).saturating_add(carried);
        Ok(VisionMemory {
            weights_in_passing: held.saturating_add(self.ahead_bytes() as u64),
            weights,
            activations_at_max_tokens: buffers.saturating_add(of_host),
            ..VisionMemory::default()
        })
    }

    /// Rows of images, in their order. The weights are read once for several images, unless they
    /// are large.
    ///
    /// # Errors
    /// The pixel values are of another processor, a file cannot be read, the device failed, or
    /// `control` was cancelled.
    pub fn rows(
        &mut self,
        images: &[&PixelValues],
        control: &mut StepControl<'_>,
    ) -> Result<Vec<ImageRows>, Error> {
        let form = self.patch_form();
        images.iter().try_for_each(|image| form.check(image))?;
        let patches: usize = images.iter().map(|image| image.rows).sum();
        let mut progress = BlockProgress { done: 0, total: patches * self.blueprint.blocks.len() };
        let (mut rows, mut rest) = (Vec::with_capacity(images.len()), images);
        while !rest.is_empty() {
            let (pass, later) = rest.split_at(self.images_of_pass(rest));
            rows.extend(self.pass(pass, control, &mut progress)?);
            rest = later;
        }
        Ok(rows)
    }

    /// Number of images of the next run over the tower.
    fn images_of_pass(&self, images: &[&PixelValues]) -> usize {
        let mut patches = 0_usize;
        let fits = |image: &&&PixelValues| {
            patches += image.rows;
            !self.is_streamed() || patches <= PASS_PATCHES
        };
        images.iter().take_while(fits).count().max(1)
    }

    /// Rows of images for which the weights are read once.
    fn pass(
        &mut self,
        images: &[&PixelValues],
        control: &mut StepControl<'_>,
        progress: &mut BlockProgress,
    ) -> Result<Vec<ImageRows>, Error> {
        let largest = images.iter().map(|image| image.rows).max().unwrap_or(0);
        let mut images: Vec<_> = images.iter().map(|image| TowerImage::new(image)).collect();
        let mut loaded = self.resident.take();
        let stages = TowerStage::of(&self.blueprint);
        let unread = if loaded.is_some() { &[][..] } else { &stages };
        let matrices = unread.iter().flat_map(|stage| stage.matrices());
        let ahead = ReadAhead::new(&self.checkpoint, matrices, self.ahead_bytes());
        let of_part = if self.is_streamed() { 1 } else { stages.len() };
        let parts = stages.len().div_ceil(of_part);
        let computed = std::thread::scope(|scope| {
            let _stop = ahead.start(scope);
            for (index, stages) in stages.chunks(of_part).enumerate() {
                let part = match &mut loaded {
                    Some(part) => part,
                    None => loaded.insert(self.load(stages, &ahead, control)?),
                };
                let reserved = if self.is_streamed() { 0 } else { self.reserved_patches };
                part.reserve(&self.blueprint, largest.max(reserved))?;
                let place = PartPlace { is_first: index == 0, is_last: index + 1 == parts };
                for image in &mut images {
                    part.run(&self.blueprint, &self.rope, place, image, control, progress)?;
                }
                if !self.is_resident {
                    loaded = None;
                }
            }
            Ok(())
        });
        if self.is_resident && matches!(computed, Ok(()) | Err(Error::Cancelled)) {
            self.resident = loaded;
        }
        computed?;
        Ok(images.into_iter().map(|image| image.into_rows(&self.blueprint)).collect())
    }

    /// Loads stages to a new device.
    fn load(
        &self,
        stages: &[TowerStage<'_>],
        ahead: &ReadAhead<'_>,
        control: &StepControl<'_>,
    ) -> Result<LoadedPart, Error> {
        let mut device = self.open_device()?;
        let mut loader = Loader {
            checkpoint: &self.checkpoint,
            ahead,
            device: &mut *device,
            exact: self.options.exact,
            context: 0,
            chunk: 0,
            progress: &mut |_| Ok(()),
            last_order: None,
        };
        let stages = stages.iter().map(|stage| match control.is_cancelled() {
            true => Err(Error::Cancelled),
            false => stage.load(&mut loader),
        });
        let stages = stages.collect::<Result<_, _>>()?;
        Ok(LoadedPart::new(device, stages))
    }

    fn open_device(&self) -> Result<Box<dyn Device>, Error> {
        let device = moeflux_compute::open(&self.options)
            .map_err(Error::at(|| "opening the device of the vision tower"))?;
        Ok(match &self.wrap_device {
            Some(wrap) => wrap(device),
            None => device,
        })
    }

    /// Whether each stage has a separate device.
    fn is_streamed(&self) -> bool {
        !self.is_on_card && !self.is_resident
    }

    /// Maximum bytes of matrices that are being read: a block.
    fn ahead_bytes(&self) -> usize {
        let bytes = |stage: TowerStage<'_>| {
            let of_matrices = stage.matrices().map(MatrixSource::memory_bytes);
            match stage {
                TowerStage::Block(_) => of_matrices.sum(),
                _ => of_matrices.max().unwrap_or(0),
            }
        };
        TowerStage::of(&self.blueprint).into_iter().map(bytes).max().unwrap_or(0)
    }
}

/// Form of the images that a tower takes.
pub(super) struct PatchForm {
    /// Values of a patch.
    pub(super) width: usize,
    /// Side of a block in patches.
    pub(super) merge: usize,
    /// Folder of the checkpoint, for messages.
    folder: PathBuf,
}

impl PatchForm {
    /// Checks that the pixel values are of the tower's processor.
    pub(super) fn check(&self, image: &PixelValues) -> Result<(), Error> {
        let &Self { width, merge, .. } = self;
        let [frames, rows, columns] = image.grid.map(|side| side as usize);
        let is_grid =
            frames == 1 && image.rows > 0 && rows.checked_mul(columns) == Some(image.rows);
        let is_whole = rows.is_multiple_of(merge) && columns.is_multiple_of(merge);
        let is_filled = image.rows.checked_mul(width) == Some(image.values.len());
        if image.width == width && image.block == merge && is_grid && is_whole && is_filled {
            return Ok(());
        }
        let problem = format!(
            "its images have {rows} x {columns} patches of {} values in blocks of {}, the vision \
             tower of config.json takes patches of {width} values in blocks of {merge}: take both \
             files from one model",
            image.width, image.block
        );
        Err(Error::Checkpoint { path: self.folder.join("preprocessor_config.json"), problem })
    }
}

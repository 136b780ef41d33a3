//! Encoder of the images of an engine: its device is chosen with the vision tower in the plan.

use std::{cell::RefCell, collections::HashMap, sync::Arc};

use moeflux_base::Error;
use moeflux_model::checkpoint::Checkpoint;

use super::{image_encoder::ImageEncoder, image_options::ImageOptions};
use crate::runtime::ImageMemory;

/// Encoders of the devices that an engine may choose.
pub(crate) struct EngineImages<'a> {
    checkpoint: &'a Arc<Checkpoint>,
    options: ImageOptions,
    /// By the name of the device that was offered.
    opened: RefCell<HashMap<String, OpenedImages>>,
}

/// An encoder, or the reason why the model answers text only.
type OpenedImages = Result<Option<ImageEncoder>, String>;

impl<'a> EngineImages<'a> {
    pub(crate) fn new(checkpoint: &'a Arc<Checkpoint>, options: ImageOptions) -> Self {
        Self { checkpoint, options, opened: RefCell::default() }
    }

    /// Memory of images with the tower on `device`, unless the options name another one.
    ///
    /// # Errors
    /// The device of the tower cannot be opened.
    pub(crate) fn plan(&self, device: &str) -> Result<ImageMemory, Error> {
        let mut options = self.options.clone();
        options.device.name.get_or_insert_with(|| device.to_owned());
        let opened = match ImageEncoder::open(self.checkpoint, options) {
            // The model answers text without its tower.
            Err(error @ (Error::File { .. } | Error::Checkpoint { .. } | Error::Tensor { .. })) => {
                Err(error.to_string())
            }
            opened => Ok(opened?),
        };
        let memory = opened.as_ref().ok().and_then(Option::as_ref).map(ImageEncoder::planned);
        self.opened.borrow_mut().insert(device.to_owned(), opened);
        Ok(memory.unwrap_or_default())
    }

    /// The encoder of the device that was chosen.
    ///
    /// # Errors
    /// The reason why the model answers text only.
    pub(crate) fn chosen(self, device: Option<&str>) -> OpenedImages {
        let mut opened = self.opened.into_inner();
        device.and_then(|device| opened.remove(device)).unwrap_or(Ok(None))
    }
}

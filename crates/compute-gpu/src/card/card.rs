//! An open card: adapter, queue and limits.

use std::sync::{Arc, Mutex, PoisonError};

use moeflux_ops::{Adapter, Error};
use wgpu::Features;

use super::{adapter, native};

/// First error that the driver reported. Results of later work are invalid.
#[derive(Clone, Default)]
pub(crate) struct DriverFault(Arc<Mutex<Option<String>>>);

impl DriverFault {
    /// Records an error, unless there is one already.
    pub(crate) fn set(&self, message: String) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(message);
    }

    /// Returns the recorded error, if any.
    pub(crate) fn check(&self) -> Result<(), Error> {
        match &*self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(message) => {
                Err(Error::Device(format!("the GPU failed: {message}; load the model again")))
            }
            None => Ok(()),
        }
    }
}

/// Opened adapter.
pub(crate) struct Card {
    pub(crate) adapter: Adapter,
    pub(crate) device: wgpu::Device,
    pub(crate) queue: wgpu::Queue,
    pub(crate) limits: wgpu::Limits,
    pub(crate) fault: DriverFault,
}

impl Card {
    /// Opens adapter `index` of an instance, or the best one.
    pub(crate) fn open(instance: &wgpu::Instance, index: Option<usize>) -> Result<Self, Error> {
        let all = adapter::enumerate(instance);
        let described: Vec<Adapter> =
            all.iter().enumerate().map(|(i, a)| adapter::describe(i, a)).collect();
        let chosen = adapter::choose(&described, index)?;
        let raw = &all[chosen.index];
        let wanted = Features::IMMEDIATES
            | Features::SUBGROUP
            | Features::SUBGROUP_BARRIER
            | Features::SHADER_F16
            | Features::TIMESTAMP_QUERY
            | Features::PIPELINE_CACHE
            | Features::EXPERIMENTAL_COOPERATIVE_MATRIX;
        let mut features = wanted & raw.features();
        if !chosen.cooperative_matrix {
            features.remove(Features::EXPERIMENTAL_COOPERATIVE_MATRIX);
        }
        let (device, queue) = native::request(raw, features, raw.limits()).map_err(|e| {
            Error::Device(format!("gpu:{} {} cannot be opened: {e}", chosen.index, chosen.name))
        })?;
        let fault = DriverFault::default();
        let (on_error, on_loss) = (fault.clone(), fault.clone());
        device.on_uncaptured_error(Arc::new(move |error: wgpu::Error| {
            on_error.set(error.to_string());
        }));
        device.set_device_lost_callback(move |_, why| {
            on_loss.set(format!("the device was lost: {why}"));
        });
        Ok(Self { adapter: chosen, limits: device.limits(), device, queue, fault })
    }
}

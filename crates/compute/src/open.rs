//! Opens devices by their names.

use moeflux_compute_cpu::{CpuDevice, Isa};
use moeflux_ops::{Device, DeviceId, DeviceOptions, Error, ReferenceDevice};

/// Opens a device.
///
/// # Errors
/// The device, the instruction set or the number of threads is not available. The message lists the
/// available ones.
pub fn open(options: &DeviceOptions) -> Result<Box<dyn Device>, Error> {
    let kv_format = options.chosen_kv_format()?;
    let id = options.id.unwrap_or_else(DeviceId::next);
    match options.name.as_deref().unwrap_or("cpu") {
        "cpu" => {
            let isa = match &options.isa {
                Some(name) => Isa::by_name(name)?,
                None => Isa::detect(),
            };
            Ok(Box::new(CpuDevice::new(id, isa, kv_format, options)?))
        }
        "reference" => Ok(Box::new(ReferenceDevice::new(id))),
        name => {
            let index = match name.strip_prefix("gpu") {
                Some("") => Some(None),
                Some(index) => index.strip_prefix(':').and_then(|n| n.parse().ok()).map(Some),
                None => None,
            };
            let Some(index) = index else {
                return Err(Error::Missing(format!(
                    "there is no device {name:?}: choose cpu, gpu, gpu:N or reference"
                )));
            };
            open_gpu(index, options)
        }
    }
}

#[cfg(feature = "gpu")]
fn open_gpu(index: Option<usize>, options: &DeviceOptions) -> Result<Box<dyn Device>, Error> {
    Ok(Box::new(moeflux_compute_gpu::GpuDevice::new(index, options)?))
}

#[cfg(not(feature = "gpu"))]
fn open_gpu(_: Option<usize>, _: &DeviceOptions) -> Result<Box<dyn Device>, Error> {
    Err(Error::Missing("this build has no GPU device: build it with the feature gpu".into()))
}

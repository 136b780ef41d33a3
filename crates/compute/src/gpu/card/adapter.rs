//! The graphics adapters of a machine, and opening one.

use std::{
    cmp::Reverse,
    sync::{Arc, LazyLock, Mutex, PoisonError},
};

use wgpu::{Backend, Backends, DeviceType, Features};

use crate::Error;

/// Bytes of immediates that kernels use.
pub(in crate::gpu) const IMMEDIATES: u32 = 128;

/// Bytes that a driver takes on the host for the kernels of a model, command buffers and tables.
const DRIVER: u64 = 64 << 20;
/// The same of a software driver: its kernels are machine code in this process, and so is the compiler. llvmpipe was seen
/// to take 129 MiB.
const SOFTWARE_DRIVER: u64 = 192 << 20;

/// What an adapter is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum AdapterKind {
    /// A card with memory of its own.
    Discrete,
    /// Shares the memory of the host.
    Integrated,
    /// Of a virtual machine.
    Virtual,
    /// The driver does not say.
    Other,
    /// Runs on the CPU.
    Software,
}

/// A graphics adapter.
#[derive(Clone, Debug)]
pub struct Adapter {
    /// Its number in `gpu:N`.
    pub index: usize,
    /// As the driver has it.
    pub name: String,
    /// Metal, Vulkan or DX12.
    pub backend: String,
    /// What it is.
    pub kind: AdapterKind,
    /// Driver and version.
    pub driver: String,
    /// Bytes of its memory, where the driver says.
    pub memory: Option<u64>,
    /// Bytes of the largest buffer.
    pub max_buffer: u64,
    /// Bytes of a buffer that one kernel sees.
    pub max_binding: u64,
    /// The smallest and the largest number of threads that exchange numbers without memory; `None` where it has no
    /// such operations.
    pub subgroup: Option<(u32, u32)>,
    /// Whether it computes in f16.
    pub f16: bool,
    /// Whether it multiplies matrices of 16 x 16 in hardware, f16 to f32.
    pub cooperative_matrix: bool,
    /// Why it cannot be used.
    pub unusable: Option<String>,
}

impl Adapter {
    /// What adapters are sorted by, the best one first: by kind, cards before all else; of one kind the one with the most
    /// memory.
    pub fn preference(&self) -> impl Ord + use<> {
        (self.kind, Reverse(self.memory), self.index)
    }

    /// Bytes of the host's memory that its driver will take once kernels run.
    pub(in crate::gpu) const fn driver_bytes(&self) -> u64 {
        match self.kind {
            AdapterKind::Software => SOFTWARE_DRIVER,
            _ => DRIVER,
        }
    }

    /// Whether its memory is the host's, and the host can write it in place.
    pub(in crate::gpu) fn is_unified(&self) -> bool {
        let shares = matches!(self.kind, AdapterKind::Integrated | AdapterKind::Software);
        shares && matches!(&*self.backend, "Vulkan" | "Metal")
    }
}

/// What finds adapters: one for the whole process, as drivers keep something of each one that is made.
pub(in crate::gpu) fn instance() -> &'static wgpu::Instance {
    static INSTANCE: LazyLock<wgpu::Instance> = LazyLock::new(|| {
        wgpu::Instance::new(wgpu::InstanceDescriptor {
            backends: Backends::METAL | Backends::VULKAN | Backends::DX12,
            flags: wgpu::InstanceFlags::empty(),
            ..wgpu::InstanceDescriptor::new_without_display_handle()
        })
    });
    &INSTANCE
}

fn enumerate(instance: &wgpu::Instance) -> Vec<wgpu::Adapter> {
    pollster::block_on(instance.enumerate_adapters(Backends::all()))
}

fn describe(index: usize, adapter: &wgpu::Adapter) -> Adapter {
    let (info, limits, features) = (adapter.get_info(), adapter.limits(), adapter.features());
    let unusable =
        if !features.contains(Features::IMMEDIATES) || limits.max_immediate_size < IMMEDIATES {
            Some(format!("kernels cannot take {IMMEDIATES} bytes of parameters"))
        } else if limits.max_compute_invocations_per_workgroup < 256 {
            Some("workgroups have fewer than 256 threads".into())
        } else {
            None
        };
    Adapter {
        index,
        kind: match info.device_type {
            DeviceType::DiscreteGpu => AdapterKind::Discrete,
            DeviceType::IntegratedGpu => AdapterKind::Integrated,
            DeviceType::VirtualGpu => AdapterKind::Virtual,
            DeviceType::Cpu => AdapterKind::Software,
            DeviceType::Other => AdapterKind::Other,
        },
        backend: match info.backend {
            Backend::Vulkan => "Vulkan".into(),
            Backend::Metal => "Metal".into(),
            Backend::Dx12 => "DX12".into(),
            other => format!("{other:?}"),
        },
        driver: format!("{} {}", info.driver, info.driver_info).trim().to_owned(),
        name: info.name,
        memory: super::native::memory(adapter),
        max_buffer: limits.max_buffer_size,
        max_binding: limits.max_storage_buffer_binding_size,
        subgroup: features
            .contains(Features::SUBGROUP)
            .then_some((info.subgroup_min_size, info.subgroup_max_size)),
        f16: features.contains(Features::SHADER_F16),
        cooperative_matrix: features.contains(Features::EXPERIMENTAL_COOPERATIVE_MATRIX)
            && adapter.cooperative_matrix_properties().iter().any(|p| {
                (p.m_size, p.n_size, p.k_size) == (16, 16, 16)
                    && p.ab_type == wgpu::CooperativeScalarType::F16
                    && p.cr_type == wgpu::CooperativeScalarType::F32
            }),
        unusable,
    }
}

/// The graphics adapters of this machine, software ones included.
pub fn adapters() -> Vec<Adapter> {
    enumerate(instance()).iter().enumerate().map(|(i, a)| describe(i, a)).collect()
}

/// What the driver complained about, if it did: whatever ran since is worth nothing.
#[derive(Clone, Default)]
pub(in crate::gpu) struct Failure(Arc<Mutex<Option<String>>>);

impl Failure {
    pub(in crate::gpu) fn set(&self, what: String) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(what);
    }

    pub(in crate::gpu) fn check(&self) -> Result<(), Error> {
        match &*self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(what) => Err(Error::Device(format!("the GPU failed: {what}"))),
            None => Ok(()),
        }
    }
}

/// An open adapter.
pub(in crate::gpu) struct Opened {
    pub(in crate::gpu) adapter: Adapter,
    pub(in crate::gpu) device: wgpu::Device,
    pub(in crate::gpu) queue: wgpu::Queue,
    pub(in crate::gpu) failure: Failure,
}

/// Adapter `index`, or the best one that can be used; a software adapter only if there is no other.
fn choose(described: &[Adapter], index: Option<usize>) -> Result<Adapter, Error> {
    let found = || {
        let names = described.iter().map(|a| {
            let why = a.unusable.as_ref().map(|why| format!(", unusable: {why}"));
            format!("gpu:{} {} ({}{})", a.index, a.name, a.backend, why.unwrap_or_default())
        });
        match described.is_empty() {
            true => "this machine has no graphics adapter with a Vulkan, Metal or DX12 driver: install one, or choose cpu".to_owned(),
            false => format!("there are: {}", names.collect::<Vec<_>>().join("; ")),
        }
    };
    let chosen = match index {
        Some(i) => described.get(i),
        None => described.iter().filter(|a| a.unusable.is_none()).min_by_key(|a| a.preference()),
    };
    let chosen = match (chosen, index) {
        (Some(a), _) => a.clone(),
        (None, Some(i)) => {
            return Err(Error::Device(format!("there is no adapter gpu:{i}: {}", found())));
        }
        (None, None) => return Err(Error::Device(format!("no usable GPU: {}", found()))),
    };
    if let Some(why) = &chosen.unusable {
        return Err(Error::Device(format!(
            "gpu:{} {} cannot be used: {why}",
            chosen.index, chosen.name
        )));
    }
    Ok(chosen)
}

/// Opens adapter `index` of an instance, or the best one.
pub(in crate::gpu) fn open(
    instance: &wgpu::Instance,
    index: Option<usize>,
) -> Result<Opened, Error> {
    let all = enumerate(instance);
    let described: Vec<Adapter> = all.iter().enumerate().map(|(i, a)| describe(i, a)).collect();
    let chosen = choose(&described, index)?;
    let adapter = &all[chosen.index];
    let wanted = Features::IMMEDIATES
        | Features::SUBGROUP
        | Features::SUBGROUP_BARRIER
        | Features::SHADER_F16
        | Features::TIMESTAMP_QUERY
        | Features::EXPERIMENTAL_COOPERATIVE_MATRIX;
    let mut features = wanted & adapter.features();
    if !chosen.cooperative_matrix {
        features.remove(Features::EXPERIMENTAL_COOPERATIVE_MATRIX);
    }
    let (device, queue) =
        super::native::request(adapter, features, adapter.limits()).map_err(|e| {
            Error::Device(format!("gpu:{} {} cannot be opened: {e}", chosen.index, chosen.name))
        })?;
    let failure = Failure::default();
    let (on_error, on_loss) = (failure.clone(), failure.clone());
    device.on_uncaptured_error(Arc::new(move |error: wgpu::Error| on_error.set(error.to_string())));
    device
        .set_device_lost_callback(move |_, why| on_loss.set(format!("the device was lost: {why}")));
    Ok(Opened { adapter: chosen, device, queue, failure })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn adapter(index: usize, kind: AdapterKind, memory: Option<u64>) -> Adapter {
        Adapter {
            index,
            name: format!("card {index}"),
            backend: "Vulkan".into(),
            kind,
            driver: "none".into(),
            memory,
            max_buffer: 1 << 30,
            max_binding: 1 << 27,
            subgroup: None,
            f16: false,
            cooperative_matrix: false,
            unusable: None,
        }
    }

    #[test]
    fn the_best_adapter_is_the_largest_card_that_can_be_used() {
        use AdapterKind::{Discrete, Integrated, Software};
        let mut all = vec![
            adapter(0, Software, Some(1 << 40)),
            adapter(1, Discrete, Some(1 << 33)),
            adapter(2, Integrated, Some(1 << 36)),
            adapter(3, Discrete, Some(1 << 35)),
            adapter(4, Discrete, None),
        ];
        let best = |all: &[Adapter]| choose(all, None).map(|a| a.index).map_err(|e| e.to_string());
        assert_eq!(best(&all), Ok(3));
        all[3].unusable = Some("it is from 1996".into());
        assert_eq!(best(&all), Ok(1));
        assert_eq!(best(&all[..1]), Ok(0), "a software adapter where there is no other");
        let error = best(&all[3..4]).unwrap_err();
        assert!(error.contains("no usable GPU") && error.contains("it is from 1996"), "{error}");
        let error = choose(&all, Some(3)).unwrap_err().to_string();
        assert!(error.contains("gpu:3 card 3 cannot be used: it is from 1996"), "{error}");
        let error = choose(&all, Some(5)).unwrap_err().to_string();
        assert!(error.contains("there is no adapter gpu:5: there are: gpu:0 card 0"), "{error}");
    }
}

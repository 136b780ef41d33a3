//! Graphics adapters of the machine: enumeration and choice.

use std::sync::LazyLock;

use moeflux_ops::{Adapter, AdapterKind, Error};
use wgpu::{Backend, Backends, DeviceType, Features};

/// Bytes of immediates (push constants) that kernels take.
pub(crate) const IMMEDIATES: u32 = 128;

/// Host bytes that a driver uses for the pipelines of a model, command buffers and tables.
const DRIVER_BYTES: u64 = 64 << 20;
/// Host bytes of a software driver. They include its compiler and the kernels' machine code;
/// llvmpipe was measured at 129 MiB.
const SOFTWARE_DRIVER_BYTES: u64 = 192 << 20;

/// Host bytes that the driver of `adapter` uses once kernels run.
pub(crate) const fn driver_bytes(adapter: &Adapter) -> u64 {
    match adapter.kind {
        AdapterKind::Software => SOFTWARE_DRIVER_BYTES,
        _ => DRIVER_BYTES,
    }
}

/// Whether the memory of `adapter` is host memory that the CPU can write in place.
pub(crate) fn is_unified(adapter: &Adapter) -> bool {
    let shares = matches!(adapter.kind, AdapterKind::Integrated | AdapterKind::Software);
    shares && matches!(&*adapter.backend, "Vulkan" | "Metal")
}

/// The wgpu instance. One per process, because drivers keep some memory of each.
pub(crate) fn instance() -> &'static wgpu::Instance {
    static INSTANCE: LazyLock<wgpu::Instance> = LazyLock::new(|| {
        wgpu::Instance::new(wgpu::InstanceDescriptor {
            backends: Backends::METAL | Backends::VULKAN | Backends::DX12,
            flags: wgpu::InstanceFlags::empty(),
            ..wgpu::InstanceDescriptor::new_without_display_handle()
        })
    });
    &INSTANCE
}

pub(super) fn enumerate(instance: &wgpu::Instance) -> Vec<wgpu::Adapter> {
    pollster::block_on(instance.enumerate_adapters(Backends::all()))
}

pub(super) fn describe(index: usize, adapter: &wgpu::Adapter) -> Adapter {
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

/// Graphics adapters of this machine, including software ones.
pub fn adapters() -> Vec<Adapter> {
    enumerate(instance()).iter().enumerate().map(|(i, a)| describe(i, a)).collect()
}

/// Adapter `index`, or the best usable one. A software adapter is chosen only if it is the only
/// usable one.
pub(super) fn choose(described: &[Adapter], index: Option<usize>) -> Result<Adapter, Error> {
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
            return Err(Error::Missing(format!("there is no adapter gpu:{i}: {}", found())));
        }
        (None, None) => return Err(Error::Missing(format!("no usable GPU: {}", found()))),
    };
    if let Some(why) = &chosen.unusable {
        return Err(Error::Device(format!(
            "gpu:{} {} cannot be used: {why}",
            chosen.index, chosen.name
        )));
    }
    Ok(chosen)
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

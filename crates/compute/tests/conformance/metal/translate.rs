//! A kernel's WGSL in the languages of the drivers, as wgpu's backends have it translated.

use naga::{
    AddressSpace, Module, ShaderStage, StorageAccess,
    back::{hlsl, msl, spv},
    proc::{BoundsCheckPolicies, BoundsCheckPolicy, Layouter},
    valid::{Capabilities, ModuleInfo, ValidationFlags, Validator},
};

/// A kernel in MSL.
pub(super) struct Metal {
    pub(super) text: String,
    /// The name of its entry point there.
    pub(super) entry: String,
    pub(super) threads: u32,
    /// Buffers that it writes to, by binding.
    pub(super) writes: Vec<bool>,
}

/// Threadgroup memory and threads that every Apple GPU has.
pub(super) const MAX_SHARED: u32 = 32 << 10;
const MAX_THREADS: u32 = 1024;

/// Translates a kernel for Vulkan, DX12 and both versions of Metal's language, and yields the MSL of the later one. It may have so
/// many bytes of workgroup memory.
pub(super) fn translate(
    source: &str,
    capabilities: Capabilities,
    most_shared: u32,
) -> Result<Metal, String> {
    let module = naga::front::wgsl::parse_str(source).map_err(|e| e.emit_to_string(source))?;
    let info = Validator::new(ValidationFlags::all(), capabilities)
        .subgroup_stages(naga::valid::ShaderStages::COMPUTE)
        .subgroup_operations(naga::valid::SubgroupOperationSet::all())
        .validate(&module)
        .map_err(|e| e.emit_to_string(source))?;
    limits(&module, most_shared)?;
    vulkan(&module, &info)?;
    // Our kernels for matrix units are for those of Vulkan and Metal.
    if !capabilities.contains(Capabilities::COOPERATIVE_MATRIX) || !source.contains("coop_") {
        direct3d(&module, &info)?;
    }
    metal(&module, &info, (2, 4))?;
    metal(&module, &info, (3, 2))
}

fn limits(module: &Module, most_shared: u32) -> Result<(), String> {
    let threads: u32 = module.entry_points[0].workgroup_size.iter().product();
    if threads > MAX_THREADS {
        return Err(format!("workgroups of {threads} threads"));
    }
    let mut layouts = Layouter::default();
    layouts.update(module.to_ctx()).map_err(|e| e.to_string())?;
    let shared = module.global_variables.iter().filter(|(_, v)| v.space == AddressSpace::WorkGroup);
    let shared: u32 = shared.map(|(_, v)| layouts[v.ty].size).sum();
    match shared > most_shared {
        true => Err(format!("{shared} bytes of workgroup memory, more than {most_shared}")),
        false => Ok(()),
    }
}

fn unchecked() -> BoundsCheckPolicies {
    let policy = BoundsCheckPolicy::Unchecked;
    BoundsCheckPolicies { index: policy, buffer: policy, image_load: policy, binding_array: policy }
}

fn vulkan(module: &Module, info: &ModuleInfo) -> Result<(), String> {
    let options = spv::Options {
        lang_version: (1, 3),
        bounds_check_policies: unchecked(),
        zero_initialize_workgroup_memory: spv::ZeroInitializeWorkgroupMemoryMode::None,
        force_loop_bounding: false,
        ..Default::default()
    };
    let pipeline =
        spv::PipelineOptions { shader_stage: ShaderStage::Compute, entry_point: "main".into() };
    let words = spv::write_vec(module, info, &options, Some(&pipeline));
    words.map(|_| ()).map_err(|e| format!("SPIR-V: {e}"))
}

fn direct3d(module: &Module, info: &ModuleInfo) -> Result<(), String> {
    let options = hlsl::Options {
        shader_model: hlsl::ShaderModel::V6_2,
        fake_missing_bindings: true,
        immediates_target: Some(hlsl::BindTarget { space: 1, ..Default::default() }),
        restrict_indexing: false,
        force_loop_bounding: false,
        zero_initialize_workgroup_memory: false,
        ..Default::default()
    };
    let pipeline =
        hlsl::PipelineOptions { entry_point: Some((ShaderStage::Compute, "main".into())) };
    let mut text = String::new();
    let mut writer = hlsl::Writer::new(&mut text, &options, &pipeline);
    let written = writer.write(module, info, None).map_err(|e| format!("HLSL: {e}"))?;
    written.entry_point_names[0].as_ref().map(|_| ()).map_err(|e| format!("HLSL: {e}"))
}

/// Parameters lie in Metal's buffer 0, binding n in buffer n + 1.
fn metal(module: &Module, info: &ModuleInfo, lang_version: (u8, u8)) -> Result<Metal, String> {
    let mut resources =
        msl::EntryPointResources { immediates_buffer: Some(0), ..Default::default() };
    let mut writes = Vec::new();
    for (_, variable) in module.global_variables.iter() {
        let Some(binding) = variable.binding else { continue };
        let mutable = matches!(variable.space, AddressSpace::Storage { access } if access.contains(StorageAccess::STORE));
        let number = binding.binding as usize;
        writes.resize(writes.len().max(number + 1), false);
        writes[number] = mutable;
        let target =
            msl::BindTarget { buffer: Some(number as u8 + 1), mutable, ..Default::default() };
        resources.resources.insert(binding, target);
    }
    resources.sizes_buffer = Some(writes.len() as u8 + 1);
    let options = msl::Options {
        lang_version,
        per_entry_point_map: [("main".to_owned(), resources)].into_iter().collect(),
        fake_missing_bindings: false,
        bounds_check_policies: unchecked(),
        zero_initialize_workgroup_memory: false,
        force_loop_bounding: false,
        emit_int_div_checks: false,
        ..Default::default()
    };
    let pipeline = msl::PipelineOptions {
        entry_point: Some((ShaderStage::Compute, "main".into())),
        vertex_pulling_transform: true,
        ..Default::default()
    };
    let (text, names) =
        msl::write_string(module, info, &options, &pipeline).map_err(|e| format!("MSL: {e}"))?;
    let entry = names.entry_point_names[0].as_ref().map_err(|e| format!("MSL: {e}"))?.clone();
    let threads = module.entry_points[0].workgroup_size.iter().product();
    Ok(Metal { text, entry, threads, writes })
}

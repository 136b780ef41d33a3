//! Translation of a kernel's WGSL to SPIR-V, HLSL and MSL, with the options of wgpu's backends.

use naga::{
    AddressSpace, Module, ShaderStage, StorageAccess,
    back::{hlsl, msl, spv},
    proc::{BoundsCheckPolicies, BoundsCheckPolicy, Layouter},
    valid::{Capabilities, ModuleInfo, ValidationFlags, Validator},
};

/// A kernel in MSL.
pub(super) struct MslKernel {
    pub(super) text: String,
    /// Name of the entry point in the MSL.
    pub(super) entry: String,
    pub(super) threads: u32,
    /// Whether the kernel writes to each binding.
    pub(super) writes: Vec<bool>,
}

/// Bytes of threadgroup memory on every Apple GPU.
pub(super) const MAX_SHARED: u32 = 32 << 10;
/// Threads per threadgroup on every Apple GPU.
const MAX_THREADS: u32 = 1024;

/// Translates a kernel for Vulkan, DX12 and two versions of MSL, and returns the later MSL.
///
/// `max_shared` limits its workgroup memory, in bytes.
pub(super) fn translate(
    source: &str,
    capabilities: Capabilities,
    max_shared: u32,
) -> Result<MslKernel, String> {
    let module = naga::front::wgsl::parse_str(source).map_err(|e| e.emit_to_string(source))?;
    let info = Validator::new(ValidationFlags::all(), capabilities)
        .subgroup_stages(naga::valid::ShaderStages::COMPUTE)
        .subgroup_operations(naga::valid::SubgroupOperationSet::all())
        .validate(&module)
        .map_err(|e| e.emit_to_string(source))?;
    limits(&module, max_shared)?;
    vulkan(&module, &info)?;
    // Kernels with cooperative matrices are for Vulkan and Metal only.
    if !capabilities.contains(Capabilities::COOPERATIVE_MATRIX) || !source.contains("coop_") {
        direct3d(&module, &info)?;
    }
    metal(&module, &info, (2, 4))?;
    metal(&module, &info, (3, 2))
}

fn limits(module: &Module, max_shared: u32) -> Result<(), String> {
    let threads: u32 = module.entry_points[0].workgroup_size.iter().product();
    if threads > MAX_THREADS {
        return Err(format!("workgroups of {threads} threads"));
    }
    let mut layouts = Layouter::default();
    layouts.update(module.to_ctx()).map_err(|e| e.to_string())?;
    let shared = module.global_variables.iter().filter(|(_, v)| v.space == AddressSpace::WorkGroup);
    let shared: u32 = shared.map(|(_, v)| layouts[v.ty].size).sum();
    match shared > max_shared {
        true => Err(format!("{shared} bytes of workgroup memory, more than {max_shared}")),
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

/// Immediates are in Metal's buffer 0, binding n in buffer n + 1.
fn metal(module: &Module, info: &ModuleInfo, lang_version: (u8, u8)) -> Result<MslKernel, String> {
    let mut resources =
        msl::EntryPointResources { immediates_buffer: Some(0), ..Default::default() };
    let mut writes = Vec::new();
    for (_, variable) in module.global_variables.iter() {
        let Some(binding) = variable.binding else { continue };
        let mutable = matches!(variable.space, AddressSpace::Storage { access } if access.contains(StorageAccess::STORE));
        let index = binding.binding as usize;
        writes.resize(writes.len().max(index + 1), false);
        writes[index] = mutable;
        let target =
            msl::BindTarget { buffer: Some(index as u8 + 1), mutable, ..Default::default() };
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
    Ok(MslKernel { text, entry, threads, writes })
}

//! Dispatches as wgpu takes them.

use super::super::params::PackedParams;

/// Dispatch whose pipeline is compiled.
pub(super) struct ReadyDispatch {
    pub(super) pipeline: wgpu::ComputePipeline,
    pub(super) group: wgpu::BindGroup,
    pub(super) params: PackedParams,
    pub(super) workgroups: [u32; 2],
}

impl ReadyDispatch {
    pub(super) fn encode(&self, pass: &mut wgpu::ComputePass<'_>) {
        encode_dispatch(pass, &self.pipeline, &self.group, &self.params, self.workgroups);
    }
}

pub(super) fn encode_dispatch(
    pass: &mut wgpu::ComputePass<'_>,
    pipeline: &wgpu::ComputePipeline,
    group: &wgpu::BindGroup,
    params: &PackedParams,
    [x, y]: [u32; 2],
) {
    pass.set_pipeline(pipeline);
    pass.set_bind_group(0, group, &[]);
    pass.set_immediates(0, params.bytes());
    pass.dispatch_workgroups(x, y, 1);
}

//! Properties of graphics adapters and their order of preference.

use std::cmp::Reverse;

/// Kind of a graphics adapter, in order of preference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum AdapterKind {
    /// Discrete GPU with dedicated memory.
    Discrete,
    /// Integrated GPU; shares host memory.
    Integrated,
    /// Virtual GPU of a virtual machine.
    Virtual,
    /// Kind not reported by the driver.
    Other,
    /// Software implementation on the CPU.
    Software,
}

/// Properties of a graphics adapter.
#[derive(Clone, Debug)]
pub struct Adapter {
    /// Index `N` in the device name `gpu:N`.
    pub index: usize,
    /// Name reported by the driver.
    pub name: String,
    /// Metal, Vulkan or DX12.
    pub backend: String,
    /// Kind of adapter.
    pub kind: AdapterKind,
    /// Driver name and version.
    pub driver: String,
    /// Bytes of device memory, if the driver reports them.
    pub memory: Option<u64>,
    /// Bytes of the largest buffer.
    pub max_buffer: u64,
    /// Bytes of the largest storage binding of a kernel.
    pub max_binding: u64,
    /// Smallest and largest subgroup size; `None` without subgroup operations.
    pub subgroup: Option<(u32, u32)>,
    /// Whether kernels can compute in f16.
    pub f16: bool,
    /// Whether it has 16 x 16 x 16 cooperative matrices, f16 inputs and f32 sums.
    pub cooperative_matrix: bool,
    /// Reason why it cannot be used, if any.
    pub unusable: Option<String>,
}

impl Adapter {
    /// Sort key, best adapter first: by kind, then by larger memory, then by index.
    pub fn preference(&self) -> impl Ord + use<> {
        (self.kind, Reverse(self.memory), self.index)
    }
}

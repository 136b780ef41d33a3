//! Kernels: WGSL text, the constants it is specialised by, and the pipelines made of it.

use std::{
    collections::HashMap,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex, PoisonError, mpsc},
    thread,
};

/// How a kernel uses a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Access {
    /// `var<storage, read>`.
    Read,
    /// `var<storage, read_write>`.
    Write,
}

/// One kernel: an entry point `main` and the buffers of group 0, in the order of their bindings.
#[derive(Debug)]
pub(super) struct Kernel {
    pub(super) name: &'static str,
    /// The texts that make it up, in order; [`TEAM`] stands for the team functions of the device.
    pub(super) source: &'static [&'static str],
    pub(super) bindings: &'static [Access],
}

/// Declares a kernel from files of `kernels/`.
macro_rules! kernel {
    ($name:literal, [$($file:literal),*], [$($access:ident),*]) => {
        $crate::gpu::kernel::Kernel {
            name: $name,
            source: &[$(include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/src/gpu/kernels/", $file, ".wgsl"))),*],
            bindings: &[$($crate::gpu::kernel::Access::$access),*],
        }
    };
}
pub(super) use kernel;

/// The most constants of a kernel.
const CONSTANTS: usize = 22;

/// Constants that a kernel is specialised by: `const NAME = value;` in front of its text. `f32` constants are not
/// among them: those travel as parameters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Constants {
    names: [&'static str; CONSTANTS],
    values: [u32; CONSTANTS],
    len: usize,
}

impl Constants {
    pub(super) fn new(constants: &[(&'static str, u32)]) -> Self {
        let mut new = Self::default();
        for constant in constants {
            new = new.with(constant.0, constant.1);
        }
        new
    }

    #[must_use]
    #[inline(always)]
    pub(super) fn with(mut self, name: &'static str, value: u32) -> Self {
        debug_assert!(self.len < CONSTANTS);
        self.names[self.len] = name;
        self.values[self.len] = value;
        self.len += 1;
        self
    }

    fn all(&self) -> impl Iterator<Item = (&'static str, u32)> {
        self.names.into_iter().zip(self.values).take(self.len)
    }
}

/// What a pipeline is found by. A kernel names its constants in one order, so their values tell them apart.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Key {
    /// Where the kernel lies: it is a static.
    kernel: usize,
    len: usize,
    values: [u32; CONSTANTS],
}

/// A hash of a few words: pipelines and bind groups are looked up for every dispatch.
#[derive(Clone, Copy, Default)]
struct Quick(u64);

impl std::hash::Hasher for Quick {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for word in bytes.chunks(8) {
            let mut all = [0; 8];
            all[..word.len()].copy_from_slice(word);
            self.write_u64(u64::from_le_bytes(all));
        }
    }

    fn write_u64(&mut self, word: u64) {
        self.0 = (self.0.rotate_left(5) ^ word).wrapping_mul(0x517c_c1b7_2722_0a95);
    }

    fn write_usize(&mut self, word: usize) {
        self.write_u64(word as u64);
    }
}

type Table<K, V> = HashMap<K, V, std::hash::BuildHasherDefault<Quick>>;

/// What kernels are written for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Target {
    /// Threads of a team.
    pub(super) team: u32,
    /// Whether a team is a subgroup; without, it exchanges numbers by way of workgroup memory.
    pub(super) subgroups: bool,
    /// Whether four products of 8-bit numbers are one instruction, and threads of a subgroup exchange words.
    pub(super) dot8: bool,
    /// Whether kernels may compute in f16.
    pub(super) f16: bool,
    /// Whether matrices are multiplied in hardware: 16 x 16 x 16, f16 to f32.
    pub(super) cooperative: bool,
}

const TEAM_SUBGROUP: &str = include_str!("kernels/team_subgroup.wgsl");
const TEAM_MEMORY: &str = include_str!("kernels/team_memory.wgsl");
const PART_SUBGROUP: &str = include_str!("kernels/part_subgroup.wgsl");
const PART_MEMORY: &str = include_str!("kernels/part_memory.wgsl");

impl Target {
    /// The whole text of a kernel. `WG` among the constants is the size of its workgroups.
    pub(super) fn text(&self, kernel: &Kernel, constants: &Constants) -> String {
        let mut text = String::new();
        let body: String = kernel.source.concat();
        if self.f16 && body.contains("f16") {
            text.push_str("enable f16;\n");
        }
        if body.contains("coop_mat") {
            text.push_str("enable wgpu_cooperative_matrix;\n");
        }
        for (name, value) in constants.all() {
            text.push_str(&format!("const {name} = {value}u;\n"));
        }
        text.push_str(&format!("const TEAM = {}u;\n", self.team));
        if body.contains("team_") || body.contains("group_sum") || body.contains("group_max") {
            text.push_str(if self.subgroups { TEAM_SUBGROUP } else { TEAM_MEMORY });
        }
        if body.contains("part_sum") {
            text.push_str(if self.subgroups { PART_SUBGROUP } else { PART_MEMORY });
        }
        text.push_str(&body);
        super::unroll::unrolled(&text)
    }
}

/// A kernel that is ready to run, or will be.
struct Pipeline {
    made: Made,
    /// Which layout its buffers have.
    layout: usize,
}

enum Made {
    Ready(wgpu::ComputePipeline),
    Coming(mpsc::Receiver<wgpu::ComputePipeline>),
}

/// Most threads that make pipelines: each takes some ten megabytes of a driver's memory meanwhile.
const MAX_COMPILERS: usize = 8;
/// Stack of such a thread, as large as that of most programs, which compilers are written for.
const STACK: usize = 8 << 20;

type Job = Box<dyn FnOnce() + Send>;

/// Threads that make pipelines beside what records dispatches, as many as the processor has cores.
struct Compilers {
    jobs: Option<mpsc::Sender<Job>>,
    taken: Arc<Mutex<mpsc::Receiver<Job>>>,
    threads: Vec<thread::JoinHandle<()>>,
    most: usize,
}

impl Compilers {
    fn new() -> Self {
        let (jobs, taken) = mpsc::channel();
        let most = thread::available_parallelism().map_or(1, usize::from).min(MAX_COMPILERS);
        Self { jobs: Some(jobs), taken: Arc::new(Mutex::new(taken)), threads: Vec::new(), most }
    }

    /// Has a job done, by this thread if there can be no other.
    fn run(&mut self, job: Job) {
        if self.threads.len() < self.most {
            let taken = Arc::clone(&self.taken);
            let next = move || taken.lock().unwrap_or_else(PoisonError::into_inner).recv();
            let work = move || {
                while let Ok(job) = next() {
                    // Whoever waits for the job sees that it came to nothing.
                    let _ = catch_unwind(AssertUnwindSafe(job));
                }
            };
            let spawned =
                thread::Builder::new().name("kernels".into()).stack_size(STACK).spawn(work);
            self.threads.extend(spawned);
        }
        match &self.jobs {
            Some(jobs) if !self.threads.is_empty() => {
                if let Err(mpsc::SendError(job)) = jobs.send(job) {
                    job();
                }
            }
            _ => job(),
        }
    }
}

impl Drop for Compilers {
    fn drop(&mut self) {
        // A program that ends while a driver compiles takes what that uses from under it.
        self.jobs = None;
        self.threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}

/// All pipelines and bind groups that have been needed so far.
pub(super) struct Pipelines {
    device: wgpu::Device,
    target: Target,
    layouts: Vec<(&'static [Access], wgpu::BindGroupLayout, wgpu::PipelineLayout)>,
    pipelines: Table<Key, Pipeline>,
    compilers: Compilers,
    groups: Table<(usize, [u32; MAX_BINDINGS]), wgpu::BindGroup>,
}

/// The most buffers of a kernel.
pub(super) const MAX_BINDINGS: usize = 8;

impl Pipelines {
    pub(super) fn new(device: wgpu::Device, target: Target) -> Self {
        Self {
            device,
            target,
            layouts: Vec::new(),
            pipelines: Table::default(),
            compilers: Compilers::new(),
            groups: Table::default(),
        }
    }

    pub(super) const fn target(&self) -> Target {
        self.target
    }

    pub(super) fn set_target(&mut self, target: Target) {
        self.target = target;
        self.pipelines.clear();
    }

    fn layout(&mut self, bindings: &'static [Access]) -> usize {
        if let Some(i) = self.layouts.iter().position(|(of, ..)| *of == bindings) {
            return i;
        }
        let entries: Vec<_> = bindings
            .iter()
            .enumerate()
            .map(|(i, access)| wgpu::BindGroupLayoutEntry {
                binding: i as u32,
                visibility: wgpu::ShaderStages::COMPUTE,
                ty: wgpu::BindingType::Buffer {
                    ty: wgpu::BufferBindingType::Storage { read_only: *access == Access::Read },
                    has_dynamic_offset: false,
                    min_binding_size: None,
                },
                count: None,
            })
            .collect();
        let group = self.device.create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor {
            label: None,
            entries: &entries,
        });
        let layout = self.device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
            label: None,
            bind_group_layouts: &[Some(&group)],
            immediate_size: super::adapter::IMMEDIATES,
        });
        self.layouts.push((bindings, group, layout));
        self.layouts.len() - 1
    }

    /// The pipeline of a kernel with such constants, if it is ready, and the bind group of its buffers, each of which has a
    /// number of its own. What is met for the first time is made from now on, for [`Pipelines::finished`].
    pub(super) fn get(
        &mut self,
        kernel: &'static Kernel,
        constants: Constants,
        buffers: &[(u32, &wgpu::Buffer)],
    ) -> (Key, Option<&wgpu::ComputePipeline>, &wgpu::BindGroup) {
        let Constants { len, values, .. } = constants;
        let key = Key { kernel: std::ptr::from_ref(kernel) as usize, len, values };
        if !self.pipelines.contains_key(&key) {
            let layout = self.layout(kernel.bindings);
            let made = Made::Coming(self.make(kernel, constants, layout));
            self.pipelines.insert(key, Pipeline { made, layout });
        }
        let pipeline = &self.pipelines[&key];
        let mut ids = [u32::MAX; MAX_BINDINGS];
        ids.iter_mut().zip(buffers).for_each(|(id, (of, _))| *id = *of);
        let group = self.groups.entry((pipeline.layout, ids)).or_insert_with(|| {
            let entries: Vec<_> = buffers
                .iter()
                .enumerate()
                .map(|(i, (_, buffer))| wgpu::BindGroupEntry {
                    binding: i as u32,
                    resource: buffer.as_entire_binding(),
                })
                .collect();
            self.device.create_bind_group(&wgpu::BindGroupDescriptor {
                label: None,
                layout: &self.layouts[pipeline.layout].1,
                entries: &entries,
            })
        });
        let ready = match &pipeline.made {
            Made::Ready(raw) => Some(raw),
            Made::Coming(_) => None,
        };
        (key, ready, group)
    }

    /// Has a pipeline made, beside whatever else happens.
    fn make(
        &mut self,
        kernel: &'static Kernel,
        constants: Constants,
        layout: usize,
    ) -> mpsc::Receiver<wgpu::ComputePipeline> {
        let (done, coming) = mpsc::channel();
        let (device, target, layout) =
            (self.device.clone(), self.target, self.layouts[layout].2.clone());
        self.compilers.run(Box::new(move || {
            let text = target.text(kernel, &constants);
            let module = super::native::shader_module(&device, kernel.name, text);
            let raw = device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
                label: Some(kernel.name),
                layout: Some(&layout),
                module: &module,
                entry_point: Some("main"),
                compilation_options: wgpu::PipelineCompilationOptions {
                    constants: &[],
                    zero_initialize_workgroup_memory: false,
                },
                cache: None,
            });
            // Nobody waits for it where the device is gone.
            let _ = done.send(raw);
        }));
        coming
    }

    /// A pipeline that has been asked for, once it is ready; `None` if it came to nothing.
    pub(super) fn finished(&mut self, key: Key) -> Option<&wgpu::ComputePipeline> {
        let Pipeline { made, .. } = self.pipelines.get_mut(&key)?;
        if let Made::Coming(coming) = made {
            *made = Made::Ready(coming.recv().ok()?);
        }
        match made {
            Made::Ready(raw) => Some(raw),
            Made::Coming(_) => None,
        }
    }

    /// Forgets the bind groups that a buffer is part of.
    pub(super) fn forget(&mut self, id: u32) {
        self.groups.retain(|(_, ids), _| !ids.contains(&id));
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use naga::{
        AddressSpace,
        back::spv,
        proc::Layouter,
        valid::{Capabilities, ShaderStages, SubgroupOperationSet, ValidationFlags, Validator},
    };

    #[test]
    fn a_job_that_panics_comes_to_nothing_and_the_others_are_done() {
        let mut compilers = Compilers::new();
        let coming: Vec<_> = (0..40)
            .map(|i| {
                let (done, coming) = mpsc::channel();
                compilers.run(Box::new(move || {
                    assert_ne!(i, 3, "one that is meant to");
                    done.send(i).unwrap();
                }));
                coming
            })
            .collect();
        assert!((1..=MAX_COMPILERS).contains(&compilers.threads.len()));
        for (i, coming) in coming.iter().enumerate() {
            assert_eq!(coming.recv().ok(), (i != 3).then_some(i));
        }
    }

    /// What no software adapter runs is at least translated for Vulkan, and fits into `shared` bytes of workgroup memory.
    pub(in crate::gpu) fn valid(text: &str, shared: u32) {
        let module = naga::front::wgsl::parse_str(text)
            .unwrap_or_else(|e| panic!("{}", e.emit_to_string(text)));
        let info = Validator::new(ValidationFlags::all(), Capabilities::all())
            .subgroup_stages(ShaderStages::COMPUTE)
            .subgroup_operations(SubgroupOperationSet::all())
            .validate(&module)
            .unwrap_or_else(|e| panic!("{}", e.emit_to_string(text)));
        let mut layouts = Layouter::default();
        layouts.update(module.to_ctx()).unwrap();
        let of_group =
            module.global_variables.iter().filter(|(_, v)| v.space == AddressSpace::WorkGroup);
        let bytes: u32 = of_group.map(|(_, v)| layouts[v.ty].size).sum();
        assert!(bytes <= shared, "{bytes} bytes of workgroup memory");
        let options = spv::Options { lang_version: (1, 3), ..Default::default() };
        spv::write_vec(&module, &info, &options, None).unwrap();
    }
}

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

/// A compute kernel: a WGSL file with the entry point `main`, and the files that it needs.
///
/// Composition: every file of `kernels/` names in its leading comment
/// - `needs:` the files that it needs, and interfaces (`@codec`), which are files to be chosen;
/// - `implements:` the interface that it is a choice for;
/// - `constants:` the constants that it uses and that neither it nor the files that it needs
///   define: [`Constants`] or another file of the kernel does;
/// - `enables:` language extensions.
///
/// The kernel binds its interfaces to files; those that it leaves open are bound by the [`Target`].
/// [`Target::text`] resolves all of it: each file once, after the files that it needs.
#[derive(Debug)]
pub(super) struct Kernel {
    pub(super) name: &'static str,
    /// The file with the entry point.
    pub(super) root: &'static str,
    /// Interfaces and the files that implement them.
    pub(super) binds: &'static [(&'static str, &'static str)],
    /// Buffers of group 0, in the order of their bindings.
    pub(super) bindings: &'static [Access],
}

/// Declares a kernel: name, root file, `{ interface: file }`, buffers.
macro_rules! kernel {
    ($name:expr, $root:literal, [$($access:ident),*]) => {
        $crate::gpu::kernel::kernel!($name, $root, {}, [$($access),*])
    };
    (
        $name:expr, $root:literal,
        { $($interface:ident: $file:expr),* $(,)? },
        [$($access:ident),*]
    ) => {
        $crate::gpu::kernel::Kernel {
            name: $name,
            root: $root,
            binds: &[$((concat!("@", stringify!($interface)), $file)),*],
            bindings: &[$($crate::gpu::kernel::Access::$access),*],
        }
    };
}
pub(super) use kernel;

macro_rules! files {
    ($($name:literal),* $(,)?) => {
        &[$(($name, include_str!(concat!("kernels/", $name, ".wgsl")))),*]
    };
}

/// All WGSL files: names and texts.
const FILES: &[(&str, &str)] = files![
    "attention/append_kv",
    "attention/attention_cooperative",
    "attention/attention_decode",
    "attention/attention_split",
    "attention/attention_tiled",
    "attention/block_scores",
    "attention/indexer_scores",
    "attention/indexer_top_positions",
    "attention/kv_cache",
    "attention/merge_splits",
    "attention/qk_norm_rope",
    "attention/rope",
    "attention/softmax",
    "attention/sum8_memory",
    "attention/sum8_subgroup",
    "attention/visible_splits",
    "codec/any_format",
    "codec/block_scales",
    "codec/e2m1",
    "codec/e4m3",
    "codec/load_blocks",
    "codec/plain",
    "codec/q4",
    "codec/q8",
    "codec/quants",
    "common/common",
    "common/exp_log",
    "common/gated_activation",
    "common/sort_key",
    "common/team_memory",
    "common/team_subgroup",
    "elementwise/embed",
    "elementwise/glu",
    "elementwise/map",
    "elementwise/norm",
    "experts/assignments",
    "experts/assignments_given",
    "experts/assignments_routed",
    "experts/combine",
    "experts/experts_down_sum",
    "experts/experts_gemv",
    "experts/experts_gemv_any",
    "experts/slot_matrix",
    "gemm/activations_f16",
    "gemm/dequantize_f16",
    "gemm/dequantize_minifloat",
    "gemm/dequantize_plain",
    "gemm/dequantize_q4",
    "gemm/dequantize_q8",
    "gemm/dequantize_quants",
    "gemm/gemm_cooperative",
    "gemm/gemm_registers",
    "gemm/gemm_tile",
    "gemm/sort_assignments",
    "gemm/weights_any",
    "gemm/weights_blocks",
    "gemv/activations_f32",
    "gemv/activations_int",
    "gemv/gemv",
    "gemv/gemv_any",
    "gemv/head_gemv",
    "gemv/head_gemv_transposed",
    "gemv/head_gemv_transposed_any",
    "gemv/row_products",
    "gemv/row_sums_memory",
    "gemv/row_sums_subgroup",
    "gemv/stage_x",
    "probe/read_bandwidth",
    "probe/subgroup_probe",
    "recurrent/conv1d",
    "recurrent/delta_conv",
    "recurrent/delta_net",
    "recurrent/delta_no_conv",
    "recurrent/pair_sum_memory",
    "recurrent/pair_sum_subgroup",
    "router/rank_experts",
    "router/router_topk",
    "router/scratch_storage",
    "router/scratch_workgroup",
    "sampling/top_logit",
    "sampling/top_logits",
];

/// The text of a file of `kernels/`.
fn file(name: &str) -> Option<&'static str> {
    FILES.iter().find(|(file, _)| *file == name).map(|(_, text)| *text)
}

/// Entries of the lines `// key: a, b` of a file's leading comment.
fn header<'a>(text: &'a str, key: &'a str) -> impl Iterator<Item = &'a str> {
    let comment = text.lines().map_while(|line| line.strip_prefix("//"));
    let lines =
        comment.filter_map(move |line| line.trim_start().strip_prefix(key)?.strip_prefix(':'));
    lines.flat_map(|line| line.split(',')).map(str::trim)
}

/// Names of the constants that a file defines itself.
fn defined(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter_map(|line| line.strip_prefix("const ")?.split([':', ' ']).next())
}

/// The most constants of a kernel.
const CONSTANTS: usize = 23;

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

impl Target {
    /// Interfaces that depend on whether a team is a subgroup: their files for subgroups and for
    /// workgroup memory.
    const INTERFACES: &'static [(&'static str, [&'static str; 2])] = &[
        ("@team", ["common/team_subgroup", "common/team_memory"]),
        ("@row_sums", ["gemv/row_sums_subgroup", "gemv/row_sums_memory"]),
        ("@pair_sum", ["recurrent/pair_sum_subgroup", "recurrent/pair_sum_memory"]),
    ];

    /// The file that an interface of a kernel stands for; other names are those of files.
    fn bound(&self, kernel: &Kernel, name: &'static str) -> &'static str {
        let by_kernel = kernel.binds.iter().find(|(interface, _)| *interface == name);
        let by_target = || Self::INTERFACES.iter().find(|(interface, _)| *interface == name);
        match by_kernel {
            Some((_, file)) => file,
            None => by_target().map_or(name, |(_, files)| files[usize::from(!self.subgroups)]),
        }
    }

    /// The texts of a file and of all files that it needs, each once and after those it needs.
    fn resolve(
        &self,
        kernel: &Kernel,
        name: &'static str,
        texts: &mut Vec<(&'static str, &'static str)>,
        seen: &mut Vec<&'static str>,
    ) {
        let name = self.bound(kernel, name);
        if seen.contains(&name) {
            return;
        }
        seen.push(name);
        let text = file(name);
        debug_assert!(text.is_some(), "{}: no file or implementation of {name}", kernel.name);
        let text = text.unwrap_or_default();
        header(text, "needs").for_each(|needed| self.resolve(kernel, needed, texts, seen));
        texts.push((name, text));
    }

    /// The whole text of a kernel. Of the constants, those that a file declares are defined; `WG`
    /// is the size of its workgroups.
    pub(super) fn text(&self, kernel: &Kernel, constants: &Constants) -> String {
        let mut texts = Vec::new();
        self.resolve(kernel, kernel.root, &mut texts, &mut Vec::new());
        let all = |key| {
            let mut names: Vec<_> = texts.iter().flat_map(|(_, text)| header(text, key)).collect();
            names.sort_unstable();
            names.dedup();
            names
        };
        let mut text: String =
            all("enables").iter().map(|name| format!("enable {name};\n")).collect();
        let defined: Vec<_> = texts.iter().flat_map(|(_, text)| defined(text)).collect();
        let passed = constants.with("TEAM", self.team);
        for name in all("constants").iter().filter(|name| !defined.contains(name)) {
            let value = passed.all().find(|(passed, _)| passed == name);
            debug_assert!(value.is_some(), "{}: no constant {name}", kernel.name);
            text.extend(value.map(|(name, value)| format!("const {name} = {value}u;\n")));
        }
        texts.iter().for_each(|(_, file)| text.push_str(file));
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

    /// All kernels.
    fn kernels() -> Vec<&'static Kernel> {
        use crate::gpu::*;
        let families: [&[Kernel]; 6] = [
            &ops::gemv::MATVEC,
            &ops::gemv::EXPERTS,
            &ops::gemv::EXPERTS_RANKED,
            &ops::gemv::EXPERTS_SUM,
            &ops::gemm::COOPERATIVE,
            &ops::gemm::REGISTERS,
        ];
        let others = [
            &PROBE,
            &ops::attention::APPEND,
            &ops::attention::ATTENTION,
            &ops::attention::TILES,
            &ops::attention::COOPERATIVE,
            &ops::attention::MERGE,
            &ops::attention::attention_decode::DECODE,
            &ops::attention::attention_decode::DECODE_PLAIN,
            &ops::elementwise::GLU,
            &ops::elementwise::MAP,
            &ops::elementwise::COMBINE,
            &ops::elementwise::ROPE,
            &ops::moe::EXPERTS_ANY,
            &ops::head_matmul::HEAD_TRANSPOSED,
            &ops::qk_norm_rope::HEADS,
            &ops::matmul::EMBED,
            &ops::matmul::MATVEC_ANY,
            &ops::norm::NORM,
            &ops::recurrent::CONV1D,
            &ops::recurrent::DELTA_NET,
            &ops::recurrent::CONVOLVED,
            &bandwidth::READ,
            &ops::gemm::HALVES,
            &ops::gemm::BUCKET,
            &ops::top_logits::TOP_LOGITS,
            &ops::top_logits::TOP_LOGIT,
            &ops::top_positions::SCORES,
            &ops::top_positions::CHOOSE,
            &ops::topk::TOP_K,
            &ops::topk::TOP_K_OF_MANY,
        ];
        let families = families.into_iter().chain(ops::head_matmul::KERNELS.iter().map(|k| &k[..]));
        families.flatten().chain(others).collect()
    }

    /// Values of constants with which every kernel can be composed.
    fn sample_constants(kernel: &Kernel) -> Constants {
        let codec = kernel.binds.iter().find(|(interface, _)| *interface == "@codec");
        let [element, bits, block_cols, scale] = match codec.map(|(_, file)| *file) {
            Some("codec/q8") => [3, 8, 64, 2],
            Some("codec/quants") => [3, 5, 64, 2],
            Some("codec/plain") => [2, 16, 32, 0],
            Some("codec/e2m1") => [4, 4, 16, 4],
            Some("codec/e4m3") => [5, 8, 32, 3],
            _ => [3, 4, 64, 2],
        };
        let folder = kernel.root.split('/').next().unwrap_or("");
        let mut texts = Vec::new();
        target(true).resolve(kernel, kernel.root, &mut texts, &mut Vec::new());
        let mut names: Vec<_> =
            texts.iter().flat_map(|(_, text)| header(text, "constants")).collect();
        names.sort_unstable();
        names.dedup();
        names.retain(|name| {
            *name != "TEAM" && !texts.iter().any(|(_, text)| defined(text).any(|n| n == *name))
        });
        names.iter().fold(Constants::default(), |constants, name| {
            let value = match (*name, folder) {
                ("ELEMENT", _) => element,
                ("BITS", _) => bits,
                ("BLOCK_COLS", _) => block_cols,
                ("SCALE", _) => scale,
                ("WG", "recurrent") => 128,
                ("WG", "gemm") if kernel.root.ends_with("cooperative") => 128,
                ("WG" | "COLS" | "ROW_COLS", _) => 256,
                ("QUERIES", _) if kernel.root.ends_with("cooperative") => 128,
                ("QUERIES", _) => 16,
                ("TILE_N", _) => 128,
                ("TILE_M" | "TILE_K" | "SORT_BLOCK" | "EXPERTS", _) => 64,
                ("K_WIDTH" | "V_WIDTH" | "MAX_WIDTH" | "MAX_SPLITS", _) => 64,
                ("V_COLUMNS", _) => 32,
                ("THREAD_VALUES", "sampling") => 8,
                ("ROW_THREADS" | "KEY_THREADS" | "TOP_K" | "WORKGROUPS" | "TILE_HEADS", _) => 8,
                ("KEEP" | "EXPERT_GROUPS" | "TAPS", _) => 4,
                ("ROWS" | "THREAD_ROWS" | "STAGED_ROWS" | "TOP_GROUPS" | "KV_HEADS", _) => 2,
                ("GROUP_HEADS" | "EACH" | "THREAD_VALUES" | "ASSIGNMENTS" | "ROW_GROUPS", _) => 2,
                ("BIAS" | "BIAS_SCALAR", _) => 9,
                ("ACTIVATION" | "KIND" | "STAGE" | "HEAD_WIDTH" | "HEAD_SQUARES", _) => 0,
                ("LATENT", _) => 0,
                _ => 1,
            };
            constants.with(name, value)
        })
    }

    fn target(subgroups: bool) -> Target {
        let team = if subgroups { 32 } else { 16 };
        Target { team, subgroups, dot8: subgroups, f16: true, cooperative: subgroups }
    }

    #[test]
    fn all_kernels_are_valid() {
        for kernel in kernels() {
            for subgroups in [false, true] {
                let text = target(subgroups).text(kernel, &sample_constants(kernel));
                let needs_subgroups = text.contains("subgroupShuffle") || text.contains("coop_");
                if subgroups || !needs_subgroups {
                    valid(&text, 64 << 10);
                }
            }
        }
    }

    /// Words of capitals in a file's code: constants.
    fn constants_of(text: &'static str) -> Vec<&'static str> {
        let code = text.lines().map(|line| line.split("//").next().unwrap_or(""));
        let words = code.flat_map(|line| line.split(|c: char| !c.is_alphanumeric() && c != '_'));
        let is_constant = |word: &&str| {
            word.starts_with(|c: char| c.is_ascii_uppercase())
                && !word.contains(|c: char| c.is_ascii_lowercase())
        };
        // Roles of cooperative matrices.
        let role = |word: &str| text.contains("coop_mat") && ["A", "B", "C"].contains(&word);
        words.filter(is_constant).filter(|word| !role(word)).collect()
    }

    /// Constants that a file and those that it needs define, whatever implements an interface.
    fn provided(name: &'static str, above: &[&str]) -> Vec<&'static str> {
        let text = file(name).unwrap_or_else(|| panic!("no file {name}"));
        let above = [above, &[name]].concat();
        let mut all: Vec<_> = defined(text).collect();
        for needed in header(text, "needs") {
            if !needed.starts_with('@') {
                if !above.contains(&needed) {
                    all.extend(provided(needed, &above));
                }
                continue;
            }
            let choices: Vec<_> = FILES
                .iter()
                .filter(|(_, text)| header(text, "implements").any(|name| name == needed))
                .collect();
            assert!(!choices.is_empty(), "{name}: nothing implements {needed}");
            if choices.iter().all(|(choice, _)| !above.contains(choice)) {
                let mut sets = choices.iter().map(|(choice, _)| provided(choice, &above));
                let first = sets.next().unwrap();
                let common = sets.fold(first, |mut common, set| {
                    common.retain(|name| set.contains(name));
                    common
                });
                all.extend(common);
            }
        }
        all
    }

    #[test]
    fn files_declare_the_constants_that_they_use() {
        for (name, text) in FILES {
            let provided = provided(name, &[]);
            let mut expected = constants_of(text);
            expected.retain(|constant| !provided.contains(constant));
            expected.sort_unstable();
            expected.dedup();
            let declared: Vec<_> = header(text, "constants").collect();
            assert_eq!(declared, expected, "{name}");
        }
    }

    #[test]
    fn interfaces_are_bound_to_files_that_implement_them() {
        let by_target =
            Target::INTERFACES.iter().flat_map(|(name, files)| files.map(|file| (*name, file)));
        let by_kernels = kernels().into_iter().flat_map(|kernel| kernel.binds.iter().copied());
        for (interface, name) in by_target.chain(by_kernels) {
            let text = file(name).unwrap_or_else(|| panic!("no file {name}"));
            assert!(header(text, "implements").any(|i| i == interface), "{name}: {interface}");
        }
    }

    #[test]
    fn every_file_with_an_entry_point_is_a_kernel() {
        let kernels = kernels();
        for (name, text) in FILES {
            let is_root = kernels.iter().any(|kernel| kernel.root == *name);
            assert_eq!(text.contains("@compute"), is_root, "{name}");
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

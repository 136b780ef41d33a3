//! Kernels: composition of their WGSL from files, specialization constants, pipelines.

use std::{
    collections::HashMap,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex, PoisonError, mpsc},
    thread,
};

use super::{
    params::ParamsLayout,
    pipeline_cache::{COMPILER_STACK, CompilerCache, FastHasher, PipelineCache, extend_hash},
    store::DeviceBuffer,
    wgsl_files::{defined, file, header},
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
/// The kernel binds its interfaces to files; the [`Target`] binds the remaining ones.
/// [`Target::text`] resolves all of it: each file once, after the files that it needs.
#[derive(Debug)]
pub(super) struct Kernel {
    pub(super) name: &'static str,
    /// The file with the entry point.
    pub(super) root: &'static str,
    /// `struct Params` of the WGSL.
    pub(super) params: &'static ParamsLayout,
    /// Interfaces and the files that implement them.
    pub(super) binds: &'static [(&'static str, &'static str)],
    /// Buffers of group 0, in the order of their bindings.
    pub(super) bindings: &'static [Access],
}

/// Declares a kernel: name, root file, type of the parameters, `{ interface: file }`, buffers.
macro_rules! kernel {
    ($name:expr, $root:literal, $params:ident, [$($access:ident),*]) => {
        $crate::kernel::kernel!($name, $root, $params, {}, [$($access),*])
    };
    (
        $name:expr, $root:literal, $params:ident,
        { $($interface:ident: $file:expr),* $(,)? },
        [$($access:ident),*]
    ) => {
        $crate::kernel::Kernel {
            name: $name,
            root: $root,
            params: <$params as $crate::params::KernelParams>::LAYOUT,
            binds: &[$((concat!("@", stringify!($interface)), $file)),*],
            bindings: &[$($crate::kernel::Access::$access),*],
        }
    };
}
pub(super) use kernel;

/// Number of constants that few kernels exceed.
const USUAL_CONSTANTS: usize = 32;

/// Specialization constants of a kernel: `const NAME = value;` before its text. They are u32; f32
/// values are parameters.
#[derive(Debug)]
pub(super) struct Constants {
    all: Vec<(&'static str, u32)>,
    /// Hash of the values.
    hash: u64,
}

/// The clone has room for more constants.
impl Clone for Constants {
    fn clone(&self) -> Self {
        let mut all = Vec::with_capacity(self.all.len().max(USUAL_CONSTANTS));
        all.extend_from_slice(&self.all);
        Self { all, hash: self.hash }
    }
}

impl Constants {
    pub(super) fn new(constants: &[(&'static str, u32)]) -> Self {
        let new = Self { all: Vec::with_capacity(USUAL_CONSTANTS), hash: 0 };
        constants.iter().fold(new, |new, (name, value)| new.with(name, *value))
    }

    #[must_use]
    pub(super) fn with(mut self, name: &'static str, value: u32) -> Self {
        self.all.push((name, value));
        self.hash = extend_hash(self.hash, value.into());
        self
    }

    fn values(&self) -> impl Iterator<Item = u32> {
        self.all.iter().map(|(_, value)| *value)
    }
}

/// Compares values alone: a kernel passes its constants in one order.
impl PartialEq for Constants {
    fn eq(&self, other: &Self) -> bool {
        self.hash == other.hash && self.values().eq(other.values())
    }
}

impl Eq for Constants {}

/// Address of a kernel, which is a static, and hash of its constants.
type Key = (usize, u64);

/// Index of a pipeline.
#[derive(Clone, Copy)]
pub(super) struct PipelineIndex(usize);

type FastMap<K, V> = HashMap<K, V, std::hash::BuildHasherDefault<FastHasher>>;

/// Features of the adapter that kernels are written for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Target {
    /// Threads of a team: a subgroup, or neighbouring threads that share workgroup memory.
    pub(super) team: u32,
    /// Whether a team is a subgroup. Without, teams exchange values through workgroup memory.
    pub(super) subgroups: bool,
    /// Whether a dot product of four int8 values is one instruction, and subgroups shuffle words.
    pub(super) dot8: bool,
    /// Whether kernels can compute in f16.
    pub(super) f16: bool,
    /// Whether there are cooperative matrices: 16 x 16 x 16, f16 to f32.
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

    /// The whole text of a kernel. Only constants declared by a file are defined; `WG`
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
        let passed = constants.clone().with("TEAM", self.team).all;
        for name in all("constants").iter().filter(|name| !defined.contains(name)) {
            let value = passed.iter().find(|(passed, _)| passed == name);
            debug_assert!(value.is_some(), "{}: no constant {name}", kernel.name);
            text.extend(value.map(|(name, value)| format!("const {name} = {value}u;\n")));
        }
        texts.iter().for_each(|(_, file)| text.push_str(file));
        super::unroll::unrolled(&text)
    }
}

/// A pipeline, compiled or in flight.
struct Pipeline {
    constants: Constants,
    state: PipelineState,
    /// Index of the layout of its buffers.
    layout: usize,
}

enum PipelineState {
    Ready(wgpu::ComputePipeline),
    Compiling(mpsc::Receiver<wgpu::ComputePipeline>),
}

/// Maximum number of compiler threads: each takes about ten megabytes of driver memory.
const MAX_COMPILERS: usize = 8;

type CompileJob = Box<dyn FnOnce() + Send>;

/// Threads that compile pipelines while dispatches are recorded, one for each CPU core.
struct Compilers {
    jobs: Option<mpsc::Sender<CompileJob>>,
    queue: Arc<Mutex<mpsc::Receiver<CompileJob>>>,
    threads: Vec<thread::JoinHandle<()>>,
    max_threads: usize,
}

impl Compilers {
    fn new() -> Self {
        let (jobs, queue) = mpsc::channel();
        let max_threads = thread::available_parallelism().map_or(1, usize::from).min(MAX_COMPILERS);
        Self {
            jobs: Some(jobs),
            queue: Arc::new(Mutex::new(queue)),
            threads: Vec::new(),
            max_threads,
        }
    }

    /// Runs a job on a compiler thread, or on this thread if none can be spawned.
    fn run(&mut self, job: CompileJob) {
        if self.threads.len() < self.max_threads {
            let queue = Arc::clone(&self.queue);
            let next = move || queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
            let work = move || {
                while let Ok(job) = next() {
                    // The receiver of the result notices the panic.
                    let _ = catch_unwind(AssertUnwindSafe(job));
                }
            };
            let spawned = thread::Builder::new()
                .name("kernels".into())
                .stack_size(COMPILER_STACK)
                .spawn(work);
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
        // A program must not exit while a driver compiles: that uses its globals.
        self.jobs = None;
        self.threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}

/// Cache of pipelines and bind groups.
pub(super) struct Pipelines {
    device: wgpu::Device,
    target: Target,
    layouts: Vec<(&'static [Access], wgpu::BindGroupLayout, wgpu::PipelineLayout)>,
    pipelines: Vec<Pipeline>,
    /// Pipelines of each key, of which more than one is unlikely.
    indices: FastMap<Key, Vec<PipelineIndex>>,
    /// Dropped before the cache, which is then saved with what they compiled.
    compilers: Compilers,
    cache: Option<PipelineCache>,
    /// By layout and ids of the buffers.
    groups: FastMap<(usize, [u32; MAX_BINDINGS]), wgpu::BindGroup>,
}

/// Maximum number of buffers of a kernel.
pub(super) const MAX_BINDINGS: usize = 8;

impl Pipelines {
    pub(super) fn new(device: wgpu::Device, target: Target, cache: Option<PipelineCache>) -> Self {
        Self {
            device,
            target,
            layouts: Vec::new(),
            pipelines: Vec::new(),
            indices: FastMap::default(),
            compilers: Compilers::new(),
            cache,
            groups: FastMap::default(),
        }
    }

    pub(super) const fn target(&self) -> Target {
        self.target
    }

    pub(super) fn set_target(&mut self, target: Target) {
        self.target = target;
        self.pipelines.clear();
        self.indices.clear();
    }

    /// Number of pipelines, compiled or in flight.
    pub(super) fn len(&self) -> usize {
        self.pipelines.len()
    }

    fn layout(&mut self, bindings: &'static [Access]) -> usize {
        if let Some(i) = self.layouts.iter().position(|(access, ..)| *access == bindings) {
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
            immediate_size: super::card::adapter::IMMEDIATES,
        });
        self.layouts.push((bindings, group, layout));
        self.layouts.len() - 1
    }

    /// Starts to compile the pipeline of a kernel and its constants, unless there is one.
    pub(super) fn start(
        &mut self,
        kernel: &'static Kernel,
        constants: &Constants,
    ) -> PipelineIndex {
        let key = (std::ptr::from_ref(kernel) as usize, constants.hash);
        let with_key = self.indices.get(&key).into_iter().flatten();
        let mut same = with_key.filter(|index| self.pipelines[index.0].constants == *constants);
        if let Some(index) = same.next() {
            return *index;
        }
        let (layout, constants) = (self.layout(kernel.bindings), constants.clone());
        let state = PipelineState::Compiling(self.compile(kernel, constants.clone(), layout));
        let index = PipelineIndex(self.pipelines.len());
        self.pipelines.push(Pipeline { constants, state, layout });
        self.indices.entry(key).or_default().push(index);
        index
    }

    /// The pipeline of a kernel and its constants, if it is compiled, and the bind group of its
    /// buffers. A new pipeline starts to compile: see
    /// [`Pipelines::finished`].
    pub(super) fn get(
        &mut self,
        kernel: &'static Kernel,
        constants: &Constants,
        buffers: &[&DeviceBuffer],
    ) -> (PipelineIndex, Option<&wgpu::ComputePipeline>, &wgpu::BindGroup) {
        let index = self.start(kernel, constants);
        let pipeline = &self.pipelines[index.0];
        let mut ids = [u32::MAX; MAX_BINDINGS];
        ids.iter_mut().zip(buffers).for_each(|(dst, buffer)| *dst = buffer.id);
        let group = self.groups.entry((pipeline.layout, ids)).or_insert_with(|| {
            let entries: Vec<_> = buffers
                .iter()
                .enumerate()
                .map(|(i, buffer)| wgpu::BindGroupEntry {
                    binding: i as u32,
                    resource: buffer.binding(),
                })
                .collect();
            self.device.create_bind_group(&wgpu::BindGroupDescriptor {
                label: None,
                layout: &self.layouts[pipeline.layout].1,
                entries: &entries,
            })
        });
        let ready = match &pipeline.state {
            PipelineState::Ready(raw) => Some(raw),
            PipelineState::Compiling(_) => None,
        };
        (index, ready, group)
    }

    /// Compiles a pipeline on a compiler thread.
    fn compile(
        &mut self,
        kernel: &'static Kernel,
        constants: Constants,
        layout: usize,
    ) -> mpsc::Receiver<wgpu::ComputePipeline> {
        let (done, compiled) = mpsc::channel();
        let (device, target, layout) =
            (self.device.clone(), self.target, self.layouts[layout].2.clone());
        let cache = self.cache.as_ref().and_then(PipelineCache::for_compiler);
        self.compilers.run(Box::new(move || {
            let text = target.text(kernel, &constants);
            let module = super::card::native::shader_module(&device, kernel.name, text);
            let raw = device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
                label: Some(kernel.name),
                layout: Some(&layout),
                module: &module,
                entry_point: Some("main"),
                compilation_options: wgpu::PipelineCompilationOptions {
                    constants: &[],
                    zero_initialize_workgroup_memory: false,
                },
                cache: cache.as_ref().map(|cache| &cache.raw),
            });
            // There is no receiver if the device was dropped.
            let _ = done.send(raw);
            cache.iter().for_each(CompilerCache::report);
        }));
        compiled
    }

    /// Waits for a pipeline to compile; `None` if that failed.
    pub(super) fn finished(&mut self, index: PipelineIndex) -> Option<&wgpu::ComputePipeline> {
        let Pipeline { state, .. } = self.pipelines.get_mut(index.0)?;
        if let PipelineState::Compiling(compiled) = state {
            *state = PipelineState::Ready(compiled.recv().ok()?);
        }
        match state {
            PipelineState::Ready(raw) => Some(raw),
            PipelineState::Compiling(_) => None,
        }
    }

    /// Drops the bind groups of a buffer.
    pub(super) fn forget(&mut self, id: u32) {
        self.groups.retain(|(_, ids), _| !ids.contains(&id));
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::wgsl_files::FILES;
    use naga::{
        AddressSpace,
        back::spv,
        proc::Layouter,
        valid::{Capabilities, ShaderStages, SubgroupOperationSet, ValidationFlags, Validator},
    };

    #[test]
    fn other_compile_jobs_run_after_a_panic() {
        let mut compilers = Compilers::new();
        let coming: Vec<_> = (0..40)
            .map(|i| {
                let (done, coming) = mpsc::channel();
                compilers.run(Box::new(move || {
                    assert_ne!(i, 3, "a panic on purpose");
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
        use crate::*;
        let families: [&[Kernel]; 8] = [
            &ops::gemv::gemv::GEMV,
            &ops::gemv::gemv::GEMV_FUSED,
            &ops::gemv::gemv::EXPERTS_GEMV,
            &ops::gemv::gemv::EXPERTS_GEMV_ROUTED,
            &ops::gemv::gemv::EXPERTS_DOWN_SUM,
            &ops::gemm::gemm::COOPERATIVE,
            &ops::gemm::gemm::FEW_ROWS,
            &ops::gemm::gemm::REGISTERS,
        ];
        let others = [
            &device::SUBGROUP_PROBE,
            &ops::attention::attention::APPEND_KV,
            &ops::attention::attention::ATTENTION_SPLIT,
            &ops::attention::attention::ATTENTION_TILED,
            &ops::attention::attention::ATTENTION_COOPERATIVE,
            &ops::attention::attention::MERGE_SPLITS,
            &ops::attention::attention::MERGE_SPLITS_OF_ROWS,
            &ops::attention::attention_decode::DECODE,
            &ops::attention::attention_decode::DECODE_MEMORY,
            &ops::attention::attention_decode::DECODE_ROWS,
            &ops::attention::attention_decode::DECODE_ROWS_MEMORY,
            &ops::elementwise::GLU,
            &ops::elementwise::HEAD_GATE,
            &ops::elementwise::GATHER_COLUMNS,
            &ops::elementwise::KEYED_GATE,
            &ops::elementwise::MAP,
            &ops::elementwise::COMBINE,
            &ops::elementwise::ROPE,
            &ops::elementwise::SCATTER_ROWS,
            &ops::hand_over::HAND_OVER,
            &ops::hand_over::TAKE_RESULTS,
            &ops::moe::EXPERTS_GEMV_ANY,
            &ops::head_matmul::HEAD_GEMV_TRANSPOSED_ANY,
            &ops::qk_norm_rope::QK_NORM_ROPE,
            &ops::segment_attention::SEGMENT_ATTENTION,
            &ops::segment_attention::SEGMENT_COOPERATIVE,
            &ops::segment_attention::SEGMENT_F16,
            &ops::matmul::EMBED,
            &ops::matmul::GEMV_ANY,
            &ops::norm::NORM,
            &ops::recurrent::CONV1D,
            &ops::recurrent::COMPRESS,
            &ops::recurrent::DELTA_NET,
            &ops::recurrent::DELTA_NET_SPANS,
            &ops::recurrent::DELTA_NET_CONV,
            &ops::recurrent::DELTA_NET_CONV_ROWS,
            &ops::recurrent::MAMBA2,
            &ops::recurrent::MAMBA2_SPANS,
            &bandwidth::READ_BANDWIDTH,
            &ops::gemm::gemm::ACTIVATIONS_F16,
            &ops::gemm::gemm::SORT_ASSIGNMENTS,
            &ops::streams::STREAM_WEIGHTS,
            &ops::streams::COLLAPSE,
            &ops::streams::EXPAND,
            &ops::top_logits::TOP_LOGITS,
            &ops::top_logits::TOP_LOGIT,
            &ops::top_blocks::BLOCK_INDEXER_SCORES,
            &ops::top_blocks::BLOCK_INDEXER_TOP,
            &ops::top_positions::INDEXER_SCORES,
            &ops::top_positions::INDEXER_TOP_POSITIONS,
            &ops::topk::ROUTER_TOP_K,
            &ops::topk::ROUTER_TOP_K_STORAGE,
        ];
        let families =
            families.into_iter().chain(ops::head_matmul::HEAD_GEMV.iter().map(|k| &k[..]));
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
            Some("codec/simple_blocks") => [19, 0, 32, 0],
            Some("codec/k_quants") => [22, 0, 256, 0],
            Some("codec/codebooks") => [27, 0, 256, 0],
            Some("codec/few_bits") => [35, 0, 256, 0],
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
        names.iter().fold(Constants::new(&[]), |constants, name| {
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
                (
                    "KEEP" | "EXPERT_GROUPS" | "TAPS" | "MATRICES" | "KEY_BLOCK" | "TOP_BLOCKS",
                    _,
                ) => 4,
                ("ROWS" | "THREAD_ROWS" | "STAGED_ROWS" | "TOP_GROUPS" | "KV_HEADS", _) => 2,
                (
                    "GROUP_HEADS" | "EACH" | "THREAD_VALUES" | "ASSIGNMENTS" | "ROW_GROUPS"
                    | "X_ROWS",
                    _,
                ) => 2,
                ("BIAS" | "BIAS_SCALAR", _) => 9,
                (
                    "ACTIVATION" | "ELEMENT_GATES" | "FUNCTION" | "KIND" | "STAGE" | "HEAD_WIDTH"
                    | "HEAD_SQUARES",
                    _,
                ) => 0,
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

    /// Constants that a file and its needs define, whatever implements an interface.
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

    /// Compares a struct of a module with the Rust type: names, order, types, offsets and size.
    fn assert_same_layout(
        module: &naga::Module,
        ty: naga::Handle<naga::Type>,
        layout: &ParamsLayout,
        path: &str,
    ) {
        match &module.types[ty].inner {
            naga::TypeInner::Struct { members, span } => {
                let names: Vec<_> = members.iter().map(|m| m.name.as_deref()).collect();
                let fields: Vec<_> = layout.fields.iter().map(|f| Some(f.name)).collect();
                assert_eq!(names, fields, "{path}: {}", layout.name);
                assert_eq!(*span as usize, layout.bytes, "{path}: {}", layout.name);
                for (member, field) in members.iter().zip(layout.fields) {
                    let path = format!("{path}.{}", field.name);
                    assert_eq!(member.offset as usize, field.offset, "{path}");
                    assert_same_layout(module, member.ty, field.layout, &path);
                }
            }
            naga::TypeInner::Scalar(scalar) => {
                let name = match *scalar {
                    naga::Scalar::U32 => "u32",
                    naga::Scalar::F32 => "f32",
                    other => panic!("{path}: {other:?}"),
                };
                assert_eq!(name, layout.name, "{path}");
            }
            other => panic!("{path}: {other:?}"),
        }
    }

    #[test]
    fn parameters_have_the_same_layout_in_wgsl_and_rust() {
        for kernel in kernels() {
            let text = target(true).text(kernel, &sample_constants(kernel));
            let module = naga::front::wgsl::parse_str(&text).unwrap();
            let params = module
                .global_variables
                .iter()
                .find(|(_, variable)| variable.space == AddressSpace::Immediate);
            match params {
                Some((_, p)) => assert_same_layout(&module, p.ty, kernel.params, kernel.name),
                None => assert_eq!(kernel.params.name, "NoParams", "{}", kernel.name),
            }
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

    /// Validates a kernel, translates it for Vulkan, and checks that it needs at most `shared`
    /// bytes of workgroup memory. For kernels that no software adapter runs.
    pub(crate) fn valid(text: &str, shared: u32) {
        let module = naga::front::wgsl::parse_str(text)
            .unwrap_or_else(|e| panic!("{}", e.emit_to_string(text)));
        let info = Validator::new(ValidationFlags::all(), Capabilities::all())
            .subgroup_stages(ShaderStages::COMPUTE)
            .subgroup_operations(SubgroupOperationSet::all())
            .validate(&module)
            .unwrap_or_else(|e| panic!("{}", e.emit_to_string(text)));
        let mut layouts = Layouter::default();
        layouts.update(module.to_ctx()).unwrap();
        let shared_variables =
            module.global_variables.iter().filter(|(_, v)| v.space == AddressSpace::WorkGroup);
        let bytes: u32 = shared_variables.map(|(_, v)| layouts[v.ty].size).sum();
        assert!(bytes <= shared, "{bytes} bytes of workgroup memory");
        let options = spv::Options { lang_version: (1, 3), ..Default::default() };
        spv::write_vec(&module, &info, &options, None).unwrap();
    }
}

//! Compilation of MSL as C++ with an emulation of Metal's standard library, to a shared object.

use std::{
    collections::HashMap,
    hash::{DefaultHasher, Hash, Hasher},
    path::{Path, PathBuf},
    process::Command,
    sync::{Arc, Mutex, OnceLock},
};

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW, Symbol};

use super::translate::MslKernel;

/// Metal's default fast math: no NaN, no infinity, reassociation. Not `-ffast-math`: objects linked
/// with it change the treatment of denormals in the whole process.
const FAST_MATH: [&str; 6] = [
    "-fno-math-errno",
    "-ffinite-math-only",
    "-fno-signed-zeros",
    "-fno-trapping-math",
    "-fassociative-math",
    "-freciprocal-math",
];
const COMMON: [&str; 10] = [
    "-std=c++17",
    "-fsingle-precision-constant",
    "-O1",
    "-w",
    "-fPIC",
    "-fwrapv",
    "-fno-strict-aliasing",
    "-fsigned-char",
    "-U_FORTIFY_SOURCE",
    "-I.",
];
const RUNTIME: [(&str, &str); 4] = [
    ("runtime.h", include_str!("runtime.h")),
    ("runtime.cpp", include_str!("runtime.cpp")),
    ("metal_stdlib", include_str!("metal_stdlib.h")),
    ("simd/simd.h", ""),
];

type Launch = unsafe extern "C" fn(*const *mut u8, u32, u32, u32) -> *const std::ffi::c_char;

/// A compiled kernel.
pub(super) struct Compiled {
    launch: Symbol<Launch>,
    _library: Library,
}

impl Compiled {
    /// Runs a grid of threadgroups in simdgroups of `width`. `buffers` are in the order of Metal's
    /// buffer indices.
    ///
    /// # Safety
    /// The buffers contain every byte that the kernel accesses. Nothing else uses them meanwhile.
    pub(super) unsafe fn launch(
        &self,
        buffers: &[*mut u8],
        grid: [u32; 2],
        width: u32,
    ) -> Result<(), String> {
        // SAFETY: the caller's guarantee; the signature is that of `cpp_source`.
        let error = unsafe { (self.launch)(buffers.as_ptr(), grid[0], grid[1], width) };
        if error.is_null() {
            return Ok(());
        }
        // SAFETY: the runtime returns null or a string that is valid until this thread's next
        // launch.
        Err(unsafe { std::ffi::CStr::from_ptr(error) }.to_string_lossy().into_owned())
    }
}

fn hash(value: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

fn run(command: &mut Command) -> Result<(), String> {
    let output = command.output().map_err(|e| format!("{command:?} cannot be run: {e}"))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(format!("{command:?}:\n{}", String::from_utf8_lossy(&output.stderr))),
    }
}

/// Calls `create` with a temporary path and renames the result to `path`, unless `path` exists.
/// Concurrent calls, also of other processes, do not interfere.
fn create_once(
    path: &Path,
    create: impl FnOnce(&Path) -> Result<(), String>,
) -> Result<(), String> {
    if path.exists() {
        return Ok(());
    }
    let unique = format!("{}-{:?}", std::process::id(), std::thread::current().id());
    let temporary = path.with_extension(hash(&unique).to_string());
    create(&temporary)?;
    std::fs::rename(&temporary, path).map_err(|e| e.to_string())
}

fn compiler() -> String {
    std::env::var("CXX").unwrap_or_else(|_| "g++".into())
}

/// Whether there is a C++ compiler.
pub(super) fn has_compiler() -> bool {
    run(Command::new(compiler()).arg("--version")).is_ok()
}

/// Creates the build directory with the headers and the runtime. Its name has a hash of all sources
/// and options, so its contents are never stale.
fn build_dir() -> Result<&'static Path, String> {
    static DIR: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    DIR.get_or_init(|| {
        let version = hash(&(RUNTIME, COMMON, FAST_MATH, compiler()));
        let dir =
            Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("metal-on-cpu-{version:016x}"));
        std::fs::create_dir_all(dir.join("simd")).map_err(|e| format!("{}: {e}", dir.display()))?;
        for (name, text) in RUNTIME {
            create_once(&dir.join(name), |to| std::fs::write(to, text).map_err(|e| e.to_string()))?;
        }
        let compile = |arguments: &[&str], output: &Path| {
            run(Command::new(compiler()).current_dir(&dir).args(COMMON).args(arguments).arg(output))
        };
        // The precompiled header makes compiling a kernel several times faster.
        create_once(&dir.join("metal_stdlib.gch"), |to| {
            let header = ["-x", "c++-header", "metal_stdlib", "-o"];
            compile(&[&FAST_MATH[..], &header[..]].concat(), to)
        })?;
        create_once(&dir.join("runtime.so"), |to| {
            compile(&["-O2", "-shared", "runtime.cpp", "-o"], to)
        })?;
        // SAFETY: the library has no constructors. Kernels loaded later resolve its symbols.
        let runtime =
            unsafe { Library::open(Some(dir.join("runtime.so")), RTLD_NOW | RTLD_GLOBAL) };
        // Kernels need it until the process ends.
        std::mem::forget(runtime.map_err(|e| e.to_string())?);
        Ok(dir)
    })
    .as_deref()
    .map_err(Clone::clone)
}

/// C++ source of a kernel: its MSL, and the function `launch` that runs a grid of it.
fn cpp_source(metal: &MslKernel) -> Result<String, String> {
    let head = metal.text.split(&format!("void {}(", metal.entry)).nth(1);
    let head = head.and_then(|rest| rest.split(") {").next()).ok_or("no entry point in the MSL")?;
    let (mut arguments, mut shared, mut poison) = (Vec::new(), String::new(), String::new());
    for parameter in head.split(['\n', ',']).map(str::trim).filter(|p| !p.is_empty()) {
        let (declared, attribute) = match parameter.split_once("[[") {
            Some((declared, attribute)) => (declared.trim(), attribute.trim_end_matches("]]")),
            None => (parameter, ""),
        };
        let argument = match attribute {
            "" => {
                let declared = declared.strip_prefix("threadgroup ").ok_or(parameter)?;
                let (kind, name) = declared.rsplit_once("& ").ok_or(parameter)?;
                shared += &format!("    static thread_local {kind} shared_{name};\n");
                poison += &format!("memset((void*)&shared_{name}, 0xff, sizeof shared_{name}); ");
                format!("shared_{name}")
            }
            "threadgroup_position_in_grid" => "job.group".into(),
            "threadgroups_per_grid" => "job.grid".into(),
            "thread_position_in_threadgroup" => "metal::uint3(t, 0u, 0u)".into(),
            "thread_position_in_grid" => {
                format!(
                    "metal::uint3(job.group.x * {}u + t, job.group.y, job.group.z)",
                    metal.threads
                )
            }
            "thread_index_in_threadgroup" => "t".into(),
            "simdgroup_index_in_threadgroup" => "t / job.width".into(),
            "simdgroups_per_threadgroup" => format!("{} / job.width", metal.threads),
            "thread_index_in_simdgroup" => "t % job.width".into(),
            "threads_per_simdgroup" => "job.width".into(),
            other => {
                let number = other.strip_prefix("buffer(").and_then(|n| n.strip_suffix(')'));
                let number = number.ok_or_else(|| format!("{parameter} is not supported"))?;
                let (kind, _) = declared.rsplit_once('&').ok_or(parameter)?;
                let kind: Vec<&str> = kind
                    .split(' ')
                    .filter(|w| !["device", "constant", "const", ""].contains(w))
                    .collect();
                if kind == ["_mslBufferSizes"] && metal.text.contains("_buffer_sizes.") {
                    return Err("the emulation does not support arrayLength".into());
                }
                format!("*({}*)job.buffers[{number}]", kind.join(" "))
            }
        };
        arguments.push(argument);
    }
    let synchronizes =
        ["_barrier(", "metal::simd_", "simdgroup_"].iter().any(|word| metal.text.contains(word));
    let run_threads = match synchronizes {
        true => format!(
            "const char* error = fibers::run({}, width, (x + y) % 2, run_thread, &job); if (error) return error;",
            metal.threads
        ),
        false => format!("for (unsigned t = 0; t < {}; t++) run_thread(&job, t);", metal.threads),
    };
    Ok(format!(
        "{}
namespace {{
struct Job {{ void* const* buffers; metal::uint3 group, grid; unsigned width; }};
{shared}void run_thread(void* data, unsigned t) {{
    Job& job = *static_cast<Job*>(data);
    {}({});
}}
}}
extern \"C\" const char* launch(void* const* buffers, unsigned grid_width, unsigned height, unsigned width) {{
    Job job{{buffers, {{}}, metal::uint3(grid_width, height, 1u), width}};
    for (unsigned y = 0; y < height; y++) for (unsigned x = 0; x < grid_width; x++) {{
        job.group = metal::uint3(x, y, 0u);
        {poison}
        {run_threads}
    }}
    return nullptr;
}}
",
        msl_to_cpp(&metal.text),
        metal.entry,
        arguments.join(", "),
    ))
}

/// Rewrites MSL as C++: unsized arrays get a huge size, and swizzles become calls.
fn msl_to_cpp(text: &str) -> String {
    let size_array = |line: &str| match line.starts_with("typedef ") {
        true => line.replace("[1];", "[1ul << 32];"),
        false => line.to_owned(),
    };
    let text = text.lines().map(size_array).collect::<Vec<_>>().join("\n");
    let mut out = String::with_capacity(text.len() + 64);
    let mut rest = text.as_str();
    while let Some(dot) = rest.find('.') {
        let (before, after) = rest.split_at(dot + 1);
        out.push_str(before);
        let word =
            after.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(after.len());
        out.push_str(&after[..word]);
        if (2..=4).contains(&word) && after[..word].chars().all(|c| "xyzw".contains(c)) {
            out.push_str("()");
        }
        rest = &after[word..];
    }
    out + rest
}

/// Compiles a kernel, or loads the object of an earlier run.
pub(super) fn compile(name: &str, metal: &MslKernel) -> Result<Arc<Compiled>, String> {
    static KERNELS: Mutex<Option<HashMap<u64, Arc<Compiled>>>> = Mutex::new(None);
    let source = cpp_source(metal).map_err(|error| format!("{name}: {error}\n{}", metal.text))?;
    let key = hash(&source);
    if let Some(kernel) = KERNELS.lock().unwrap().get_or_insert_default().get(&key) {
        return Ok(kernel.clone());
    }
    let dir = build_dir()?;
    let object = dir.join(format!("{}-{key:016x}.so", name.replace(' ', "-")));
    create_once(&object, |to| {
        let file = PathBuf::from(format!("{}.cpp", to.display()));
        std::fs::write(&file, &source).map_err(|e| e.to_string())?;
        let mut command = Command::new(compiler());
        command
            .current_dir(dir)
            .args(COMMON)
            .args(FAST_MATH)
            .arg("-shared")
            .arg(&file)
            .arg("-o")
            .arg(to);
        run(&mut command)?;
        std::fs::remove_file(&file).map_err(|e| e.to_string())
    })?;
    // SAFETY: the library was compiled from `source`: it has no constructors, and exports `launch`
    // with this signature.
    let compiled = unsafe {
        let library = Library::new(&object).map_err(|e| e.to_string())?;
        let launch = library.get(b"launch").map_err(|e| e.to_string())?;
        Arc::new(Compiled { launch, _library: library })
    };
    KERNELS.lock().unwrap().get_or_insert_default().insert(key, compiled.clone());
    Ok(compiled)
}

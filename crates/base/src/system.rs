//! System information: memory, cgroup limits, physical cores, graphics hardware, free disk space.

/// Names of entries that systems make in folders, among them the root of a disk. A folder with
/// nothing else is empty to its user.
const SYSTEM_ENTRIES: [&str; 14] = [
    "lost+found",
    ".DS_Store",
    ".Spotlight-V100",
    ".Trashes",
    ".fseventsd",
    ".TemporaryItems",
    ".DocumentRevisions-V100",
    ".apdisk",
    ".snapshots",
    "System Volume Information",
    "$RECYCLE.BIN",
    "Thumbs.db",
    "desktop.ini",
    ".directory",
];

/// Rounds up to whole pages, as every buffer is a separate mapping.
pub fn page_align(bytes: u64) -> u64 {
    const PAGE: u64 = if cfg!(target_os = "macos") { 16384 } else { 4096 };
    bytes.checked_next_multiple_of(PAGE).unwrap_or(u64::MAX)
}

/// Whether a folder's entry is the system's: see `SYSTEM_ENTRIES`, the trash of a disk, and
/// AppleDouble files.
pub fn is_system_entry(name: &std::ffi::OsStr) -> bool {
    let prefixes = [".Trash-", "._", ".nfs", ".fuse_hidden"];
    name.to_str().is_some_and(|name| {
        SYSTEM_ENTRIES.iter().any(|known| known.eq_ignore_ascii_case(name))
            || prefixes.iter().any(|prefix| name.starts_with(prefix))
    })
}

/// Stack size of threads that only do file I/O, in bytes.
pub const IO_STACK: usize = 128 << 10;

/// Memory of this process and of the machine, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SystemMemory {
    /// Memory that the process may still allocate: the minimum of the machine's available memory
    /// and the remainder of the process limits (cgroup, rlimit).
    pub available: u64,
    /// Resident set size of the process.
    pub resident: u64,
    /// Peak resident set size, or the current one where the system does not report a peak.
    pub peak: u64,
}

/// Physical cores that the process may use, within its affinity and CPU quota. SMT siblings count
/// once.
pub fn physical_cores() -> usize {
    let allowed = std::thread::available_parallelism().map_or(1, usize::from);
    os::cores().map_or(allowed, |cores| cores.clamp(1, allowed))
}

/// Whether the machine may have graphics hardware. Loads no driver, as a driver keeps its memory
/// for the life of the process.
pub fn has_graphics() -> bool {
    os::has_graphics()
}

/// Free bytes of the file system that holds an existing folder; `None` if unknown.
pub fn free_space(folder: &std::path::Path) -> Option<u64> {
    fs4::available_space(folder).ok()
}

/// Open files of this process, and the limit on them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenFiles {
    pub(crate) open: u64,
    pub(crate) limit: u64,
}

impl OpenFiles {
    /// Reads the current values; `None` where there is no limit.
    #[cfg(unix)]
    pub fn now() -> Option<Self> {
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current?;
        // The listing itself is one of them.
        let listed = std::fs::read_dir("/dev/fd");
        // Without `/proc` they are not listed.
        let open = listed.map_or(limit / 2, |entries| entries.count() as u64);
        Some(Self { open, limit })
    }

    /// Reads the current values: there is no limit.
    #[cfg(not(unix))]
    pub fn now() -> Option<Self> {
        None
    }

    /// Whether `more` files can be opened, and a few others later: sessions, sockets, `/proc`.
    pub fn have_room_for(&self, more: u64) -> bool {
        const SPARE: u64 = 64;
        self.open.saturating_add(more).saturating_add(SPARE) <= self.limit
    }
}

/// Cause and remedy of an error that says that a limit of the process is reached: open files, or
/// the size of a file.
#[cfg(unix)]
pub(crate) fn limit_reached(error: &std::io::Error) -> Option<String> {
    use rustix::{
        io::Errno,
        process::{Resource, getrlimit},
    };

    if error.kind() == std::io::ErrorKind::FileTooLarge {
        let limit = getrlimit(Resource::Fsize).current.map_or_else(
            || "the file system holds no larger file".into(),
            |limit| format!("this process may write files of at most {limit} bytes"),
        );
        return Some(format!(
            "cannot write the file: {limit}; raise the limit with `ulimit -f unlimited` or \
             LimitFSIZE=, or choose another disk"
        ));
    }
    let code = error.raw_os_error();
    if code == Some(Errno::NFILE.raw_os_error()) {
        return Some("cannot open the file: all programs together have too many open".into());
    }
    let limit = OpenFiles::now().filter(|_| code == Some(Errno::MFILE.raw_os_error()))?.limit;
    Some(format!(
        "cannot open the file: this process may have {limit} open, each file of a model and of \
         its mirrors is one; raise the limit: `ulimit -n 4096` in a shell, LimitNOFILE=4096 in a \
         systemd unit, --ulimit nofile=4096 in Docker"
    ))
}

#[cfg(not(unix))]
pub(crate) fn limit_reached(_: &std::io::Error) -> Option<String> {
    None
}

impl SystemMemory {
    /// Reads the current values from the operating system.
    pub fn now() -> Self {
        os::now()
    }
}

#[cfg(target_os = "linux")]
mod os {
    use std::{
        collections::BTreeSet,
        fs,
        path::{Path, PathBuf},
    };

    use rustix::process::{Resource, getrlimit};

    use super::SystemMemory;

    pub(super) fn now() -> SystemMemory {
        read("/proc")
    }

    /// Current values with the kernel's files below `proc`, which a sandbox may lack.
    fn read(proc: &str) -> SystemMemory {
        let text = |name: &str| fs::read_to_string(format!("{proc}/{name}")).unwrap_or_default();
        let status = text("self/status");
        let resident = kib(&status, "VmRSS:").unwrap_or(0);
        let mut available = kib(&text("meminfo"), "MemAvailable:").unwrap_or_else(unused_memory);
        for (resource, used) in [(Resource::As, "VmSize:"), (Resource::Data, "VmData:")] {
            if let Some(limit) = getrlimit(resource).current {
                available = available.min(limit.saturating_sub(kib(&status, used).unwrap_or(0)));
            }
        }
        for Cgroup { limit, used, cache } in cgroups(&text("self/cgroup")) {
            available = available.min(limit.saturating_sub(unreclaimable(used, cache, resident)));
        }
        SystemMemory { available, resident, peak: kib(&status, "VmHWM:").unwrap_or(resident) }
    }

    /// Memory that holds nothing, or buffers. Without `/proc`, the kernel does not say how much of
    /// the page cache can be reclaimed.
    fn unused_memory() -> u64 {
        let info = rustix::system::sysinfo();
        let unit = u64::from(info.mem_unit.max(1));
        (info.freeram as u64).saturating_add(info.bufferram as u64).saturating_mul(unit)
    }

    /// Physical cores among the logical processors in the affinity mask; `None` if unknown.
    pub(super) fn cores() -> Option<usize> {
        let allowed = rustix::thread::sched_getaffinity(None).ok()?;
        let siblings = |cpu: usize| {
            fs::read_to_string(format!(
                "/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
            ))
            .ok()
        };
        distinct((0..rustix::thread::CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu)), siblings)
    }

    /// Number of distinct sibling sets among logical processors.
    fn distinct(
        cpus: impl Iterator<Item = usize>,
        siblings: impl Fn(usize) -> Option<String>,
    ) -> Option<usize> {
        let cores: Option<BTreeSet<String>> = cpus.map(siblings).collect();
        cores.map(|c| c.len()).filter(|n| *n > 0)
    }

    /// Looks for device nodes of GPU drivers: DRM, NVIDIA, WSL, Mali and Adreno.
    pub(super) fn has_graphics() -> bool {
        let names = ["/dev/nvidiactl", "/dev/dxg", "/dev/mali0", "/dev/kgsl-3d0"];
        names.iter().any(|name| Path::new(name).exists())
            || fs::read_dir("/dev/dri").is_ok_and(|mut all| {
                all.any(|e| e.is_ok_and(|e| e.file_name().to_string_lossy().starts_with("renderD")))
            })
    }

    /// Value in bytes of the line `key N kB`.
    fn kib(text: &str, key: &str) -> Option<u64> {
        let rest = text.lines().find_map(|l| l.strip_prefix(key))?;
        Some(rest.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
    }

    fn number(path: &Path) -> Option<u64> {
        fs::read_to_string(path).ok()?.trim().parse().ok()
    }

    /// Limit and usage of a memory cgroup, in bytes.
    struct Cgroup {
        limit: u64,
        used: u64,
        /// Part of `used` that is page cache and can be reclaimed. `None` if unknown.
        cache: Option<u64>,
    }

    /// Bytes of a cgroup's usage that cannot be reclaimed, at least the resident bytes of this
    /// process.
    fn unreclaimable(used: u64, cache: Option<u64>, resident: u64) -> u64 {
        let own = used.min(resident);
        cache.map_or(own, |cache| used.saturating_sub(cache).max(own))
    }

    /// Page cache of a cgroup, from its `memory.stat`. Version 2 includes child groups; version 1
    /// reports these under `total_` names.
    fn page_cache(stat: &str) -> Option<u64> {
        let field = |name: &str| {
            let line = stat.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
            line?.trim().parse::<u64>().ok()
        };
        let sum = |names: [&str; 2]| names.into_iter().map(field).sum::<Option<u64>>();
        sum(["total_active_file", "total_inactive_file"])
            .or_else(|| sum(["active_file", "inactive_file"]))
    }

    /// Memory cgroups with a limit that contain this process, ancestors included, of both versions.
    /// `own` is `/proc/self/cgroup`; without it, those at the roots are read, which are a
    /// container's.
    fn cgroups(own: &str) -> Vec<Cgroup> {
        let own = if own.is_empty() { "0::/\n1:memory:/\n" } else { own };
        let mut all = Vec::new();
        for line in own.lines() {
            let mut fields = line.splitn(3, ':');
            let (_, controllers, path) =
                (fields.next(), fields.next().unwrap_or(""), fields.next().unwrap_or("/"));
            let (root, limit, used) = match controllers {
                "" => ("/sys/fs/cgroup", "memory.max", "memory.current"),
                c if c.split(',').any(|c| c == "memory") => {
                    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes")
                }
                _ => continue,
            };
            let mut folder = PathBuf::from(format!("{root}{path}"));
            loop {
                if let Some(limit) = number(&folder.join(limit)) {
                    let stat = fs::read_to_string(folder.join("memory.stat"));
                    let used = number(&folder.join(used)).unwrap_or(0);
                    all.push(Cgroup {
                        limit,
                        used,
                        cache: stat.ok().and_then(|stat| page_cache(&stat)),
                    });
                }
                if folder == Path::new(root) || !folder.pop() || !folder.starts_with(root) {
                    break;
                }
            }
        }
        all
    }

    #[cfg(test)]
    mod tests {
        use super::{super::physical_cores, *};

        #[test]
        fn page_cache_of_a_cgroup_is_reclaimable_and_memory_of_others_is_not() {
            let v1 = "cache 9\nactive_file 1\ninactive_file 2\ntotal_active_file 30\n\
                      total_inactive_file 40\n";
            let v2 = "anon 5\nfile 90\nshmem 20\nactive_file 30\ninactive_file 41\n";
            assert_eq!(
                [v1, v2, "anon 5\nactive_file 30\n"].map(page_cache),
                [Some(70), Some(71), None]
            );
            // 100 used: 70 of page cache, 10 of this process, 20 of others.
            assert_eq!(unreclaimable(100, Some(70), 10), 30);
            // Mapped files are both resident and cached.
            assert_eq!(unreclaimable(100, Some(70), 60), 60);
            assert_eq!([unreclaimable(100, None, 10), unreclaimable(5, None, 10)], [10, 5]);
        }

        #[test]
        fn without_proc_memory_is_still_known() {
            let folder = tempfile::tempdir().unwrap();
            let without = read(folder.path().to_str().unwrap());
            assert!(without.available > 0, "{without:?}");
        }

        #[test]
        fn smt_siblings_count_as_one_core() {
            let siblings = |cpu: usize| (cpu < 8).then(|| format!("{},{}", cpu % 4, cpu % 4 + 4));
            assert_eq!(distinct(0..8, siblings), Some(4));
            assert_eq!(distinct([1, 5].into_iter(), siblings), Some(1));
            assert_eq!(distinct([1, 6].into_iter(), siblings), Some(2));
            assert_eq!((distinct(0..9, siblings), distinct(0..0, siblings)), (None, None));
        }

        #[test]
        fn only_processors_in_the_affinity_mask_count() {
            let all = physical_cores();
            let pinned = std::thread::spawn(|| {
                let allowed = rustix::thread::sched_getaffinity(None).unwrap();
                let first =
                    (0..rustix::thread::CpuSet::MAX_CPU).find(|cpu| allowed.is_set(*cpu)).unwrap();
                let mut one = rustix::thread::CpuSet::new();
                one.set(first);
                // Affects only this thread.
                rustix::thread::sched_setaffinity(None, &one).unwrap();
                physical_cores()
            });
            assert!(all >= 1 && all <= std::thread::available_parallelism().unwrap().get());
            assert_eq!(pinned.join().unwrap(), 1);
        }
    }
}

#[cfg(not(target_os = "linux"))]
mod os {
    use sysinfo::{Pid, ProcessesToUpdate, System};

    use super::SystemMemory;

    pub(super) fn has_graphics() -> bool {
        true
    }

    pub(super) fn cores() -> Option<usize> {
        System::physical_core_count().ok()
    }

    pub(super) fn now() -> SystemMemory {
        let Ok(mut system) = System::new() else {
            return SystemMemory { available: 0, resident: 0, peak: 0 };
        };
        system.refresh_memory();
        let pid = Pid::from_u32(std::process::id());
        system.refresh_processes(ProcessesToUpdate::Some(&[pid]), true);
        let resident = system.process(pid).map_or(0, |p| p.memory());
        SystemMemory { available: system.available_memory(), resident, peak: resident }
    }
}

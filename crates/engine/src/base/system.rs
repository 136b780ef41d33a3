//! What the operating system says of memory.

/// Stack size of threads that only do file I/O, in bytes.
pub(crate) const IO_STACK: usize = 128 << 10;
/// Memory of this process and of the machine, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SystemMemory {
    /// What the process may still take without hurting anybody: the least of what is available on the machine
    /// and what the limits on the process (cgroup, rlimit) leave.
    pub available: u64,
    /// What the process holds now.
    pub resident: u64,
    /// The most that the process ever held, where the system tells; else what it holds now.
    pub peak: u64,
}

/// Physical cores that the process may use: what its affinity and CPU quota leave, siblings counted once.
pub(crate) fn physical_cores() -> usize {
    let allowed = std::thread::available_parallelism().map_or(1, usize::from);
    os::cores().map_or(allowed, |cores| cores.clamp(1, allowed))
}

/// Whether the machine may have graphics hardware. Cheap: loads no driver, which would take memory for good.
pub(crate) fn has_graphics() -> bool {
    os::has_graphics()
}

/// Bytes that may still be written below a folder that exists, where the system tells.
#[cfg(unix)]
pub(crate) fn free_space(folder: &std::path::Path) -> Option<u64> {
    let stat = rustix::fs::statvfs(folder).ok()?;
    stat.f_bavail.checked_mul(stat.f_frsize)
}

#[cfg(not(unix))]
pub(crate) fn free_space(_folder: &std::path::Path) -> Option<u64> {
    None
}

impl SystemMemory {
    /// Asks the system.
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
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let resident = kib(&status, "VmRSS:").unwrap_or(0);
        let mut available =
            kib(&fs::read_to_string("/proc/meminfo").unwrap_or_default(), "MemAvailable:")
                .unwrap_or(0);
        for (resource, used) in [(Resource::As, "VmSize:"), (Resource::Data, "VmData:")] {
            if let Some(limit) = getrlimit(resource).current {
                available = available.min(limit.saturating_sub(kib(&status, used).unwrap_or(0)));
            }
        }
        for Cgroup { limit, used, cache } in cgroups() {
            available = available.min(limit.saturating_sub(held((used, cache), resident)));
        }
        SystemMemory { available, resident, peak: kib(&status, "VmHWM:").unwrap_or(resident) }
    }

    /// Distinct cores among the processors that the process may run on; `None` when the system does not tell.
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

    /// Processors, those with the same siblings counted once.
    fn distinct(
        cpus: impl Iterator<Item = usize>,
        siblings: impl Fn(usize) -> Option<String>,
    ) -> Option<usize> {
        let cores: Option<BTreeSet<String>> = cpus.map(siblings).collect();
        cores.map(|c| c.len()).filter(|n| *n > 0)
    }

    /// Devices that kernel drivers of graphics hardware make: the kernel's own, NVIDIA's, Windows's below Linux,
    /// those of telephones.
    pub(super) fn has_graphics() -> bool {
        let names = ["/dev/nvidiactl", "/dev/dxg", "/dev/mali0", "/dev/kgsl-3d0"];
        names.iter().any(|name| Path::new(name).exists())
            || fs::read_dir("/dev/dri").is_ok_and(|mut all| {
                all.any(|e| e.is_ok_and(|e| e.file_name().to_string_lossy().starts_with("renderD")))
            })
    }

    fn kib(text: &str, key: &str) -> Option<u64> {
        let rest = text.lines().find_map(|l| l.strip_prefix(key))?;
        Some(rest.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
    }

    fn number(path: &Path) -> Option<u64> {
        fs::read_to_string(path).ok()?.trim().parse().ok()
    }

    /// Bytes of a memory cgroup.
    struct Cgroup {
        limit: u64,
        used: u64,
        /// Of these, what caches files: it gives way. `None` where the system does not tell.
        cache: Option<u64>,
    }

    /// What is used of a cgroup and does not give way: by this process, of which so much is resident, and by others.
    fn held((used, cache): (u64, Option<u64>), resident: u64) -> u64 {
        let own = used.min(resident);
        cache.map_or(own, |cache| used.saturating_sub(cache).max(own))
    }

    /// What of a cgroup's use caches files, by its `memory.stat`: version 2 counts groups below it anyway, version 1 by names of
    /// their own.
    fn cache(stat: &str) -> Option<u64> {
        let field = |name: &str| {
            let line = stat.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
            line?.trim().parse::<u64>().ok()
        };
        let sum = |names: [&str; 2]| names.into_iter().map(field).sum::<Option<u64>>();
        sum(["total_active_file", "total_inactive_file"])
            .or_else(|| sum(["active_file", "inactive_file"]))
    }

    /// Every memory cgroup that this process is in and that has a limit, ancestors included, of either version.
    fn cgroups() -> Vec<Cgroup> {
        let mut all = Vec::new();
        for line in fs::read_to_string("/proc/self/cgroup").unwrap_or_default().lines() {
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
                        cache: stat.ok().and_then(|stat| cache(&stat)),
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
        fn what_others_hold_in_a_cgroup_does_not_give_way_and_cached_files_do() {
            let one = "cache 9\nactive_file 1\ninactive_file 2\ntotal_active_file 30\ntotal_inactive_file 40\n";
            let two = "anon 5\nfile 90\nshmem 20\nactive_file 30\ninactive_file 41\n";
            assert_eq!(
                [one, two, "anon 5\nactive_file 30\n"].map(cache),
                [Some(70), Some(71), None]
            );
            // 100 used, of which files are 70 and this process has 10: others have 20.
            assert_eq!(held((100, Some(70)), 10), 30);
            // Files that it has mapped are resident and cached.
            assert_eq!(held((100, Some(70)), 60), 60);
            assert_eq!([held((100, None), 10), held((5, None), 10)], [10, 5]);
        }

        #[test]
        fn two_threads_of_a_core_are_one() {
            let siblings = |cpu: usize| (cpu < 8).then(|| format!("{},{}", cpu % 4, cpu % 4 + 4));
            assert_eq!(distinct(0..8, siblings), Some(4));
            assert_eq!(distinct([1, 5].into_iter(), siblings), Some(1));
            assert_eq!(distinct([1, 6].into_iter(), siblings), Some(2));
            assert_eq!((distinct(0..9, siblings), distinct(0..0, siblings)), (None, None));
        }

        #[test]
        fn only_processors_that_the_process_may_run_on_count() {
            let all = physical_cores();
            let of_one = std::thread::spawn(|| {
                let allowed = rustix::thread::sched_getaffinity(None).unwrap();
                let first =
                    (0..rustix::thread::CpuSet::MAX_CPU).find(|cpu| allowed.is_set(*cpu)).unwrap();
                let mut one = rustix::thread::CpuSet::new();
                one.set(first);
                // Of this thread alone.
                rustix::thread::sched_setaffinity(None, &one).unwrap();
                physical_cores()
            });
            assert!(all >= 1 && all <= std::thread::available_parallelism().unwrap().get());
            assert_eq!(of_one.join().unwrap(), 1);
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

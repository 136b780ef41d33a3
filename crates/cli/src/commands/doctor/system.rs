//! Checks of the operating system: memory, huge pages, io_uring, open files, file systems.

use std::{
    fs,
    path::{Path, PathBuf},
};

use moeflux::base::SystemMemory;
use moeflux_bench::units;

use super::finding::Finding;

/// Open files that a model in many shards, its mirrors and a server's connections need.
#[cfg(unix)]
const OPEN_FILES: u64 = 1024;

/// File systems of other machines, or of layers between, whose reads are slow.
const SLOW: [&str; 10] =
    ["nfs", "nfs4", "cifs", "smb3", "9p", "fuse", "overlay", "vboxsf", "virtiofs", "fuseblk"];

/// A trimmed file of the kernel.
fn kernel(path: impl AsRef<Path>) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.trim().to_owned())
}

/// Memory that the process may use, and what limits it.
pub(super) fn memory(memory: SystemMemory) -> Finding {
    let available = units::memory(memory.available);
    let total = kernel("/proc/meminfo").and_then(|text| mem_total(&text));
    let Some(total) = total else {
        return Finding::new("memory", format!("{available} available"));
    };
    let found = format!("{available} available of {}", units::memory(total));
    let finding = Finding::new("memory", found);
    let limit = kernel("/proc/self/cgroup").and_then(|text| {
        let group = text.lines().find_map(|line| line.strip_prefix("0::"))?;
        let path = Path::new("/sys/fs/cgroup").join(group.trim_start_matches('/'));
        kernel(path.join("memory.max"))?.parse::<u64>().ok()
    });
    match limit.filter(|limit| *limit < total) {
        Some(limit) => finding.advice(format!(
            "the cgroup of this process has a limit of {}: MemoryMax= of systemd, --memory of \
             Docker or resources.limits of Kubernetes raise it",
            units::memory(limit)
        )),
        None if memory.available < total / 2 => {
            finding.advice("other programs hold more than half: slots for experts lack it")
        }
        None => finding,
    }
}

/// Total memory of `/proc/meminfo`, in bytes.
fn mem_total(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
}

/// Transparent huge pages, which weights ask for.
pub(super) fn huge_pages() -> Option<Finding> {
    let text = kernel("/sys/kernel/mm/transparent_hugepage/enabled")?;
    let chosen = text.split_whitespace().find(|word| word.starts_with('['))?;
    let finding = Finding::new("huge pages", chosen.trim_matches(['[', ']']));
    Some(match chosen {
        "[never]" => finding.advice(
            "weights are read with more TLB misses: `echo madvise | sudo tee \
             /sys/kernel/mm/transparent_hugepage/enabled`",
        ),
        _ => finding,
    })
}

/// Whether processes may use io_uring.
pub(super) fn io_uring() -> Option<Finding> {
    if !cfg!(target_os = "linux") {
        return None;
    }
    // Kernels before 6.6 have no such setting.
    let setting = kernel("/proc/sys/kernel/io_uring_disabled");
    Some(match setting.as_deref() {
        None | Some("0") => Finding::new("io_uring", "allowed"),
        Some(value) => Finding::new("io_uring", format!("kernel.io_uring_disabled is {value}"))
            .advice(
                "threads read instead, which is as fast on most disks: `sudo sysctl \
                 kernel.io_uring_disabled=0` allows it",
            ),
    })
}

/// The limit on open files.
#[cfg(unix)]
pub(super) fn open_files() -> Option<Finding> {
    use rustix::process::{Resource, getrlimit};

    let limit = getrlimit(Resource::Nofile).current?;
    let finding = Finding::new("open files", format!("{limit} at once"));
    Some(match limit < OPEN_FILES {
        true => finding.advice("models in many shards need more: `ulimit -n 4096`"),
        false => finding,
    })
}

/// The limit on open files.
#[cfg(not(unix))]
pub(super) fn open_files() -> Option<Finding> {
    None
}

/// A line of `/proc/self/mounts`.
#[derive(Debug, PartialEq)]
struct Mount {
    device: String,
    folder: PathBuf,
    kind: String,
}

/// The file system of a folder, which need not exist.
pub(super) fn disk(folder: &Path) -> Option<Finding> {
    let folder = folder.ancestors().find_map(|folder| fs::canonicalize(folder).ok())?;
    let mount = mount_of(&kernel("/proc/self/mounts")?, &folder)?;
    let mut found = format!("{}, {}", folder.display(), mount.kind);
    if let Ok(free) = fs4::available_space(&folder) {
        found += &format!(", {} free", units::disk(free as f64));
    }
    let finding = Finding::new("disk", found);
    let kind = mount.kind.split('.').next().unwrap_or_default();
    if SLOW.contains(&kind) {
        return Some(finding.advice(
            "experts are read faster from a local file system: keep models there, or a copy of \
             them (`moeflux pack`, --mirror)",
        ));
    }
    Some(match is_rotational(&mount.device) {
        true => {
            finding.advice("a hard disk reads experts at random places: an SSD is 100 times faster")
        }
        false => finding,
    })
}

/// The mount that a folder is in: the one with the longest path.
fn mount_of(mounts: &str, folder: &Path) -> Option<Mount> {
    let mounts = mounts.lines().filter_map(|line| {
        let mut words = line.split(' ');
        let (device, path, kind) = (words.next()?, words.next()?, words.next()?);
        let folder = PathBuf::from(path.replace("\\040", " "));
        Some(Mount { device: device.into(), folder, kind: kind.into() })
    });
    let holds = |mount: &Mount| folder.starts_with(&mount.folder);
    mounts.filter(holds).max_by_key(|mount| mount.folder.as_os_str().len())
}

/// Whether a block device such as `/dev/sda1` has turning disks. Disks of virtual machines say so
/// whatever they are.
fn is_rotational(device: &str) -> bool {
    let Some(name) = device.strip_prefix("/dev/") else { return false };
    if ["vd", "xvd"].iter().any(|kind| name.starts_with(kind)) {
        return false;
    }
    // A partition's folder is within that of its disk.
    let Ok(folder) = fs::canonicalize(Path::new("/sys/class/block").join(name)) else {
        return false;
    };
    let disks = folder.ancestors().take(2);
    disks.filter_map(|disk| kernel(disk.join("queue/rotational"))).any(|value| value == "1")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_in_the_innermost_mount() {
        let mounts = "/dev/vda / ext4 rw 0 0\nserver:/x /data nfs4 rw 0 0\n\
                      /dev/sdb1 /data/a\\040b xfs rw 0 0\n";
        let kind = |folder: &str| mount_of(mounts, Path::new(folder)).unwrap().kind;
        assert_eq!(kind("/home/me"), "ext4");
        assert_eq!(kind("/data/models"), "nfs4");
        assert_eq!(kind("/data/a b/models"), "xfs");
        assert_eq!(kind("/database"), "ext4");
        assert_eq!(mount_of("", Path::new("/x")), None);
    }

    #[test]
    fn total_memory_is_read_in_kib() {
        assert_eq!(mem_total("MemFree: 1 kB\nMemTotal:       24 kB\n"), Some(24 << 10));
        assert_eq!(mem_total("MemTotal: lots"), None);
    }
}

//! Version of the program and the system, as every report has them.

/// Version of the program, part of every report.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Operating system and CPU architecture: `linux x86_64`.
pub fn system() -> String {
    format!("{} {}", std::env::consts::OS, std::env::consts::ARCH)
}

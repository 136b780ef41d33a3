//! Freed memory, which the allocator keeps.

/// Returns freed memory to the system, which glibc keeps for later.
pub(crate) fn give_back() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: the function takes the locks that it needs, and touches free memory only.
    unsafe {
        libc::malloc_trim(0);
    }
}

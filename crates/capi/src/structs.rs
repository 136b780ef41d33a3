//! Structs of the header that begin with their size.

use std::ffi::{c_char, c_void};

/// Called with work that is done, and all work, in one unit. False ends the opening:
/// MOEFLUX_CANCELLED.
pub type OnOpen = Option<extern "C" fn(user: *mut c_void, done: u64, total: u64) -> bool>;

/// Options of opening a model. Fill them with moeflux_open_options_init, then change fields.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct OpenOptions {
    /// Size of the struct.
    pub size: usize,
    /// Bytes of host memory that moeflux may hold, the program's own left out; 0: the default.
    pub memory: u64,
    /// Bytes of a graphics card; 0: the default.
    pub device_memory: u64,
    /// "auto", "cpu", "gpu", "gpu:1", "gpu:0,gpu:1"; NULL: "auto".
    pub device: *const c_char,
    /// Positions per session; 0: the default.
    pub context: u32,
    /// Sequences that compute together; 0: the default.
    pub sessions: u32,
    /// Worker threads; 0: the default.
    pub threads: u32,
    /// Whether all is computed in f32.
    pub exact: bool,
    /// Whether the forms of answers have memory.
    pub grammars: bool,
    /// NULL: none.
    pub progress: OnOpen,
    /// Passed to `progress`.
    pub user: *mut c_void,
}

/// Tokens of a call by their origin. Set `size` to the size of the struct before the call.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Synced {
    pub size: usize,
    /// Tokens that did not have to be computed.
    pub reused: u64,
    /// Of these, tokens of the prefix cache.
    pub restored: u64,
    /// Tokens that were dropped.
    pub rewound: u64,
    /// Tokens that were computed.
    pub computed: u64,
}

impl Synced {
    pub(crate) const DEFAULT: Self =
        Self { size: size_of::<Self>(), reused: 0, restored: 0, rewound: 0, computed: 0 };
}

//! Options of opening a model.

use std::{mem, ptr};

use moeflux_binding::Fault;

use crate::{
    caller::{self, Caller},
    structs::OpenOptions,
};

impl OpenOptions {
    pub(crate) const DEFAULT: Self = Self {
        size: mem::size_of::<Self>(),
        memory: 0,
        device_memory: 0,
        device: ptr::null(),
        context: 0,
        sessions: 0,
        threads: 0,
        exact: false,
        grammars: true,
        progress: None,
        user: ptr::null_mut(),
    };

    /// Options of a caller; NULL is the defaults.
    pub(crate) fn read(caller: &Caller, options: *const Self) -> Result<Self, Fault> {
        if options.is_null() {
            return Ok(Self::DEFAULT);
        }
        caller.sized("options", options)
    }

    pub(crate) fn to_binding(self, caller: &Caller) -> Result<moeflux_binding::OpenOptions, Fault> {
        let some = |value: u32| (value > 0).then_some(value as usize);
        let mut options = moeflux_binding::OpenOptions::default();
        options.memory = (self.memory > 0).then_some(self.memory);
        options.device_memory =
            (self.device_memory > 0).then_some(self.device_memory).into_iter().collect();
        options.device = caller.optional("options.device", self.device)?.map(str::to_owned);
        options.context = some(self.context);
        options.sessions = some(self.sessions);
        options.threads = some(self.threads);
        options.exact = self.exact;
        options.grammars = Some(self.grammars);
        options.local = true;
        Ok(options)
    }
}

/// Writes the defaults to a struct of `size` bytes: moeflux_open_options_init calls it.
#[unsafe(no_mangle)]
pub extern "C" fn moeflux_open_options_init_sized(options: *mut OpenOptions, size: usize) {
    caller::quietly(|caller| caller.init_sized(options, &OpenOptions::DEFAULT, size));
}

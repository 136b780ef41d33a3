//! Arguments of C callers: the only place that reads and writes their pointers.

use std::{
    ffi::{CStr, CString, c_char, c_void},
    mem,
    panic::set_hook,
    ptr, slice,
    sync::Once,
};

use moeflux::base::guarded;
use moeflux_binding::{Fault, HostProcess};

use crate::{
    status::{Status, set_message},
    structs::{OpenOptions, Synced},
};

/// Length of a string that ends with a NUL.
pub const NUL: usize = usize::MAX;

/// Maximum of a length in elements: more is an error of the caller.
const MAX_LEN: usize = 1 << 40;

/// Maximum size of a struct of options.
const MAX_STRUCT: usize = 4096;

/// The promise of a C caller to keep the rules of the header: a pointer is NULL, or points to the
/// number of values that the function asks for, until it returns.
pub(crate) struct Caller(());

/// Something that C code owns by a pointer.
pub(crate) trait Handle {
    /// Process that made it.
    fn process(&self) -> HostProcess;
}

/// Struct whose first field is its size in bytes, as the program knows it.
///
/// # Safety
/// `repr(C)` with a `usize` first.
pub(crate) unsafe trait SizedStruct: Copy {
    /// Values of fields that a program does not know.
    const DEFAULT: Self;
}

// SAFETY: it is `repr(C)`, and begins with its size.
unsafe impl SizedStruct for OpenOptions {
    const DEFAULT: Self = Self::DEFAULT;
}
// SAFETY: as above.
unsafe impl SizedStruct for Synced {
    const DEFAULT: Self = Self::DEFAULT;
}

/// Pointer that the library passes back to callbacks.
#[derive(Clone, Copy)]
pub(crate) struct User(*mut c_void);

// SAFETY: the library does not read it. The header says on which threads callbacks run.
unsafe impl Send for User {}
// SAFETY: as above.
unsafe impl Sync for User {}

impl User {
    pub(crate) fn new(user: *mut c_void) -> Self {
        Self(user)
    }

    pub(crate) fn pointer(self) -> *mut c_void {
        self.0
    }
}

/// Runs a call of C code. An error, or a panic, becomes the status and the thread's message.
pub(crate) fn call(run: impl FnOnce(&Caller) -> Result<(), Fault>) -> Status {
    let (status, message) = outcome(run);
    // Set last: an argument may be the former message, and callbacks may have failed.
    set_message(&message);
    status
}

/// Status and message of `run`.
pub(crate) fn outcome(run: impl FnOnce(&Caller) -> Result<(), Fault>) -> (Status, String) {
    match caught(run) {
        Ok(Ok(())) => (Status::MOEFLUX_OK, String::new()),
        Ok(Err(fault)) => (Status::of(&fault), fault.message()),
        Err(panic) => {
            let message = format!("moeflux failed, which is a fault: {panic}");
            (Status::MOEFLUX_INTERNAL, message)
        }
    }
}

/// Runs a call of C code that has no status. An error becomes the thread's message.
pub(crate) fn value<T>(fallback: T, run: impl FnOnce(&Caller) -> Result<T, Fault>) -> T {
    let mut result = fallback;
    call(|caller| {
        result = run(caller)?;
        Ok(())
    });
    result
}

/// Runs what cannot fail, and may run in a signal handler: it keeps the thread's message.
pub(crate) fn quietly<T>(run: impl FnOnce(&Caller) -> T) -> T {
    run(&Caller(()))
}

/// Frees what C code owned; NULL is nothing. Keeps the thread's message.
pub(crate) fn free<T: Handle>(handle: *mut T) {
    let free = |_: &Caller| {
        if handle.is_null() {
            return;
        }
        // SAFETY: the caller owns it, and does not use it again.
        let owned = unsafe { Box::from_raw(handle) };
        // Threads and locks of another process do not exist here.
        if owned.process().check().is_err() {
            mem::forget(owned);
        }
    };
    // A panic is a leak.
    let _ = caught(free);
}

/// Result of `run`, or the message of its panic. Panics print nothing.
fn caught<T>(run: impl FnOnce(&Caller) -> T) -> Result<T, String> {
    static QUIET: Once = Once::new();
    QUIET.call_once(|| set_hook(Box::new(|_| {})));
    guarded(|| run(&Caller(())))
}

fn null(name: &str) -> Fault {
    Fault::Invalid(format!("{name} is NULL"))
}

impl Caller {
    /// A string of `len` bytes, or one that ends with a NUL.
    pub(crate) fn text(&self, name: &str, text: *const c_char, len: usize) -> Result<&str, Fault> {
        let bytes = match len {
            NUL if text.is_null() => return Err(null(name)),
            // SAFETY: the caller says that it ends with a NUL.
            NUL => unsafe { CStr::from_ptr(text) }.to_bytes(),
            len => self.slice(name, text.cast::<u8>(), len)?,
        };
        std::str::from_utf8(bytes).map_err(|error| {
            let place = error.valid_up_to();
            Fault::Invalid(format!("{name}: expected UTF-8, got a wrong byte at {place}"))
        })
    }

    /// A string that ends with a NUL; `None` for NULL.
    pub(crate) fn optional(&self, name: &str, text: *const c_char) -> Result<Option<&str>, Fault> {
        if text.is_null() { Ok(None) } else { self.text(name, text, NUL).map(Some) }
    }

    /// `len` values. NULL is allowed for none.
    pub(crate) fn slice<T>(&self, name: &str, first: *const T, len: usize) -> Result<&[T], Fault> {
        if len == 0 {
            return Ok(&[]);
        }
        if first.is_null() {
            return Err(null(name));
        }
        if len > MAX_LEN {
            return Err(Fault::Invalid(format!("{name} has {len} elements: expected fewer")));
        }
        // SAFETY: the caller says that `len` are there.
        Ok(unsafe { slice::from_raw_parts(first, len) })
    }

    /// A handle, in the process that made it.
    pub(crate) fn handle<T: Handle>(&self, name: &str, handle: *const T) -> Result<&T, Fault> {
        // SAFETY: the caller has it from the library, and has not freed it.
        let handle = unsafe { handle.as_ref() }.ok_or_else(|| null(name))?;
        handle.process().check()?;
        Ok(handle)
    }

    /// A handle that may be NULL.
    pub(crate) fn optional_handle<T: Handle>(&self, handle: *const T) -> Option<&T> {
        // SAFETY: as in `handle`.
        unsafe { handle.as_ref() }
    }

    /// Checks that a result has a place, before it is computed.
    pub(crate) fn expect_out<T>(&self, name: &str, out: *mut T) -> Result<(), Fault> {
        if out.is_null() { Err(null(name)) } else { Ok(()) }
    }

    /// Writes a result, unless `out` is NULL.
    pub(crate) fn write<T>(&self, out: *mut T, value: T) {
        if !out.is_null() {
            // SAFETY: the caller says that there is room for one.
            unsafe { out.write(value) };
        }
    }

    /// Writes a new handle.
    pub(crate) fn write_handle<T: Handle>(&self, out: *mut *mut T, handle: T) {
        self.write(out, Box::into_raw(Box::new(handle)));
    }

    /// Writes a string that the caller frees, unless `out` is NULL.
    pub(crate) fn write_string(&self, out: *mut *mut c_char, text: String) -> Result<(), Fault> {
        if !out.is_null() {
            let text = CString::new(text);
            let text = text.map_err(|_| Fault::Invalid("a result has a NUL".to_owned()))?;
            self.write(out, text.into_raw());
        }
        Ok(())
    }

    /// Frees a string of [`Caller::write_string`].
    pub(crate) fn free_string(&self, text: *mut c_char) {
        if !text.is_null() {
            // SAFETY: the caller has it from the library, and does not use it again.
            drop(unsafe { CString::from_raw(text) });
        }
    }

    /// Writes as many values as there is room for, and the number that there are.
    pub(crate) fn fill<T: Copy>(
        &self,
        name: &str,
        to: *mut T,
        room: usize,
        values: &[T],
    ) -> Result<(), Fault> {
        let len = values.len().min(room);
        if len > 0 {
            self.expect_out(name, to)?;
            // SAFETY: the caller says that there is room, which no value of the library overlaps.
            unsafe { ptr::copy_nonoverlapping(values.as_ptr(), to, len) };
        }
        Ok(())
    }

    /// A struct of a program that may know fewer fields, or more: the others have their defaults.
    pub(crate) fn sized<T: SizedStruct>(&self, name: &str, from: *const T) -> Result<T, Fault> {
        let bytes = self.struct_bytes(name, from)?;
        let mut value = T::DEFAULT;
        // SAFETY: the program has these bytes of it, whose fields are at the same places.
        unsafe { ptr::copy_nonoverlapping(from.cast::<u8>(), (&raw mut value).cast(), bytes) };
        Ok(value)
    }

    /// Checks that a struct of results, which may be NULL, has its size, before they are computed.
    pub(crate) fn expect_sized<T: SizedStruct>(&self, name: &str, to: *mut T) -> Result<(), Fault> {
        if to.is_null() { Ok(()) } else { self.struct_bytes(name, to).map(drop) }
    }

    /// Writes the fields of a struct that the program knows, but its size.
    pub(crate) fn write_sized<T: SizedStruct>(
        &self,
        name: &str,
        to: *mut T,
        value: &T,
    ) -> Result<(), Fault> {
        let bytes = self.struct_bytes(name, to)?;
        self.write_bytes(to, value, bytes);
        Ok(())
    }

    /// Writes a struct of which the program knows `bytes`, with this size.
    pub(crate) fn init_sized<T: SizedStruct>(&self, to: *mut T, value: &T, bytes: usize) {
        if !to.is_null() && (mem::size_of::<usize>()..=MAX_STRUCT).contains(&bytes) {
            self.write_bytes(to, value, bytes.min(mem::size_of::<T>()));
            self.write(to.cast::<usize>(), bytes);
        }
    }

    fn write_bytes<T: SizedStruct>(&self, to: *mut T, value: &T, bytes: usize) {
        let head = mem::size_of::<usize>();
        let from = ptr::from_ref(value).cast::<u8>();
        // SAFETY: the program has these bytes of it; the size stays.
        unsafe {
            ptr::copy_nonoverlapping(from.add(head), to.cast::<u8>().add(head), bytes - head);
        }
    }

    /// Bytes of a struct that both sides know.
    fn struct_bytes<T: SizedStruct>(&self, name: &str, from: *const T) -> Result<usize, Fault> {
        if from.is_null() {
            return Err(null(name));
        }
        // SAFETY: the struct begins with its size.
        let size = unsafe { from.cast::<usize>().read() };
        if !(mem::size_of::<usize>()..=MAX_STRUCT).contains(&size) {
            let problem = format!("{name}.size is {size}: expected the size of the struct");
            return Err(Fault::Invalid(problem));
        }
        Ok(size.min(mem::size_of::<T>()))
    }
}

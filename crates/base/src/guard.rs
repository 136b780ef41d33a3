//! Panics of libraries that read a stranger's files, as errors.

use std::{
    any::Any,
    cell::Cell,
    panic::{AssertUnwindSafe, catch_unwind},
};

thread_local! {
    static DEPTH: Cell<usize> = const { Cell::new(0) };
}

/// Counts a guarded call of this thread while it lives.
struct GuardedCall;

impl GuardedCall {
    fn enter() -> Self {
        DEPTH.set(DEPTH.get() + 1);
        Self
    }
}

impl Drop for GuardedCall {
    fn drop(&mut self) {
        DEPTH.set(DEPTH.get() - 1);
    }
}

/// Whether a panic of this thread becomes an [`Error`](crate::Error). A program's panic hook that
/// prints nothing for these leaves the message to the error.
pub fn is_panic_guarded() -> bool {
    DEPTH.get() > 0
}

/// Result of `call`, or the message of its panic. After a panic, values that
/// `call` changes must not be used.
pub fn guarded<T>(call: impl FnOnce() -> T) -> Result<T, String> {
    let _guard = GuardedCall::enter();
    catch_unwind(AssertUnwindSafe(call)).map_err(message)
}

fn message(panic: Box<dyn Any + Send>) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    text.or(panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("a panic").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_a_message() {
        let zero = std::hint::black_box(0);
        assert!(guarded(|| 1 / zero).unwrap_err().contains("divide by zero"));
        assert!(guarded(|| [1][zero + 1]).unwrap_err().contains("out of bounds"));
        assert_eq!(guarded(is_panic_guarded), Ok(true));
        assert!(!is_panic_guarded());
    }
}

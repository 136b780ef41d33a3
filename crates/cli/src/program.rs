//! The program: its main thread, and its end.

use std::process::ExitCode;

use moeflux_bench::InvalidRequest;

use crate::{
    args, commands, interrupt, invocation::Invocation, out, progress, wrong_use::WrongUse,
};

/// Stack of the thread that runs commands, in bytes, as most systems give to a main thread. Where
/// the limit is lower (`ulimit -s`), deep calls would overflow.
const STACK: usize = 8 << 20;

/// Runs the command line, in a process that does nothing else, and returns its exit code. Wrong
/// arguments end the process.
pub fn run(invocation: Invocation) -> ExitCode {
    invocation.set_current();
    leave_guarded_panics_to_errors();
    #[cfg(unix)]
    raise_file_limit();
    let run = || commands::run(args::parse()).unwrap_or_else(|error| report(&error));
    let thread = std::thread::Builder::new().name("main".into()).stack_size(STACK);
    match thread.spawn(run) {
        Ok(thread) => thread.join().unwrap_or(ExitCode::from(PANICKED)),
        // Without memory for a new stack, the stack of the process's first thread may do.
        Err(_) => run(),
    }
}

/// Raises the limit on open files as far as the user may: models have up to hundreds of shards.
#[cfg(unix)]
fn raise_file_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

    /// Maximum on macOS, where the hard limit may be infinite: `OPEN_MAX`.
    const MACOS: u64 = 10240;
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    for limit in [maximum, Some(maximum.unwrap_or(MACOS).min(MACOS))] {
        let higher = limit.is_none_or(|limit| current.is_some_and(|current| limit > current));
        let raised = || setrlimit(Resource::Nofile, Rlimit { current: limit, maximum });
        // A limit that cannot be raised is reported when it is reached.
        if higher && raised().is_ok() {
            return;
        }
    }
}

/// Prints no message for a library's panic that becomes an error.
fn leave_guarded_panics_to_errors() {
    let print = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if !moeflux::base::is_panic_guarded() {
            print(panic);
        }
    }));
}

/// Exit code of a Rust program after a panic.
const PANICKED: u8 = 101;

/// Prints an error and returns the exit code.
fn report(error: &anyhow::Error) -> ExitCode {
    if error.is::<out::Closed>() {
        return ExitCode::SUCCESS;
    }
    if matches!(error.downcast_ref(), Some(moeflux::Error::Cancelled)) {
        return ExitCode::from(interrupt::exit_code());
    }
    let mut printed = format!("error: {error}");
    progress::error_line(&printed);
    for cause in error.chain().skip(1).map(ToString::to_string) {
        // Most messages already end with their cause.
        if !printed.contains(&cause) {
            progress::error_line(format_args!("  because: {cause}"));
            printed += &cause;
        }
    }
    if error.is::<WrongUse>() || error.is::<InvalidRequest>() {
        progress::error_line("\nFor more information, try '--help'.");
        return ExitCode::from(2);
    }
    ExitCode::FAILURE
}

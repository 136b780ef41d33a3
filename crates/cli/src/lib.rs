//! Command line of moeflux: arguments, progress, the terminal. The `moeflux` crate computes,
//! `moeflux-bench` measures. A library, so that the package for Python has the same command.

mod args;
mod atomic_file;
mod commands;
mod defaults;
mod folders;
mod freed_memory;
mod hub;
mod interrupt;
mod invocation;
mod load;
mod model_settings;
mod out;
mod printable;
mod program;
mod progress;
mod settings_text;
mod shell;
mod tensor_writer;
mod wrap;
mod wrong_use;

pub use invocation::Invocation;
pub use program::run;

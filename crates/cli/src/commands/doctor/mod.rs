//! `doctor`: slow parts of this machine, and how to change them.

mod doctor;
mod finding;
mod system;

pub(crate) use doctor::run;

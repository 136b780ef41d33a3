//! Fuel that texts cost.

use minijinja::{Error, State};

/// Bytes of text for one unit of fuel, as in the library.
pub(super) const FUEL_BYTES: usize = 64;

/// Charges the fuel of `len` bytes before they are made.
pub(super) fn charge_bytes(state: &State, len: usize) -> Result<(), Error> {
    state.consume_fuel((len / FUEL_BYTES) as u64)
}

/// Charges the fuel of the widths and precisions in a format before it is applied. Every number in
/// it counts.
pub(super) fn fits(state: &State, format: &str) -> Result<(), Error> {
    for digits in format.split(|c: char| !c.is_ascii_digit()).filter(|digits| !digits.is_empty()) {
        charge_bytes(state, digits.parse().unwrap_or(usize::MAX))?;
    }
    Ok(())
}

//! Config fields, read with errors that name them.

use serde_json::{Map, Value};

use crate::base::error::Error;

/// Maximum of a config value. Keeps the product of any three within 64 bits.
const MAX_VALUE: u64 = 1 << 20;

pub(super) struct ConfigFields<'a>(pub(super) &'a Map<String, Value>);

impl ConfigFields<'_> {
    pub(super) fn wrong(&self, what: impl std::fmt::Display) -> Error {
        Error::Input(format!("config: {what}"))
    }

    /// The value, unless it is missing or null.
    fn get(&self, name: &str) -> Option<&Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    pub(super) fn number(&self, name: &str) -> Result<u64, Error> {
        let Some(value) = self.0.get(name) else {
            return Err(self.wrong(format!("{name} is missing")));
        };
        match value.as_u64() {
            Some(n @ 1..=MAX_VALUE) => Ok(n),
            _ => Err(self.wrong(format!(
                "{name} is {value}; it must be a whole number from 1 to {MAX_VALUE}"
            ))),
        }
    }

    pub(super) fn number_or(&self, name: &str, default: u64) -> Result<u64, Error> {
        self.optional(name).map(|n| n.unwrap_or(default))
    }

    pub(super) fn optional(&self, name: &str) -> Result<Option<u64>, Error> {
        self.get(name).map(|_| self.number(name)).transpose()
    }

    /// A value that may be zero; zero if missing.
    pub(super) fn count(&self, name: &str) -> Result<u64, Error> {
        match self.get(name).map(Value::as_u64) {
            Some(Some(0)) => Ok(0),
            _ => self.number_or(name, 0),
        }
    }

    /// A boolean with a default.
    pub(super) fn flag_or(&self, name: &str, default: bool) -> Result<bool, Error> {
        match self.get(name) {
            None => Ok(default),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(other) => Err(self.wrong(format!("{name} is {other}, not true or false"))),
        }
    }

    pub(super) fn list(&self, name: &str) -> Result<Vec<u64>, Error> {
        match self.get(name) {
            None => Ok(Vec::new()),
            Some(value) => value
                .as_array()
                .and_then(|list| list.iter().map(Value::as_u64).collect())
                .ok_or_else(|| self.wrong(format!("{name} must be a list of layers"))),
        }
    }

    /// Entry of a per-layer list, if the list exists.
    pub(super) fn layer_entry(&self, name: &str, layer: u64) -> Result<Option<&str>, Error> {
        let Some(list) = self.get(name) else { return Ok(None) };
        let found = list.get(layer as usize).and_then(Value::as_str);
        found.map(Some).ok_or_else(|| {
            self.wrong(format!("{name} must name all layers, and there is no layer {layer}"))
        })
    }

    pub(super) fn divides(
        &self,
        part: &str,
        divisor: u64,
        whole: &str,
        value: u64,
    ) -> Result<(), Error> {
        if value.is_multiple_of(divisor) {
            return Ok(());
        }
        Err(self.wrong(format!("{whole} {value} is not a multiple of {part} {divisor}")))
    }
}

//! Rows of keys: a key of the Hub's config and its key in GGUF, read in both directions.

use moeflux_base::Error;
use serde_json::Value;

use super::writer::{KeyValue, KeyWriter, Place};
use crate::checkpoint::gguf::keys::{Config, Keys};

/// A key of the config and its key in GGUF.
#[derive(Clone, Copy)]
pub(crate) struct KeyRow {
    /// Name in the config of the Hub, as the family reads it.
    config: &'static str,
    /// Name in GGUF, after the architecture's prefix.
    gguf: &'static str,
    kind: KeyKind,
    absent: Absent,
    is_read: bool,
    place: Place,
}

/// Kind of a key's value.
#[derive(Clone, Copy)]
enum KeyKind {
    Integer,
    /// An integer above 0, which files need.
    Size,
    /// An integer for all layers, or for each layer that has the part.
    Uniform,
    /// Number of layers.
    Layers,
    Number,
    Flag,
    /// A value that files lack.
    Fixed(Fixed),
    /// Keys that are computed.
    Group {
        read: fn(&Keys<'_>, &mut Config) -> Result<(), Error>,
        write: fn(&mut KeyWriter<'_>),
    },
}

/// A value of the config that is not in the file.
#[derive(Clone, Copy)]
pub(crate) enum Fixed {
    Flag(bool),
    Integer(u64),
    Number(f64),
    Text(&'static str),
}

/// How a file without the key is read.
#[derive(Clone, Copy)]
enum Absent {
    Refused,
    /// The config has no such key.
    Omitted,
    Default(Fixed),
}

impl From<Fixed> for Value {
    fn from(fixed: Fixed) -> Self {
        match fixed {
            Fixed::Flag(value) => value.into(),
            Fixed::Integer(value) => value.into(),
            Fixed::Number(value) => value.into(),
            Fixed::Text(value) => value.into(),
        }
    }
}

const fn row(config: &'static str, gguf: &'static str, kind: KeyKind) -> KeyRow {
    let place = match kind {
        KeyKind::Number => Place::Factors,
        KeyKind::Flag => Place::Routers,
        _ => Place::Sizes,
    };
    KeyRow { config, gguf, kind, absent: Absent::Omitted, is_read: true, place }
}

/// An integer above 0, which files need.
pub(crate) const fn size(config: &'static str, gguf: &'static str) -> KeyRow {
    row(config, gguf, KeyKind::Size)
}

pub(crate) const fn integer(config: &'static str, gguf: &'static str) -> KeyRow {
    row(config, gguf, KeyKind::Integer)
}

/// An integer for all layers, or for each layer that has the part.
pub(crate) const fn uniform(config: &'static str, gguf: &'static str) -> KeyRow {
    row(config, gguf, KeyKind::Uniform)
}

/// Number of layers, without layers for multi-token prediction.
pub(crate) const fn layers(config: &'static str, gguf: &'static str) -> KeyRow {
    row(config, gguf, KeyKind::Layers)
}

pub(crate) const fn number(config: &'static str, gguf: &'static str) -> KeyRow {
    row(config, gguf, KeyKind::Number)
}

pub(crate) const fn flag(config: &'static str, gguf: &'static str) -> KeyRow {
    row(config, gguf, KeyKind::Flag)
}

/// A key of the config that files lack: llama.cpp has the value in its code.
pub(crate) const fn fixed(config: &'static str, value: Fixed) -> KeyRow {
    row(config, "", KeyKind::Fixed(value))
}

/// Keys that are computed, at a place of the file.
pub(crate) const fn group(
    place: Place,
    read: fn(&Keys<'_>, &mut Config) -> Result<(), Error>,
    write: fn(&mut KeyWriter<'_>),
) -> KeyRow {
    row("", "", KeyKind::Group { read, write }).at(place)
}

/// Keys of the config that are computed from a file, of which other rows write the keys.
pub(crate) const fn reads(read: fn(&Keys<'_>, &mut Config) -> Result<(), Error>) -> KeyRow {
    group(Place::Sizes, read, |_| {})
}

/// Keys that files have, and that are not read.
pub(crate) const fn writes(place: Place, write: fn(&mut KeyWriter<'_>)) -> KeyRow {
    group(place, |_, _| Ok(()), write)
}

impl KeyRow {
    /// The row of a key without which a file is refused.
    pub(crate) const fn needed(self) -> Self {
        Self { absent: Absent::Refused, ..self }
    }

    /// The row of a key that means this value where it is absent.
    pub(crate) const fn or(self, default: Fixed) -> Self {
        Self { absent: Absent::Default(default), ..self }
    }

    /// The row of a key that files have and the config does not need.
    pub(crate) const fn unread(self) -> Self {
        Self { is_read: false, ..self }
    }

    pub(crate) const fn at(self, place: Place) -> Self {
        Self { place, ..self }
    }

    /// Adds the key of the config.
    pub(super) fn read(&self, keys: &Keys<'_>, config: &mut Config) -> Result<(), Error> {
        if !self.is_read {
            return Ok(());
        }
        let name = self.gguf;
        let value = match self.kind {
            KeyKind::Group { read, .. } => return read(keys, config),
            KeyKind::Fixed(value) => Some(value.into()),
            KeyKind::Integer => keys.integer(name)?.map(Value::from),
            KeyKind::Size => Some(keys.size(name)?.into()),
            KeyKind::Uniform => keys.uniform(name)?.map(Value::from),
            KeyKind::Layers => Some(keys.layers()?.into()),
            KeyKind::Number => keys.number(name)?.map(Value::from),
            KeyKind::Flag => keys.flag(name)?.map(Value::from),
        };
        let value = match (value, self.absent) {
            (Some(value), _) => value,
            (None, Absent::Refused) => return Err(keys.missing(name)),
            (None, Absent::Omitted) => return Ok(()),
            (None, Absent::Default(value)) => value.into(),
        };
        config.insert(self.config.into(), value);
        Ok(())
    }

    /// Writes the key if the config has it.
    pub(super) fn write(&self, keys: &mut KeyWriter<'_>) {
        keys.place = self.place;
        let value = match self.kind {
            KeyKind::Group { write, .. } => return write(keys),
            KeyKind::Fixed(_) => None,
            KeyKind::Integer | KeyKind::Size | KeyKind::Uniform | KeyKind::Layers => {
                keys.integer(self.config).map(KeyValue::U32)
            }
            KeyKind::Number => keys.config[self.config].as_f64().map(|x| KeyValue::F32(x as f32)),
            KeyKind::Flag => keys.config[self.config].as_bool().map(KeyValue::Bool),
        };
        if let Some(value) = value {
            keys.push(self.gguf, value);
        }
    }
}

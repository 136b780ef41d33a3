//! Metadata of a GGUF file: values by key, strings and arrays read when asked for.

use std::{
    collections::BTreeMap,
    io::{BufReader, Read},
    path::{Path, PathBuf},
};

use moeflux_base::Error;

use super::{super::data_file::DataFile, header::element_bytes};

/// Maximum bytes of a text that is read.
const MAX_TEXT: u64 = 8 << 20;
/// Maximum elements of an array of whole numbers; the largest have one per token.
const MAX_NUMBERS: u64 = 1 << 20;

/// Value of a key. Texts and arrays are places in the file.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Value {
    Unsigned(u64),
    Signed(i64),
    F32(f32),
    F64(f64),
    Bool(bool),
    Text { at: u64, bytes: u64 },
    Array { kind: u32, count: u64, at: u64 },
}

impl Value {
    /// Description in errors.
    const fn kind(self) -> &'static str {
        match self {
            Self::Unsigned(_) | Self::Signed(_) => "an integer",
            Self::F32(_) | Self::F64(_) => "a number",
            Self::Bool(_) => "true or false",
            Self::Text { .. } => "a text",
            Self::Array { .. } => "an array",
        }
    }

    /// A whole number that is not negative.
    fn unsigned(self) -> Option<u64> {
        match self {
            Self::Unsigned(n) => Some(n),
            Self::Signed(n) => u64::try_from(n).ok(),
            _ => None,
        }
    }
}

/// Keys and values of a file.
#[derive(Clone, Debug)]
pub(super) struct Metadata {
    path: PathBuf,
    /// Index of the file in the checkpoint.
    pub(super) file: u32,
    values: BTreeMap<String, Value>,
}

impl Metadata {
    pub(super) fn new(path: &Path, file: u32, values: BTreeMap<String, Value>) -> Self {
        Self { path: path.into(), file, values }
    }

    /// Error about the value of a key.
    pub(super) fn problem(&self, key: &str, problem: &str) -> Error {
        self.error(format!("{key:?} {problem}"))
    }

    /// Error about the file.
    pub(super) fn error(&self, problem: impl Into<String>) -> Error {
        Error::Checkpoint { path: self.path.clone(), problem: problem.into() }
    }

    /// All keys, sorted.
    pub(super) fn keys(&self) -> impl Iterator<Item = &str> {
        self.values.keys().map(String::as_str)
    }

    fn typed<T>(
        &self,
        key: &str,
        wanted: &str,
        convert: impl Fn(Value) -> Option<T>,
    ) -> Result<Option<T>, Error> {
        let Some(value) = self.values.get(key).copied() else { return Ok(None) };
        let converted = convert(value);
        if converted.is_none() {
            return Err(self.problem(key, &format!("is {}; {wanted} is needed", value.kind())));
        }
        Ok(converted)
    }

    /// Error about a key that is needed and missing.
    pub(super) fn missing(&self, key: &str) -> Error {
        self.problem(key, "is missing: the file is incomplete, or made by an old converter")
    }

    /// A whole number of any integer kind.
    pub(super) fn integer(&self, key: &str) -> Result<Option<u64>, Error> {
        self.typed(key, "a whole number", Value::unsigned)
    }

    /// A finite number, as JSON would have it: the shortest decimal of an f32.
    pub(super) fn number(&self, key: &str) -> Result<Option<f64>, Error> {
        self.typed(key, "a finite number", |value| {
            let number = match value {
                Value::F32(x) => x.to_string().parse().ok()?,
                Value::F64(x) => x,
                other => other.unsigned()? as f64,
            };
            number.is_finite().then_some(number)
        })
    }

    pub(super) fn boolean(&self, key: &str) -> Result<Option<bool>, Error> {
        self.typed(key, "true or false", |value| match value {
            Value::Bool(value) => Some(value),
            _ => None,
        })
    }

    /// A text.
    pub(super) fn text(&self, files: &[DataFile], key: &str) -> Result<Option<String>, Error> {
        let place = self.typed(key, "a text", |value| match value {
            Value::Text { at, bytes } => Some((at, bytes)),
            _ => None,
        })?;
        let Some((at, bytes)) = place else { return Ok(None) };
        if bytes > MAX_TEXT {
            let problem = format!("has {bytes} bytes; at most {MAX_TEXT} are read");
            return Err(self.problem(key, &problem));
        }
        let mut text = vec![0; bytes as usize];
        let file = &files[self.file as usize];
        file.read_exact_at(&mut text, at)
            .map_err(Error::file(&self.path, format!("cannot read {key:?}")))?;
        let text = String::from_utf8(text);
        text.map(Some).map_err(|_| self.problem(key, "is not UTF-8"))
    }

    /// Whether a key exists.
    pub(super) fn has(&self, key: &str) -> bool {
        self.values.contains_key(key)
    }

    /// Whether the value of a key is an array.
    pub(super) fn is_array(&self, key: &str) -> bool {
        matches!(self.values.get(key), Some(Value::Array { .. }))
    }

    /// Number of elements of an array.
    pub(super) fn count(&self, key: &str) -> Result<Option<u64>, Error> {
        self.typed(key, "an array", |value| match value {
            Value::Array { count, .. } => Some(count),
            _ => None,
        })
    }

    /// A whole number for each of `layers` layers: one for all, or an array.
    pub(super) fn per_layer(
        &self,
        files: &[DataFile],
        key: &str,
        layers: usize,
    ) -> Result<Option<Vec<u64>>, Error> {
        if !self.is_array(key) {
            return Ok(self.integer(key)?.map(|n| vec![n; layers]));
        }
        let numbers = self.integers(files, key)?.unwrap_or_default();
        if numbers.len() != layers {
            let problem = format!("has {} values for {layers} layers", numbers.len());
            return Err(self.problem(key, &problem));
        }
        Ok(Some(numbers))
    }

    /// Whole numbers or booleans of an array.
    pub(super) fn integers(
        &self,
        files: &[DataFile],
        key: &str,
    ) -> Result<Option<Vec<u64>>, Error> {
        let array = self.typed(key, "an array of whole numbers", |value| match value {
            Value::Array { kind, count, at } if count <= MAX_NUMBERS => {
                let size = element_bytes(kind).filter(|_| !matches!(kind, 6 | 12))?;
                Some((kind, count, at, size as usize))
            }
            _ => None,
        })?;
        let Some((kind, count, at, size)) = array else { return Ok(None) };
        let mut bytes = vec![0; count as usize * size];
        files[self.file as usize]
            .read_exact_at(&mut bytes, at)
            .map_err(Error::file(&self.path, format!("cannot read {key:?}")))?;
        let is_signed = matches!(kind, 1 | 3 | 5 | 11);
        let number = |bytes: &[u8]| {
            let fill = if is_signed && bytes.last().is_some_and(|b| *b > 127) { 255 } else { 0 };
            let mut whole = [fill; 8];
            whole[..size].copy_from_slice(bytes);
            let n = u64::from_le_bytes(whole);
            (fill == 0).then_some(n)
        };
        let numbers: Option<Vec<_>> = bytes.chunks_exact(size).map(number).collect();
        numbers.map(Some).ok_or_else(|| self.problem(key, "has negative numbers"))
    }

    /// Numbers of an array of f32.
    pub(super) fn floats(&self, files: &[DataFile], key: &str) -> Result<Option<Vec<f32>>, Error> {
        let array = self.typed(key, "an array of f32", |value| match value {
            Value::Array { kind: 6, count, at } if count <= MAX_NUMBERS => Some((count, at)),
            _ => None,
        })?;
        let Some((count, at)) = array else { return Ok(None) };
        let mut bytes = vec![0; count as usize * 4];
        files[self.file as usize]
            .read_exact_at(&mut bytes, at)
            .map_err(Error::file(&self.path, format!("cannot read {key:?}")))?;
        let (numbers, _) = bytes.as_chunks();
        Ok(Some(numbers.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()))
    }

    /// Calls `each` with every text of an array, as it is read. Returns their number.
    pub(super) fn each_text(
        &self,
        files: &[DataFile],
        key: &str,
        mut each: impl FnMut(&str) -> Result<(), String>,
    ) -> Result<Option<u64>, Error> {
        let array = self.typed(key, "an array of texts", |value| match value {
            Value::Array { kind: 8, count, at } => Some((count, at)),
            _ => None,
        })?;
        let Some((count, at)) = array else { return Ok(None) };
        let mut reader =
            BufReader::with_capacity(64 << 10, files[self.file as usize].reader_at(at));
        let failed = || Error::file(&self.path, format!("cannot read {key:?}"));
        let mut text = Vec::new();
        for _ in 0..count {
            let mut len = [0; 8];
            reader.read_exact(&mut len).map_err(failed())?;
            let len = u64::from_le_bytes(len);
            if len > MAX_TEXT {
                return Err(self.problem(key, &format!("has a text of {len} bytes")));
            }
            text.resize(len as usize, 0);
            reader.read_exact(&mut text).map_err(failed())?;
            let text = std::str::from_utf8(&text).map_err(|_| self.problem(key, "is not UTF-8"))?;
            each(text).map_err(|problem| self.problem(key, &problem))?;
        }
        Ok(Some(count))
    }
}

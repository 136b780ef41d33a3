//! Fields of a checkpoint's JSON files. Errors name the file and the field.

use std::{
    io,
    ops::RangeInclusive,
    path::{Path, PathBuf},
};

use moeflux_base::{
    Error, TextFile,
    seam::{json, read_text},
};
use serde_json::{Map, Value};

/// Maximum size of a JSON file in bytes: configs have some KB, with quantization settings up to
/// a MB.
const MAX_FILE: u64 = 16 << 20;

/// Maximum characters of a wrong value in an error.
const MAX_SHOWN: usize = 60;

/// The start of a wrong value, for an error.
pub(super) fn shown(value: &str) -> String {
    value.chars().take(MAX_SHOWN).collect()
}

/// A JSON object of a file.
pub(super) struct JsonFile {
    path: PathBuf,
    root: Map<String, Value>,
}

impl JsonFile {
    /// Contents of a file of a folder; `None` if there is no such file.
    pub(super) fn read(folder: &Path, name: &str) -> Result<Option<Self>, Error> {
        let path = folder.join(name);
        let text = match read_text(&path, MAX_FILE) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            text => text.map_err(Error::file(&path, "cannot read this file of the model"))?,
        };
        Self::parse(&TextFile { bytes: text.as_bytes(), path }).map(Some)
    }

    pub(super) fn parse(file: &TextFile<'_>) -> Result<Self, Error> {
        let path = file.path.clone();
        match json::parse(file.bytes) {
            Ok(root) => Ok(Self { path, root }),
            Err(e) => Err(Error::Checkpoint { path, problem: json::problem(&e) }),
        }
    }

    /// A file without fields, so that all have their defaults.
    pub(super) fn empty() -> Self {
        Self { path: PathBuf::new(), root: Map::new() }
    }

    /// Fields of the object `nested`, then of the file itself.
    pub(super) fn fields(&self, nested: &[&str]) -> Fields<'_> {
        let inner = nested.iter().filter_map(|name| self.root.get(*name)?.as_object());
        Fields { path: &self.path, objects: inner.chain([&self.root]).collect() }
    }
}

/// Fields of one or more objects of a file, of which the first that has a field wins.
pub(super) struct Fields<'a> {
    path: &'a Path,
    objects: Vec<&'a Map<String, Value>>,
}

impl Fields<'_> {
    /// Error about a field whose value is none that the model's publisher would give.
    pub(super) fn problem(&self, name: &str, problem: &str) -> Error {
        self.refusal(name, problem, "take this file from the model's publisher")
    }

    /// Error about a field, with its remedy.
    pub(super) fn refusal(&self, name: &str, problem: &str, remedy: &str) -> Error {
        let problem = format!("{name}: {problem}; {remedy}");
        Error::Checkpoint { path: self.path.to_path_buf(), problem }
    }

    /// Value of a field; `None` if it is missing or null. A dot leads into an object.
    fn get(&self, name: &str) -> Option<&Value> {
        let (object, field) = name.split_once('.').unwrap_or(("", name));
        self.objects.iter().find_map(|map| {
            let map = if object.is_empty() { map } else { map.get(object)?.as_object()? };
            map.get(field).filter(|value| !value.is_null())
        })
    }

    fn read<T>(
        &self,
        name: &str,
        expected: &str,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Result<Option<T>, Error> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let wrong = || {
            self.problem(name, &format!("expected {expected}, got {}", shown(&value.to_string())))
        };
        read(value).ok_or_else(wrong).map(Some)
    }

    /// A whole number within a range.
    pub(super) fn whole(
        &self,
        name: &str,
        range: RangeInclusive<u64>,
    ) -> Result<Option<u64>, Error> {
        let expected = format!("a whole number from {} to {}", range.start(), range.end());
        self.read(name, &expected, |value| value.as_u64().filter(|number| range.contains(number)))
    }

    /// A positive number that is finite as f32.
    pub(super) fn positive(&self, name: &str) -> Result<Option<f64>, Error> {
        let is_positive = |number: &f64| *number as f32 > 0.0 && (*number as f32).is_finite();
        self.read(name, "a positive number", |value| value.as_f64().filter(is_positive))
    }

    /// `true` or `false`.
    pub(super) fn flag(&self, name: &str) -> Result<Option<bool>, Error> {
        self.read(name, "true or false", Value::as_bool)
    }

    /// A text.
    pub(super) fn text(&self, name: &str) -> Result<Option<String>, Error> {
        self.read(name, "a text", |value| value.as_str().map(str::to_owned))
    }

    /// Three numbers, finite as f32: one for each channel.
    pub(super) fn channels(&self, name: &str) -> Result<Option<[f32; 3]>, Error> {
        let number = |value: &Value| Some(value.as_f64()? as f32).filter(|n| n.is_finite());
        let numbers = |value: &Value| {
            let numbers: Option<Vec<f32>> = value.as_array()?.iter().map(number).collect();
            numbers?.try_into().ok()
        };
        self.read(name, "a list of three finite numbers", numbers)
    }

    /// Refuses a field that would change the computation: any value but `implemented`.
    pub(super) fn refuse_unless(&self, name: &str, implemented: Value) -> Result<(), Error> {
        let expected = format!("{implemented}, which alone is implemented");
        self.read(name, &expected, |value| (*value == implemented).then_some(()))?;
        Ok(())
    }
}

//! Writer of GGUF files.

use std::{ops::ControlFlow, path::Path};

use moeflux_base::Error;
use moeflux_model::seam::{KeyValue, type_number};

use super::{
    super::{
        checkpoint_writer::{Summary, write_file},
        options::Options,
    },
    plan::{GgufPlan, plan_gguf},
    recipe::GgufRecipe,
};

#[cfg(test)]
use {
    super::super::{module::SynthTensor, values::TensorValues},
    moeflux_model::seam::KeyList,
};

/// Name of the file.
const FILE: &str = "model.gguf";
/// Alignment of tensors: the default of GGUF.
const ALIGNMENT: u64 = 32;
const VERSION: u32 = 3;

/// Kinds of values.
const U32: u32 = 4;
const I32: u32 = 5;
const F32: u32 = 6;
const BOOL: u32 = 7;
const TEXT: u32 = 8;
const ARRAY: u32 = 9;
const U64: u32 = 10;

/// Writes the model of `options` as `model.gguf` into the folder `out`, which is created if needed
/// and must be empty. See [`write`](super::super::write()) for `progress` and failures.
///
/// # Errors
/// As [`write`](super::super::write()); or GGUF files of the architecture are not written.
pub fn write_gguf(
    options: &Options,
    recipe: GgufRecipe,
    out: &Path,
    mut progress: impl FnMut(u64, u64) -> ControlFlow<()>,
) -> Result<Summary, Error> {
    let plan = plan_gguf(options, recipe)?;
    let header = plan.header();
    write_file(FILE, &header, &plan.tensors, ALIGNMENT, out, &mut progress)
}

/// Growing bytes of a header.
struct HeaderBytes(Vec<u8>);

impl HeaderBytes {
    fn u32(&mut self, n: u32) {
        self.0.extend(n.to_le_bytes());
    }

    fn u64(&mut self, n: u64) {
        self.0.extend(n.to_le_bytes());
    }

    fn text(&mut self, text: &str) {
        self.u64(text.len() as u64);
        self.0.extend(text.as_bytes());
    }

    fn array<T>(&mut self, kind: u32, elements: &[T], mut each: impl FnMut(&mut Self, &T)) {
        self.u32(ARRAY);
        self.u32(kind);
        self.u64(elements.len() as u64);
        elements.iter().for_each(|element| each(self, element));
    }

    /// A value after its kind.
    fn value(&mut self, value: &KeyValue) {
        match value {
            KeyValue::U32(n) => {
                self.u32(U32);
                self.u32(*n);
            }
            KeyValue::F32(x) => {
                self.u32(F32);
                self.u32(x.to_bits());
            }
            KeyValue::Bool(flag) => {
                self.u32(BOOL);
                self.0.push(u8::from(*flag));
            }
            KeyValue::Text(text) => {
                self.u32(TEXT);
                self.text(text);
            }
            KeyValue::Texts(texts) => self.array(TEXT, texts, |bytes, text| bytes.text(text)),
            KeyValue::I32s(numbers) => {
                self.array(I32, numbers, |bytes, n| bytes.u32(n.cast_unsigned()));
            }
            KeyValue::U64s(numbers) => self.array(U64, numbers, |bytes, n| bytes.u64(*n)),
            KeyValue::F32s(numbers) => {
                self.array(F32, numbers, |bytes, x| bytes.u32(x.to_bits()));
            }
            KeyValue::Bools(flags) => {
                self.array(BOOL, flags, |bytes, flag| bytes.0.push(u8::from(*flag)));
            }
        }
    }
}

impl GgufPlan {
    /// The plans of the parts of a split model.
    #[cfg(test)]
    pub(crate) fn split(&self, count: usize) -> Vec<Self> {
        let tensors = self.tensors.chunks(self.tensors.len().div_ceil(count));
        let part = |(i, tensors): (usize, &[SynthTensor])| {
            let mut keys = if i == 0 { self.keys.clone() } else { KeyList::default() };
            for (key, n) in [
                ("split.no", i),
                ("split.count", count),
                ("split.tensors.count", self.tensors.len()),
            ] {
                keys.push(key, KeyValue::U32(n as u32));
            }
            Self { tensors: tensors.to_vec(), keys }
        };
        tensors.enumerate().map(part).collect()
    }

    /// Bytes of the file.
    #[cfg(test)]
    pub(crate) fn file_bytes(&self) -> u64 {
        let padded = |tensor: &SynthTensor| tensor.bytes.next_multiple_of(ALIGNMENT);
        self.header().len() as u64 + self.tensors.iter().map(padded).sum::<u64>()
    }

    /// The header, and tensors that are no random weights, with their places in the file.
    #[cfg(test)]
    pub(crate) fn fixed_parts(&self) -> Vec<(u64, Vec<u8>)> {
        let header = self.header();
        let mut place = header.len() as u64;
        let mut parts = vec![(0, header)];
        for tensor in &self.tensors {
            if let TensorValues::Numbers(_) = &tensor.values {
                let mut bytes = vec![0; tensor.bytes as usize];
                tensor.values.fill(tensor.stream, 0, &mut bytes);
                parts.push((place, bytes));
            }
            place += tensor.bytes.next_multiple_of(ALIGNMENT);
        }
        parts
    }

    /// All bytes before the first tensor.
    pub(crate) fn header(&self) -> Vec<u8> {
        let mut bytes = HeaderBytes(b"GGUF".to_vec());
        bytes.u32(VERSION);
        bytes.u64(self.tensors.len() as u64);
        bytes.u64(self.keys.0.len() as u64);
        for (key, value) in &self.keys.0 {
            bytes.text(key);
            bytes.value(value);
        }
        let mut offset = 0u64;
        for tensor in &self.tensors {
            bytes.text(&tensor.name);
            bytes.u32(tensor.shape.len() as u32);
            tensor.shape.iter().rev().for_each(|dim| bytes.u64(*dim));
            // Every type that a recipe gives has a number.
            bytes.u32(type_number(tensor.dtype).unwrap_or(u32::MAX));
            bytes.u64(offset);
            offset += tensor.bytes.next_multiple_of(ALIGNMENT);
        }
        let mut header = bytes.0;
        header.resize(header.len().next_multiple_of(ALIGNMENT as usize), 0);
        header
    }
}

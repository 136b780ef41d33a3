//! Reader of the tensor index of a safetensors file.
//!
//! Files are untrusted. The header's length is checked against the file. The bytes of each tensor
//! are checked against its shape, the end of the file and the other tensors.

use std::{
    fmt,
    io::{BufReader, Read},
    path::Path,
};

use moeflux_base::Error;
use moeflux_ops::BlockType;
use serde::{
    Deserialize, Deserializer,
    de::{DeserializeSeed, Error as _, IgnoredAny, MapAccess, Visitor},
};

use super::{data_file::DataFile, foreign, location::TensorInfo};

/// Maximum header size in bytes; the largest published ones have 20 MB.
const MAX_HEADER: u64 = 64 << 20;

/// Index entry of a tensor, as written in the header.
#[derive(Deserialize)]
struct IndexEntry {
    dtype: Option<String>,
    shape: Option<Vec<u64>>,
    data_offsets: Option<(u64, u64)>,
}

/// Bits per element of a type; `None` for unknown types.
fn bits(dtype: &str) -> Option<u64> {
    Some(match dtype {
        "F4" => 4,
        "BOOL" | "U8" | "I8" | "F8_E4M3" | "F8_E5M2" | "F8_E8M0" => 8,
        "U16" | "I16" | "F16" | "BF16" => 16,
        "U32" | "I32" | "F32" => 32,
        "U64" | "I64" | "F64" => 64,
        _ => return None,
    })
}

/// Advice in errors about a header that is not as it was written.
const DAMAGED: &str = "; the file is not as it was written: compare its size and SHA-256 with the \
                       published ones";

/// Size of a tensor in bytes; `None` for an unknown type or on overflow.
pub(super) fn size(dtype: &str, shape: &[usize]) -> Option<u64> {
    let count = shape.iter().try_fold(1u64, |n, d| n.checked_mul(*d as u64))?;
    // Packed copies of GGUF files have their blocks.
    if let Some(kind) = BlockType::from_type_name(dtype) {
        let weights = kind.block_weights() as u64;
        let blocks = count.is_multiple_of(weights).then_some(count / weights)?;
        return blocks.checked_mul(kind.block_bytes() as u64);
    }
    count.checked_mul(bits(dtype)?).map(|n| n / 8)
}

/// Reads the index of one file, which becomes file `index` of the checkpoint: names and locations.
///
/// # Errors
/// The file cannot be read, is cut short, or its header contradicts itself or the file.
pub(super) fn read_index(file: &DataFile, index: u32) -> Result<Vec<(String, TensorInfo)>, Error> {
    let path = file.path();
    let bad = |problem: String| Error::Checkpoint { path: path.to_owned(), problem };
    let short = "; the file is short, or it is none: download it again";
    let read = |buf: &mut [u8], offset| {
        file.read_exact_at(buf, offset)
            .map_err(Error::file(path, "cannot read the header of the tensors"))
    };
    let len = file.len();
    if len < 8 {
        return Err(bad(format!("{len} bytes are not a safetensors file{short}")));
    }
    let mut start = vec![0; len.min(64) as usize];
    read(&mut start, 0)?;
    if let Some(problem) = foreign::stand_in(&start) {
        return Err(bad(problem));
    }
    let mut prefix = [0; 8];
    read(&mut prefix, 0)?;
    let header = u64::from_le_bytes(prefix);
    if header > MAX_HEADER || header > len - 8 {
        return Err(bad(format!("the header claims {header} bytes in a file of {len}{short}")));
    }
    let mut entries = EntryVisitor {
        path,
        data: 8 + header,
        len,
        file: index,
        tensors: Vec::new(),
        problem: None,
    };
    let json = BufReader::with_capacity(64 << 10, file.reader_at(8).take(header));
    let mut json = serde_json::Deserializer::from_reader(json);
    let parsed = (&mut entries).deserialize(&mut json).and_then(|()| json.end());
    let EntryVisitor { mut tensors, problem, .. } = entries;
    if let Some(problem) = problem {
        return Err(problem);
    }
    parsed.map_err(|e| {
        bad(format!("the header is not the JSON of a safetensors file: {e}{DAMAGED}"))
    })?;
    tensors.sort_by_key(|(_, t)| (t.offset, t.bytes));
    for pair in tensors.windows(2) {
        let [(a, first), (b, second)] = pair else { continue };
        if first.offset + first.bytes > second.offset {
            return Err(bad(format!("the tensors {a} and {b} overlap{DAMAGED}")));
        }
    }
    let end = tensors.last().map_or(8 + header, |(_, last)| last.offset + last.bytes);
    match foreign::joined(file, end) {
        Some(problem) => Err(bad(problem)),
        None => Ok(tensors),
    }
}

/// Entries of a header. Each becomes a location as it is read.
struct EntryVisitor<'a> {
    path: &'a Path,
    /// Start of the tensor data.
    data: u64,
    /// Bytes of the file.
    len: u64,
    file: u32,
    tensors: Vec<(String, TensorInfo)>,
    /// The first entry that does not fit the file.
    problem: Option<Error>,
}

impl EntryVisitor<'_> {
    fn check(&self, name: &str, entry: Option<IndexEntry>) -> Result<TensorInfo, Error> {
        let entry = entry.ok_or_else(|| Error::Checkpoint {
            path: self.path.to_owned(),
            problem: format!("the header has no entry for the tensor {name}{DAMAGED}"),
        })?;
        let info = check_entry(name, entry, self.path, self.data, self.len)?;
        Ok(TensorInfo { file: self.file, ..info })
    }
}

impl<'de> DeserializeSeed<'de> for &mut EntryVisitor<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<(), D::Error> {
        json.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for &mut EntryVisitor<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an entry for each tensor")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(name) = map.next_key::<String>()? {
            // MLX writes a null if there is no metadata.
            if name == "__metadata__" {
                map.next_value::<IgnoredAny>()?;
                continue;
            }
            match self.check(&name, map.next_value()?) {
                Ok(info) => self.tensors.push((name, info)),
                Err(problem) => {
                    self.problem = Some(problem);
                    return Err(A::Error::custom("an entry that does not fit the file"));
                }
            }
        }
        Ok(())
    }
}

/// Checks an index entry of a file of `len` bytes, whose tensor data start at `data`.
fn check_entry(
    name: &str,
    entry: IndexEntry,
    path: &Path,
    data: u64,
    len: u64,
) -> Result<TensorInfo, Error> {
    let bad =
        |problem: String| Error::Tensor { tensor: name.to_owned(), path: path.to_owned(), problem };
    let (Some(dtype), Some(shape), Some((from, to))) =
        (entry.dtype, entry.shape, entry.data_offsets)
    else {
        return Err(bad(
            "the header gives no dtype, shape or data_offsets: the file is damaged".into()
        ));
    };
    let shape: Vec<usize> = shape
        .iter()
        .map(|n| usize::try_from(*n).ok())
        .collect::<Option<_>>()
        .ok_or_else(|| bad("a dimension is too large to address".into()))?;
    let Some(bytes) = to.checked_sub(from) else {
        return Err(bad(format!(
            "it ends at {to}, before it begins at {from}: the file is damaged"
        )));
    };
    let end = data
        .checked_add(to)
        .ok_or_else(|| bad(format!("its end at {to} overflows: the file is damaged")))?;
    if end > len {
        return Err(bad(format!(
            "it ends at byte {end} of a file of {len}: the file is truncated, download it again"
        )));
    }
    if bits(&dtype).is_some() && size(&dtype, &shape) != Some(bytes) {
        return Err(bad(format!(
            "{bytes} bytes do not hold {dtype} of shape {shape:?}: the file is damaged"
        )));
    }
    Ok(TensorInfo { file: 0, offset: data + from, bytes, dtype, shape })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Map, json};

    use super::*;

    fn file(header: &str, data: usize) -> DataFile {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.resize(bytes.len() + data, 0);
        DataFile::embedded("model.safetensors", bytes.leak())
    }

    proptest! {
        /// Contiguous tensors are located correctly.
        #[test]
        fn a_valid_index_is_read(lengths in prop::collection::vec(0usize..40, 0..12)) {
            let (mut header, mut offset) = (Map::new(), 0);
            for (i, n) in lengths.iter().enumerate() {
                let offsets = [offset, offset + 2 * n];
                header.insert(
                    format!("t{i}"),
                    json!({"dtype": "F16", "shape": [n], "data_offsets": offsets}),
                );
                offset += 2 * n;
            }
            let header = serde_json::Value::Object(header).to_string();
            let tensors = read_index(&file(&header, offset), 7).unwrap();
            prop_assert_eq!(tensors.len(), lengths.len());
            for (name, t) in tensors {
                let i: usize = name[1..].parse().unwrap();
                let before: usize = lengths[..i].iter().sum();
                prop_assert_eq!(t.offset, (8 + header.len() + 2 * before) as u64);
                prop_assert_eq!((t.file, t.bytes, t.shape), (7, 2 * lengths[i] as u64, vec![lengths[i]]));
            }
        }

        /// For any header: accepted tensors are within the file, fit their shape, and do not
        /// overlap.
        #[test]
        fn accepted_tensors_are_consistent(
            claims in prop::collection::vec(
                (prop::collection::vec(prop_oneof![0u64..9, any::<u64>()], 0..3),
                 prop_oneof![0u64..60, any::<u64>()], prop_oneof![0u64..60, any::<u64>()]),
                1..5),
        ) {
            let entry = |(i, (shape, from, to)): (usize, &(Vec<u64>, u64, u64))| {
                (format!("t{i}"), json!({"dtype": "U8", "shape": shape, "data_offsets": [from, to]}))
            };
            let header: Map<_, _> = claims.iter().enumerate().map(entry).collect();
            let file = file(&serde_json::Value::Object(header).to_string(), 50);
            if let Ok(tensors) = read_index(&file, 0) {
                let mut end = 0;
                for (name, t) in tensors {
                    prop_assert!(t.offset >= end && t.offset + t.bytes <= file.len(), "{}", name);
                    prop_assert_eq!(t.shape.iter().product::<usize>() as u64, t.bytes);
                    end = t.offset + t.bytes;
                }
            }
        }
    }
}

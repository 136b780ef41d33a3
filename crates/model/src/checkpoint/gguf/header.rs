//! Reader of the header of a GGUF file: metadata and the index of tensors.
//!
//! Files are untrusted. Every count and length is checked against the rest of the file before
//! anything is allocated. Values stay in the file: the header of a model has megabytes of tokens.

use std::{
    collections::{BTreeMap, HashSet},
    fmt,
};

use moeflux_base::Error;

use super::{
    super::{data_file::DataFile, foreign},
    metadata::{Metadata, Value},
    types::TensorType,
};
use crate::checkpoint::location::TensorInfo;

/// Start of a GGUF file.
pub(super) const MAGIC: &[u8; 4] = b"GGUF";
/// Bytes read at a time.
const BLOCK: usize = 64 << 10;
/// Maximum bytes of a key, as the specification says.
const MAX_KEY: u64 = (1 << 16) - 1;
/// Maximum bytes of a tensor's name; llama.cpp has 64.
const MAX_NAME: u64 = 1 << 16;
/// Maximum depth of arrays in arrays.
const MAX_DEPTH: usize = 8;
/// Maximum dimensions of a tensor.
const MAX_DIMS: u32 = 4;
/// Alignment of tensors without `general.alignment`.
const ALIGNMENT: u64 = 32;
/// Bytes of the shortest pair of key and value, and of the shortest entry of the tensor index.
const LEAST_PAIR: u64 = 8 + 1 + 4 + 1;
const LEAST_ENTRY: u64 = 8 + 4 + 4 + 8;

/// Largest size of a file in bytes.
const LARGEST: u64 = i64::MAX as u64;

/// Advice in errors about files with wrong numbers.
const DAMAGED: &str = "the file is damaged: download it again";
/// Advice in errors about files that end early.
const SHORT: &str = "the file is short or damaged: download it again";

/// Header of one file.
pub(super) struct Header {
    pub(super) metadata: Metadata,
    /// Name and location of each tensor, in the order of the index.
    pub(super) tensors: Vec<(String, TensorInfo)>,
}

/// Entry of the tensor index.
struct GgufEntry {
    name: String,
    kind: TensorType,
    /// Dimensions, outermost first, without outermost ones of 1.
    shape: Vec<usize>,
    bytes: u64,
    /// Offset from the start of the data.
    offset: u64,
}

impl Header {
    /// Reads the header of a file, which becomes file `index` of the checkpoint.
    ///
    /// # Errors
    /// The file cannot be read, is no GGUF of version 2 or 3, is cut short, or contradicts itself.
    pub(super) fn read(file: &DataFile, index: u32) -> Result<Self, Error> {
        let mut reader = HeaderReader { file, at: 0, block: Vec::new(), block_at: 0 };
        reader.version()?;
        let tensors = reader.count("tensors", LEAST_ENTRY)?;
        let keys = reader.count("keys", LEAST_PAIR)?;
        let mut values = BTreeMap::new();
        for _ in 0..keys {
            let (key, value) = reader.pair()?;
            if values.contains_key(&key) {
                return Err(reader.bad(format!("the key {key:?} is there twice")));
            }
            values.insert(key, value);
        }
        let metadata = Metadata::new(file.path(), index, values);
        let entries: Vec<_> = (0..tensors).map(|_| reader.entry()).collect::<Result<_, _>>()?;
        let alignment = alignment(&metadata)?;
        let start = reader.at.next_multiple_of(alignment);
        let place = |entry| reader.place(entry, start, alignment, index);
        let tensors = entries.into_iter().map(place).collect::<Result<Vec<_>, _>>()?;
        reader.check_apart(&tensors)?;
        let ends = tensors.iter().map(|(_, tensor)| tensor.offset + tensor.bytes);
        let end = ends.max().unwrap_or(start).next_multiple_of(alignment);
        match foreign::joined(file, end) {
            Some(problem) => Err(reader.bad(problem)),
            None => Ok(Self { metadata, tensors }),
        }
    }
}

/// A number of a header in errors. Larger ones than any file has bytes say nothing by their digits.
struct ClaimedNumber(u64);

impl fmt::Display for ClaimedNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            n @ ..=LARGEST => write!(f, "{n}"),
            _ => f.write_str("2^63 or more"),
        }
    }
}

/// Value of `general.alignment`.
fn alignment(metadata: &Metadata) -> Result<u64, Error> {
    let key = "general.alignment";
    match metadata.integer(key)? {
        None => Ok(ALIGNMENT),
        Some(n) if n.is_power_of_two() && (8..=1 << 31).contains(&n) => Ok(n),
        Some(n) => Err(metadata.problem(key, &format!("is {n}, not a power of two from 8 on"))),
    }
}

/// Sequential reader of a header.
struct HeaderReader<'a> {
    file: &'a DataFile,
    /// Offset of the next byte.
    at: u64,
    /// Bytes of the file from `block_at` on.
    block: Vec<u8>,
    block_at: u64,
}

impl HeaderReader<'_> {
    fn bad(&self, problem: impl Into<String>) -> Error {
        Error::Checkpoint { path: self.file.path().into(), problem: problem.into() }
    }

    fn bad_tensor(&self, name: &str, problem: impl Into<String>) -> Error {
        let (tensor, path) = (name.to_owned(), self.file.path().into());
        Error::Tensor { tensor, path, problem: problem.into() }
    }

    /// Bytes that follow.
    fn left(&self) -> u64 {
        self.file.len().saturating_sub(self.at)
    }

    /// Checks that `bytes` follow; `what` names their owner.
    fn need(&self, bytes: u64, what: impl fmt::Display) -> Result<(), Error> {
        if bytes <= self.left() {
            return Ok(());
        }
        let bytes = ClaimedNumber(bytes);
        Err(self.beyond(format_args!("{what} at byte {} claims {bytes} bytes", self.at)))
    }

    /// Error about a claim of more than the file has.
    fn beyond(&self, claim: impl fmt::Display) -> Error {
        self.bad(format!("{claim} in a file of {} bytes: {SHORT}", self.file.len()))
    }

    /// The next `n` bytes, at most a block.
    fn take<const N: usize>(&mut self) -> Result<[u8; N], Error> {
        self.need(N as u64, "the header")?;
        let end = self.at + N as u64;
        if self.at < self.block_at || end > self.block_at + self.block.len() as u64 {
            let bytes = self.left().min(BLOCK as u64) as usize;
            self.block.resize(bytes, 0);
            self.block_at = self.at;
            let read = self.file.read_exact_at(&mut self.block, self.at);
            read.map_err(Error::file(self.file.path(), "cannot read the header"))?;
        }
        let from = (self.at - self.block_at) as usize;
        let mut bytes = [0; N];
        bytes.copy_from_slice(&self.block[from..from + N]);
        self.at = end;
        Ok(bytes)
    }

    fn u32(&mut self) -> Result<u32, Error> {
        Ok(u32::from_le_bytes(self.take()?))
    }

    fn u64(&mut self) -> Result<u64, Error> {
        Ok(u64::from_le_bytes(self.take()?))
    }

    /// A number of entries of at least `least` bytes each.
    fn count(&mut self, what: impl fmt::Display, least: u64) -> Result<u64, Error> {
        let (at, count) = (self.at, self.u64()?);
        match count.checked_mul(least).is_some_and(|bytes| bytes <= self.left()) {
            true => Ok(count),
            false => {
                let count = ClaimedNumber(count);
                Err(self.beyond(format_args!("the header at byte {at} claims {count} {what}")))
            }
        }
    }

    /// Magic and version.
    fn version(&mut self) -> Result<(), Error> {
        let mut start = vec![0; self.left().min(64) as usize];
        let read = self.file.read_exact_at(&mut start, 0);
        read.map_err(Error::file(self.file.path(), "cannot read the header"))?;
        if let Some(problem) = foreign::stand_in(&start) {
            return Err(self.bad(problem));
        }
        if start.is_empty() {
            return Err(self.bad(format!("the file is empty: {SHORT}")));
        }
        let older = [b"tjgg", b"lmgg", b"fmgg", b"algg"];
        if older.iter().any(|magic| start.starts_with(*magic)) {
            return Err(self.bad("this is a file of GGML's older formats: take a GGUF file"));
        }
        if !start.starts_with(MAGIC) {
            return Err(self.bad("this is not a GGUF file: it does not begin with GGUF"));
        }
        self.at = 4;
        match self.u32()? {
            2 | 3 => Ok(()),
            version if version & 0xffff == 0 && version != 0 => Err(self.bad(
                "this is a big-endian GGUF file: take the little-endian one, or convert it by \
                 llama.cpp's gguf_convert_endian.py",
            )),
            version => {
                Err(self.bad(format!("this is GGUF of version {version}; read are 2 and 3")))
            }
        }
    }

    /// A string of at most `most` bytes.
    fn string(&mut self, what: &str, most: u64) -> Result<String, Error> {
        let len = self.u64()?;
        self.need(len, what)?;
        if len > most {
            return Err(self.bad(format!("{what} has {len} bytes; at most {most} are read")));
        }
        let mut bytes = vec![0; len as usize];
        let read = self.file.read_exact_at(&mut bytes, self.at);
        read.map_err(Error::file(self.file.path(), "cannot read the header"))?;
        self.at += len;
        String::from_utf8(bytes).map_err(|_| self.bad(format!("{what} is not UTF-8")))
    }

    /// A key and its value.
    fn pair(&mut self) -> Result<(String, Value), Error> {
        let key = self.string("a key of the metadata", MAX_KEY)?;
        if key.is_empty() {
            return Err(self.bad("a key of the metadata is empty"));
        }
        let kind = self.u32()?;
        let value = self.value(&key, kind, 0)?;
        Ok((key, value))
    }

    /// A value of a kind. Strings and arrays are skipped.
    fn value(&mut self, key: &str, kind: u32, depth: usize) -> Result<Value, Error> {
        Ok(match kind {
            0 => Value::Unsigned(self.take::<1>()?[0].into()),
            1 => Value::Signed(i8::from_le_bytes(self.take()?).into()),
            2 => Value::Unsigned(u16::from_le_bytes(self.take()?).into()),
            3 => Value::Signed(i16::from_le_bytes(self.take()?).into()),
            4 => Value::Unsigned(self.u32()?.into()),
            5 => Value::Signed(i32::from_le_bytes(self.take()?).into()),
            6 => Value::F32(f32::from_le_bytes(self.take()?)),
            7 => Value::Bool(self.take::<1>()? != [0]),
            8 => {
                let bytes = self.u64()?;
                self.need(bytes, format_args!("the text {key:?}"))?;
                let at = self.at;
                self.at += bytes;
                Value::Text { at, bytes }
            }
            9 => {
                let (kind, depth) = (self.u32()?, depth + 1);
                let least = element_bytes(kind).unwrap_or(if kind == 9 { 12 } else { 8 });
                let count = self.count(format_args!("elements of {key:?}"), least)?;
                if depth > MAX_DEPTH {
                    return Err(self.bad(format!("{key:?} has arrays in arrays, too deep")));
                }
                let at = self.at;
                match element_bytes(kind) {
                    Some(bytes) => self.at += count * bytes,
                    None => {
                        for _ in 0..count {
                            self.value(key, kind, depth)?;
                        }
                        if !matches!(kind, 8 | 9) {
                            return Err(self.unknown_kind(key, kind));
                        }
                    }
                }
                Value::Array { kind, count, at }
            }
            10 => Value::Unsigned(self.u64()?),
            11 => Value::Signed(i64::from_le_bytes(self.take()?)),
            12 => Value::F64(f64::from_le_bytes(self.take()?)),
            _ => return Err(self.unknown_kind(key, kind)),
        })
    }

    fn unknown_kind(&self, key: &str, kind: u32) -> Error {
        self.bad(format!("the value of {key:?} has the unknown kind {kind}: the file is damaged"))
    }

    /// An entry of the tensor index.
    fn entry(&mut self) -> Result<GgufEntry, Error> {
        let name = self.string("the name of a tensor", MAX_NAME)?;
        let dims = self.u32()?;
        if dims > MAX_DIMS {
            let problem = format!("it has {dims} dimensions; GGUF has at most {MAX_DIMS}");
            return Err(self.bad_tensor(&name, problem));
        }
        let dims: Vec<u64> = (0..dims).map(|_| self.u64()).collect::<Result<_, _>>()?;
        let number = self.u32()?;
        let offset = self.u64()?;
        let kind = TensorType::from_number(number)
            .map_err(|problem| self.bad_tensor(&name, format!("its type {number} {problem}")))?;
        if dims.contains(&0) {
            return Err(self.bad_tensor(&name, "one of its dimensions is 0: the file is damaged"));
        }
        let elements = dims.iter().try_fold(1u64, |n, dim| n.checked_mul(*dim));
        let bytes = elements.and_then(|n| n.div_ceil(kind.weights).checked_mul(kind.bytes));
        // Whether outermost dimensions of one are written means nothing.
        let core = dims.iter().rposition(|dim| *dim != 1).map_or(0, |last| last + 1);
        let shape = dims.iter().take(core).rev().map(|dim| usize::try_from(*dim).ok()).collect();
        let (Some(bytes), Some(shape)) = (bytes.filter(|n| *n <= LARGEST), shape) else {
            let problem = format!("its dimensions exceed any file, of 2^63 bytes: {DAMAGED}");
            return Err(self.bad_tensor(&name, problem));
        };
        let row = dims.first().copied().unwrap_or(1);
        if !row.is_multiple_of(kind.weights) {
            let TensorType { name: kind, weights, .. } = kind;
            let problem = format!("its rows of {row} are not whole blocks of {weights} {kind}");
            return Err(self.bad_tensor(&name, problem));
        }
        Ok(GgufEntry { name, kind, shape, bytes, offset })
    }

    /// Locates a tensor in the data that start at `start`.
    fn place(
        &self,
        entry: GgufEntry,
        start: u64,
        alignment: u64,
        file: u32,
    ) -> Result<(String, TensorInfo), Error> {
        let GgufEntry { name, kind, shape, bytes, offset } = entry;
        if !offset.is_multiple_of(alignment) {
            let offset = ClaimedNumber(offset);
            let problem =
                format!("it starts at byte {offset} of the data, not at a multiple of {alignment}");
            return Err(self.bad_tensor(&name, problem));
        }
        let (from, len) = (start.checked_add(offset), self.file.len());
        let end = from.and_then(|from| Some((from, from.checked_add(bytes)?)));
        let Some((offset, end)) = end.filter(|(_, end)| *end <= LARGEST) else {
            let problem = format!("its place exceeds any file, of 2^63 bytes: {DAMAGED}");
            return Err(self.bad_tensor(&name, problem));
        };
        if end > len {
            let problem = format!("it ends at byte {end}, but the file has {len} bytes: {SHORT}");
            return Err(self.bad_tensor(&name, problem));
        }
        Ok((name, TensorInfo { file, offset, bytes, dtype: kind.name.into(), shape }))
    }

    /// Checks that names differ and tensors do not overlap.
    fn check_apart(&self, tensors: &[(String, TensorInfo)]) -> Result<(), Error> {
        let mut names = HashSet::new();
        if let Some((name, _)) = tensors.iter().find(|(name, _)| !names.insert(name)) {
            return Err(self.bad_tensor(name, "the file has it twice"));
        }
        let mut sorted: Vec<_> = tensors.iter().collect();
        sorted.sort_by_key(|(_, t)| (t.offset, t.bytes));
        for pair in sorted.windows(2) {
            let [(a, first), (b, second)] = pair else { continue };
            if first.offset + first.bytes > second.offset {
                return Err(self.bad(format!(
                    "the tensors {a} and {b} overlap: the file is damaged, download it again"
                )));
            }
        }
        Ok(())
    }
}

/// Bytes of an element of a kind; `None` for strings, arrays and unknown kinds.
pub(super) const fn element_bytes(kind: u32) -> Option<u64> {
    Some(match kind {
        0 | 1 | 7 => 1,
        2 | 3 => 2,
        4..=6 => 4,
        10..=12 => 8,
        _ => return None,
    })
}

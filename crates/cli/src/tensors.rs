//! Files of tensors in the safetensors format: written in place as rows come, read row by row.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{BufReader, Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
};

use anyhow::{Context, bail, ensure};
use half::{bf16, f16};
use serde::{Deserialize, Serialize};

use crate::aside::Aside;

/// The longest header that is read; the format's own limit.
const MAX_HEADER: u64 = 100_000_000;

/// An entry of the header.
#[derive(Debug, Serialize, Deserialize)]
struct Entry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// A tensor that is going to be written: rows of elements of four bytes.
pub(crate) struct Planned {
    pub(crate) name: String,
    /// `F32` or `I32`.
    pub(crate) dtype: &'static str,
    pub(crate) rows: usize,
    pub(crate) width: usize,
}

/// A file that is being written.
pub(crate) struct Writer {
    aside: Aside,
    /// Name to first byte and bytes per row.
    places: BTreeMap<String, (u64, u64)>,
    buffer: Vec<u8>,
}

impl Writer {
    /// Makes the file, so that a folder that cannot be written is found early.
    ///
    /// # Errors
    /// The file cannot be made.
    pub(crate) fn create(target: &Path) -> anyhow::Result<Self> {
        Ok(Self { aside: Aside::create(target)?, places: BTreeMap::new(), buffer: Vec::new() })
    }

    /// Writes the header. The tensors then lie one after another.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn header(&mut self, tensors: &[Planned]) -> anyhow::Result<()> {
        let mut entries = serde_json::Map::new();
        let mut end = 0;
        for t in tensors {
            let row = t.width as u64 * 4;
            let from = end;
            end += t.rows as u64 * row;
            self.places.insert(t.name.clone(), (from, row));
            let shape = vec![t.rows as u64, t.width as u64];
            let entry = Entry { dtype: t.dtype.into(), shape, data_offsets: (from, end) };
            entries.insert(t.name.clone(), serde_json::to_value(entry)?);
        }
        let mut header = serde_json::to_vec(&entries)?;
        // Padded, so that the data is aligned.
        header.resize(header.len().next_multiple_of(8), b' ');
        let data = 8 + header.len() as u64;
        self.places.values_mut().for_each(|(from, _)| *from += data);
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header);
        self.aside.file.write_all(&bytes).with_context(|| self.aside.failed())
    }

    /// Writes rows of a tensor from row `first` on.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn rows(
        &mut self,
        name: &str,
        first: usize,
        words: impl Iterator<Item = [u8; 4]>,
    ) -> anyhow::Result<()> {
        let (from, row) =
            *self.places.get(name).with_context(|| format!("{name} was not planned"))?;
        self.buffer.clear();
        self.buffer.extend(words.flatten());
        let mut write = || {
            self.aside.file.seek(SeekFrom::Start(from + first as u64 * row))?;
            self.aside.file.write_all(&self.buffer)
        };
        write().with_context(|| self.aside.failed())
    }

    /// Where the bytes are now.
    pub(crate) fn path(&self) -> &Path {
        self.aside.path()
    }

    /// Gives the file its name.
    ///
    /// # Errors
    /// The file cannot be written or renamed.
    pub(crate) fn finish(self) -> anyhow::Result<()> {
        self.aside.finish()
    }
}

/// Element types that are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Element {
    F32,
    F16,
    BF16,
    I32,
    U32,
    I64,
}

impl Element {
    fn by_name(name: &str) -> Option<Self> {
        Some(match name {
            "F32" => Element::F32,
            "F16" => Element::F16,
            "BF16" => Element::BF16,
            "I32" => Element::I32,
            "U32" => Element::U32,
            "I64" => Element::I64,
            _ => return None,
        })
    }

    const fn bytes(self) -> u64 {
        match self {
            Element::F16 | Element::BF16 => 2,
            Element::F32 | Element::I32 | Element::U32 => 4,
            Element::I64 => 8,
        }
    }

    pub(crate) const fn is_float(self) -> bool {
        matches!(self, Element::F32 | Element::F16 | Element::BF16)
    }
}

/// A tensor in a file: rows of one width.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tensor {
    pub(crate) element: Element,
    pub(crate) rows: usize,
    pub(crate) width: usize,
    from: u64,
}

/// A file that was opened to be read.
pub(crate) struct TensorFile {
    path: PathBuf,
    pub(crate) tensors: BTreeMap<String, Tensor>,
}

impl TensorFile {
    /// Reads the header. Tensors of other types or with more than two dimensions (leading ones do not count) are
    /// left out.
    ///
    /// # Errors
    /// The file cannot be read or is not in the format.
    pub(crate) fn open(path: &Path) -> anyhow::Result<Self> {
        let mut file =
            File::open(path).with_context(|| format!("{}: cannot be opened", path.display()))?;
        let tensors = read_header(&mut file)
            .with_context(|| format!("{}: this is not a whole safetensors file", path.display()))?;
        Ok(Self { path: path.into(), tensors })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The rows of a tensor, first to last.
    ///
    /// # Errors
    /// There is no such tensor, or the file cannot be read.
    pub(crate) fn rows(&self, name: &str) -> anyhow::Result<Rows> {
        let tensor = *self.tensors.get(name).with_context(|| format!("{name}: no such tensor"))?;
        let open = || {
            let mut file = File::open(&self.path)?;
            file.seek(SeekFrom::Start(tensor.from))?;
            Ok::<_, std::io::Error>(BufReader::with_capacity(1 << 18, file))
        };
        let file = open().with_context(|| format!("{}: cannot be read", self.path.display()))?;
        let bytes = vec![0; tensor.width * tensor.element.bytes() as usize];
        Ok(Rows { file, tensor, bytes, path: self.path.clone() })
    }
}

/// Reads a tensor row by row.
pub(crate) struct Rows {
    file: BufReader<File>,
    tensor: Tensor,
    bytes: Vec<u8>,
    path: PathBuf,
}

impl Rows {
    /// The next row of numbers, widened exactly.
    ///
    /// # Errors
    /// The file cannot be read.
    pub(crate) fn floats(&mut self, into: &mut Vec<f32>) -> anyhow::Result<()> {
        self.next()?;
        into.clear();
        match self.tensor.element {
            Element::F16 => into.extend(words(&self.bytes).map(|b| f16::from_le_bytes(b).to_f32())),
            Element::BF16 => {
                into.extend(words(&self.bytes).map(|b| bf16::from_le_bytes(b).to_f32()))
            }
            _ => into.extend(words(&self.bytes).map(f32::from_le_bytes)),
        }
        Ok(())
    }

    /// The next row of ids.
    ///
    /// # Errors
    /// The file cannot be read.
    pub(crate) fn ids(&mut self, into: &mut Vec<i64>) -> anyhow::Result<()> {
        self.next()?;
        into.clear();
        match self.tensor.element {
            Element::I64 => into.extend(words(&self.bytes).map(i64::from_le_bytes)),
            Element::U32 => {
                into.extend(words(&self.bytes).map(|b| i64::from(u32::from_le_bytes(b))))
            }
            _ => into.extend(words(&self.bytes).map(|b| i64::from(i32::from_le_bytes(b)))),
        }
        Ok(())
    }

    fn next(&mut self) -> anyhow::Result<()> {
        self.file
            .read_exact(&mut self.bytes)
            .with_context(|| format!("{}: cannot be read", self.path.display()))
    }
}

fn words<const N: usize>(bytes: &[u8]) -> impl Iterator<Item = [u8; N]> {
    bytes.as_chunks::<N>().0.iter().copied()
}

fn read_header(file: &mut File) -> anyhow::Result<BTreeMap<String, Tensor>> {
    let len = file.metadata()?.len();
    let mut size = [0; 8];
    file.read_exact(&mut size)?;
    let size = u64::from_le_bytes(size);
    ensure!(
        size <= MAX_HEADER && size.saturating_add(8) <= len,
        "its header is longer than the file"
    );
    let mut header = vec![0; size as usize];
    file.read_exact(&mut header)?;
    let entries: serde_json::Map<String, serde_json::Value> = serde_json::from_slice(&header)?;
    let mut tensors = BTreeMap::new();
    for (name, entry) in entries.into_iter().filter(|(name, _)| name != "__metadata__") {
        let entry: Entry =
            serde_json::from_value(entry).with_context(|| format!("tensor {name}"))?;
        if let Some(tensor) =
            place(&entry, 8 + size, len).with_context(|| format!("tensor {name}"))?
        {
            tensors.insert(name, tensor);
        }
    }
    Ok(tensors)
}

fn place(entry: &Entry, data: u64, len: u64) -> anyhow::Result<Option<Tensor>> {
    let Some(element) = Element::by_name(&entry.dtype) else { return Ok(None) };
    let leading = entry.shape.len().saturating_sub(2);
    let (ones, shape) = entry.shape.split_at(leading);
    let (rows, width) = match shape {
        [rows, width] => (*rows, *width),
        [width] => (1, *width),
        _ => return Ok(None),
    };
    if ones.iter().any(|n| *n != 1) {
        return Ok(None);
    }
    let bytes = rows.checked_mul(width).and_then(|n| n.checked_mul(element.bytes()));
    let (from, to) = entry.data_offsets;
    // A tensor without rows may claim any width; rows are read into a buffer of that size.
    let row_fits = width.checked_mul(element.bytes()).is_some_and(|row| row <= len);
    if !row_fits
        || to.checked_sub(from) != bytes
        || data.checked_add(to).is_none_or(|end| end > len)
    {
        bail!("its place {from}..{to} does not fit its shape or the file");
    }
    Ok(Some(Tensor {
        element,
        rows: usize::try_from(rows)?,
        width: usize::try_from(width)?,
        from: data + from,
    }))
}

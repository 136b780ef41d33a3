//! Safetensors files, read row by row: logits of long prompts need not fit in memory.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{BufReader, Read, Seek, SeekFrom},
    path::{Path, PathBuf},
};

use anyhow::{Context, bail, ensure};
use half::{bf16, f16};
use safetensors::{Dtype, tensor::Metadata};

/// Longest header that the format allows.
const MAX_HEADER: u64 = 100_000_000;

/// Bytes before the header: its length, little-endian.
const LENGTH_BYTES: u64 = 8;

/// Element types that can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ElementType {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// Upper half of an f32.
    BF16,
    /// Signed 32-bit integer.
    I32,
    /// Unsigned 32-bit integer.
    U32,
    /// Signed 64-bit integer.
    I64,
}

impl ElementType {
    fn from_dtype(dtype: Dtype) -> Option<Self> {
        Some(match dtype {
            Dtype::F32 => ElementType::F32,
            Dtype::F16 => ElementType::F16,
            Dtype::BF16 => ElementType::BF16,
            Dtype::I32 => ElementType::I32,
            Dtype::U32 => ElementType::U32,
            Dtype::I64 => ElementType::I64,
            _ => return None,
        })
    }

    const fn bytes(self) -> usize {
        match self {
            ElementType::F16 | ElementType::BF16 => 2,
            ElementType::F32 | ElementType::I32 | ElementType::U32 => 4,
            ElementType::I64 => 8,
        }
    }

    pub(crate) const fn is_float(self) -> bool {
        matches!(self, ElementType::F32 | ElementType::F16 | ElementType::BF16)
    }
}

/// A 2-D tensor of a file.
#[derive(Clone, Copy, Debug)]
pub struct TensorEntry {
    pub(crate) element: ElementType,
    pub(crate) rows: usize,
    pub(crate) width: usize,
    /// Offset of the first byte in the file.
    offset: u64,
}

/// An open safetensors file.
#[derive(Debug)]
pub struct TensorFile {
    path: PathBuf,
    pub(crate) tensors: BTreeMap<String, TensorEntry>,
}

impl TensorFile {
    /// Reads the header. Tensors of other element types, or with more than two dimensions other
    /// than leading ones of 1, are skipped.
    ///
    /// # Errors
    /// The file cannot be read or is not in the format.
    pub fn open(path: &Path) -> anyhow::Result<Self> {
        let mut file =
            File::open(path).with_context(|| format!("{}: cannot be opened", path.display()))?;
        let tensors = read_header(&mut file)
            .with_context(|| format!("{}: this is not a whole safetensors file", path.display()))?;
        Ok(Self { path: path.into(), tensors })
    }

    /// Path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Iterates over the rows of a tensor.
    pub(crate) fn rows(&self, name: &str) -> anyhow::Result<TensorRows> {
        let tensor = *self.tensors.get(name).with_context(|| format!("{name}: no such tensor"))?;
        let open = || {
            let mut file = File::open(&self.path)?;
            file.seek(SeekFrom::Start(tensor.offset))?;
            Ok::<_, std::io::Error>(BufReader::with_capacity(1 << 18, file))
        };
        let file = open().with_context(|| format!("{}: cannot be read", self.path.display()))?;
        let bytes = vec![0; tensor.width * tensor.element.bytes()];
        Ok(TensorRows { file, tensor, bytes, path: self.path.clone() })
    }
}

/// Reader of the rows of a tensor, in order.
pub(crate) struct TensorRows {
    file: BufReader<File>,
    tensor: TensorEntry,
    bytes: Vec<u8>,
    path: PathBuf,
}

impl TensorRows {
    /// Reads the next row of floats, widened to f32 without loss.
    pub(crate) fn floats(&mut self, row: &mut Vec<f32>) -> anyhow::Result<()> {
        self.read()?;
        row.clear();
        match self.tensor.element {
            ElementType::F16 => {
                row.extend(words(&self.bytes).map(|b| f16::from_le_bytes(b).to_f32()));
            }
            ElementType::BF16 => {
                row.extend(words(&self.bytes).map(|b| bf16::from_le_bytes(b).to_f32()));
            }
            _ => row.extend(words(&self.bytes).map(f32::from_le_bytes)),
        }
        Ok(())
    }

    /// Reads the next row of integers.
    pub(crate) fn ids(&mut self, row: &mut Vec<i64>) -> anyhow::Result<()> {
        self.read()?;
        row.clear();
        match self.tensor.element {
            ElementType::I64 => row.extend(words(&self.bytes).map(i64::from_le_bytes)),
            ElementType::U32 => {
                row.extend(words(&self.bytes).map(|b| i64::from(u32::from_le_bytes(b))));
            }
            _ => row.extend(words(&self.bytes).map(|b| i64::from(i32::from_le_bytes(b)))),
        }
        Ok(())
    }

    fn read(&mut self) -> anyhow::Result<()> {
        self.file
            .read_exact(&mut self.bytes)
            .with_context(|| format!("{}: cannot be read", self.path.display()))
    }
}

fn words<const N: usize>(bytes: &[u8]) -> impl Iterator<Item = [u8; N]> {
    bytes.as_chunks::<N>().0.iter().copied()
}

/// Reads and validates the header alone. `SafeTensors::read_metadata` wants the whole file in
/// memory.
fn read_header(file: &mut File) -> anyhow::Result<BTreeMap<String, TensorEntry>> {
    let len = file.metadata()?.len();
    let mut size = [0; LENGTH_BYTES as usize];
    file.read_exact(&mut size)?;
    let size = u64::from_le_bytes(size);
    ensure!(
        size <= MAX_HEADER && size.saturating_add(LENGTH_BYTES) <= len,
        "its header is longer than the file"
    );
    let mut header = vec![0; size as usize];
    file.read_exact(&mut header)?;
    // Checks that offsets match shapes and that tensors are contiguous.
    let metadata: Metadata = serde_json::from_slice(&header)?;
    let data = LENGTH_BYTES + size;
    if data.checked_add(metadata.data_len() as u64) != Some(len) {
        bail!("its tensors do not fill the file");
    }
    let mut tensors = BTreeMap::new();
    for (name, info) in metadata.tensors() {
        let Some(element) = ElementType::from_dtype(info.dtype) else { continue };
        let Some((rows, width)) = two_dimensions(&info.shape) else { continue };
        // A tensor without rows may have any width, and a row is read into a buffer.
        ensure!(
            width.checked_mul(element.bytes()).is_some_and(|row| row as u64 <= len),
            "tensor {name}: its rows are longer than the file"
        );
        let offset = data + info.data_offsets.0 as u64;
        tensors.insert(name, TensorEntry { element, rows, width, offset });
    }
    Ok(tensors)
}

/// Rows and width of a shape; `None` for more than two dimensions other than leading ones of 1.
fn two_dimensions(shape: &[usize]) -> Option<(usize, usize)> {
    let (leading, last) = shape.split_at(shape.len().saturating_sub(2));
    let dimensions = match last {
        [rows, width] => (*rows, *width),
        [width] => (1, *width),
        _ => return None,
    };
    leading.iter().all(|n| *n == 1).then_some(dimensions)
}

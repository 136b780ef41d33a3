//! A published checkpoint, read in place: what it says of itself and where each tensor's bytes are.

mod embedded;
mod folders;
pub(crate) mod frame;
pub(crate) mod identity;
pub(crate) mod location;
pub(crate) mod packed;
mod quantization;
mod safetensors;
mod scaled;
mod source;

use std::{
    collections::{BTreeSet, HashMap},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

pub use embedded::unpack_embedded;
use folders::Folders;
pub(crate) use frame::digest;
pub use identity::ModelId;
use moeflux_compute::{Bytes, Format, MatrixShape, Scalar};
use packed::Packed;
pub(crate) use quantization::Quantization;
pub(crate) use safetensors::TensorInfo;
pub(crate) use source::{Source, read_at};

use crate::base::{error::Error, system::IO_STACK};

/// Experts that are read at once.
pub(crate) const READ_THREADS: usize = 8;

/// JSON files beyond this are refused.
const MAX_JSON: u64 = 256 << 20;

/// Bytes of a matrix that are read at once.
const PIECE: usize = 4 << 20;

/// Some bytes of some file of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Which file.
    pub file: u32,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub bytes: usize,
}

/// A matrix of weights that lies in a checkpoint: one segment, and more for scales and biases.
#[derive(Clone, Debug)]
pub struct MatrixSource {
    /// Name without `.weight`.
    pub name: String,
    /// Rows, columns, format.
    pub shape: MatrixShape,
    /// Weights, then scales and biases where the format has them.
    pub segments: Vec<Segment>,
}

impl MatrixSource {
    /// Bytes of all its segments.
    pub(crate) fn bytes(&self) -> usize {
        self.segments.iter().map(|s| s.bytes).sum()
    }
}

/// A vector of numbers that lies in a checkpoint.
#[derive(Clone, Debug)]
pub struct VectorSource {
    /// The tensor's name.
    pub name: String,
    /// Numbers.
    pub len: usize,
    /// Their type in the file.
    pub scalar: Scalar,
    /// Where they are.
    pub segment: Segment,
    /// Added to each number: 1 for the norms of checkpoints that store `w` of `1 + w`.
    pub plus: f32,
}

/// One model's folder (or the model in the binary), opened: its JSON files and the places of its tensors.
///
/// Opening reads headers, and of a packed model at most 16 MiB of its dense tensors, whatever the size of the files.
#[derive(Debug)]
pub struct Checkpoint {
    folder: PathBuf,
    mirrors: Vec<PathBuf>,
    config: serde_json::Value,
    quantization: Quantization,
    files: Arc<Vec<Source>>,
    tensors: HashMap<String, TensorInfo>,
    texts: HashMap<&'static str, Vec<u8>>,
    packed: Option<Packed>,
}

/// The small files that are read whole, where they exist.
pub(crate) const TEXTS: [&str; 6] = [
    "config.json",
    "tokenizer.json",
    "tiktoken.model",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
];

impl Checkpoint {
    /// Opens a folder as it was published.
    ///
    /// # Errors
    /// The folder or one of its files is missing, cannot be read, or contradicts itself.
    pub fn open(folder: &Path) -> Result<Self, Error> {
        Self::open_with(folder, &[])
    }

    /// Opens a folder whose files of tensors also lie in other ones, on other disks: in `mirrors`, and in those that its
    /// `mirrors.txt` names, one in a line. Files that are in several folders are copies of each other, and those that the
    /// folder itself lacks are found where they are. Nothing but files of tensors is looked for in mirrors.
    ///
    /// # Errors
    /// As [`Checkpoint::open`]; a mirror cannot be opened or has none of the model's files.
    pub fn open_with(folder: &Path, mirrors: &[PathBuf]) -> Result<Self, Error> {
        let folders = Folders::open(folder, mirrors)?;
        let names = folders.own();
        if !names.contains("config.json") {
            let problem = match names.contains(packed::JOURNAL) {
                true => {
                    "this is a model that is not packed yet: run the same `moeflux pack` again to finish it"
                }
                false => "there is no config.json here: is this the folder of a model?",
            };
            return Err(Error::Checkpoint { path: folder.into(), problem: problem.into() });
        }
        let mut shards = BTreeSet::new();
        let mut expected = HashMap::new();
        if names.contains("model.safetensors.index.json") {
            expected = weight_map(&folder.join("model.safetensors.index.json"))?;
            shards.extend(expected.values().map(String::as_str));
            if let Some(missing) = shards.iter().find(|shard| folders.home(shard).is_none()) {
                let problem = format!(
                    "the index names it, but it is not there: download the shard {missing} again"
                );
                return Err(Error::Checkpoint { path: folder.join(missing), problem });
            }
        } else {
            shards.extend(
                folders.names().filter(|n| n.starts_with("model") && n.ends_with(".safetensors")),
            );
        }
        if shards.is_empty() {
            let problem = "there is no model.safetensors and no model.safetensors.index.json: only the safetensors \
                           format is read";
            return Err(Error::Checkpoint { path: folder.into(), problem: problem.into() });
        }
        let all = shards.iter().copied().chain([packed::EXPERTS]);
        folders.all_have_some(all.clone())?;
        let files = all.filter_map(|name| folders.home(name)).map(|path| Source::open(&path));
        let files = files.collect::<Result<Vec<_>, _>>()?;
        let mut texts = HashMap::new();
        for name in TEXTS {
            if names.contains(name) {
                texts.insert(name, Source::open(&folder.join(name))?.read_all(MAX_JSON)?);
            }
        }
        let mut checkpoint = Self::assemble(folder, files, texts)?;
        for (tensor, shard) in &expected {
            let found =
                checkpoint.tensors.get(tensor).map(|t| checkpoint.files[t.file as usize].path());
            if found.and_then(Path::file_name) != Some(shard.as_ref()) {
                return Err(Error::Tensor {
                    tensor: tensor.clone(),
                    path: folders.home(shard).unwrap_or_else(|| folder.join(shard)),
                    problem: "the index says that it is in this shard, but it is not: download both again"
                        .into(),
                });
            }
        }
        checkpoint.mirrors = folders.into_mirrors();
        Ok(checkpoint)
    }

    fn assemble(
        folder: &Path,
        files: Vec<Source>,
        texts: HashMap<&'static str, Vec<u8>>,
    ) -> Result<Self, Error> {
        let path = folder.join("config.json");
        let config: serde_json::Value = serde_json::from_slice(
            texts.get("config.json").map_or(&[][..], |t| t),
        )
        .map_err(|e| Error::Checkpoint {
            path: path.clone(),
            problem: format!("this is not JSON: {e}; download it again"),
        })?;
        let quantization = Quantization::from_config(&config, &path)?;
        let mut tensors = HashMap::new();
        let mut packed = None;
        for (i, source) in files.iter().enumerate() {
            let index = match source.path().file_name() {
                Some(name) if name == packed::EXPERTS => {
                    packed.insert(Packed::open(source, i as u32)?).tensors(i as u32)
                }
                _ => safetensors::read_index(source, i as u32)?,
            };
            for (name, info) in index {
                if let Some(first) = tensors.insert(name.clone(), info) {
                    let problem = format!(
                        "it is also in {}: remove one of them",
                        files[first.file as usize].path().display()
                    );
                    return Err(Error::Tensor {
                        tensor: name,
                        path: source.path().into(),
                        problem,
                    });
                }
            }
        }
        if let Some(packed) = &packed {
            packed.check_dense(&files)?;
        }
        Ok(Self {
            folder: folder.into(),
            mirrors: Vec::new(),
            config,
            quantization,
            files: Arc::new(files),
            tensors,
            texts,
            packed,
        })
    }

    /// The checkpoint that [`synth::write`](crate::synth::write) would write, without its numbers: it can be
    /// inspected and planned for, not run.
    ///
    /// # Errors
    /// The plan's config has a broken "quantization".
    pub fn planned(plan: &crate::tools::synth::SynthPlan) -> Result<Self, Error> {
        let folder = Path::new("(planned)");
        let quantization = Quantization::from_config(plan.config(), folder)?;
        let mut offset = 0;
        let tensors = plan.tensors().map(|t| {
            let (dtype, shape) =
                (t.dtype.to_owned(), t.shape.iter().map(|n| *n as usize).collect());
            let info = TensorInfo { file: 0, offset, bytes: t.bytes, dtype, shape };
            offset += t.bytes;
            (t.name.to_owned(), info)
        });
        let tensors = tensors.collect();
        Ok(Self {
            folder: folder.into(),
            mirrors: Vec::new(),
            config: plan.config().clone(),
            quantization,
            files: Arc::new(vec![Source::planned(
                "(planned)/model.safetensors",
                plan.total_bytes(),
            )]),
            tensors,
            texts: HashMap::new(),
            packed: None,
        })
    }

    /// The folder, for messages.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Other folders that have some of the files of tensors, or all.
    pub fn mirrors(&self) -> &[PathBuf] {
        &self.mirrors
    }

    /// `config.json`.
    pub fn config(&self) -> &serde_json::Value {
        &self.config
    }

    /// One of the small files, if it is there, with its path for messages: `config.json`,
    /// `tokenizer.json`, `tiktoken.model`, `tokenizer_config.json`, `chat_template.jinja`, `generation_config.json`.
    pub fn text(&self, name: &str) -> Option<(&[u8], PathBuf)> {
        self.texts.get(name).map(|bytes| (bytes.as_slice(), self.folder.join(name)))
    }

    /// The files that hold tensors.
    pub(crate) fn files(&self) -> &Arc<Vec<Source>> {
        &self.files
    }

    /// Bytes of all files that hold tensors.
    pub fn total_bytes(&self) -> u64 {
        self.files.iter().map(Source::len).sum()
    }

    /// Number of files that hold tensors.
    pub fn shards(&self) -> usize {
        self.files.len()
    }

    /// Every tensor, in no order.
    pub(crate) fn tensors(&self) -> impl Iterator<Item = (&str, &TensorInfo)> {
        self.tensors.iter().map(|(name, t)| (name.as_str(), t))
    }

    /// Every tensor's name with its bytes.
    pub(crate) fn tensor_bytes(&self) -> impl Iterator<Item = (&str, u64)> {
        self.tensors().map(|(name, t)| (name, t.bytes))
    }

    /// Whether a tensor of this very name exists.
    pub(crate) fn has(&self, tensor: &str) -> bool {
        self.tensors.contains_key(tensor)
    }

    /// Whether some tensor's name and shape satisfy `test`.
    pub(crate) fn has_shape(&self, test: impl Fn(&str, &[usize]) -> bool) -> bool {
        self.tensors.iter().any(|(name, t)| test(name, &t.shape))
    }

    /// A tensor's place.
    pub(crate) fn tensor(&self, name: &str) -> Result<&TensorInfo, Error> {
        self.tensors.get(name).ok_or_else(|| Error::Tensor {
            tensor: name.into(),
            path: self.folder.clone(),
            problem: "no shard has it: the download is incomplete, or this layout is not supported"
                .into(),
        })
    }

    pub(crate) fn tensor_error(&self, name: &str, problem: impl Into<String>) -> Error {
        let path = match self.tensors.get(name) {
            Some(t) => self.files[t.file as usize].path().into(),
            None => self.folder.clone(),
        };
        Error::Tensor { tensor: name.into(), path, problem: problem.into() }
    }

    /// A vector of `len` numbers; dimensions of one are ignored, so `[C, 1, 4]` and `[C, 4, 1]` are alike.
    pub(crate) fn vector(&self, name: &str, len: usize, plus: f32) -> Result<VectorSource, Error> {
        let t = self.tensor(name)?;
        // Of types that are not known, nobody has checked yet that the product is a number.
        if t.shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d)) != Some(len) {
            return Err(self.tensor_error(
                name,
                format!(
                    "its shape {:?} does not hold the {len} numbers that config.json asks for",
                    t.shape
                ),
            ));
        }
        let scalar = self.scalar(name, t)?;
        Ok(VectorSource { name: name.into(), len, scalar, segment: segment(t), plus })
    }

    fn scalar(&self, name: &str, t: &TensorInfo) -> Result<Scalar, Error> {
        match t.dtype.as_str() {
            "F32" => Ok(Scalar::F32),
            "F16" => Ok(Scalar::F16),
            "BF16" => Ok(Scalar::BF16),
            other => Err(self.tensor_error(
                name,
                format!(
                    "its type {other} is not supported here: F32, F16 and BF16 are, and as weights F8_E4M3 and \
                     those that MLX quantised"
                ),
            )),
        }
    }

    /// The matrix `name` (without `.weight`) of `rows` x `cols`, quantised or not, as its tensors say.
    pub(crate) fn matrix(
        &self,
        name: &str,
        rows: usize,
        cols: usize,
    ) -> Result<MatrixSource, Error> {
        let weight = format!("{name}.weight");
        let stack = self.stack(&Wanted { name, weight: &weight, count: None, rows, cols })?;
        Ok(MatrixSource { name: name.into(), shape: stack.shape, segments: stack.parts })
    }

    /// A stack of `count` matrices of `rows` x `cols` in tensors of three dimensions; segments are those of
    /// the first matrix, and matrix `i` lies `i` times their length further.
    pub(crate) fn stacked(
        &self,
        name: &str,
        count: usize,
        rows: usize,
        cols: usize,
    ) -> Result<Stack, Error> {
        let weight = format!("{name}.weight");
        self.stack(&Wanted { name, weight: &weight, count: Some(count), rows, cols })
    }

    /// A stack of `count` matrices as one matrix of `count * rows` rows.
    pub(crate) fn stacked_rows(
        &self,
        name: &str,
        count: usize,
        rows: usize,
        cols: usize,
    ) -> Result<MatrixSource, Error> {
        let stack = self.stacked(name, count, rows, cols)?;
        let shape = MatrixShape { rows: count * rows, ..stack.shape };
        let whole = |s: Segment| Segment { bytes: s.bytes * count, ..s };
        let segments: Vec<_> = stack.parts.into_iter().map(whole).collect();
        let weight = format!("{name}.weight");
        let parts = shape.parts().map_err(|e| self.tensor_error(&weight, e.to_string()))?;
        if parts.total() != segments.iter().map(|s| s.bytes).sum::<usize>() {
            return Err(
                self.tensor_error(&weight, format!("its {count} matrices do not lie as one"))
            );
        }
        Ok(MatrixSource { name: name.into(), shape, segments })
    }

    /// A matrix of some of the rows of another, in the order of `ranges`, which lie within it.
    pub(crate) fn some_rows(
        &self,
        matrix: &MatrixSource,
        ranges: &[std::ops::Range<usize>],
    ) -> Result<MatrixSource, Error> {
        let MatrixShape { rows, format, .. } = matrix.shape;
        let block = format.block_rows();
        let whole = |n: usize| n.is_multiple_of(block);
        if !ranges
            .iter()
            .all(|range| whole(range.start) && (whole(range.len()) || range.end == rows))
        {
            let weight = format!("{}.weight", matrix.name);
            let problem = format!(
                "its rows are needed in another order, and its blocks of {block} rows are in the way"
            );
            return Err(self.tensor_error(&weight, problem));
        }
        let mut segments = Vec::with_capacity(matrix.segments.len() * ranges.len());
        for (i, part) in matrix.segments.iter().enumerate() {
            // Weights come row by row, scales block by block.
            let unit = if i == 0 { 1 } else { block };
            let bytes = part.bytes / rows.div_ceil(unit);
            segments.extend(ranges.iter().map(|range| Segment {
                offset: part.offset + (range.start / unit * bytes) as u64,
                bytes: range.len().div_ceil(unit) * bytes,
                ..*part
            }));
        }
        let shape =
            MatrixShape { rows: ranges.iter().map(ExactSizeIterator::len).sum(), ..matrix.shape };
        Ok(MatrixSource { name: matrix.name.clone(), shape, segments })
    }

    /// As [`Checkpoint::stacked`], for stacks whose tensor's name has no `.weight` at its end.
    pub(crate) fn stacked_plain(
        &self,
        name: &str,
        count: usize,
        rows: usize,
        cols: usize,
    ) -> Result<Stack, Error> {
        self.stack(&Wanted { name, weight: name, count: Some(count), rows, cols })
    }

    fn stack(&self, wanted: &Wanted<'_>) -> Result<Stack, Error> {
        let &Wanted { name, weight, rows, cols, .. } = wanted;
        let t = self.tensor(weight)?;
        match t.dtype.as_str() {
            "U32" if self.tensor(&format!("{name}.scales"))?.dtype == "U8" => {
                self.microscaled(wanted, t)
            }
            "U32" => self.affine(wanted, t),
            "F8_E4M3" => self.fp8(wanted, t),
            _ => {
                let scalar = self.scalar(weight, t)?;
                self.shaped(weight, t, &wanted.tensor(&[rows, cols]))?;
                self.stack_of(wanted, Format::Plain(scalar), &[t])
            }
        }
    }

    /// MLX affine: `.weight` of packed quants, `.scales` and `.biases`.
    fn affine(&self, wanted: &Wanted<'_>, t: &TensorInfo) -> Result<Stack, Error> {
        let &Wanted { name, weight, rows, cols, .. } = wanted;
        let (scales_name, biases_name) = (format!("{name}.scales"), format!("{name}.biases"));
        let scales = self.tensor(&scales_name)?;
        if !self.has(&biases_name) {
            let problem = "it has scales but no biases, so it is not affine, and its scales are no bytes, so that it \
                           is of no other mode of quantisation that is supported: mxfp4, nvfp4 and mxfp8";
            return Err(self.tensor_error(weight, problem));
        }
        let biases = self.tensor(&biases_name)?;
        let scale = self.scalar(&scales_name, scales)?;
        let packed = t.shape.last().copied().unwrap_or(0);
        let groups = scales.shape.last().copied().unwrap_or(0);
        let misfit = |what: &str| {
            self.tensor_error(
                weight,
                format!(
                    "{what}: weight {:?}, scales {:?}, biases {:?} {}, for {rows} x {cols} as config.json asks",
                    t.shape, scales.shape, biases.shape, biases.dtype
                ),
            )
        };
        // The shapes say it all: a row of `cols` inputs takes `cols * bits / 32` words and `cols / group` scales.
        let bits =
            packed.checked_mul(32).filter(|n| cols > 0 && n.is_multiple_of(cols)).map(|n| n / cols);
        let group = (groups > 0 && cols.is_multiple_of(groups)).then(|| cols / groups);
        let (Some(bits @ 1..=8), Some(group @ 1..=1024)) = (bits, group) else {
            return Err(misfit("the quantised shapes do not fit"));
        };
        if t.shape != wanted.tensor(&[rows, packed])
            || scales.shape != wanted.tensor(&[rows, groups])
            || biases.shape != scales.shape
            || biases.dtype != scales.dtype
        {
            return Err(misfit("the quantised shapes do not fit together"));
        }
        self.quantization.agree(name, "affine", bits, group).map_err(|p| misfit(&p))?;
        let format = Format::Affine { bits: bits as u8, group: group as u16, scale };
        self.stack_of(wanted, format, &[t, scales, biases])
    }

    /// That a tensor has the shape that config.json asks for.
    fn shaped(&self, name: &str, t: &TensorInfo, want: &[usize]) -> Result<(), Error> {
        if t.shape == want {
            return Ok(());
        }
        Err(self.tensor_error(
            name,
            format!("its shape is {:?}, config.json asks for {want:?}", t.shape),
        ))
    }

    /// The wanted matrices, of a format that was found, in tensors whose shapes are theirs.
    fn stack_of(
        &self,
        wanted: &Wanted<'_>,
        format: Format,
        tensors: &[&TensorInfo],
    ) -> Result<Stack, Error> {
        let shape = MatrixShape { rows: wanted.rows, cols: wanted.cols, format };
        shape.parts().map_err(|e| self.tensor_error(wanted.weight, e.to_string()))?;
        let count = wanted.count.unwrap_or(1);
        Ok(Stack { shape, parts: tensors.iter().map(|t| part(t, count)).collect() })
    }

    /// Reads a matrix into memory that a device takes.
    pub(crate) fn read_matrix(&self, m: &MatrixSource) -> Result<Bytes, Error> {
        let mut bytes = Bytes::zeroed(m.bytes()).map_err(Error::at(|| &*m.name))?;
        self.read_matrix_into(m, &mut bytes)?;
        Ok(bytes)
    }

    /// Reads a matrix to memory of its size.
    pub(crate) fn read_matrix_into(&self, m: &MatrixSource, bytes: &mut [u8]) -> Result<(), Error> {
        let mut pieces = Vec::new();
        let mut rest = bytes;
        for s in &m.segments {
            let (now, later) = rest.split_at_mut(s.bytes);
            let all = now.chunks_mut(PIECE).zip((s.offset..).step_by(PIECE));
            pieces.extend(
                all.map(|(part, offset)| (Segment { offset, bytes: part.len(), ..*s }, part)),
            );
            rest = later;
        }
        self.read_pieces(&m.name, pieces)
    }

    /// Reads pieces of a tensor, by several threads where there are many: one alone keeps no disk busy.
    fn read_pieces(&self, name: &str, pieces: Vec<(Segment, &mut [u8])>) -> Result<(), Error> {
        let threads = (pieces.len() / 2).min(READ_THREADS);
        let pieces = Mutex::new(pieces.into_iter());
        let next = || pieces.lock().unwrap_or_else(PoisonError::into_inner).next();
        let work = || {
            while let Some((segment, into)) = next() {
                self.read(name, &segment, into)?;
            }
            Ok(())
        };
        std::thread::scope(|scope| {
            let start =
                |_| std::thread::Builder::new().stack_size(IO_STACK).spawn_scoped(scope, work);
            // A thread that cannot be had leaves its pieces to the others.
            let others: Vec<_> = (1..threads).map_while(|i| start(i).ok()).collect();
            let own = work();
            let failed = || {
                Err(Error::Input(format!("a thread that reads {name} failed; please report this")))
            };
            others
                .into_iter()
                .fold(own, |all, other| all.and(other.join().unwrap_or_else(|_| failed())))
        })
    }

    /// Reads a vector, widened.
    pub(crate) fn read_vector(&self, v: &VectorSource) -> Result<Vec<f32>, Error> {
        let mut bytes = vec![0; v.segment.bytes];
        self.read(&v.name, &v.segment, &mut bytes)?;
        Ok((0..v.len).map(|i| v.scalar.get(&bytes, i) + v.plus).collect())
    }

    /// Reads some bytes of the tensor `name`.
    pub(crate) fn read(&self, name: &str, segment: &Segment, into: &mut [u8]) -> Result<(), Error> {
        let source = &self.files[segment.file as usize];
        source.read_exact_at(into, segment.offset).map_err(Error::file(
            source.path(),
            format!("cannot read tensor {name}; did the file change?"),
        ))
    }
}

/// A matrix, or a stack of `count` of them, that an architecture asks for.
#[derive(Clone, Copy)]
struct Wanted<'a> {
    /// Without `.weight`.
    name: &'a str,
    /// The tensor of the weights.
    weight: &'a str,
    count: Option<usize>,
    rows: usize,
    cols: usize,
}

impl Wanted<'_> {
    /// The shape of a tensor that has `of` for each matrix.
    fn tensor(&self, of: &[usize]) -> Vec<usize> {
        self.count.iter().chain(of).copied().collect()
    }
}

/// Matrices of one shape that lie one after another.
#[derive(Clone, Debug)]
pub(crate) struct Stack {
    pub(crate) shape: MatrixShape,
    /// Segments of the first matrix.
    pub(crate) parts: Vec<Segment>,
}

fn segment(t: &TensorInfo) -> Segment {
    part(t, 1)
}

fn part(t: &TensorInfo, count: usize) -> Segment {
    Segment { file: t.file, offset: t.offset, bytes: (t.bytes / count.max(1) as u64) as usize }
}

/// Reads an index file: tensor name -> shard's file name.
fn weight_map(path: &Path) -> Result<HashMap<String, String>, Error> {
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: HashMap<String, String>,
    }
    let bytes = Source::open(path)?.read_all(MAX_JSON)?;
    let index: Index = serde_json::from_slice(&bytes).map_err(|e| Error::Checkpoint {
        path: path.into(),
        problem: format!("this is not the index of a sharded checkpoint: {e}; download it again"),
    })?;
    for shard in index.weight_map.values() {
        let plain = Path::new(shard).components().count() == 1
            && !shard.contains(['/', '\\'])
            && shard != "..";
        if !plain {
            let problem = format!(
                "it names the shard {shard:?}, which is not a plain file name in this folder"
            );
            return Err(Error::Checkpoint { path: path.into(), problem });
        }
    }
    Ok(index.weight_map)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    /// A checkpoint of one file.
    fn of(bytes: &'static [u8]) -> Checkpoint {
        Checkpoint {
            mirrors: Vec::new(),
            folder: PathBuf::new(),
            config: serde_json::Value::Null,
            quantization: Quantization::default(),
            files: Arc::new(vec![Source::binary("weights", bytes)]),
            tensors: HashMap::new(),
            texts: HashMap::new(),
            packed: None,
        }
    }

    #[test]
    fn a_large_matrix_is_put_together_from_pieces() {
        let all: Vec<u8> =
            (0..5 * PIECE + 777).map(|i| (i % 251) as u8 ^ (i / PIECE) as u8).collect();
        let (all, len): (&'static [u8], _) = (all.leak(), 4 * PIECE + 5);
        let segments = vec![
            Segment { file: 0, offset: 700, bytes: len },
            Segment { file: 0, offset: 3, bytes: 11 },
            Segment { file: 0, offset: 1000, bytes: PIECE },
        ];
        let shape = MatrixShape { rows: 1, cols: len, format: Format::Plain(Scalar::F32) };
        let matrix = MatrixSource { name: "w".into(), shape, segments };
        let expected = [&all[700..700 + len], &all[3..14], &all[1000..1000 + PIECE]].concat();
        assert!(of(all).read_matrix(&matrix).unwrap()[..] == expected[..]);
        // One piece that is not there fails all of it.
        let short = of(&all[..3 * PIECE]).read_matrix(&matrix).unwrap_err();
        assert!(short.to_string().contains("tensor w"), "{short}");
    }
}

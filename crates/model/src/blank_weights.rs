//! Weights that were probably never written: holes in files, and blocks of zeros.
//!
//! An interrupted download or copy may have the right length and no data in between. Zeros may also
//! be right, so these are notes. A file that ends with zeros is an error, where no model has them.

use std::fs::File;

use moeflux_base::Error;

use super::blueprint::{Blueprint, LayerExperts};
use crate::checkpoint::{
    Checkpoint, DataFile, Segment, TensorInfo, location::ShardLocation, tensor_at,
};

/// Bytes of a sample.
const SAMPLE: usize = 64 << 10;
/// Samples of a model, spread evenly over its experts and projections.
const SAMPLES: u64 = 64;
/// Maximum holes of a file that are looked at.
const MAX_HOLES: usize = 4096;

/// Minimum bytes of zeros at the end of a file that are looked at.
const TAIL: u64 = 1 << 20;
/// Bytes of such a tail of which the first is looked for.
const MAX_TAIL: u64 = 1 << 30;
/// Bytes at the end of a tensor or a row that may be zeros by chance.
const CHANCE: u64 = 64;
/// Parts of the names of routed experts, attention and norms: trained ones are never all zeros.
const TRAINED: [&str; 4] = ["exp", "att", "norm", "mixer"];
/// Parts of the names of embeddings and heads. Rows of tokens that do not exist are often zeros.
const ROWS_OF_TOKENS: [&str; 5] = ["embed", "embd", "wte", "output", "head"];

/// Checks that no file ends with zeros in place of weights, as an interrupted download or copy
/// leaves them in a file of the right length.
///
/// # Errors
/// At least 1 MiB of zeros are all of an expert's tensor, of one of attention or of a norm, or
/// begin in the middle of a tensor, but not at a row of the embedding or the head.
pub fn check_tails(checkpoint: &Checkpoint) -> Result<(), Error> {
    let mut tensors: Vec<_> = checkpoint.tensors().collect();
    tensors.sort_by_key(|(_, tensor)| (tensor.file, tensor.offset));
    for tensors in tensors.chunk_by(|(_, a), (_, b)| a.file == b.file) {
        let file = tensors.first().and_then(|(_, t)| checkpoint.files().get(t.file as usize));
        if let Some(file) = file.filter(|file| file.file().is_some()) {
            check_tail(file, tensors)?;
        }
    }
    Ok(())
}

fn check_tail(file: &DataFile, tensors: &[(&str, &TensorInfo)]) -> Result<(), Error> {
    let end = tensors.last().map_or(0, |(_, tensor)| tensor.offset + tensor.bytes);
    let start = zeros_before(file, end);
    if end - start < TAIL {
        return Ok(());
    }
    let tail = tensors.iter().filter(|(_, t)| t.bytes > 0 && t.offset + t.bytes > start);
    let (whole, cut): (Vec<_>, Vec<_>) = tail.partition(|(_, tensor)| tensor.offset >= start);
    let is_bias = |name: &str| name.ends_with("bias") || name.ends_with("biases");
    let is_any = |name: &str, parts: &[&str]| parts.iter().any(|part| name.contains(part));
    let is_missing = |name: &str| is_any(name, &TRAINED) && !is_bias(name);
    let is_cut = |(name, tensor): &&&(&str, &TensorInfo)| {
        let rows = tensor.shape.first().copied().unwrap_or(1).max(1) as u64;
        let row = match is_any(name, &ROWS_OF_TOKENS) && !is_any(name, &TRAINED) {
            true => (tensor.bytes / rows).max(1),
            false => tensor.bytes,
        };
        let within = (start - tensor.offset) % row;
        !is_bias(name) && within > 0 && row - within > CHANCE
    };
    let cut = cut.iter().find(is_cut).map(|(name, _)| *name);
    if cut.is_none() && !whole.iter().any(|(name, _)| is_missing(name)) {
        return Ok(());
    }
    let mut parts: Vec<String> = cut.map(|name| format!("the end of {name}")).into_iter().collect();
    let names: Vec<&str> = whole.iter().map(|(name, _)| *name).take(2).collect();
    parts.extend(match (whole.len(), names.join(", ")) {
        (0, _) => None,
        (1 | 2, names) => Some(format!("all of {names}")),
        (count, names) => Some(format!("all of {names} and {} more tensors", count - 2)),
    });
    let parts = parts.join(" and ");
    Err(Error::Checkpoint {
        path: file.path().into(),
        problem: format!(
            "expected weights, got zeros from byte {start} to byte {end}: {parts}; the download or \
             copy did not end: get the file again"
        ),
    })
}

/// Start of the zeros that end at `end`. A file that cannot be read is reported when its weights
/// are.
fn zeros_before(file: &DataFile, end: u64) -> u64 {
    let (mut start, mut buffer) = (end, vec![0; 4 << 10]);
    while start > end.saturating_sub(MAX_TAIL) {
        let len = (buffer.len() as u64).min(start) as usize;
        let block = &mut buffer[..len];
        if file.read_exact_at(block, start - len as u64).is_err() {
            return end;
        }
        if let Some(last) = block.iter().rposition(|byte| *byte != 0) {
            return start - (len - 1 - last) as u64;
        }
        start -= len as u64;
        buffer.resize(TAIL as usize, 0);
    }
    start
}

/// Notes on weights of a checkpoint that were probably never written, for users: at most one on
/// holes and one on zeros. Reads up to 4 MiB.
pub fn blank_weights(checkpoint: &Checkpoint, blueprint: &Blueprint) -> Vec<String> {
    let mut notes = Vec::new();
    let mut holes = checkpoint.files().iter().enumerate().filter_map(|(i, file)| {
        let hole = holes(file).into_iter().find_map(|hole| {
            let mut tensors = checkpoint.tensors().filter(|(_, t)| t.file as usize == i);
            tensors.find(|(_, tensor)| hole.is_inside(tensor)).map(|(name, _)| (name, hole))
        });
        hole.map(|(name, hole)| (file, name, hole))
    });
    if let Some((file, name, hole)) = holes.next() {
        notes.push(format!(
            "{}: bytes {} to {} were never written, within tensor {name}: if the download was \
             interrupted, download the file again{}",
            file.path().display(),
            hole.start,
            hole.end,
            match holes.count() {
                0 => String::new(),
                more => format!("; {more} more files have such holes"),
            }
        ));
    }
    if let (true, Some((file, offset))) = (notes.is_empty(), blank_block(checkpoint, blueprint)) {
        let name = tensor_at(file, offset);
        notes.push(format!(
            "{}: 64 KiB at byte {offset}{} are zeros, which weights rarely are: if the download \
             was interrupted, download the file again",
            file.path().display(),
            name.map_or_else(String::new, |name| format!(", in tensor {name},"))
        ));
    }
    notes
}

/// Bytes of a file that were never written.
#[derive(Clone, Copy)]
struct Hole {
    start: u64,
    end: u64,
}

impl Hole {
    /// Whether some of it is in a matrix.
    fn is_inside(self, tensor: &TensorInfo) -> bool {
        tensor.shape.len() > 1
            && self.start < tensor.offset + tensor.bytes
            && tensor.offset < self.end
    }
}

fn holes(file: &DataFile) -> Vec<Hole> {
    file.file().map_or_else(Vec::new, |open| holes_of(open, file.len()))
}

/// Holes of an open file, where the system tells. The cursor moves; reads are positional.
#[cfg(any(target_os = "linux", target_vendor = "apple"))]
fn holes_of(file: &File, len: u64) -> Vec<Hole> {
    use rustix::fs::{SeekFrom, seek};

    let (mut holes, mut position) = (Vec::new(), 0);
    while holes.len() < MAX_HOLES {
        // The end of a file counts as a hole.
        let Ok(start) = seek(file, SeekFrom::Hole(position)) else { break };
        if start >= len {
            break;
        }
        // After the last data there is none.
        let end = seek(file, SeekFrom::Data(start)).unwrap_or(len);
        holes.push(Hole { start, end });
        position = end;
    }
    holes
}

#[cfg(not(any(target_os = "linux", target_vendor = "apple")))]
fn holes_of(_: &File, _: u64) -> Vec<Hole> {
    const { assert!(MAX_HOLES > 0) };
    Vec::new()
}

/// Segments of the experts' weights, without scales and biases, which are much smaller. Stacked
/// experts are one.
fn expert_segments(experts: &LayerExperts) -> Vec<Segment> {
    let largest = experts.shards.iter().map(|shard| shard.segment(0).bytes).max().unwrap_or(0);
    let weights = experts.shards.iter().filter(|shard| shard.segment(0).bytes * 4 >= largest);
    let segments = weights.flat_map(|shard| match shard {
        ShardLocation::Stacked { first, stride } if *stride == first.bytes as u64 => {
            vec![Segment { bytes: first.bytes * experts.count, ..*first }]
        }
        shard => (0..experts.count).map(|expert| shard.segment(expert)).collect(),
    });
    segments.collect()
}

/// The first sampled block of an expert or a projection that is all zeros.
fn blank_block<'a>(
    checkpoint: &'a Checkpoint,
    blueprint: &Blueprint,
) -> Option<(&'a DataFile, u64)> {
    let mut segments: Vec<Segment> = Vec::new();
    for layer in &blueprint.layers {
        segments.extend(layer.matrices().iter().filter_map(|m| m.segments.first()));
        if let Some(moe) = layer.moe() {
            segments.extend(expert_segments(&moe.experts));
        }
    }
    segments.retain(|segment| segment.bytes >= SAMPLE);
    let blocks = |segment: &Segment| (segment.bytes / SAMPLE) as u64;
    let total: u64 = segments.iter().map(blocks).sum();
    let mut buffer = vec![0; SAMPLE];
    // Number of blocks before the segment.
    let (mut before, mut segments) = (0, segments.into_iter().peekable());
    let samples = SAMPLES.min(total);
    (0..samples).find_map(|i| {
        let block = (2 * i + 1) * total / (2 * samples);
        while let Some(segment) = segments.next_if(|s| before + blocks(s) <= block) {
            before += blocks(&segment);
        }
        let segment = segments.peek()?;
        let file = &checkpoint.files()[segment.file as usize];
        let offset = segment.offset + (block - before) * SAMPLE as u64;
        // A file that cannot be read is reported when its weights are.
        file.file()?;
        file.read_exact_at(&mut buffer, offset).ok()?;
        buffer.iter().all(|byte| *byte == 0).then_some((file, offset))
    })
}

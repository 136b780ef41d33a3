//! Pack job: the header of the packed file, and the source bytes of each piece of the packed files.

use std::{collections::BTreeSet, sync::Arc};

use moeflux_base::{Error, seam::MAX_TOKENIZER};
use moeflux_model::{
    blueprint::Blueprint,
    checkpoint::{Checkpoint, Segment},
    seam::{
        ALIGN, DENSE, DENSE_PART, DenseFile, Digests, ExpertTensor, Origin, PackedExtent,
        PackedHeader, PackedLayer, PackedPart, SmallFile, TEXT_FILES, describe_matrices, digest,
        layout_digest,
    },
};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use crate::experts::source::ExpertSource;

/// A checkpoint to pack, with the layout of the packed files.
pub(super) struct PackJob<'a> {
    checkpoint: &'a Checkpoint,
    experts: ExpertSource,
    /// Header with zeros for the digests of pieces.
    pub(super) header: PackedHeader,
    /// Offset of the first record in the file of experts.
    pub(super) data: u64,
    dense: Vec<DenseTensor>,
    dense_header: Vec<u8>,
    tokenizer: Option<Vec<u8>>,
}

/// A tensor in the file of dense tensors.
struct DenseTensor {
    /// Offset in that file.
    start: u64,
    name: String,
    segment: Segment,
}

impl<'a> PackJob<'a> {
    /// # Errors
    /// The checkpoint is already packed, has no experts, or is not supported.
    pub(super) fn new(checkpoint: &'a Checkpoint) -> Result<Self, Error> {
        let bad = |problem: &str| Error::Checkpoint {
            path: checkpoint.folder().into(),
            problem: problem.into(),
        };
        if checkpoint.is_packed() {
            return Err(bad("this model is packed already: use it as it is, or copy the folder"));
        }
        let blueprint = Blueprint::for_checkpoint(checkpoint)?;
        if blueprint.experts() == 0 {
            return Err(bad(
                "this model has no routed experts, so there is nothing to pack: use it as it is",
            ));
        }
        let names = checkpoint.expert_tensors(&blueprint)?;
        let tensors = names
            .iter()
            .map(|name| {
                let t = checkpoint.tensor(name)?;
                Ok(ExpertTensor {
                    name: (*name).into(),
                    dtype: t.dtype.clone(),
                    shape: t.shape.clone(),
                })
            })
            .collect::<Result<Vec<_>, Error>>()?;
        let bytes: u64 = names.iter().map(|n| checkpoint.tensor(n).map_or(0, |t| t.bytes)).sum();
        if bytes != blueprint.experts_bytes() {
            return Err(bad(
                "its experts are in tensors that contain other data too: this layout cannot be packed",
            ));
        }
        let layers = layers(&Blueprint::for_checkpoint(&checkpoint.relocated(&tensors))?);
        let (dense_header, dense) = dense(checkpoint, &names);
        let dense_bytes =
            dense.last().map_or(dense_header.len() as u64, |r| r.start + r.segment.bytes as u64);
        let tokenizer = checkpoint.tokenizer_file().map(|file| file.read_all(MAX_TOKENIZER));
        let tokenizer = tokenizer.transpose()?;
        let files = small_files(checkpoint, tokenizer.as_deref())
            .map(|(name, bytes)| SmallFile {
                name: name.into(),
                bytes: bytes.len() as u64,
                digest: Digests(vec![digest(bytes)]),
            })
            .collect();
        let header = PackedHeader {
            architecture: blueprint.model_type.clone(),
            source: origin(checkpoint),
            tensors,
            layers,
            dense: DenseFile {
                bytes: dense_bytes,
                digests: blank(dense_bytes.div_ceil(DENSE_PART)),
            },
            files,
        };
        let data = header.encode()?.len() as u64;
        let experts = blueprint.layers.iter().map(|l| l.moe().map(|m| m.experts.clone())).collect();
        let experts = ExpertSource::new(Arc::clone(checkpoint.files()), experts);
        Ok(Self { checkpoint, experts, header, data, dense, dense_header, tokenizer })
    }

    /// All pieces of the packed files.
    pub(super) fn places(&self) -> Vec<PackedExtent> {
        self.header.extents(self.data)
    }

    /// Size of the file of experts.
    pub(super) fn experts_bytes(&self) -> u64 {
        // A model with experts ends with an expert piece.
        self.places().last().map_or(self.data, |last| last.offset + last.padded_bytes)
    }

    /// The small files: config, tokenizer and others.
    pub(super) fn small_files(&self) -> impl Iterator<Item = (&'static str, &[u8])> {
        small_files(self.checkpoint, self.tokenizer.as_deref())
    }

    /// Hash of the job: the layout, and names, sizes and modification times of the source files. A
    /// journal is only valid for the same key.
    pub(super) fn key(&self) -> Result<u64, Error> {
        let mut key = self.header.encode()?;
        for file in self.checkpoint.files().iter() {
            let modified = std::fs::metadata(file.path()).and_then(|m| m.modified()).ok();
            key.extend(
                format!("{:?} {} {modified:?}\n", file.path().file_name(), file.len()).into_bytes(),
            );
        }
        Ok(digest(&key))
    }

    /// Reads a piece from the source into the first `place.bytes` bytes of `buf`.
    pub(super) fn read_piece(&self, place: &PackedExtent, buf: &mut [u8]) -> Result<(), Error> {
        let buf = &mut buf[..place.bytes as usize];
        match place.part {
            PackedPart::Expert { entry, expert } => {
                self.experts.read_file(self.header.layers[entry].layer, expert, buf)
            }
            PackedPart::Dense(_) => self.read_dense(place.offset, buf),
        }
    }

    fn read_dense(&self, offset: u64, buf: &mut [u8]) -> Result<(), Error> {
        let end = offset + buf.len() as u64;
        let head = self.dense_header.get(offset as usize..).unwrap_or_default();
        let head = &head[..head.len().min(buf.len())];
        buf[..head.len()].copy_from_slice(head);
        let first = self.dense.partition_point(|r| r.start + r.segment.bytes as u64 <= offset);
        for run in self.dense[first..].iter().take_while(|r| r.start < end) {
            let (start, stop) =
                (run.start.max(offset), (run.start + run.segment.bytes as u64).min(end));
            let part = Segment {
                offset: run.segment.offset + (start - run.start),
                bytes: (stop - start) as usize,
                ..run.segment
            };
            self.checkpoint.read(
                &run.name,
                &part,
                &mut buf[(start - offset) as usize..(stop - offset) as usize],
            )?;
        }
        Ok(())
    }
}

fn blank(count: u64) -> Digests {
    Digests(vec![0; count as usize])
}

/// Header entries for the layers of a blueprint whose experts are located in the packed file.
fn layers(blueprint: &Blueprint) -> Vec<PackedLayer> {
    let layer = |(layer, moe): (usize, &moeflux_model::blueprint::MoeBlueprint)| PackedLayer {
        layer,
        experts: moe.experts.count,
        bytes: moe.experts.file_bytes as u64,
        matrices: describe_matrices(&moe.experts.shape),
        order: Digests(vec![layout_digest(&moe.experts)]),
        digests: blank(moe.experts.count as u64),
    };
    blueprint.moe_layers().map(layer).collect()
}

/// Header of the file of dense tensors, and the tensors after it in the order of the source.
fn dense(checkpoint: &Checkpoint, experts: &BTreeSet<&str>) -> (Vec<u8>, Vec<DenseTensor>) {
    let mut tensors: Vec<_> =
        checkpoint.tensors().filter(|(name, _)| !experts.contains(name)).collect();
    tensors.sort_by_key(|(name, t)| (t.file, t.offset, *name));
    let (mut map, mut offset) = (Map::new(), 0);
    for (name, t) in &tensors {
        let end = offset + t.bytes;
        map.insert(
            (*name).into(),
            json!({ "dtype": t.dtype, "shape": t.shape, "data_offsets": [offset, end] }),
        );
        offset = end;
    }
    let mut json = Value::Object(map).to_string().into_bytes();
    // Tensors start at a multiple of the alignment; JSON may end in spaces.
    let begin = (8 + json.len() as u64).next_multiple_of(ALIGN);
    json.resize(begin as usize - 8, b' ');
    let mut start = begin;
    let run = |(name, t): (&str, &moeflux_model::seam::TensorInfo)| {
        let segment = Segment { file: t.file, offset: t.offset, bytes: t.bytes as usize };
        let run = DenseTensor { start, name: name.into(), segment };
        start += t.bytes;
        run
    };
    let runs = tensors.into_iter().map(run).collect();
    ([(json.len() as u64).to_le_bytes().to_vec(), json].concat(), runs)
}

/// Names and contents of the small files, `tokenizer.json` among them.
fn small_files<'a>(
    checkpoint: &'a Checkpoint,
    tokenizer: Option<&'a [u8]>,
) -> impl Iterator<Item = (&'static str, &'a [u8])> {
    TEXT_FILES.into_iter().filter_map(move |name| match name {
        "tokenizer.json" => Some((name, tokenizer?)),
        _ => Some((name, checkpoint.text_file(name)?.bytes)),
    })
}

fn origin(checkpoint: &Checkpoint) -> Origin {
    let hex =
        |bytes: &[u8]| Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect::<String>();
    Origin {
        config: hex(checkpoint.text_file("config.json").map_or(&[][..], |file| file.bytes)),
        tensors: hex(checkpoint.listing().as_bytes()),
    }
}

/// Name of the file that contains a piece.
pub(super) fn file_name(piece: PackedPart) -> &'static str {
    match piece {
        PackedPart::Dense(_) => DENSE,
        PackedPart::Expert { .. } => moeflux_model::seam::EXPERTS,
    }
}

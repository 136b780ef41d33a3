//! The file of experts of a packed model, `experts.moeflux`: its format, and opening it.
//!
//! A packed folder is used like any other: the small files are those of the source, `model.safetensors` holds its dense
//! tensors byte for byte, and `experts.moeflux` each expert as one record, just as it lies in a slot. Version 1 of the
//! file, all numbers little-endian:
//!
//! | at | what |
//! |---|---|
//! | 0 | `MOEFLUXE` |
//! | 8 | u32: version |
//! | 12 | u32: alignment, 4096 |
//! | 16 | u64: bytes of the header |
//! | 24 | u64: digest of bytes 0 to 24 and of the header |
//! | 32 | the header, JSON: [`Header`] |
//! | next multiple of 4096 | records: the layers in the header's order, the experts of each by number, each record filled up with zeros to a multiple of 4096 |
//!
//! and there the file ends. A digest is XXH3 with 64 bits and seed 0; that of a record is of its expert's bytes, without
//! the zeros. In the header a list of digests is one text, 16 hexadecimal digits for each. `tensors` are the source's
//! tensors that the records were made of: with them an architecture finds its experts as it does in the source, and
//! `order` is the digest of which bytes of them make up each expert, so that a version which orders a slot in another way
//! refuses the file.
//!
//! The file comes from strangers: every length is checked against the file before it is used, and where a record lies is
//! computed, not read.

mod header;
#[cfg(test)]
mod tests;

use std::{collections::BTreeSet, sync::Arc};

pub(crate) use header::{
    DENSE, DenseFile, Digests, EXPERTS, ExpertTensor, Header, JOURNAL, Origin, PIECE, PackedLayer,
    Piece, Place, SmallFile,
};
use moeflux_compute::ExpertShape;

use super::{Checkpoint, Source, TensorInfo, digest, safetensors};
use crate::base::error::Error;

/// Where tensors of experts are said to lie: beyond any file, so that nothing can be read from there.
pub(crate) const NOWHERE: u64 = 1 << 62;

/// What a header says of the matrices of an expert.
pub(crate) fn matrices(shape: &ExpertShape) -> [String; 3] {
    [shape.gate, shape.up, shape.down].map(|m| format!("{} x {}, {}", m.rows, m.cols, m.format))
}

/// An opened file of experts.
#[derive(Debug)]
pub(crate) struct Packed {
    /// Index of the file in the checkpoint.
    pub(crate) file: u32,
    pub(crate) header: Header,
    /// Offset of the first record.
    pub(crate) data: u64,
}

impl Packed {
    pub(super) fn open(source: &Source, file: u32) -> Result<Self, Error> {
        let (header, data) = Header::read(source)?;
        Ok(Self { file, header, data })
    }

    /// Checks that of the checkpoint's files the one of dense tensors is that which was packed with these experts, by its length
    /// and some of its pieces.
    ///
    /// # Errors
    /// It is not, or cannot be read.
    pub(super) fn check_dense(&self, files: &[Source]) -> Result<(), Error> {
        let experts = files[self.file as usize].path();
        let foreign = |what: String| Error::Checkpoint {
            path: experts.into(),
            problem: format!(
                "{what} is not the {DENSE} that was packed with it: these files are of different models, or one is \
                 damaged; pack the model again, or copy both files again from one folder"
            ),
        };
        let dense = files.iter().find(|f| f.path().file_name().is_some_and(|name| name == DENSE));
        let dense = dense.ok_or_else(|| foreign("what lies beside it".into()))?;
        let packed = &self.header.dense;
        let mut same = dense.len() == packed.bytes;
        let count = packed.digests.0.len();
        for i in BTreeSet::from([0, count / 3, count * 2 / 3, count.saturating_sub(1)]) {
            let Some(wanted) = packed.digests.0.get(i).filter(|_| same) else { break };
            let at = i as u64 * PIECE;
            let mut piece = vec![0; PIECE.min(packed.bytes - at) as usize];
            let read = dense.read_exact_at(&mut piece, at);
            read.map_err(Error::file(dense.path(), "cannot read the file"))?;
            same = digest(&piece) == *wanted;
        }
        if same { Ok(()) } else { Err(foreign(dense.path().display().to_string())) }
    }

    /// The tensors of the experts.
    pub(super) fn tensors(&self, file: u32) -> Vec<(String, TensorInfo)> {
        virtual_tensors(&self.header.tensors, file)
    }
}

/// Tensors as if they lay one after another, where no file reaches.
fn virtual_tensors(tensors: &[ExpertTensor], file: u32) -> Vec<(String, TensorInfo)> {
    let mut offset = NOWHERE;
    let info = |t: &ExpertTensor| {
        let bytes = safetensors::size(&t.dtype, &t.shape).unwrap_or(0);
        let info =
            TensorInfo { file, offset, bytes, dtype: t.dtype.clone(), shape: t.shape.clone() };
        offset += bytes;
        (t.name.clone(), info)
    };
    tensors.iter().map(info).collect()
}

impl Checkpoint {
    /// Whether `moeflux pack` wrote it.
    pub fn is_packed(&self) -> bool {
        self.packed.is_some()
    }

    /// Index of the file of packed experts, if there is one.
    pub(crate) fn packed_file(&self) -> Option<u32> {
        Some(self.packed.as_ref()?.file)
    }

    /// The opened file of packed experts, if there is one.
    pub(crate) fn packed(&self) -> Option<&Packed> {
        self.packed.as_ref()
    }

    /// The same with some tensors where a packed file has them.
    pub(crate) fn relocated(&self, tensors: &[ExpertTensor]) -> Self {
        let mut all = self.tensors.clone();
        all.extend(virtual_tensors(tensors, 0));
        Self {
            folder: self.folder.clone(),
            mirrors: Vec::new(),
            config: self.config.clone(),
            quantization: self.quantization.clone(),
            files: Arc::clone(&self.files),
            tensors: all,
            texts: Default::default(),
            packed: None,
        }
    }
}

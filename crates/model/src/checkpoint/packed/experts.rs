//! Experts of a packed copy.

use std::{collections::BTreeSet, sync::Arc};

use moeflux_base::Error;
use moeflux_ops::ExpertShape;

use super::{
    super::{
        data_file::DataFile,
        folder::{Checkpoint, Findings},
        frame::digest,
        location::TensorInfo,
        safetensors,
    },
    header::{DENSE, DENSE_PART, ExpertTensor, PackedHeader},
};

/// Offset of the virtual tensors of packed experts. It is beyond the end of any file, so reads
/// fail.
pub(crate) const VIRTUAL_OFFSET: u64 = 1 << 62;

/// Description of an expert's matrices in slot order, for the header.
pub fn describe_matrices(shape: &ExpertShape) -> Vec<String> {
    shape.matrices().map(|m| format!("{} x {}, {}", m.rows, m.cols, m.format)).collect()
}

/// An opened file of packed experts.
#[derive(Debug)]
pub(crate) struct PackedExperts {
    /// Index of the file in the checkpoint.
    pub(crate) file: u32,
    pub(crate) header: PackedHeader,
    /// Offset of the first record.
    pub(crate) data: u64,
}

impl PackedExperts {
    pub(in crate::checkpoint) fn open(file: &DataFile, index: u32) -> Result<Self, Error> {
        let (header, data) = PackedHeader::read(file)?;
        Ok(Self { file: index, header, data })
    }

    /// Checks that the checkpoint's dense tensors were packed together with these experts, by
    /// length and samples of their file.
    ///
    /// # Errors
    /// They were not, or the file cannot be read.
    pub(in crate::checkpoint) fn check_dense(&self, files: &[DataFile]) -> Result<(), Error> {
        let experts = files[self.file as usize].path();
        let foreign = |what: String| Error::Checkpoint {
            path: experts.into(),
            problem: format!(
                "{what} is not the {DENSE} that was packed with it: these files are of different \
                 models, or one is damaged; pack the model again, or copy both files again from \
                 one folder"
            ),
        };
        let dense = files.iter().find(|f| f.path().file_name().is_some_and(|name| name == DENSE));
        let dense = dense.ok_or_else(|| foreign("the file beside it".into()))?;
        let packed = &self.header.dense;
        let mut same = dense.len() == packed.bytes;
        let count = packed.digests.0.len();
        for i in BTreeSet::from([0, count / 3, count * 2 / 3, count.saturating_sub(1)]) {
            let Some(expected) = packed.digests.0.get(i).filter(|_| same) else { break };
            let offset = i as u64 * DENSE_PART;
            let mut part = vec![0; DENSE_PART.min(packed.bytes - offset) as usize];
            let read = dense.read_exact_at(&mut part, offset);
            read.map_err(Error::file(dense.path(), "cannot read the file"))?;
            same = digest(&part) == *expected;
        }
        if same { Ok(()) } else { Err(foreign(dense.path().display().to_string())) }
    }

    /// Virtual tensors of the experts, in file `file` of the checkpoint.
    pub(in crate::checkpoint) fn tensors(&self, file: u32) -> Vec<(String, TensorInfo)> {
        virtual_tensors(&self.header.tensors, file)
    }
}

/// Contiguous locations for tensors that are not stored as such, from [`VIRTUAL_OFFSET`] on.
fn virtual_tensors(tensors: &[ExpertTensor], file: u32) -> Vec<(String, TensorInfo)> {
    let mut offset = VIRTUAL_OFFSET;
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
    /// Whether this is a packed model, written by `moeflux pack`.
    pub fn is_packed(&self) -> bool {
        self.packed.is_some()
    }

    /// Index of the file of packed experts, if any.
    pub(crate) fn packed_file(&self) -> Option<u32> {
        Some(self.packed.as_ref()?.file)
    }

    /// The opened file of packed experts, if any.
    pub(crate) fn packed(&self) -> Option<&PackedExperts> {
        self.packed.as_ref()
    }

    /// A copy in which `tensors` have the virtual locations that they get in a packed file.
    #[doc(hidden)]
    pub fn relocated(&self, tensors: &[ExpertTensor]) -> Self {
        let mut all = self.tensors.clone();
        all.extend(virtual_tensors(tensors, 0));
        Self {
            folder: self.folder.clone(),
            mirrors: Vec::new(),
            config: self.config.clone(),
            quantization: self.quantization.clone(),
            files: Arc::clone(&self.files),
            changes: self.changes,
            tensors: all,
            text_files: Default::default(),
            tokenizer: None,
            packed: None,
            gguf: self.gguf.clone(),
            findings: Findings::default(),
            rope_scaling: self.rope_scaling,
            drafter: None,
        }
    }
}

//! Reading of dense weights: positional reads of matrices and vectors, large ones by several
//! threads.

use std::sync::{Mutex, PoisonError};

use moeflux_base::{Error, seam::IO_STACK};
use moeflux_ops::{Bytes, MatrixOrders};

use super::{
    data_file::DataFile,
    folder::Checkpoint,
    location::{MatrixSource, Segment, VectorSource},
};

/// Threads that read weights concurrently.
pub const READ_THREADS: usize = 8;

/// Bytes of a matrix per read.
const READ_BYTES: usize = 4 << 20;

impl Checkpoint {
    /// Reads a matrix into memory that a device can take over.
    pub(crate) fn read_matrix(&self, m: &MatrixSource) -> Result<Bytes, Error> {
        let mut bytes = Bytes::zeroed(m.memory_bytes()).map_err(Error::at(|| &*m.name))?;
        self.read_matrix_into(m, &mut bytes)?;
        Ok(bytes)
    }

    /// Reads a matrix into `dst`, which has its size in memory.
    #[doc(hidden)]
    pub fn read_matrix_into(&self, m: &MatrixSource, dst: &mut [u8]) -> Result<(), Error> {
        let mut reads = Vec::new();
        let mut rest = &mut *dst;
        for s in &m.segments {
            let (plane, later) = rest.split_at_mut(s.bytes);
            let ranges = plane.chunks_mut(READ_BYTES).zip((s.offset..).step_by(READ_BYTES));
            reads.extend(
                ranges.map(|(dst, offset)| (Segment { offset, bytes: dst.len(), ..*s }, dst)),
            );
            rest = later;
        }
        self.read_segments(&m.name, reads)?;
        m.layout.land(m.shape, dst).map_err(Error::at(|| &*m.name))?;
        let Some(inputs) = &m.order else { return Ok(()) };
        let orders = MatrixOrders { inputs, outputs: &[] };
        orders.apply(m.shape, dst).map_err(Error::at(|| &*m.name))
    }

    /// Reads segments of a tensor. Several threads share them, as one thread does not saturate a
    /// disk.
    fn read_segments(&self, name: &str, reads: Vec<(Segment, &mut [u8])>) -> Result<(), Error> {
        let threads = (reads.len() / 2).min(READ_THREADS);
        let reads = Mutex::new(reads.into_iter());
        let next = || reads.lock().unwrap_or_else(PoisonError::into_inner).next();
        let work = || {
            while let Some((segment, dst)) = next() {
                self.read(name, &segment, dst)?;
            }
            Ok(())
        };
        std::thread::scope(|scope| {
            let start =
                |_| std::thread::Builder::new().stack_size(IO_STACK).spawn_scoped(scope, work);
            // If a thread cannot be started, the others take its share.
            let others: Vec<_> = (1..threads).map_while(|i| start(i).ok()).collect();
            let own = work();
            let failed = || {
                Err(Error::internal(format!(
                    "a thread that reads {name} failed; please report this"
                )))
            };
            others
                .into_iter()
                .fold(own, |all, other| all.and(other.join().unwrap_or_else(|_| failed())))
        })
    }

    /// Reads a vector and widens it to f32.
    #[doc(hidden)]
    pub fn read_vector(&self, v: &VectorSource) -> Result<Vec<f32>, Error> {
        let mut bytes = vec![0; v.segment.bytes];
        self.read(&v.name, &v.segment, &mut bytes)?;
        Ok((0..v.len).map(|i| v.change.apply(v.scalar.get(&bytes, i))).collect())
    }

    /// Reads a segment of the tensor `name`.
    #[doc(hidden)]
    pub fn read(&self, name: &str, segment: &Segment, dst: &mut [u8]) -> Result<(), Error> {
        let file = &self.files[segment.file as usize];
        let error = match file.read_exact_at(dst, segment.offset) {
            Ok(()) => return Ok(()),
            // A disk may fail once.
            Err(error) => match file.read_exact_at(dst, segment.offset) {
                Ok(()) => return Ok(()),
                Err(_) => error,
            },
        };
        if self.read_from_mirror(file, segment, dst) {
            return Ok(());
        }
        Err(Error::file(file.path(), format!("cannot read tensor {name}; did the file change?"))(
            error,
        ))
    }

    /// Reads a segment from the first mirror that has the whole file. Returns whether one has.
    fn read_from_mirror(&self, file: &DataFile, segment: &Segment, dst: &mut [u8]) -> bool {
        let Some(name) = file.path().file_name() else { return false };
        let copies = self.mirrors.iter().map(|folder| folder.join(name));
        let mut copies = copies.filter(|path| path != file.path());
        copies.any(|path| {
            DataFile::open(&path)
                .ok()
                .filter(|copy| copy.len() == file.len())
                .is_some_and(|copy| copy.read_exact_at(dst, segment.offset).is_ok())
        })
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::HashMap, path::PathBuf, sync::Arc};

    use moeflux_ops::{FileLayout, Format, MatrixShape, Scalar};

    use super::{
        super::{folder::Findings, quantization::Quantization, source::SourceChanges},
        *,
    };

    /// A checkpoint of one file with these contents.
    fn single_file(bytes: &'static [u8]) -> Checkpoint {
        Checkpoint {
            mirrors: Vec::new(),
            folder: PathBuf::new(),
            config: serde_json::Value::Null,
            quantization: Quantization::default(),
            files: Arc::new(vec![DataFile::embedded("weights", bytes)]),
            tensors: HashMap::new(),
            changes: SourceChanges::default(),
            text_files: HashMap::new(),
            tokenizer: None,
            packed: None,
            gguf: None,
            findings: Findings::default(),
            rope_scaling: None,
            drafter: None,
        }
    }

    #[test]
    fn a_dense_read_that_fails_is_tried_on_mirrors() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let bytes: Vec<u8> = (0..100).collect();
        for name in ["own", "short", "mirror"] {
            std::fs::create_dir(path(name)).unwrap();
            std::fs::write(path(name).join("weights"), &bytes).unwrap();
        }
        let own = DataFile::open(&path("own").join("weights")).unwrap();
        for name in ["own", "short"] {
            std::fs::write(path(name).join("weights"), &bytes[..50]).unwrap();
        }
        let mut checkpoint = single_file(&[]);
        checkpoint.files = Arc::new(vec![own]);
        let segment = Segment { file: 0, offset: 40, bytes: 20 };
        let mut dst = [0; 20];
        let failed = checkpoint.read("w", &segment, &mut dst).unwrap_err().to_string();
        assert!(failed.contains("own") && failed.contains("tensor w"), "{failed}");
        checkpoint.mirrors = vec![path("missing"), path("short"), path("mirror")];
        checkpoint.read("w", &segment, &mut dst).unwrap();
        assert_eq!(dst, bytes[40..60]);
    }

    #[test]
    fn a_large_matrix_is_assembled_from_several_reads() {
        let all: Vec<u8> =
            (0..5 * READ_BYTES + 777).map(|i| (i % 251) as u8 ^ (i / READ_BYTES) as u8).collect();
        let (all, len): (&'static [u8], _) = (all.leak(), 4 * READ_BYTES + 5);
        let segments = vec![
            Segment { file: 0, offset: 700, bytes: len },
            Segment { file: 0, offset: 3, bytes: 11 },
            Segment { file: 0, offset: 1000, bytes: READ_BYTES },
        ];
        let cols = segments.iter().map(|s| s.bytes).sum::<usize>() / 4;
        let shape = MatrixShape { rows: 1, cols, format: Format::Plain(Scalar::F32) };
        let layout = FileLayout::Planes;
        let matrix = MatrixSource { name: "w".into(), shape, layout, segments, order: None };
        let expected = [&all[700..700 + len], &all[3..14], &all[1000..1000 + READ_BYTES]].concat();
        assert!(single_file(all).read_matrix(&matrix).unwrap()[..] == expected[..]);
        // One missing segment fails the whole read.
        let short = single_file(&all[..3 * READ_BYTES]).read_matrix(&matrix).unwrap_err();
        assert!(short.to_string().contains("tensor w"), "{short}");
    }
}

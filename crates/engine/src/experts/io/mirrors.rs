//! Mirrors: folders on other disks with copies of all or some of the model's files.

use std::path::{Path, PathBuf};

use moeflux_base::{Error, OpenError};
use moeflux_model::seam::{DataFile, EXPERTS, PackedHeader};

/// Bytes of the header compared per read.
const HEADER_READ: u64 = 64 << 10;

/// Samples of weights compared in all files together, spread evenly from a file's first weight to
/// its last. Another training run of the model differs in nearly every sample, and an unfinished
/// copy lacks the last one.
const SAMPLES: usize = 64;
/// Minimum samples per file.
const MIN_SAMPLES: usize = 4;
/// Bytes of a sample.
const SAMPLE_BYTES: u64 = 4 << 10;

/// Opens each folder's copies of the files in `own`; `None` for a missing file, and for a file of
/// `own` that is in the folder itself.
///
/// # Errors
/// A copy has another length, another header, or other weights in a sample.
pub(super) fn open(
    own: &[DataFile],
    folders: &[PathBuf],
) -> Result<Vec<Vec<Option<DataFile>>>, Error> {
    let samples = (SAMPLES / own.len().max(1)).max(MIN_SAMPLES) as u64;
    folders
        .iter()
        .map(|folder| own.iter().map(|file| open_copy(file, folder, samples)).collect())
        .collect()
}

/// Index of the copy whose folder has a file of the model: `1 + i` for `folders[i]`, 0 for the
/// model's own folder.
pub(super) fn home_copy(own: &DataFile, folders: &[PathBuf]) -> usize {
    folders.iter().position(|folder| own.path().parent() == Some(folder)).map_or(0, |i| i + 1)
}

/// Opens a folder's copy of a file, if it has one, and compares its header and `samples` of its
/// weights.
fn open_copy(own: &DataFile, folder: &Path, samples: u64) -> Result<Option<DataFile>, Error> {
    if !own.has_mirrors() {
        return Ok(None);
    }
    let Some(name) = own.path().file_name().filter(|_| own.file().is_some()) else {
        return Err(OpenError::BuiltInHasNoMirrors.into());
    };
    let path = folder.join(name);
    if path == own.path()
        || !path.try_exists().map_err(Error::file(&path, "cannot look for the file"))?
    {
        return Ok(None);
    }
    let copy = DataFile::open(&path)?;
    let differs = |difference: &str| Error::Checkpoint {
        path: copy.path().into(),
        problem: format!(
            "{difference} than {}: files of one name are the same in a mirror; copy it again",
            own.path().display()
        ),
    };
    if copy.len() != own.len() {
        return Err(differs(&format!(
            "{} bytes instead of {}, another length",
            copy.len(),
            own.len()
        )));
    }
    let header = header(own)?.min(own.len());
    let last = own.len().saturating_sub(SAMPLE_BYTES).max(header);
    let header_reads = (0..header)
        .step_by(HEADER_READ as usize)
        .map(|offset| (offset, HEADER_READ.min(header - offset)));
    let stride = (last - header) / (samples - 1);
    let samples = (0..samples - 1)
        .map(|i| header + stride * i)
        .chain([last])
        .map(|offset| (offset, SAMPLE_BYTES.min(own.len() - offset)));
    for (offset, bytes) in header_reads.chain(samples) {
        let [mut a, mut b] = [vec![0; bytes as usize], vec![0; bytes as usize]];
        for (source, buf) in [(own, &mut a), (&copy, &mut b)] {
            source
                .read_exact_at(buf, offset)
                .map_err(Error::file(source.path(), "cannot read the file"))?;
        }
        if let Some(i) = a.iter().zip(&b).position(|(a, b)| a != b) {
            return Err(differs(&match offset < header {
                true => "it holds other tensors or in other places".into(),
                false => {
                    format!("it holds other weights, first seen at byte {},", offset + i as u64)
                }
            }));
        }
    }
    Ok(Some(copy))
}

/// Length of a file's header: the index of its tensors, in a packed file also the digests.
fn header(file: &DataFile) -> Result<u64, Error> {
    if file.path().file_name().is_some_and(|name| name == EXPERTS) {
        return Ok(PackedHeader::read(file)?.1);
    }
    let mut length = [0; 8];
    file.read_exact_at(&mut length, 0).map_err(Error::file(file.path(), "cannot read the file"))?;
    Ok(u64::from_le_bytes(length).saturating_add(8))
}

//! Folders with the same files as the model or some of them, on other disks.

use std::path::{Path, PathBuf};

use crate::{
    base::error::Error,
    checkpoint::{
        DataFile,
        packed::{EXPERTS, PackedHeader},
    },
};

/// Bytes of the header that are compared at once.
const CHUNK: u64 = 64 << 10;

/// So many blocks behind headers are compared, shared out among the files, from the first one of each to its last: another training
/// of the same model has another number in nearly every one, and a copy that was not finished lacks the last.
const BLOCKS: usize = 64;
/// Blocks of a file at least.
const MIN_BLOCKS: usize = 4;
/// Bytes of one.
const BLOCK: u64 = 4 << 10;

/// The files of each folder: those that `own` names, as far as they are there. A file of `own` is not opened once more where it is
/// at home.
///
/// # Errors
/// A folder has one that is of another length, or has another header or other bytes where they are compared.
pub(super) fn open(
    own: &[DataFile],
    folders: &[PathBuf],
) -> Result<Vec<Vec<Option<DataFile>>>, Error> {
    let blocks = (BLOCKS / own.len().max(1)).max(MIN_BLOCKS) as u64;
    folders
        .iter()
        .map(|folder| own.iter().map(|file| mirror((file, blocks), folder)).collect())
        .collect()
}

/// Which folder a file of the model is in: 0 is none of `folders`, and so the model's own.
pub(super) fn home(own: &DataFile, folders: &[PathBuf]) -> usize {
    folders.iter().position(|folder| own.path().parent() == Some(folder)).map_or(0, |i| i + 1)
}

/// Such a file, of which so many blocks are compared.
fn mirror((own, blocks): (&DataFile, u64), folder: &Path) -> Result<Option<DataFile>, Error> {
    let Some(name) = own.path().file_name().filter(|_| own.file().is_some()) else {
        return Err(Error::Input("the model in the program has no mirrors: give --model".into()));
    };
    let path = folder.join(name);
    if path == own.path()
        || !path.try_exists().map_err(Error::file(&path, "cannot look for the file"))?
    {
        return Ok(None);
    }
    let copy = DataFile::open(&path)?;
    let differs = |what: &str| Error::Checkpoint {
        path: copy.path().into(),
        problem: format!(
            "{what} than {}: files of one name are the same in a mirror; copy it again",
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
    let last = own.len().saturating_sub(BLOCK).max(header);
    let chunks = (0..header).step_by(CHUNK as usize).map(|at| (at, CHUNK.min(header - at)));
    let apart = (last - header) / (blocks - 1);
    let blocks = (0..blocks - 1).map(|i| header + apart * i).chain([last]);
    for (at, bytes) in chunks.chain(blocks.map(|at| (at, BLOCK.min(own.len() - at)))) {
        let [mut a, mut b] = [vec![0; bytes as usize], vec![0; bytes as usize]];
        for (source, buf) in [(own, &mut a), (&copy, &mut b)] {
            source
                .read_exact_at(buf, at)
                .map_err(Error::file(source.path(), "cannot read the file"))?;
        }
        if let Some(i) = a.iter().zip(&b).position(|(a, b)| a != b) {
            return Err(differs(&match at < header {
                true => "it holds other tensors or in other places".into(),
                false => format!("it holds other weights, first seen at byte {},", at + i as u64),
            }));
        }
    }
    Ok(Some(copy))
}

/// Bytes at the start of a file that say what is where in it: of packed experts also the digests.
fn header(file: &DataFile) -> Result<u64, Error> {
    if file.path().file_name().is_some_and(|name| name == EXPERTS) {
        return Ok(PackedHeader::read(file)?.1);
    }
    let mut length = [0; 8];
    file.read_exact_at(&mut length, 0).map_err(Error::file(file.path(), "cannot read the file"))?;
    Ok(u64::from_le_bytes(length).saturating_add(8))
}
